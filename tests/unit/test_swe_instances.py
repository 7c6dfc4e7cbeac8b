"""SWE-bench instances: every form a file may have, every fault in it named, the choice among them, their images."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
import zstandard
from pyarrow import parquet as tables

from batch.rows import RowProblem
from swe.images import image_of
from swe.instances import SUBSETS, choose, load_instances, read_instance
from swe.tasks import PICTURES, row_of
from swe.types import Instance
from tools.errors import UsageProblem

ROOT = Path(__file__).parents[2]
STATEMENT = "Don't `rm -rf /`; $(reboot)\r\n\t“quoted” ü \\ '\""


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "instance_id": f"owner__name-{number}",
        "repo": "owner/name",
        "base_commit": f"{number:040x}",
        "problem_statement": STATEMENT,
        "patch": "--- a/x\n+++ b/x\n",
        "FAIL_TO_PASS": ["tests/test_x.py::test_a[1 - 2]"],
        "PASS_TO_PASS": [],
        "difficulty": "15 min",
        **changes,
    }


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def saved(folder: Path, data: bytes, name: str = "instances.jsonl") -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def ids(instances: list[Instance]) -> list[str]:
    return [instance.instance_id for instance in instances]


def refusal(path: str, split: str = "", subset: str = "") -> str:
    with pytest.raises(UsageProblem) as caught:
        load_instances(path, split, subset)
    return str(caught.value)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    tables.write_table(pyarrow.Table.from_pylist(rows), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


ROWS = [row(1), row(2, PASS_TO_PASS=["b", "c"])]
FORMS = {
    "x.jsonl": lines(*ROWS),
    "blank-lines-and-bom.jsonl": b"\xef\xbb\xbf" + lines(ROWS[0]) + b"\n  \n" + lines(ROWS[1]),
    "x.jsonl.gz": gzip.compress(lines(*ROWS)),
    "x.jsonl.zst": zstandard.compress(lines(*ROWS)),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "by-id.json": json.dumps({each["instance_id"]: each for each in ROWS}, indent=1).encode(),
    "by-id-in-a-line.json": json.dumps({each["instance_id"]: each for each in ROWS}).encode(),
    "by-id-without-ids.json": json.dumps(
        {each["instance_id"]: {k: v for k, v in each.items() if k != "instance_id"} for each in ROWS}
    ).encode(),
    "x.parquet": parquet(ROWS),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_instances(tmp_path: Path, name: str) -> None:
    first, second = load_instances(saved(tmp_path, FORMS[name], name))
    assert ids([first, second]) == ["owner__name-1", "owner__name-2"]
    assert first.problem_statement == STATEMENT
    assert (first.repo, first.base_commit, first.patch) == ("owner/name", f"{1:040x}", "--- a/x\n+++ b/x\n")
    assert first.fail_to_pass == ("tests/test_x.py::test_a[1 - 2]",)
    assert (first.pass_to_pass, second.pass_to_pass) == ((), ("b", "c"))
    assert first.rest == {"difficulty": "15 min"}


def test_one_instance_alone_in_a_file(tmp_path: Path) -> None:
    assert ids(load_instances(saved(tmp_path, json.dumps(row(7), indent=2).encode(), "one.json"))) == ["owner__name-7"]
    assert ids(load_instances(saved(tmp_path, json.dumps(row(8)).encode(), "one.json"))) == ["owner__name-8"]


def test_tests_as_json_text_and_fields_that_are_null(tmp_path: Path) -> None:
    text = row(1, FAIL_TO_PASS='["a", "ü \\"b\\""]', PASS_TO_PASS="", version=None, image_name="own:1", hints_text=None)
    (instance,) = load_instances(saved(tmp_path, lines(text)))
    assert instance.fail_to_pass == ("a", 'ü "b"')
    assert (instance.pass_to_pass, instance.version, instance.hints_text) == ((), "", "")
    assert instance.image == "own:1"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{}", ":2: no instance_id"),
        (lines({"repo": "a/b"}), ":2: no instance_id"),
        (lines(row(1, instance_id=None)), ":2: no instance_id"),
        (lines(row(1, instance_id=" ")), "is blank or holds white space"),
        (lines(row(1, instance_id="../../etc")), "a slash"),
        (lines(row(1, instance_id=3)), ":2: instance_id must be a string, not 3"),
        (lines(row(9)), ":2: instance_id 'owner__name-9' is also that of 1"),
        (lines(row(1, problem_statement=["a"])), ":2: problem_statement must be a string, not ['a']"),
        (lines(row(1, FAIL_TO_PASS="test_a")), ":2: FAIL_TO_PASS is neither a list nor the JSON text of one"),
        (lines(row(1, FAIL_TO_PASS='{"a": 1}')), ":2: FAIL_TO_PASS must be a list of test names"),
        (lines(row(1, PASS_TO_PASS=["a", 1])), ":2: PASS_TO_PASS must be a list of test names, not ['a', 1]"),
        (lines(row(1, PASS_TO_PASS=5)), ":2: PASS_TO_PASS must be a list of test names, not 5"),
        (lines(row(1, image="a", image_name="b")), "contradict each other"),
        (b'{"instance_id": \n', ":2: not JSON"),
        (b"[1]\n", ":2: not an object but a list"),
        (b'{"instance_id": "\xff"}\n', ":2: not UTF-8"),
    ],
)
def test_a_bad_instance_is_named_in_one_line(tmp_path: Path, bad: bytes, said: str) -> None:
    path = saved(tmp_path, lines(row(9)) + bad)
    text = refusal(path)
    assert said in text
    assert text.startswith(f"{path}:2: ")
    assert "\n" not in text


def test_all_bad_instances_are_counted_and_the_first_named(tmp_path: Path) -> None:
    path = saved(tmp_path, json.dumps([row(1), *({"instance_id": n} for n in range(12))]).encode(), "a.json")
    told = refusal(path).splitlines()
    assert told[0] == "12 bad instances:"
    assert told[1] == f"{path}:2: instance_id must be a string, not 0"
    assert len(told) == 12
    assert told[-1] == "… and 2 more"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "holds no instances"),
        (b"{}", "no instance_id"),
        (b"[]", "holds no instances"),
        (json.dumps({"a": row(1)}).encode(), "under 'a' stands the instance 'owner__name-1'"),
        (b'{"a": {"repo": "x/y"}, "a": {"repo": "x/z"}}', "'a' stands twice in one object"),
        (gzip.compress(lines(row(1)))[:-9], "is damaged"),
        (b"PAR1 and no more", "is damaged"),
    ],
)
def test_a_file_without_instances(tmp_path: Path, data: bytes, said: str) -> None:
    text = refusal(saved(tmp_path, data, "bad.json"))
    assert said in text
    assert "\n" not in text


def test_an_instance_to_work_on_states_its_problem(tmp_path: Path) -> None:
    path = saved(tmp_path, lines(row(1), row(2, problem_statement=" \n"), row(3, problem_statement=None)))
    assert len(load_instances(path)) == 3
    with pytest.raises(UsageProblem) as caught:
        load_instances(path, to_work=True)
    said = str(caught.value)
    assert f"{path}:2: owner__name-2 has no problem_statement" in said
    assert f"{path}:3: owner__name-3" in said


def test_splits_of_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, lines(row(1, split="dev"), row(2, split="test"), row(2, split="dev"), row(3)))
    assert ids(load_instances(path, "test")) == ["owner__name-2", "owner__name-3"]
    assert ids(load_instances(path, "dev")) == ["owner__name-1", "owner__name-2", "owner__name-3"]
    assert ids(load_instances(saved(tmp_path, lines(row(1))), "test")) == ["owner__name-1"]
    path = saved(tmp_path, lines(row(1, split="dev")))
    assert refusal(path, "test") == f"{path} holds no instances of the split 'test'; it has dev"


@pytest.mark.parametrize(
    ("name", "subset", "said"),
    [
        ("missing.jsonl", "", "missing.jsonl cannot be read: No such file"),
        ("./missing", "", "./missing cannot be read: No such file"),
        ("no-such-set", "", "neither a file nor a name of the Hugging Face hub, nor one of mini-swe-bench"),
        ("a/b/c", "", "neither a file nor a name"),
        ("mini-swe-bench", "tiny", "--subset tiny: there are lite, verified, full, multilingual"),
        ("lite", "full", "--subset full does not go with the data set lite"),
        ("own/data", "lite", "--subset lite does not go with the data set own/data"),
        ("missing.jsonl", "lite", "--subset lite is for the published data sets"),
    ],
)
def test_names_that_lead_nowhere(name: str, subset: str, said: str) -> None:
    text = refusal(name, subset=subset)
    assert said in text
    assert "\n" not in text


PUBLISHED = """
import sys
from swe.instances import load_instances
from tools.errors import UsageProblem
for name, subset, split in [("mini-swe-bench", "", ""), ("swe-bench", "verified", "test"), ("verified", "", "dev"),
                            ("mini-swe-bench", "lite", ""), ("own/data", "", "")]:
    try:
        print([(each.instance_id, each.fail_to_pass) for each in load_instances(name, split, subset)])
    except UsageProblem as problem:
        print(problem)
