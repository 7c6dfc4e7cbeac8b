"""The shell text that a host is told: what makes a task's directory, guards it, and removes it. Pure.

A directory `batch-ssh-TOKEN` holds `workspace`, `home`, `temp`, `state` and the record `owner`. The session that makes
it, its door, stays: when the connection ends, it ends all that runs in the sandbox and leaves the directory to whoever
reaps. Of programs beside the shell it asks for `mkdir`, `rm`, `rmdir`, `chmod`, `sleep`, `id`, `find`.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from tools.environments import script
from tools.environments.base import Limits, Owner
from tools.environments.cgroup import OPTIONAL, Bases, Cgroup, find_bases, limit_files

PREFIX = "batch-ssh-"
PARTS = ("workspace", "home", "temp", "state")
_TOKEN = re.compile(r"[0-9a-f]{12}")


class Record(Struct, frozen=True):
    """The file `owner`: all that is needed to remove a directory without its maker."""

    owner: Owner
    deadline: float
    token: str
    groups: tuple[tuple[str, ...], ...]


class HostFacts(Struct, frozen=True):
    """What a host says of itself."""

    path: str
    base: str  # where the directories are
    user: str
    is_root: bool
    has_taskset: bool
    cpus: tuple[int, ...]  # those that sessions may run on
    groups: tuple[Bases, ...]  # places where a control group may be made, the best first


_FACTS = r"""
exec 2>/dev/null
printf '%s\n' "$PATH" "${TMPDIR:-/tmp}" "${USER:-${LOGNAME:-user}}" "$(id -u)" "$(command -v taskset)"
c=
while read -r y w; do case $y in Cpus_allowed_list:) c=$w;; esac; done </proc/self/status
printf '%s\n' "$c"
while IFS= read -r y; do printf '%s\n' "$y"; done </proc/self/mountinfo
echo
while IFS= read -r y; do printf '%s\n' "$y"; done </proc/self/cgroup
printf '%s ok%s\n' "$E" "$E"
"""


def facts_request(nonce: str) -> bytes:
    """Asks a host what it is like; `read_facts` reads the answer."""
    return b"E=%s\n%s" % (nonce.encode(), _FACTS.encode())


def read_facts(text: str) -> HostFacts | None:
    """From the answer to `facts_request`; None where that is not Linux."""
    lines = text.split("\n", 6)
    if len(lines) < 7 or not lines[5]:
        return None
    path, base, user, uid, taskset, cpus, rest = lines
    mounts, _, membership = rest.partition("\n\n")
    tops = re.sub(r"(?m)^([^:]*:[^:]*):.*$", r"\1:/", membership)
    found = [bases for text in (membership, tops) if (bases := find_bases(mounts, text.strip("\n")))]
    return HostFacts(
        path, base.rstrip("/"), user, uid == "0", bool(taskset), _numbers(cpus), tuple(dict.fromkeys(found))
    )


def _numbers(text: str) -> tuple[int, ...]:
    """0-2,5 -> 0, 1, 2, 5."""
    ranges = [part.partition("-") for part in text.split(",")]
    return tuple(number for low, _, high in ranges for number in range(int(low), int(high or low) + 1))


def shell_command(facts: HostFacts, mark: str) -> str:
    """What a session runs, whatever its user's own shell is: a POSIX shell without that one's variables."""
    return f"exec env -i {shlex.quote(f'PATH={facts.path}')} {script.MARKER}={mark} /bin/sh"


_COMMON = r"""
gone() { say "$1" "$2"; exit; }
empty() {
  for g; do :; done
  [ -e "$g/cgroup.procs" ] || return 0
  { echo 0 >"$g/pids.max"; }
  z=0
  while [ "$z" -lt 200 ]; do
    z=$((z+1)) u=
    while read -r y; do u=1; kill -KILL "$y"; done <"$g/cgroup.procs"
    [ "$u" ] || break
    [ "$z" -lt 5 ] || sleep 0.02
  done
  z=0
  while [ "$z" -lt 50 ]; do
    z=$((z+1)) u=
    for g; do [ ! -d "$g" ] || rmdir "$g" || u=1; done
    [ "$u" ] || return 0
    sleep 0.02
  done
  return 1
} 2>/dev/null
wipe() {
  rm -rf -- "$1/workspace" "$1/home" "$1/temp" "$1/state" || {
    chmod -R u+rwx -- "$1"
    rm -rf -- "$1/workspace" "$1/home" "$1/temp" "$1/state"
  } && rm -rf -- "$1"
} 2>/dev/null
"""

_DOOR = r"""
trap '' HUP INT TERM PIPE USR1 USR2
D=$B/batch-ssh-$T C=
exec 2>/dev/null
mkdir -p -- "$B"
mkdir -m 700 -- "$D" || gone "$E" "fault $D cannot be made"
printf %s "$R" >"$D/owner" || { rm -rf -- "$D"; gone "$E" "fault $D cannot be written to"; }
set -- "$B"/batch-ssh-*
[ $# -le "$Q" ] || { rm -rf -- "$D"; gone "$E" full; }
if [ "$W" ] && [ ! -d "$W" ]; then rm -rf -- "$D"; gone "$E" place; fi
mkdir -m 700 -- "$D/workspace" "$D/home" "$D/temp" "$D/state"
over() { if [ "$C" ]; then eval "empty $C"; else slay "$T." "$E" >/dev/null; fi; }
"""

_GUARD = r"""
say "$E" "made $C"
while IFS= read -r y; do
  case $y in
    remove)
      over && wipe "$D" && gone "$E" removed
      gone "$E" left;;
  esac
