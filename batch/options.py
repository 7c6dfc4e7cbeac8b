"""Options of a program from one frozen Struct: read from flags, a YAML file and the environment, once each, typed.

Every field is `Annotated` with `about(...)`. Pure but for `read_yaml`, which reads its file. Knows no setting by name.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Meta, Struct, inspect

from tools.errors import UsageProblem
from tools.names import nearest


def about(group: str, meaning: str, *aliases: str, **more: Any) -> Meta:
    """What help says of a field; `more` may hold `shown` (the default in words), `secret` (never shown) and `place`
    (`section.key`, where a YAML file may have it beside its own name)."""
    return Meta(description=meaning, extra={"group": group, "aliases": aliases, **more})


class Option(Struct, frozen=True, kw_only=True):
    """One field of the Struct, as flags, keys and help know it."""

    name: str
    group: str
    meaning: str
    aliases: tuple[str, ...]
    kind: Any  # the field's type, to be given to msgspec.convert
    expected: str  # that type in words
    default: Any
    shown: str  # the default in words
    secret: bool
    place: str = ""  # section.key in a YAML file

    @property
    def is_flag(self) -> bool:
        """A bare flag sets it."""
        return self.kind is bool

    @property
    def choices(self) -> str:
        """The values that it may have, if those are words."""
        return self.expected.partition(" of ")[2]

    @property
    def is_mapping(self) -> bool:
        """Its text is a mapping as JSON or YAML, or names a file that holds one."""
        return self.expected == "a mapping"

    @property
    def is_list(self) -> bool:
        """Its text is comma-separated."""
        return self.expected.startswith("a comma list")


class Given(Struct, frozen=True):
    """A value as it was given, and where: `--flag`, `FILE.yaml: key` or the variable's name."""

    option: Option
    value: Any
    origin: str


