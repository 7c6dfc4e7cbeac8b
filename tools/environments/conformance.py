"""The contract of environments in a short form, to be tried on any sandbox: each check a function of one.

A check returns what is worth telling, mostly nothing, and raises Unmet for what is not as it has to be, NotTried where
that cannot be seen: an image has a shell, and perhaps no `sleep`. The long form is the suite in tests/contract.
"""

import asyncio
import math
import os
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time

import msgspec
from msgspec import Struct

from tools.environments.base import Backend, CommandResult, Environment, EnvironmentSpec
from tools.errors import EnvironmentLost, SetupFailed

RETURN_SECONDS = 4.0  # within which a command with a limit of one second has to return
_SECONDS = 30.0  # for one command
_GONE_SECONDS = 15.0  # until what was begun or killed is seen to be so
_TRIES = 3  # of what is measured by the clock: another program may have had the processor
_MEMORY_MB, _PIDS = 100, 64
_LOOPS, _LINES = 8, 5000
_SLACK = 1.2  # processors that loops may get, to those they are to have
_WHOLE = ("daytona",)  # sells no fractions of a processor
_UNCOUNTED = ("modal",)  # counts no processes of root's
_ODD_NAMES = ("plain", "-dash", "sp ace", "qu'o\"te", "new\nline", "$(touch x)", "ünï", "*", "back\\slash", "-")
_SIZE = 1_000_000
# Processes that a shell sees and that sleep so many seconds. `read` leaves NUL bytes out.
_COUNT = """\
n=0
for f in /proc/[0-9]*/cmdline; do
  line=; {{ read -r line <"$f"; }} 2>/dev/null
  case $line in *sleep{0}) n=$((n + 1)) ;; esac
done
echo $n"""
# A shell that tells of a killed command tells its text, in which what it prints must not be found.
_HUNGRY = "x=0123456789abcdef; i=0; while [ $i -lt 26 ]; do x=$x$x; i=$((i + 1)); done; echo he$((0))ld"
_MANY = """\
trap "kill \\$all" EXIT; all=; i=0
while [ $i -lt 100 ]; do sleep 20 & all="$all $!"; i=$((i + 1)); done; echo all of $i"""
_INTERFACES = 'while read -r name _; do case $name in *:*) echo "${name%%:*}" ;; esac; done </proc/net/dev'


class Unmet(Exception):
    """Something is not as the contract has it; the text says what was seen."""


class NotTried(Exception):
    """Whether something is as the contract has it cannot be seen here; the text says why."""


class NotHeld(Exception):
    """Something is not as the contract has it, as its backend tells whoever uses it; the text says what was seen."""


class Check(Struct, frozen=True, kw_only=True):
    """`limits`: what the sandbox's differ in from the run's. `optional`: a backend may refuse such a sandbox, if it
    says so. `alone`: instead of `act`, for what needs more than one open sandbox. `needs`: programs of the sandbox
    without which it cannot be tried."""

    name: str
    act: Callable[[Environment], Awaitable[str | None]] | None = None
    alone: Callable[[Backend, EnvironmentSpec], Awaitable[None]] | None = None
    limits: Mapping[str, float | str] = {}
    optional: bool = False
    needs: tuple[str, ...] = ()

    async def on(self, environment: Environment) -> str | None:
        """Tries it on a sandbox. Raises Unmet, NotTried, NotHeld."""
        assert self.act is not None
        await _refuse_without(environment, self.needs)
        return await self.act(environment)

    def spec(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        """The sandbox that it wants."""
        return msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, **self.limits))


