"""The browser's way into the network, spoken to by hand."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from tools.browser.gateway import Gateway, Problem, proxies
from tools.errors import ToolError
from tools.web.addresses import addresses_of

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK, REFUSED, UNREACHABLE, UNKNOWN = 0, 2, 4, 7


async def known(host: str, port: int) -> Sequence[str]:
    """Two names that lead here, the rest as in a run."""
    if host in ("here.example", "xn--nxasmq6b.example"):
        return ["127.0.0.1"]
    return await addresses_of(host, port, allow_private=False)


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def opened(gateway: Gateway) -> AsyncIterator[int]:
    address = await gateway.open()
    try:
        yield int(address.rpartition(":")[2])
    finally:
        await gateway.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data.upper())
        await writer.drain()
    writer.close()


def by_name(host: str) -> bytes:
    return bytes([3, len(host)]) + host.encode()


async def asked(
    port: int, target: bytes, far: int, command: int = 1
) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """The answer's code, and the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x05\x01\x00")
    assert await reader.readexactly(2) == b"\x05\x00"
    writer.write(bytes([5, command, 0]) + target + far.to_bytes(2))
    answer = await reader.readexactly(10)
    return answer[1], reader, writer


async def test_bytes_go_both_ways_and_are_counted() -> None:
    gateway = Gateway(known)
    async with served(echo) as far, opened(gateway) as port:
        code, reader, writer = await asked(port, by_name("Here.Example."), far)
        assert code == OK
        for _ in range(50):
            writer.write(b"ab" * 500)
            assert await reader.readexactly(1000) == b"AB" * 500
        assert gateway.received == 50_000
        writer.close()
        assert await reader.read() == b""
    assert not gateway.problems


@pytest.mark.parametrize(
    "target",
    [
        *(by_name(name) for name in ("127.0.0.1", "localhost", "0x7f.1", "2130706433", "metadata.google.internal")),
        b"\x01\x7f\x00\x00\x01",
        b"\x01\xa9\xfe\xa9\xfe",
        b"\x04" + bytes(15) + b"\x01",
        b"\x04" + bytes(10) + b"\xff\xff\x0a\x00\x00\x01",
    ],
)
async def test_private_addresses_are_refused_in_every_form(target: bytes) -> None:
    gateway = Gateway(known)
    async with served(echo) as far, opened(gateway) as port:
        code, reader, writer = await asked(port, target, far)
        assert (code, await reader.read()) == (REFUSED, b"")
        writer.close()
    assert "private, local or reserved" in gateway.problems[-1].reason


async def test_what_cannot_be_reached_says_why() -> None:
    gateway = Gateway(known)
    async with served(echo) as far:
        pass
    async with opened(gateway) as port:
        for target, code in ((by_name("here.example"), UNREACHABLE), (by_name("nowhere.invalid"), REFUSED)):
            got, _, writer = await asked(port, target, far)
            assert got == code
            writer.close()
        got, _, writer = await asked(port, by_name("here.example"), far, command=2)
        assert got == UNKNOWN
        writer.close()
    assert gateway.problems[0] == Problem("here.example", "Connection refused")
    assert "cannot be found" in gateway.problems[1].reason


async def test_the_end_ends_every_connection_and_nonsense_harms_nobody() -> None:
    gateway = Gateway(known)
    async with served(echo) as far, opened(gateway) as port:
        _, nonsense = await asyncio.open_connection("127.0.0.1", port)
        nonsense.write(b"GET / HTTP/1.1\r\n\r\n")
        code, reader, writer = await asked(port, by_name("here.example"), far)
        assert code == OK
        await gateway.close()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        nonsense.close()


@pytest.mark.parametrize("status", [b"200 OK", b"407 Who are you?"])
async def test_through_a_proxy(status: bytes) -> None:
    heads: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
        await echo(reader, writer)

    async with served(proxy) as there:
        named = {"HTTPS_PROXY": f"http://me:p%40ss@127.0.0.1:{there}", "NO_PROXY": "near.example"}
        gateway = Gateway(known, proxies(named, allow_private=False))
        async with opened(gateway) as port:
            code, reader, writer = await asked(port, by_name("far.example"), 443)
            if status.startswith(b"200"):
                writer.write(b"x")
                assert (code, await reader.readexactly(1)) == (OK, b"X")
            else:
                assert (code, gateway.problems[0].reason) == (UNREACHABLE, "the proxy says HTTP/1.1 407 Who are you?")
            writer.close()
            code, _, writer = await asked(port, by_name("localhost"), 443)
            assert code == REFUSED
            writer.close()
    assert heads[0].startswith(b"CONNECT far.example:443 HTTP/1.1\r\nHost: far.example:443\r\n")
    assert base64.b64encode(b"me:p@ss") in heads[0]
    assert len(heads) == 1


def test_which_proxy() -> None:
    chosen = proxies({"http_proxy": "one:1", "ALL_PROXY": "http://two:2", "NO_PROXY": ".near"}, allow_private=False)
    assert chosen("far", 80) == "http://one:1"
    assert chosen("far", 443) == "http://two:2"
    assert chosen("is.near", 80) == ""
    assert proxies({}, allow_private=False)("127.0.0.1", 80) == ""
    with pytest.raises(ToolError, match="private"):
        chosen("10.0.0.1", 80)
    assert proxies({"ALL_PROXY": "two:2"}, allow_private=True)("10.0.0.1", 80) == "http://two:2"
