"""The SWE kind of run: rows out of tasks or instances, patches and predictions out of rows."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from agent.outcome import RolloutPolicy
from batch.dataset import Dataset
from batch.facts import decode_summary_facts
from batch.kind import Ended, RunKind
from batch.plan import rollout_policy
from batch.progress import counted
from batch.rows import parse_row
from batch.settings import RunSettings, recorded
from batch.spool import open_lines
from batch.store import replacing
from swe.evaluation import EvaluationOptions, evaluate, refuse_unreadable, write_reports
from swe.instances import choose, load_instances
from swe.predictions import write_predictions
from swe.repository import fetch
from swe.settings import SweSettings
from swe.steps import patch_path
from swe.tasks import CWD, SENTINEL, SYSTEM, SYSTEM_OF_INSTANCES, prompt_rows, row_of
from swe.types import Instance, Prediction, Report
from tools.environments.table import load_backend
from tools.errors import RowFailed, UsageProblem

PULLS_AT_ONCE = 4


def instances_of(settings: SweSettings) -> list[Instance]:
    """Those that the settings choose. Raises UsageProblem."""
    found = load_instances(settings.dataset, settings.split, settings.subset or "")
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
            steps_options={"repo_cache": cache, "exclude": json.dumps(settings.exclude)},
        )

    async def prepare(self, settings: RunSettings, dataset: Dataset, backend: str) -> None:
        """Repositories into the cache, images onto this machine."""
        settings = _swe(settings)
        if settings.evaluate:
            refuse_unreadable(instances_of(settings))
        if settings.dry_run:
            return
        if settings.repo_cache:
            await asyncio.to_thread(fetch, Path(settings.repo_cache), instances_of(settings))
        if settings.prefetch:
            await _pull((parse_row(dataset.line(row)).image for row in range(len(dataset))), backend)

    def files(self, settings: RunSettings) -> Sequence[Path]:
        """The copy of the merged rows."""
        output_file = _swe(settings).output_file
        return [Path(output_file)] if output_file else []

    def finish(self, ended: Ended) -> Mapping[str, str]:
        """Predictions, the copy of the merged rows, and what evaluating says."""
        settings, directory = _swe(ended.settings), ended.directory
        files = write_predictions(directory.path, predictions(ended), settings.preds_format)
        told = {path.stem if path.suffix == ".jsonl" else path.name: str(path) for path in files}
        if settings.output_file:
            with directory.trajectories_path.open("rb") as merged, replacing(Path(settings.output_file)) as copy:
                shutil.copyfileobj(merged, copy, 1 << 20)
            told["output"] = settings.output_file
        if settings.evaluate and ended.whole:
            told["evaluation"] = str(_evaluated(settings, ended))
        elif settings.evaluate:
            ended.say("not evaluated: the run was stopped early")
        return told


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
    for instance in instances_of(settings):
        own = instance if with_image else msgspec.structs.replace(instance, cwd="")
        yield row_of(own, image_template=settings.image_template, with_image=with_image, cwd=_cwd(settings))


def _with_image(settings: SweSettings) -> bool:
    return bool(settings.image_template) or not settings.repo_cache


def _cwd(settings: SweSettings) -> str:
    """`local` makes no directory outside its own."""
    return "testbed" if settings.container_backend == "local" else CWD


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


async def _pull(images: Iterable[str], backend_name: str) -> None:
    backend = load_backend(backend_name)
    free = asyncio.Semaphore(PULLS_AT_ONCE)
    faults: list[str] = []

    async def one(image: str) -> None:
        async with free:
            try:
                await backend.prepare(image)
            except RowFailed as error:
                faults.append(f"{image}: {error}")

    if backend.takes_images:
        await asyncio.gather(*(one(image) for image in dict.fromkeys(images) if image))
    if faults:
        raise UsageProblem("\n".join([f"{counted(len(faults), 'image')} cannot be had:", *sorted(faults)[:10]]))


# --- what comes out of rows


def predictions(ended: Ended) -> Iterator[tuple[str, str, bytes]]:
    """(id, model, patch) of every row, in dataset order; the patch is that of the last try of its first sample."""
    index = ended.index
    for row, last in index.first_samples():
        patch = _patch(ended.directory.path, index.line(last)) if last else b""
        yield index.dataset.task_id(row), ended.model, patch


def _patch(run_dir: Path, line: bytes) -> bytes:
    facts = decode_summary_facts(line)
    path = patch_path(run_dir, facts.task_id, facts.row_key, facts.sample_index, facts.attempt)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _evaluated(settings: SweSettings, ended: Ended) -> Path:
    """evaluation.json, and the counts in metrics.json."""
    directory = ended.directory
    if not settings.dataset:
        known = recorded(directory.read_manifest() or {}, SweSettings)
        now = {name: getattr(settings, name) for name in ("evaluation_timeout", "concurrency", "quiet")}
        settings = msgspec.structs.replace(_swe(known), **now)
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
    reports = asyncio.run(_reports(_evaluation_options(settings, ended), instances, patches, _told(ended)))
    write_reports(directory, instances, reports)
    return directory.path / "evaluation.json"


async def _reports(
    options: EvaluationOptions,
    instances: Sequence[Instance],
    patches: Sequence[Prediction],
    told: Callable[[Report], None],
) -> list[Report]:
    await options.backend.reap()  # what an evaluation that was killed left
    return await evaluate(instances, patches, options, told)


def _told(ended: Ended) -> Callable[[Report], None]:
    def told(report: Report) -> None:
        error = report.error.strip().partition("\n")[0]
        ended.say(f"{report.instance_id}: {report.verdict}" + (f" ({error})" if error else ""))

    return told


def _evaluation_options(settings: SweSettings, ended: Ended) -> EvaluationOptions:
    policy = rollout_policy(settings, os.environ)
    return EvaluationOptions(
        backend=load_backend(ended.backend),
        owner=ended.owner,
        folder=ended.directory.path / "evaluation",
        image_template=settings.image_template,
        with_image=_with_image(settings),
        cwd=_cwd(settings),
        repo_cache=Path(settings.repo_cache) if settings.repo_cache else None,
        limits=policy.limits,
        volumes=policy.volumes,
        variables=policy.variables,
        timeout=settings.evaluation_timeout,
        concurrency=settings.concurrency,
    )


SWE = SweKind()