"""


def test_published_sets_and_what_cannot_be_had_offline(tmp_path: Path) -> None:
    """The package takes a folder of the set's name for the set."""
    folder = tmp_path / SUBSETS["verified"]
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_bytes(lines(row(1, FAIL_TO_PASS='["a"]', created_at="2024-01-01T00:00:00Z")))
    variables = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PUBLISHED], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert told[0] == told[1] == "[('owner__name-1', ('a',))]"
    assert told[2].startswith("the data set SWE-bench/SWE-bench_Verified (split dev) cannot be had: Unknown split")
    assert told[3].startswith("the data set SWE-bench/SWE-bench_Lite (split test) cannot be had: Couldn't reach")
    assert told[4].startswith("the data set own/data (split test) cannot be had: ")
    assert len(told) == 5


CACHED = """
import datasets, sys

class Made(datasets.GeneratorBasedBuilder):
    VERSION = datasets.Version("0.0.0")

    def _info(self):
        names = ("instance_id", "repo", "problem_statement", "FAIL_TO_PASS")
        return datasets.DatasetInfo(features=datasets.Features({name: datasets.Value("string") for name in names}))

    def _split_generators(self, manager):
        return [datasets.SplitGenerator(name="test")]

    def _generate_examples(self):
        yield 0, {"instance_id": "owner__name-1", "repo": "o/n", "problem_statement": "x", "FAIL_TO_PASS": '["a"]'}

builder = Made(cache_dir=sys.argv[1], dataset_name="bench", repo_id="own/bench", hash="0" * 40)
builder.download_and_prepare()
"""
"""What an earlier load leaves in the cache of the package."""


