"""`--check_backend NAME`: the contract of environments tried on one backend of this machine, as a table."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack

import msgspec
from msgspec import Struct

from agent.faults import MEANT, Fault, guarded
from batch.cli import print_json, print_table, shown
from batch.exits import EXIT_CODES, FINISHED, SOME_FAILED, handlers_kept
from batch.leftovers import unremoved
from batch.progress import plain
from batch.settings import RunSettings
from batch.told import backend_settings, rollout_policy
from tools.environments.base import Backend, Environment, EnvironmentSpec
from tools.environments.conformance import Check, NotHeld, NotTried, Unmet, checks_of
from tools.environments.owner import current_owner
from tools.environments.table import load_backend, refuse_what_it_drops
from tools.errors import DiskFull, RowFailed, SandboxRefused, ToolError, UsageProblem

OK, REFUSED, NOT_TRIED, FAILED = "ok", "refused", "not tried", "failed"
_LIFE = 3600.0  # seconds after which anybody may remove what was left
_CHECK_SECONDS = 90.0
_OPEN_SECONDS = 180.0


class Finding(Struct, frozen=True, kw_only=True):
    """What one check came to."""

    check: str
    state: str  # ok | refused (it may be: not offered) | not tried (it cannot be here) | failed
    note: str
    seconds: float


class _Refused(Exception):
    """A sandbox that need not be offered is not."""


class _Open:
    """The sandbox at hand: kept as long as checks want the same and none fails in it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._spec: EnvironmentSpec | None = None
        self._environment: Environment | None = None
        self._stack = AsyncExitStack()

    async def like(self, spec: EnvironmentSpec) -> Environment:
        """An open one. Raises what opening it raises."""
        if self._environment is None or self._spec != spec:
            await self.close()
            self._environment = await self._stack.enter_async_context(self._backend.open(spec))
            self._spec = spec
        return self._environment

    async def close(self) -> None:
        """There is none then. Raises Unmet if the backend says that there is."""
        self._environment = None
        await self._stack.aclose()
        if names := unremoved(self._backend):
            raise Unmet(f"could not be removed: {', '.join(names)}")


def check_backend(settings: RunSettings, environ: Mapping[str, str]) -> int:
    """The exit code: 0 if everything holds. Prints a table, or JSON; of what was tried, if it is interrupted.

    Raises UsageProblem for a backend that there is none of, and for settings that it cannot have."""
    name = settings.container_backend
    told = backend_settings(settings)
    backend = load_backend(name, told)
    refuse_what_it_drops(name, told)
    if settings.image and not backend.takes_images:
        raise UsageProblem(f"container_backend {name} takes no images: leave image out")
    spec = _spec(settings, environ)
    findings: list[Finding] = []
    with handlers_kept():
        code = asyncio.run(_interruptible(try_all(backend, spec, findings)))
    shown(lambda: _print(findings, settings))
    return code or (SOME_FAILED if any(finding.state == FAILED for finding in findings) else FINISHED)


def _spec(settings: RunSettings, environ: Mapping[str, str]) -> EnvironmentSpec:
    policy = rollout_policy(settings, environ)
    return EnvironmentSpec(
        task_id="check",
        owner=current_owner("check-backend"),
        deadline=time.time() + _LIFE,
        image=policy.image,
        cwd=policy.cwd,
        limits=policy.limits,
        volumes=policy.volumes,
        variables=policy.variables,
        command_timeout=policy.command_timeout,
    )


def _print(findings: list[Finding], settings: RunSettings) -> None:
    if settings.json_summary:
        print_json([msgspec.to_builtins(finding) for finding in findings])
        return
    rows = [(finding.check, _result(finding), f"{finding.seconds:.1f} s") for finding in findings]
    print_table(f"Backend {settings.container_backend}", ("check", "result", "time"), rows)


def _result(finding: Finding) -> str:
    state = "FAILED" if finding.state == FAILED else finding.state
    return plain(f"{state}: {finding.note}" if finding.note else state)


async def _interruptible(work: Awaitable[None]) -> int:
    """0, or the exit code of the signal that cut it off; what it holds is closed."""
    task = asyncio.ensure_future(work)
    code = 0

    def interrupted(signal_code: int) -> None:
        nonlocal code
        code = code or signal_code
        task.cancel()

    for number, signal_code in EXIT_CODES.items():
        asyncio.get_running_loop().add_signal_handler(number, interrupted, signal_code)
    try:
        await task
    except asyncio.CancelledError:
        if not code:
            raise
    return code


async def try_all(backend: Backend, spec: EnvironmentSpec, findings: list[Finding]) -> None:
    """Every check, each bounded and whatever became of others; those that all else needs come first, and without them
    nothing more is tried. Fills `findings`, so that an interrupt leaves those before it."""
    sandboxes = _Open(backend)
    try:
        for name, first in (("ready here", _ready), ("image", _image), ("sandbox starts", _starts)):
            findings.append(await _found(name, first(backend, spec, sandboxes), _OPEN_SECONDS))
            if findings[-1].state == FAILED:
                return
        for check in checks_of(spec):
            findings.append(await _found(check.name, _checked(check, backend, spec, sandboxes), _CHECK_SECONDS))
            if findings[-1].state == FAILED:  # who knows in what state it is
                await _close(sandboxes, findings)
    finally:
        await _close(sandboxes, findings)


async def _close(sandboxes: _Open, findings: list[Finding]) -> None:
    """It is told where that goes wrong."""
    ended = await _found("sandbox ends", sandboxes.close(), _OPEN_SECONDS)
    if ended.state == FAILED:
        findings.append(ended)


async def _found(name: str, work: Awaitable[str | None], seconds: float) -> Finding:
    """What became of a check, whatever that is."""
    began = time.monotonic()
    state, note = FAILED, ""
    try:
        async with asyncio.timeout(seconds):
            outcome = await guarded(work, through=(*MEANT, Unmet, NotHeld, NotTried, _Refused))
        if isinstance(outcome, Fault):
            note = str(outcome)
        else:
            state, note = OK, outcome.value or ""
    except (_Refused, NotHeld) as refused:
        state, note = REFUSED, str(refused)
    except NotTried as reason:
        state, note = NOT_TRIED, str(reason)
    except TimeoutError:
        note = f"no end within {seconds:g} s"
    except (Unmet, RowFailed, DiskFull, ToolError, UsageProblem) as problem:
        note = str(problem) or type(problem).__name__
    return Finding(check=name, state=state, note=note, seconds=round(time.monotonic() - began, 3))


async def _ready(backend: Backend, _spec: EnvironmentSpec, _sandboxes: _Open) -> None:
    if problem := await backend.check():
        raise UsageProblem(problem)


async def _image(backend: Backend, spec: EnvironmentSpec, _sandboxes: _Open) -> str:
    if not backend.takes_images:
        return "takes none"
    await backend.prepare(spec.image)
    return spec.image or "the backend's usual one"


async def _starts(_backend: Backend, spec: EnvironmentSpec, sandboxes: _Open) -> str:
    """Tells which image it has."""
    return (await sandboxes.like(spec)).image


async def _checked(check: Check, backend: Backend, spec: EnvironmentSpec, sandboxes: _Open) -> str | None:
    wanted = check.spec(spec)
    if check.alone is not None:
        await sandboxes.close()
        await check.alone(backend, wanted)
        return None
    try:
        environment = await sandboxes.like(wanted)
    except SandboxRefused as refused:
        if not check.optional:
            raise
        raise _Refused(str(refused)) from None
    return await check.on(environment)
