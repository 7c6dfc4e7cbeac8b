"""Which addresses tools may open: http and https, and of those only the public internet, however it is written.

A name is resolved here, once, and all its addresses must be public: who connects connects to what was checked.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed does not know it

from tools.errors import ToolError

DNS_SECONDS = 10.0
MAX_URL = 8_000  # characters
MIN_SECRET = 12  # characters

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> its IP addresses. Raises ToolError for a name that there is not."""

_LOCAL_NAMES = ("localhost", "localdomain", "local", "internal", "home.arpa")
_NUMERIC = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+)){0,3}", re.IGNORECASE)
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:(?!\d+(?:[/?#]|$))", re.IGNORECASE)
_SECRET_NAME = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)", re.IGNORECASE)
_PROXIES = ("http", "https", "all", "no")
_NAT64 = ip_network("64:ff9b::/96")
_REFUSED = tuple(  # beyond what `ipaddress` calls not global, which depends on its version
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3"),
            "168.63.129.16/32",  # Azure's metadata
            *("::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16"),
            *("fc00::/7", "fe80::/9", "ff00::/8"),
        ),
    )
)


def with_scheme(url: str) -> str:
    """The URL, https:// before it if it begins with a host."""
    return url if not url or _SCHEME.match(url) else f"https://{url.removeprefix('//')}"


def refuse_secrets(url: str, environ: Mapping[str, str]) -> None:
    """Raises ToolError for a URL that holds a key or password of ours: opening it would give it away."""
    spellings = (url, unquote(url))
    for name, value in environ.items():
        if not _SECRET_NAME.fullmatch(name):
            continue
        parts = [part for part in map(str.strip, value.split(",")) if len(part) >= MIN_SECRET and not part.isdigit()]
        if any(part in spelling for part in parts for spelling in spellings):
            raise ToolError(f"The URL holds a secret ({name}); it is not opened")


def proxy_for(scheme: str, host: str, port: int, environ: Mapping[str, str]) -> str:
    """The proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY (or in lower case) name for it, "" for none."""
    named = {name: environ.get(f"{name}_proxy") or environ.get(f"{name.upper()}_PROXY", "") for name in _PROXIES}
    proxy = named[scheme] or named["all"]
    if not proxy or proxy_bypass_environment(f"{host}:{port}", {"no": named["no"]}):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def split_url(url: str) -> SplitResult:
    """The parts of an http or https URL with a host and without a user. Raises ToolError."""
    if len(url) > MAX_URL:
        raise ToolError(f"The URL is longer than {MAX_URL:,} characters")
    if _NOT_IN_URLS.search(url):
        raise ToolError("A URL holds no blanks, backslashes or control characters; write them as %20 and so on")
    try:
        parts = urlsplit(url)
        port_of(parts)
    except ValueError as error:
        raise ToolError(f"This is not a URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ToolError(f"Only http and https URLs can be opened, not {parts.scheme or 'one without a scheme'}")
    if "@" in parts.netloc:
        raise ToolError("A URL with a user name or password is not opened")
    host_of(parts)
    return parts


def host_of(parts: SplitResult) -> str:
    """The URL's host in ASCII, lower case, an IPv6 address without brackets. Raises ToolError."""
    host = (parts.hostname or "").rstrip(".")
    try:
        plain = host if ":" in host else host.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise ToolError(f"{host[:100]} is not the name of a host") from error
    if not plain:
        raise ToolError("The URL names no host")
    return plain.lower()


def port_of(parts: SplitResult) -> int:
    """The URL's port. Raises ValueError for one that is no number."""
    return parts.port or (443 if parts.scheme == "https" else 80)


async def resolve(host: str, port: int) -> Sequence[str]:
    """By the system. See `Resolve`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DNS_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise ToolError(f"{host} cannot be found: the name service does not answer") from None
    except (OSError, UnicodeError) as error:
        raise ToolError(f"{host} cannot be found: {getattr(error, 'strerror', None) or error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def addresses_of(host: str, port: int, *, allow_private: bool, by: Resolve = resolve) -> Sequence[str]:
    """The IP addresses to connect to, at least one. Raises ToolError if one of them may not be opened."""
    number = _number(host)
    if not (number or allow_private):
        check_name(host)
    addresses = [str(number)] if number else await by(host, port)
    refused = [] if allow_private else [address for address in addresses if not is_public(address)]
    if refused:
        by_name = "" if number else f" ({refused[0]})"
        raise ToolError(f"{host}{by_name} is a private, local or reserved address; it is not opened")
    if not addresses:
        raise ToolError(f"{host} cannot be found: it has no address")
    return addresses


def check_name(host: str) -> None:
    """Raises ToolError for an address that is not public, and for names that say that they lead to such a one: all that
    can be known where a proxy resolves names."""
    number = _number(host)
    if not is_public(str(number)) if number else f".{host}".endswith(tuple(f".{name}" for name in _LOCAL_NAMES)):
        raise ToolError(f"{host} is a private, local or reserved address; it is not opened")


def is_public(address: str) -> bool:
    """Whether an IP address in its usual form is one of the public internet."""
    try:
        ip = ip_address(address)
    except ValueError:  # with a zone, or no address
        return False
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped:
            return is_public(str(ip.ipv4_mapped))
        if ip in _NAT64:
            return is_public(str(IPv4Address(int(ip) & 0xFFFF_FFFF)))
    in_refused = any(ip in network for network in _REFUSED if network.version == ip.version)
    return ip.is_global and not ip.is_multicast and not in_refused


def _number(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is written as: also 127.1, 0x7f000001, 017700000001 and 2130706433. None for a name."""
    try:
        if ":" in host:
            return ip_address(host)
        return IPv4Address(socket.inet_aton(host)) if _NUMERIC.fullmatch(host) else None
    except (OSError, ValueError) as error:
        raise ToolError(f"{host[:100]} is no address") from error
