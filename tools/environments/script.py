"""The shell text that goes into a channel, and how its answers are read. Pure.

A channel's shell is told functions once (`prelude`), then one line per request. Every answer ends with a trailer
`NONCE fields NONCE\\n`, whose nonce no command can know: it stands in no argument and no variable of a child.
Everything is POSIX `sh` built-ins but `cat`, `stat`, `mkdir`, `rm` where a request needs them.

A process that is just replacing its program shows no environment, or half of it. So a census after a command goes by
new process ids alone, which is quick too; `alive` is asked later and looks twice, and `slay` looks again at its end.

Files at the private prefix P: `P0` and `P1` hold exported variables (of the last finished command and of the one
before), `Pd` the directory a command ended in (empty: it did not come to its end), `Pc` a command too long for an
argument; `Pi0`, `Po0`, `Pi1`, `Po1` are what stands before and after every command's text.

`put` and `add` ask `cat` why a file took no more: not every shell's `printf` tells a full disk from a broken one.
"""

import re
from collections.abc import Mapping, Sequence

MARKER = "BATCH_CALL"
"""The variable by which every process of a call is known. Its value `token.N.` ends in a dot: no other begins so."""

HELD = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID", MARKER})
"""Variables that a shell holds itself, or we do: none can be set for a sandbox."""

IS_HELD = "the sandbox's shell holds it itself: no value can be given to it"

LONG_COMMAND = 100_000
"""Bytes. Linux takes no single argument above 128 KiB."""

KILL = """\
for d in /proc/[0-9]*; do
  while read -r k v _; do
    case $k in PPid:) [ "$v" != "$1" ] || kill -KILL "${d#/proc/}"; break;; esac
  done <"$d/status"
done 2>/dev/null
kill -KILL "$1"
"""
"""From another shell of the sandbox: kills the children of process $1, then itself."""

_CHUNK = 32_768

