"""Tokens of a row: its texts, and what a chat template writes around them.

Without `--chat_template` that is ChatML's `<|im_start|>ROLE\\n` before and `<|im_end|>\\n` after every message: 5
tokens where `<|im_start|>` and `<|im_end|>` are one each, as in the models that use it; nothing more for the row.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agent.faults import Fault, attempted
from agent.tokens import Tokenizer, open_tokenizer
from compression.forms import is_from_value
from compression.types import Count, Counter, Turn
from tools.errors import UsageProblem

if TYPE_CHECKING:
    import jinja2

AROUND_MESSAGE = 5
ROLES = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"}
FIRST_KEPT = 100  # texts that rows began with
FIRST_LONGEST = 100_000  # characters
_MARKS = 0xF0000  # characters of private use, which stand for special tokens that a turn's text spells


def open_counter(tokenizer: str, chat_template: str = "") -> Counter:
    """A counter over `open_tokenizer(tokenizer)`. `chat_template`: the path of a Jinja file or of a JSON file, such as
    `tokenizer_config.json`, with the key `chat_template`. UsageProblem for what is no tokenizer or no template."""
    opened = open_tokenizer(tokenizer)
    if not chat_template:
        return _ChatMLCounter(opened)
    return _TemplateCounter(opened, Path(chat_template).expanduser())


class _Counted:
    """Texts counted once: those of a row are counted again after each change of a few of its turns, and thousands of
    rows begin with the same few system turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int] = {}
        self._first: dict[str, int] = {}

    def count(self, texts: Sequence[str]) -> list[int]:
        """Of each text. Those of the call before are remembered, and the first of many calls."""
        before, known = self._known, {}
        if texts and texts[0] in self._first:
            known[texts[0]] = self._first[texts[0]]
        for text in texts:
            if text not in known:
                known[text] = before[text] if text in before else self._tokenizer.count(text)
        self._known = known
        self._remember(texts)
        return [known[text] for text in texts]

    def _remember(self, texts: Sequence[str]) -> None:
        if len(self._first) >= FIRST_KEPT:
            self._first.clear()
        for text in texts[:1]:
            if len(text) <= FIRST_LONGEST:
                self._first[text] = self._known[text]


class _ChatMLCounter:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = tokenizer.name
        self.text = tokenizer.count
        self._counted = _Counted(tokenizer)

    def row(self, turns: Sequence[Turn]) -> Count:
        counts = self._counted.count([turn.text for turn in turns])
        each = [count + AROUND_MESSAGE * len(turn.raws) for count, turn in zip(counts, turns, strict=True)]
        return Count(sum(each), tuple(each))


class _TemplateCounter:
    """`total` is what a trainer sees that renders the row's messages with `transformers`. `turns` share it out: each
    its text and an equal part of what the template adds; or, of a template that leaves texts out, its part of the rest.
    """

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self.name = f"{tokenizer.name} with {path.name}"
        self.text = tokenizer.count
        self._special = tokenizer.special
        self._texts, self._pieces = _Counted(tokenizer), _Counted(tokenizer)
        self._render = _template(path)
        _refuse_blind(self._render, path)

    def row(self, turns: Sequence[Turn]) -> Count:
        """See Counter. ValueError, one line, for a row that the template refuses."""
        total = self._rendered(turns) if turns else 0
        return Count(total, _shared_out(total, self._texts.count([turn.text for turn in turns])))

    def _rendered(self, turns: Sequence[Turn]) -> int:
        """Special tokens of the template are one token each, those that a text spells are text."""
        marks: dict[str, str] = {}
        messages = [self._marked(message, marks) for turn in turns for message in _messages(turn)]
        found = attempted(partial(self._render, messages=messages))
        if isinstance(found, Fault):
            raise ValueError(  # noqa: TRY004 - the Fault is how it came about
                f"the chat template does not take this row: {' '.join(str(found).split())}"
            )
        table = {ord(mark): spelt for spelt, mark in marks.items()}
        pieces = [piece.translate(table) if table else piece for piece in self._special.split(found.value)]
        return len(pieces) - 1 + sum(self._pieces.count(pieces))

    def _marked(self, value: Any, marks: dict[str, str]) -> Any:
        """A JSON value in whose texts private characters stand for the special tokens that they spell."""
        if isinstance(value, str):
            return self._special.sub(lambda found: marks.setdefault(found[0], chr(_MARKS + len(marks))), value)
        if isinstance(value, dict):
            return {self._marked(name, marks): self._marked(item, marks) for name, item in value.items()}
        return [self._marked(item, marks) for item in value] if isinstance(value, list) else value


