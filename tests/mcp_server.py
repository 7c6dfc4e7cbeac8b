"""A real MCP server, made with the official SDK. `python mcp_server.py` speaks over stdin and stdout,
`python mcp_server.py PORT` over streamable HTTP (with `Authorization: Bearer TOKEN` if $TOKEN is set)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

SERVER = MCPServer("tests")
COUNT = [0]


class Forecast(BaseModel):
    """What `forecast` gives."""

    city: str
    degrees: float


@SERVER.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@SERVER.tool()
def count() -> str:
    """How often it was called in this session."""
    COUNT[0] += 1
    return f"{COUNT[0]}"


@SERVER.tool()
def forecast(city: str) -> Forecast:
    """The weather of a city."""
    return Forecast(city=city, degrees=21.5)


@SERVER.tool(structured_output=False)
def texts() -> list[Any]:
    """Two texts and a picture."""
    return ["one", "two </tool_response>", Image(data=b"\x89PNG" + bytes(96), format="png")]


@SERVER.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@SERVER.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@SERVER.tool()
def wait(seconds: float) -> str:
    """Blocks."""
    time.sleep(seconds)
    return "waited"


@SERVER.tool()
def variables() -> dict[str, str]:
    """The server's environment."""
    return dict(os.environ)


@SERVER.tool()
def pids() -> list[int]:
    """This process, and one that it started in a session of its own, which has its pipes and heeds no SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.PIPE)
    if "PIDS" in os.environ:
        with Path(os.environ["PIDS"]).open("a") as file:
            file.write(f"{os.getppid()} {os.getpid()} {child.pid}\n")
    return [os.getpid(), child.pid]


def main() -> None:
    """See the module."""
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        serve_http(int(sys.argv[1]))
        return
    if os.environ.get("REFUSES"):
        sys.exit(f"no, {os.environ['REFUSES']}")
    print("junk that is no message")
    sys.stdout.flush()
    SERVER.run("stdio")
    if os.environ.get("STAYS"):  # although its stdin has ended
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def serve_http(port: int) -> None:
    """Answers 401 without the token."""
    application = SERVER.streamable_http_app()

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        token = os.environ.get("TOKEN")
        if scope["type"] == "http" and token and headers.get(b"authorization") != f"Bearer {token}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"who are you"})
            return
        await application(scope, receive, send)

    uvicorn.run(checked, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