def checks_of(spec: EnvironmentSpec) -> tuple[Check, ...]:
    """All of them, for sandboxes like this one. Such as want the same sandbox stand together."""

    async def processors(environment: Environment) -> str:
        return await processors_used(environment, spec.limits.cpus)

    small: Mapping[str, float | str] = {"memory_mb": _MEMORY_MB, "pids": _PIDS}
    return (
        Check(name="exit code, stderr joined", act=exit_code_and_joined_stderr),
        Check(name="directory and exports persist", act=directory_and_exports_persist),
        Check(name="stdin is empty", act=stdin_is_empty),
        Check(name="output that is no UTF-8", act=output_that_is_no_utf8),
        Check(name="20 MB of output within bounds", act=much_output_within_bounds),
        Check(name="command of 1 MB", act=long_command),
        Check(name="quotes, newlines, substitutions", act=quotes_newlines_and_substitutions),
        Check(name="background process lives on", act=background_process_lives_on, needs=("sleep",)),
        Check(name="time-out of 1 s, SIGTERM ignored", act=timeout_despite_ignored_sigterm, needs=("sleep",)),
        Check(name="time-out kills other sessions", act=timeout_kills_other_sessions, needs=("sleep", "setsid")),
        Check(name="files with odd names", act=files_with_odd_names, needs=("mkdir", "rm", "stat")),
        Check(name="1 MB up and down", act=one_megabyte_up_and_down, needs=("rm",)),
        Check(name="processors", act=processors, needs=("sleep",)),
        Check(name="limit of memory", act=memory_is_limited, limits=small),
        Check(name="limit of processes", act=processes_are_limited, limits=small, needs=("sleep",)),
        Check(name="network none", act=no_network, limits={"network": "none"}, optional=True),
        Check(name="nothing is left at the end", alone=nothing_is_left),
        Check(name="what is past its time is removed", alone=past_its_deadline_is_removed),
    )


# commands


async def exit_code_and_joined_stderr(environment: Environment) -> None:
    """See `Check`."""
    result = await environment.run("echo out; echo err >&2; echo out again; exit 3", timeout=_SECONDS)
    _same((result.output, result.exit_code, result.timed_out), ("out\nerr\nout again\n", 3, False))


async def directory_and_exports_persist(environment: Environment) -> None:
    """See `Check`."""
    await _printed(environment, "export BACK=$PWD KEPT='x\n\"y\" $HOME'; PLAIN=1; cd /")
    shown = await _printed(environment, 'pwd; echo "$KEPT[$PLAIN]"; cd "$BACK"; unset BACK KEPT')
    _same(shown, '/\nx\n"y" $HOME[]\n')
    _same(await _printed(environment, 'echo "[$BACK]"'), "[]\n")


async def stdin_is_empty(environment: Environment) -> None:
    """See `Check`."""
    _same(await _printed(environment, 'read -r x; echo "$? [$x]"'), "1 []\n")


async def output_that_is_no_utf8(environment: Environment) -> None:
    """See `Check`."""
    _same(await _printed(environment, r"printf '\376a\303\n\342\202\254'"), "\ufffda\ufffd\n€")


async def much_output_within_bounds(environment: Environment) -> None:
    """See `Check`."""
    command = "x=y; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do x=$x$x; done; i=0\n"
    command += f"while [ $i -lt {_LINES} ]; do echo $x; i=$((i + 1)); done; echo end"
    result = await environment.run(command, timeout=_SECONDS, max_chars=1000)
    whole = _LINES * 4097 + 4
    _same((result.exit_code, result.omitted_chars), (0, whole - 1000))
    _same((result.output[:9], result.output[-6:], len(result.output) < 1100), ("y" * 9, "y\nend\n", True))


