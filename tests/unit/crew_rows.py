"""What a worker of the crew does with a row in the tests of the crew: what the row says."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from compression.types import Ask, Counter, Done, Policy, RowMetrics, Step


def advance(line: bytes, summaries: Sequence[str], policy: Policy, counter: Counter) -> Step:
    """`echo`: the row's tokens, and the worker's process as `passes`; `change`: another line; `ask`; `odd`: what
    cannot be sent; `raise`; `die`; `die once FILE`: FILE is there afterwards; `hang FILE`: FILE has the process."""
    word, _, rest = line.decode().partition(" ")
    match word:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "once" if not Path(rest).exists():
            Path(rest).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            Path(rest).write_text(str(os.getpid()), encoding="utf-8")
            time.sleep(600)
        case "raise":
            raise RuntimeError("a fault of ours")
        case "ask" | "odd":
            prompt = "\ud800" if word == "odd" else "; ".join(summaries)
            return Ask(prompt=prompt, prompt_tokens=1, max_tokens=policy.summary_target_tokens, metrics=RowMetrics())
    metrics = RowMetrics(original_tokens=counter.text(rest), passes=os.getpid(), tokenizer=counter.name)
    return Done(line=b"changed" if word == "change" else line, metrics=metrics)
