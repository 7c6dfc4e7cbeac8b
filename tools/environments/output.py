"""What commands print: text of unbounded length in bounded memory."""

import codecs
from collections import deque


class BoundedText:
    """Decodes bytes as UTF-8 while they come and keeps `max_chars` characters: the first `head` share of them, and the
    last ones."""

    def __init__(self, max_chars: int, head: float = 0.4) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head_room = int(max_chars * head)
        self._tail_room = max_chars - self._head_room
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._tail_size = 0
        self.omitted = 0

    def feed(self, data: bytes, final: bool = False) -> None:
        """More bytes; a character cut at their end waits for the next ones unless they are the last."""
        text = self._decoder.decode(data, final)
        if self._head_room and text:
            taken = text[: self._head_room]
            self._head.append(taken)
            self._head_room -= len(taken)
            text = text[len(taken) :]
        if text:
            self._keep(text)

    def _keep(self, text: str) -> None:
        self._tail.append(text)
        self._tail_size += len(text)
        while self._tail_size > self._tail_room:
            excess = self._tail_size - self._tail_room
            oldest = self._tail.popleft()
            if len(oldest) > excess:
                self._tail.appendleft(oldest[excess:])
            dropped = min(excess, len(oldest))
            self._tail_size -= dropped
            self.omitted += dropped

    def tail(self) -> str:
        """What is kept of the end."""
        return "".join(self._tail)

    def text(self) -> str:
        """Head and tail, with a line between them that says how many characters were left out."""
        marker = f"\n[... {self.omitted} characters left out ...]\n" if self.omitted else ""
        return "".join(self._head) + marker + self.tail()


def says_full(output: str) -> bool:
    """Whether it may tell of a full disk; dash only knows an error of input and output."""
    return "No space left on device" in output or "Disk quota exceeded" in output or "I/O error" in output