def _messages(turn: Turn) -> Sequence[dict[str, Any]]:
    """What a trainer renders: `messages` as they are, calls and names included; of `from/value` role and text."""
    if is_from_value(turn):
        return [{"role": ROLES[turn.role], "content": turn.text}]
    return turn.raws


def _shared_out(total: int, texts: Sequence[int]) -> tuple[int, ...]:
    whole = sum(texts)
    if total < whole:
        return tuple(total * count // whole for count in texts)
    share, rest = divmod(total - whole, max(1, len(texts)))
    return tuple(count + share + (place < rest) for place, count in enumerate(texts))


# --- templates, as transformers renders them


def _template(path: Path) -> Any:
    """A function of `messages` that gives their text."""
    try:
        import jinja2  # noqa: PLC0415 - comes with an extra
    except ImportError as error:
        raise UsageProblem("chat_template needs the package jinja2: pip install -e '.[tokenizers]'") from error
    source, tokens = _read(path)
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UsageProblem(f"chat_template {path}, line {error.lineno}: {error.message}") from error
    return partial(template.render, add_generation_prompt=False, **tokens)


def _refuse_blind(render: Any, path: Path) -> None:
    """UsageProblem for a template by which conversations that differ look alike, be their content text or parts. One
    that refuses them may be strict."""
    for content in (str, lambda text: [{"type": "text", "text": text}]):
        said = [[{"role": role, "content": content(text)} for role in ("user", "assistant")] for text in ("one", "two")]
        first, second = [attempted(partial(render, messages=messages)) for messages in said]
        if isinstance(first, Fault) or isinstance(second, Fault) or first.value != second.value:
            return
    raise UsageProblem(f"chat_template {path}: it leaves out what the messages say")


def _environment() -> "jinja2.Environment":
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415 - comes with an extra
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """`{% generation %}` tells trainers what the assistant wrote; the text is the same without it."""

        tags = {"generation"}  # noqa: RUF012 - as Extension declares it

        def parse(self, parser: "jinja2.parser.Parser") -> "list[jinja2.nodes.Node]":
            """Part of Extension."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own one would write it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tokens_beside(template: Path) -> Path | None:
    """The `tokenizer_config.json` beside a Jinja file, if there is one: the special tokens that this may name."""
    beside = template.with_name("tokenizer_config.json")
    return beside if template.suffix != ".json" and beside.exists() else None


def _read(path: Path) -> tuple[str, dict[str, str]]:
    """The template and the special tokens that it may name."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            config = json.loads(text)
            return _of(config), _tokens(config)
        beside = tokens_beside(path)
        return text, _tokens(json.loads(beside.read_bytes()) if beside else {})
    except OSError as error:
        raise UsageProblem(f"chat_template {error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageProblem(f"chat_template {path}: {error}") from error


def _of(config: Any) -> str:
    """`chat_template` as a text, or as a list of named ones, of which it is the one called `default`."""
    match config:
        case {"chat_template": str(template)}:
            return template
        case {"chat_template": [*named]}:
            for each in named:
                if isinstance(each, dict) and each.get("name") == "default":
                    return str(each.get("template"))
    raise ValueError("there is no template in it")


def _tokens(config: Any) -> dict[str, str]:
    """`bos_token` and the like, each a text or an object with the text as `content`; empty if there is none."""
    tokens = {"bos_token": "", "eos_token": ""}
    for key, token in config.items() if isinstance(config, dict) else ():
        spelt = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(spelt, str):
            tokens[key] = spelt
    return tokens
