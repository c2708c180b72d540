"""`describe_trace`: the figures of a trace that do not depend on a pool."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from pathlib import Path

import msgspec

from kv_pool.core.block_hash import BlockHasher
from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.report import InfiniteCache, OnProgress, find_rank, find_share
from kv_pool.lab.tables import Fact, Report, ReportTable, make_facts, show_share
from kv_pool.lab.trace import Trace, TraceRequest

_MS_PER_MINUTE = 60_000

_BlockKey = int | bytes


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles (nearest rank) of a number of values; all 0 if there are none."""

    count: int = 0
    mean: float = 0.0
    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class TraceInfo(msgspec.Struct):
    """The figures of a trace. Blocks are the trace's: one for each hash id, also of a partial last block.

    Attributes:
        trace, sha256: the file, and the digest of its content as stored.
        block_size: tokens per block; for traces of token ids, the given size of blocks.
        requests, broken_lines: read requests, and skipped lines.
        tokens_in, tokens_out: prompt tokens and generated tokens.
        blocks_looked_up, distinct_blocks: blocks of all prompts, and different ones among them.
        blocks_used_once: distinct blocks that only one request has.
        share_used_once: the same as a share of the distinct blocks.
        uses_per_reused_block: mean number of requests that have a block, of the other blocks.
        inconsistent_requests: requests in which a known id follows an unknown one, or that repeat an id. An
            id identifies all blocks before it, so the ids of these requests are wrong.
        sessions, tenants: different session ids and tenants.
        turns: requests per session.
        turn_gaps_s: seconds between two requests of a session.
        span_s: seconds from the first to the last arrival.
        requests_per_s: requests divided by the span.
        busiest_minute: the most requests that arrive in one minute.
        late_requests: requests with an earlier timestamp than their predecessor.
        input_length, output_length: tokens per request.
        blocks_per_request: blocks per prompt.
        reuse_distance_s: seconds from one use of a block to the next, for each reuse, to three digits.
        ceilings: by convention, the hits of a cache that never evicts, with one request at a time.
    """

    trace: str
    sha256: str
    block_size: int
    requests: int = 0
    broken_lines: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    blocks_looked_up: int = 0
    distinct_blocks: int = 0
    blocks_used_once: int = 0
    share_used_once: float = 0.0
    uses_per_reused_block: float = 0.0
    inconsistent_requests: int = 0
    sessions: int = 0
    tenants: int = 0
    turns: Percentiles = Percentiles()
    turn_gaps_s: Percentiles = Percentiles()
    span_s: float = 0.0
    requests_per_s: float = 0.0
    busiest_minute: int = 0
    late_requests: int = 0
    input_length: Percentiles = Percentiles()
    output_length: Percentiles = Percentiles()
    blocks_per_request: Percentiles = Percentiles()
    reuse_distance_s: Percentiles = Percentiles()
    ceilings: dict[str, InfiniteCache] = msgspec.field(default_factory=dict)


def describe_trace(
    trace: Trace,
    token_block_size: int = 16,
    on_progress: OnProgress | None = None,
) -> TraceInfo:
    """Read a trace once and return its figures.

    Args:
        token_block_size: tokens per block, for traces of token ids.
        on_progress: called after each 100 requests.
    Raises:
        TraceError: the trace cannot be read.

    Memory: about 150 bytes per distinct block and session, and 24 bytes per request.
    """
    block_size = trace.block_size or token_block_size
    info = TraceInfo(str(trace.path), trace.digest(), block_size)
    counts = _Counts(info)
    hasher = BlockHasher("xxh3_128", "0", block_size)
    for request in trace:
        counts.add(request, request.hash_ids or hasher.hash_blocks(request.token_ids or []))
        if on_progress is not None and info.requests % 100 == 0:
            on_progress(f"{info.requests:,} requests", trace.position)
    counts.finish()
    info.broken_lines = trace.num_broken
    return info