done
over
"""


def door(facts: HostFacts, record: Record, limits: Limits, nonce: str, cwd: str, capacity: int) -> bytes:
    """What the first session of a sandbox is told. It answers `made CGROUP…`, `full`, `place` or `fault WHY`; then to
    the line `remove`: `removed` or `left`."""
    values = {
        "B": facts.base,
        "T": record.token,
        "E": nonce,
        "R": msgspec.json.encode(record).decode(),
        "Q": str(capacity),
        "W": cwd if cwd.startswith("/") else "",
    }
    tries = "".join(
        _try_group(bases, folders, limits) for bases, folders in zip(facts.groups, record.groups, strict=True)
    )
    return b"%s%s\n%s" % (_functions(), _assignments(values), (_DOOR + tries + _GUARD).encode())


def _functions() -> bytes:
    return script.prelude("", "", b"sh") + _COMMON.encode()


def _assignments(values: Mapping[str, str]) -> bytes:
    return b" ".join(name.encode() + b"=" + script.quote(script.encoded(value)) for name, value in values.items())


def group_folders(facts: HostFacts, token: str) -> tuple[tuple[str, ...], ...]:
    """Where a sandbox's control group would be, a tuple of folders for each place."""
    return tuple(tuple(str(base / f"batch-{token}") for base in bases.folders) for bases in facts.groups)


def _try_group(bases: Bases, folders: tuple[str, ...], limits: Limits) -> str:
    """Makes the group, if there is none yet, or leaves no trace."""
    words = shlex.join(folders)
    hand_on = [f"echo '+memory +cpu +pids' >{shlex.quote(f'{bases.folders[0]}/cgroup.subtree_control')}"]
    sets = []
    for folder, file, text in limit_files(bases.version, folders, limits):
        path = shlex.quote(f"{folder}/{file}")
        sets.append(f"{{ [ ! -e {path} ] || echo {text} >{path}; }}" if file in OPTIONAL else f"echo {text} >{path}")
    return (
        'if [ -z "$C" ]; then\n'
        + "".join(f"{line}\n" for line in hand_on if bases.version == 2)
        + f"if mkdir {words} && {' && '.join(sets)}; then C={shlex.quote(words)}\n"
        + f"else rmdir {words}; fi\nfi\n"
    )


