"""`--evaluate`: every prediction's patch on a clean checkout in a sandbox of its own, with the instance's own tests.

Follows the SWE-bench harness (https://www.swebench.com/SWE-bench/reference/harness/): its ways to apply a patch, its
marks around the tests' output, its verdicts, its summary of a run.

Under the folder given: `NAME/report.json`, there once an instance is through, and `NAME/test_output.txt`.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from agent.errors import RunStopped
from agent.faults import Fault, guarded
from agent.text import clean
from batch.store import RunDirectory, indented, replace_file
from swe.harness import plan_tests
from swe.images import image_of
from swe.repository import place
from swe.types import Instance, Prediction, Report
from swe.verdict import counts_of, fingerprint, patch_sha, run_report
from tools.environments.base import Backend, Environment, EnvironmentSpec, Limits, Owner
from tools.environments.starts import Starts
from tools.errors import DiskFull, RowFailed, ToolError, UsageProblem
from tools.names import file_name

SUMMARY = "evaluation.json"
LOG_BYTES = 100 << 20
_STEP_SECONDS = 300.0  # for each step but the tests themselves
_AROUND_SECONDS = 900.0  # for all of them together
_ERROR_TAIL = 1000
_APPLY = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""One after the other on a pristine tree until one ends with 0, as the harness has it."""
_DAMAGED = re.compile(r"^error: (?:corrupt|unrecognized) binary patch at line \d+", re.MULTILINE)
_PRISTINE = "git checkout -q -- . ; git clean -qfd"


class EvaluationOptions(Struct, frozen=True, kw_only=True):
    """`timeout`: seconds for an instance's tests. `image_template`, `with_image` and `cwd` as for the run's own rows;
    `repo_cache`: where repositories come from if images have none."""

    backend: Backend
    owner: Owner
    folder: Path
    image_template: str = ""
    with_image: bool = True
    cwd: str = ""
    repo_cache: Path | None = None
    limits: Limits = Limits()
    volumes: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    timeout: float = 1800.0
    concurrency: int = 4
    starts: Starts = field(default_factory=Starts)


class _Unfit(RowFailed):
    """Ends one evaluation as an error; the text says why."""


class _Summary(Struct, frozen=True):
    """What is read again of evaluation.json."""

    instances: list[Report]


class _Evaluated(Struct, frozen=True):
    """report.json."""

    fingerprint: str
    report: Report


