"""Connections for httpx that go only where they may: to the very address that was checked, whatever a name says next.

httpx loads a tenth of a second: import this late.
"""

import ssl
from collections.abc import Mapping, Sequence

import certifi
import httpx

from tools.errors import ToolError
from tools.services import Services
from tools.web.addresses import Resolve, addresses_of, check_name, proxy_for, resolve

AGENT = "Mozilla/5.0 (compatible; batch-runner)"
MAX_TRIED = 4  # addresses of one name
TIMEOUTS = httpx.Timeout(connect=10, read=20, write=20, pool=20)


class Connections:
    """What a process needs for them, made once."""

    def __init__(self, services: Services) -> None:
        environ = services.environ
        self._environ = environ
        self._context = ssl.create_default_context(
            cafile=environ.get("SSL_CERT_FILE") or certifi.where(), capath=environ.get("SSL_CERT_DIR")
        )

    def client(self, *, allow_private: bool, by: Resolve = resolve) -> httpx.AsyncClient:
        """To be closed by who asked. It follows no redirects and reads no environment of its own."""
        transport = CheckedTransport(self._context, self._environ, allow_private=allow_private, by=by)
        return httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            timeout=TIMEOUTS,
            headers={"User-Agent": AGENT},
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Nothing stays open."""


class CheckedTransport(httpx.AsyncBaseTransport):
    """Resolves and checks the host of each request, then connects to that address under the host's name; raises
    ToolError where it may not. Through a proxy, if the usual variables name one, only the name can be checked."""

    def __init__(
        self, context: ssl.SSLContext, environ: Mapping[str, str], *, allow_private: bool, by: Resolve = resolve
    ) -> None:
        self._context = context
        self._environ = environ
        self._allow_private = allow_private
        self._by = by
        self._routes: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See the class."""
        url = request.url
        if url.scheme not in ("http", "https") or not url.host:
            raise ToolError(f"{url.scheme or 'no scheme'}: only http and https can be opened")
        host, port = url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80)
        if proxy := proxy_for(url.scheme, host, port, self._environ):
            if not self._allow_private:
                check_name(host)
            return await self._route(proxy).handle_async_request(request)
        addresses = await addresses_of(host, port, allow_private=self._allow_private, by=self._by)
        return await self._direct(request, host, addresses[:MAX_TRIED])

    async def _direct(self, request: httpx.Request, host: str, addresses: Sequence[str]) -> httpx.Response:
        for address in addresses[:-1]:
            try:
                return await self._route("").handle_async_request(pinned(request, host, address))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._route("").handle_async_request(pinned(request, host, addresses[-1]))

    def _route(self, proxy: str) -> httpx.AsyncHTTPTransport:
        if proxy not in self._routes:
            # no connection is kept: under one address there may be several names, each with a certificate of its own
            limits = httpx.Limits(max_keepalive_connections=0)
            self._routes[proxy] = httpx.AsyncHTTPTransport(
                verify=self._context, trust_env=False, limits=limits, proxy=httpx.Proxy(proxy) if proxy else None
            )
        return self._routes[proxy]

    async def aclose(self) -> None:
        """Closes the connections."""
        for route in self._routes.values():
            await route.aclose()


def pinned(request: httpx.Request, host: str, address: str) -> httpx.Request:
    """The request to an address, with the name for the certificate and the Host header."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,  # with Host, which the client has set from the URL
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )
