"""`replay:RUN_DIR`: a model that plays the assistant turns of an earlier run. The tools run for real.

A conversation gets the turns of the earlier row with its row_key, else its task_id, and its sample_index: of the last
try that has any. Read are the run's batch files, or, where there are none, its merged ones.
"""

import contextlib
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.errors import ModelError
from agent.models.base import Gate, Lease, ModelRequest, Verdict
from agent.models.calling import Caller
from agent.row import Turn
from agent.trajectory import parse_trajectory
from agent.types import Message, RawCall, Reply, Spend
from tools.errors import UsageProblem

_BATCH_FILE = re.compile(r"batch_(\d+)(?:\.children)?\.jsonl")
_MERGED = ("trajectories.jsonl", "children.jsonl")


class _Header(Struct):
    """What tells a row; the rest of it is not decoded."""

    row_key: str = ""
    task_id: str = ""
    sample_index: int = 0


class _Played(Struct):
    """What of a row is played."""

    conversations: list[Turn]
    context_turns: int = 0
    end_status: str = ""


class ReplayModel:
    """Plays an earlier run, of which it keeps the places of rows, not the rows."""

    name = "replay"

    def __init__(self, files: list[Path], gate: Gate) -> None:
        self._files = files
        self._places: dict[bytes, tuple[int, int]] = {}  # of a row: the number of its file, its offset there
        self._caller = Caller(gate, tries=1)
        for number, path in enumerate(files):
            for offset, header in _headers(path):
                self._remember((number, offset), header)

    async def reply(self, request: ModelRequest) -> Reply:
        """The turn that the earlier run had here. Raises ModelError where it has none."""
        turns, end = self._turns(request)
        if request.turn > len(turns):
            raise _row_ended(len(turns), end)
        reply = _reply(turns[request.turn - 1])

        async def send(_: Lease) -> tuple[Reply, Verdict]:
            return reply, Verdict(kind="ok", spend=reply.spend)

        return await self._caller.call(request, 0, send)

    async def close(self) -> None:
        """Nothing stays open."""

    def _remember(self, place: tuple[int, int], header: _Header) -> None:
        for key in (header.row_key, header.task_id):
            if key:
                self._places[_digest(key, header.sample_index)] = place

    def _turns(self, request: ModelRequest) -> tuple[list[Message], str]:
        """The row's assistant turns, and its status."""
        keys = (_digest(key, request.sample_index) for key in (request.row_key, request.task_id))
        place = next((self._places[key] for key in keys if key in self._places), None)
        if place is None:
            raise ModelError("the replayed run has no such row", reason="no_row", retryable=False)
        number, offset = place
        with self._files[number].open("rb") as file:
            file.seek(offset)
            row = msgspec.json.decode(file.readline(), type=_Played)
        given = sum(turn.sender == "gpt" for turn in row.conversations[: row.context_turns + 1])
        said = [message for message in parse_trajectory(row.conversations).messages if message.role == "assistant"]
        return said[given:], row.end_status


def open_replay(directory: Path, gate: Gate) -> ReplayModel:
    """The model. Raises UsageProblem where there is no run to play."""
    files = _batch_files(directory) or [path for name in _MERGED if (path := directory / name).is_file()]
    if not files:
        raise UsageProblem(f"{directory}: no batch_N.jsonl and no trajectories.jsonl to replay")
    return ReplayModel(files, gate)


def _row_ended(turns: int, status: str) -> ModelError:
    message = f"the replayed row has {turns} assistant turns and ended as {status or 'it is not known how'}"
    return ModelError(message, reason=f"replayed_{status}" if status else "replay_ended", retryable=False)


def _batch_files(directory: Path) -> list[Path]:
    found = [(int(name[1]), path) for path in directory.glob("*") if (name := _BATCH_FILE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _headers(path: Path) -> Iterator[tuple[int, _Header]]:
    """The rows that have an assistant turn, with their offsets; a line that is none (torn by a crash) is left out."""
    decoder = msgspec.json.Decoder(_Header)
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if b'"gpt"' in line:
                with contextlib.suppress(msgspec.DecodeError):
                    yield offset, decoder.decode(line)
            offset += len(line)


def _digest(key: str, sample_index: int) -> bytes:
    return blake2b(f"{sample_index}:{key}".encode("utf-8", "replace"), digest_size=8).digest()


def _reply(message: Message) -> Reply:
    calls = tuple(
        RawCall(id=call.id, name=call.name, arguments=msgspec.json.encode(call.arguments).decode())
        for call in message.tool_calls
    )
    return Reply(
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=calls,
        finish_reason="tool_calls" if calls else "stop",
        model="replay",
        wire={"reasoning_content": message.reasoning} if message.reasoning else {},
        spend=Spend(requests=1),
    )