class _Counts:
    """The counts of one pass over a trace."""

    def __init__(self, info: TraceInfo) -> None:
        self._info = info
        self._last_use_ms: dict[_BlockKey, float] = {}
        self._reused: set[_BlockKey] = set()
        self._partial: set[_BlockKey] = set()
        self._num_reuses = 0
        self._distances_ms: Counter[int] = Counter()
        self._turns: Counter[str] = Counter()
        self._last_turn_ms: dict[str, float] = {}
        self._tenants: set[str] = set()
        self._minutes: Counter[int] = Counter()
        self._gaps_ms = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._num_ids = array("q")
        self._first_ms: float | None = None
        self._last_ms = 0.0
        self._highest_ms = 0.0
        self._full_blocks = 0
        self._ceilings = {convention: InfiniteCache() for convention in CONVENTIONS}

    def add(self, request: TraceRequest, ids: Sequence[_BlockKey]) -> None:
        info, now_ms = self._info, request.arrival_ms
        info.requests += 1
        info.tokens_in += request.input_length
        info.tokens_out += request.output_length
        info.blocks_looked_up += len(ids)
        self._inputs.append(request.input_length)
        self._outputs.append(request.output_length)
        self._num_ids.append(len(ids))
        if self._first_ms is None:
            self._first_ms = now_ms
        elif now_ms < self._last_ms:
            info.late_requests += 1
        self._last_ms = now_ms
        self._highest_ms = max(self._highest_ms, now_ms)
        self._minutes[int(now_ms // _MS_PER_MINUTE)] += 1
        if request.tenant is not None:
            self._tenants.add(request.tenant)
        if request.session_id is not None:
            self._turns[request.session_id] += 1
            earlier_ms = self._last_turn_ms.get(request.session_id)
            if earlier_ms is not None:
                self._gaps_ms.append(max(0.0, now_ms - earlier_ms))
            self._last_turn_ms[request.session_id] = now_ms
        num_hits = self._use_blocks(ids, now_ms)
        if len(ids) * info.block_size > request.input_length:
            self._partial.add(ids[-1])
        self._count_hits(request, len(ids), num_hits)

    def _use_blocks(self, ids: Sequence[_BlockKey], now_ms: float) -> int:
        """Note the use of a prompt's blocks. Return the number of leading blocks used before."""
        last_use_ms = self._last_use_ms
        hits: list[_BlockKey] = list(takewhile(last_use_ms.__contains__, ids))
        for used_ms, num_blocks in Counter(map(last_use_ms.__getitem__, hits)).items():
            self._distances_ms[_round(now_ms - used_ms)] += num_blocks
        self._reused.update(hits)
        self._num_reuses += len(hits)
        num_known = len(last_use_ms)
        last_use_ms.update(dict.fromkeys(ids, now_ms))
        if len(last_use_ms) - num_known != len(ids) - len(hits):
            self._info.inconsistent_requests += 1
        return len(hits)

    def _count_hits(self, request: TraceRequest, num_ids: int, num_hits: int) -> None:
        block_size = self._info.block_size
        num_full = request.input_length // block_size
        num_capped = (request.input_length - 1) // block_size
        self._full_blocks += min(num_full, num_ids)
        for convention, found in self._ceilings.items():
            limit = num_ids if convention.startswith("ids") else num_full
            if convention.endswith("_cap"):
                limit = min(limit, num_capped)
            num_blocks = min(num_hits, limit)
            found.tokens_hit += min(num_blocks * block_size, request.input_length)
            found.blocks_hit += num_blocks

    def finish(self) -> None:
        """Fill in the figures that need all requests."""
        info = self._info
        info.distinct_blocks = len(self._last_use_ms)
        info.blocks_used_once = info.distinct_blocks - len(self._reused)
        info.share_used_once = find_share(info.blocks_used_once, info.distinct_blocks)
        if self._reused:
            info.uses_per_reused_block = 1 + self._num_reuses / len(self._reused)
        info.sessions = len(self._turns)
        info.tenants = len(self._tenants)
        info.turns = summarize(self._turns.values())
        info.turn_gaps_s = summarize(gap / 1000 for gap in self._gaps_ms)
        info.span_s = (self._highest_ms - (self._first_ms or 0.0)) / 1000
        info.requests_per_s = find_share(info.requests, info.span_s)
        info.busiest_minute = max(self._minutes.values(), default=0)
        info.input_length = summarize(self._inputs)
        info.output_length = summarize(self._outputs)
        info.blocks_per_request = summarize(self._num_ids)
        info.reuse_distance_s = summarize_counts(
            {distance / 1000: count for distance, count in self._distances_ms.items()}
        )
        for convention, found in self._ceilings.items():
            is_ids = convention.startswith("ids")
            found.num_blocks = info.distinct_blocks - (0 if is_ids else len(self._partial))
            found.set_rates(info.blocks_looked_up if is_ids else self._full_blocks, info.tokens_in)
        info.ceilings = self._ceilings


def _round(distance_ms: float) -> int:
    """Return a distance in ms, 0 or more, rounded to three digits."""
    rounded = max(0, int(distance_ms + 0.5))
    unit = int(10 ** max(0, len(str(rounded)) - 3))
    return (rounded + unit // 2) // unit * unit


def summarize(values: Iterable[float]) -> Percentiles:
    """Return the percentiles of some values."""
    return summarize_counts(Counter(values))


def summarize_counts(counts: dict[float, int]) -> Percentiles:
    """Return the percentiles of values that occur as often as `counts` says."""
    num_values = sum(counts.values())
    if not num_values:
        return Percentiles()
    ordered = sorted(counts.items())
    mean = sum(value * count for value, count in ordered) / num_values
    num_up_to = list(accumulate(count for _, count in ordered))
    ranks = (find_rank(num_values, percent) for percent in (10, 50, 90, 99, 100))
    return Percentiles(num_values, mean, *(ordered[bisect_left(num_up_to, rank)][0] for rank in ranks))


def report_trace(info: TraceInfo) -> Report:
    """Return the figures as tables: counts, percentiles, and the hits of a cache that never evicts."""
    by_name = [
        ("blocks per request", info.blocks_per_request),
        ("prompt tokens", info.input_length),
        ("generated tokens", info.output_length),
    ]
    if info.sessions:
        by_name += [("requests per session", info.turns), ("between turns, s", info.turn_gaps_s)]
    by_name.append(("reused after, s", info.reuse_distance_s))
    names = ("mean", "p10", "p50", "p90", "p99", "max")
    percentiles = [[name, *(_show_value(getattr(found, one)) for one in names)] for name, found in by_name]
    ceilings = [
        (name, show_share(found.token_hit_rate), show_share(found.block_hit_rate), f"{found.tokens_hit:,}")
        for name, found in info.ceilings.items()
    ]
    counts = make_facts(Path(info.trace).name, _list_counts(info))
    titles = ("convention", "token hits", "block hits", "tokens")
    hits = ReportTable(titles, ceilings, titles[:1], "a cache that never evicts")
    return Report(info, [counts, ReportTable(("", *names), percentiles), hits])


def _list_counts(info: TraceInfo) -> Iterator[Fact | None]:
    yield Fact("requests", f"{info.requests:,}")
    if info.broken_lines:
        yield Fact("broken lines", f"{info.broken_lines:,}", "skipped")
    if info.late_requests:
        yield Fact("late", f"{info.late_requests:,}", "timestamps that go backwards")
    if info.inconsistent_requests:
        why = "requests whose ids contradict earlier ones"
        yield Fact("inconsistent", f"{info.inconsistent_requests:,}", why)
    yield Fact("prompt tokens", f"{info.tokens_in:,}", f"{info.tokens_out:,} generated tokens")
    yield Fact("time span", f"{info.span_s:,.0f} s", "from the first to the last arrival")
    busiest = f"{info.busiest_minute:,} in the busiest minute"
    yield Fact("arrivals", f"{info.requests_per_s:,.3g}/s", busiest)
    if info.sessions:
        yield Fact("sessions", f"{info.sessions:,}", f"{info.turns.mean:,.1f} requests each")
    if info.tenants:
        yield Fact("tenants", f"{info.tenants:,}")
    yield None
    yield Fact("block size", f"{info.block_size:,}", "tokens")
    yield Fact("block look-ups", f"{info.blocks_looked_up:,}", "blocks of all prompts")
    yield Fact("distinct blocks", f"{info.distinct_blocks:,}")
    others = f"{info.blocks_used_once:,} blocks; the others {info.uses_per_reused_block:.1f} times each"
    yield Fact("used once", f"{info.share_used_once:.1%}", others)


def _show_value(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"
