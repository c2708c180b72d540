"""`run_replay`: replays a trace through a new pool; `run_instantly`: the clock with one request at a time."""

from collections.abc import Callable, Iterable
from time import monotonic

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.policy_names import PolicyChoice
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.driver import FoundPrefix, ReplayDriver, ReplayTime
from kv_pool.lab.event_feed import EventFeed
from kv_pool.lab.groups import PromptSteps, make_prefix_rules, parse_groups
from kv_pool.lab.optimum_policy import find_optimum
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.report import OnProgress, ReplayReport, make_provenance
from kv_pool.lab.request_outcomes import Breakdown, OutcomeCallback, parse_breakdowns
from kv_pool.lab.settings import OPTIMUM, ReplaySettings, ReplayTrace
from kv_pool.lab.trace_clock import TraceClock
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.retention.block_retention import BlockRetention

_SECONDS_BETWEEN_PROGRESS = 0.1


def run_replay(
    settings: ReplaySettings,
    on_progress: OnProgress | None = None,
    feed: EventFeed | None = None,
    on_outcome: OutcomeCallback | None = None,
    policy: PolicyChoice | None = None,
    on_start: Callable[[KVCacheManager], object] | None = None,
) -> ReplayReport:
    """Replay a trace through a new pool and manager.

    Args:
        on_progress: called about ten times per second, with the share of ended requests.
        feed: publishes the pool's events, after each request and at the end; None turns events off.
        on_outcome: called with the outcome of each request when the request ends.
        policy: a cache policy that is already found; None for that of the settings.
        on_start: called with the manager before the first request.
    Raises:
        TraceError: the trace cannot be read.
        InvalidArgumentError: the settings are invalid, or no request fits into the pool.
        CachePolicyError: the cache policy raised, or broke its contract.
    """
    settings.check()
    trace = settings.open_trace()
    block_size = trace.pool_block_size
    groups = parse_groups(settings.groups, block_size)
    steps = PromptSteps.for_groups(groups, settings.chunk_tokens, at_every_block=settings.states == "blocks")
    replay_time = ReplayTime()
    pool = (RunBlockPool if settings.runs else BlockPool)(
        settings.num_blocks + 1,
        True,
        block_size,
        enable_kv_cache_events=feed is not None,
        dense_events=True,
        clock=replay_time.read_s,
        policy=policy or _find_policy(trace),
    )
    keeps = settings.keep_session_s or settings.keep_prefix_tokens
    manager = KVCacheManager(
        pool,
        groups=groups,
        # Output is generated in steps of at most one block.
        max_in_flight_tokens=settings.chunk_tokens and max(settings.chunk_tokens, block_size),
        watermark=settings.watermark,
        prefix_rules=make_prefix_rules(settings.states),
        retention=BlockRetention(pool, replay_time.read_s) if keeps else None,
    )
    breakdowns = [Breakdown(kind, block_size) for kind in parse_breakdowns(settings.by or "")]
    callbacks: list[OutcomeCallback] = [breakdown.add for breakdown in breakdowns]
    if on_outcome is not None:
        callbacks.append(on_outcome)
    driver = ReplayDriver(manager, settings, callbacks, replay_time)
    if on_start is not None:
        on_start(manager)
    report = driver.report
    source = manager if driver.swap is None else driver.swap.swapper
    trace_clock = TraceClock(driver, steps) if settings.clock == "trace" else None
    next_progress = 0.0
    share = 0.0

    def show_progress() -> None:
        nonlocal next_progress, share
        if on_progress is None or monotonic() < next_progress:
            return
        next_progress = monotonic() + _SECONDS_BETWEEN_PROGRESS
        num_requests = report.requests
        num_done = num_requests - (0 if trace_clock is None else trace_clock.num_unfinished)
        share = max(share, trace.find_share(num_requests) * num_done / (num_requests or 1))
        rates = f"token hit rate {driver.token_hit_rate:.1%}, pool {manager.usage:.0%} in use"
        on_progress(f"{num_requests:,} requests, {rates}", share)

    def on_request() -> None:
        host = pool.policy_host
        if host is not None and host.failure is not None:
            raise host.failure  # the pool uses LRU since
        if feed is not None:
            feed.publish(source)
        show_progress()

    requests = trace.read_requests()
    if trace_clock is None:
        run_instantly(requests, driver, on_request, steps)
    else:
        trace_clock.run(requests, on_request, None if on_progress is None else show_progress)
    on_request()  # for what happened after the last arrival
    if report.refused_requests == report.requests:
        raise InvalidArgumentError(
            f"no request fits: the pool has {settings.num_blocks} blocks of {block_size} tokens, the "
            f"smallest request needs {driver.smallest_refused}; use a larger capacity"
        )
    if settings.keep_session_s and not driver.num_kept_sessions:
        raise InvalidArgumentError(f"{trace.path} has no session_id, so there are no sessions to keep")
    report.breakdowns = {breakdown.kind: breakdown.finish() for breakdown in breakdowns}
    report.broken_lines = trace.num_broken
    report.first_broken = trace.first_broken
    report.settings = settings.describe()
    if policy is not None:
        report.settings["policy"] = policy.name
    report.provenance = make_provenance(trace, trace.digest(), settings.seed)
    return report


def _find_policy(trace: ReplayTrace) -> str | PolicyChoice | None:
    settings = trace.settings
    if settings.policy == OPTIMUM:
        return find_optimum(trace.read_requests(), trace.pool_block_size, settings.num_blocks)
    return None if settings.policy == "lru" else settings.policy  # LRU is vLLM's order, without a policy


def run_instantly(
    requests: Iterable[ReplayRequest],
    driver: ReplayDriver,
    on_request: Callable[[], None],
    steps: PromptSteps,
) -> ReplayReport:
    """Replay each request to its end before the next one, without output: the reference model.

    With full attention the hit counts equal those of any correct LRU simulator of full blocks exactly.
    """
    num_blocks_in_use = 0
    for request in requests:
        driver.set_time(request.arrival_ms)
        if driver.receive(request, request.num_tokens):
            found = driver.look_up(request)
            _compute(request, found, driver, steps)
            driver.note_hit(request, found)
            num_blocks_in_use += driver.num_blocks_in_use
            driver.end(request, request.arrival_ms)
        on_request()
    return driver.finish(num_blocks_in_use / max(1, driver.report.requests))


def _compute(request: ReplayRequest, found: FoundPrefix, driver: ReplayDriver, steps: PromptSteps) -> None:
    """Compute the whole prompt after its cached prefix. It fits, because no other request runs."""
    num_tokens = steps.count_next(found.num_tokens, request.num_tokens, request.step_ends)
    has_room = driver.begin(request, num_tokens, found)
    if driver.is_reading(request):
        driver.finish_reading(request)
    else:
        request.num_computed_tokens = found.num_tokens + num_tokens
    while has_room and request.num_computed_tokens < request.num_tokens:
        num_tokens = steps.count_next(request.num_computed_tokens, request.num_tokens, request.step_ends)
        has_room = driver.allocate(request, num_tokens)
        request.num_computed_tokens += num_tokens
    assert has_room, f"request {request.request_id} does not fit into an empty pool"