async def long_command(environment: Environment) -> None:
    """See `Check`."""
    text = 'x"$(no)\\\n' * (_SIZE // 9)
    _same(await _printed(environment, f"long='{text}'\necho ${{#long}}"), f"{len(text)}\n")


async def quotes_newlines_and_substitutions(environment: Environment) -> None:
    """See `Check`."""
    command = "printf '%s,' 'a\"b' \"c'd\" $(echo 'x y') `echo z`\nread -r line <<'END'\n$HOME \\ 'q'\nEND\n"
    _same(
        await _printed(environment, command + 'printf \'%s|\' "$line" "$@" # no ends'), "a\"b,c'd,x,y,z,$HOME \\ 'q'|"
    )


# processes


async def background_process_lives_on(environment: Environment) -> None:
    """See `Check`."""
    seconds = _unique()
    result = await environment.run(f"sleep {seconds} & export LATER=$!\necho started", timeout=_SECONDS)
    _same((result.output, result.exit_code, result.background), ("started\n", 0, True))
    _same(await _living(environment, seconds), 1)
    await _printed(environment, "kill -9 $LATER; unset LATER")


async def timeout_despite_ignored_sigterm(environment: Environment) -> str:
    """See `Check`."""
    took = [await _timed_out(environment, "trap '' TERM INT HUP; (sleep @) & sh -c 'sleep @ & sleep @; :' & sleep @")]
    while took[-1] > RETURN_SECONDS and len(took) < _TRIES:
        took.append(await _timed_out(environment, "trap '' TERM INT HUP; (sleep @) & sleep @"))
    if took[-1] > RETURN_SECONDS:
        raise Unmet(f"returned after {min(took):.1f} s at best")
    return f"after {took[-1]:.1f} s"


async def timeout_kills_other_sessions(environment: Environment) -> None:
    """See `Check`."""
    await _timed_out(environment, "setsid sleep @ & (setsid sh -c 'sleep @ & sleep @' &); sleep @")


async def _timed_out(environment: Environment, command: str) -> float:
    """Seconds until a command, which sleeps @, returns that may take one."""
    seconds, began = _unique(), monotonic()
    result = await environment.run("echo before; " + command.replace("@", seconds), timeout=1)
    took = monotonic() - began
    _same((result.output, result.exit_code, result.timed_out), ("before\n", 124, True))
    _same(await _living(environment, seconds), 0)
    return took


# files


async def files_with_odd_names(environment: Environment) -> None:
    """See `Check`."""
    for name in _ODD_NAMES:
        await environment.write(f"odd names/{name}", name.encode())
    for name in _ODD_NAMES:
        _same(await _bytes_of(environment, f"odd names/{name}"), name.encode())
    _same([entry.name for entry in await environment.list("odd names")], sorted(_ODD_NAMES))
    for name in _ODD_NAMES:
        await environment.delete(f"odd names/{name}")
    _same(list(await environment.list("odd names")), [])


async def one_megabyte_up_and_down(environment: Environment) -> None:
    """See `Check`."""
    data = os.urandom(_SIZE)
    await environment.write("one megabyte", data)
    back = await _bytes_of(environment, "one megabyte")
    if back != data:
        await _refuse_without(environment, ("cat",))  # a shell reads no NUL
    _same((len(back), back == data), (_SIZE, True))
    await environment.delete("one megabyte")


# limits


async def processors_used(environment: Environment, limit: float) -> str:
    """How many processors loops get together: no more than the limit. Such as get less show none."""
    loops = min(math.ceil(limit) + 1, _LOOPS)
    begin = "".join(f"while :; do :; done & p{number}=$!\n" for number in range(loops))
    end = "".join(f"kill -9 $p{number}; wait $p{number}\n" for number in range(loops))
    began = monotonic()
    # A shell of its own: `times` is of its children.
    shown = await _printed(environment, f"sh -c '{begin}sleep 1\n{{ {end}}} 2>/dev/null\ntimes'")
    took = monotonic() - began
    used = sum(60 * int(minutes) + float(rest) for minutes, rest in re.findall(r"(\d+)m([\d.]+)s", shown)) / took
    sold = math.ceil(limit) if environment.backend in _WHOLE else limit
    seen = f"{loops} loops got {used:.2f} processors, the limit is {sold:g}"
    if used > _SLACK * sold:
        raise Unmet(seen)
    if used < sold / _SLACK:
        raise NotTried(f"{seen}: the machine is busy, or has no more")
    return seen


async def memory_is_limited(environment: Environment) -> None:
    """See `Check`. Some give whole GiB only: more than one is asked for."""
    result = await environment.run(f"sh -c '{_HUNGRY}'", timeout=_SECONDS)
    if "he0ld" in result.output:
        raise Unmet(f"a command could hold 1 GiB, the limit was {_MEMORY_MB} MiB")
    await _usable(environment)


async def processes_are_limited(environment: Environment) -> None:
    """See `Check`."""
    result = await environment.run(f"sh -c '{_MANY}'", timeout=_SECONDS / 3)  # bash waits for room, again and again
    if "all of 100" in result.output:
        seen = f"a command could start 100 processes, the limit was {_PIDS}"
        if environment.backend in _UNCOUNTED:
            raise NotHeld(f"not held by {environment.backend}: {seen}")
        raise Unmet(seen)
    await _usable(environment)


async def no_network(environment: Environment) -> None:
    """See `Check`."""
    names = (await _printed(environment, _INTERFACES)).split()
    if others := [name for name in names if name.startswith(("eth", "en", "wl"))]:
        raise Unmet(f"there are {', '.join(others)}")


# the end


async def nothing_is_left(backend: Backend, spec: EnvironmentSpec) -> None:
    """See `Check`. What can be seen from another sandbox of the same kind, and on this machine."""
    seconds = _unique()
    async with backend.open(spec) as environment:
        await _refuse_without(environment, ("sleep",))
        await environment.start(f"sleep {seconds}")
        await _printed(environment, f"(sleep {seconds} &) >/dev/null 2>&1; sleep {seconds} >/dev/null 2>&1 &")

        async def begun() -> bool:
            return await _living(environment, seconds) == 3

        if not await _eventually(begun):
            raise Unmet("of three processes in the background not all run")
    await _expect_lost(environment)
    async with backend.open(spec) as another:

        async def gone() -> bool:
            return not await _living(another, seconds) and not await asyncio.to_thread(_living_here, seconds)

        if not await _eventually(gone):
            raise Unmet("processes of a sandbox outlived it")


async def past_its_deadline_is_removed(backend: Backend, spec: EnvironmentSpec) -> None:
    """See `Check`. Another run may be the one that removes it, also while it starts."""
    with suppress(EnvironmentLost, SetupFailed):
        async with backend.open(msgspec.structs.replace(spec, deadline=time() - 1)) as environment:
            await backend.reap()
            await _expect_lost(environment)


async def _expect_lost(environment: Environment) -> None:
    try:
        result = await environment.run("echo alive", timeout=_SECONDS)
    except EnvironmentLost:
        return
    raise Unmet(f"the sandbox still answers: {_short(result)}")


# what they share


def _unique() -> str:
    """Seconds to sleep that no other process sleeps."""
    return str(random.randrange(10**7, 10**8))  # noqa: S311 - not a secret


async def _refuse_without(environment: Environment, programs: Sequence[str]) -> None:
    """Raises NotTried where it has one of them not."""
    tests = "".join(f"command -v {program} >/dev/null || echo {program}\n" for program in programs)
    missing = (await _printed(environment, tests)).split() if tests else []
    if missing:
        raise NotTried(f"the sandbox has no `{'`, no `'.join(missing)}`")


def _same(found: object, expected: object) -> None:
    if found != expected:
        raise Unmet(f"expected {_short(expected)}, got {_short(found)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} … {text[-60:]}"


async def _printed(environment: Environment, command: str) -> str:
    """What a command that has to succeed prints."""
    result: CommandResult = await environment.run(command, timeout=_SECONDS)
    if result.exit_code:
        raise Unmet(f"a command ended with {result.exit_code}: {_short(result.output)}")
    return result.output


async def _usable(environment: Environment) -> None:
    _same(await _printed(environment, "echo usable"), "usable\n")


async def _bytes_of(environment: Environment, path: str) -> bytes:
    return b"".join([chunk async for chunk in environment.read(path)])


async def _living(environment: Environment, seconds: str) -> int:
    return int(await _printed(environment, _COUNT.format(seconds)))


def _living_here(seconds: str) -> int:
    return sum(_sleeps(place, seconds) for place in Path("/proc").glob("[0-9]*/cmdline"))


def _sleeps(place: Path, seconds: str) -> bool:
    try:
        return place.read_bytes().endswith(f"sleep\0{seconds}\0".encode())
    except OSError:
        return False


async def _eventually(holds: Callable[[], Awaitable[bool]]) -> bool:
    until = monotonic() + _GONE_SECONDS
    while not await holds():
        if monotonic() > until:
            return False
        await asyncio.sleep(0.05)
    return True
