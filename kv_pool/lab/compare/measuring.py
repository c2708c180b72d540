"""`compare_trace`: the rows of one trace from its finished runs: rates, gaps and confidence intervals."""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_pool.lab.compare.comparison import (
    CEILING,
    LRU,
    ComparedTrace,
    CompareSettings,
    ComparisonRow,
    TraceComparison,
)
from kv_pool.lab.compare.policy_run import Failure, PolicyRun, unpack
from kv_pool.lab.compare.references import References
from kv_pool.lab.curves.curve_report import CurveCounts
from kv_pool.lab.report import InfiniteCache, Provenance, find_share
from kv_pool.lab.settings import OPTIMUM

Runs = Mapping[tuple[str, int], PolicyRun | Failure]
"""Results by policy and capacity."""

_Sums = NDArray[np.float64]

_BLOCKS, _TOKENS = 0, 1
_CONFIDENCE = 0.95
_SAMPLES_AT_ONCE = 32


def resample(counts: NDArray[np.int64], num_samples: int, seed: int) -> _Sums:
    """Return the sums of samples of as many units as a trace has, drawn with replacement (the bootstrap).

    All counts of a comparison are summed over the same samples, so that differences between policies are
    paired: what both have in common does not widen their intervals. Replays are not repeated. An interval
    therefore covers the choice of conversations, and not that other conversations would leave other blocks
    in the cache (Efron and Tibshirani, "An introduction to the bootstrap", 1993: the percentile interval).

    Args:
        counts: one row per unit, which is a session or a root. The result has one row per sample.
        seed: seed of the samples.
    """
    random = np.random.default_rng(seed)
    num_units = len(counts)
    sums = np.empty((num_samples, counts.shape[1]))
    numbers = counts.astype(np.float64)
    for first in range(0, num_samples, _SAMPLES_AT_ONCE):
        end = min(first + _SAMPLES_AT_ONCE, num_samples)
        times = [
            np.bincount(random.integers(num_units, size=num_units), minlength=num_units)
            for _ in range(first, end)
        ]
        sums[first:end] = np.array(times, dtype=np.float64) @ numbers
    return sums


def find_interval(values: NDArray[np.float64]) -> tuple[float, float] | tuple[None, None]:
    """Return the 2.5th and 97.5th percentile; (None, None) without values, or if one is not finite."""
    if not len(values) or not np.isfinite(values).all():
        return None, None
    low, high = np.quantile(values, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)


def sum_by_unit(counts: NDArray[np.int64], unit_of: NDArray[np.int64], num_units: int) -> NDArray[np.int64]:
    """Return the sums over the requests of each unit. `counts` has one row per request."""
    sums = np.zeros((num_units, counts.shape[1]), dtype=np.int64)
    np.add.at(sums, unit_of, counts)
    return sums


def _sample_hits(
    references: References, runs: Runs, num_samples: int, seed: int
) -> dict[tuple[str, int], _Sums]:
    """Return the sums of each sample of a trace's units, by policy and capacity: block hits and token hits.

    Of ("", 0) they are those of the prompts: blocks and tokens. The token hits of the optimum are not known.
    A trace with a single unit has no samples.
    """
    num_requests, num_units = references.requests, references.units
    counts = {("", 0): unpack(references.sizes, num_requests, 2)}
    for name, run in runs.items():
        if isinstance(run, PolicyRun):
            counts[name] = unpack(run.hits, num_requests, 2)
    for point in references.points:
        counts[OPTIMUM, point.num_blocks] = np.repeat(unpack(point.hits, num_requests), 2, axis=1)
    unit_of = unpack(references.unit_of, num_requests)[:, 0]
    by_unit = sum_by_unit(np.hstack(list(counts.values())), unit_of, num_units)
    sums = resample(by_unit, num_samples if num_units > 1 else 0, seed)
    return dict(zip(counts, np.split(sums, len(counts), axis=1), strict=True))


def _fill_hits(
    row: ComparisonRow, found: PolicyRun | CurveCounts | InfiniteCache, references: References
) -> None:
    """Set the counts and rates of a row."""
    row.blocks_hit, row.tokens_hit = found.blocks_hit, found.tokens_hit
    row.blocks_missed = references.blocks_looked_up - found.blocks_hit
    row.block_hit_rate = find_share(found.blocks_hit, references.blocks_looked_up)
    row.token_hit_rate = find_share(found.tokens_hit, references.tokens_in)


