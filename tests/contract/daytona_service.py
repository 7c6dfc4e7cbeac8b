"""A stand-in for the Daytona service: what its SDK calls, each sandbox a Docker container with an ordinary user.

Terminals are real ones, and drop who reads too slowly, as the service's do. It ends with its stdin, and all it made.
`POST /test/faults` with JSON sets what goes wrong from then on, `GET /test/requests` has what was asked to be created.
"""

import asyncio
import base64
import json
import os
import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
import termios
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.containers import DockerContainer
from aiohttp import WSCloseCode, web

from tests.service import serving

KEY = "the-test-key"
_EXIT_CONTROL = "X-Daytona-Pty-Exit-Control"
_ENVS = "X-Daytona-Pty-Envs~"
_QUEUE = 256  # pieces; who lets more wait is dropped
_PIECE = 32 << 10  # bytes at most
_MOST = 64 << 10  # bytes of one message
_ALWAYS: dict[str, Any] = {"organizationId": "o", "target": "us", "public": False, "kvm": False, "gpu": 0, "disk": 3}
_GROUPS = Path("/sys/fs/cgroup")
_HOME = "/home/daytona"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAIN = "chmod a+w /; mkdir -p {0} /workspace; chown {1}:{1} {0} /workspace; while read -r _; do :; done"
_IMAGE = re.compile(r"FROM (\S+)\s*")


class Sandbox:
    """A container, and what the service says of it."""

    def __init__(self, body: Mapping[str, Any], url: str) -> None:
        self.body = body
        self.id = secrets.token_hex(12)
        self.name = str(body.get("name") or self.id)
        self.state, self.fault = "creating", ""
        self.user = "0"
        self.container: DockerContainer | None = None
        self.terminals: set[str] = set()
        self.sockets: set[web.WebSocketResponse] = set()
        self._url = url

    def told(self) -> dict[str, Any]:
        copied = ("env", "labels", "networkBlockAll", "autoStopInterval", "autoDeleteInterval")
        return {
            **{name: self.body[name] for name in copied},
            **{name: self.body.get(name) or 1 for name in ("cpu", "memory")},
            **_ALWAYS,
            "id": self.id,
            "name": self.name,
            "user": self.user,
            "state": self.state,
            "errorReason": self.fault,
            "toolboxProxyUrl": self._url,
        }

    async def start(self, engine: aiodocker.Docker, image: str, is_root: bool) -> None:
        uid = "0" if is_root else str(random.randrange(10**5, 10**9))
        self.user = uid
        memory = int(self.body.get("memory") or 1) << 30
        config: dict[str, Any] = {
            "Image": image,
            "User": "0",
            "Entrypoint": ["/bin/sh"],
            "Cmd": ["-c", _MAIN.format(_HOME, uid)],
            "OpenStdin": True,
            "StdinOnce": True,
            "Env": [f"HOME={_HOME}", "DAYTONA_SANDBOX_ID=" + self.id],
            "HostConfig": {
                "NanoCpus": int(self.body.get("cpu") or 1) * 10**9,
                "Memory": memory,
                "MemorySwap": memory,
                "NetworkMode": "none",  # see `started`: devices that come and go would disturb other tests
                "Init": True,
                "AutoRemove": True,
                "LogConfig": {"Type": "none"},
            },
        }
        container = await engine.containers.create(config)
        self._main = container.attach(stdin=True, stdout=False, stderr=False)
        await self._main.__aenter__()
        await container.start()
        self.container = container
        await self.started()

    async def started(self) -> None:
        """Learns how its processes are started: as the service's daemon does, with the image's variables."""
        assert self.container
        known = await self.container.show()
        pid = known["State"]["Pid"]
        groups = _groups(pid)
        join = "".join(f"echo $$ >{shlex.quote(str(group))}/cgroup.procs\n" for group in groups)
        self.variables = {"PATH": _PATH, **dict(pair.split("=", 1) for pair in known["Config"]["Env"])}
        network = "-n" if self.body["networkBlockAll"] else ""  # else this machine's own
        spaces = f"nsenter -t {pid} {network} -m -u -i -p -r -w -S {self.user} -G {self.user}"
        self.plain = ["/bin/sh", "-c", f'{join}exec {spaces} "$@"', "sh"]
        self.on_terminal = ["/bin/sh", "-c", f'{join}exec setsid --ctty {spaces} "$@"', "sh"]

    async def remove(self) -> None:
        self.state = "destroyed"
        if self.container:
            with suppress(aiodocker.DockerError):
                await self.container.delete(force=True)
            await self._main.close()