_FUNCTIONS = r"""
umask 022
trap : HUP INT QUIT TERM USR1 USR2 ALRM
unset CDPATH ENV BASH_ENV BATCH_CALL
L='
'
say() { printf '%s %s%s\n' "$1" "$2" "$1"; }
has() {
  y=
  while IFS= read -r y || [ -n "$y" ]; do case $y in *"BATCH_CALL=$1"*) return 0;; esac; done <"$2/environ"
  return 1
} 2>/dev/null
look() {
  s=Z p=none
  while read -r y w u; do case $y in State:) s=$w;; PPid:) p=$w; break;; esac; done <"$1/status"
} 2>/dev/null
all() {
  if [ "$J" ]; then H=; while read -r y; do H="$H /proc/$y"; done <"$J"
  else set -- /proc/[0-9]*; H=$*; fi
} 2>/dev/null
census() {
  for d in "$@"; do
    case $o in *" $d "*) continue;; esac
    look "$d"
    [ "$s" != Z ] || continue
    if [ "$K" ]; then
      y=
      read -r y <"/proc/$p/cmdline"
      case $y in *"$K"*) continue;; esac
    fi
    v=1
    return
  done
}
alive() {
  v=0
  all
  for d in $H; do
    if has "$1" "$d" || has "$1" "$d"; then v=1; break; fi
  done
  say "$2" "$v"
}
run() {
  c=$1 e=$2 b=$3 a=$4 w=$5 k=$6 v=0 D= o=
  { :; } >|"${P}d"
  if [ "$G" ]; then all; o=" $H "; fi
  x=126
  command eval 'BATCH_CALL=$c "$X" -c "$b" "${X##*/}" "$a" "$w" "$k" </dev/null; x=$?' 2>/dev/null
  if [ "$G" ]; then all; [ "$o" = " $H " ] || census $H; fi
  while IFS= read -r y; do D=$D$y$L; done <"${P}d"
  say "$e" "$x $v $D"
} 2>/dev/null
start() {
  e=$2
  BATCH_CALL=$1 "$X" -c "$3" "${X##*/}" "$4" "$5" "$6"
  say "$e" "$?"
  while read -r y; do :; done
  exit
} 2>/dev/null
slay() {
  V=' ' z=0 U=
  while [ "$z" -lt 50 ]; do
    z=$((z+1)) F= g=1
    while [ "$g" = 1 ]; do
      g=0
      all
      for d in $H; do
        q=${d#/proc/}
        case $V in *" $q "*) continue;; esac
        [ "$q" != $$ ] || continue
        look "$d"
        [ "$s" != Z ] || continue
        case $V in *" $p "*) ;; *) has "$1" "$d" || continue;; esac
        kill -STOP "$q"
        V="$V$q " F="$F $q" g=1
      done
    done
    if [ "$F" ]; then kill -KILL $F; U=; continue; fi
    [ -z "$U" ] || break
    U=1
  done
  say "$2" "$z"
} 2>/dev/null
get() {
  if [ -d "$2" ]; then x=directory
  elif [ ! -e "$2" ]; then x=missing
  elif [ ! -f "$2" ]; then x=special
  elif [ ! -r "$2" ]; then x=denied
  else
    x=done y=
    if command -v cat >/dev/null; then cat <"$2" || x=failed
    else while IFS= read -r y; do printf '%s\n' "$y"; done <"$2"; printf %s "$y"; fi
  fi
  say "$1" "$x"
} 2>/dev/null
put() {
  j=0 d=${2%/*}
  if [ "$d" ] && [ ! -d "$d" ]; then j=1; mkdir -p -- "$d" || { say "$1" '1 1'; F=1; return; }; fi
  printf %b "$3" >|"$2"
  F=$?
  [ "$F" = 0 ] || why "$2"
  say "$1" "$F $j"
} 2>&1
add() {
  if [ "$F" = 0 ]; then
    printf %b "$3" >>"$2"
    F=$?
    [ "$F" = 0 ] || why "$2"
  fi
  say "$1" "$F 0"
} 2>&1
why() { [ ! -f "$1" ] || [ ! -w "$1" ] || ! command -v cat >/dev/null || echo | cat >>"$1"; }
ls_() {
  if [ ! -e "$2" ]; then x=missing
  elif [ ! -d "$2" ]; then x=file
  elif [ ! -r "$2" ] || [ ! -x "$2" ]; then x=denied
  elif ! command -v stat >/dev/null; then x=tool
  else
    x=done
    (
      cd -- "$2" || exit
      set --
      for y in ./* ./.[!.]* ./..?*; do
        [ -e "$y" ] || [ -L "$y" ] || continue
        set -- "$@" "$y"
        if [ $# = 200 ]; then stat -c '%f %s %n' -- "$@"; set --; fi
      done
      [ $# = 0 ] || stat -c '%f %s %n' -- "$@"
    )
  fi
  say "$1" "$x"
} 2>/dev/null
del() {
  if [ ! -e "$2" ] && [ ! -L "$2" ]; then x=missing
  elif [ -d "$2" ] && [ ! -L "$2" ]; then x=directory
  else x=done; rm -f -- "$2" || x=failed; fi
  say "$1" "$x"
} 2>&1
"""

_BEGIN = r"""
while IFS= read -r y; do
  y=${y#export }; y=${y#declare -x }; y=${y%%=*}
  case $y in PATH|''|*[!A-Za-z0-9_]*|[0-9]*) ;; *) N="$N $y";; esac
done <"${P}0"
{ [ -d "$D" ] || mkdir -p -- "$D"; } && cd -- "$D" && pwd >|"${P}d" && printf %s "$V" >>"${P}0" && x=0
[ "$x" = 1 ] || IFS= read -r y <"${P}d"
"""


_FIND = rb"""
for s in bash sh; do
  SHELL=
  command -v "$s" >|%(file)s && IFS= read -r SHELL <%(file)s
  case $SHELL in
    /bin/"$s"|/usr/bin/"$s") break;;
    /*) ! "$SHELL" -c : || break;;
  esac
  if [ -x /bin/sh ]; then SHELL=/bin/sh; else SHELL=sh; fi
done </dev/null >/dev/null 2>&1
"""


