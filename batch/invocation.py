"""The program: one invocation, from settings to exit code."""

import asyncio
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import msgspec

from agent.checkers import judge_afterwards, load_plugin
from agent.errors import RunStopped
from agent.models.providers import API_KEY_VARIABLE
from agent.models.table import heavy_module
from agent.outcome import judged, utc_text
from agent.row import Row, decode_row
from agent.secrets import redactor_for
from agent.task_object import task_object
from agent.text import clean
from batch.dry_run import as_json, as_text, dry_run
from batch.exits import FINISHED, RESUMABLE, SOME_FAILED, STOPPED_EARLY, called_as, handlers_kept
from batch.eye import VISION_KEY
from batch.facts import MergePolicy
from batch.index import JournalIndex, scan_journal
from batch.kind import BATCH_RUNNER, Ended, RunKind
from batch.manifest import Invocation, begun, closed_at, ended, seconds_so_far
from batch.plan import Plan, file_sha, finalize_plan, make_plan
from batch.processes import start_server
from batch.progress import RunReport, counted, print_lines, print_summary
from batch.run import Run, count_pending
from batch.settings import RunSettings, for_the_record, recorded, records_file, resume_command, run_directory
from batch.store import RunDirectory, is_writable
from batch.summary import RunSummary, SummaryOptions, finalize
from tools.environments.base import Owner
from tools.environments.owner import current_owner
from tools.errors import UsageProblem
from tools.mcp.servers import secret_variables
from tools.services import IMAGE_KEY, SEARCH_KEY

JUDGE_SECONDS = 60.0  # for one row, when rows are judged anew
LIBRARIES = ("batch-runner", "openai", "msgspec")


def run(settings: RunSettings, argv: Sequence[str], environ: Mapping[str, str], kind: RunKind = BATCH_RUNNER) -> int:
    """Does what the settings say; returns the exit code. Raises UsageProblem, RunStopped.

    `environ` is laid over this process's environment too: workers, backends and plug-ins look there."""
    try:
        os.getcwd()  # noqa: PTH109 - what is asked is whether there is one
    except FileNotFoundError as error:
        raise UsageProblem("the current directory has been deleted: go to another one") from error
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # what plug-ins print must not get between the lines that programs read
        return _run(settings, argv, environ, out, kind)


def _run(settings: RunSettings, argv: Sequence[str], environ: Mapping[str, str], out: TextIO, kind: RunKind) -> int:
    environ = {**environ, **_given_keys(settings, environ)}
    os.environ.update(environ)
    directory = RunDirectory(run_directory(settings))
    owner = current_owner(settings.run_name)
    if settings.dry_run:
        return Session(_planned(settings, environ, directory, kind), directory, owner, argv, out, kind).dry_run()
    _refuse_bad_outputs(settings, directory, kind.files(settings))
    lock = directory.own(owner, steal=settings.steal_lock)
    try:
        if settings.finalize:
            plan = finalize_plan(settings, environ, _manifest(directory), kind)
            return Session(plan, directory, owner, argv, out, kind).finalize()
        if settings.num_workers:
            models = [settings.model, *([settings.vision_model] if settings.vision_model else [])]
            heavy = [*(heavy_module(model) for model in models), *(["mcp"] if settings.mcp_servers else [])]
            start_server(heavy, owner)
        return Session(_planned(settings, environ, directory, kind), directory, owner, argv, out, kind).run()
    finally:
        directory.remove_if_unused()
        lock.release()


