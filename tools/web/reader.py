"""Reads what was downloaded in one process beside each worker, so that no page can take the worker with it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tools.errors import ToolError
from tools.services import Services
from tools.threads import in_thread
from tools.web.child import received_text, send
from tools.web.extract import Job, Text

SECONDS = 20.0  # for one page
MAX_HELD = 32  # pages, each up to 10 MB
LARGE = 1_000_000  # bytes of a page after which the process is replaced: it may have grown

_ROOT = Path(__file__).parents[2]


class Reader:
    """One page at a time; the others wait. The process is started on first use, and again when a page has ended it.

    `places` are for pages that are being fetched or wait to be read: so many are in memory at most."""

    def __init__(self, _services: Services | None = None, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self.places = asyncio.Semaphore(MAX_HELD)
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def read(self, job: Job) -> Text:
        """Its text. Raises ToolError where the page breaks the reader or takes too long."""
        async with self._turn:
            try:
                return await self._read(job)
            except TimeoutError:
                raise ToolError(f"The page is too complex to be read within {self._seconds:g} s") from None
            except (EOFError, OSError):
                raise ToolError("The page is broken, or too complex to be read") from None

    async def _read(self, job: Job) -> Text:
        if self._process and self._process.poll() is not None:  # ended by something else
            self._end()
        process = self._process = self._process or _started()
        done = False
        try:
            async with asyncio.timeout(self._seconds):
                text = await in_thread(_exchanged, process, job)
            done = len(job.body) < LARGE
        finally:
            if not done:
                self._end()
        return text

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _closed(process)

    async def close(self) -> None:
        """Ends the process."""
        self._end()


def _started() -> "subprocess.Popen[bytes]":
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tools.web.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**kept, "PYTHONPATH": str(_ROOT), "LC_ALL": "C.UTF-8"},
        start_new_session=True,  # an interrupt is for the run, which then ends it
    )


def _exchanged(process: "subprocess.Popen[bytes]", job: Job) -> Text:
    assert process.stdin is not None
    assert process.stdout is not None
    send(process.stdin, msgspec.msgpack.encode(job))
    return received_text(process.stdout)


def _closed(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        try:
            stream.close()
        except OSError:  # what was still to be written has no reader
            continue
