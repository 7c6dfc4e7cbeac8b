"""The SWE kind of run: rows out of tasks or instances, patches and predictions out of rows."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from agent.outcome import RolloutPolicy
from agent.steps import TOO_LONG
from batch.dataset import Dataset
from batch.facts import decode_facts
from batch.kind import Ended, RunKind
from batch.leftovers import Leftovers, unremoved, warning_of
from batch.prefetch import prefetch
from batch.progress import counted, print_lines
from batch.rows import parse_row
from batch.settings import RunSettings, at_once, recorded, run_directory
from batch.spool import open_lines
from batch.store import indented, is_writable, replace_file, replacing
from batch.told import backend_settings, rollout_policy
from swe.evaluation import SUMMARY, EvaluationOptions, evaluate, read_reports, refuse_unreadable, write_reports
from swe.git import refusal_of
from swe.instances import choose, is_file, load_instances
from swe.patch import excluding
from swe.predictions import write_predictions
from swe.repository import fetch, wanted
from swe.settings import EVALUATION_SECONDS, SweSettings
from swe.steps import NO_PATCH, PATCHES, patch_path, stopped_path
from swe.tasks import CWD, SENTINEL, SYSTEM, SYSTEM_OF_INSTANCES, prompt_rows, row_of
from swe.types import Instance, Prediction, Report
from swe.verdict import patch_sha
from tools.environments.base import Backend
from tools.environments.table import load_backend
from tools.errors import UsageProblem


def instances_of(settings: SweSettings, *, to_work: bool = False) -> list[Instance]:
    """Those that the settings choose; `to_work`: to be worked on. Raises UsageProblem."""
    found = load_instances(settings.dataset, settings.split, settings.subset or "", to_work=to_work)
    return choose(found, filter=settings.filter, slice=settings.slice, ids=settings.instance_ids)


class SweKind(RunKind):
    """See RunKind."""

    script = "mini_swe_runner.py"
    command = "mini-swe-runner"
    settings = SweSettings

    def open_dataset(self, settings: RunSettings, spool_to: Path | None) -> Dataset:
        """A file of tasks line by line as rows, or a row for each instance. What cannot be read again as it is now (a
        pipe, a data set that may change) is kept at `spool_to`."""
        settings = _swe(settings)
        if not settings.dataset_file:
            return _written(_instance_rows(settings), settings.dataset, spool_to)
        source, name = open_lines(settings.dataset_file, None)
        with source:
            lasting = settings.dataset_file != "-" and Path(settings.dataset_file).is_file()
            return _written(prompt_rows(source), name, None if lasting else spool_to)

    def policy(self, settings: RunSettings, policy: RolloutPolicy) -> RolloutPolicy:
        """The sentinel, the tool, what the model is told, and what is done around every conversation."""
        settings = _swe(settings)
        told = (SYSTEM, SYSTEM_OF_INSTANCES if settings.dataset else "", settings.ephemeral_system_prompt)
        cache = str(Path(settings.repo_cache).resolve()) if settings.repo_cache else ""
        return msgspec.structs.replace(
            policy,
            ephemeral_system_prompt="\n\n".join(text for text in told if text),
            sentinel=SENTINEL,
            own_tools={"terminal": "swe.terminal:TERMINAL"},
            steps="swe.steps:SweSteps",
            steps_options={
                "repo_cache": cache,
                "exclude": json.dumps(settings.exclude),
                "instances": settings.dataset,
                "backend_settings": msgspec.json.encode(backend_settings(settings)).decode(),
            },
        )

    async def prepare(self, settings: RunSettings, dataset: Dataset, backend: str) -> None:
        """Looks whether git takes the patterns; repositories into the cache, images onto this machine."""
        settings = _swe(settings)
        if said := await asyncio.to_thread(refusal_of, [spec for each in settings.exclude for spec in excluding(each)]):
            raise UsageProblem(f"exclude: {said}")
        if settings.evaluate:
            refuse_unreadable(instances_of(settings))
        if settings.dry_run:
            self._look_at(settings)
            return
        if settings.repo_cache:
            await asyncio.to_thread(fetch, Path(settings.repo_cache), instances_of(settings))
        if settings.prefetch:
            images = (parse_row(dataset.line(row)).image for row in range(len(dataset)))
            await _pull(images, load_backend(backend, backend_settings(settings)))

    def _look_at(self, settings: SweSettings) -> None:
        """What a run would refuse as it begins."""
        if settings.repo_cache:
            wanted(instances_of(settings))
        for path in self.files(settings):
            if path.is_dir() or not is_writable(path):
                raise UsageProblem(f"{path} cannot be written")

    def files(self, settings: RunSettings) -> Sequence[Path]:
        """The copy of the merged rows. Raises UsageProblem if it would replace the instances or part of a run."""
        name, instances = _swe(settings).output_file, Path(_swe(settings).dataset)
        if not name:
            return []
        path = Path(name)
        if path.is_file() and instances.is_file() and path.samefile(instances):
            raise UsageProblem(f"--output_file {name} is the file of instances: it would be overwritten")
        for folder in path.resolve().parents[:2]:
            if folder == run_directory(settings).resolve() or (folder / "run.json").exists():
                raise UsageProblem(f"--output_file {name} lies in a run directory, {folder}: choose another place")
        return [path]

    def finish(self, ended: Ended) -> Mapping[str, str]:
        """Predictions, the copy of the merged rows, and what evaluating says."""
        settings, directory = _swe(ended.settings), ended.directory
        _tell_what_is_missing(ended)
        _tell_what_is_of_earlier_tries(ended)
        files = write_predictions(directory.path, predictions(ended), settings.preds_format)
        told = {path.stem if path.suffix == ".jsonl" else path.name: str(path) for path in files}
        if settings.output_file:
            with directory.trajectories_path.open("rb") as merged, replacing(Path(settings.output_file)) as copy:
                shutil.copyfileobj(merged, copy, 1 << 20)
            told["output"] = settings.output_file
        if settings.evaluate and ended.whole:
            return {**told, "evaluation": str(_evaluated(settings, ended))}
        if settings.evaluate:
            ended.say("not evaluated: the run was stopped early")
        return {**told, **_still_evaluated(ended)}


def _swe(settings: RunSettings) -> SweSettings:
    assert isinstance(settings, SweSettings)
    return settings


# --- rows


def _instance_rows(settings: SweSettings) -> Iterator[bytes]:
    """Without a cache of repositories every instance has its image; with one those that a template names."""
    with_image, backend = _with_image(settings), settings.container_backend
    if with_image and backend != "auto" and not load_backend(backend).takes_images:
        raise UsageProblem(
            f"instances come with images, and {backend} has none: give --repo_cache DIR or another --env"
        )
    instances = instances_of(settings, to_work=True)
    if settings.split and not settings.quiet and is_file(settings.dataset) and not any(map(_split, instances)):
        print_lines([f"notice: --split {settings.split}: no row of {settings.dataset} has a split"], sys.stderr)
    for instance in instances:
        own = instance if with_image else msgspec.structs.replace(instance, cwd="")
        yield row_of(own, image_template=settings.image_template, with_image=with_image, cwd=_cwd(settings))


def _split(instance: Instance) -> str:
    return str(instance.rest.get("split") or "")


def _with_image(settings: SweSettings) -> bool:
    return bool(settings.image_template) or not settings.repo_cache


def _cwd(settings: SweSettings) -> str:
    """`local` and `ssh` make no directory outside their own."""
    return "testbed" if settings.container_backend in ("local", "ssh") else CWD


def _written(rows: Iterable[bytes], name: str, path: Path | None) -> Dataset:
    lines = _new_file(path)
    try:
        lines.writelines(rows)
        lines.flush()
    except BaseException:
        lines.close()
        raise
    return Dataset(lines, name)


def _new_file(path: Path | None) -> BinaryIO:
    if path is None:
        return cast("BinaryIO", tempfile.TemporaryFile())
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w+b")


async def _pull(images: Iterable[str], backend: Backend) -> None:
    if faults := await prefetch(images, backend):
        raise UsageProblem("\n".join([f"{counted(len(faults), 'image')} cannot be had:", *faults[:10]]))


# --- what comes out of rows


def predictions(ended: Ended) -> Iterator[tuple[str, str, bytes]]:
    """(id, model, patch) of every row, in dataset order; the patch is that of its first sample. See `_patch`."""
    index = ended.index
    for row, last in index.first_samples():
        patch = _patch(ended.directory.path, index.line(last))[0] if last else b""
        yield index.dataset.task_id(row), ended.model, patch


def _tell_what_is_of_earlier_tries(ended: Ended) -> None:
    index, run_dir = ended.index, ended.directory.path
    rows = [row for row, last in index.first_samples() if last and _patch(run_dir, index.line(last))[1]]
    if rows:
        kept = counted(len(rows), "prediction is an earlier try's", "predictions are earlier tries'")
        names = ", ".join(index.dataset.task_id(row) for row in rows[:3])
        ended.say(f"warning: {kept}, as the last was cut off and left no patch: {names}")


def _tell_what_is_missing(ended: Ended) -> None:
    """Of the submission, though rows are there."""
    index = ended.index
    if index.strange:
        rows = counted(len(index.strange), "row of this run is", "rows of this run are")
        ended.say(f"warning: {rows} not in the predictions: not among those chosen now (--slice, --filter, …)")
    lasts = (decode_facts(index.line(last)) for _, last in index.first_samples() if last)
    lost = [(facts.task_id, problem) for facts in lasts if (problem := _no_patch(facts.error))]
    metrics = ended.directory.read_metrics()
    replace_file(ended.directory.metrics_path, [indented({**metrics, "patches_not_taken": len(lost)})])
    for name, problem in lost[:1]:
        ended.say(f"warning: no patch could be taken of {counted(len(lost), 'row')}, such as {name}: {problem}")
    if gone := list(_without_file(ended)):
        rows = counted(len(gone), "row has", "rows have")
        ended.say(
            f"warning: {rows} no file in {ended.directory.path / PATCHES}, such as {gone[0]}: no patch is predicted"
        )


def _without_file(ended: Ended) -> Iterator[str]:
    """Rows of instances that a conversation ended, which leaves a file, if only an empty one, or says why not."""
    index, run_dir = ended.index, ended.directory.path
    if not _swe(recorded(ended.directory.read_manifest() or {}, SweSettings)).dataset:
        return
    for line in (index.line(last) for _, last in index.first_samples() if last):
        facts = decode_facts(line)
        path = patch_path(run_dir, facts.task_id, facts.row_key, facts.sample_index, facts.attempt)
        told = facts.status in ("failed", "stopped") or _no_patch(facts.error)
        if not told and not path.exists() and not _patch(run_dir, line)[0]:
            yield facts.task_id


def _no_patch(error: str) -> str:
    """The line of a row's error that says so, or ""."""
    found = (line for line in error.splitlines() if line.startswith((NO_PATCH, TOO_LONG)))
    return next(found, "").removeprefix(NO_PATCH)


