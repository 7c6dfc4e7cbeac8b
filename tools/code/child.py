"""What `execute_code` runs in a sandbox: it starts a script and carries the script's calls of tools to us. It travels
as text and needs nothing but the standard library of the sandbox's Python, 3.6 or later.

stdin: a line of JSON, {mark, folder, files: {name: text}, output, errors} (the last two in characters to keep), then
lines `answer JSON`, an object for each call, and `stop`. stdout: lines `MARK call JSON`, the JSON as the script wrote
it, and at last `MARK end JSON` with {code, output, errors, lives}, the code -N after signal N. Lines without the mark
are what went wrong in here.

The script is a process of its own, in a session of its own, and has none of these streams. It calls tools over a socket
in the folder (in $TMPDIR, or where else there is room; removed at the end), one connection a call; while one is served
the others wait.
"""

import codecs
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PIECE = 65536
DRAINED = 32  # pieces: more than a pipe holds
LONGEST_CALL = 32_000_000  # bytes
SLOWEST_READER = 30.0  # seconds for a script to take an answer


class Kept:
    """Head and tail of what comes out of a pipe."""

    def __init__(self, pipe: Any, room: int) -> None:
        self.is_open = True
        self._pipe = pipe
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._head_room = room * 2 // 5
        self._tail_room = room - self._head_room
        self._head, self._tail, self._size = "", "", 0
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """For `select`."""
        number: int = self._pipe.fileno()
        return number

    def take(self) -> bool:
        """Reads a piece; False if there is none."""
        try:
            data = os.read(self.fileno(), PIECE)
        except BlockingIOError:
            return False
        self.is_open = bool(data)
        text = self._decode(data, not data)
        self._size += len(text)
        room = self._head_room - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-self._tail_room :]
        return self.is_open

    def drain(self) -> None:
        """Reads what has been written so far."""
        for _ in range(DRAINED):
            if not self.is_open or not self.take():
                return

    def text(self) -> str:
        """With a line between the two that says how many characters were left out."""
        omitted = self._size - len(self._head) - len(self._tail)
        marker = f"\n[... {omitted} characters left out ...]\n" if omitted else ""
        return self._head + marker + self._tail


class Lines:
    """Whole lines out of pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def __len__(self) -> int:
        return len(self._rest)

    def feed(self, data: bytes) -> "list[bytes]":
        """The lines that end in these bytes."""
        self._rest += data
        if b"\n" not in data:
            return []
        whole = bytes(self._rest).split(b"\n")
        self._rest = bytearray(whole.pop())
        return whole


class Stage:
    """One script from its start to its end."""

    def __init__(self, order: "dict[str, Any]", orders: Lines) -> None:
        self._order = order
        self._orders = orders
        self._folder = _made(order["folder"])
        self._caller: Any = None  # the connection of the call that is being made
        self._call = Lines()
        self._overlong = False  # the call is, and is read to its end without being kept
        self._asked = False  # the call is with our host

    def play(self) -> None:
        """The script, its calls, and what it left."""
        try:
            self._open()
            while self._script.poll() is None:
                self._step()
            for kept in (self._output, self._errors):
                kept.drain()
        finally:
            shutil.rmtree(str(self._folder), ignore_errors=True)
        self._say("end", json.dumps(self._end()).encode())
        while self._pipes():  # a process that it left running must not die of what it prints
            for kept in select.select(self._pipes(), [], [])[0]:
                kept.take()

    def _open(self) -> None:
        for name, text in self._order["files"].items():
            (self._folder / name).write_bytes(text.encode("utf-8", "replace"))
        folder = os.open(str(self._folder), os.O_RDONLY)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"/proc/self/fd/{folder}/tools")  # a socket's own path may have 107 bytes
        self._door.listen(100)
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        self._script = self._started()
        self._output = Kept(self._script.stdout, self._order["output"])
        self._errors = Kept(self._script.stderr, self._order["errors"])

    def _started(self) -> "subprocess.Popen[bytes]":
        paths = [str(self._folder), os.environ.get("PYTHONPATH", "")]
        ours = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",  # what it printed is there however it ends
            "PYTHONIOENCODING": "utf-8:backslashreplace",
        }
        return subprocess.Popen(  # noqa: S603 - to run a script is what it is for
            [sys.executable or "python3", str(self._folder / "script.py")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **ours},
            start_new_session=True,
        )

    def _pipes(self) -> "list[Kept]":
        return [kept for kept in (self._output, self._errors) if kept.is_open]

    def _step(self) -> None:
        waiting: list[Any] = [0, self._woken, *self._pipes()]
        if not self._asked:
            waiting.append(self._caller or self._door)
        for source in select.select(waiting, [], [])[0]:
            if source == 0:
                self._obey()
            elif source == self._woken:
                os.read(self._woken, PIECE)
            elif source is self._door:
                self._caller, self._call, self._overlong = self._door.accept()[0], Lines(), False
            elif source is self._caller:
                self._listen()
            else:
                source.take()

    def _obey(self) -> None:
        data = os.read(0, PIECE)
        if not data:  # nobody is there any more
            self._kill()
        for line in self._orders.feed(data):
            if not line.startswith(b"answer ") or not line.endswith(b"}"):  # stop, or an answer that it cut off
                self._kill()
            elif self._asked:
                self._answer(line[len(b"answer ") :])

    def _kill(self) -> None:
        with suppress(OSError):  # it has left its group
            os.killpg(self._script.pid, signal.SIGKILL)
        self._script.kill()

    def _listen(self) -> None:
        try:
            data = self._caller.recv(PIECE)
        except OSError:
            data = b""
        lines = self._call.feed(data)
        if lines and self._overlong:  # it hears no answer before it has said all
            self._answer(b'{"error": "the call is too long"}')
        elif lines:
            self._asked = True
            self._say("call", lines[0])
        elif not data:
            self._hang_up()
        elif self._overlong or len(self._call) > LONGEST_CALL:
            self._call, self._overlong = Lines(), True

    def _answer(self, answer: bytes) -> None:
        self._caller.settimeout(SLOWEST_READER)
        with suppress(OSError):  # the caller has ended
            self._caller.sendall(answer)
        self._hang_up()

    def _hang_up(self) -> None:
        self._caller.close()
        self._caller, self._asked = None, False

    def _say(self, kind: str, data: bytes) -> None:
        rest = memoryview(f"{self._order['mark']} {kind} ".encode() + data + b"\n")
        while rest:
            rest = rest[os.write(1, rest) :]

    def _end(self) -> "dict[str, Any]":
        return {
            "code": self._script.returncode,
            "output": self._output.text(),
            "errors": self._errors.text(),
            "lives": bool(self._pipes()),
        }


def _made(name: str) -> Path:
    """The folder, in the first place that takes it: as Python's own temporary files."""
    for place in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "."):  # noqa: S108 - as the sandbox has it
        folder = Path(place or "/tmp", name).absolute()  # noqa: S108 - as above
        with suppress(OSError):
            folder.mkdir(0o700)
            return folder
    sys.exit("There is no folder that takes temporary files: set TMPDIR to one")


def main() -> None:
    """Reads the order and carries it out."""
    orders = Lines()
    lines: list[bytes] = []
    while not lines:
        data = os.read(0, PIECE)
        if not data:
            return
        lines = orders.feed(data)
    Stage(json.loads(lines[0].decode()), orders).play()


if __name__ == "__main__":
    main()
