"""From settings to a plan: everything that can be wrong is found here, before anything is spent or written."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agent.catalog import open_catalog
from agent.checkers import Plugin, load_plugin
from agent.models.gate import RunGate
from agent.models.table import ModelSpec, is_local, open_model
from agent.outcome import RolloutPolicy
from agent.pricing import cost
from agent.prompt import Prompt
from agent.secrets import redactor_for
from agent.types import Usage
from batch.dataset import Dataset, DatasetScan, Selection, scan
from batch.eye import eye_spec
from batch.kind import BATCH_RUNNER, RunKind
from batch.manifest import differences, refuse_changed
from batch.progress import counted
from batch.settings import RunSettings, for_the_record, recorded, run_directory
from batch.sources import find_sources, refuse_lacking
from batch.told import backend_settings, model_spec, rollout_policy, tool_settings
from tools.environments.table import BACKENDS, load_backend, resolve_backend
from tools.errors import RowFailed, UsageProblem
from tools.toolsets import BUILT_IN, Catalog, find_lacking

BAD_ROWS_SHOWN = 10


class Plan(Struct, frozen=True, kw_only=True):
    """A run that may start. `eye`: see `WorkerSpec`; `absent`: toolsets and tools that are asked for and cannot be had,
    each with what it lacks; `toolless`: rows of which that leaves nothing."""

    settings: RunSettings
    directory: Path
    dataset: Dataset
    scan: DatasetScan
    order: Sequence[int]
    model: ModelSpec
    eye: ModelSpec | None = None
    policy: RolloutPolicy
    catalog: Catalog
    absent: Mapping[str, str] = {}
    toolless: int = 0
    backend: str
    on_task_done: Plugin | None
    environ: Mapping[str, str]

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """All that are called."""
        return (self.model, self.eye) if self.eye else (self.model,)

    @property
    def absence(self) -> str:
        """What is not offered though it is asked for, in words; "" if there is nothing."""
        lacks = "; ".join(f"{name} lacks {lack}" for name, lack in self.absent.items())
        rows = f"; {counted(self.toolless, 'row has', 'rows have')} no tool left" if self.toolless else ""
        return f"not offered: {lacks}{rows}" if lacks else ""


async def make_plan(
    settings: RunSettings,
    environ: Mapping[str, str],
    recorded_backend: str = "",
    kind: RunKind = BATCH_RUNNER,
    binding: Mapping[str, Any] | None = None,
) -> Plan:
    """Reads the dataset whole, looks at the backend, its image, the plug-ins and the keys. Raises UsageProblem.

    `environ` has the keys that settings give too. `recorded_backend` is the one that a run to be resumed has used so
    far, `binding` its manifest if it may not change.
    """
    model = model_spec(settings, environ)
    if is_local(settings.model):
        open_model(model, RunGate())  # reads the script or finds the run, so that a bad one is found now
    eye = eye_spec(settings, model, environ)
    for each in (model, *([eye] if eye else [])):
        _check_prices(settings, each)
    if settings.success_checker:
        load_plugin(settings.success_checker)
    directory = run_directory(settings)
    tools = tool_settings(settings, directory)
    if binding:
        redactor, _ = redactor_for([model, *([eye] if eye else [])], environ, tools)
        _refuse_other_settings(settings, binding, redactor.text)
    sources = await find_sources(settings, environ)
    refuse_lacking(settings, sources)
    catalog = open_catalog(sources, find_lacking(tools, environ))
    dataset, found = read_dataset(settings, directory, catalog, kind)
    order = selection(settings).order(dataset)
    absent = _check_toolsets(settings, found, catalog)
    backend = await choose_backend(settings, found, recorded_backend)
    await _ready_image(settings, found, backend)
    await kind.prepare(settings, dataset, backend)
    if settings.dataset_file and not settings.dry_run:
        settings = msgspec.structs.replace(settings, dataset_file=dataset.path)  # what can be read again
    return Plan(
        settings=settings,
        directory=directory,
        dataset=dataset,
        scan=found,
        order=order,
        model=model,
        eye=eye,
        policy=kind.policy(settings, rollout_policy(settings, environ, tools, catalog, sources)),
        catalog=catalog,
        absent=absent,
        toolless=_count_toolless(settings, found, catalog),
        backend=backend,
        on_task_done=load_plugin(settings.on_task_done) if settings.on_task_done else None,
        environ=environ,
    )


def _refuse_other_settings(settings: RunSettings, binding: Mapping[str, Any], redact: Callable[[str], str]) -> None:
    """What can be told before anything is looked at; what `auto` and servers' tools come to is told later."""
    requested = settings.container_backend
    now = {
        "settings": for_the_record(settings, redact),
        "backend": requested if requested in BACKENDS else binding["backend"],
        "prefill_sha256": file_sha(settings.prefill_messages_file),
        "tools_sha256": file_sha(settings.tools_module),
    }
    refuse_changed(differences(binding, now))


