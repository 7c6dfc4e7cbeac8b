"""The fake endpoint in bad weather: what it does to a request is drawn by (prompt, number of the request), so that it
is the same in every run; what it answered is logged, a JSON line a request.

10 % of requests get a 429, 5 % a 500; of 3 % the connection is cut in the middle of the body, 1 % get no answer, ever.
Replies call tools that print 50 MB, leave daemons or ignore SIGTERM; 3 % hold arguments that are no JSON, 3 % invent a
tool, 2 % report no usage. Impatient rows get no answer to their second turn: their time ends before.

    python -m tests.soak.endpoint --log FILE      # prints its base_url, ends with SIGTERM

With rules (`POST /rules`) the weather is over: they answer everything, and that is logged as fair.
"""

import argparse
import asyncio
import random
import re
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from tests.endpoint import Endpoint, Request, Rule, serve, tool_call
from tests.soak.peers import Peers

LATENCY = 0.02
IMPATIENT = "impatient"  # rows whose time is over before their second request's
DAEMON_SECONDS = 86_400
_CALM, FAIR = "ok", "fair"
ANSWERED = (_CALM, FAIR)
_MALFORMED, INVENTED = '{"command": "echo', "teleport"
REQUEST_SHARES = {"rate_limited": 0.10, "server_error": 0.05, "cut": 0.03, "stalled": 0.01}
CALL_SHARES = {"malformed": 0.03, "invented": 0.03}
"""All that can happen to a request, or be wrong with a call, and how often it does."""
_ENDLESS = ("stalled", "impatient")
_SANDBOX = re.compile(r"batch-[0-9a-f]{12}")


class Logged(Struct, frozen=True, kw_only=True):
    """One request. `at`: Unix time of its arrival; `kind`: ok, rate_limited, server_error, cut, stalled, impatient (the
    same, by plan), gone if the client did not wait for the answer, or fair; `worker`: the process that sent it, 0 if
    that was gone; `calls`: what the answer asked for, each good, malformed or invented; `sandbox`: the control group
    that its tools ran in, where that was said."""

    at: float
    prompt: str
    call: int
    kind: str
    input_tokens: int = 0
    output_tokens: int = 0
    worker: int = 0
    calls: tuple[str, ...] = ()
    sandbox: str = ""


def draw(request: Request) -> tuple[str, Rule]:
    """What happens to a request, and its name."""
    dice = random.Random(f"{request.prompt}:{request.call}")
    chance = dice.random()
    if request.prompt.startswith(IMPATIENT) and request.turn == 2:
        return "impatient", Rule(stall=True)
    if chance < 0.10:
        return "rate_limited", Rule(status=429, headers={"retry-after-ms": str(dice.randint(20, 200))})
    if chance < 0.15:
        return "server_error", Rule(status=500)
    message, finish_reason = _message(request, dice)
    reply = Rule(message=message, finish_reason=finish_reason, usage=_usage(dice))
    if chance < 0.18:
        return "cut", replace(reply, drop="body")
    if chance < 0.19:
        return "stalled", replace(reply, stall=True)
    return _CALM, reply


def _usage(dice: random.Random) -> dict[str, Any] | None:
    if dice.random() < 0.02:
        return None
    tokens_in, tokens_out = dice.randint(50, 5000), dice.randint(1, 500)
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def _message(request: Request, dice: random.Random) -> tuple[dict[str, Any], str]:
    turns = random.Random(request.prompt).randint(1, 6)
    if request.turn > turns:
        return {"content": f"done: {request.prompt}", "reasoning_content": "All is done."}, "stop"
    count = 2 if dice.random() < 0.1 else 1
    calls = [_call(request.turn, dice, f"call_{request.call}_{number}") for number in range(count)]
    return {"content": "", "reasoning_content": f"Step {request.turn}.", "tool_calls": calls}, "tool_calls"


