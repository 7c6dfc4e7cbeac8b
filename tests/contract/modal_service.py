"""A stand-in for Modal's service, as the unmodified SDK calls it: gRPC on the SDK's own generated base classes, each
sandbox a container of the local Docker engine, whose namespaces and groups each `exec` enters.

    python -m tests.contract.modal_service

says its port, obeys lines on its stdin (`stall`: no call is answered any more; `go`) and ends with it. Its containers
end with it too, however it ends. It takes every token whose secret is `right`.
"""

import asyncio
import base64
import json
import secrets
import shlex
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.containers import DockerContainer
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

SECRET = "right"
LABEL = "batch-runner.modal-stand-in"
_KEPT = 1 << 22
_BUILDER = "2025.06"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The sandbox ends with its own program, and with the stand-in.
_MAIN = '{ "$@" </dev/null; kill $$; } & while read -r _; do :; done'

api: Any = api_pb2
router: Any = task_command_router_pb2


def _token() -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time()) + 36_000}).encode()).decode().rstrip("=")
    return f"x.{claims}.y"


class Exec:
    """A program in a sandbox: what it printed last is kept, to be read again from an offset."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ended = False
        self._written = 0
        self._kept, self._base = b"", 0
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()

    async def output(self, offset: int) -> AsyncIterator[bytes]:
        """Up to its end."""
        while True:
            async with self._reading:
                data = self._kept[max(offset - self._base, 0) :] or await self._more()
            if not data:
                return
            offset += len(data)
            yield data

    async def _more(self) -> bytes:
        assert self.process.stdout
        data = await self.process.stdout.read(65_536)
        self.ended = not data
        kept = self._kept + data
        self._kept = kept[-_KEPT:]
        self._base += len(kept) - len(self._kept)
        return data

    async def write(self, data: bytes, offset: int, eof: bool) -> None:
        """What was written already, by a call whose answer was lost, is left out."""
        stdin = self.process.stdin
        assert stdin
        async with self._writing:
            new = data[self._written - offset :]
            try:
                if new:
                    stdin.write(new)
                    await stdin.drain()
                self._written += len(new)
                if eof:
                    stdin.close()
            except OSError:
                raise GRPCError(Status.FAILED_PRECONDITION, "the process has ended") from None


class Box:
    """A sandbox."""

    def __init__(self, request: Any, image: str, mark: str) -> None:
        self.id, self.task = f"sb-{secrets.token_hex(16)}", f"ta-{secrets.token_hex(12)}V"
        self.created = time.time()
        self.app = request.app_id
        self.image, self.mark = image, mark
        self.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.execs: dict[str, Exec] = {}
        self.gone = asyncio.Event()
        self._definition = request.definition
        self._blocked = request.definition.network_access.network_access_type == api.NetworkAccess.BLOCKED
        self._container: DockerContainer | None = None
        self._main: Any = None
        self._enter: list[str] = []
        self._variables: dict[str, str] = {}

    async def start(self, engine: aiodocker.Docker) -> None:
        self._container = await engine.containers.create(self._config(), name=f"modal-{self.id[3:]}")
        self._main = self._container.attach(stdin=True, stdout=False, stderr=False)
        await self._main.__aenter__()
        await self._container.start()
        known = await self._container.show()
        pid = known["State"]["Pid"]
        join = "".join(f"echo $$ >{shlex.quote(str(group))}/cgroup.procs\n" for group in _groups(pid))
        spaces = f"nsenter -t {pid} {'-n' if self._blocked else ''} -m -u -i -p -r -w"
        self._enter = ["/bin/sh", "-c", f'{join}exec {spaces} "$@"', "sh"]
        image = dict(pair.split("=", 1) for pair in known["Config"]["Env"] or ())
        self._variables = {"PATH": _PATH, **image, "HOME": "/root", "MODAL_TASK_ID": self.task}
        loop = asyncio.get_running_loop()
        loop.call_later(self._definition.timeout_secs, lambda: asyncio.ensure_future(self.end()))

    def _config(self) -> dict[str, Any]:
        resources = self._definition.resources
        return {
            "Image": self.image,
            "User": "0",
            "Entrypoint": ["/bin/sh"],
            "Cmd": ["-c", _MAIN, "sh", *self._definition.entrypoint_args],
            **dict.fromkeys(("AttachStdin", "OpenStdin", "StdinOnce"), True),
            "Labels": {LABEL: self.mark},
            "HostConfig": {
                "NanoCpus": resources.milli_cpu_max * 1_000_000,
                "Memory": resources.memory_mb_max << 20,
                "MemorySwap": resources.memory_mb_max << 20,
                "NetworkMode": "none",  # or this machine's own: devices that come and go would disturb other tests
                "Init": True,
                "AutoRemove": True,
                "LogConfig": {"Type": "none"},
            },
        }

    async def exec(self, name: str, command: list[str]) -> None:
        if self.gone.is_set():
            raise GRPCError(Status.FAILED_PRECONDITION, "Sandbox already finished")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._enter,
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._variables,
            start_new_session=True,
        )
        self.execs[name] = Exec(process)

    async def end(self) -> None:
        """May be called twice."""
        if self.gone.is_set():
            return
        self.gone.set()
        if self._container:
            with suppress(aiodocker.DockerError):
                await self._container.delete(force=True, v=True)
        if self._main:
            await self._main.close()


def _groups(pid: int) -> list[Path]:
    """The control groups of a process, of the one hierarchy or of the older many."""
    found = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        place = Path("/sys/fs/cgroup", controllers.removeprefix("name="), path.lstrip("/"))
        if (place / "cgroup.procs").exists():
            found.append(place)
    return found


class Service:
    """What is called, by the calls' names."""

    def __init__(self, engine: aiodocker.Docker) -> None:
        self.engine = engine
        self.port = 0
        self.jwt = _token()
        self.answers = asyncio.Event()
        self.answers.set()
        self.keeps = False
        self.boxes: dict[str, Box] = {}
        self._images: dict[str, str] = {}
        self._apps: dict[str, str] = {}

    def _box(self, sandbox: str) -> Box:
        if sandbox not in self.boxes:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {sandbox}")
        return self.boxes[sandbox]

    def _task(self, task: str) -> Box:
        return self._box(next((box.id for box in self.boxes.values() if box.task == task), task))

    def _exec(self, request: Any) -> Exec:
        execs = self._task(request.task_id).execs
        if request.exec_id not in execs:
            raise GRPCError(Status.NOT_FOUND, "no such exec")
        return execs[request.exec_id]

    async def ClientHello(self, _request: Any) -> Any:  # noqa: N802 - as all of these, the call's name
        return api.ClientHelloResponse()

    async def AuthTokenGet(self, _request: Any) -> Any:  # noqa: N802
        return api.AuthTokenGetResponse(token=self.jwt)

    async def AppGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        if request.app_name not in self._apps:
            if request.object_creation_type != api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"no app {request.app_name}")
            self._apps[request.app_name] = f"ap-{secrets.token_hex(11)}"
        return api.AppGetOrCreateResponse(app_id=self._apps[request.app_name])

    async def EnvironmentGetOrCreate(self, _request: Any) -> Any:  # noqa: N802
        settings = api.EnvironmentSettings(image_builder_version=_BUILDER)
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def ImageGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        name = request.image.dockerfile_commands[0].removeprefix("FROM ")
        assert list(request.image.dockerfile_commands[1:]) == ["ENTRYPOINT []"]
        result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        try:
            await self.engine.images.inspect(name)
        except aiodocker.DockerError as error:
            failure = api.GenericResult.GENERIC_STATUS_FAILURE
            result = api.GenericResult(status=failure, exception=f"FROM {name}:\nnot found ({error.message})")
        image = f"im-{base64.b32encode(name.encode()).decode()}"
        self._images[image] = name
        metadata = api.ImageMetadata(image_builder_version=_BUILDER)
        return api.ImageGetOrCreateResponse(image_id=image, result=result, metadata=metadata)

    async def SandboxCreateV2(self, request: Any) -> Any:  # noqa: N802
        box = Box(request, self._images[request.definition.image_id], str(self.port))
        self.boxes[box.id] = box
        await asyncio.shield(asyncio.ensure_future(box.start(self.engine)))
        return api.SandboxCreateV2Response(sandbox_id=box.id, task_id=box.task)

    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:  # noqa: N802
        box = self._box(request.sandbox_id) if request.sandbox_id else self._task(request.task_id)
        if box.gone.is_set():
            raise GRPCError(Status.FAILED_PRECONDITION, "Sandbox already finished")
        return api.SandboxGetCommandRouterAccessResponse(url=f"http://127.0.0.1:{self.port}", jwt=self.jwt)

    async def SandboxTerminateV2(self, request: Any) -> Any:  # noqa: N802
        if self.keeps:
            raise GRPCError(Status.FAILED_PRECONDITION, "not now")
        await asyncio.shield(asyncio.ensure_future(self._box(request.sandbox_id).end()))
        return api.SandboxTerminateResponse()

    async def SandboxWaitV2(self, request: Any) -> Any:  # noqa: N802
        box = self._box(request.sandbox_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(box.gone.wait(), request.timeout or 0.001)
        ended = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_TERMINATED)
        return api.SandboxWaitResponse(result=ended if box.gone.is_set() else api.GenericResult())

    async def SandboxListV2(self, request: Any) -> Any:  # noqa: N802
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}.items()
        before = request.before_timestamp or float("inf")
        found = [
            box
            for box in self.boxes.values()
            if not box.gone.is_set() and box.app == request.app_id and box.created < before
            if wanted <= box.tags.items()
        ]
        page = sorted(found, key=lambda box: -box.created)[:5]
        return api.SandboxListResponse(sandboxes=[api.SandboxInfo(id=box.id, created_at=box.created) for box in page])

    async def SandboxTagsGetV2(self, request: Any) -> Any:  # noqa: N802
        tags = self._box(request.sandbox_id).tags.items()
        return api.SandboxTagsGetResponse(tags=[api.SandboxTag(tag_name=name, tag_value=value) for name, value in tags])

    async def TaskExecStart(self, request: Any) -> Any:  # noqa: N802
        await self._task(request.task_id).exec(request.exec_id, list(request.command_args))
        return router.TaskExecStartResponse()

    async def TaskExecStdinWrite(self, request: Any) -> Any:  # noqa: N802
        await self._exec(request).write(request.data, request.offset, request.eof)
        return router.TaskExecStdinWriteResponse()

    async def TaskExecStdioRead(self, request: Any) -> AsyncIterator[Any]:  # noqa: N802
        if request.file_descriptor != router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT:
            return
        async for data in self._exec(request).output(request.offset):
            yield router.TaskExecStdioReadResponse(data=data)

    async def TaskExecPoll(self, request: Any) -> Any:  # noqa: N802
        ended = self._exec(request).ended
        return router.TaskExecPollResponse(code=0) if ended else router.TaskExecPollResponse()


