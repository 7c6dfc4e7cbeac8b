"""The values that SWE-bench work is made of. A leaf."""

from typing import Any, Literal

from msgspec import Struct

Verdict = Literal["resolved", "unresolved", "empty", "error"]


class Instance(Struct, frozen=True, kw_only=True):
    """One SWE-bench instance. Names as in the published data sets; `FAIL_TO_PASS` and `PASS_TO_PASS` are lists there or
    the JSON text of one, here always tuples. `rest` holds the other fields as they came."""

    instance_id: str
    repo: str = ""  # owner/name
    base_commit: str = ""
    problem_statement: str = ""
    pictures: tuple[str, ...] = ()  # addresses of those that the problem shows
    hints_text: str = ""
    patch: str = ""  # the gold patch
    test_patch: str = ""
    version: str = ""
    environment_setup_commit: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    image: str = ""  # its own, if it names one
    cwd: str = ""  # where its repository is in the image, if it says so
    repo_url: str = ""  # where `--repo_cache` fetches it from; default the public host of `repo`
    test_command: str = ""  # what runs its tests; default by the evaluation
    setup: str = ""  # a command before the work, and before the tests
    rest: dict[str, Any] = {}


class Prediction(Struct, frozen=True, kw_only=True):
    """One line of `all_preds.jsonl`: exactly these keys, `model_patch` "" where there is none."""

    instance_id: str
    model_name_or_path: str
    model_patch: str


class Report(Struct, frozen=True, kw_only=True):
    """How an instance's tests went on the patched checkout; names as the SWE-bench harness reports them."""

    instance_id: str
    verdict: Verdict
    patch_applied: bool = False
    fail_to_pass_passed: tuple[str, ...] = ()
    fail_to_pass_failed: tuple[str, ...] = ()
    pass_to_pass_passed: tuple[str, ...] = ()
    pass_to_pass_failed: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    patch_sha256: str = ""
