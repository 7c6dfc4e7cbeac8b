"""What a soak came to: the figures, and why it failed."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct, field

from tests.soak.account import Kill
from tests.soak.endpoint import CALL_SHARES, FAIR, REQUEST_SHARES
from tests.soak.memory import Growth, Role

SURE = 10.0  # times that something is expected which then comes once at least
DEVIATIONS = 6.0  # of a share from what is meant, in standard deviations, that are no chance


class Report(Struct, kw_only=True):
    """What one backend's soak came to; `faults` are why it failed."""

    backend: str
    prompts: int = 0
    met: int = 0  # prompts that were answered with tool calls in bad weather
    calm: int = 0  # rows whose last end came from the fair weather's reply
    seconds: float = 0.0
    storms: int = 0
    invocations: list[int] = field(default_factory=list)  # their exit codes
    kills: list[Kill] = field(default_factory=list)
    by_status: Counter[str] = field(default_factory=Counter)
    tries: int = 0
    told: int = 0  # ends that run.log told
    answers: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    said: tuple[int, int, int] = (0, 0, 0)  # metrics.json: requests, input and output tokens
    counted: tuple[int, int, int] = (0, 0, 0)  # the endpoint, of the same tries
    cut_requests: int = 0
    cut_tries: int = 0
    held: int = 0  # of these, with a known worker
    growths: list[Growth] = field(default_factory=list)
    worker_mb: float = 0.0  # the most
    faults: list[str] = field(default_factory=list)

    def killed(self) -> tuple[int, int]:
        """Workers, and whole runs."""
        workers = sum(bool(kill.worker) for kill in self.kills)
        return workers, len(self.kills) - workers


def print_weather(reports: Sequence[Report]) -> bool:
    """How often each kind came, of all backends together; whether one of them did not as meant."""
    answers, calls = Counter[str](), Counter[str]()
    for report in reports:
        answers.update(report.answers)
        calls.update(report.calls)
    in_weather = answers.total() - answers[FAIR] - answers["gone"]
    shares = [
        *(_Share(kind, meant, answers[kind], in_weather) for kind, meant in REQUEST_SHARES.items()),
        *(_Share(kind, meant, calls[kind], calls.total()) for kind, meant in CALL_SHARES.items()),
    ]
    words = ", ".join(f"{each.kind} {100 * each.measured:.1f} % ({100 * each.meant:g})" for each in shares)
    print(f"weather of {in_weather} requests and {calls.total()} calls (meant): {words}")
    odd = [each.kind for each in shares if each.is_odd()]
    if odd:
        print(f"FAULT the weather was not as meant: {', '.join(odd)}")
    return bool(odd)


class _Share(Struct, frozen=True):
    kind: str
    meant: float
    times: int
    of: int

    @property
    def measured(self) -> float:
        return self.times / self.of if self.of else 0.0

    def is_odd(self) -> bool:
        """It never came, or not nearly as often as meant, and that is no chance."""
        expected = self.meant * self.of
        never = not self.times and expected >= SURE
        return never or abs(self.times - expected) > DEVIATIONS * max(expected, 1.0) ** 0.5


def text(report: Report) -> str:
    """For people, on some lines."""
    workers, runs = report.killed()
    return "\n".join([
        f"{report.backend}: {report.prompts} prompts in {report.seconds:.0f} s and {report.storms} storms,"
        f" {report.met} of them met the weather with tools, {report.calm} were answered in fair weather at last",
        f"  {report.tries} tries, {report.told} told of; {workers} workers and {runs} whole runs killed, invocations"
        f" ended with {report.invocations}",
        f"  rows: {dict(report.by_status)}",
        f"  requests: {report.requests} {dict(report.answers)}; calls asked for: {dict(report.calls)}",
        f"  requests, input and output tokens of tries with a row: metrics.json says {report.said}, the endpoint"
        f" counted {report.counted}",
        f"  beside these {report.cut_requests} of {report.cut_tries} tries that a SIGKILL cut short, {report.held} of"
        " them in a known worker",
        f"  {_growth_text(report, 'parent')}; {_growth_text(report, 'worker')}, {report.worker_mb} MB at most",
        *(f"  FAULT {each}" for each in report.faults),
    ])  # fmt: skip


def _growth_text(report: Report, role: Role) -> str:
    grown = [each.megabytes for each in report.growths if each.role == role]
    return f"{len(grown)} {role}s measured, grown by {max(grown)} MB at most" if grown else f"no {role} measured"
