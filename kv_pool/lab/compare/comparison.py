"""`CompareSettings`, `Comparison`: what a comparison runs, its results, their tables and differences."""

from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Literal

import msgspec

from kv_pool.core.arguments import as_count
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.curves.curve_report import describe_bound
from kv_pool.lab.report import InfiniteCache, Provenance, read_json
from kv_pool.lab.settings import OPTIMUM, ReplaySettings
from kv_pool.lab.tables import Column, Report, ReportTable, make_record, make_table, show_factor

LRU = "lru"


CEILING = "infinite"
"""The name of the rows of a cache that never evicts."""

_NOT_COMPARED = ("seconds",)


class ComparedTrace(msgspec.Struct, frozen=True):
    """One trace of a comparison.

    Attributes:
        settings: the settings of all its replays; `num_blocks` and `policy` are replaced.
        capacities: in blocks.
    """

    settings: ReplaySettings
    capacities: tuple[int, ...]


class CompareSettings(msgspec.Struct, frozen=True):
    """The settings of a comparison.

    Attributes:
        traces: each is replayed with each policy at each of its capacities.
        policies: names as in `find_policy`. LRU, the optimum and the ceiling are in every comparison.
        resamples: number of samples for each confidence interval; 0 for no intervals.
        seed: seed of the samples.
    """

    traces: tuple[ComparedTrace, ...]
    policies: tuple[str, ...]
    resamples: int = 1000
    seed: int = 0

    def check(self) -> None:
        """Raise InvalidArgumentError if a value is invalid."""
        if not self.traces:
            raise InvalidArgumentError("a comparison needs at least one trace")
        as_count("resamples", self.resamples)
        for compared in self.traces:
            settings = compared.settings
            if not compared.capacities:
                raise InvalidArgumentError(f"{settings.trace}: a comparison needs at least one capacity")
            if settings.policy != LRU or settings.by:
                raise InvalidArgumentError("a comparison sets the cache policy itself, and takes no by")
            for capacity in compared.capacities:
                replace(settings, num_blocks=capacity).check()

    def list_policies(self) -> list[str]:
        """Return the names of the policies to replay: LRU first, each once, without the optimum."""
        names = dict.fromkeys((LRU, *self.policies))
        names.pop(OPTIMUM, None)
        return list(names)


class PolicyRecord(msgspec.Struct, frozen=True):
    """A replayed policy: its name, and the SHA-256 of its file or module; None for those of kv_pool."""

    name: str
    sha256: str | None


class ComparisonRow(msgspec.Struct):
    """The results of one policy at one capacity.

    Attributes:
        policy: its name; "optimum", or "infinite" for a cache that never evicts.
        num_blocks: capacity in blocks; of the infinite cache, the distinct blocks of the trace.
        origin: "replay", or "curve" for counts that are computed from the trace without a replay.
        block_hit_rate, token_hit_rate: hits as shares of all full prompt blocks and of all prompt tokens.
        blocks_hit, blocks_missed: their sum is the number of full prompt blocks of all requests.
        tokens_hit: hits at the first admission of each request.
        evictions: cached blocks that lost their content; None without a replay.
        admitted: missed blocks that were computed and cached, which are all except those of refused requests;
            None without a replay.
        seconds: duration of the replay; None without one.
        above_lru: token hit rate minus that of LRU.
        above_lru_low, above_lru_high: its 95 % confidence interval, from resampled conversations.
        gap_closed: share of the block hits that the optimum has and LRU has not, which the policy has: 0 for
            LRU, 1 for the optimum. None if there is no optimum, or no gap.
        gap_closed_low, gap_closed_high: its 95 % confidence interval; None if some samples have no gap.
        error: the error that ended the run; the other results are then None.
    """

    policy: str
    num_blocks: int
    origin: Literal["replay", "curve"] = "replay"
    block_hit_rate: float | None = None
    token_hit_rate: float | None = None
    blocks_hit: int | None = None
    blocks_missed: int | None = None
    tokens_hit: int | None = None
    evictions: int | None = None
    admitted: int | None = None
    seconds: float | None = None
    above_lru: float | None = None
    above_lru_low: float | None = None
    above_lru_high: float | None = None
    gap_closed: float | None = None
    gap_closed_low: float | None = None
    gap_closed_high: float | None = None
    error: str | None = None