class Service:
    def __init__(self, engine: aiodocker.Docker) -> None:
        self.engine = engine
        self.url = ""
        self.sandboxes: dict[str, Sandbox] = {}
        self.faults: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self._never = asyncio.Event()

    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.post("/test/faults", self.set_faults),
            web.get("/test/requests", self.get_requests),
            web.get("/test/sandboxes", self.get_sandboxes),
            web.post("/api/sandbox", self.create),
            web.get("/api/sandbox", self.list),
            web.get("/api/sandbox/{id}", self.get),
            web.delete("/api/sandbox/{id}", self.delete),
            web.post("/toolbox/{id}/process/execute", self.execute),
            web.get("/toolbox/{id}/process/pty/create-connect", self.terminal),
        ]

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith(("/api", "/toolbox")) and "socket.io" not in request.path:
            if request.headers.get("Authorization") != f"Bearer {KEY}":
                return web.json_response({"message": "Invalid credentials"}, status=401)
            if self.faults.get("stall"):
                await self._never.wait()
            if code := self.faults.get("status"):
                return web.json_response({"message": "Out of order"}, status=code)
        response: web.StreamResponse = await handler(request)
        return response

    async def set_faults(self, request: web.Request) -> web.Response:
        self.faults = await request.json()
        if self.faults.get("cut"):
            for sandbox in self.sandboxes.values():
                for socket in list(sandbox.sockets):
                    assert socket._req
                    assert socket._req.transport
                    socket._req.transport.abort()
        return web.json_response({})

    async def get_requests(self, _: web.Request) -> web.Response:
        return web.json_response(self.requests)

    async def get_sandboxes(self, _: web.Request) -> web.Response:
        return web.json_response([sandbox.name for sandbox in self.sandboxes.values()])

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        sandbox = Sandbox(body, f"{self.url}/toolbox")
        image = _IMAGE.fullmatch(body["buildInfo"]["dockerfileContent"])
        assert image, body
        self.sandboxes[sandbox.id] = sandbox
        try:
            name = image[1] if image[1] != "python:3.11-slim" else "batch-runner-test:py"
            await sandbox.start(self.engine, name, bool(self.faults.get("root")))
            sandbox.state = "started"
        except aiodocker.DockerError as error:
            if error.status != 404:
                raise
            sandbox.state = "build_failed"
            sandbox.fault = self.faults.get("build") or f"pull access denied for {image[1]}: repository does not exist"
        return web.json_response(sandbox.told())

    async def list(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query.get("labels") or "{}").items()
        found = [each.told() for each in self.sandboxes.values() if wanted <= each.body["labels"].items()]
        return web.json_response({"items": found[: int(request.query.get("limit") or 100)], "nextCursor": None})

    def _of(self, request: web.Request) -> Sandbox:
        asked = request.match_info["id"]
        for sandbox in self.sandboxes.values():
            if asked in (sandbox.id, sandbox.name):
                return sandbox
        raise web.HTTPNotFound(text=json.dumps({"message": f"Sandbox {asked} not found"}))

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self._of(request).told())

    async def delete(self, request: web.Request) -> web.Response:
        sandbox = self._of(request)
        if self.faults.get("undeletable"):  # so many times
            self.faults["undeletable"] -= 1
            return web.json_response({"message": "State change in progress"}, status=503)
        del self.sandboxes[sandbox.id]
        await sandbox.remove()
        return web.json_response(sandbox.told())

    async def execute(self, request: web.Request) -> web.Response:
        sandbox, body = self._of(request), await request.json()
        process = await asyncio.create_subprocess_exec(
            *(*sandbox.plain, "sh", "-c", body["command"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=sandbox.variables,
        )
        output, _ = await process.communicate()
        return web.json_response({"exitCode": process.returncode, "result": output.decode(errors="replace")})

    async def terminal(self, request: web.Request) -> web.WebSocketResponse:
        sandbox, name = self._of(request), request.query["id"]
        if name in sandbox.terminals:
            raise web.HTTPConflict
        variables = {**sandbox.variables, "TERM": "xterm-256color"}
        for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(", "):
            if protocol.startswith(_ENVS):
                packed = protocol.removeprefix(_ENVS)
                variables |= json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
        socket = web.WebSocketResponse(protocols=(_EXIT_CONTROL,), max_msg_size=_MOST)
        await socket.prepare(request)
        sandbox.sockets.add(socket)
        sandbox.terminals.add(name)
        terminal = Terminal(await Terminal.process_in(sandbox, variables))
        try:
            await socket.send_str(json.dumps({"type": "control", "status": "connected"}))
            await self._serve(socket, terminal)
        finally:
            sandbox.sockets.discard(socket)
            sandbox.terminals.discard(name)
            await terminal.close()
        return socket

    async def _serve(self, socket: web.WebSocketResponse, terminal: "Terminal") -> None:
        """Until the program or the connection ends."""

        async def hear() -> None:
            async for message in socket:
                if self.faults.get("deaf"):
                    await self._never.wait()
                await terminal.write(message.data)

        async def say() -> None:
            while data := await terminal.read():
                if not self.faults.get("deaf"):
                    await socket.send_bytes(data)

        heard, said = asyncio.create_task(hear()), asyncio.create_task(say())
        await asyncio.wait({heard, said}, return_when=asyncio.FIRST_COMPLETED)
        if said.done() and not socket.closed:
            code, reason = WSCloseCode.POLICY_VIOLATION, "slow consumer"
            if not terminal.is_dropped:
                status = await terminal.process.wait()
                code = WSCloseCode.INTERNAL_ERROR if status else WSCloseCode.OK
                reason = json.dumps({"exitCode": status if status >= 0 else 128 - status})
            with suppress(ConnectionError):
                await socket.close(code=code, message=reason.encode())
        for task in (heard, said):
            task.cancel()
        await asyncio.gather(heard, said, return_exceptions=True)


class Terminal:
    """A terminal with an interactive login shell."""

    def __init__(self, made: tuple[int, asyncio.subprocess.Process]) -> None:
        self._fd, self.process = made
        self.is_dropped = False
        self._pieces: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._take)

    @staticmethod
    async def process_in(sandbox: Sandbox, variables: Mapping[str, str]) -> tuple[int, asyncio.subprocess.Process]:
        ours, theirs = os.openpty()
        termios.tcsetwinsize(ours, (10, 60))
        shell = "if command -v bash >/dev/null; then exec bash -i -l; else exec sh -i -l; fi"
        process = await asyncio.create_subprocess_exec(
            *(*sandbox.on_terminal, "sh", "-c", shell), stdin=theirs, stdout=theirs, stderr=theirs, env=variables
        )
        os.close(theirs)
        return ours, process

    def _take(self) -> None:
        try:
            data = os.read(self._fd, _PIECE)
        except OSError:  # the last program has closed it
            data = b""
        self.is_dropped = len(self._pieces) >= _QUEUE
        self._pieces.append(b"" if self.is_dropped else data)
        self._news.set()
        if not data or self.is_dropped:
            self._loop.remove_reader(self._fd)

    async def read(self) -> bytes:
        """Pieces that wait, in one message; b"" at the end."""
        while not self._pieces:
            self._news.clear()
            await self._news.wait()
        data = b""
        while self._pieces and len(data) < _MOST // 2:
            if not self._pieces[0]:
                break
            data += self._pieces.popleft()
        return data

    async def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                room = asyncio.Event()
                self._loop.add_writer(self._fd, room.set)
                try:
                    await room.wait()
                finally:
                    self._loop.remove_writer(self._fd)

    async def close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self.process.returncode is None:
            self._kill()
        await self.process.wait()
        os.close(self._fd)  # not before: its hang-up would end `nsenter` first

    def _kill(self) -> None:
        """What `nsenter` waits for, so that nobody else has to take its status: a sandbox cannot go before that."""
        pid = self.process.pid
        with suppress(OSError):
            inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in inside or [str(pid)]:
                os.kill(int(each), signal.SIGKILL)  # `Process.kill` would take its status from whoever waits


def _groups(pid: int) -> list[Path]:
    """The folders of the control groups that a process is in."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    places = [
        (_GROUPS / controllers / path[1:] if controllers else _GROUPS / path[1:]) for _, controllers, path in lines
    ]
    return [place for place in places if (place / "cgroup.procs").exists()]


async def main() -> None:
    engine = aiodocker.Docker()
    engine.connector._limit = 0
    service = Service(engine)
    application = web.Application(middlewares=[service.guard])
    application.add_routes(service.routes())
    async with serving(application) as port:
        service.url = f"http://127.0.0.1:{port}"
        print("ready", service.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await asyncio.gather(*(sandbox.remove() for sandbox in service.sandboxes.values()), return_exceptions=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
