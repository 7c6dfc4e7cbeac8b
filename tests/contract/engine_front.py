"""The machine's Docker engine behind a socket of its own, with one image that only a pull brings: it counts pulls."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ENGINE = "/var/run/docker.sock"
_SPOILED = b"HTTP/1.1 500 Oops\r\nContent-Type: application/json\r\nConnection: close\r\n\r\ncaf\xe9"
_PULLED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + b'{"status":"Downloaded"}\n'
)


class EngineFront:
    """`pulls` are the images asked for. A pull takes half a second, then the image is there as another name of
    `source`. Of `spoiled`, each the last word of a path that is posted to, each is answered once as no engine does."""

    def __init__(self, source: str) -> None:
        self.pulls: list[str] = []
        self.spoiled: list[str] = []
        self._source = source
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which carries one request."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n", 1)[0].decode()
            target = urlsplit(line.split(" ")[1])
            if line.startswith("POST") and (word := target.path.rpartition("/")[2]) in self.spoiled:
                self.spoiled.remove(word)
                writer.write(_SPOILED)
            elif line.startswith("POST") and target.path.endswith("/images/create"):
                writer.write(await self._pull(parse_qs(target.query)))
            else:
                await _pass_on(head, reader, writer)
        writer.close()

    async def close(self) -> None:
        """Ends the connections that the engine holds open still, though whoever asked is gone."""
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)
        await asyncio.sleep(0)  # what was closed is gone a round later

    async def _pull(self, query: dict[str, list[str]]) -> bytes:
        name = ":".join(query[key][0] for key in ("fromImage", "tag") if key in query)
        self.pulls.append(name)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(subprocess.run, ["docker", "tag", self._source, name], check=True)
        return _PULLED


async def _pass_on(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if b"\r\nupgrade:" not in head.lower():
        first, rest = head.split(b"\r\n", 1)
        head = first + b"\r\nConnection: close\r\n" + rest
    engine_reader, engine_writer = await asyncio.open_unix_connection(ENGINE)
    engine_writer.write(head)
    there = asyncio.create_task(_pump(reader, engine_writer))
    try:
        await _pump(engine_reader, writer)
    finally:
        there.cancel()
        engine_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


@asynccontextmanager
async def engine_front(socket: Path, source: str = "") -> AsyncIterator[EngineFront]:
    """DOCKER_HOST is `unix://SOCKET` meanwhile."""
    front = EngineFront(source)
    server = await asyncio.start_unix_server(front.serve, str(socket))
    try:
        yield front
    finally:
        server.close()
        await front.close()
