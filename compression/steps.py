"""A row's way to its target, one step at a time: pure and stateless, replayed from the row and its summaries so far."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from compression import forms
from compression.plan import SUMMARY_OVERHEAD, Region, most_saved, next_region, parts_of, summary_cost
from compression.rebuild import Parts, dropped, folded, lacks_notice, masked, shortenable, with_shorter_results
from compression.summary import as_turn_text, problem_of, reply_limit, summary_prompt
from compression.types import Ask, Count, Counter, Done, Policy, Rejected, RowMetrics, Step, Turn
from compression.validator import problems

MAX_PASSES = 4


class _Row(Struct, frozen=True, kw_only=True):
    """A row as it stands after some passes. `region` is the first folded, or all that was masked or dropped."""

    parts: Parts
    count: Count
    passes: int = 0
    region: Region | None = None
    summary: int = 0  # tokens that the last summary takes
    shortened: int = 0  # turns


class _Way(Struct, frozen=True, kw_only=True):
    """What stays the same on a row's way."""

    line: bytes
    reading: forms.Reading
    start: _Row
    policy: Policy
    counter: Counter
    metrics: RowMetrics  # of the row as it was read

    def excess(self, row: _Row) -> int:
        return row.count.total - self.policy.target_max_tokens

    def counted(self, parts: Parts, row: _Row) -> _Row:
        return replace(row, parts=parts, count=self.counter.row([part.turn for part in parts]))


def advance(line: bytes, summaries: Sequence[str], policy: Policy, counter: Counter) -> Step:
    """The next step of a row that got these summaries so far: `Ask` for one more, `Rejected` if the last is none, or
    `Done`.

    A row of neither form, and one within the target (with `skip_under_target`), is done as it is. Without
    `skip_under_target` such a row is folded once, as far as its oldest run goes (`mask`, `drop`: as far as they can).
    ValueError, one line, if the line is no JSON object; whatever else is odd about a row is in its metrics.
    """
    blank = RowMetrics(strategy=policy.strategy, tokenizer=counter.name)
    try:
        fields = forms.fields_of(line)
        way = _read(line, fields, policy, counter, blank)
        return way if isinstance(way, Done) else _step(way, summaries)
    except RecursionError:
        return uncounted(line, blank, "the row is nested too deep")


def unchanged(line: bytes, metrics: RowMetrics, problem: str) -> Done:
    """A row that stays as it was because of a problem; `metrics` are those of an `Ask`, or of the row as read."""
    as_it_was = replace(
        metrics,
        compressed_tokens=metrics.original_tokens,
        tokens_saved=0,
        compression_ratio=1.0,
        compressed_turns=metrics.original_turns,
        turns_removed=0,
        region_start_idx=-1,
        region_end_idx=-1,
        region_turns_count=0,
        was_compressed=False,
        passes=0,
        shortened_turns=0,
        tool_calls_after=metrics.tool_calls_before,
        summary_model="",
        failed=True,
        error=problem,
    )
    return Done(line=line, metrics=as_it_was)


def uncounted(line: bytes, blank: RowMetrics, problem: str) -> Done:
    """A row whose tokens nobody knows: it stays as it was, and may well be over the target."""
    return unchanged(line, replace(blank, still_over_limit=True), problem)


def _read(line: bytes, fields: dict[str, bytes], policy: Policy, counter: Counter, blank: RowMetrics) -> _Way | Done:
    try:
        reading = forms.read(fields)
        count = counter.row(reading.turns) if reading and reading.turns else Count(0, ())
    except ValueError as problem:
        return unchanged(line, _as_unread(blank, forms.texts(fields), policy, counter), str(problem))
    if reading is None:
        return Done(line=line, metrics=blank)
    metrics = _as_read(blank, reading.turns, count, policy)
    if policy.skip_under_target and not metrics.still_over_limit:
        return Done(line=line, metrics=replace(metrics, skipped_under_target=True))
    if any(turn.role == "system" for turn in reading.turns[1:]):  # whatever goes from between, its order would be worse
        return Done(line=line, metrics=metrics)
    start = _Row(parts=parts_of(reading.turns, policy), count=count)
    return _Way(line=line, reading=reading, start=start, policy=policy, counter=counter, metrics=metrics)


def _as_read(blank: RowMetrics, turns: Sequence[Turn], count: Count, policy: Policy) -> RowMetrics:
    calls = sum(map(forms.calls_in, turns))
    return replace(
        blank,
        original_tokens=count.total,
        compressed_tokens=count.total,
        original_turns=len(turns),
        compressed_turns=len(turns),
        still_over_limit=count.total > policy.target_max_tokens,
        tool_calls_before=calls,
        tool_calls_after=calls,
    )


def _as_unread(blank: RowMetrics, texts: Sequence[str], policy: Policy, counter: Counter) -> RowMetrics:
    """Of a row with turns that cannot be read, or that the template refuses: its texts alone."""
    total = sum(map(counter.text, texts))
    over = total > policy.target_max_tokens
    return replace(blank, original_tokens=total, original_turns=len(texts), still_over_limit=over)


