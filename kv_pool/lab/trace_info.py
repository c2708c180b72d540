"""`describe_trace`: the figures of a trace that do not depend on a pool."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, takewhile
from pathlib import Path

import msgspec
import numpy as np

from kv_pool.core.block_hash import BlockHasher
from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.report import InfiniteCache, OnProgress, find_rank, find_share
from kv_pool.lab.tables import Fact, Report, ReportTable, make_facts, show_share
from kv_pool.lab.trace import Trace

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

    Memory: about 150 bytes per distinct block and session, and 40 bytes per request.
    """
    block_size = trace.block_size or token_block_size
    hasher = BlockHasher("xxh3_128", "0", block_size)
    uses = _BlockUses()
    partial: set[_BlockKey] = set()
    arrivals_ms, gaps_ms = array("d"), array("d")
    inputs, outputs, num_ids, num_hits = array("q"), array("q"), array("q"), array("q")
    turns: Counter[str] = Counter()
    last_turn_ms: dict[str, float] = {}
    tenants: set[str] = set()
    for number, request in enumerate(trace, 1):
        now_ms, session_id = request.arrival_ms, request.session_id
        ids: Sequence[_BlockKey] = request.hash_ids or hasher.hash_blocks(request.token_ids or [])
        arrivals_ms.append(now_ms)
        inputs.append(request.input_length)
        outputs.append(request.output_length)
        num_ids.append(len(ids))
        num_hits.append(uses.use(ids, now_ms))
        if len(ids) * block_size > request.input_length:
            partial.add(ids[-1])
        if request.tenant is not None:
            tenants.add(request.tenant)
        if session_id is not None:
            turns[session_id] += 1
            if session_id in last_turn_ms:
                gaps_ms.append(max(0.0, now_ms - last_turn_ms[session_id]))
            last_turn_ms[session_id] = now_ms
        if on_progress is not None and number % 100 == 0:
            on_progress(f"{number:,} requests", trace.position)
    num_distinct, num_reused = len(uses.last_use_ms), len(uses.reused)
    span_s = (max(arrivals_ms) - arrivals_ms[0]) / 1000
    info = TraceInfo(
        str(trace.path),
        trace.digest(),
        block_size,
        requests=len(inputs),
        broken_lines=trace.num_broken,
        tokens_in=sum(inputs),
        tokens_out=sum(outputs),
        blocks_looked_up=sum(num_ids),
        distinct_blocks=num_distinct,
        blocks_used_once=num_distinct - num_reused,
        share_used_once=find_share(num_distinct - num_reused, num_distinct),
        uses_per_reused_block=1 + uses.num_reuses / num_reused if num_reused else 0.0,
        inconsistent_requests=uses.num_inconsistent,
        sessions=len(turns),
        tenants=len(tenants),
        turns=summarize(turns.values()),
        turn_gaps_s=summarize(gap / 1000 for gap in gaps_ms),
        span_s=span_s,
        requests_per_s=find_share(len(inputs), span_s),
        busiest_minute=max(Counter(ms // _MS_PER_MINUTE for ms in arrivals_ms).values()),
        late_requests=sum(later < earlier for earlier, later in pairwise(arrivals_ms)),
        input_length=summarize(inputs),
        output_length=summarize(outputs),
        blocks_per_request=summarize(num_ids),
        reuse_distance_s=summarize_counts(
            {distance / 1000: count for distance, count in uses.distances_ms.items()}
        ),
    )
    in_tokens, in_ids, in_hits = (np.array(one, dtype=np.int64) for one in (inputs, num_ids, num_hits))
    for convention in CONVENTIONS:
        is_ids = convention.startswith("ids")
        looked_up = in_ids if is_ids else np.minimum(in_tokens // block_size, in_ids)
        most = (in_tokens - 1) // block_size if convention.endswith("_cap") else looked_up
        hits = np.minimum(in_hits, np.minimum(looked_up, most))
        found = info.ceilings[convention] = InfiniteCache(
            num_distinct if is_ids else num_distinct - len(partial),
            int(hits.sum()),
            int(np.minimum(hits * block_size, in_tokens).sum()),
        )
        found.set_rates(int(looked_up.sum()), info.tokens_in)
    return info


class _BlockUses:
    """The uses of blocks by the prompts of a trace, in its order.

    Attributes:
        last_use_ms: of each block.
        reused: the blocks used twice or more, and `num_reuses` how often in all.
        distances_ms: number of reuses by the time since the use before, to three digits.
        num_inconsistent: as `TraceInfo.inconsistent_requests`.
    """

    def __init__(self) -> None:
        self.last_use_ms: dict[_BlockKey, float] = {}
        self.reused: set[_BlockKey] = set()
        self.num_reuses = 0
        self.distances_ms: Counter[int] = Counter()
        self.num_inconsistent = 0

    def use(self, ids: Sequence[_BlockKey], now_ms: float) -> int:
        """Note the use of a prompt's blocks. Return the number of leading blocks used before."""
        last_use_ms = self.last_use_ms
        hits: list[_BlockKey] = list(takewhile(last_use_ms.__contains__, ids))
        for used_ms, num_blocks in Counter(map(last_use_ms.__getitem__, hits)).items():
            self.distances_ms[_round(now_ms - used_ms)] += num_blocks
        self.reused.update(hits)
        self.num_reuses += len(hits)
        num_known = len(last_use_ms)
        last_use_ms.update(dict.fromkeys(ids, now_ms))
        self.num_inconsistent += len(last_use_ms) - num_known != len(ids) - len(hits)
        return len(hits)


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