async def evaluate(
    instances: Sequence[Instance],
    predictions: Sequence[Prediction],
    options: EvaluationOptions,
    told: Callable[[Report], None] = lambda _: None,
) -> list[Report]:
    """A report for every prediction, in their order; `told` hears of each as it comes. What was evaluated before with
    the same patch in the same surroundings is not evaluated again, unless that gave no test results. UsageProblem for a
    prediction of no instance, or where an instance's log could not be read; RunStopped if the disk refuses."""
    by_id = {instance.instance_id: instance for instance in instances}
    if strange := [each.instance_id for each in predictions if each.instance_id not in by_id]:
        raise UsageProblem(f"predictions of no instance: {', '.join(strange[:5])}")
    refuse_unreadable([by_id[prediction.instance_id] for prediction in predictions])
    free = asyncio.Semaphore(options.concurrency)

    async def one(prediction: Prediction) -> Report:
        async with free:
            report = await _remembered(by_id[prediction.instance_id], prediction.model_patch, options)
        report = replace(report, patch_sha256=patch_sha(prediction.model_patch))
        told(report)
        return report

    tasks = [asyncio.create_task(one(prediction)) for prediction in predictions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refuse_unreadable(instances: Iterable[Instance]) -> None:
    """UsageProblem if the log of an instance's tests cannot be read here."""
    for instance in instances:
        try:
            plan_tests(instance, "")
        except UsageProblem as problem:
            raise UsageProblem(f"{instance.instance_id}: {problem}") from None


def write_reports(directory: RunDirectory, ids: Sequence[str], reports: Sequence[Report]) -> None:
    """evaluation.json, and the counts into metrics.json, which is there already. `ids`: all instances', with a report
    or without. RunStopped if the disk refuses."""
    replace_file(directory.path / SUMMARY, [indented(run_report(ids, reports))])
    metrics = msgspec.json.decode(directory.metrics_path.read_bytes(), type=dict[str, Any])
    replace_file(directory.metrics_path, [indented({**metrics, "evaluation": counts_of(reports)})])


def read_reports(directory: RunDirectory) -> list[Report] | None:
    """Those that evaluation.json holds; None where there is none, or none that can be read."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory.path / SUMMARY).read_bytes(), type=_Summary).instances
    return None


async def _remembered(instance: Instance, patch: str, options: EvaluationOptions) -> Report:
    if not patch:
        return Report(instance_id=instance.instance_id, verdict="empty")
    folder = options.folder / file_name(instance.instance_id)
    mark = fingerprint(instance, patch, _surroundings(instance, options))
    with suppress(OSError, msgspec.DecodeError):
        before = msgspec.json.decode((folder / "report.json").read_bytes(), type=_Evaluated)
        if before.fingerprint == mark and before.report.verdict != "error" and not before.report.error:
            return before.report
    report = await _Evaluation(instance, patch, options, folder / "test_output.txt").report()
    replace_file(folder / "report.json", [indented(_Evaluated(mark, report))])
    return report


def _surroundings(instance: Instance, options: EvaluationOptions) -> list[Any]:
    image = image_of(instance, options.image_template) if options.with_image else ""
    placed = options.repo_cache is not None
    return [
        *(options.backend.name, image, options.cwd, placed, options.timeout),
        *(options.limits, options.volumes, options.variables),
    ]


class _Evaluation:
    """One instance with one patch."""

    def __init__(self, instance: Instance, patch: str, options: EvaluationOptions, log_path: Path) -> None:
        self.instance = instance
        self.patch = patch
        self.options = options
        self.log_path = log_path
        self._cwd: str | None = None  # in the sandbox; a setup command may have left it
        self._applied = False

    async def report(self) -> Report:
        """Raises nothing but CancelledError, and RunStopped if the disk refuses."""
        began = time.monotonic()
        try:
            outcome = await guarded(self._in_time())
        except (RowFailed, ToolError, UsageProblem) as problem:
            report = self._error(str(problem))
        except TimeoutError:
            report = self._error("the evaluation did not come to its end in time")
        except DiskFull as full:
            raise RunStopped("disk", str(full)) from full
        else:
            report = self._error(f"{outcome}\n{outcome.trace}") if isinstance(outcome, Fault) else outcome.value
        return replace(report, seconds=round(time.monotonic() - began, 3))

    def _error(self, text: str) -> Report:
        return Report(
            instance_id=self.instance.instance_id, verdict="error", patch_applied=self._applied, error=clean(text)
        )

    async def _in_time(self) -> Report:
        options = self.options
        image = image_of(self.instance, options.image_template) if options.with_image else ""
        if image:
            await options.backend.prepare(image)
        async with asyncio.timeout(options.timeout + _AROUND_SECONDS):
            async with options.starts.open(options.backend, lambda: self._spec(image)) as environment:
                return await self._judged(environment)

    def _spec(self, image: str) -> EnvironmentSpec:
        options = self.options
        return EnvironmentSpec(
            task_id=f"evaluation.{file_name(self.instance.instance_id)}",
            owner=options.owner,
            deadline=time.time() + options.timeout + 2 * _AROUND_SECONDS,
            image=image,
            cwd=(self.instance.cwd if options.with_image else "") or options.cwd,
            limits=options.limits,
            volumes=options.volumes,
            variables=options.variables,
        )

    async def _judged(self, environment: Environment) -> Report:
        cwd = self._cwd = (await self._done(environment, "pwd", "the sandbox's directory")).strip()
        await self._made_ready(environment, cwd)
        folder = (await self._done(environment, "command -v bash >/dev/null && mktemp -d", "bash and mktemp")).strip()
        await environment.write(f"{folder}/patch.diff", self.patch.encode("utf-8", "surrogatepass"))
        left_out = await self._apply(environment, f"{folder}/patch.diff")
        run = plan_tests(self.instance, cwd)
        await environment.write(f"{folder}/eval.sh", run.script.encode("utf-8", "surrogatepass"))
        log = await self._tested(environment, folder)
        report = await asyncio.to_thread(run.read, log)
        if report.error:
            report = replace(
                report,
                patch_applied=self._applied if report.verdict == "error" else report.patch_applied,
                error=f"{clean(report.error)} ({self.log_path})",
            )
        return replace(report, error="; ".join(filter(None, (left_out, report.error))))

    async def _made_ready(self, environment: Environment, cwd: str) -> None:
        instance, cache = self.instance, self.options.repo_cache
        if cache is not None:
            await place(
                environment,
                repo=instance.repo,
                base_commit=instance.base_commit,
                repo_url=instance.repo_url,
                cache=cache,
                cwd=cwd,
            )
        if instance.setup:
            await self._done(environment, instance.setup, "the instance's setup command")

    async def _apply(self, environment: Environment, path: str) -> str:
        """As the harness: a later way begins with a pristine tree, and what is there already counts as applied, as does
        a patch that git took a part of, which the text says."""
        said = ""
        for number, way in enumerate(_APPLY):
            command = f"{_PRISTINE}\n{way} {path}" if number else f"{way} {path}"
            result = await environment.run(command, timeout=_STEP_SECONDS, cwd=self._cwd)
            said += f"$ {way}\n{result.output}"
            if not result.exit_code:
                self._applied = True
                return _left_out(result.output)
        result = await environment.run(f"git apply --check --reverse {path}", timeout=_STEP_SECONDS, cwd=self._cwd)
        if result.exit_code:
            raise _Unfit(f"the patch does not apply: {said[-_ERROR_TAIL:]}")
        self._applied = True
        return ""

    async def _tested(self, environment: Environment, folder: str) -> str:
        """The log of the tests, which is kept beside the report."""
        timeout = self.options.timeout
        command = f"bash {folder}/eval.sh >{folder}/log 2>&1"
        ended = await environment.run(command, timeout=timeout, cwd=self._cwd)
        log = await _read(environment, f"{folder}/log")
        replace_file(self.log_path, [log])
        if ended.timed_out:
            raise _Unfit(f"the tests took longer than {timeout:g} s")
        if len(log) > LOG_BYTES:
            raise _Unfit(f"the tests printed more than {LOG_BYTES >> 20} MiB")
        return log.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")

    async def _done(self, environment: Environment, command: str, what: str) -> str:
        result = await environment.run(command, timeout=_STEP_SECONDS, cwd=self._cwd)
        if result.exit_code:
            raise _Unfit(f"{what}: ended with {result.exit_code}: {result.output[-_ERROR_TAIL:]}")
        return result.output


def _left_out(said: str) -> str:
    """What git says where it ended well all the same: it leaves out a damaged binary patch and all behind it."""
    found = _DAMAGED.search(said)
    return f"only a part of the patch was applied: {clean(found[0])}" if found else ""


async def _read(environment: Environment, path: str) -> bytes:
    """The file's bytes, of a larger one no more than a little above LOG_BYTES."""
    pieces: list[bytes] = []
    size = 0
    async with aclosing(cast("AsyncGenerator[bytes, None]", environment.read(path))) as chunks:
        async for chunk in chunks:
            pieces.append(chunk)
            size += len(chunk)
            if size > LOG_BYTES:
                break
    return b"".join(pieces)