class TraceComparison(msgspec.Struct):
    """The results on one trace.

    Attributes:
        provenance: the trace with its digest, versions and command.
        block_size: tokens per block.
        block_bytes: size of a block; 0 if unknown.
        requests, blocks_looked_up, tokens_in: of the trace, up to the limit.
        unit, units: what was resampled, sessions or roots, and their number.
        optimum_blocks, optimum_tokens: "optimal" if no policy can have more hits and one has as many, "bound"
            if only an upper bound is known; None without an optimum.
        why_no_optimum: the reason, if there is none.
        infinite_cache: the ceiling: hits of a cache that never evicts, with one request at a time.
        rows: by capacity, and for each LRU, the policies as given, and the optimum; at the end the ceiling.
    """

    provenance: Provenance
    block_size: int
    block_bytes: int
    requests: int
    blocks_looked_up: int
    tokens_in: int
    unit: str
    units: int
    optimum_blocks: str | None
    optimum_tokens: str | None
    why_no_optimum: str | None
    infinite_cache: InfiniteCache
    rows: list[ComparisonRow]


class Comparison(msgspec.Struct):
    """The results of a comparison.

    Attributes:
        settings: all settings; `compare_policies` repeats the comparison from them.
        policies: the replayed policies.
        traces: in the order of the settings.
        contradictions: results that cannot be: policies above the optimum, and a replay of LRU that differs
            from its curve. Always empty, unless kv_pool or a policy's bookkeeping has a bug.
    """

    settings: CompareSettings
    policies: list[PolicyRecord]
    traces: list[TraceComparison]
    contradictions: list[str]


def read_comparison(path: str) -> Comparison:
    """Return the comparison in a file that `write_json` has written. Raises TraceError."""
    return read_json(path, Comparison, "a comparison")


def report_comparison(comparison: Comparison) -> Report:
    """Return a table of each trace with its sentences. A file has all rows, with the trace of each."""
    shown: list[ReportTable | str] = []
    errors = []
    records = []
    has_bytes = any(found.block_bytes for found in comparison.traces)
    for found in comparison.traces:
        trace = Path(found.provenance.trace).name
        shown += [_tabulate(found, trace), *_describe(found, comparison.settings.resamples)]
        for row in found.rows:
            first = {"trace": found.provenance.trace, "policy": row.policy}
            records.append(make_record(row, found.block_bytes if has_bytes else None, **first))
            if row.error is not None:
                errors.append(f"{row.policy} at {row.num_blocks:,} blocks, {trace}: {row.error}")
    states = {found.optimum_blocks for found in comparison.traces} - {None}
    if states and not comparison.contradictions:
        shown.append(f"no policy is above the {'optimum' if 'optimal' in states else 'bound'}")
    return Report(comparison, shown, [*errors, *comparison.contradictions], records)


def _tabulate(found: TraceComparison, trace: str) -> ReportTable:
    """Return one row per policy and capacity, the most important columns first."""
    columns = (
        Column("blocks", lambda row: row.num_blocks if _is_first(row) else None),
        Column("policy", lambda row: _name_policy(row, found), str),
        Column(
            "token hits",
            lambda row: row.error.split(":")[0] if row.error else _show_rate(row, "token_hit_rate"),
            str,
        ),
        Column("block hits", lambda row: _show_rate(row, "block_hit_rate"), str),
        Column("gap closed", lambda row: _show_rate(row, "gap_closed", "{:.1f}"), str),
        Column("points over LRU", lambda row: _show_rate(row, "above_lru", "{:+.2f}", ""), str),
        Column("hits", "blocks_hit"),
        Column("misses", "blocks_missed"),
        Column("evictions", "evictions"),
        Column("admitted", "admitted"),
        Column("seconds", "seconds", show_factor),
    )
    rows: list[ComparisonRow | None] = []
    for row in found.rows:
        rows += [None, row] if _is_first(row) else [row]
    title = f"{trace}, {found.requests:,} requests, blocks of {found.block_size} tokens"
    return make_table(columns, rows, texts=("policy",), title=title, num_keys=2)


