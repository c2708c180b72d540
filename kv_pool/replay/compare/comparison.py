"""`CompareSettings`, `Comparison`: what a comparison runs, and its results; JSON, CSV, differences of two."""

from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from typing import Literal

import msgspec

from kv_pool.core.arguments import as_count
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.report import InfiniteCache, Provenance, read_json, write_csv_rows
from kv_pool.replay.settings import OPTIMUM, ReplaySettings

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
            if (
                settings.policy != LRU
                or settings.keep_session_s
                or settings.keep_prefix_tokens
                or settings.by
            ):
                raise InvalidArgumentError(
                    "a comparison sets the cache policy itself, and takes no keep_sessions, keep_prefix or by"
                )
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


def write_csv(comparison: Comparison, path: str) -> None:
    """Write all rows: the trace, the fields of `ComparisonRow`, and the capacity in bytes if it is known.

    Raises:
        TraceError: the file cannot be written.
    """
    has_bytes = any(found.block_bytes for found in comparison.traces)
    rows = []
    for found in comparison.traces:
        for row in found.rows:
            first = {"trace": found.provenance.trace, "policy": row.policy, "num_blocks": row.num_blocks}
            size = {"bytes": row.num_blocks * found.block_bytes or None} if has_bytes else {}
            rows.append(first | size | msgspec.structs.asdict(row))
    write_csv_rows(path, rows)


def list_changed_inputs(old: Comparison, new: Comparison) -> list[str]:
    """Return one sentence for each trace, policy file or version of kv_pool that has changed."""
    changed = []
    for before, after in zip(old.traces, new.traces, strict=True):
        of_old, of_new = before.provenance, after.provenance
        if of_old.trace_sha256 != of_new.trace_sha256:
            changed.append(
                f"the trace {of_new.trace} has changed: its SHA-256 is {of_new.trace_sha256}, was "
                f"{of_old.trace_sha256}"
            )
    versions = [each.traces[0].provenance.kv_pool for each in (old, new)]
    if versions[0] != versions[1]:
        changed.append(f"kv_pool is version {versions[1]}, was {versions[0]}")
    digests = {record.name: record.sha256 for record in old.policies}
    for record in new.policies:
        before_sha256 = digests.get(record.name)
        if before_sha256 != record.sha256:
            changed.append(
                f"the policy {record.name} has changed: its SHA-256 is {record.sha256}, was {before_sha256}"
            )
    return changed


def list_differences(old: Comparison, new: Comparison) -> list[str]:
    """Return one sentence for each row whose results differ in more than their duration."""
    found = []
    for before, after in zip(old.traces, new.traces, strict=True):
        trace = after.provenance.trace
        if len(before.rows) != len(after.rows):
            found.append(f"{trace}: {len(after.rows)} rows, there were {len(before.rows)}")
        for row, was in zip(after.rows, before.rows, strict=False):
            differences = ", ".join(_compare(row, was))
            if differences:
                found.append(f"{trace}, {row.policy} at {row.num_blocks:,} blocks: {differences}")
    return found


def _compare(row: ComparisonRow, was: ComparisonRow) -> Iterator[str]:
    for name in ComparisonRow.__struct_fields__:
        value, before = getattr(row, name), getattr(was, name)
        if name in _NOT_COMPARED or value == before:
            continue
        is_close = isinstance(value, float) and isinstance(before, float)
        if not (is_close and isclose(value, before, abs_tol=1e-9)):
            yield f"{name} is {value}, was {before}"