def refused(facts: HostFacts, limits: Limits) -> str:
    """Why a host that makes no control group for us cannot keep these limits; "" where it can."""
    whole = float(limits.cpus).is_integer() or limits.cpus >= len(facts.cpus)
    if facts.is_root:
        return "the number of processes (root is not bound by ulimit)"
    if not whole:
        return f"{limits.cpus:g} processors (only whole ones can be given)"
    if not facts.has_taskset and limits.cpus < len(facts.cpus):
        return "the number of processors (there is no taskset)"
    return ""


def confine(groups: Sequence[str], limits: Limits, cpus: Iterable[int]) -> str:
    """Shell text by which a shell puts itself under the limits; false if it cannot. Without a control group memory is
    limited per process, and processes per user."""
    if groups:
        return Cgroup(tuple(groups)).join_commands()
    some = ",".join(map(str, cpus))
    affinity = [f"taskset -cp {some} $$ >/dev/null"] if some else []
    processes = f"{{ ulimit -u {limits.pids} || ulimit -p {limits.pids}; }} 2>/dev/null"
    return " && ".join([*affinity, f"ulimit -d {limits.memory_mb << 10}", processes])


def enter(facts: HostFacts, token: str, confined: str) -> bytes:
    """The first line of a channel."""
    where = script.quote(script.encoded(f"{facts.base}/{PREFIX}{token}/workspace"))
    return b"exec 2>&1; cd -- %s && [ -e ../owner ] && { %s; } || exit 71\n" % (where, confined.encode())


_LIST = r"""
exec 2>/dev/null
for d in "$B"/batch-ssh-*; do
  [ -d "$d" ] && [ ! -L "$d" ] && [ -O "$d" ] || continue
  y= a=
  IFS= read -r y <"$d/owner"
  [ "$y" ] || a=$(find "$d" -prune -mmin +1)
  printf '%s|%s|%s\n' "${d##*/batch-ssh-}" "${a:+old}" "$y"
done
for d in /proc/[0-9]*; do
  if has '' "$d"; then printf 'runs %s\n' "${y##*BATCH_CALL=}"; fi
done
say "$E" ok
purge() {
  e=$1 M=$B/batch-ssh-$2 r=0
  eval "set -- $3 $2"
  while [ $# -gt 1 ]; do eval "empty $1" || r=1; shift; done
  [ -z "$K" ] || slay "$1." "$e" >/dev/null
  [ "$r" = 0 ] && wipe "$M" || r=1
  say "$e" "$r"
} 2>/dev/null
"""


def listing(facts: HostFacts, nonce: str) -> bytes:
    """Asks for all directories of this user; `purge` can be asked for afterwards."""
    return b"%s%s\n%s" % (_functions(), _assignments({"B": facts.base, "E": nonce}), _LIST.encode())


class Found(Struct, frozen=True):
    """A directory on a host. Without a record, `is_old` says that it has been so for a minute."""

    token: str
    record: Record | None
    is_old: bool
    runs: bool


def listed(output: str) -> list[Found]:
    """From what `listing` prints."""
    lines = output.splitlines()
    running = {line[5:17] for line in lines if line.startswith("runs ")}
    parts = [line.split("|", 2) for line in lines if line.count("|") >= 2]
    return [
        Found(token, _record(text, token), old == "old", token in running)
        for token, old, text in parts
        if _TOKEN.fullmatch(token)
    ]


def _record(text: str, token: str) -> Record | None:
    try:
        record = msgspec.json.decode(text, type=Record)
    except msgspec.DecodeError:
        return None
    return record if record.token == token else None


def purge(found: Found, nonce: str) -> bytes:
    """Ends what runs there and removes the directory; fields: 0 if that could be done."""
    groups = found.record.groups if found.record else ()
    words = shlex.join([shlex.join(folders) for folders in groups])
    return b"K=%s; %s" % (b"1" if found.runs else b"", script.words("purge", nonce, found.token, words))