def _given_keys(settings: RunSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The keys that settings give, by the variables in which they are looked for as any other key."""
    keys = {API_KEY_VARIABLE: settings.api_key, SEARCH_KEY: settings.search_api_key, IMAGE_KEY: settings.image_api_key}
    keys[VISION_KEY] = settings.vision_api_key
    keys.update(secret_variables(settings.mcp_servers, environ))
    return {name: key for name, key in keys.items() if key}


def _refuse_bad_outputs(settings: RunSettings, directory: RunDirectory, more: Sequence[Path]) -> None:
    """Files that could not be written when all is paid for, or that would overwrite the dataset."""
    records = records_file(settings)
    named = [*more, *([records] if records else [])]
    dataset = Path(settings.dataset_file or os.devnull)
    for path in [*directory.files(), *named]:
        if path.is_dir() or (path in named and not is_writable(path)):
            raise UsageProblem(f"{path} cannot be written")
        if path.exists() and dataset.exists() and path.samefile(dataset):
            raise UsageProblem(f"{path} is the dataset: it would be overwritten; choose another output")


def _planned(settings: RunSettings, environ: Mapping[str, str], directory: RunDirectory, kind: RunKind) -> Plan:
    _refuse_other_results(settings, directory)
    known = directory.read_manifest() or {}
    binding = known if directory.holds_results() and not settings.allow_config_change else None
    return asyncio.run(make_plan(settings, environ, known.get("backend", ""), kind, binding))


def _refuse_other_results(settings: RunSettings, directory: RunDirectory) -> None:
    if settings.resume or not directory.holds_results():
        return
    raise UsageProblem(f"{directory.path} holds results: go on with --resume, or choose another run_name")


def _manifest(directory: RunDirectory) -> Mapping[str, Any]:
    found = directory.read_manifest()
    if found is None:
        raise UsageProblem(f"{directory.path} holds no run: there is no run.json")
    return found


class Session:
    """An invocation that owns its directory and has a plan."""

    def __init__(
        self, plan: Plan, directory: RunDirectory, owner: Owner, argv: Sequence[str], out: TextIO, kind: RunKind
    ) -> None:
        self._plan = plan
        self._kind = kind
        self._settings = plan.settings
        self._directory = directory
        self._owner = owner
        self._out = out
        self._began = time.time()
        self._unjudged: set[tuple[str, int]] = set()  # rows whose checker failed
        self._left: tuple[str, ...] = ()  # sandboxes that could not be removed
        self._stopped: RunStopped | None = None  # the user knows why it ended early
        self._resumed, self._resumed_by = plan.settings, argv
        self._redactor, short = redactor_for(plan.models, plan.environ, plan.policy.tools)
        for name in short:
            self._say(f"warning: {name} is too short to be told from other text: it is not redacted")

    def run(self) -> int:
        """Scan, run, finish."""
        try:
            record, index = self._begin()
        except RunStopped as stop:  # the disk refuses before anything is spent
            raise UsageProblem(stop.message) from stop
        try:
            return self._go_on(record, index)
        except RunStopped as stop:  # the disk refuses even the files that say how it went
            if not self._is_known_full():
                print_lines([f"error: {self._redactor.text(stop.message)}"], sys.stderr)
            self._print_resume(sys.stderr if self._settings.json_summary else self._out)
            return STOPPED_EARLY
        except KeyboardInterrupt:  # outside the time in which a signal is answered by saving what runs
            self._print_resume(sys.stderr if self._settings.json_summary else self._out)
            raise

    def _is_known_full(self) -> bool:
        """A file of the run directory has been told to be one that cannot be written."""
        path = self._directory.path
        told = self._stopped.message if self._stopped and self._stopped.reason == "disk" else ""
        return any(told.startswith(f"{each}/") for each in (path, path.resolve()))

    def _begin(self) -> tuple[dict[str, Any], JournalIndex]:
        self._mend()
        if self._settings.resume and not self._directory.holds_results():
            self._say("nothing to resume: the run starts")
        record = self._record()
        index = self._scan()
        self._directory.write_manifest(record)
        return record, index

    def _record(self) -> dict[str, Any]:
        known = self._directory.read_manifest() if self._directory.holds_results() else None
        if known:
            known = closed_at(known, self._directory.last_checkpoint_at())
        return begun(known, self._invocation(), allow_change=self._settings.allow_config_change)

    def _go_on(self, record: dict[str, Any], index: JournalIndex) -> int:
        pending = count_pending(index, self._settings)
        if not pending:
            self._say("nothing is left to run")
        stopped, signal_code = self._work(index, pending) if pending else (None, 0)
        if pending:  # anew, from the journal alone: what --finalize does is what every run does
            written = index.totals.tries
            index.close()
            index = self._scan()
            stopped = stopped or self._lost(written - index.totals.tries)
        closed = ended(
            record,
            ended_at=utc_text(time.time()),
            seconds=time.time() - self._began,
            end=stopped.reason if stopped else "finished",
        )
        self._directory.write_manifest(closed)
        return self._finish(closed, index, stopped, signal_code)

    def _lost(self, tries: int) -> RunStopped | None:
        """Somebody took files of the run away while it ran."""
        if tries <= 0:
            return None
        gone = counted(tries, "ended row is", "ended rows are")
        return RunStopped("disk", f"{gone} no longer in {self._directory.path}: its files were changed from outside")

    def dry_run(self) -> int:
        """Looks at everything, shows what would run."""
        self._record()
        index = self._scan()
        pending = count_pending(index, self._settings)
        index.close()
        if absence := self._plan.absence:
            self._say(f"warning: {absence}")
        report = dry_run(self._plan, pending)
        self._out.write(as_json(report) if self._settings.json_summary else as_text(report))
        return FINISHED

    def finalize(self) -> int:
        """Makes the files anew, nothing else."""
        self._mend()
        known = _manifest(self._directory)
        self._resumed, self._resumed_by = self._run_before(known), ()
        record = closed_at(known, self._directory.last_checkpoint_at())
        if record != known:  # the checkpoint that told its end is about to be replaced
            self._directory.write_manifest(record)
        return self._finish(record, self._scan(), None, 0)

    def _run_before(self, known: Mapping[str, Any]) -> RunSettings:
        """The settings of the run whose files are made anew, where they are now."""
        settings, now = recorded(known, self._kind.settings), self._settings
        places = {}
        if run_directory(settings) != run_directory(now):
            places = {"output_dir": now.output_dir, "output": str(run_directory(now)) if now.output else ""}
        dataset = now.dataset_file if settings.dataset_file else ""  # another kind may have its rows from elsewhere
        return msgspec.structs.replace(settings, run_name=now.run_name, dataset_file=dataset, **places)

    def _mend(self) -> None:
        mending = self._directory.mend()
        for name in mending.cut:
            self._say(f"{name}: a torn last line was cut off and kept as *.torn")
        for name in mending.completed:
            self._say(f"{name}: the last line's newline was added")

    def _invocation(self) -> Invocation:
        plan = self._plan
        return Invocation(
            run_name=self._settings.run_name,
            settings=for_the_record(self._settings, self._redactor.text),
            dataset={
                "path": str(Path(plan.dataset.path).resolve()) if plan.dataset.path else "",
                "size": plan.scan.size,
                "sha256": plan.scan.sha256,
                "rows": plan.scan.rows,
            },
            versions={"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
            backend=plan.backend,
            started_at=utc_text(self._began),
            host=socket.gethostname(),
            prefill_sha256=file_sha(self._settings.prefill_messages_file),
            tools_sha256=file_sha(self._settings.tools_module),
            own_toolsets=plan.catalog.own_toolsets,
        )

    def _scan(self) -> JournalIndex:
        settings, catalog = self._settings, self._plan.catalog
        policy = MergePolicy(
            keep_no_reasoning=settings.keep_no_reasoning,
            keep_unknown_tools=settings.keep_unknown_tools,
            save_all=settings.save_all,
            toolsets={name: catalog.resolve_names([name]) for name in catalog.own_toolsets},
        )
        index = scan_journal(
            self._directory, self._plan.dataset, self._plan.order, samples=settings.samples_per_prompt, policy=policy
        )
        changed, names = index.changed()
        if changed and not settings.allow_config_change:
            raise UsageProblem(
                f"the dataset has {counted(changed, 'row')} with another content than was run under the same id: "
                f"{', '.join(names)}; give them new ids, or run them anew with --allow_config_change"
            )
        return index

    # --- the work

    def _work(self, index: JournalIndex, pending: int) -> tuple[RunStopped | None, int]:
        """Why it stopped early, and a signal's exit code."""
        done = index.counts().total - pending
        self._say(
            f"{counted(pending, 'prompt')} to run on {self._plan.backend}" + (f", {done} are done" if done > 0 else "")
        )
        work = Run(
            self._plan,
            self._directory,
            index,
            pending=pending,
            owner=self._owner,
            redactor=self._redactor,
        )
        try:
            with handlers_kept():
                asyncio.run(work.execute())
        finally:
            self._stopped = work.stopped
        self._unjudged |= work.unjudged
        self._left = work.left
        return work.stopped, work.signal_code

    # --- the files

    def _finish(
        self, record: Mapping[str, Any], index: JournalIndex, stopped: RunStopped | None, signal_code: int
    ) -> int:
        if index.foreign:
            self._say(f"warning: {counted(index.foreign, 'line')} of the batch files are no rows: left out")
        summary = finalize(self._directory, index, self._summary_options(record))
        if self._unjudged:
            self._say(f"warning: the checker failed on {counted(len(self._unjudged), 'row')} (success_reason says how)")
        answers = self._answers(index)
        files = self._kind.finish(self._ended(record, index, whole=not (stopped or signal_code)))
        index.close()
        summary = msgspec.structs.replace(summary, metrics=self._directory.read_metrics())
        code = signal_code or (STOPPED_EARLY if stopped else SOME_FAILED if summary.counts.failed else FINISHED)
        self._report(summary, stopped, code, answers, files)
        return code

    def _ended(self, record: Mapping[str, Any], index: JournalIndex, *, whole: bool) -> Ended:
        return Ended(
            settings=self._settings,
            directory=self._directory,
            index=index,
            owner=self._owner,
            backend=self._plan.backend,
            model=record["settings"].get("model", self._settings.model),
            whole=whole,
            say=self._say,
        )

    def _answers(self, index: JournalIndex) -> tuple[str, ...]:
        if not self._settings.prompt:
            return ()
        return tuple(decode_row(index.line(last)).final_response for _, _, last, _ in index.tries())

    def _summary_options(self, record: Mapping[str, Any]) -> SummaryOptions:
        settings, scan = self._settings, self._plan.scan
        return SummaryOptions(
            run_name=settings.run_name,
            distribution="" if settings.enabled_toolsets else settings.distribution,
            model=record["settings"].get("model", settings.model),
            batch_size=settings.batch_size,
            duration_seconds=seconds_so_far(record),
            skipped_rows=scan.bad_rows,
            skipped=scan.bad,
            output_format=settings.output_format,
            jsonl_file=records_file(settings),
            judge=self._judge() if settings.finalize and settings.success_checker else None,
        )

    def _judge(self) -> Callable[[Row], Row]:
        checker = load_plugin(self._settings.success_checker)

        def anew(row: Row) -> Row:
            judgement = asyncio.run(judge_afterwards(checker, task_object(row), JUDGE_SECONDS))
            if judgement.raised:
                self._unjudged.add((row.row_key, row.sample_index))
            return judged(row, judgement, self._redactor)

        return anew

    def _report(
        self,
        summary: RunSummary,
        stopped: RunStopped | None,
        code: int,
        answers: tuple[str, ...],
        files: Mapping[str, str],
    ) -> None:
        settings = self._settings
        report = RunReport(
            run_name=self._settings.run_name,
            exit_code=code,
            stopped=self._redactor.text(clean(stopped.message)) if stopped else "",
            statistics=summary.statistics,
            metrics=summary.metrics,
            files={**self._files(), **files},
            answers=answers,
            resume=self._resume_command() if code in RESUMABLE else "",
            left=self._left,
        )
        apart = bool(settings.prompt) and not settings.json_summary  # stdout is the answer's
        if apart:
            print_lines(answers, self._out)
        if not (apart and settings.quiet):
            print_summary(report, sys.stderr if apart else self._out, json_summary=settings.json_summary)
        if report.resume:
            self._print_resume(sys.stderr if apart or settings.json_summary else self._out)

    def _resume_command(self) -> str:
        return self._redactor.text(
            clean(resume_command(self._resumed, self._resumed_by, called_as(self._kind.script, self._kind.command)))
        )

    def _print_resume(self, stream: TextIO) -> None:
        print_lines([self._resume_command()], stream)

    def _files(self) -> dict[str, str]:
        directory = self._directory
        return {
            "merged": str(directory.trajectories_path),
            "statistics": str(directory.statistics_path),
            "failures": str(directory.failures_path),
            "log": str(directory.log_path),
        }

    def _say(self, text: str) -> None:
        if not self._settings.quiet:
            print_lines([self._redactor.text(text)], sys.stderr)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
