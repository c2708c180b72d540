"""`measure_references`: the optimum, the ceiling and the conversations of a trace, from one reading."""

from array import array

import msgspec

from kv_pool.errors import TraceError
from kv_pool.lab.compare.comparison import ComparedTrace
from kv_pool.lab.compare.policy_run import Origin, pack
from kv_pool.lab.curves.curve_report import CurveCounts
from kv_pool.lab.curves.measure import Estimates
from kv_pool.lab.curves.reuse import PromptSizes, ReuseRecorder, find_key_bytes, read_prompt_keys
from kv_pool.lab.curves.sampling import UnitFinder
from kv_pool.lab.report import InfiniteCache
from kv_pool.lab.sweep import count_infinite_hits


class OptimumPoint(msgspec.Struct, frozen=True):
    """LRU and the optimum at one capacity, from the curves.

    Attributes:
        num_blocks: capacity.
        lru: the hits of LRU, which its replay must have, too.
        optimum: the most hits of any policy, or upper bounds, as `References` says.
        hits: block hits of each request with the optimum, packed.
    """

    num_blocks: int
    lru: CurveCounts
    optimum: CurveCounts
    hits: bytes


class References(msgspec.Struct, frozen=True, tag="references"):
    """The optimum and the ceiling of one trace, and the conversations of its requests.

    Attributes:
        block_size: tokens per block.
        requests, blocks_looked_up, tokens_in: of the trace, up to the limit.
        unit: "session" or "root", as in `UnitFinder`.
        units: the number of sessions or roots.
        unit_of: the number of each request's unit, packed.
        sizes: prompt blocks and prompt tokens of each request, packed.
        infinite_cache: the ceiling.
        optimum_blocks, optimum_tokens: "optimal" or "bound", as in `CurveReport`; None without an optimum.
        why_no_optimum: the reason, if there is none.
        points: one for each capacity; empty without an optimum.
    """

    block_size: int
    requests: int
    blocks_looked_up: int
    tokens_in: int
    unit: str
    units: int
    unit_of: bytes
    sizes: bytes
    infinite_cache: InfiniteCache
    optimum_blocks: str | None
    optimum_tokens: str | None
    why_no_optimum: str | None
    points: tuple[OptimumPoint, ...]


def measure_references(compared: ComparedTrace, origin: Origin) -> References:
    """Read a trace once, and compute the curves. Raises TraceError and InvalidArgumentError."""
    origin.check_version()
    settings = compared.settings
    trace = settings.open_trace()
    origin.check_trace(settings.trace, trace.digest())
    finder = UnitFinder(trace)
    numbers: dict[bytes, int] = {}
    unit_of = array("q")
    sizes = PromptSizes()
    recorder = ReuseRecorder(trace.pool_block_size, find_key_bytes(trace))
    curves: Estimates | None = None
    obstacle = settings.find_optimum_obstacle()
    for prompt in read_prompt_keys(trace):
        unit_of.append(numbers.setdefault(finder.find(prompt), len(numbers)))
        sizes.append(prompt.size)
        if obstacle is None:
            try:
                recorder.add(prompt)
            except TraceError as error:
                obstacle = str(error)
    if obstacle is None:
        try:
            curves = Estimates(recorder.finish())
        except TraceError as error:
            obstacle = str(error)
    blocks_looked_up, tokens_in = sizes.count_totals()
    return References(
        block_size=trace.pool_block_size,
        requests=len(unit_of),
        blocks_looked_up=blocks_looked_up,
        tokens_in=tokens_in,
        unit=finder.unit,
        units=len(numbers),
        unit_of=pack(unit_of),
        sizes=pack(list(zip(sizes.list_all("num_cacheable"), sizes.list_all("input_length"), strict=True))),
        infinite_cache=count_infinite_hits(settings) if curves is None else curves.count_infinite(),
        optimum_blocks=None if curves is None else curves.optimum_blocks,
        optimum_tokens=None if curves is None else curves.optimum_tokens,
        why_no_optimum=obstacle,
        points=() if curves is None else tuple(_make_point(curves, each) for each in compared.capacities),
    )


def _make_point(curves: Estimates, capacity: int) -> OptimumPoint:
    hits = pack(curves.optimum.list_hits(capacity))
    return OptimumPoint(capacity, curves.count_lru(capacity), curves.count_optimum(capacity), hits)