def _patch(run_dir: Path, line: bytes) -> tuple[bytes, bool]:
    """That of the row's last try if it came to its own end or has one, else the last one of the tries before; and
    whether it is one of those."""
    facts = decode_facts(line)

    def path(attempt: int) -> Path:
        return patch_path(run_dir, facts.task_id, facts.row_key, facts.sample_index, attempt)

    own = _content(path(facts.attempt))
    if own or facts.status == "completed" or facts.reason == "no_reasoning":
        return own, False
    places = (each for attempt in range(facts.attempt, 0, -1) for each in (path(attempt), stopped_path(path(attempt))))
    earlier = next(filter(None, map(_content, places)), b"")
    return earlier, bool(earlier)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _evaluated(settings: SweSettings, ended: Ended) -> Path:
    """evaluation.json, and the counts in metrics.json."""
    directory = ended.directory
    known = _swe(recorded(directory.read_manifest() or {}, SweSettings))
    timeout = settings.evaluation_timeout or known.evaluation_timeout
    if not settings.dataset:
        now = {name: getattr(settings, name) for name in ("concurrency", "max_sandboxes", "quiet")}
        settings = msgspec.structs.replace(known, **now)
    settings = msgspec.structs.replace(settings, evaluation_timeout=timeout)
    if not settings.dataset:
        raise UsageProblem("evaluate: this run is not of instances; give --dataset NAME_OR_FILE")
    instances = instances_of(settings)
    known_ids = {instance.instance_id for instance in instances}
    patches = [
        Prediction(instance_id=name, model_name_or_path=model, model_patch=patch.decode())
        for name, model, patch in predictions(ended)
        if name in known_ids
    ]
    ended.say(f"evaluating {counted(len(patches), 'patch', 'patches')} on {ended.backend}")
    reports = asyncio.run(_reports(_evaluation_options(settings, ended), instances, patches, ended))
    write_reports(directory, [instance.instance_id for instance in instances], reports)
    return directory.path / SUMMARY


