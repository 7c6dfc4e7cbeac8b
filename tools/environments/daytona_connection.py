"""The connection to Daytona: the account, one client per event loop, its errors.

Keys come from DAYTONA_API_KEY alone; DAYTONA_API_URL and DAYTONA_TARGET (a region) are optional.
"""

import asyncio
import json
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from tools.environments.ending import to_the_end
from tools.errors import EnvironmentLost, SandboxRefused
from tools.text import one_line

if TYPE_CHECKING:
    from daytona import AsyncDaytona

MISSING_PACKAGE = "daytona needs its package: pip install -e '.[daytona]'"
_MISSING_KEY = "daytona needs a key: set DAYTONA_API_KEY (made at https://app.daytona.io/dashboard/keys)"
_API_URL = "https://app.daytona.io/api"


def api_url() -> str:
    """Where the service is."""
    return os.environ.get("DAYTONA_API_URL") or _API_URL


def connect() -> "AsyncDaytona":
    """A client for any number of streams at once. Raises SandboxRefused without package or key."""
    key = os.environ.get("DAYTONA_API_KEY", "")
    if not key:
        raise SandboxRefused(_MISSING_KEY)
    try:
        from daytona import AsyncDaytona, DaytonaConfig  # noqa: PLC0415 - an optional package, imported when used
    except ImportError:
        raise SandboxRefused(MISSING_PACKAGE) from None
    with warnings.catch_warnings():  # of polling, and of settings of its own in a file .env
        warnings.simplefilter("ignore")
        config = DaytonaConfig(
            api_key=key,
            api_url=api_url(),
            target=os.environ.get("DAYTONA_TARGET") or None,
            connection_pool_maxsize=None,
            use_deprecated_polling=True,  # or each client keeps up one more connection, for news of states alone
        )
        return AsyncDaytona(config)


class _Shared:
    """A client, and how many use it."""

    def __init__(self, client: "AsyncDaytona") -> None:
        self.client = client
        self.users = 0


class Clients:
    """One client per event loop, shared by all who use it at the same time and closed by the last."""

    def __init__(self) -> None:
        self._open: dict[asyncio.AbstractEventLoop, _Shared] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator["AsyncDaytona"]:
        """The client of the running loop. Raises SandboxRefused."""
        loop = asyncio.get_running_loop()
        shared = self._open.get(loop) or self._open.setdefault(loop, _Shared(connect()))
        shared.users += 1
        try:
            yield shared.client
        finally:
            shared.users -= 1
            if not shared.users:
                del self._open[loop]
                await to_the_end(_closed(shared.client))


async def _closed(client: "AsyncDaytona") -> None:
    await client.close()  # type: ignore[no-untyped-call]


class Unreachable(EnvironmentLost):
    """The service itself does not answer, or something else does."""


@contextmanager
def service_errors() -> Iterator[None]:
    """Whatever the service answers, or that it does not, as one line: SandboxRefused for a key that is not accepted,
    Unreachable where no service is, EnvironmentLost for all else."""
    import daytona  # noqa: PLC0415 - an optional package, imported when used

    try:
        yield
    except (daytona.DaytonaAuthenticationError, daytona.DaytonaForbiddenError) as error:
        raise SandboxRefused(f"daytona: {api_url()} refuses the key in DAYTONA_API_KEY ({said(error)})") from None
    except (daytona.DaytonaConnectionError, daytona.DaytonaTimeoutError, TimeoutError) as error:
        raise Unreachable(f"daytona: {api_url()} cannot be reached or does not answer ({said(error)})") from error
    except (daytona.DaytonaError, OSError) as error:
        if strange := _not_the_services(error):
            raise Unreachable(
                f"daytona: {api_url()} does not answer as the service ({strange}): is it up, and DAYTONA_API_URL right?"
            ) from error
        raise EnvironmentLost(f"daytona: {said(error)}") from error


def _not_the_services(error: BaseException) -> str:
    """What an answer is that the service itself would not give, such as a proxy's; "" of all others."""
    from pydantic import ValidationError  # noqa: PLC0415 - it comes with the optional package

    cause: BaseException | None = error
    while cause:
        if isinstance(cause, ValidationError):
            return "not what its API says"
        status, body = (getattr(cause, name, None) for name in ("status", "body"))
        if isinstance(status, int) and (status == 404 or status >= 500) and not _has_message(body):
            return f"status {status}"
        cause = cause.__cause__
    return ""


def _has_message(body: object) -> bool:
    """Whether an answer's body is an error as the service words it: a JSON object with a text in it."""
    try:
        found = json.loads(str(body))
    except ValueError:
        return False
    texts = (found.get("message"), found.get("error")) if isinstance(found, dict) else ()
    return any(isinstance(text, str) and text for text in texts)


def said(error: BaseException) -> str:
    """An error's message as one line of at most 300 characters."""
    return one_line(str(error)) or type(error).__name__