def _step(way: _Way, summaries: Sequence[str]) -> Step:
    row = way.start
    try:
        if way.policy.strategy != "summary":
            return _done(way, _without_summary(way))
        for summary in summaries:
            region = _next_region(way, row)
            if region is None:
                break
            problem = problem_of(summary, region.tokens, way.counter)
            shorter = None if problem else _with_summary(way, row, region, summary)
            if shorter is None or shorter.count.total >= row.count.total:
                return Rejected(problem=problem or "the row is not shorter with the summary")
            row = shorter
        region = _next_region(way, row)
        return _ask(way, row, region) if region else _done(way, row)
    except ValueError as problem:  # a template that refuses the new turns, a window too small for them
        return unchanged(way.line, way.metrics, str(problem))


# --- summaries


def _next_region(way: _Way, row: _Row) -> Region | None:
    """What is folded next; None if the row is where it should be, or cannot get there.

    Every pass folds at least one turn that no summary stands for yet, and there are only so many passes.
    """
    policy, tokens = way.policy, row.count.turns
    excess, cost = way.excess(row), summary_cost(policy)
    if row.passes == MAX_PASSES or (excess <= 0 and row.passes):
        return None
    if excess <= 0:  # not skipped though it might be: no need says how much, so it is the whole run
        return next_region(row.parts, tokens, row.count.total, cost)
    notice = way.counter.text(policy.summary_notice_text) if lacks_notice(row.parts, policy) else 0
    if not _within_reach(way, row, excess + notice - most_saved(row.parts, tokens, cost)):
        return None
    expected = max(cost, row.summary)  # who wrote a long one will do so again
    return next_region(row.parts, tokens, excess + expected + notice, cost)


def _within_reach(way: _Way, row: _Row, over: int) -> bool:
    """Whether a row that is still so many tokens over the target when all is done would get there."""
    return over <= 0 or (way.policy.shorten_turns and over <= shortenable(row.parts, way.counter))


def _with_summary(way: _Way, row: _Row, region: Region, summary: str) -> _Row:
    text = as_turn_text(summary)
    shorter = way.counted(folded(row.parts, region, text, way.policy), row)
    takes = way.counter.text(text) + SUMMARY_OVERHEAD
    return replace(shorter, passes=row.passes + 1, region=row.region or region, summary=takes)


def _ask(way: _Way, row: _Row, region: Region) -> Ask:
    turns = [part.turn for part in row.parts[region.start : region.end]]
    prompt, tokens = summary_prompt(turns, way.counter, way.policy, region.tokens, region.start)
    return Ask(
        prompt=prompt,
        prompt_tokens=tokens,
        max_tokens=reply_limit(way.policy),
        metrics=_metrics(way, row),
    )


# --- without summaries


def _without_summary(way: _Way) -> _Row:
    """Just enough masked or dropped, oldest first; the row as it was if all of it would not be enough."""
    row = way.start
    if way.excess(row) <= 0:
        return _cut(way, row, row.count.total)
    if not _within_reach(way, row, way.excess(_cut(way, row, row.count.total))):
        return row
    while way.excess(row) > 0:
        shorter = _cut(way, row, way.excess(row))
        if shorter.parts == row.parts:
            break
        row = shorter
    return row


def _cut(way: _Way, row: _Row, need: int) -> _Row:
    if way.policy.strategy == "mask":
        parts = masked(row.parts, need, way.counter)
    else:
        parts = dropped(row.parts, row.count.turns, need)
    left = set(map(id, parts))
    gone = [place for place, part in enumerate(way.start.parts) if id(part) not in left]
    region = Region(gone[0], gone[-1] + 1, 0) if gone else None
    return replace(way.counted(parts, row), region=region)


# --- the end


def _done(way: _Way, row: _Row) -> Done:
    """The row as it stands, its longest results shortened if that is allowed and brings it to the target."""
    shortest = _shortened(way, row) if way.excess(row) > 0 and way.policy.shorten_turns else row
    row = shortest if way.excess(shortest) <= 0 else row
    if row.parts == way.start.parts or row.count.total >= way.start.count.total:
        return Done(line=way.line, metrics=way.metrics)
    turns = [part.turn for part in row.parts]
    if wrong := problems(way.reading.turns, turns, way.policy):
        return unchanged(way.line, way.metrics, "the compressed row would be wrong: " + "; ".join(wrong)[:500])
    return Done(line=forms.write(way.reading, turns), metrics=_metrics(way, row))


def _shortened(way: _Way, row: _Row) -> _Row:
    """As many rounds as it takes: a text's tokens alone and in its turn are not quite the same."""
    before = row.parts
    for _ in range(MAX_PASSES):
        if way.excess(row) <= 0:
            break
        row = way.counted(with_shorter_results(row.parts, way.excess(row), way.counter), row)
    return replace(row, shortened=sum(a is not b for a, b in zip(before, row.parts, strict=True)))


def _metrics(way: _Way, row: _Row) -> RowMetrics:
    before, after = way.start.count.total, row.count.total
    start, end = (row.region.start, row.region.end) if row.region else (-1, -1)
    return replace(
        way.metrics,
        compressed_tokens=after,
        tokens_saved=before - after,
        compression_ratio=round(after / before, 4) if before else 1.0,
        compressed_turns=len(row.parts),
        turns_removed=len(way.start.parts) - len(row.parts),
        region_start_idx=start,
        region_end_idx=end,
        region_turns_count=end - start,
        was_compressed=row.parts != way.start.parts,
        still_over_limit=way.excess(row) > 0,
        passes=row.passes,
        shortened_turns=row.shortened,
        tool_calls_after=sum(forms.calls_in(part.turn) for part in row.parts),
        summary_model=way.policy.summary_model if row.passes else "",
    )