def quote(text: bytes) -> bytes:
    """One shell word that stands for these bytes; they hold no NUL."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def words(*parts: str | bytes) -> bytes:
    """A line of quoted words."""
    return b" ".join(quote(part.encode() if isinstance(part, str) else part) for part in parts) + b"\n"


def prelude(private: str, processes: str, shell: bytes = b"", ours: str = "") -> bytes:
    """What makes a plain `sh` a channel. After each command it looks for new processes in `processes`: /proc, or a file
    that lists those of the sandbox; not where that is "". Children of a program with `ours` in its name are not new.

    The first channel has no `shell` yet. It looks for one, and keeps the variables that it was started with before ours
    may hide some. A shell that starts without HOME or SHELL would read the list of users for them.
    """
    find = b"SHELL=%s\n" % quote(shell) if shell else _find(_part(private, "d"))
    keep = b"" if shell else b"unset %s; export -p >|%s\n" % (MARKER.encode(), _part(private, "0"))
    file = "" if processes == "/proc" else processes
    names = quote(private.encode()), b"1" if processes else b"", quote(file.encode()), quote(ours.encode())
    assignments = b"P=%s G=%s J=%s K=%s X=$SHELL\n" % names
    return find + b'export HOME="${HOME-/}" SHELL\n' + keep + assignments + _FUNCTIONS.encode()


def _find(file: bytes) -> bytes:
    """Sets SHELL to the shell that there is, by way of a file. One at an odd place is tried: it may be no program."""
    return _FIND % {b"file": file}


def begin(private: str, nonce: str, cwd: str, variables: Mapping[str, str]) -> bytes:
    """The first request: variables, directory, and the files `i` and `o` of both slots.

    Fields: 0 or not, shell, directory; output: what failed.
    """
    exports = b"".join(b"export %s=%s\n" % (name.encode(), quote(encoded(value))) for name, value in variables.items())
    names = b"".join(b" " + name.encode() for name in variables if name != "PATH")
    request = b"x=1 y= N='%s' D=%s V=%s\n{\n%s" % (names, quote(encoded(cwd)), quote(exports), _BEGIN.encode())
    return request + _install(private) + b'} 2>&1\nsay %s "$x|$X|$y"\n' % nonce.encode()


def encoded(text: str) -> bytes:
    """UTF-8; lone surrogates, which are no text, become U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def _install(private: str) -> bytes:
    """Writes the files `i` and `o` that stand before and after each command's text; $N are the variables' names."""
    request = b""
    for slot in (0, 1):
        before = b'"$N"'.join(map(quote, _before(private, slot)))
        request += b"printf %%s %s >|%s\n" % (before, _part(private, f"i{slot}"))
        request += _store(f"{private}o{slot}", _after(private, slot))
    return request


def _before(private: str, slot: int) -> tuple[bytes, bytes]:
    """Variables, whose names come between the two parts, then the directory: $2, or home where that is gone; with $3 it
    has to be there. $1 is the command.

    stderr joins stdout only here: a shell that made the joint would report a child's death by a signal there. Before it
    is nowhere: what the shell says of variables that it reads again is no output of the command.
    """
    state = _part(private, str(slot))
    return (
        b"if [ -r %s ]; then unset" % state,
        b"""; . %(state)s; fi
set -- "$1" "$2" "$3" "${OLDPWD-}"
cd -- "$2" 2>/dev/null || if [ "$3" ]; then
printf 'cd: %%s: no such directory\n' "$2"; exit 126; else
cd -- "$HOME" 2>/dev/null || cd /; fi
export OLDPWD="$4" 2>/dev/null
trap %(trap)s EXIT
exec 2>&1
"""
        % {
            b"state": state,
            b"trap": quote(b'[ "${1-}" = kept ] || { %s; } 2>/dev/null' % _keep(private, slot)),
        },
    )


def _after(private: str, slot: int) -> bytes:
    return b'set -- kept "$?"; set +vx; %s\n' % _keep(private, slot)


def _keep(private: str, slot: int) -> bytes:
    """Keeps the variables in the other slot. The command may have set `noclobber`, or functions of these names."""
    state, where = (quote(f"{private}{name}".encode()) for name in (str(1 - slot), "d"))
    kept = b"unset -f command; unset %s; command export -p >|%s && command pwd >|%s"
    return kept % (MARKER.encode(), state, where)


def _part(private: str, name: str) -> bytes:
    return quote(f"{private}{name}".encode())


