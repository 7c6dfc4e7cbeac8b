"""The compressor's command line: words in, exit code out; one invocation from its settings to its report."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from msgspec import Struct, structs

from agent.errors import RunStopped
from agent.models.providers import API_KEY_VARIABLE
from agent.models.table import ModelSpec
from agent.outcome import utc_text
from agent.secrets import redactor_for
from agent.text import Redactor, clean
from batch.cli import Page, help_text, shown, version_text
from batch.exits import FINISHED, RESUMABLE, SOME_FAILED, STOPPED_EARLY, called_as, exit_code, handlers_kept
from batch.plan import BAD_ROWS_SHOWN
from batch.progress import Progress, counted, print_lines
from batch.store import indented, replace_file
from compression.dry_run import dry_run
from compression.inputs import Inputs, find_inputs, sample_size, scan
from compression.manifest import begun
from compression.merge import Merged, merge
from compression.metrics import RunFacts
from compression.plot import plot
from compression.report import DryRun, Report, print_dry_run, print_report
from compression.run import Compression, File
from compression.settings import (
    PREFIX,
    Action,
    CompressorSettings,
    compressor_options,
    load_settings,
    policy_of,
    request_options,
    resume_command,
)
from compression.store import (
    JournalReader,
    Places,
    Records,
    WorkFolder,
    places_of,
    refuse_unwritable,
    root_of,
    work_path,
)
from compression.summarizer import Summarizer, SummaryLimits, summarizer_spec
from tools.environments.owner import current_owner
from tools.errors import UsageProblem

PROGRAM = "trajectory-compressor"
SCRIPTS = ("trajectory_compressor.py", PROGRAM)
NOTES = f"""\
Names may be written with dashes. Every setting may also stand in the --config file, under its name or in its
section (the README's table says in which), or in the environment ({PREFIX}SETTING).
Exit codes: 0 every row has its end and none failed; 1 some rows failed and are as they were; 2 a mistake in what
was asked for, nothing spent; 3 stopped early (budget, endpoint, disk); 130/143 interrupted; 70 a fault of ours."""
ACTIONS = {"help": "this text", "version": "the program's version"}


def page() -> Page:
    """What its help is made of."""
    return Page(
        program=PROGRAM,
        usage=f"{PROGRAM} --input RUN_DIRECTORY --summarization_model MODEL [--SETTING VALUE ...]",
        options=compressor_options(),
        actions=ACTIONS,
        notes=NOTES,
    )


def invoke(words: Sequence[str]) -> int:
    """The exit code of one invocation."""
    return exit_code(lambda: _invoke(words))


def _invoke(words: Sequence[str]) -> int:
    settings, action = load_settings(words, os.environ)
    if action != "run":
        shown(partial(_show, action))
        return FINISHED
    return run(settings, words, os.environ, sys.stdout)


def _show(action: Action) -> None:
    text = help_text(page()) if action == "help" else f"{version_text(PROGRAM)}\n"
    sys.stdout.write(text)


def run(settings: CompressorSettings, argv: Sequence[str], environ: Mapping[str, str], out: TextIO) -> int:
    """Does what the settings say; returns the exit code. Raises UsageProblem, RunStopped."""
    environ = {**environ, **({API_KEY_VARIABLE: settings.api_key} if settings.api_key else {})}
    spec = _model_spec(settings, environ)
    root = root_of(settings.input, settings.output, settings.output_suffix)
    folder = WorkFolder(work_path(root))
    session = Session(settings, argv, environ, out, spec, folder)
    if settings.dry_run:
        return session.dry_run(root)
    lock = folder.own(current_owner(root.name), steal=settings.steal_lock)
    try:
        return session.run(root)
    finally:
        folder.forget_what_led_nowhere()
        lock.release()


def _model_spec(settings: CompressorSettings, environ: Mapping[str, str]) -> ModelSpec:
    """Without targets where no model is asked."""
    if settings.strategy != "summary" or not settings.summarization_model:
        return ModelSpec(model="")
    return summarizer_spec(
        settings.summarization_model,
        policy_of(settings),
        request_options(settings),
        provider=settings.provider,
        base_url=settings.base_url,
        api_key=settings.api_key,
        api_key_env=settings.api_key_env,
        environ=environ,
    )


def _places(settings: CompressorSettings, inputs: Inputs, root: Path) -> Places:
    return places_of(inputs, root, settings.output_file, is_folder=settings.output.endswith("/"), plot=settings.plot)


def scanned(inputs: Inputs) -> list[File]:
    """Every file read once. Bad rows are a UsageProblem that lists the first of them."""
    files = [File(source=source, scanned=scan(source)) for source in inputs.sources]
    bad_rows = sum(each.scanned.bad_rows for each in files)
    if bad_rows:
        told = [f"{each.source.shown}:{bad.line}: {bad.reason}" for each in files for bad in each.scanned.bad]
        more = bad_rows - min(len(told), BAD_ROWS_SHOWN)
        lines = [counted(bad_rows, "bad row"), *told[:BAD_ROWS_SHOWN], *([f"and {more} more"] if more else [])]
        raise UsageProblem("\n".join(lines))
    return files


class Session:
    """An invocation. Unless it is a dry run it owns its work folder."""

    def __init__(
        self,
        settings: CompressorSettings,
        argv: Sequence[str],
        environ: Mapping[str, str],
        out: TextIO,
        spec: ModelSpec,
        folder: WorkFolder,
    ) -> None:
        self._settings = self._given = settings
        self._argv = argv
        self._environ = environ
        self._out = out
        self._spec = spec
        self._folder = folder
        self._began = time.time()
        self._redactor: Redactor = redactor_for([spec], environ)[0]

    def run(self, root: Path) -> int:
        """Look at everything, then work and write."""
        try:
            begun = self._begin(root)
        except RunStopped as stop:  # the disk refuses before anything is spent
            raise UsageProblem(stop.message) from stop
        try:
            return self._go_on(begun)
        except (RunStopped, KeyboardInterrupt):  # the disk refuses even the outputs; a signal while they are written
            self._print_resume()
            raise

    def dry_run(self, root: Path) -> int:
        """Look at everything, refuse what a run would refuse, and say what it would take."""
        with tempfile.TemporaryDirectory() as spool, closing(self._folder.reader()) as journal:
            files, _, _ = self._looked_at(root, Path(spool) / "stdin.jsonl")
            records = self._folder.records([each.scanned.rows for each in files])
            records.retry_failed()
            told = asyncio.run(self._foreseen(files, records, journal, str(root)))
        print_dry_run(told, self._out, json_summary=self._settings.json_summary)
        return FINISHED

    async def _foreseen(self, files: Sequence[File], records: Records, journal: JournalReader, output: str) -> DryRun:
        if self._spec.model:
            async with self._summarizer(records):  # a script or a price that is missing is found here
                pass
        return await dry_run(self._settings, files, records, journal, output)

    def _looked_at(self, root: Path, spool: Path) -> tuple[list[File], Places, dict[str, Any]]:
        """The inputs, their outputs and the manifest; nothing is written but a pipe's content. Raises UsageProblem."""
        inputs = find_inputs(self._settings.input, spool)
        if inputs.notice:
            self._say(inputs.notice)
        if self._settings.trust_remote_code:
            self._say("trust_remote_code: nothing makes use of it, a tokenizer's own code is not run")
        files = scanned(inputs)
        places = _places(self._settings, inputs, root)
        known = self._folder.known_manifest()
        self._refuse_bad_outputs(places, known or {"written": []})
        return files, places, begun(known, self._settings, files, self._began)

    def _begin(self, root: Path) -> "_Begun":
        files, places, manifest = self._looked_at(root, self._folder.new_spool_path)
        files = self._spool_kept(files)
        if self._folder.mend().cut:
            self._say("the journal's last line was torn: it was cut off and kept as *.torn")
        records = self._folder.records([each.scanned.rows for each in files])
        self._folder.write_manifest(manifest)
        return _Begun(manifest=manifest, files=files, places=places, records=records)

    def _refuse_bad_outputs(self, places: Places, manifest: Mapping[str, Any]) -> None:
        settings, folder = self._settings, self._folder
        plot = [Path(settings.plot)] if settings.plot else []
        refuse_unwritable([*(each.path for each in places.targets), places.metrics, *plot])
        if folder.holds_results() and not settings.resume:
            raise UsageProblem(f"{folder.path} holds results: go on with --resume, or choose another output")
        if others := self._not_ours(places, manifest):
            way = "move it away" if folder.holds_results() else "choose another output"
            raise UsageProblem(f"{others[0]} exists, and is not of this run: {way}")
        if settings.resume and not folder.holds_results():
            self._say("nothing to resume: the run starts")

    def _outputs(self, places: Places) -> list[Path]:
        return [*(each.path for each in places.targets), *([places.metrics] if self._settings.metrics else [])]

    def _not_ours(self, places: Places, manifest: Mapping[str, Any]) -> list[Path]:
        """Files in the place of outputs that no invocation of this run wrote."""
        ours = set(manifest["written"])
        return [path for path in self._outputs(places) if path.exists() and places.name(path) not in ours]

    def _written_now(self, run: "_Begun") -> list[str]:
        """The names of all outputs, for the manifest: from then on they are ours. RunStopped if one is another's."""
        if others := self._not_ours(run.places, run.manifest):
            raise RunStopped("output", f"{others[0]} appeared while the run worked: move it away")
        names = map(run.places.name, self._outputs(run.places))
        return sorted({*run.manifest["written"], *names})

    def _spool_kept(self, files: Sequence[File]) -> list[File]:
        """What came by a pipe takes the place that a resume can name."""
        new, kept = self._folder.new_spool_path, self._folder.spool_path
        if not new.exists():
            return list(files)
        new.replace(kept)
        self._settings = structs.replace(self._settings, input=str(kept))
        return [structs.replace(files[0], source=structs.replace(files[0].source, path=kept))]

    def _go_on(self, run: "_Begun") -> int:
        records, settings = run.records, self._settings
        total = sum(sample_size(each.scanned.rows, settings.sample_percent) for each in run.files)
        records.retry_failed()
        done = f", {records.ended} are done" if records.ended else ""
        to_do = f"{counted(total - records.ended, 'row')} to look at{done}"
        self._say(to_do if total else "nothing to do: there is no row")
        stopped, signal_code = self._work(run) if records.ended < total else (None, 0)
        manifest = {**run.manifest, "seconds": run.manifest["seconds"] + round(time.time() - self._began, 2)}
        if records.ended == total:
            manifest["written"] = self._written_now(run)
        self._folder.write_manifest(manifest)
        code = signal_code or (STOPPED_EARLY if stopped else SOME_FAILED if records.failed else FINISHED)
        if records.ended < total:
            files = {"journal": str(self._folder.journal_path)} if self._folder.holds_results() else {}
            reason = self._reason(stopped)
            self._report(Report(exit_code=code, rows=total, ended=records.ended, stopped=reason, files=files))
            return code
        self._report(self._written(run, manifest, code, stopped))
        return code

    def _work(self, run: "_Begun") -> tuple[RunStopped | None, int]:
        """Why it stopped early, and a signal's exit code."""
        with handlers_kept():
            return asyncio.run(self._worked(run))

    async def _worked(self, run: "_Begun") -> tuple[RunStopped | None, int]:
        progress = Progress(sys.stderr, self._environ, quiet=self._settings.quiet)
        summarizer = self._summarizer(run.records) if self._settings.strategy == "summary" else None
        work = Compression(self._settings, run.files, self._folder, run.records, summarizer, progress)
        await work.execute()
        return work.stopped, work.signal_code

    def _summarizer(self, records: Records) -> Summarizer:
        settings = self._settings
        limits = SummaryLimits(
            concurrency=settings.max_concurrent_requests,
            tries=settings.max_retries,
            retry_delay=settings.retry_delay,
            rpm=settings.rpm,
            tpm=settings.tpm,
            max_cost=settings.max_cost,
            rate_limit_wait=settings.rate_limit_wait,
            endpoint_wait=settings.endpoint_wait,
        )
        return Summarizer(self._spec, limits, self._environ, spent=records.spent)

    # --- what it leaves

    def _written(self, run: "_Begun", manifest: Mapping[str, Any], code: int, stopped: RunStopped | None) -> Report:
        settings, places = self._settings, run.places
        merged = merge(settings, run.files, places, self._folder, run.records)
        metrics = merged.totals.to_dict(self._facts(run.records, merged, manifest))
        files = {"output": str(places.root)}
        if settings.metrics:
            replace_file(places.metrics, [indented(metrics)])
            files["metrics"] = str(places.metrics)
        if settings.plot:
            plot(Path(settings.plot), merged.totals.before, merged.totals.after, settings.target_max_tokens)
            files["plot"] = settings.plot
        return Report(
            exit_code=code,
            rows=run.records.ended,
            ended=run.records.ended,
            stopped=self._reason(stopped),
            metrics=metrics,
            files=files,
        )

    def _facts(self, records: Records, merged: Merged, manifest: Mapping[str, Any]) -> RunFacts:
        return RunFacts(
            strategy=self._settings.strategy,
            target_max_tokens=self._settings.target_max_tokens,
            requests=records.spent.requests,
            errors=records.errors,
            usage=records.spent.usage,
            cost_usd=records.spent.cost_usd,
            unreported=records.spent.unreported,
            start_time=manifest["started_at"],
            end_time=utc_text(time.time()),
            seconds=manifest["seconds"],
            files=merged.files,
        )

    def _reason(self, stopped: RunStopped | None) -> str:
        return self._redactor.text(clean(stopped.message)) if stopped else ""

    def _report(self, report: Report) -> None:
        resumable = report.exit_code in RESUMABLE
        report = structs.replace(report, resume=self._resume_command() if resumable else "")
        print_report(report, self._out, json_summary=self._settings.json_summary)
        if resumable:
            self._print_resume()

    def _resume_command(self) -> str:
        settings = self._settings if self._folder.holds_results() else self._given  # nothing is kept then
        return self._redactor.text(clean(resume_command(settings, self._argv, called_as(*SCRIPTS))))

    def _print_resume(self) -> None:
        print_lines([self._resume_command()], sys.stderr if self._settings.json_summary else self._out)

    def _say(self, text: str) -> None:
        if not self._settings.quiet:
            print_lines([self._redactor.text(text)], sys.stderr)


class _Begun(Struct, frozen=True, kw_only=True):
    """A run that may work: all that could be wrong with what was asked for has been looked at."""

    manifest: dict[str, Any]
    files: list[File]
    places: Places
    records: Records
