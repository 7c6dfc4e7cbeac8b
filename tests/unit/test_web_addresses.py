"""Which addresses may be opened, however they are written and whatever names say."""

from collections.abc import Sequence

import pytest

from tools.errors import ToolError
from tools.web.addresses import addresses_of, host_of, is_public, port_of, split_url


async def reached(url: str, *, allow_private: bool = False) -> Sequence[str]:
    """The addresses that a URL leads to."""
    parts = split_url(url)
    return await addresses_of(host_of(parts), port_of(parts), allow_private=allow_private)


def answering(*addresses: str) -> object:
    async def by(_host: str, _port: int) -> Sequence[str]:
        return addresses

    return by


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "93.184.216.34",
        "2606:4700::1111",
        "::ffff:1.1.1.1",
        "64:ff9b::101:101",
        "100.63.255.255",
        "172.32.0.1",
    ],
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
        *("169.254.169.254", "168.63.129.16", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1"),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "203.0.113.9", "192.88.99.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::1"),
        *("2001:0:7f00:1::", "100::1", "no address", ""),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001"),
        *("0", "0x0", "0xa9fea9fe", "2852039166", "0251.0376.0251.0376", "10.0.1", "①②⑦.⓪.⓪.①", "127。0。0。1"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[fe80::1]", "[fe80::1%25lo]", "[64:ff9b::7f00:1]"),
        *("localhost", "LOCALHOST", "localhost.", "a.localhost", "printer.local", "metadata.google.internal"),
    ],
)
async def test_ways_to_write_what_is_not_public(host: str) -> None:
    for scheme, port in (("http", ""), ("https", ":8443")):
        with pytest.raises(ToolError, match=r"private, local or reserved|not the name of a host"):
            await reached(f"{scheme}://{host}{port}/a?b=c")


async def test_what_a_name_leads_to_is_what_counts() -> None:
    public, mixed = answering("1.1.1.1"), answering("1.1.1.1", "10.0.0.7")
    assert await addresses_of("shop.example", 443, allow_private=False, by=public) == ("1.1.1.1",)  # type: ignore[arg-type]
    with pytest.raises(ToolError, match=r"shop\.example \(10\.0\.0\.7\) is a private"):
        await addresses_of("shop.example", 443, allow_private=False, by=mixed)  # type: ignore[arg-type]
    assert await addresses_of("shop.example", 443, allow_private=True, by=mixed)  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="no address"):
        await addresses_of("shop.example", 443, allow_private=True, by=answering())  # type: ignore[arg-type]


async def test_private_addresses_may_be_allowed() -> None:
    assert await reached("http://127.0.0.1:8080/", allow_private=True) == ["127.0.0.1"]
    assert await reached("http://[::1]/", allow_private=True) == ["::1"]


async def test_a_name_that_there_is_not() -> None:
    with pytest.raises(ToolError, match="cannot be found"):
        await reached("http://there-is-no-such-name.invalid/")
    with pytest.raises(ToolError, match=r"is no address|cannot be found|private"):
        await reached("http://999.999.999.999/")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///etc/passwd", "Only http and https"),
        ("ftp://example.com/", "Only http and https"),
        ("gopher://127.0.0.1:6379/_x", "Only http and https"),
        ("javascript:alert(1)", "Only http and https"),
        ("data:text/html,hi", "Only http and https"),
        ("example.com", "without a scheme"),
        ("http://", "names no host"),
        ("http:///etc/passwd", "names no host"),
        ("http://.", "names no host"),
        ("http://127.0.0.1@example.com/", "user name or password"),
        ("http://example.com@127.0.0.1/", "user name or password"),
        ("http://user:pass@example.com/", "user name or password"),
        ("http://example.com\\@127.0.0.1/", "no blanks, backslashes"),
        ("http://example.com/\r\nHost: x", "no blanks"),
        ("http://exa mple.com/", "no blanks"),
        ("http://example.com/\ud800", "no blanks"),
        ("http://example.com:port/", "not a URL"),
        ("http://example.com:99999/", "not a URL"),
        ("http://[::1", "not a URL"),
        (f"http://{'a' * 70}.com/", "not the name of a host"),
        ("http://a..b/", "not the name of a host"),
        ("http://example.com/" + "a" * 9000, "longer than"),
    ],
)
def test_what_is_no_address_to_open(url: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        split_url(url)


@pytest.mark.parametrize(
    "url", ["http://example.com", "https://EXAMPLE.com:444/a?b=c#d", "http://bücher.example/ä?ö", "http://1.1.1.1/"]
)
def test_what_may_be_an_address_to_open(url: str) -> None:
    assert split_url(url).hostname