def _call(turn: int, dice: random.Random, call_id: str) -> dict[str, Any]:
    chance = dice.random()
    if chance < 0.03:
        return tool_call("terminal", _MALFORMED, call_id)
    if chance < 0.06:
        return tool_call(INVENTED, {"to": "the moon"}, call_id)
    if turn == 1:
        return tool_call("terminal", {"command": "cat /proc/self/cgroup"}, call_id)
    command, timeout = dice.choices([each[1:] for each in _COMMANDS], [each[0] for each in _COMMANDS])[0]
    return tool_call("terminal", {"command": command, "timeout": timeout}, call_id)


def _calls(rule: Rule) -> tuple[str, ...]:
    """What a reply asks for. See Logged."""
    functions = [each["function"] for each in rule.message.get("tool_calls", ())]
    return tuple(
        "invented" if each["name"] == INVENTED else "malformed" if each["arguments"] == _MALFORMED else "good"
        for each in functions
    )


_COMMANDS = (  # weight, command, timeout
    (70, "echo step; ls -la; pwd", 60),
    (6, "head -c 50000000 /dev/zero | tr '\\0' x", 60),
    (5, f"sleep {DAEMON_SECONDS} &", 60),
    (5, f"setsid nohup sleep {DAEMON_SECONDS} >/dev/null 2>&1 & echo left", 60),
    (3, f"(trap '' TERM HUP INT; (sleep {DAEMON_SECONDS}; sleep {DAEMON_SECONDS}) &)", 60),
    (3, f"trap '' TERM; sleep {DAEMON_SECONDS}", 1),
    (2, f"trap '' TERM; (setsid sleep {DAEMON_SECONDS}) & yes | head -c 1000000; sleep {DAEMON_SECONDS}", 1),
    (2, "kill -9 $$", 60),
    (2, "head -c 3000000 /dev/urandom > file; mkdir -p a/b; ln -s / a/b/c; chmod 0 a/b", 60),
    (2, "mkfifo pipe; (cat pipe &) ; python3 -c 'import socket; socket.socket(1).bind(\"s\")'", 60),
)


class SoakEndpoint(Endpoint):
    """See the module."""

    def __init__(self, log: Path) -> None:
        super().__init__(latency=LATENCY)
        self._log = log.open("ab", buffering=0)
        self._peers = Peers()
        self._workers: WeakKeyDictionary[asyncio.BaseTransport, int] = WeakKeyDictionary()

    async def _answer(self, http: web.Request, request: Request) -> web.StreamResponse:
        at, worker = time.time(), self._worker(http.transport)
        kind, rule = (FAIR, self.rules[0]) if self.rules else draw(request)  # rules may come while it is under way
        is_answered = False
        try:
            answer = await super()._answer(http, request)
            is_answered = True
        finally:
            if not is_answered and kind not in _ENDLESS:
                kind = "gone"
            self._note_down(at, worker, request, kind, rule)
        return answer

    def _worker(self, transport: asyncio.BaseTransport | None) -> int:
        """Found out once for each connection."""
        peer = transport and transport.get_extra_info("peername")
        if transport is None or not peer:
            return 0
        if transport not in self._workers:
            self._workers[transport] = self._peers.pid(peer[1], self.port)
        return self._workers[transport]

    def _rule(self, request: Request) -> Rule | None:
        return super()._rule(request) if self.rules else draw(request)[1]

    def _note_down(self, at: float, worker: int, request: Request, kind: str, rule: Rule) -> None:
        reply = rule if kind in ANSWERED else None
        usage = reply.usage if reply else None
        sandboxes = _SANDBOX.findall(request.text)
        logged = Logged(
            at=at,
            prompt=request.prompt,
            call=request.call,
            kind=kind,
            input_tokens=usage["prompt_tokens"] if usage else 0,
            output_tokens=usage["completion_tokens"] if usage else 0,
            worker=worker,
            calls=_calls(reply) if reply else (),
            sandbox=sandboxes[0] if sandboxes else "",
        )
        self._log.write(msgspec.json.encode(logged) + b"\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--log", type=Path, required=True)
    asyncio.run(serve(SoakEndpoint(parser.parse_args().log)))


if __name__ == "__main__":
    main()
