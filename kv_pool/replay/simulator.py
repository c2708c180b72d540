"""`run_replay`: one trace, one pool, one report."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import monotonic

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.preemption import PreemptionCost, PreemptionRule
from kv_pool.replay.driver import ReplayDriver
from kv_pool.replay.event_feed import EventFeed
from kv_pool.replay.groups import parse_groups
from kv_pool.replay.host_swap import HostSwap, swap_always
from kv_pool.replay.instant_clock import run_instantly
from kv_pool.replay.keeper import Keeper
from kv_pool.replay.link import Link
from kv_pool.replay.prompt_steps import PromptSteps
from kv_pool.replay.replay_request import CONVENTIONS, ReplayRequest
from kv_pool.replay.replay_tiers import ReplayTiers
from kv_pool.replay.report import ReplayReport, take_provenance
from kv_pool.replay.request_outcomes import OutcomeCallback, OutcomeNotes
from kv_pool.replay.tally import Tally
from kv_pool.replay.trace import Trace
from kv_pool.replay.trace_clock import EngineRates, TraceClock

CLOCKS = ("instant", "trace")
PREEMPTIONS = ("cost", "swap", "recompute")
"""How a request gives way: as is faster, or always to the host while there is room, or never."""

TIER_WRITES = ("back", "through")

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block for traces of token ids, which have none of their own."""

_SECONDS_BETWEEN_PROGRESS = 0.1


@dataclass(frozen=True)
class ReplaySettings:
    """What to replay, and through what.

    Attributes:
        trace: a file, or the name of a bundled trace.
        num_blocks: capacity in blocks, the null block not counted.
        block_size: tokens per pool block; None for the trace's own (16 for traces of token ids).
        convention: what counts as a block that can be hit, see `replay_request.CONVENTIONS`.
        clock: "instant" or "trace".
        rates: the engine that the trace clock imagines.
        limit: only this many requests from the start.
        trace_block_size, timestamp_unit, skip_broken: see `Trace`.
        seed: of the block hashes, for traces of token ids.
        runs: through a `RunBlockPool`, which prefers runs of consecutive block ids.
        groups: the model's KV cache groups, see `groups.parse_groups`; each needs blocks of its own.
        chunk_tokens: prompts are computed in steps of no more than so many tokens; None for all at once.
        watermark: share of the pool that a request which begins has to leave free while others run.
        host_blocks: capacity of a pool in host memory, for preempted requests of the trace clock.
        host_tier, disk_tier: capacities of colder tiers, for cached blocks that the pool takes anew; 0 for
            none. They hold no bytes here. The host's is other memory than that of `host_blocks`.
        tier_write: one of `TIER_WRITES`: blocks go to the first tier when they are taken anew, or as soon as
            they are cached.
        block_bytes: of a block in the layers of one group; 0 for unknown, which will not do where copies take
            time: for a host pool, and for tiers with the trace clock.
        keep_session_s: seconds for which a conversation's blocks are kept for its next turn, of a trace with
            session ids. Time is the clock's; the instant clock goes by the requests' arrival.
        keep_prefix_tokens: so many tokens at the head of each prompt are the last to be evicted.
        preemption: one of `PREEMPTIONS`; without a host pool all are computed anew.
    """

    trace: str
    num_blocks: int
    block_size: int | None = None
    convention: str = CONVENTIONS[0]
    clock: str = "instant"
    rates: EngineRates = field(default_factory=EngineRates)
    limit: int | None = None
    trace_block_size: int | None = None
    timestamp_unit: str = "ms"
    skip_broken: bool = False
    seed: str = "0"
    runs: bool = False
    groups: str = "full"
    chunk_tokens: int | None = None
    watermark: float = 0.0
    host_blocks: int = 0
    host_tier: int = 0
    disk_tier: int = 0
    tier_write: str = TIER_WRITES[0]
    block_bytes: int = 0
    preemption: str = PREEMPTIONS[0]
    keep_session_s: float = 0.0
    keep_prefix_tokens: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a replay is: share of the trace's requests that have ended, and the numbers so far."""

    share: float
    num_requests: int
    token_hit_rate: float
    usage: float