def file_sha(file: str) -> str:
    """Of a file's content, "" without one."""
    try:
        return sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError as error:
        raise UsageProblem(f"{file} cannot be read: {error.strerror}") from error


def finalize_plan(
    settings: RunSettings, environ: Mapping[str, str], known: Mapping[str, Any], kind: RunKind = BATCH_RUNNER
) -> Plan:
    """A plan for making a run's files anew: what shapes the data is the manifest's, how it is shown the settings'."""
    before = recorded(known, kind.settings)
    kept = ("samples_per_prompt", "max_samples", "shuffle", "seed", "spread", "distribution", "batch_size", "model")
    changes = {name: getattr(before, name) for name in (*kept, "prompt")}
    changes["dataset_file"] = settings.dataset_file or _recorded_dataset(known, run_directory(settings))
    settings = msgspec.structs.replace(settings, **changes, skip_bad_rows=True)
    catalog = Catalog(toolsets=known.get("own_toolsets", {}))
    dataset, found = read_dataset(settings, run_directory(settings), catalog, kind)
    return Plan(
        settings=settings,
        directory=run_directory(settings),
        dataset=dataset,
        scan=found,
        order=selection(settings).order(dataset),
        model=ModelSpec(model=settings.model),
        policy=RolloutPolicy(),
        catalog=catalog,
        backend=known["backend"],
        on_task_done=None,
        environ=environ,
    )


# --- dataset


def _recorded_dataset(known: Mapping[str, Any], directory: Path) -> str:
    """Where the run's dataset is now: a copy in the run directory may have moved with it."""
    path, copy = str(known["dataset"]["path"]), directory / "dataset.jsonl"
    return str(copy) if path and not Path(path).exists() and copy.exists() else path


def selection(settings: RunSettings) -> Selection:
    """Which rows, in which order."""
    return Selection(max_samples=settings.max_samples, shuffle=settings.shuffle, seed=settings.seed)


def read_dataset(
    settings: RunSettings, directory: Path, catalog: Catalog = BUILT_IN, kind: RunKind = BATCH_RUNNER
) -> tuple[Dataset, DatasetScan]:
    """The dataset, scanned. Bad rows and an empty set are UsageProblems."""
    if settings.prompt:
        dataset = Dataset.of_prompt(settings.prompt)
        return dataset, scanned(settings, dataset, catalog)
    if settings.dry_run:
        dataset = kind.open_dataset(settings, None)
        return dataset, scanned(settings, dataset, catalog)
    spooled = directory / "dataset.jsonl.tmp"
    try:
        dataset = kind.open_dataset(settings, spooled)
        found = scanned(settings, dataset, catalog)
        if spooled.is_file():  # only a dataset that can be run takes the place of an earlier one
            dataset.path = str(spooled.replace(directory / "dataset.jsonl"))
    finally:
        if spooled.is_file():
            spooled.unlink()
    return dataset, found


def scanned(settings: RunSettings, dataset: Dataset, catalog: Catalog = BUILT_IN) -> DatasetScan:
    """The first pass over the rows. UsageProblem for bad ones, unless they may be left out, and for an empty set."""
    asks = asks_for(settings.spread, catalog) if settings.spread else None
    found = scan(dataset, catalog.resolve_names, asks_for_spread=asks)
    if found.bad_rows and not settings.skip_bad_rows:
        raise UsageProblem(_bad_rows_text(settings.dataset_file or "--prompt", found))
    if not found.rows:
        raise UsageProblem(f"{settings.dataset_file}: no valid row")
    return found


def asks_for(toolset: str, catalog: Catalog = BUILT_IN) -> Any:
    """Whether a row asks for one of the toolset's tools."""
    wanted = set(catalog.resolve_toolsets([toolset]))

    def asks(prompt: Prompt) -> bool:
        return bool(wanted & set(catalog.resolve_names(prompt.tools)))

    return asks


