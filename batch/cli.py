"""What the command line prints about itself: help, version, the listings, the README's table of settings."""

import asyncio
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from batch.options import Option
from batch.progress import silence
from batch.settings import CONFIG, Action, RunSettings, run_options
from tools.errors import RowFailed, UsageProblem
from tools.mcp.servers import check_servers

if TYPE_CHECKING:
    from tools.distributions import Distribution
    from tools.environments.base import BackendSettings
    from tools.toolsets import Catalog

WIDTH = 115
STATE_SECONDS = 25.0  # for each backend of the listing: longer than they give a service
# What to do about a service that says nothing.
_SILENT = {
    "daytona": "is the service up, and DAYTONA_API_URL its address?",
    "docker": "restart it, or set DOCKER_HOST to another's address",
    "modal": "is the service up (https://status.modal.com), and is there a network here?",
    "podman": "restart its service, or set CONTAINER_HOST to another's address",
    "singularity": "see whether apptainer exec ends here, or choose docker",
    "ssh": "are the hosts of --ssh_hosts up?",
}
LISTS = ("tools", "key_variables")  # columns of the listings that hold several names


class Page(Struct, frozen=True, kw_only=True):
    """What a program's help is made of. `actions`: what it does instead of a run, each with its meaning."""

    program: str
    usage: str
    options: tuple[Option, ...]
    actions: Mapping[str, str]
    notes: str


PROGRAM = "batch-runner"
NOTES = """\
Names may be written with dashes. Lists are separated by commas. Every setting may also stand in the --config file
(setting: value) or in the environment (BATCH_RUNNER_SETTING).
Exit codes: 0 every row has an end and none failed; 1 some rows failed; 2 a mistake in what was asked for, nothing
spent; 3 stopped early (budget, endpoint, disk); 130/143 interrupted; 70 a fault of the program."""
ACTIONS: dict[str, str] = {
    "help": "this text",
    "version": "the program's version",
    "list_distributions": "toolset distributions, with their percentages",
    "list_toolsets": "toolsets and their tools",
    "list_backends": "sandbox backends: ready here or not, and why",
    "list_providers": "model providers: endpoint, key variables",
    "check_backend NAME": "tries in sandboxes of these settings what a run needs of them; exit code 1: not all holds",
}


def page() -> Page:
    """The batch runner's."""
    return Page(
        program=PROGRAM,
        usage=f"{PROGRAM} --dataset_file FILE --run_name NAME --model MODEL [--SETTING VALUE ...]",
        options=(*run_options(), CONFIG),
        actions=ACTIONS,
        notes=NOTES,
    )


def help_text(of: Page) -> str:
    """All flags by group, with the defaults of the definition."""
    groups = dict.fromkeys(option.group for option in of.options)
    parts = [f"usage: {of.usage}"]
    parts += [f"{group}:\n" + "\n".join(_entry(each) for each in of.options if each.group == group) for group in groups]
    parts.append("Instead of a run:\n" + "\n".join(_columns(f"--{name}", text) for name, text in of.actions.items()))
    return "\n\n".join([*parts, of.notes]) + "\n"


def _entry(option: Option) -> str:
    also = ", ".join(f"--{alias}" for alias in option.aliases)
    return _columns(f"--{option.name}", _meaning(option) + (f"; also {also}" if also else "") + f" [{option.shown}]")


def _meaning(option: Option) -> str:
    return option.meaning + (f": {option.choices}" if option.choices else "")


def _columns(left: str, right: str) -> str:
    indent = " " * 28
    lines = textwrap.wrap(right, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {left:<25} {lines[0].strip()}" + "".join(f"\n{line}" for line in lines[1:])


def settings_table_markdown(options: Sequence[Option]) -> str:
    """The README's table: setting, other names and the place in a YAML file, default, meaning."""
    lines = ["| setting | also | default | meaning |", "|---|---|---|---|"]
    for option in options:
        also = ", ".join(f"`{name}`" for name in (*option.aliases, option.place) if name)
        lines.append(f"| `{option.name}` | {also} | {option.shown} | {_meaning(option)} |")
    return "\n".join(lines) + "\n"


def version_text(program: str) -> str:
    """The program's name and version."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - 30 ms that a run need not pay

    try:
        return f"{program} {version('batch-runner')}"
    except PackageNotFoundError:
        return f"{program} (not installed)"


def show(action: Action, environ: Mapping[str, str], of: Page, settings: RunSettings | None = None) -> None:
    """Prints what an action other than `run` asks for; `settings`: whose tools are to be listed too. UsageProblem if it
    cannot be written, or the settings' tools cannot be used; a reader that is gone has seen enough."""
    shown(lambda: _show(action, environ, of, settings or RunSettings()))


def shown(printing: Callable[[], None]) -> None:
    """As `show`, for whatever prints."""
    if sys.__stdout__ is None:  # see `batch.exits.open_standard_streams`: what is written leads nowhere
        raise UsageProblem("the output cannot be written: stdout is closed")
    try:
        with _gone_reader():
            printing()
            sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        raise UsageProblem(f"the output cannot be written: {error.strerror or error}") from error


@contextmanager
def _gone_reader() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, SystemExit):  # the latter is what rich makes of the former
        silence(sys.stdout)