def options_of(kind: type[Struct]) -> tuple[Option, ...]:
    """A Struct's fields in their order."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    types = {item.name: item.type for item in msgspec.structs.fields(kind)}
    return tuple(_option(item, types[item.name]) for item in described.fields)


def _option(item: inspect.Field, kind: Any) -> Option:
    assert isinstance(item.type, inspect.Metadata)
    extra = item.type.extra or {}
    default = item.default if item.default_factory is msgspec.NODEFAULT else item.default_factory()
    return Option(
        name=item.name,
        group=extra["group"],
        meaning=(item.type.extra_json_schema or {})["description"],
        aliases=extra["aliases"],
        kind=bool if isinstance(item.type.type, inspect.BoolType) else kind,
        expected=_in_words(item.type.type),
        default=default,
        shown=extra.get("shown", _default_in_words(default)),
        secret=extra.get("secret", False),
        place=extra.get("place", ""),
    )


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            words = " or ".join(_in_words(each) for each in types if not isinstance(each, inspect.NoneType))
        case inspect.BoolType():
            words = "true or false"
        case inspect.IntType():
            words = "a whole number" + _bounds(kind)
        case inspect.FloatType():
            words = "a number" + _bounds(kind)
        case inspect.LiteralType(values=values):
            words = "one of " + ", ".join(str(value) for value in values)
        case inspect.DictType():
            words = "a mapping"
        case inspect.VarTupleType(item_type=each):
            words = "a comma list" + _in_words(each).replace("text", "").replace("one of", " of")
        case _:
            words = "text"
    return words


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    signs = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le))
    found = [f"{sign} {_number(bound)}" for sign, bound in signs if bound is not None]
    return " " + " and ".join(found) if found else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _default_in_words(value: Any) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case None | "" | ():
            return "none"
        case dict():
            return "none"
        case tuple():
            return ",".join(value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def by_name(options: Iterable[Option]) -> dict[str, Option]:
    """Names and aliases -> option."""
    return {name: option for option in options for name in (option.name, *option.aliases)}


def unknown(what: str, name: str, known: Iterable[str], prefix: str = "") -> UsageProblem:
    """The error for a name that nobody knows; `prefix` is what stands before the nearest one."""
    near = nearest(name, known)
    said = f": did you mean {prefix}{near[0]}?" if near else "; --help lists them all"
    return UsageProblem(f"unknown {what}{said}")


def read_flags(argv: Sequence[str], options: Sequence[Option], actions: Sequence[str]) -> tuple[list[Given], set[str]]:
    """A command line -> the values given, and which of `actions` (flags that take no value) it asks for.

    `--name value`, `--name=value`; a boolean is bare, `--no-name` or `--name=true|false`; dashes are underscores.
    """
    names = by_name(options)
    given: list[Given] = []
    asked: set[str] = set()
    rest = list(reversed(argv))
    while rest:
        word = rest.pop()
        flag, equals, value = word.partition("=")
        name = _flag_name(word, flag, given)
        option = names.get(name) or names.get(name.removeprefix("no_"))
        if name in actions and not equals:
            asked.add(name)
        elif option is None:
            raise unknown(f"flag {flag}", name, [*names, *actions], "--")
        elif name in names:
            given.append(Given(option, value if equals else _value(rest, option, flag), flag))
        elif option.is_flag and not equals:
            given.append(Given(option, "false", flag))
        else:
            raise UsageProblem(f"unknown flag {word}: --no- stands before a flag of true or false, without a value")
    return given, asked


def _flag_name(word: str, flag: str, before: Sequence[Given]) -> str:
    if word == "-h":
        return "help"
    if not flag.startswith("--") or flag == "--":
        hint = "settings are flags with long names, such as --dataset_file FILE"
        if before and before[-1].option.is_flag:
            hint = f"{before[-1].origin} takes no value but in the form {before[-1].origin}=true|false"
        elif before and before[-1].option.is_list:
            hint = f"commas stand between the values of {before[-1].origin}"
        raise UsageProblem(f"unexpected argument {word!r}: {hint}")
    return flag[2:].replace("-", "_")


def _value(rest: list[str], option: Option, flag: str) -> str:
    if option.is_flag:
        return "true"
    if not rest or rest[-1].startswith("--"):
        raise UsageProblem(f"{flag} needs a value: {option.expected} (write one that starts with -- as {flag}=VALUE)")
    return rest.pop()


def read_all(
    flags: Sequence[Given], config: Option, options: Sequence[Option], environ: Mapping[str, str], prefix: str
) -> list[list[Given]]:
    """All sources, the strongest first: the flags, the YAML file that the flag `config` among them names, the
    environment."""
    file = merge([[given for given in flags if given.option is config]]).get("config", "")
    return [
        [given for given in flags if given.option is not config],
        read_yaml(Path(file), options) if file else [],
        read_environment(environ, options, prefix),
    ]


def read_environment(environ: Mapping[str, str], options: Sequence[Option], prefix: str) -> list[Given]:
    """The variables with the prefix -> values. An unknown one is refused."""
    names = by_name(options)
    given = []
    for variable in sorted(name for name in environ if name.startswith(prefix)):
        option = names.get(variable.removeprefix(prefix).lower())
        if option is None or variable != variable.upper():
            known = (name.upper() for name in names)
            raise unknown(f"variable {variable}", variable.removeprefix(prefix).upper(), known, prefix)
        given.append(Given(option, environ[variable], variable))
    return given


def read_yaml(path: Path, options: Sequence[Option]) -> list[Given]:
    """A YAML mapping of names (dashes are underscores) -> values; `null` leaves the setting alone. Where options have
    places, their sections are mappings within it."""
    names = by_name(options) | {option.place: option for option in options if option.place}
    sections = {option.place.partition(".")[0] for option in options if option.place}
    given = []
    for key, value in _yaml_pairs(path, sections):
        name = key.replace("-", "_")
        option = names.get(name)
        if option is None and name in sections and value is not None:
            raise UsageProblem(f"{path}: {key}: expected a mapping of settings, got {_short(value)}")
        if option is None and name not in sections:
            moved = names.get(name.rpartition(".")[2]) if "." in name else None  # right key, wrong section
            known = [moved.place or moved.name] if moved else [*names, *sections]
            raise unknown(f"key {key!r} in {path}", moved.place or moved.name if moved else name, known)
        if option is not None and value is not None:
            given.append(Given(option, value, f"{path}: {key}"))
    return given


def _yaml_pairs(path: Path, sections: Collection[str]) -> list[tuple[str, Any]]:
    loader = None
    try:
        loader = yaml.SafeLoader(path.read_bytes().decode("utf-8-sig"))
        node = loader.get_single_node()
        read = list(_pairs(loader, node, sections)) if isinstance(node, yaml.MappingNode) else []
    except OSError as problem:
        raise UsageProblem(f"cannot read {path}: {problem.strerror}") from problem
    except (yaml.YAMLError, ValueError) as problem:
        raise UsageProblem(f"{path} is not YAML: {' '.join(str(problem).split())}") from problem
    except RecursionError as problem:
        raise UsageProblem(f"{path} is nested too deeply") from problem
    finally:
        if loader is not None:
            loader.dispose()
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise UsageProblem(f"{path} must be a mapping of settings")
    return read


def _pairs(
    loader: yaml.SafeLoader, node: yaml.MappingNode, sections: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """A mapping's pairs, each of its sections' as `section.key`."""
    for key_node, value in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if isinstance(value, yaml.MappingNode) and key.replace("-", "_") in sections:
            yield from _pairs(loader, value, (), f"{key}.")
        else:
            yield prefix + key, loader.construct_object(value, deep=True)


def read_mapping(given: Given) -> Any:
    """What a text for a mapping holds: JSON or YAML, or the name of a file with either."""
    text = given.value.strip()
    try:
        if "{" not in text and "\n" not in text:
            text = Path(text).read_bytes().decode("utf-8-sig")
        return _mapping_in(text)
    except OSError as problem:
        raise UsageProblem(f"{given.origin}: cannot read {_short(text)}: {problem.strerror}") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise UsageProblem(f"{given.origin}: not a mapping in JSON or YAML ({type(problem).__name__})") from problem


def _mapping_in(text: str) -> Any:
    """JSON is not all YAML (tabs), and what looks like JSON may be YAML (`{a: 1}`)."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return yaml.safe_load(text)


