"""Any OpenAI-compatible endpoint, through openai's own client.

Bodies are built and read here (see `wire` and `replies`): the client's models would cost two thirds of a call's CPU
and raise unnamed errors over malformed replies. The client's `post` does the rest.
"""

import asyncio
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import aiohttp
import httpx2
import openai
from msgspec.structs import replace
from openai._models import FinalRequestOptions

from agent import pricing
from agent.clock import RowClock
from agent.errors import ModelError, RunStopped
from agent.models.base import Gate, Lease, ModelRequest, Verdict
from agent.models.calling import Caller, CallFailed
from agent.models.failures import about_pictures, http_failure, request_timed_out, transient, unreachable
from agent.models.options import RequestOptions
from agent.models.providers import Target, split_keys
from agent.models.replies import parse_reply
from agent.models.wire import CHARACTERS_PER_TOKEN, TRIM_LEVELS, estimated_tokens, request_body
from agent.types import NO_SPEND, Reply, Spend, Unreported, Usage
from tools.errors import UsageProblem

FIRST_CONNECT_TIMEOUT = 4.0  # seconds, until the endpoint has answered once: a wrong address must show within 5
CONNECT_TIMEOUT = 15.0
IDLE_CONNECTION = 15.0  # seconds that a connection is kept; many servers close theirs after more