def _fill_intervals(row: ComparisonRow, samples: dict[tuple[str, int], _Sums]) -> None:
    """Set the intervals of a row's differences to LRU and to the optimum, which the row has."""
    lru = samples[LRU, row.num_blocks]
    above = samples[row.policy, row.num_blocks] - lru
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = above[:, _TOKENS] / samples["", 0][:, _TOKENS]
    row.above_lru_low, row.above_lru_high = find_interval(shares)
    if row.gap_closed is not None:
        gap = (samples[OPTIMUM, row.num_blocks] - lru)[:, _BLOCKS]
        if (gap > 0).all():
            row.gap_closed_low, row.gap_closed_high = find_interval(above[:, _BLOCKS] / gap)


def compare_trace(
    settings: CompareSettings,
    compared: ComparedTrace,
    references: References,
    runs: Runs,
    provenance: Provenance,
) -> TraceComparison:
    """Return the results of one trace. `runs` has one for each policy and capacity."""
    samples = _sample_hits(references, runs, settings.resamples, settings.seed)
    optimum_at = {point.num_blocks: point.optimum for point in references.points}
    rows = []
    for num_blocks in compared.capacities:
        lru, optimum = runs[LRU, num_blocks], optimum_at.get(num_blocks)
        results: dict[str, PolicyRun | Failure | CurveCounts]
        results = {policy: runs[policy, num_blocks] for policy in settings.list_policies()}
        if optimum is not None:
            results[OPTIMUM] = optimum
        for policy, found in results.items():
            row = ComparisonRow(policy, num_blocks, "curve" if policy == OPTIMUM else "replay")
            rows.append(row)
            if isinstance(found, Failure):
                row.error = found.describe()
                continue
            _fill_hits(row, found, references)
            if isinstance(found, PolicyRun):
                row.evictions, row.admitted, row.seconds = found.evictions, found.admitted, found.seconds
            if isinstance(lru, PolicyRun):
                row.above_lru = (found.tokens_hit - lru.tokens_hit) / references.tokens_in
                if optimum is not None and optimum.blocks_hit != lru.blocks_hit:
                    gap = optimum.blocks_hit - lru.blocks_hit
                    row.gap_closed = (found.blocks_hit - lru.blocks_hit) / gap
                if policy not in (LRU, OPTIMUM):
                    _fill_intervals(row, samples)
    ceiling = ComparisonRow(CEILING, references.infinite_cache.num_blocks, "curve")
    _fill_hits(ceiling, references.infinite_cache, references)
    rows.append(ceiling)
    facts = msgspec.structs.asdict(references)
    return TraceComparison(
        provenance=provenance,
        block_bytes=compared.settings.block_bytes,
        **{name: facts[name] for name in TraceComparison.__struct_fields__ if name in facts},
        rows=rows,
    )


def list_contradictions(
    compared: ComparedTrace, references: References, runs: Runs, trace: str
) -> Iterator[str]:
    """Yield one sentence for each replay with more hits than the optimum, and for each wrong one of LRU.

    A pool that prefers runs is not checked for LRU, whose order it leaves.
    """
    is_lru = not compared.settings.runs
    points = {point.num_blocks: point for point in references.points}
    for (policy, num_blocks), run in runs.items():
        point = points.get(num_blocks)
        if point is None or isinstance(run, Failure):
            continue
        lru, optimum = point.lru, point.optimum
        hits = f"{run.blocks_hit:,} block hits and {run.tokens_hit:,} token hits"
        at = f"{trace}: {policy} at {num_blocks:,} blocks has {hits}"
        if run.blocks_hit > optimum.blocks_hit or run.tokens_hit > optimum.tokens_hit:
            yield f"{at}, above the optimum of {optimum.blocks_hit:,} and {optimum.tokens_hit:,}"
        if policy == LRU and is_lru and (run.blocks_hit, run.tokens_hit) != (lru.blocks_hit, lru.tokens_hit):
            yield f"{at} in the replay, {lru.blocks_hit:,} and {lru.tokens_hit:,} on the curve"
