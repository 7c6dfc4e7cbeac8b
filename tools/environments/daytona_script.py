r"""The shell text of a Daytona sandbox, and how bytes cross a terminal there. Pure.

The service has one stream in both directions, a terminal over a WebSocket. Three traits of it have to be lived with.
It is a terminal: raw mode makes its input clean, what we print is base64. It drops who reads slower than it prints: so
nothing is printed that was not asked for, a chunk a request (a credit). Its input has no end: so it goes in frames.
Credits go another way than input, which a program that reads nothing may hold up: by the door, a terminal of its own.

Frames, lines of input: `.text` is text for `printf %b`; `N` says that N raw bytes follow; an empty line is the end.
Chunks, lines of output: base64, then a line `.`; a chunk without bytes is the end.

Whatever a shell of ours would say of a killed child must not stand among that: their stderr is nowhere.

Asked of an image are `sh` and, all of coreutils or busybox, base64, cat, dd, env, mkfifo, stty.
"""

import base64
import binascii
import re

from msgspec import Struct

from tools.environments.script import quote

WINDOW = 2
"""Chunks that may be on their way: the service drops who lets more than 256 pieces (4 KB mostly) wait."""

CHUNK = 65_536

FRAME = 32_768
"""Bytes. A WebSocket message of more than 64 KiB would end the connection."""

_SHORT = 1500
_READY = re.compile(rb"\nbatch-ready (\d+)\n")
_PLAIN = re.compile(rb"[^ -\[\]-~]")

_CHANNEL = r"""
S=${0%%/*}
. "$S/env"
stty raw -echo || exit 71
exec 2>/dev/null
trap : HUP INT QUIT TERM
mkfifo "$S/$1" || exit 71
X=$(command -v setsid)
{
  trap '' HUP INT QUIT TERM
  while IFS= read -r l; do
    case $l in
      .*) printf %%b "${l#.}";;
      '') exit;;
      *) dd "bs=$l" count=1 iflag=fullblock 2>/dev/null;;
    esac
  done
} | {
  { ulimit -u %(pids)d || ulimit -p %(pids)d; } 2>/dev/null || exit
  cd /
  exec $X sh 2>&1
} | {
  trap '' HUP INT QUIT TERM
  exec 4<>"$S/$1"
  printf '\nbatch-ready %%s\n' $$
  i=0
  while [ "$i" != %(window)d ]; do echo >&4; i=$((i+1)); done
  while read -r l <&4; do
    dd bs=%(chunk)d count=1 2>/dev/null | base64
    echo .
  done
} | {
  trap '' HUP INT QUIT TERM
  exec cat
}
"""

_DOOR = r"""
S=${0%/*}
. "$S/env"
stty raw -echo || exit 71
exec 2>/dev/null
trap : HUP INT QUIT TERM
c() { [ ! -p "$S/$1" ] || echo 1<>"$S/$1"; }
k() {
  A= B=' ' C=
  for d in /proc/[0-9]*; do
    while read -r a v _; do case $a in PPid:) A="$A ${d#/proc/}:$v"; break;; esac; done <"$d/status"
  done
  for a in $A; do case ${a#*:} in "$1") B="$B${a%:*} ";; esac; done
  for a in $A; do case $B in *" ${a#*:} "*) C="$C ${a%:*}";; esac; done
  kill -KILL $C $B "$1"
  rm -f "$S/$2"
} 2>/dev/null
p() { echo; }
printf '\nbatch-ready %s\n' $$
while IFS= read -r l; do
  case $l in [ckp]\ *) $l;; esac
done
"""

