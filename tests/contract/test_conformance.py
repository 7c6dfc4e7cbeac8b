"""The contract's short form: every backend keeps it, and each check sees what it is there for."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch.qualify import Finding, try_all
from tests.contract.environments import IMAGES, ISOLATING, LEAST_MEMORY, UNCOUNTED, backend_of, make_spec, open_sandbox
from tools.environments import conformance
from tools.environments.base import Backend, CommandResult, Entry, Environment, EnvironmentSpec, Limits
from tools.environments.conformance import NotTried, Unmet, checks_of
from tools.errors import ImageUnavailable

pytestmark = pytest.mark.timeout(600)
Checking = Callable[[Environment], Awaitable[str | None]]
HUNGRY = conformance._HUNGRY
SMALL = Limits(memory_mb=100, pids=64)  # all checks want the same sandbox then


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """How quickly a time-out returns is no matter here, and less output and memory than usual will do."""
    monkeypatch.setattr(conformance, "RETURN_SECONDS", 60.0)
    monkeypatch.setattr(conformance, "_LINES", 500)
    monkeypatch.setattr(conformance, "_HUNGRY", HUNGRY.replace("26", "24"))


async def findings_of(backend: Backend, spec: EnvironmentSpec) -> list[Finding]:
    findings: list[Finding] = []
    await try_all(backend, spec, findings)
    return findings


async def test_every_backend_keeps_it(backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(image=IMAGES.get(backend_name, ""), limits=SMALL)
    if backend_name in LEAST_MEMORY:
        monkeypatch.setattr(conformance, "_HUNGRY", HUNGRY)
    for _ in range(10):
        findings = await findings_of(backend_of(backend_name), spec)
        if not re.search("no answer within|cannot be reached", findings[0].note):  # else the machine is busy
            break
    assert findings[2].note == (spec.image or ("python:3.11-slim" if backend_of(backend_name).takes_images else ""))
    refused = ["limit of processes"] if backend_name in UNCOUNTED else []
    refused += [] if backend_name in ISOLATING else ["network none"]
    assert [finding.check for finding in findings if finding.state == "failed"] == []
    assert [finding.check for finding in findings if finding.state == "refused"] == refused
    assert {finding.check for finding in findings if finding.state == "not tried"} <= {"processors"}  # it is busy
    assert [finding.check for finding in findings[3:]] == [check.name for check in checks_of(spec)]


# what is wrong is seen


class Spoilt:
    """A sandbox that does not do everything as it should: `wrong` says what."""

    def __init__(self, environment: Environment, wrong: str) -> None:
        self._environment = environment
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def run(self, command: str, *, timeout: float, cwd: str | None = None, max_chars: int = 50_000) -> Any:
        run = self._environment.run
        if self._wrong == "timeout kills nothing" and timeout == 1:
            await run(f"({command}) >/dev/null 2>&1 &", timeout=20)
            return CommandResult(output="before\n", exit_code=124, timed_out=True)
        if self._wrong == "state is lost":
            command = f"({command}\n)"
        if self._wrong == "stdin is a file":
            command = f"exec <<'END'\nsomething\nEND\n{command}"
        if self._wrong == "background is killed" and command.startswith("sleep"):
            command += "; kill -9 $!"
        result = await run(command, timeout=timeout, cwd=cwd, max_chars=max_chars)
        changes: dict[str, Any] = {
            "exit code is 0": {"exit_code": 0},
            "output is cut": {"output": result.output[:-1]},
            "output is doubled": {"output": 2 * result.output},
            "left out is unknown": {"omitted_chars": 0},
        }
        return msgspec.structs.replace(result, **changes.get(self._wrong, {}))

    async def read(self, path: str) -> AsyncIterator[bytes]:
        async for chunk in self._environment.read(path):
            yield chunk[:-1] if self._wrong == "bytes are missing" else chunk

    async def list(self, path: str) -> list[Entry]:
        return [*await self._environment.list(path)][1:]


async def test_sound_sandboxes_are_not_spoilt() -> None:
    async with open_sandbox("local") as sandbox:
        await conformance.exit_code_and_joined_stderr(Spoilt(sandbox, ""))
        await conformance.one_megabyte_up_and_down(Spoilt(sandbox, ""))


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ("exit code is 0", conformance.exit_code_and_joined_stderr),
        ("output is cut", conformance.exit_code_and_joined_stderr),
        ("state is lost", conformance.directory_and_exports_persist),
        ("stdin is a file", conformance.stdin_is_empty),
        ("output is cut", conformance.output_that_is_no_utf8),
        ("output is doubled", conformance.much_output_within_bounds),
        ("left out is unknown", conformance.much_output_within_bounds),
        ("output is cut", conformance.long_command),
        ("output is cut", conformance.quotes_newlines_and_substitutions),
        ("background is killed", conformance.background_process_lives_on),
        ("timeout kills nothing", conformance.timeout_despite_ignored_sigterm),
        ("timeout kills nothing", conformance.timeout_kills_other_sessions),
        ("exit code is 0", conformance.timeout_despite_ignored_sigterm),
        ("names are missing", conformance.files_with_odd_names),
        ("bytes are missing", conformance.one_megabyte_up_and_down),
    ],
)
async def test_a_check_sees_what_is_wrong(wrong: str, check: Checking) -> None:
    async with open_sandbox("local") as sandbox:
        with pytest.raises(Unmet):
            await check(Spoilt(sandbox, wrong))


@pytest.mark.parametrize(
    ("check", "said"),
    [(conformance.memory_is_limited, "could hold 1 GiB"), (conformance.processes_are_limited, "could start 100")],
)
async def test_limits_that_are_dropped_are_seen(check: Checking, said: str) -> None:
    async with open_sandbox("local", limits=Limits(memory_mb=4096, pids=500)) as sandbox:
        with pytest.raises(Unmet, match=said):
            await check(sandbox)


async def test_a_network_that_is_not_taken_away_is_seen() -> None:
    async with open_sandbox("docker") as sandbox:
        with pytest.raises(Unmet, match="eth0"):
            await conformance.no_network(sandbox)


class Telling:
    """Says the same to every command."""

    def __init__(self, output: str, backend: str = "docker") -> None:
        self._output = output
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    async def run(self, command: str, **_: object) -> CommandResult:
        return CommandResult(output=self._output, exit_code=0)


async def test_processors_beyond_the_limit_are_seen() -> None:
    shown = "0m0.00s 0m0.00s\n16666m1.20s 0m0.000s\n"
    with pytest.raises(Unmet, match="the limit is 2"):
        await conformance.processors_used(Telling(shown), 2)


@pytest.mark.parametrize(
    ("backend", "limit", "used", "outcome"),
    [
        ("docker", 0.5, 0.55, "2 loops got 0.55 processors, the limit is 0.5"),
        ("docker", 0.5, 0.95, Unmet("2 loops got 0.95 processors, the limit is 0.5")),
        (
            "docker",
            2,
            0.9,
            NotTried("3 loops got 0.90 processors, the limit is 2: the machine is busy, or has no more"),
        ),
        ("daytona", 0.5, 0.95, "2 loops got 0.95 processors, the limit is 1"),
    ],
)
async def test_what_loops_get_says_whether_they_are_limited(
    backend: str, limit: float, used: float, outcome: str | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0])
    monkeypatch.setattr(conformance, "monotonic", lambda: next(clock))
    telling = Telling(f"0m0.00s 0m0.00s\n0m{100 * used:.2f}s 0m0.000s\n", backend)
    if isinstance(outcome, str):
        assert await conformance.processors_used(telling, limit) == outcome
    else:
        with pytest.raises(type(outcome), match=f"^{outcome}$"):
            await conformance.processors_used(telling, limit)


async def test_what_needs_programs_that_are_missing_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    told = {}
    async with open_sandbox("local", variables={"PATH": str(tmp_path)}) as sandbox:
        for check in checks_of(make_spec()):
            if check.needs:
                with pytest.raises(NotTried) as caught:
                    await check.on(sandbox)
                told[check.name] = str(caught.value)
    assert told.pop("time-out kills other sessions") == "the sandbox has no `sleep`, no `setsid`"
    assert told.pop("files with odd names") == "the sandbox has no `mkdir`, no `rm`, no `stat`"
    assert told.pop("1 MB up and down") == "the sandbox has no `rm`"
    assert (len(told), set(told.values())) == (4, {"the sandbox has no `sleep`"})


async def test_a_slow_return_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "RETURN_SECONDS", 0.5)
    async with open_sandbox("local") as sandbox:
        with pytest.raises(Unmet, match="returned after"):
            await conformance.timeout_despite_ignored_sigterm(sandbox)


class Faulty:
    """The local backend, but for what is set; it notes what it opened."""

    name = "faulty"
    takes_images = True
    isolates = False

    def __init__(self) -> None:
        self.local = backend_of("local")
        self.kept = AsyncExitStack()
        self.keeps = False
        self.opened: list[EnvironmentSpec] = []
        self.wrong = ""

    async def check(self) -> str:
        return "install it" if self.wrong == "check" else ""

    async def prepare(self, image: str) -> None:
        if self.wrong == "prepare":
            raise ImageUnavailable("there is no such image")

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        self.opened.append(spec)
        if self.wrong == "open":
            raise ZeroDivisionError("of our own")
        if self.keeps:
            yield await self.kept.enter_async_context(self.local.open(spec))
        else:
            async with self.local.open(spec) as environment:
                yield environment

    async def reap(self) -> int:
        return 0


async def test_what_is_left_is_seen() -> None:
    backend = Faulty()
    backend.keeps = True
    async with backend.kept:
        with pytest.raises(Unmet, match="still answers"):
            await conformance.nothing_is_left(backend, make_spec())
        with pytest.raises(Unmet, match="still answers"):
            await conformance.past_its_deadline_is_removed(backend, make_spec())


@pytest.mark.parametrize(
    ("wrong", "count", "said"),
    [
        ("check", 1, "install it"),
        ("prepare", 2, "there is no such image"),
        ("open", 3, "ZeroDivisionError: of our own"),
    ],
)
async def test_without_a_sandbox_nothing_more_is_tried(wrong: str, count: int, said: str) -> None:
    backend = Faulty()
    backend.wrong = wrong
    findings = await findings_of(backend, make_spec())
    assert [finding.state for finding in findings] == [*["ok"] * (count - 1), "failed"]
    assert findings[-1].note == said


async def hanging(_: Environment) -> None:
    await asyncio.sleep(600)


async def breaking(_: Environment) -> None:
    raise ZeroDivisionError("a fault")


async def needing(_: Environment) -> None:
    raise NotTried("there is no `sleep`")


async def working(_: Environment) -> None:
    pass


async def test_a_check_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [conformance.Check(name=act.__name__, act=act) for act in (working, hanging, breaking, needing, working)]
    monkeypatch.setattr("batch.qualify.checks_of", lambda _: checks)
    monkeypatch.setattr("batch.qualify._CHECK_SECONDS", 8.0)
    backend = Faulty()
    findings = (await findings_of(backend, make_spec()))[3:]
    assert [(finding.check, finding.state, finding.note) for finding in findings] == [
        ("working", "ok", ""),
        ("hanging", "failed", "no end within 8 s"),
        ("breaking", "failed", "ZeroDivisionError: a fault"),
        ("needing", "not tried", "there is no `sleep`"),
        ("working", "ok", ""),
    ]
    assert len(backend.opened) == 3, "a sandbox in which something went wrong is not used again"
    assert all(spec.deadline > time.time() for spec in backend.opened)
