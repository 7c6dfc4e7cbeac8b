"""Imports point one way, heavy packages come late, and importing a module does nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tools", "agent", "batch", "compression", "swe")
LOWEST = ("tools.errors", "tools.names", "tools.text")  # whom also `tools.environments` may import
LEAVES = {
    *(*LOWEST, "tools.environments.base", "tools.environments.ending", "tools.environments.images"),
    *("agent.types", "agent.text", "agent.models.options", "compression.types", "swe.types"),
    *("batch.signals", "batch.uncollected"),
}
HEAVY = (
    *("openai", "rich", "aiodocker", "asyncssh", "jsonschema", "pyarrow", "zstandard", "aiohttp"),
    *("PIL", "mcp", "playwright", "modal", "grpclib"),
    *("httpx", "trafilatura", "lxml", "pypdf", "ddgs", "charset_normalizer"),
    *("tiktoken", "tokenizers", "jinja2", "matplotlib", "datasets", "huggingface_hub", "swebench"),
)
LATE = {"agent.models.openai_chat", "tools.web.fetch", "tools.web.transport"}  # homes, themselves imported late
HOMES = {
    "openai": ("agent.models.",),
    "rich": ("batch.progress", "batch.cli", "compression.report"),
    "aiodocker": ("tools.environments.docker",),
    "asyncssh": ("tools.environments.ssh",),
    **dict.fromkeys(("modal", "grpclib"), ("tools.environments.modal",)),
    "PIL": ("tools.pictures.pictures",),
    "playwright": ("tools.browser.",),
    "mcp": ("tools.mcp.",),
    **dict.fromkeys(("httpx", "trafilatura", "lxml", "pypdf", "ddgs", "charset_normalizer"), ("tools.web.",)),
    "pyarrow": ("batch.",),
    "tiktoken": ("agent.tokens",),
    "tokenizers": ("agent.tokens",),
    "jinja2": ("compression.counting",),
    "matplotlib": ("compression.plot",),
    "datasets": ("swe.instances",),
    "huggingface_hub": ("agent.tokens", "swe.instances"),
    "swebench": ("swe.harness",),
}


def modules() -> dict[str, Path]:
    """Every module of the program by its name."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files += list(ROOT.glob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


MODULES = modules()
SCRIPTS = {name for name in MODULES if "." not in name and name not in PACKAGES}


def imports(path: Path, known: Mapping[str, Path] = MODULES, *, types: bool = True) -> Iterator[str]:
    """The modules that a file imports, also late ones; not what it imports for types alone, unless `types`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = set() if types else {id(each) for each in for_types(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in left_out:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and id(node) not in left_out:
            assert node.level == 0, f"{path}: relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (each if each in known else str(node.module) for each in whole)


def for_types(tree: ast.Module) -> Iterator[ast.AST]:
    """What stands under `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (each for statement in node.body for each in ast.walk(statement))


def rank(name: str) -> int:
    """Who may import whom: a higher rank the lower ones."""
    if name in LOWEST:
        return 0
    if name in SCRIPTS:
        return 6
    order = [("tools.environments.",), ("tools.",), ("agent.",), ("batch.",), ("compression.", "swe.")]
    return 1 + next(place for place, packages in enumerate(order) if f"{name}.".startswith(packages))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name: str) -> None:
    ours = {found for found in imports(MODULES[name]) if found in MODULES}
    assert not ours & SCRIPTS, "nobody imports a program"
    upward = {found for found in ours if rank(found) > rank(name)}
    assert not upward, f"{name} imports {upward}"
    if name in LEAVES:
        assert not ours, f"{name} is a leaf but imports {ours}"


def circle(known: Mapping[str, Path]) -> list[str]:
    """Modules each of which imports the next one, also late; none if there is no circle."""
    try:
        TopologicalSorter({name: {*imports(path, known, types=False)} for name, path in known.items()}).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(MODULES) == []


@pytest.mark.parametrize(
    ("late", "is_circle"),
    [
        ("def f():\n    from b import g", True),
        ("if True:\n    import b", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import g", False),
        ("import json", False),
    ],
)
def test_late_imports_make_a_circle_and_those_for_types_make_none(tmp_path: Path, late: str, is_circle: bool) -> None:
    known = {name: tmp_path / f"{name}.py" for name in "abc"}
    for name, code in {"a": late, "b": "from c import x", "c": "import a"}.items():
        known[name].write_text(code, encoding="utf-8")
    assert set(circle(known)) == (set(known) if is_circle else set())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_heavy_packages_have_one_home(name: str) -> None:
    for found in imports(MODULES[name]):
        homes = HOMES.get(found.partition(".")[0])
        assert homes is None or name.startswith(homes), f"{name} imports {found}"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_heavy_packages_are_not_loaded_by_importing() -> None:
    late = sorted(MODULES.keys() - LATE)
    code = f"import {', '.join(late)}, sys; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    assert run_python(code).split() == []


WATCH = """
import importlib, logging, os, signal, sys, threading
ROOT, NAMES = {root!r}, {names!r}
seen = []

def ours(frame):
    while frame is not None and (frame.f_code.co_filename == __file__ or "os.py" in frame.f_code.co_filename):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return name if name.startswith(ROOT) and "site-packages" not in name else ""

class Environment(dict):
    def get(self, key, default=None):
        self.look(key)
        return dict.get(self, key, default)
    def __getitem__(self, key):
        self.look(key)
        return dict.__getitem__(self, key)
    def __contains__(self, key):
        self.look(key)
        return dict.__contains__(self, key)
    def look(self, key):
        if where := ours(sys._getframe(2)):
            seen.append(("environment", key, where))

def audit(event, details):
    if event == "open" and isinstance(details[1], str) and set(details[1]) & set("wax+"):
        seen.append((event, details[0]))
    elif event in ("os.mkdir", "subprocess.Popen", "socket.connect", "os.fork", "os.remove"):
        seen.append((event, details[:1]))

__file__ = "<string>"
sys.dont_write_bytecode = True
sys.path.insert(0, ROOT)
os.environ = Environment(os.environ)
before = [signal.getsignal(number) for number in signal.valid_signals()]
sys.addaudithook(audit)
for name in NAMES:
    importlib.import_module(name)
assert not seen, seen
assert not logging.getLogger().handlers
assert threading.active_count() == 1
assert [signal.getsignal(number) for number in signal.valid_signals()] == before
"""


def test_importing_does_nothing() -> None:
    assert run_python(WATCH.format(root=str(ROOT), names=sorted(MODULES))) == ""


def test_the_watch_notices_what_an_import_does(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import os\nVALUE = os.environ.get('HOME')\n")
    (tmp_path / "writes.py").write_text("open(__file__ + '.log', 'w').close()\n")
    for name in ("reads", "writes"):
        code = WATCH.format(root=str(tmp_path), names=[name])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert "AssertionError" in done.stderr