def _still_evaluated(ended: Ended) -> dict[str, str]:
    """What an earlier evaluation said holds on where the patch is the same; evaluation.json is made anew of that."""
    if (before := read_reports(ended.directory)) is None:
        return {}
    now = {name: patch_sha(patch.decode()) for name, _, patch in predictions(ended)}
    reports = [report for report in before if now.get(report.instance_id) == report.patch_sha256]
    if gone := len(before) - len(reports):
        ended.say(f"{SUMMARY}: {counted(gone, 'verdict')} on other patches left out: evaluate anew with --evaluate")
    write_reports(ended.directory, list(now), reports)
    return {"evaluation": str(ended.directory.path / SUMMARY)}


async def _reports(
    options: EvaluationOptions,
    instances: Sequence[Instance],
    patches: Sequence[Prediction],
    ended: Ended,
) -> list[Report]:
    await options.backend.reap()  # what an evaluation that was killed left
    leftovers = Leftovers(options.backend)
    try:
        return await evaluate(instances, patches, options, _told(ended))
    finally:
        leftovers.add(unremoved(options.backend))
        if names := await leftovers.close():
            ended.say(warning_of(options.backend, names))


def _told(ended: Ended) -> Callable[[Report], None]:
    def told(report: Report) -> None:
        error = report.error.strip().partition("\n")[0]
        ended.say(f"{report.instance_id}: {report.verdict}" + (f" ({error})" if error else ""))

    return told


def _evaluation_options(settings: SweSettings, ended: Ended) -> EvaluationOptions:
    policy = rollout_policy(settings, os.environ)
    return EvaluationOptions(
        backend=load_backend(ended.backend, backend_settings(settings)),
        owner=ended.owner,
        folder=ended.directory.path / "evaluation",
        image_template=settings.image_template,
        with_image=_with_image(settings),
        cwd=_cwd(settings),
        repo_cache=Path(settings.repo_cache) if settings.repo_cache else None,
        limits=policy.limits,
        volumes=policy.volumes,
        variables=policy.variables,
        timeout=settings.evaluation_timeout or EVALUATION_SECONDS,
        concurrency=at_once(settings),
    )


SWE = SweKind()
