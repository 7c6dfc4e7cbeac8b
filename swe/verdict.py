"""What an instance's test results come to, as the SWE-bench harness (5.0) reckons. Pure."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from swe.logs import Result, Results
from swe.types import Instance, Report, Verdict

_PASSING = ("passed", "xfail")


def graded(instance: Instance, results: Results | None, *, fail_only: bool = False) -> Report:
    """Resolved when every test of FAIL_TO_PASS and PASS_TO_PASS passes. One that is not in the log failed; one that is
    skipped is no fix, but no loss either. `fail_only`: logs of that repository name failures alone, so all others
    passed. None instead of results: unresolved, with no word on single tests."""
    report = Report(instance_id=instance.instance_id, verdict="unresolved")
    if results is None:
        return replace(report, error="the log does not tell how the tests went")
    fixed, broken = _parted(instance.fail_to_pass, results, _PASSING, fail_only=fail_only)
    kept, lost = _parted(instance.pass_to_pass, results, (*_PASSING, "skipped"), fail_only=fail_only)
    return replace(
        report,
        verdict="unresolved" if broken or lost else "resolved",
        patch_applied=True,
        fail_to_pass_passed=fixed,
        fail_to_pass_failed=broken,
        pass_to_pass_passed=kept,
        pass_to_pass_failed=lost,
    )


def _parted(
    names: Iterable[str], results: Results, good: Sequence[str], *, fail_only: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    def passes(name: str) -> bool:
        if fail_only:
            return results.get(name) != "failed"
        return _result_of(name, results) in good

    names = list(names)
    return tuple(filter(passes, names)), tuple(name for name in names if not passes(name))


def _result_of(name: str, results: Results) -> Result | None:
    """Some published names are cut off inside their parameters: those stand for every test that begins so, where these
    agree."""
    if name in results or name.count("[") <= name.count("]"):
        return results.get(name)
    found = [result for full, result in results.items() if full.startswith(name)]
    return found[0] if found and len({result in _PASSING for result in found}) == 1 else None


def fingerprint(instance: Instance, patch: str, surroundings: Sequence[Any] = ()) -> str:
    """Of all that a verdict hangs on: the same one means that there is nothing to evaluate anew. `surroundings`: where
    and how the tests run."""
    return hashlib.sha256(msgspec.json.encode([instance, patch, surroundings])).hexdigest()


def patch_sha(patch: str) -> str:
    """By which a report's patch is known again."""
    return hashlib.sha256(patch.encode("utf-8", "surrogatepass")).hexdigest()


def counts_of(reports: Iterable[Report]) -> dict[str, Any]:
    """`{"resolved": n, "unresolved": n, "empty": n, "error": n, "resolved_rate": 0.0 to 1.0 of all of them}`."""
    verdicts = [report.verdict for report in reports]
    counts: dict[str, Any] = {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}
    return {**counts, "resolved_rate": round(counts["resolved"] / len(verdicts), 4) if verdicts else 0.0}


def run_report(instance_ids: Sequence[str], reports: Iterable[Report]) -> dict[str, Any]:
    """The harness's own summary of a run, `schema_version` 2, without its guesses at causes; and every instance's
    report under `instances`."""
    reports = sorted(reports, key=lambda report: report.instance_id)
    submitted = [report.instance_id for report in reports]

    def ids(*verdicts: str) -> list[str]:
        return [report.instance_id for report in reports if report.verdict in verdicts]

    groups = {
        "completed": ids("resolved", "unresolved"),
        "resolved": ids("resolved"),
        "unresolved": ids("unresolved"),
        "empty_patch": ids("empty"),
        "error": ids("error"),
    }
    return {
        "total_instances": len(instance_ids),
        "submitted_instances": len(submitted),
        **{f"{name}_instances": len(group) for name, group in groups.items()},
        "submitted_ids": submitted,
        "incomplete_ids": sorted(set(instance_ids) - set(submitted)),
        **{f"{name}_ids": group for name, group in groups.items()},
        "schema_version": 2,
        "instances": reports,
    }
