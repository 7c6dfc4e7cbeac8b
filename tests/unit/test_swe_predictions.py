"""Files of predictions: written, read back by the harness's own loader, and checked."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from swe.predictions import KEYS, Checked, read_predictions, validate_predictions, write_predictions
from swe.program import invoke
from swe.types import Instance, Prediction
from tests.made_repositories import patch_of
from tools.errors import UsageProblem

PATCH = """\
diff --git a/a.txt b/a.txt
--- a/a.txt
+++ b/a.txt
@@ -1,2 +1,3 @@
 one
 two
+th\u00fcree\u2028\U0001f600\r
"""
ROWS = [
    ("o__r-2", "some/model", PATCH.encode()),
    ("o__r-1", "some/model", b""),
    ("ü", "m", b"x\x0b\x0c\n"),
]
LOADER = """
import json, sys
from swebench.harness.utils import get_predictions_from_file, load_swebench_dataset
loaded = [get_predictions_from_file(path, sys.argv[1], "test") for path in sys.argv[2:]]
print(json.dumps([loaded, [row["instance_id"] for row in load_swebench_dataset(sys.argv[1])]]))
"""


def put(path: Path, *values: Any) -> Path:
    """A file of JSON lines; a text is a line as it is."""
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def prediction(name: str = "o__r-1", patch: str = "") -> dict[str, Any]:
    return {"instance_id": name, "model_name_or_path": "m", "model_patch": patch}


class TestWritten:
    def test_one_line_for_each_with_the_three_keys_in_order(self, tmp_path: Path) -> None:
        (path,) = write_predictions(tmp_path, iter(ROWS), ("jsonl",))
        assert path == tmp_path / "all_preds.jsonl"
        lines = path.read_bytes().decode("ascii").splitlines()
        assert [list(json.loads(line)) for line in lines] == [list(KEYS)] * 3
        assert KEYS == ("instance_id", "model_name_or_path", "model_patch")
        assert [json.loads(line)["instance_id"] for line in lines] == ["o__r-2", "o__r-1", "ü"]
        assert json.loads(lines[0])["model_patch"] == PATCH
        assert '"model_patch": ""' in lines[1]

    def test_a_mapping_beside_them(self, tmp_path: Path) -> None:
        paths = write_predictions(tmp_path, ROWS, ("json",))
        assert [path.name for path in paths] == ["all_preds.jsonl", "preds.json"]
        mapping = json.loads(paths[1].read_bytes())
        assert list(mapping) == ["o__r-2", "o__r-1", "ü"]
        assert mapping["o__r-2"] == json.loads(paths[0].read_text().splitlines()[0])

    def test_no_rows(self, tmp_path: Path) -> None:
        lines, mapping = write_predictions(tmp_path, [], ("jsonl", "json"))
        assert (lines.read_bytes(), json.loads(mapping.read_bytes())) == (b"", {})

    def test_what_was_there_is_replaced_as_a_whole_or_not_at_all(self, tmp_path: Path) -> None:
        write_predictions(tmp_path, ROWS, ("json",))
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

        def broken() -> Iterable[tuple[str, str, bytes]]:
            yield ROWS[1]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_predictions(tmp_path, broken(), ("json",))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        write_predictions(tmp_path, ROWS[:1], ("json",))
        assert len(read_predictions(tmp_path / "preds.json").predictions) == 1

    def test_the_harness_reads_them(self, tmp_path: Path) -> None:
        paths = write_predictions(tmp_path, ROWS, ("json",))
        dataset = put(tmp_path / "dataset.jsonl", *({"instance_id": name} for name, _, _ in ROWS))
        command = [sys.executable, "-c", LOADER, str(dataset), *map(str, paths)]
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LC_ALL": "C", "PYTHONUTF8": "0"}
        done = subprocess.run(command, env=variables, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        loaded, ids = json.loads(done.stdout)
        expected = [dict(zip(KEYS, (name, model, patch.decode()), strict=True)) for name, model, patch in ROWS]
        assert loaded == [expected, expected]
        assert ids == [name for name, _, _ in ROWS]


class TestRead:
    def test_both_forms_and_a_list(self, tmp_path: Path) -> None:
        paths = [*write_predictions(tmp_path, ROWS, ("json",)), tmp_path / "list.json"]
        paths[2].write_text(json.dumps([prediction(), prediction("b")]))
        first, second, third = map(read_predictions, paths)
        assert first == second
        assert first.predictions[0] == Prediction(
            instance_id="o__r-2", model_name_or_path="some/model", model_patch=PATCH
        )
        assert [known.instance_id for known in third.predictions] == ["o__r-1", "b"]
        assert first.faults == third.faults == []

    @pytest.mark.parametrize(
        ("line", "fault"),
        [
            ("", "empty"),
            ("{", "no JSON"),
            ("[" * 100_000, "nested too deeply"),
            ('{"instance_id": ' + "1" * 5001 + "}", "no JSON that can be read: Exceeds the limit"),
            ([1], "not an object with instance_id, model_name_or_path, model_patch"),
            ({"instance_id": "a", "model_patch": ""}, "model_name_or_path is missing"),
            (prediction() | {"cost": 1}, "cost does not belong here"),
            (prediction() | {"model_patch": None}, 'model_patch is null: "" stands for no patch'),
            (prediction() | {"model_patch": ["x"]}, "model_patch is no text"),
            (prediction() | {"instance_id": 7}, "instance_id is no text"),
            (prediction(""), "instance_id is empty"),
            (prediction() | {"model_name_or_path": ""}, "model_name_or_path is empty"),
            (prediction(patch="\ud800"), "model_patch holds half a surrogate pair"),
            (json.dumps(prediction())[:-1] + ', "instance_id": "b"}', "instance_id is there 2 times"),
        ],
    )
    def test_a_bad_line_is_named_and_the_others_are_read(self, tmp_path: Path, line: Any, fault: str) -> None:
        read = read_predictions(put(tmp_path / "p.jsonl", prediction("a"), line, prediction("b")))
        assert [known.instance_id for known in read.predictions] == ["a", "b"]
        assert len(read.faults) == 1
        assert read.faults[0].startswith(f"line 2: {fault}")

    def test_bad_files(self, tmp_path: Path) -> None:
        latin = tmp_path / "latin.jsonl"
        latin.write_bytes(b'{"instance_id": "\xe9"}\n')
        assert read_predictions(latin).faults == ["line 1: not UTF-8 at byte 18"]
        text = put(tmp_path / "p.txt", prediction())
        assert read_predictions(text).faults == ["p.txt: the name of a file of predictions ends in .jsonl or .json"]
        other = tmp_path / "other.json"
        other.write_text(json.dumps({"a": prediction("b"), "c": prediction("c"), "d": 1}))
        assert read_predictions(other).faults == [
            "a: it stands for another id, 'b'",
            "d: not an object with instance_id, model_name_or_path, model_patch",
        ]
        other.write_text('"x"')
        assert read_predictions(other).faults == ["file: neither a list nor a mapping of predictions"]
        with pytest.raises(UsageProblem, match="No such file"):
            read_predictions(tmp_path / "none.jsonl")


class TestChecked:
    @pytest.fixture
    def instance(self, tmp_path: Path) -> Instance:
        """An instance whose repository is in the cache."""
        work = tmp_path / "work"
        work.mkdir()
        (work / "a.txt").write_text("one\ntwo\n")
        git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
            subprocess.run([*git, *words], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run(["git", "clone", "-q", "--bare", work, tmp_path / "cache" / "o__r.git"], check=True)
        return Instance(instance_id="o__r-1", repo="o/r", base_commit=commit)

    def test_ids(self, tmp_path: Path) -> None:
        path = put(tmp_path / "p.jsonl", prediction("a"), prediction("b"), prediction("a"), prediction("x"))
        instances = [Instance(instance_id=name) for name in "abc"]
        assert validate_predictions(path, instances, None).faults == [
            "a: 2 predictions",
            "x: no such instance",
            "c: no prediction",
        ]
        assert validate_predictions(path, None, None).faults == ["a: 2 predictions"]

    @pytest.mark.parametrize(
        "patch",
        [
            PATCH.rstrip("\n").rpartition("\n")[0],
            PATCH.rstrip(),
            PATCH.replace("\n one", ""),
            "I have fixed it.",
            "\n",
            "diff --git a/b b/b\nnew file mode 100644\nGIT binary patch\nliteral 5\nMcmZ?wbhGsT\n",
        ],
    )
    def test_a_malformed_patch_is_told_without_a_repository(self, tmp_path: Path, patch: str) -> None:
        faults = validate_predictions(put(tmp_path / "p.jsonl", prediction(patch=patch)), None, None).faults
        assert len(faults) == 1
        assert faults[0].startswith("o__r-1: the patch cannot be applied: error: ")

    @pytest.mark.parametrize("cut", [lambda text: text[:-30], lambda text: text.replace("zcmV", "zcmW", 1)])
    @pytest.mark.parametrize("where", ["nowhere", "cache"])
    def test_what_git_tells_and_passes_over_is_a_fault(
        self, tmp_path: Path, instance: Instance, where: str, cut: Callable[[str], str]
    ) -> None:
        binary = random.Random(1).randbytes(300)
        patch = PATCH.replace("+th", "+error: th ") + patch_of(tmp_path / "work", {"b.bin": binary})
        cache = tmp_path / where if where == "cache" else None
        whole = put(tmp_path / "whole.jsonl", prediction(patch=patch))
        assert validate_predictions(whole, [instance], cache).faults == []
        assert cut(patch) != patch
        damaged = put(tmp_path / "damaged.jsonl", prediction(patch=cut(patch)))
        (fault,) = validate_predictions(damaged, [instance], cache).faults
        assert fault.startswith("o__r-1: the patch cannot be applied: error: ")

    @pytest.mark.parametrize(("name", "text"), [("p.jsonl", ""), ("p.json", "{}"), ("p.json", "[]")])
    def test_a_file_without_predictions_is_not_ready(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        assert validate_predictions(tmp_path / name, None, None).faults == ["it holds no predictions"]
        assert len(validate_predictions(tmp_path / name, [Instance(instance_id="a")], None).faults) == 2

    def test_what_a_file_holds_reaches_no_terminal_as_it_is(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = put(tmp_path / "p.jsonl", *[prediction("a\x1b[2J\nready to submit\u202e")] * 2)
        assert invoke([f"--validate_predictions={path}"]) == 2
        assert capsys.readouterr().out == f"{path}: 1 fault\na [2J ready to submit : 2 predictions\n"

    def test_a_patch_is_tried_where_the_repository_is(self, tmp_path: Path, instance: Instance) -> None:
        cache = tmp_path / "cache"
        before = sorted(path for path in cache.rglob("*"))
        good = put(tmp_path / "good.jsonl", prediction(patch=PATCH))
        assert validate_predictions(good, [instance], cache) == Checked([], 0, "their instances name no repo")
        stale = put(tmp_path / "stale.jsonl", prediction(patch=PATCH.replace(" two", " zwei")))
        untried = Checked([], 1, "give --dataset and --repo_cache")
        assert validate_predictions(stale, [instance], None) == validate_predictions(stale, None, cache) == untried
        no_repo = [Instance(instance_id="o__r-1")]
        assert validate_predictions(stale, no_repo, cache) == Checked([], 1, "their instances name no repo")
        assert validate_predictions(stale, [instance], cache).faults == [
            "o__r-1: the patch cannot be applied: error: patch failed: a.txt:1"
        ]
        assert sorted(path for path in cache.rglob("*")) == before

    def test_without_the_commit_it_says_so(self, tmp_path: Path, instance: Instance) -> None:
        other = Instance(instance_id="o__r-1", repo="o/r", base_commit="1" * 40)
        cache = tmp_path / "cache"
        (fault,) = validate_predictions(put(tmp_path / "p.jsonl", prediction(patch=PATCH)), [other], cache).faults
        assert "1111" in fault
        away = Instance(instance_id="o__r-1", repo="o/other", base_commit=instance.base_commit)
        (fault,) = validate_predictions(tmp_path / "p.jsonl", [away], cache).faults
        assert fault.endswith(f"its repository is not in the cache, there is no {cache / 'o__other.git'}")