_SET_UP = r"""
for n in cat dd env mkfifo stty; do command -v $n >/dev/null || m="$m $n"; done
[ -n "$m" ] || [ "$(printf ab | dd bs=2 count=1 iflag=fullblock 2>/dev/null)" = ab ] || m=' dd iflag=fullblock'
[ -z "$m" ] || { echo "lacks$m"; exit; }
h=$HOME t=/tmp
[ -d "$h" ] || h=/
for d in /dev/shm /tmp /var/tmp "$h"; do
  S=${d%/}/.batch-runner-$T
  mkdir -m 700 "$S" 2>/dev/null && break
  S=
done
[ "$S" ] || { echo nowhere; exit; }
[ -d "$t" ] && [ -w "$t" ] || t=$S
w=/workspace
{ mkdir -p $w && [ -w $w ]; } 2>/dev/null || w=${h%/}/workspace
u=$(id -un 2>/dev/null) || u=${USER:-user}
while read -r a _ v _; do case $a in Uid:) i=$v; break;; esac; done </proc/self/status
read -r a b _ </proc/self/uid_map
q=max
read -r q </sys/fs/cgroup/pids.max
printf '%s' "$D" >"$S/door"
printf '%s' "$C" >"$S/channel"
export -p >"$S/env"
while read -r x n; do
  n=${n#-x } n=${n%%=*}
  case $n in ''|*[!A-Za-z0-9_]*) ;; DAYTONA_*|OTEL_*|HOME|PWD|OLDPWD) unset "$n";; esac
done <"$S/env"
export -p >"$S/env"
echo facts
printf '%s\n' "$S" "$w" "$h" "$t" "$u" "$i" "$a $b" "$q" "$(command -v env) -i $(command -v sh)"
"""


class Facts(Struct, frozen=True):
    """What a new sandbox says of itself: paths, and who bounds its processes."""

    folder: str
    cwd: str
    home: str
    temp: str
    user: str
    uid: str
    uid_map: str
    most_pids: str
    shell: str


def set_up(token: str, pids: int) -> str:
    """A command that makes our folder there and answers with `Facts`."""
    channel = _CHANNEL % {"pids": pids, "window": WINDOW, "chunk": CHUNK}
    text = b"T=%s D=%s C=%s\n" % (token.encode(), quote(_DOOR.encode()), quote(channel.encode()))
    packed = base64.b64encode(text + _SET_UP.encode()).decode()
    missing = "command -v base64 >/dev/null || { echo lacks base64; exit; }"
    return f"sh -c '{missing}; eval \"$(echo {packed} | base64 -d)\"'"


def read_facts(answer: str) -> Facts | str:
    """Facts, or why the image will not do."""
    said, found, rest = answer.partition("facts\n")
    lines = rest.splitlines()
    if found and len(lines) == len(Facts.__struct_fields__):
        return Facts(*lines)
    said = " ".join(said.split())
    if said.startswith("lacks "):
        return f"the image {said}: the daytona backend needs `sh` and coreutils (or busybox) in it"
    if said == "nowhere":
        return "the image has no folder for temporary files that its user may write to"
    return f"the sandbox's first command failed: {said[:300] or 'it said nothing'}"


def unbounded(facts: Facts, pids: int) -> bool:
    """Whether `ulimit` binds nobody there: root of the whole machine, and no smaller limit of the service itself."""
    has_limit = facts.most_pids.isdigit() and int(facts.most_pids) <= pids
    return facts.uid == "0" and facts.uid_map == "0 0" and not has_limit


def typed(facts: Facts, name: str) -> bytes:
    """The line that makes a new terminal's shell our door (name "") or the channel of that name."""
    program = f"{facts.folder}/channel {name}" if name else f"{facts.folder}/door"
    return f" exec {facts.shell} {program}\n".encode()


def ready(heard: bytes) -> tuple[str, bytes] | None:
    """(process id, what was printed after it) once the terminal is ours."""
    found = _READY.search(heard)
    return (found[1].decode(), heard[found.end() :]) if found else None


def frames(data: bytes) -> list[bytes]:
    """Input as it is sent, a message each."""
    parts = [data[at : at + FRAME] for at in range(0, len(data), FRAME)]
    return [_frame(part) for part in parts]


def _frame(part: bytes) -> bytes:
    if len(part) <= _SHORT:
        text = _PLAIN.sub(lambda found: b"\\0%03o" % found[0][0], part)
        if len(text) <= _SHORT:
            return b".%s\n" % text
    return b"%d\n%s" % (len(part), part)


END = b"\n"
"""The frame that ends the input."""


class Chunks:
    """Cuts what a terminal prints into chunks, wherever the stream was cut."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._has_point = False  # at the end of what is held: the rest of its line may come

    def feed(self, data: bytes) -> list[bytes]:
        """The chunks that are whole now; b"" is the end. Raises ValueError for what is none."""
        self._held.append(data)
        if b"." not in data and not self._has_point:
            return []
        *whole, rest = b"".join(self._held).split(b".\n")
        self._held, self._has_point = [rest], rest.endswith(b".")
        return [binascii.a2b_base64(text) for text in whole]