def run_replay(
    settings: ReplaySettings,
    on_progress: Callable[[Progress], None] | None = None,
    feed: EventFeed | None = None,
    on_outcome: OutcomeCallback | None = None,
    clock: Callable[[], float] = monotonic,
) -> ReplayReport:
    """Replay a trace through a fresh pool and manager.

    Args:
        on_progress: called about ten times a second by `clock`, in seconds.
        feed: gets the pool's events, after each request and at the end; None for a pool that tells none.
        on_outcome: called with the outcome of each request when the request ends.
    Raises:
        TraceError: the trace can not be read.
        InvalidArgumentError: settings that can not be meant; a capacity in which no request fits.
    """
    _check(settings)
    trace = open_trace(settings)
    block_size = find_block_size(settings.block_size, trace)
    pool_class = RunBlockPool if settings.runs else BlockPool
    groups = parse_groups(settings.groups, block_size)
    steps = PromptSteps.for_groups(groups, settings.chunk_tokens)
    pool = pool_class(
        settings.num_blocks + 1, True, block_size, enable_kv_cache_events=feed is not None, dense_events=True
    )
    keeper = None
    if settings.keep_session_s or settings.keep_prefix_tokens:
        keeper = Keeper(pool, settings.keep_session_s, settings.keep_prefix_tokens)
    manager = KVCacheManager(
        pool,
        groups=groups,
        # Output comes in steps of a block at most.
        max_in_flight_tokens=settings.chunk_tokens and max(settings.chunk_tokens, block_size),
        watermark=settings.watermark,
        retention=None if keeper is None else keeper.retention,
    )
    link = Link(settings.rates.copy_bytes_per_s)
    tiers = None
    if settings.host_tier or settings.disk_tier:
        tiers = ReplayTiers(
            manager,
            settings.host_tier,
            settings.disk_tier,
            settings.tier_write,
            settings.block_bytes,
            link,
            Link(settings.rates.disk_bytes_per_s),
        )
    report = ReplayReport(block_size, settings.num_blocks, settings.convention, settings.clock)
    tally = Tally(report, None if on_outcome is None else OutcomeNotes(on_outcome))
    swap = None
    if settings.host_blocks and settings.preemption != "recompute":
        swap = _make_swap(settings, manager, report, link)
    driver = ReplayDriver(manager, tally, keeper=keeper, tiers=tiers, swap=swap)
    source = manager if swap is None else swap.swapper
    trace_clock = TraceClock(driver, settings.rates, steps) if settings.clock == "trace" else None
    next_progress = 0.0
    share = 0.0

    def show_progress() -> None:
        nonlocal next_progress, share
        if on_progress is None or clock() < next_progress:
            return
        next_progress = clock() + _SECONDS_BETWEEN_PROGRESS
        num_requests = report.requests
        read = max(trace.position, num_requests / settings.limit if settings.limit else 0.0)
        num_done = num_requests - (0 if trace_clock is None else trace_clock.num_unfinished)
        share = max(share, read * num_done / (num_requests or 1))
        on_progress(Progress(share, num_requests, tally.token_hit_rate, manager.usage))

    def on_request() -> None:
        if feed is not None:
            feed.publish(source)
        show_progress()

    requests = read_requests(trace, block_size, settings)
    if trace_clock is None:
        run_instantly(requests, driver, on_request, steps)
    else:
        trace_clock.run(requests, on_request, None if on_progress is None else show_progress)
    if feed is not None:
        feed.publish(source)
    if report.refused_requests == report.requests:
        raise InvalidArgumentError(
            f"no request fits: the pool has {settings.num_blocks} blocks of {block_size} tokens, the "
            f"smallest request needs {tally.smallest_refused}"
        )
    if keeper is not None and settings.keep_session_s and not keeper.num_kept_sessions:
        raise InvalidArgumentError(f"{trace.path} has no session_id, so there are no sessions to keep")
    report.broken_lines = trace.num_broken
    report.first_broken = trace.first_broken
    report.settings = {
        name: value
        for name, value in {**asdict(settings), **asdict(settings.rates)}.items()
        if isinstance(value, (str, int, float))
    }
    report.provenance = take_provenance(str(trace.path), trace.digest(), trace.block_size, settings.seed)
    return report