class OpenAIChat:
    """The model of `targets[0]`, and the others in its place where the gate says so."""

    def __init__(
        self, targets: Sequence[Target], keys: Sequence[Sequence[str]], options: RequestOptions, gate: Gate
    ) -> None:
        """`keys`: for each target its keys; none for an endpoint that needs none."""
        self.name = targets[0].model
        self._targets = targets
        self._options = options
        self._connections = [
            _Connection(target.base_url, own, options.request_timeout)
            for target, own in zip(targets, keys, strict=True)
        ]
        self._caller = Caller(gate, options.request_retries)
        self._trim: WeakKeyDictionary[RowClock, int] = WeakKeyDictionary()

    async def reply(self, request: ModelRequest) -> Reply:
        """See `Model`. A context that overflows is one request and the end, unless `trim_context`; what shows pictures
        is no part of the row's conversation, and holds nothing to be shortened."""
        spent = NO_SPEND
        while True:
            trim = self._trim.get(request.clock, 0)
            try:
                reply = await self._call(request, trim)
            except RunStopped as stopped:
                raise RunStopped(stopped.reason, stopped.message, spent + stopped.spend) from stopped
            except ModelError as error:
                error.spend = spent = spent + error.spend
                may_trim = self._options.trim_context and not shows_pictures(request)
                if error.reason != "context_exceeded" or not may_trim or trim == len(TRIM_LEVELS):
                    raise
                self._trim[request.clock] = trim + 1
            else:
                return replace(reply, spend=spent + reply.spend, context_trimmed=trim > 0)

    async def close(self) -> None:
        """Connections end."""
        for connection in self._connections:
            await connection.close()

    async def _call(self, request: ModelRequest, trim: int) -> Reply:
        bodies: dict[int, bytes] = {}

        def body(target: int) -> bytes:
            if target not in bodies:
                bodies[target] = request_body(request, self._targets[target], self._options, trim)
            return bodies[target]

        async def send(lease: Lease) -> tuple[Reply, Verdict]:
            sent = body(lease.target)
            target = self._targets[lease.target]
            try:
                answer = await self._connections[lease.target].post(sent, lease.key)
            except CallFailed as failure:
                raise (about_pictures(failure) if shows_pictures(request) else failure) from failure.__cause__
            reply = parse_reply(answer, lambda usage: self._price(target.model, usage))
            reply = replace(reply, model=reply.model or target.model, spend=self._spend(reply, target.model, tokens))
            return reply, Verdict(kind="ok", spend=reply.spend, tokens=reply.spend.all_tokens)

        tokens = estimated_tokens(request, body(0))
        return await self._caller.call(request, tokens, send)

    def _price(self, model: str, usage: Usage) -> float:
        return pricing.cost(usage, model, self._options.price_in, self._options.price_out) or 0.0

    def _spend(self, reply: Reply, model: str, sent: int) -> Spend:
        """What budgets count: where the endpoint reports no usage, an estimate too. `sent`: tokens, as estimated."""
        spend = reply.spend
        if spend.usage.total_tokens:
            return spend
        usage = Usage(input_tokens=sent, output_tokens=_said(reply) // CHARACTERS_PER_TOKEN)
        return replace(
            spend,
            unreported=Unreported(
                replies=1,
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                cost_usd=0.0 if spend.cost_usd else self._price(model, usage),
            ),
        )


def shows_pictures(request: ModelRequest) -> bool:
    """Whether a request is a question about pictures."""
    return any(message.pictures for message in request.messages)


def open_chat(targets: Sequence[Target], options: RequestOptions, gate: Gate, environ: Mapping[str, str]) -> OpenAIChat:
    """The model, its keys those in `environ`. Raises UsageProblem where one is missing."""
    return OpenAIChat(targets, [_keys(target, environ) for target in targets], options, gate)


def _keys(target: Target, environ: Mapping[str, str]) -> list[str]:
    keys = split_keys(environ.get(target.key_variable, "")) if target.key_variable else []
    if target.key_variable and not keys:
        raise UsageProblem(f"provider {target.provider}: {target.key_variable} is not set")
    return keys


def _said(reply: Reply) -> int:
    """Characters of all that a model wrote."""
    calls = sum(len(call.name) + len(str(call.arguments)) for call in reply.tool_calls)
    return len(reply.content) + len(reply.reasoning) + calls


class _Connection:
    """One endpoint. Every answer that is no 2xx, and every answer that does not come, is a CallFailed."""

    def __init__(self, base_url: str, keys: Sequence[str], timeout: float) -> None:
        self._timeout = timeout
        self._host = urlsplit(base_url).netloc.rpartition("@")[2]
        self._client = _Client(
            base_url=base_url,
            api_key="unused",  # each request brings its own
            max_retries=0,
            timeout=None,
            http_client=_HTTPClient(_Transport(_proxy(base_url))),
        )
        usable: Sequence[str | None] = keys or [None]
        self._requests = [_with_key(key) for key in usable]

    async def post(self, body: bytes, key: int) -> bytes:
        """The body of the answer, whole, within the request's time."""
        try:
            async with asyncio.timeout(self._timeout):
                request = self._requests[key % len(self._requests)].model_copy(update={"content": body})
                answer = await self._client.request(httpx2.Response, request)
        except TimeoutError as late:
            if isinstance(late, aiohttp.ConnectionTimeoutError):
                raise unreachable(f"no connection to {self._host} in time") from late
            raise request_timed_out(self._timeout) from late
        except openai.APIStatusError as refused:
            answer = refused.response
            raise http_failure(answer.status_code, answer.headers, answer.content, time.time()) from refused
        except aiohttp.ClientConnectorError as lost:
            raise unreachable(f"no connection to {self._host}: {lost.os_error.strerror or lost.os_error}") from lost
        except (aiohttp.ClientError, httpx2.HTTPError, openai.APIConnectionError, OSError) as lost:
            raise transient("connection_lost", f"{type(lost).__name__}: {lost}") from lost
        return answer.content

    async def close(self) -> None:
        await self._client.close()


class _Client(openai.AsyncOpenAI):
    """Requests to one endpoint differ in body and key alone. What they have in common is built once for each key: it
    would cost as much CPU as all the rest of a request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._patterns: dict[str, httpx2.Request] = {}

    def _build_request(self, options: FinalRequestOptions, *, retries_taken: int = 0) -> httpx2.Request:
        assert isinstance(options.headers, dict)
        key = str(options.headers["Authorization"])
        if key not in self._patterns:
            self._patterns[key] = super()._build_request(options, retries_taken=retries_taken)
            del self._patterns[key].headers["Content-Length"]  # the transport counts
        pattern = self._patterns[key]
        assert isinstance(options.content, bytes)
        stream = httpx2.ByteStream(options.content)
        return httpx2.Request(
            pattern.method, pattern.url, headers=pattern.headers, stream=stream, extensions=pattern.extensions
        )


class _HTTPClient(httpx2.AsyncClient):
    """Hands requests straight to the transport, which follows no redirection; a user in the address is httpx's."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        super().__init__(transport=transport, timeout=None, headers={"Accept-Encoding": "gzip, deflate"})
        self._straight = transport

    async def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
        """See AsyncClient."""
        if not request.url.userinfo:
            return await self._straight.handle_async_request(request)
        return await super().send(request, **settings)


class _Transport(httpx2.AsyncBaseTransport):
    """aiohttp beneath openai's client: half the CPU of its default. Unlike the one that openai ships, it keeps TCP
    connections alive, has no limit of connections, and lets aiohttp's errors through, which tell a connection that was
    lost from one that never was."""

    def __init__(self, proxy: str | None) -> None:
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None
        self._answered = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        timeout = aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT if self._answered else FIRST_CONNECT_TIMEOUT)
        async with self._open().request(
            request.method,
            str(request.url.copy_with(userinfo=b"") if request.url.userinfo else request.url),  # a header has it
            headers=request.headers,
            data=await request.aread(),
            allow_redirects=False,
            proxy=self._proxy,
            timeout=timeout,
        ) as answer:
            self._answered = True
            body = await answer.read()
            headers = [(name, value) for name, value in answer.raw_headers if name.lower() != b"content-encoding"]
        return httpx2.Response(answer.status, headers=headers, content=body, request=request)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_CONNECTION, socket_factory=_keep_alive_socket
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _keep_alive_socket(address: Any) -> socket.socket:
    """A connection on which a peer that has gone shows within some 2 minutes, not never."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPALIVE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _proxy(base_url: str) -> str | None:
    """What the usual variables say for an address. Asked once: aiohttp's own `trust_env` asks in a thread each time."""
    parts = urlsplit(base_url)
    bypassed = urllib.request.proxy_bypass(parts.hostname or "")
    return None if bypassed else urllib.request.getproxies().get(parts.scheme)


def _with_key(key: str | None) -> FinalRequestOptions:
    """The key of idempotency is not sent; given, it saves the client from drawing one."""
    authorization = openai.Omit() if key is None else f"Bearer {key}"
    return FinalRequestOptions.construct(
        method="post",
        url="/chat/completions",
        headers={"Authorization": authorization},
        idempotency_key="unused",
    )