def _is_first(row: ComparisonRow) -> bool:
    """Return True for a row that begins a group: that of LRU for each capacity, and of the infinite cache."""
    return row.policy in (LRU, CEILING)


def _name_policy(row: ComparisonRow, found: TraceComparison) -> str:
    if row.policy == OPTIMUM and found.optimum_tokens == "bound":
        return "bound" if found.optimum_blocks == "bound" else "optimum, bound of tokens"
    return {LRU: "LRU", CEILING: "infinite cache"}.get(row.policy, row.policy)


def _show_rate(row: ComparisonRow, name: str, form: str = "{:.2f}", unit: str = "%") -> str | None:
    """Return a rate of a row with its confidence interval, or None."""
    value, low, high = (getattr(row, each, None) for each in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return None
    text = form.format(100 * value) + unit
    if low is None or high is None:
        return text
    return f"{text} [{form.format(100 * low)}, {form.format(100 * high)}]"


def _describe(found: TraceComparison, num_samples: int) -> Iterator[str]:
    """Yield sentences about the intervals, the bound, and a missing optimum."""
    if num_samples and found.units > 1:
        yield (
            f"in brackets: 95 % confidence intervals, from {num_samples:,} samples of the {found.units:,} "
            f"{found.unit}s"
        )
    if found.why_no_optimum is not None:
        yield f"no optimum: {found.why_no_optimum}"
    yield from describe_bound(found.optimum_blocks, found.optimum_tokens)


def list_changed_inputs(old: Comparison, new: Comparison) -> Iterator[str]:
    """Yield one sentence for each trace, policy file or version of kv_pool that has changed."""
    for before, after in zip(old.traces, new.traces, strict=True):
        of_old, of_new = before.provenance, after.provenance
        if of_old.trace_sha256 != of_new.trace_sha256:
            yield (
                f"the trace {of_new.trace} has changed: its SHA-256 is {of_new.trace_sha256}, was "
                f"{of_old.trace_sha256}"
            )
    versions = [each.traces[0].provenance.kv_pool for each in (old, new)]
    if versions[0] != versions[1]:
        yield f"kv_pool is version {versions[1]}, was {versions[0]}"
    digests = {record.name: record.sha256 for record in old.policies}
    for record in new.policies:
        was = digests.get(record.name)
        if was != record.sha256:
            yield f"the policy {record.name} has changed: its SHA-256 is {record.sha256}, was {was}"


def list_differences(old: Comparison, new: Comparison) -> Iterator[str]:
    """Yield one sentence for each row whose results differ in more than their duration."""
    for before, after in zip(old.traces, new.traces, strict=True):
        trace = after.provenance.trace
        if len(before.rows) != len(after.rows):
            yield f"{trace}: {len(after.rows)} rows, there were {len(before.rows)}"
        for row, was in zip(after.rows, before.rows, strict=False):
            differences = ", ".join(_compare(row, was))
            if differences:
                yield f"{trace}, {row.policy} at {row.num_blocks:,} blocks: {differences}"


def _compare(row: ComparisonRow, was: ComparisonRow) -> Iterator[str]:
    for name in ComparisonRow.__struct_fields__:
        value, before = getattr(row, name), getattr(was, name)
        if name in _NOT_COMPARED or value == before:
            continue
        is_close = isinstance(value, float) and isinstance(before, float)
        if not (is_close and isclose(value, before, abs_tol=1e-9)):
            yield f"{name} is {value}, was {before}"
