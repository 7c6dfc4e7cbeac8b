"""Sandboxes on other machines over SSH: a directory of its own for each task, nothing more between them.

A host is any Linux machine with sshd and a POSIX shell; nothing is installed there. One connection a host carries every
session of this process. A sandbox's first session is its door (`ssh_script`): it makes the directory and, where it may,
a control group, and ends everything when it is told to or the connection is lost.
"""

import asyncio
import itertools
import math
import os
import random
import shlex
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from tools.environments import ssh_script
from tools.environments.base import Backend, BackendSettings, Environment, EnvironmentSpec
from tools.environments.channel import Channel, base_variables
from tools.environments.channels import Reply, new_nonce
from tools.environments.ending import to_the_end
from tools.environments.owner import is_dead
from tools.environments.shell import ShellEnvironment, new_token
from tools.environments.ssh_connection import MISSING_PACKAGE, Links, SshChannel, Target, parse_target
from tools.environments.ssh_script import Found, HostFacts, Record
from tools.errors import EnvironmentLost, RowFailed, SandboxRefused, SetupFailed, SetupTimeout, UsageProblem

_CHECK_SECONDS = 20.0
_ANSWER_SECONDS = 60.0
_REAP_SECONDS = 60.0
_REMOVE_SECONDS = 9.0
_FULL_PAUSE = (0.3, 1.0)  # seconds until hosts that were full are asked again
_DOWN_SECONDS = 30.0  # so long a host is left out that could not be reached


class Host:
    """One host, as this event loop sees it."""

    def __init__(self, target: Target, settings: BackendSettings) -> None:
        self.target = target
        self.links = Links(target, settings)
        self._facts: HostFacts | None = None
        self._asking = asyncio.Lock()

    async def facts(self) -> HostFacts:
        """What the host says of itself, asked once. Raises SetupFailed, EnvironmentLost."""
        async with self._asking:
            self._facts = self._facts or await self._asked()
        return self._facts

    async def _asked(self) -> HostFacts:
        channel, nonce = await self.links.open("exec /bin/sh"), new_nonce()
        try:
            await channel.write(ssh_script.facts_request(nonce))
            output, _ = await _answered(channel, nonce)
        except EnvironmentLost as lost:
            raise SetupFailed(f"{self.target}: /bin/sh does not run there ({lost})") from None
        finally:
            await channel.close()
        facts = ssh_script.read_facts(output)
        if facts is None:
            raise SetupFailed(f"{self.target} is not a Linux machine with a /proc")
        return facts

    async def shell(self, mark: str) -> SshChannel:
        """A shell there; what it starts bears the mark."""
        return await self.links.open(ssh_script.shell_command(await self.facts(), mark))

    @asynccontextmanager
    async def reaper(self) -> AsyncIterator[tuple[SshChannel, list[Found]]]:
        """A shell that can be asked to purge, and all directories there."""
        channel, nonce = await self.shell("reap"), new_nonce()
        try:
            await channel.write(ssh_script.listing(await self.facts(), nonce))
            output, _ = await _answered(channel, nonce)
            yield channel, ssh_script.listed(output)
        finally:
            await channel.close()