def _bad_rows_text(file: str, found: DatasetScan) -> str:
    shown = [f"{file}:{bad.line}: {bad.reason}" for bad in found.bad[:BAD_ROWS_SHOWN]]
    more = found.bad_rows - len(shown)
    head = f"{counted(found.bad_rows, 'bad row')} (to be mended, or left out with --skip_bad_rows)"
    return "\n".join([head, *shown, *([f"and {more} more"] if more > 0 else [])])


# --- model


def _check_prices(settings: RunSettings, model: ModelSpec) -> None:
    if settings.max_cost is None:
        return
    for name in [target.model for target in model.targets] or [model.model]:
        if cost(Usage(), name, model.options.price_in, model.options.price_out) is None:
            raise UsageProblem(f"max_cost: the price of {name} is not known; give --price_in and --price_out")


# --- tools and sandbox


def _check_toolsets(settings: RunSettings, found: DatasetScan, catalog: Catalog) -> dict[str, str]:
    """What rows ask for, and what is drawn for those that do not, as far as it cannot be had, each with what it lacks.
    UsageProblem, unless the run may do without; also then where no row is left a tool."""
    drawn = _drawn(settings, catalog)
    catalog.resolve_toolsets([*drawn, *settings.disabled_toolsets])
    source = "enabled_toolsets" if settings.enabled_toolsets else f"distribution {settings.distribution}"
    here = set(catalog.resolve_toolsets(drawn)) - catalog.lacking.keys()
    if found.asked.get(()) and here and here <= catalog.disabled(settings.disabled_toolsets):
        raise UsageProblem(f"disabled_toolsets: leaves no tool of {source}")
    by_source = {
        source: catalog.missing(drawn, settings.disabled_toolsets) if found.asked.get(()) else {},
        f"rows of {settings.dataset_file}": catalog.missing(sorted(found.names)),  # these beat what is disabled
    }
    is_empty = _count_toolless(settings, found, catalog) == found.rows
    for named_by, absent in by_source.items():
        if absent and (is_empty or not settings.allow_missing_toolsets):
            reasons = "; ".join(f"{name} lacks {lack}" for name, lack in absent.items())
            without = "; no row is left a tool" if is_empty else " or run without them (--allow_missing_toolsets)"
            raise UsageProblem(
                f"{named_by}: {reasons}. Mend it, choose others (--list_toolsets, --enabled_toolsets=terminal,file)"
                + without
            )
    return {name: lack for absent in by_source.values() for name, lack in absent.items()}


def _drawn(settings: RunSettings, catalog: Catalog) -> tuple[str, ...]:
    """What the toolsets of a row that names none come from."""
    return settings.enabled_toolsets or tuple(catalog.distribution(settings.distribution).toolsets)


def _count_toolless(settings: RunSettings, found: DatasetScan, catalog: Catalog) -> int:
    """Rows of which it is certain that nothing of what they are to have can be had."""

    def left(names: tuple[str, ...]) -> set[str]:
        if names:
            return set(catalog.resolve_names(names)) - catalog.lacking.keys()
        every = set(catalog.resolve_toolsets(_drawn(settings, catalog)))
        return every - catalog.lacking.keys() - catalog.disabled(settings.disabled_toolsets)

    return sum(rows for names, rows in found.asked.items() if not left(names))


async def choose_backend(settings: RunSettings, found: DatasetScan, recorded: str = "") -> str:
    """The backend that the whole run uses: there is no other one to fall back to. What `auto` chose once stays."""
    wants_image = bool(settings.image or found.images)
    requested = settings.container_backend
    try:
        name = recorded if recorded and requested == "auto" else requested
        return await resolve_backend(name, wants_image, backend_settings(settings))
    except UsageProblem as problem:
        if not found.images:
            raise
        where = f"{settings.dataset_file}:{found.first_image_line}: " if settings.dataset_file else ""
        raise UsageProblem(f"{where}image: {problem}") from problem


async def _ready_image(settings: RunSettings, found: DatasetScan, backend_name: str) -> None:
    """Makes the image of all rows that name none ready."""
    backend = load_backend(backend_name, backend_settings(settings))
    if not backend.takes_images or found.images == found.rows:
        return
    try:
        await backend.prepare(settings.image)
    except RowFailed as error:
        raise UsageProblem(str(error)) from error
