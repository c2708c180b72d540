"""`CurveReport`: hit rates of LRU and of optimal replacement over capacity, and their table."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import log

import msgspec

from kv_pool.lab.report import InfiniteCache, Provenance
from kv_pool.lab.tables import Column, Report, describe_broken, make_record, make_table


class CurveCounts(msgspec.Struct):
    """The hits of one replacement policy at one capacity, or estimates of them from a sample.

    Attributes:
        blocks_hit, tokens_hit: hits of all requests; of a sample, hits of its requests.
        block_hit_rate, token_hit_rate: hits as shares of all cacheable blocks and of all prompt tokens,
            including those of refused requests.
        block_rate_error, token_rate_error: standard errors of the rates of a sample; 0 without a sample.
    """

    blocks_hit: int
    tokens_hit: int
    block_hit_rate: float
    token_hit_rate: float
    block_rate_error: float = 0.0
    token_rate_error: float = 0.0


class CurvePoint(msgspec.Struct):
    """The hits at one capacity.

    Attributes:
        num_blocks: capacity in blocks, without the null block.
        refused_requests: requests larger than the capacity. They count in the denominators of the rates.
        lru: the hits of LRU, equal to those of a replay with the instant clock.
        optimum: the most hits of any replacement, or an upper bound: see `CurveReport`.
    """

    num_blocks: int
    refused_requests: int
    lru: CurveCounts
    optimum: CurveCounts


class CurveSample(msgspec.Struct):
    """The sample of a trace on which curves are based.

    Attributes:
        rate: share of units that are in the sample, by their hash.
        unit: session, or root: the first block that not all of the first requests begin with.
        requests: number of requests in the sample.
        groups: number of disjoint parts of the sample, whose spread gives the standard errors.
    """

    rate: float
    unit: str
    requests: int
    groups: int


class CurveReport(msgspec.Struct):
    """Hit rates over capacity, from one reading of a trace, with one request at a time.

    Attributes:
        block_size: tokens per block.
        convention: which blocks can be hit.
        requests: number of requests of the trace.
        blocks_looked_up, tokens_in: cacheable blocks and tokens of all prompts. They are the denominators of
            the rates, except for those of a sample.
        largest_request: blocks of the largest request. Smaller pools refuse requests.
        optimum_blocks, optimum_tokens: "optimal" if the counts of the optimum are the most that a policy can
            reach, or "bound" if only an upper bound is known.
        infinite_cache: hits of a cache that never evicts; of a sample, hits and blocks of its requests.
        knee: the capacity of the point at which the token hit rate of LRU is farthest above a straight line
            over the logarithm of the capacity from the first to the last point; None if no point is above it.
        points: in the order of their capacities.
        broken_lines, first_broken: number of skipped lines, and the error of the first.
        read_seconds, lru_seconds, optimum_seconds: durations.
    """

    block_size: int
    convention: str
    requests: int
    blocks_looked_up: int
    tokens_in: int
    largest_request: int
    optimum_blocks: str
    optimum_tokens: str
    infinite_cache: InfiniteCache
    knee: int | None
    points: list[CurvePoint]
    sample: CurveSample | None
    broken_lines: int
    first_broken: str | None
    read_seconds: float
    lru_seconds: float
    optimum_seconds: float
    settings: dict[str, str | bool | int | float]
    provenance: Provenance


def locate_knee(capacities: Sequence[int], rates: Sequence[float]) -> int | None:
    """Return the capacity whose rate is farthest above a straight line over the logarithm of the capacity.

    Args:
        capacities: in ascending order. The line is from the first to the last.
    Returns:
        None if no rate is above the line.

    Source: Satopää et al., "Finding a 'kneedle' in a haystack", ICDCS workshops, 2011; without smoothing.
    """
    if len(capacities) < 3:
        return None
    width = log(capacities[-1] / capacities[0])
    height = rates[-1] - rates[0]
    knee, most = None, 0.0
    for capacity, rate in zip(capacities[1:-1], rates[1:-1], strict=True):
        above = rate - rates[0] - log(capacity / capacities[0]) / width * height
        if above > most:
            knee, most = capacity, above
    return knee


def choose_in_steps(capacities: Sequence[int], num_chosen: int, *others: int | None) -> list[int]:
    """Return capacities in equal steps from the first to the last, and the others, in ascending order."""
    last = len(capacities) - 1
    chosen = {capacities[round(step * last / (num_chosen - 1))] for step in range(num_chosen)}
    return sorted(chosen.union(other for other in others if other is not None))


def describe_choice(num_shown: int, num_points: int) -> list[str]:
    """Return a sentence about the rows that a table of a curve leaves out, if there are any."""
    shown = f"the table shows {num_shown} of {num_points} capacities; the files of --json and --csv have all"
    return [shown] * (num_shown < num_points)


def describe_bound(of_blocks: str | None, of_tokens: str | None) -> list[str]:
    """Return a sentence about the optimum if only a bound of its blocks or its tokens is known."""
    if of_blocks == "bound":
        return [
            "bound: requests compute cached blocks again, so policies that keep prefixes whole may hit less"
        ]
    if of_tokens == "bound":
        return ["bound: hits of partial blocks have different tokens, so the token hits may be fewer"]
    return []


_MAX_ROWS = 14


def report_curves(found: CurveReport) -> Report:
    """Return a row per capacity, of many capacities some in equal steps and the knee, and sentences on them.

    A file has all capacities, in bytes, too, if the size of a block is known.
    """
    capacities = [point.num_blocks for point in found.points]
    if len(capacities) > _MAX_ROWS:
        capacities = choose_in_steps(capacities, _MAX_ROWS - 1, found.knee)
    ceiling = found.infinite_cache
    table = make_table(
        list(_list_columns(found)),
        [point for point in found.points if point.num_blocks in capacities],
        title=f"hit rate over capacity in blocks of {found.block_size} tokens",
        caption=f"an infinite cache: {ceiling.token_hit_rate:.2%} of tokens, {ceiling.block_hit_rate:.2%} of "
        f"blocks, {ceiling.num_blocks:,} blocks{'' if found.sample is None else ' in the sample'}",
    )
    block_bytes = int(found.settings.get("block_bytes", 0))
    records = [
        {
            name: value
            for name, value in make_record(point, block_bytes or None).items()
            if found.sample is not None or not name.endswith("_error")
        }
        for point in found.points
    ]
    left_out = describe_choice(len(table.rows), len(found.points))
    return Report(found, [table, *left_out, *_describe(found, block_bytes)], records=records)


def _list_columns(found: CurveReport) -> Iterator[Column]:
    yield Column("blocks", "num_blocks")
    yield Column("refused", "refused_requests")
    for kind, state in (("token", found.optimum_tokens), ("block", found.optimum_blocks)):
        for policy, name in (("lru", "LRU"), ("optimum", "optimum" if state == "optimal" else "bound")):
            yield Column(f"{name} {kind}s", partial(_show_rate, found, f"{kind}_", policy), str)
    yield Column("", lambda point: "knee" if point.num_blocks == found.knee else None, str)


def _show_rate(found: CurveReport, kind: str, policy: str, point: CurvePoint) -> str:
    counts = getattr(point, policy)
    error = "" if found.sample is None else f" ±{getattr(counts, f'{kind}rate_error'):.2%}"
    return f"{getattr(counts, f'{kind}hit_rate'):.2%}{error}"


def _describe(found: CurveReport, block_bytes: int) -> Iterator[str]:
    """Yield sentences about the sample, the knee, bounds, refused requests and skipped lines."""
    if found.sample is not None:
        yield (
            f"estimated from {found.sample.requests:,} of {found.requests:,} requests, sampled by "
            f"{found.sample.unit}; ± is one standard error"
        )
    for point in found.points:
        if point.num_blocks == found.knee:
            memory = f" ({point.num_blocks * block_bytes / 2**30:,.1f} GiB)" if block_bytes else ""
            optimum = "optimum" if found.optimum_tokens == "optimal" else "upper bound"
            yield (
                f"knee: {point.num_blocks:,} blocks{memory}, {point.lru.token_hit_rate:.2%} of tokens with "
                f"LRU, {point.optimum.token_hit_rate:.2%} with the {optimum}, "
                f"{found.infinite_cache.token_hit_rate:.2%} without evictions"
            )
    yield from describe_bound(found.optimum_blocks, found.optimum_tokens)
    if found.points[0].num_blocks < found.largest_request:
        yield f"below {found.largest_request:,} blocks, pools refuse requests that are larger"
    yield from describe_broken(found.broken_lines, found.first_broken)
