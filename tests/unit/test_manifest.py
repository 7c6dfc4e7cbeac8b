from typing import Any

import msgspec
import pytest

from batch.manifest import FIXED, Invocation, begun, checked, closed_at, differences, ended, seconds_so_far
from batch.settings import RunSettings
from tools.errors import UsageProblem


def invocation(backend: str = "local", prefill_sha256: str = "", **settings: Any) -> Invocation:
    return Invocation(
        run_name="r",
        settings={"model": "m", "seed": 0, "image": "", "concurrency": 16, "enabled_toolsets": ("file",), **settings},
        dataset={"path": "d.jsonl", "size": 1, "sha256": "0", "rows": 1},
        versions={"python": "3.11"},
        backend=backend,
        started_at="2026-01-01T00:00:00.000Z",
        host="h",
        prefill_sha256=prefill_sha256,
    )


def test_the_settings_that_may_not_change_exist() -> None:
    assert set(FIXED) <= set(RunSettings.__struct_fields__)


def test_every_difference_is_named() -> None:
    first = begun(None, invocation(), allow_change=False)
    now = invocation(
        "docker", "abc", model="other", seed=1, image="x:1", concurrency=99, prefill_messages_file="moved.json"
    )
    assert differences(first, now) == [
        'model: "m" -> "other"',
        'prefill_messages_file: "" -> "abc"',
        "seed: 0 -> 1",
        'image: "" -> "x:1"',
        'container_backend: "local" -> "docker"',
    ]
    with pytest.raises(UsageProblem, match=r"(?s)model: .*seed: 0 -> 1.*allow_config_change"):
        begun(first, now, allow_change=False)


def test_another_context_window_is_refused() -> None:
    first = begun(None, invocation(context_window=32_000), allow_change=False)
    with pytest.raises(UsageProblem, match=r"context_window: 32000 -> null"):
        begun(first, invocation(context_window=None), allow_change=False)
    assert differences(first, invocation(context_window=32_000)) == []


def test_a_change_that_is_allowed_is_recorded() -> None:
    first = begun(None, invocation(), allow_change=False)
    second = begun(first, invocation(model="other"), allow_change=True)
    assert second["settings"]["model"] == "other"
    assert [entry["changed"] for entry in second["invocations"]] == [[], ['model: "m" -> "other"']]
    assert begun(second, invocation(model="other"), allow_change=False)["invocations"][2]["changed"] == []


def test_lists_and_tuples_are_the_same_setting() -> None:
    first = begun(None, invocation(), allow_change=False)
    first["settings"]["enabled_toolsets"] = ["file"]
    assert differences(first, invocation()) == []


CHANGES: dict[str, Any] = {
    "nothing of a run": {"invocations": []},
    "settings": {"settings": 5},
    "a dataset": {"dataset": "d.jsonl"},
    "a backend": {"backend": None},
    "a time": {"started_at": "yesterday"},
    "a time without a zone": {"started_at": "2026-01-01T00:00:00"},
    "an invocation": {"invocations": [{"end": "finished"}]},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_manifest_of_another_shape_is_none(what: str) -> None:
    good = begun(None, invocation(), allow_change=False)
    assert checked(good) is good
    with pytest.raises(msgspec.ValidationError):
        checked({**good, **CHANGES[what]})


def test_an_invocation_is_closed_with_its_time() -> None:
    first = ended(begun(None, invocation(), allow_change=False), ended_at="later", seconds=1.25, end="budget")
    second = begun(first, invocation(), allow_change=False)
    assert second["started_at"] == "2026-01-01T00:00:00.000Z"
    assert [entry["end"] for entry in second["invocations"]] == ["budget", ""]
    assert seconds_so_far(ended(second, ended_at="later", seconds=2, end="finished")) == 3.25
    assert seconds_so_far(None) == 0


def test_an_invocation_that_could_not_close_itself_lasted_until_it_was_last_seen() -> None:
    first = begun(None, invocation(), allow_change=False)
    closed = closed_at(first, "2026-01-01T00:01:02.500Z")
    assert seconds_so_far(closed) == 62.5
    assert closed["invocations"][0]["end"] == "cut off"
    assert closed_at(closed, "2026-01-01T01:00:00.000Z") == closed
    assert closed_at(first, "") == first
    assert closed_at(first, "2025-12-31T00:00:00.000Z") == first