def test_a_set_in_the_packages_cache_needs_no_network(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    variables = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    variables |= {"HF_DATASETS_CACHE": str(cache)}
    load = "from swe.instances import load_instances; print(load_instances('own/bench')[0].fail_to_pass)"
    for words in ([CACHED, str(cache)], [load]):
        done = subprocess.run([sys.executable, "-c", *words], cwd=tmp_path, env=variables, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout == "('a',)\n"


@pytest.mark.parametrize("as_text", [False, True])
def test_the_problems_pictures_are_named_to_the_model_and_no_others(as_text: bool) -> None:
    assets = {"problem_statement": ["https://x/1.png", "https://x/2.png"], "patch": ["https://x/p.png"],
              "test_patch": None}  # fmt: skip
    given = row(1, problem_statement="See ![](https://x/1.png)", image_assets=json.dumps(assets) if as_text else assets)
    instance = read_instance(given)
    assert instance.pictures == ("https://x/1.png", "https://x/2.png")
    prompt = json.loads(row_of(instance, image_template="", with_image=False, cwd=""))["prompt"]
    assert prompt.count("https://x/1.png") == 1
    assert f"{PICTURES}\n- https://x/2.png\n</problem>" in prompt
    assert "p.png" not in prompt
    plain = row_of(read_instance(row(1)), image_template="", with_image=False, cwd="")
    assert PICTURES.encode() not in plain
    for none in (None, "", {}, "{}", {"problem_statement": None}, {"patch": ["https://x/p.png"]}):
        assert row_of(read_instance(row(1, image_assets=none)), image_template="", with_image=False, cwd="") == plain


@pytest.mark.parametrize(
    "odd", ["[", "[]x", ["https://x"], {"problem_statement": "https://x"}, {"problem_statement": [1]}]
)
def test_pictures_of_another_form_are_refused(odd: object) -> None:
    with pytest.raises(RowProblem, match="image_assets"):
        read_instance(row(1, image_assets=odd))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install -e '.[datasets]'" in refusal("lite")


# choosing

TEN = [Instance(instance_id=f"{owner}__repo-{n}") for owner in ("ann", "bob") for n in range(5)]


@pytest.mark.parametrize(
    ("choice", "numbers"),
    [
        ({}, range(10)),
        ({"filter": "^bob"}, range(5, 10)),
        ({"filter": "-[12]$"}, [1, 2, 6, 7]),
        ({"slice": "2:4"}, [2, 3]),
        ({"slice": ":3"}, [0, 1, 2]),
        ({"slice": "-2:"}, [8, 9]),
        ({"slice": " 1 : -7 "}, [1, 2]),
        ({"slice": ":"}, range(10)),
        ({"slice": "8:99"}, [8, 9]),
        ({"filter": "bob", "slice": ":1"}, [5]),
        ({"ids": ["bob__repo-1", "ann__repo-0", "bob__repo-1"]}, [0, 6]),
        ({"ids": ["bob__repo-1", "ann__repo-0"], "filter": "bob"}, [6]),
    ],
)
def test_choosing(choice: dict[str, Any], numbers: list[int]) -> None:
    assert choose(TEN, **choice) == [TEN[number] for number in numbers]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"filter": "(a"}, "--filter '(a' is no regular expression"),
        ({"filter": "carl"}, "--filter 'carl' finds none of the instance ids, such as ann__repo-0"),
        ({"slice": "5:5"}, "--slice 5:5 leaves none of 10 instances"),
        ({"slice": "1:9:2"}, "--slice '1:9:2' is not of the form A:B"),
        ({"slice": "a:b"}, "is not of the form A:B"),
        ({"slice": "5"}, "is not of the form A:B"),
        ({"ids": ["bob__repo-1 ann__repo-0"]}, "'bob__repo-1 ann__repo-0' is no id: commas stand between ids"),
        ({"ids": ["bob__rpo-1"]}, "--instance_ids: there is no 'bob__rpo-1'; the nearest is bob__repo-1"),
    ],
)
def test_choices_that_leave_nothing(choice: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        choose(TEN, **choice)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# images


def test_images_of_the_published_instances() -> None:
    instance = Instance(instance_id="PyCQA__pylint-4970", repo="PyCQA/pylint", version="2.9")
    assert image_of(instance) == "swebench/sweb.eval.x86_64.pycqa_1776_pylint-4970:latest"
    own = "registry:5000/{repo}/{owner}-{name}:{version}-{instance_id}"
    assert image_of(instance, own) == "registry:5000/pycqa/pylint/pycqa-pylint:2.9-PyCQA__pylint-4970"
    assert image_of(instance, "one:image") == "one:image"
    assert image_of(Instance(instance_id="a__b-1", image="Own:1"), own) == "Own:1"


@pytest.mark.parametrize("template", ["x/{id}", "{instance_id.__class__}", "{0}", "{", "{repo[0]}", "{}"])
def test_templates_with_unknown_fields(template: str) -> None:
    with pytest.raises(UsageProblem, match="--image_template"):
        image_of(Instance(instance_id="a__b-1"), template)
