"""The process that reads pages: jobs come on stdin, texts go to stdout, each with its length in four bytes before it.

It is started as a program. What it cannot take (a page that breaks a parser, memory or time beyond its limits) ends it,
and whoever asked sees that; so does the end of whoever asked: its stdin ends.
"""

import resource
import signal
import sys
from typing import IO

import msgspec

from tools.web.extract import Job, Text, read_text

MEMORY = 2 << 30  # bytes of address space
CPU_SECONDS = 25.0  # for one page


def main() -> None:
    """Answers until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while job := receive(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)  # its signal ends the process
        text = read_text(msgspec.msgpack.decode(job, type=Job))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        send(sys.stdout.buffer, msgspec.msgpack.encode(text))


def receive(stream: IO[bytes]) -> bytes:
    """The next message; b"" when there is none any more."""
    head = stream.read(4)
    size = int.from_bytes(head, "big")
    data = stream.read(size)
    return data if len(head) == 4 and len(data) == size else b""


def send(stream: IO[bytes], data: bytes) -> None:
    """Raises OSError when nobody reads."""
    stream.write(len(data).to_bytes(4, "big"))
    stream.write(data)
    stream.flush()


def received_text(stream: IO[bytes]) -> Text:
    """The answer to a job. Raises EOFError."""
    data = receive(stream)
    if not data:
        raise EOFError
    return msgspec.msgpack.decode(data, type=Text)


if __name__ == "__main__":
    main()