def _handler(service: Service, name: str, is_router: bool) -> Any:
    method = getattr(service, name, None)

    async def handle(_self: object, stream: Any) -> None:
        request = await stream.recv_message()
        await service.answers.wait()
        _authorize(service, stream.metadata, is_router)
        if method is None:
            raise GRPCError(Status.UNIMPLEMENTED, name)
        answer = method(request)
        if hasattr(answer, "__aiter__"):
            async for message in answer:
                await stream.send_message(message)
        else:
            await stream.send_message(await answer)

    return handle


def _authorize(service: Service, metadata: Any, is_router: bool) -> None:
    right = metadata.get("authorization") == f"Bearer {service.jwt}" if is_router else _knows(metadata)
    if not right:
        raise GRPCError(Status.UNAUTHENTICATED, "Token ID not found or secret wrong")


def _knows(metadata: Any) -> bool:
    return bool(metadata.get("x-modal-token-secret") == SECRET)


def _servicer(service: Service, base: Any, is_router: bool) -> Any:
    names = base.__abstractmethods__
    return type("Servicer", (base,), {name: _handler(service, name, is_router) for name in names})()


async def main() -> None:
    engine = aiodocker.Docker()
    engine.connector._limit = 0
    service = Service(engine)
    bases = ((api_grpc.ModalClientBase, False), (task_command_router_grpc.TaskCommandRouterBase, True))
    server = Server([_servicer(service, base, is_router) for base, is_router in bases])
    await server.start("127.0.0.1", 0)
    listening: Any = server._server
    service.port = listening.sockets[0].getsockname()[1]
    print("ready", service.port, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        service.keeps = line == "keep\n"
        service.answers.clear() if line == "stall\n" else service.answers.set()
        print("done", flush=True)
    await asyncio.gather(*(box.end() for box in service.boxes.values()))
    server.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