def _show(action: Action, environ: Mapping[str, str], of: Page, settings: RunSettings) -> None:
    as_json = settings.json_summary
    listed = print_records if as_json else print_table
    match action:
        case "help":
            print(help_text(of), end="")  # noqa: T201 - this is the command line's output
        case "version":
            print(version_text(of.program))  # noqa: T201 - this is the command line's output
        case "list_distributions":
            _show_distributions(_catalog(environ, settings).own_distributions if settings.tools_module else {}, as_json)
        case "list_toolsets":
            rows = _catalog(environ, settings).describe()
            if as_json or sys.stdout.isatty():
                listed("Toolsets", ("toolset", "tools", "state"), rows)
            else:
                print_tabbed((name, state, tools.replace(", ", ",")) for name, tools, state in rows)
        case "list_backends":
            listed("Backends", ("backend", "state"), asyncio.run(_backends(settings)))
        case "list_providers":
            listed("Providers", ("provider", "base_url", "key variables", "key"), _providers(environ))


def _show_distributions(own: "Mapping[str, Distribution]", as_json: bool) -> None:
    from tools.distributions import DISTRIBUTIONS  # noqa: PLC0415 - only this listing needs it

    if as_json:
        print_json([{"distribution": name, **_fields(each)} for name, each in {**DISTRIBUTIONS, **own}.items()])
    else:
        print_distributions(own)


def print_distributions(own: "Mapping[str, Distribution] | None" = None) -> None:
    """A table on stdout of all distributions, also of a run's own."""
    from tools.distributions import describe_distributions  # noqa: PLC0415 - only this listing needs it

    columns = ("Distribution", "Toolsets (chance in percent)", "Description")
    print_table("Toolset distributions", columns, describe_distributions(own or {}))


def _fields(struct: Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _catalog(environ: Mapping[str, str], settings: RunSettings) -> "Catalog":
    from agent.catalog import open_catalog  # noqa: PLC0415 - only these listings need it
    from batch.sources import find_sources  # noqa: PLC0415 - as above
    from batch.told import tool_settings  # noqa: PLC0415 - as above
    from tools.toolsets import find_lacking  # noqa: PLC0415 - as above

    check_servers(settings.mcp_servers)
    sources = asyncio.run(find_sources(settings, environ))
    with redirect_stdout(sys.stderr):  # as in a run: what the module prints is no part of the listing
        return open_catalog(sources, find_lacking(tool_settings(settings, Path()), environ))


def _providers(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    from agent.models.providers import listing  # noqa: PLC0415 - only this listing needs it

    return [
        (each.name, each.base_url, ", ".join(each.key_variables), _key_state(each.key_set, each.keyless))
        for each in listing(environ)
    ]


def _key_state(is_set: bool, needless: bool) -> str:
    return "set" if is_set else "not needed" if needless else "not set"


async def _backends(settings: RunSettings) -> list[tuple[str, str]]:
    """Each is tried, all at once."""
    from batch.told import backend_settings  # noqa: PLC0415 - only this listing needs it
    from tools.environments.table import BACKENDS  # noqa: PLC0415 - as above

    told = backend_settings(settings)
    return list(zip(BACKENDS, await asyncio.gather(*(_state(name, told) for name in BACKENDS)), strict=True))


async def _state(name: str, told: "BackendSettings") -> str:
    """`ready`, or what is missing and how to mend it, within a bound."""
    from agent.faults import Done, guarded  # noqa: PLC0415 - as above
    from tools.environments.table import load_backend  # noqa: PLC0415 - as above

    async def checked() -> str:
        return await load_backend(name, told).check()

    try:
        async with asyncio.timeout(STATE_SECONDS):
            outcome = await guarded(checked())
    except TimeoutError:
        mend = _SILENT.get(name, "")
        return f"no answer within {STATE_SECONDS:g} s" + (mend and f": {mend}")
    except (RowFailed, UsageProblem) as problem:
        return str(problem)
    return outcome.value or "ready" if isinstance(outcome, Done) else str(outcome)


def print_records(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A JSON list on stdout, an object for each row."""
    records = [dict(zip((column.replace(" ", "_") for column in columns), row, strict=True)) for row in rows]
    print_json([{name: _parts(cell) if name in LISTS else cell for name, cell in each.items()} for each in records])


def _parts(cell: str) -> list[str]:
    return cell.split(", ") if cell else []


def print_json(value: Any) -> None:
    """On stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=1))  # noqa: T201 - this is the command line's output


def print_tabbed(rows: Iterable[Sequence[str]]) -> None:
    """A line on stdout for each row, its cells with tabs between."""
    for row in rows:
        print("\t".join(" ".join(cell.split()) for cell in row))  # noqa: T201 - this is the command line's output


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; where that is no terminal nothing is cut off, and there is no title."""
    from rich.console import Console  # noqa: PLC0415 - 0.1 s that a run without a terminal need not pay
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console = Console()
    table = Table(*columns, title=title if console.is_terminal else None)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if not console.is_terminal:
        unbounded = console.options.update(max_width=10_000)
        console.width = max(80, console.measure(table, options=unbounded).maximum)
    console.print(table)