def foreground(private: str, slot: int, long: bool) -> bytes:
    """The text of a command's child shell, short because `ps` shows it.

    What the command exports is kept when it ends, by `exit` or by itself: it may set an EXIT trap of its own, so that
    is done both by our trap and after the command. Nothing but the command is traced under `set -x`, and it sees no
    positional parameters.
    """
    command = b"set --; . %s" % _part(private, "c") if long else b'eval "set --; $1"'
    return b". %s; %s\n\n{ . %s; } 2>/dev/null\nexit $2" % (  # bash skips a line behind a command that is none
        _part(private, f"i{slot}"),
        command,
        _part(private, f"o{slot}"),
    )


def background(private: str, slot: int, hello: str, pty: bool) -> bytes:
    """The text of the child shell of `start`: says `hello` and its process id, then is the command."""
    before = b". %s; trap - EXIT\n" % _part(private, f"i{slot}")
    ready = b"printf '%%s %%s\\n' %s $$\n" % hello.encode()
    if not pty:
        return before + ready + b'eval "set --; $1"'
    missing = b"command -v script >/dev/null || { printf '%%s none\\n' %s; exit 127; }\n" % hello.encode()
    return before + missing + ready + _IN_PTY


_IN_PTY = b"""export BATCH_SHELL="${SHELL-}" SHELL="${BASH:-/bin/sh}"
exec script -qefc 'SHELL=$BATCH_SHELL; unset BATCH_SHELL; '"$1" /dev/null"""
"""`script` takes its shell from SHELL, which is the command's to have."""


def store_command(private: str, command: bytes) -> bytes:
    """Puts a long command where `foreground(long=True)` reads it."""
    return _store(f"{private}c", command)


def _store(path: str, text: bytes) -> bytes:
    return b"printf %%s %s >|%s\n" % (quote(text), quote(path.encode()))


def escaped(data: bytes) -> bytes:
    """Bytes as `printf %b` takes them: it is the one way to make any byte that every `sh` has built in."""
    return data.replace(b"\\", b"\\\\").replace(b"\0", b"\\0000")


def store_file(nonce: str, path: bytes, data: bytes) -> list[bytes]:
    """Requests that replace a file; each has a trailer of its own with fields: 0 or not, parent made."""
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)] or [b""]
    verbs = ["put"] + ["add"] * (len(chunks) - 1)
    return [words(verb, nonce, path, escaped(chunk)) for verb, chunk in zip(verbs, chunks, strict=True)]


_ENTRY = re.compile(rb"(?:^|\n)([0-9a-f]+) (\d+) \./")
_KINDS = {0o100000: "file", 0o040000: "directory", 0o120000: "link"}


def listed(output: bytes) -> Sequence[tuple[bytes, str, int]]:
    """(name, kind, size) from `stat -c '%f %s %n' -- ./NAME…`: a name holds no slash, so `./` begins one."""
    parts = _ENTRY.split(output.removesuffix(b"\n"))[1:]
    modes, sizes, names = parts[0::3], parts[1::3], parts[2::3]
    return [
        (name, _KINDS.get(int(mode, 16) & 0o170000, "other"), int(size))
        for mode, size, name in zip(modes, sizes, names, strict=True)
    ]


class Trailer:
    """Finds the trailer in a byte stream that may be cut anywhere.

    `feed` returns what surely stands before it; once it is there, `fields` holds its text and `rest` what came after.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce.encode()
        self._held = b""
        self._begun = False
        self.fields: bytes | None = None
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """The payload among `data` and what was held back."""
        self._held += data
        payload = b"" if self._begun else self._before()
        if self._begun:
            self._after()
        return payload

    def _before(self) -> bytes:
        at = self._held.find(self._nonce)
        if at >= 0:
            self._begun = True
            payload, self._held = self._held[:at], self._held[at + len(self._nonce) :]
            return payload
        keep = self._partial()
        cut = len(self._held) - keep
        payload, self._held = self._held[:cut], self._held[cut:]
        return payload

    def _partial(self) -> int:
        """How many bytes at the end may be the nonce's beginning."""
        first = self._held.find(self._nonce[:1], max(0, len(self._held) - len(self._nonce) + 1))
        while first >= 0 and not self._nonce.startswith(self._held[first:]):
            first = self._held.find(self._nonce[:1], first + 1)
        return 0 if first < 0 else len(self._held) - first

    def _after(self) -> None:
        text, end, rest = self._held.partition(self._nonce + b"\n")
        if end:
            self.fields, self.rest, self._held = text[1:], rest, b""