async def _answered(channel: SshChannel, nonce: str) -> tuple[str, str]:
    """(output, fields) of what was asked. Raises EnvironmentLost."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            output, fields = await Reply(channel, nonce).whole()
    except TimeoutError:
        raise EnvironmentLost("the host no longer answers") from None
    return output.decode(errors="replace"), fields.decode(errors="replace")


class Fleet:
    """The hosts, for all sandboxes of one event loop: connections end with the last of them."""

    def __init__(self, targets: Sequence[Target], settings: BackendSettings) -> None:
        self.hosts = [Host(target, settings) for target in targets]
        self.users = 0

    async def close(self) -> None:
        """Ends every connection."""
        await asyncio.gather(*(host.links.close() for host in self.hosts))


class Full(Exception):
    """A host holds as many sandboxes as it may."""


class Sandbox:
    """A directory on a host: its door, and what opens channels into it."""

    def __init__(self, spec: EnvironmentSpec, host: Host, facts: HostFacts, door: SshChannel, token: str) -> None:
        self.token = token
        self.folder = f"{facts.base}/{ssh_script.PREFIX}{self.token}"
        self._record = Record(spec.owner, spec.deadline, token, ssh_script.group_folders(facts, token))
        self._spec = spec
        self._host = host
        self._facts = facts
        self._door = door
        self._nonce = new_nonce()
        self._groups: list[str] = []
        self._confine = ""
        self.channels: list[SshChannel] = []
        """Those that were opened and may still be."""

    async def make(self, capacity: int) -> None:
        """Raises Full, SetupFailed, EnvironmentLost."""
        spec = self._spec
        request = ssh_script.door(self._facts, self._record, spec.limits, self._nonce, spec.cwd, capacity)
        await self._door.write(request)
        _, fields = await _answered(self._door, self._nonce)
        verdict, _, rest = fields.partition(" ")
        if verdict == "full":
            raise Full
        if verdict == "place":
            raise SandboxRefused(
                f"working directory {self._spec.cwd!r}: the ssh backend makes no directory outside its own folder"
            )
        if verdict != "made":
            raise SetupFailed(f"{self._host.target}: {rest}")
        self._groups = shlex.split(rest)
        self._confine = self._confined()

    def _confined(self) -> str:
        limits = self._spec.limits
        problem = "" if self._groups else ssh_script.refused(self._facts, limits)
        if problem:
            raise SandboxRefused(
                f"{self._host.target} cannot limit {problem}: let this user make control groups there (delegate"
                " one), or ask for other limits"
            )
        count = math.ceil(limits.cpus)
        some = random.sample(self._facts.cpus, count) if count < len(self._facts.cpus) else []
        return ssh_script.confine(self._groups, limits, some)

    def environment(self) -> ShellEnvironment:
        """What acts in it."""
        home, temp = f"{self.folder}/home", f"{self.folder}/temp"
        return ShellEnvironment(
            self._spec,
            backend="ssh",
            image="",
            cwd=self._spec.cwd or f"{self.folder}/workspace",
            private=f"{self.folder}/state/",
            variables=base_variables(home=home, temp=temp, user=self._facts.user),
            open_channel=self._open_channel,
            processes=f"{self._groups[-1]}/cgroup.procs" if self._groups else "/proc",
            token=self.token,
        )

    async def _open_channel(self) -> Channel:
        if self.is_lost():
            raise EnvironmentLost(f"the connection to {self._host.target} was lost, and the sandbox with it")
        channel = await self._host.shell(f"{self.token}.0.")
        self.channels = [one for one in self.channels if one.takes_room or one.is_cut]
        self.channels.append(channel)
        await channel.write(ssh_script.enter(self._facts, self.token, self._confine))
        return channel

    def is_lost(self) -> bool:
        """Whether a connection of its own is gone, or its door: all that ran in it ends then."""
        return not self._door.takes_room or any(channel.is_cut for channel in self.channels)

    async def remove(self) -> None:
        """Ends all that runs there and removes the directory; what cannot be done now is for `reap`."""
        try:
            with suppress(RowFailed):
                async with asyncio.timeout(_REMOVE_SECONDS):
                    await self._removed()
        except TimeoutError:
            pass
        finally:
            self._door.is_dropped = True
            await self._door.close()

    async def _removed(self) -> None:
        """By its door; by another way where the connection was lost."""
        if self._door.is_cut:
            async with self._host.reaper() as (channel, _):
                await _purged(channel, Found(self.token, self._record, is_old=False, runs=True))
            return
        await self._door.write(b"remove\n")
        while await self._door.read():  # its answer, if it was not asked before it had made anything
            pass


class SshBackend:
    """See `Backend`."""

    name = "ssh"
    takes_images = False
    isolates = False

    def __init__(self, settings: BackendSettings) -> None:
        self._settings = settings
        self._turns = itertools.count(os.getpid())  # workers do not all begin with the first host
        self._down: dict[Target, float] = {}  # hosts that could not be reached, and until when they are left out
        self._fleets: dict[asyncio.AbstractEventLoop, Fleet] = {}
        self._unreached: list[RowFailed] = []  # when it was last reaped

    async def check(self) -> str:
        """See `Backend.check`: every host has to be usable."""
        try:
            return _told(await self._faults())
        except (UsageProblem, SetupFailed) as problem:
            return str(problem)

    async def hindrance(self) -> str:
        """See `Lenient`: one host that answers is enough, but none may be there by mistake (its key, ours)."""
        try:
            faults = await self._faults()
        except (UsageProblem, SetupFailed) as problem:
            return str(problem)
        mistakes = [fault for fault in faults if fault and not isinstance(fault, EnvironmentLost)]
        return _told(mistakes or ([] if None in faults else faults))

    def warnings(self) -> Sequence[str]:
        """See `Outspoken`."""
        return [f"the run goes on without a host that does not answer: {fault}" for fault in self._unreached]

    async def _faults(self) -> list[RowFailed | None]:
        """What is wrong with each host. Raises UsageProblem, SetupFailed for what is wrong with all."""
        async with self._fleet() as fleet:
            return await asyncio.gather(*(_fault(host) for host in fleet.hosts))

    async def prepare(self, image: str) -> None:
        """Nothing: it takes no images."""

    @asynccontextmanager
    async def _fleet(self) -> AsyncIterator[Fleet]:
        """The hosts. Raises UsageProblem, SetupFailed."""
        loop = asyncio.get_running_loop()
        fleet = self._fleets.get(loop) or self._fleets.setdefault(loop, Fleet(self._targets(), self._settings))
        fleet.users += 1
        try:
            yield fleet
        finally:
            fleet.users -= 1
            if not fleet.users:
                del self._fleets[loop]
                await to_the_end(fleet.close())

    def _targets(self) -> list[Target]:
        if not self._settings.ssh_hosts:
            raise UsageProblem("ssh needs hosts: --ssh_hosts user@host:port[,…]")
        try:
            import asyncssh  # noqa: F401, PLC0415 - an optional package, imported when used
        except ImportError:
            raise SetupFailed(MISSING_PACKAGE) from None
        return [parse_target(text) for text in self._settings.ssh_hosts]

    def _in_turn(self, hosts: Sequence[Host]) -> list[Host]:
        """Every host, the next one first; those that could not be reached a moment ago only where there is no other."""
        first = next(self._turns) % len(hosts)
        turned = [*hosts[first:], *hosts[:first]]
        return [host for host in turned if self._down.get(host.target, 0.0) < time.monotonic()] or turned

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        _check_spec(spec)
        async with self._fleet() as fleet, self._placed(fleet, spec) as sandbox:
            environment = sandbox.environment()
            try:
                try:
                    await environment.enter()
                except EnvironmentLost:
                    if sandbox.is_lost():
                        raise
                    raise SetupFailed("the sandbox's shell ended at once: it cannot be put under its limits") from None
                yield environment
            finally:
                await to_the_end(_end(sandbox, environment))

    @asynccontextmanager
    async def _placed(self, fleet: Fleet, spec: EnvironmentSpec) -> AsyncIterator[Sandbox]:
        """A sandbox on the next host that takes one. Raises SetupTimeout where none does before the deadline."""
        while True:
            faults: list[RowFailed] = []
            hosts = self._in_turn(fleet.hosts)
            for host in hosts:
                try:
                    sandbox = await self._made(host, spec)
                except Full:
                    continue
                except EnvironmentLost as fault:
                    self._down[host.target] = time.monotonic() + _DOWN_SECONDS
                    faults.append(fault)
                    continue
                self._down.pop(host.target, None)
                yield sandbox
                return
            if len(faults) == len(hosts):
                raise faults[0]
            if time.time() > spec.deadline:
                raise SetupTimeout(f"every host holds {self._settings.ssh_capacity} sandboxes (ssh_capacity)")
            await asyncio.sleep(random.uniform(*_FULL_PAUSE))  # noqa: S311 - not a secret

    async def _made(self, host: Host, spec: EnvironmentSpec) -> Sandbox:
        """A new sandbox there; who is cancelled meanwhile leaves none."""
        token = new_token()
        door = await host.shell(f"{token}.0.")
        sandbox = Sandbox(spec, host, await host.facts(), door, token)
        try:
            await sandbox.make(self._settings.ssh_capacity)
        except BaseException:
            await to_the_end(sandbox.remove())
            raise
        return sandbox

    async def reap(self) -> int:
        """See `Backend.reap`; hosts that cannot be reached are left as they are."""
        try:
            async with self._fleet() as fleet:
                found = await asyncio.gather(*(_reaped(host) for host in fleet.hosts))
        except (UsageProblem, SetupFailed):
            return 0
        self._unreached = [each for each in found if isinstance(each, RowFailed)]
        return sum(each for each in found if isinstance(each, int))


def open_ssh(settings: BackendSettings) -> Backend:
    """The backend with these hosts."""
    return SshBackend(settings)


async def _end(sandbox: Sandbox, environment: ShellEnvironment) -> None:
    for channel in sandbox.channels:
        channel.is_dropped = True
    await environment.leave()
    await sandbox.remove()


async def _fault(host: Host) -> RowFailed | None:
    """Why it cannot be used: EnvironmentLost for what may pass."""
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            await host.facts()
    except RowFailed as fault:
        return fault
    except TimeoutError:
        return EnvironmentLost(f"{host.target}: no answer within {_CHECK_SECONDS:g} s")
    return None


def _told(faults: Iterable[RowFailed | None]) -> str:
    return "; ".join(str(fault) for fault in faults if fault)


async def _reaped(host: Host) -> int | RowFailed:
    """How many directories of the dead were removed there, or why it could not be asked."""
    if fault := await _fault(host):
        return fault
    try:
        async with asyncio.timeout(_REAP_SECONDS), host.reaper() as (channel, all_found):
            return sum([await _purged(channel, found) for found in all_found if is_stale(found)])
    except (RowFailed, TimeoutError):
        return 0


async def _purged(channel: SshChannel, found: Found) -> bool:
    nonce = new_nonce()
    await channel.write(ssh_script.purge(found, nonce))
    _, fields = await _answered(channel, nonce)
    return fields == "0"


def is_stale(found: Found) -> bool:
    """Whether nobody needs it: its maker is known to be dead, or its deadline has passed. Makers on other machines are
    known by their deadline alone."""
    record = found.record
    if record is None:
        return found.is_old
    return record.deadline < time.time() or bool(is_dead(record.owner))


def _check_spec(spec: EnvironmentSpec) -> None:
    if spec.limits.network == "none":
        raise SandboxRefused("the ssh backend cannot take the network away: choose docker")
    if spec.volumes:
        raise SandboxRefused("the ssh backend has no volumes: choose docker")