def _make_swap(
    settings: ReplaySettings, manager: KVCacheManager, report: ReplayReport, link: Link
) -> HostSwap:
    rates = settings.rates
    rule: PreemptionRule = swap_always
    if settings.preemption == "cost":
        rule = PreemptionCost(
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            copy_bytes_per_s=rates.copy_bytes_per_s,
            block_bytes=settings.block_bytes,
        )
    return HostSwap(manager, settings.host_blocks, settings.block_bytes, link, rule, report)


def _check(settings: ReplaySettings) -> None:
    if settings.num_blocks < 1:
        raise InvalidArgumentError(
            f"the pool would have {settings.num_blocks} blocks; it needs at least 1 besides the null block"
        )
    if settings.block_size is not None and settings.block_size < 1:
        raise InvalidArgumentError(f"block_size is {settings.block_size}; it counts tokens, 1 or more")
    if settings.clock not in CLOCKS:
        raise InvalidArgumentError(f"unknown clock {settings.clock!r}; known are {', '.join(CLOCKS)}")
    if settings.convention not in CONVENTIONS:
        raise InvalidArgumentError(
            f"unknown convention {settings.convention!r}; known are {', '.join(CONVENTIONS)}"
        )
    if settings.preemption not in PREEMPTIONS:
        raise InvalidArgumentError(
            f"unknown preemption {settings.preemption!r}; known are {', '.join(PREEMPTIONS)}"
        )
    if settings.host_blocks < 0 or settings.block_bytes < 0:
        raise InvalidArgumentError(
            f"host_blocks is {settings.host_blocks}, block_bytes {settings.block_bytes}; they are 0 or more"
        )
    if settings.host_blocks and settings.clock != "trace":
        raise InvalidArgumentError(
            "a host pool is for preempted requests, and only with the trace clock there are some"
        )
    if settings.host_blocks and not settings.block_bytes:
        raise InvalidArgumentError("a host pool needs block_bytes: they say how long copies take")
    if settings.host_tier < 0 or settings.disk_tier < 0:
        raise InvalidArgumentError(
            f"host_tier is {settings.host_tier}, disk_tier {settings.disk_tier}; they are 0 or more blocks"
        )
    if settings.tier_write not in TIER_WRITES:
        raise InvalidArgumentError(
            f"unknown tier_write {settings.tier_write!r}; known are {', '.join(TIER_WRITES)}"
        )
    if (settings.host_tier or settings.disk_tier) and settings.clock == "trace" and not settings.block_bytes:
        raise InvalidArgumentError("colder tiers need block_bytes: they say how long copies take")
    if settings.limit is not None and settings.limit < 1:
        raise InvalidArgumentError(f"limit is {settings.limit}; it counts requests, 1 or more")


def open_trace(settings: ReplaySettings) -> Trace:
    """The trace of the settings. Raises TraceError."""
    return Trace(
        settings.trace,
        block_size=settings.trace_block_size,
        timestamp_unit=settings.timestamp_unit,
        skip_broken=settings.skip_broken,
    )


def find_block_size(block_size: int | None, trace: Trace) -> int:
    """Tokens per pool block: as asked for, or the trace's own."""
    return block_size or trace.block_size or DEFAULT_BLOCK_SIZE


def read_requests(trace: Trace, block_size: int, settings: ReplaySettings) -> Iterator[ReplayRequest]:
    """The requests of the trace, up to the limit of the settings."""
    hasher = BlockHasher("xxh3_128", settings.seed, block_size)
    for traced in islice(trace, settings.limit):
        yield ReplayRequest(traced, block_size, settings.convention, trace.block_size, hasher)