def merge(sources: Iterable[Iterable[Given]]) -> dict[str, Any]:
    """Sources, the strongest first -> typed value by name. One source may give a setting once only."""
    values: dict[str, Any] = {}
    for source in sources:
        seen: dict[str, Given] = {}
        for given in source:
            name = given.option.name
            if name in seen:
                raise UsageProblem(f"{name} is given twice: {seen[name].origin} and {given.origin}")
            seen[name] = given
            value = typed(given)
            values.setdefault(name, value)
    return values


def typed(given: Given) -> Any:
    """The value in the option's type. Texts are read; a whole number may stand for a text in a list (ids)."""
    option = given.option
    try:
        value = msgspec.convert(_listed(given), option.kind, strict=False)
    except msgspec.ValidationError as problem:
        raise _wrong(given, str(problem)) from problem
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(given)
    if isinstance(value, str) and "\0" in value:
        raise _wrong(given)
    return tuple(dict.fromkeys(value)) if option.is_list else value


def _listed(given: Given) -> Any:
    if not given.option.is_list:
        return given.value
    if isinstance(given.value, str):
        return [part for each in given.value.split(",") if (part := each.strip())]
    if isinstance(given.value, list):
        return [str(each) if type(each) is int else each for each in given.value]
    return given.value


def _wrong(given: Given, problem: str = "") -> UsageProblem:
    if given.option.is_mapping:  # its values are nobody's business
        return UsageProblem(f"{given.origin}: {problem}")
    got = "" if given.option.secret else f", got {_short(given.value)}"
    where = given.origin
    named = "" if given.option.name in where.lower().replace("-", "_") else f" ({given.option.name})"
    return UsageProblem(f"{where}{named}: expected {given.option.expected}{got}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
