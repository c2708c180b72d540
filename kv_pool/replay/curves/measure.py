"""`measure_curves`: hit rates of LRU and of the optimum over capacity, from one reading of a trace."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.curves.curve_report import CurveCounts, CurvePoint, CurveReport, find_knee
from kv_pool.replay.curves.lru_curve import LruCurve
from kv_pool.replay.curves.optimum_curve import OptimumCurve
from kv_pool.replay.curves.prompt_keys import PromptKeys, find_key_bytes, read_prompt_keys
from kv_pool.replay.curves.reuse import Reuse, record_reuse
from kv_pool.replay.report import InfiniteCache, make_provenance
from kv_pool.replay.settings import ReplaySettings, find_block_size
from kv_pool.replay.trace import Trace

_NUM_POINTS = 64
_REQUESTS_BETWEEN_PROGRESS = 100
_USED = (
    "trace",
    "convention",
    "limit",
    "trace_block_size",
    "timestamp_unit",
    "skip_broken",
    "seed",
    "block_bytes",
)
_CAPACITY = ("num_blocks", "block_size")


@dataclass(frozen=True)
class CurveProgress:
    """The progress of `measure_curves`: what it does now, and the share of it that is done."""

    doing: str
    share: float


def measure_curves(
    settings: ReplaySettings,
    capacities: Sequence[int] | None = None,
    on_progress: Callable[[CurveProgress], None] | None = None,
) -> CurveReport:
    """Measure the hits of LRU and of optimal replacement at several capacities.

    Args:
        settings: the trace and how it is read. `num_blocks` is ignored, and the model is that of the instant
            clock with full attention.
        capacities: in blocks. None: 64 capacities in equal ratios, from the largest request, below which
            pools refuse requests, to the least capacity at which LRU has all hits of an infinite cache.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.
        InvalidArgumentError: a setting has no effect on a curve, or a capacity is below 1.

    Cost: reading the trace once; O(pieces * log requests) for LRU at all capacities that refuse no request,
    and the same for each other one; O(pieces) for each capacity of the optimum. `Reuse` explains the pieces.
    """
    _check(settings, capacities)
    trace = settings.open_trace()
    block_size = find_block_size(settings.block_size, trace)
    notify = on_progress or _ignore
    started = perf_counter()
    prompts = read_prompt_keys(settings, trace, block_size)
    watched = _watch(prompts, trace, settings.limit, notify)
    reuse = record_reuse(watched, block_size, find_key_bytes(trace, block_size))
    read = perf_counter()
    notify(CurveProgress("LRU", 0.0))
    lru = LruCurve(reuse)
    if capacities is None:
        capacities = _choose_capacities(reuse.largest_request, lru.find_least_full_capacity())
    capacities = sorted(set(capacities))
    totals = sum(reuse.num_cacheable), sum(reuse.input_length)
    lru_counts = [make_counts(lru.count_hits(capacity), totals) for capacity in capacities]
    lru_done = perf_counter()
    optimum = OptimumCurve(reuse)
    optimum_counts = []
    for number, capacity in enumerate(capacities):
        notify(CurveProgress("optimum", number / len(capacities)))
        num_blocks, _ = optimum.count_hits(capacity)
        optimum_counts.append(make_counts((num_blocks, optimum.bound_tokens(capacity)), totals))
    sizes = np.sort(np.array(reuse.num_blocks))
    points = [
        CurvePoint(
            capacity,
            len(reuse) - int(np.searchsorted(sizes, capacity, "right")),
            lru_counts[number],
            optimum_counts[number],
        )
        for number, capacity in enumerate(capacities)
    ]
    return CurveReport(
        block_size=block_size,
        convention=settings.convention,
        requests=len(reuse),
        blocks_looked_up=totals[0],
        tokens_in=totals[1],
        largest_request=reuse.largest_request,
        optimum_blocks="optimal" if optimum.is_prefix_closed else "bound",
        optimum_tokens="optimal" if optimum.is_prefix_closed and optimum.has_optimal_tokens else "bound",
        infinite_cache=_count_infinite(reuse, lru, totals),
        knee=find_knee(points),
        points=points,
        sample=None,
        broken_lines=trace.num_broken,
        first_broken=trace.first_broken,
        read_seconds=read - started,
        lru_seconds=lru_done - read,
        optimum_seconds=perf_counter() - lru_done,
        settings={name: value for name, value in settings.describe().items() if name in _USED},
        provenance=make_provenance(str(trace.path), trace.digest(), trace.block_size, settings.seed),
    )


def make_counts(hits: tuple[int, int], totals: tuple[int, int]) -> CurveCounts:
    """Return the counts of (block hits, token hits) and of (all cacheable blocks, all prompt tokens)."""
    rates = [num_hits / total if total else 0.0 for num_hits, total in zip(hits, totals, strict=True)]
    return CurveCounts(*hits, *rates)


def _check(settings: ReplaySettings, capacities: Sequence[int] | None) -> None:
    plain = ReplaySettings(settings.trace, 1)
    without_effect = [
        name
        for name, value in settings.describe().items()
        if name not in (*_USED, *_CAPACITY) and value != plain.describe().get(name)
    ]
    if without_effect:
        raise InvalidArgumentError(
            f"a curve ignores {', '.join(without_effect)}: it is for one request at a time and full "
            "attention; leave the default, or use a sweep"
        )
    if capacities is not None and (not capacities or min(capacities) < 1):
        raise InvalidArgumentError(
            f"the capacities are {list(capacities)}; a curve needs at least one, each of 1 block or more"
        )
    ReplaySettings.check(settings)


def _watch(
    prompts: Iterator[PromptKeys], trace: Trace, limit: int | None, notify: Callable[[CurveProgress], None]
) -> Iterator[PromptKeys]:
    for number, prompt in enumerate(prompts):
        if number % _REQUESTS_BETWEEN_PROGRESS == 0:
            notify(CurveProgress("reading", max(trace.position, number / limit if limit else 0.0)))
        yield prompt


def _ignore(progress: CurveProgress) -> None:
    pass


def _choose_capacities(first: int, last: int) -> list[int]:
    last = max(first, last)
    ratio = last / first
    return sorted({round(first * ratio ** (step / (_NUM_POINTS - 1))) for step in range(_NUM_POINTS)})


def _count_infinite(reuse: Reuse, lru: LruCurve, totals: tuple[int, int]) -> InfiniteCache:
    counts = make_counts(lru.count_hits(lru.find_least_full_capacity()), totals)
    return InfiniteCache(
        num_blocks=reuse.num_distinct,
        blocks_hit=counts.blocks_hit,
        tokens_hit=counts.tokens_hit,
        block_hit_rate=counts.block_hit_rate,
        token_hit_rate=counts.token_hit_rate,
    )
