"""`run_sweep`: replays a trace at many capacities in parallel; `count_infinite_hits`: their upper bound."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from kv_pool.errors import InvalidArgumentError, WorkerLostError
from kv_pool.ids import BlockHash
from kv_pool.lab.report import InfiniteCache, OnProgress, ReplayReport
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.worker_processes import WorkerProcesses, report_share, run_jobs


def run_sweep(
    settings: ReplaySettings,
    capacities: Sequence[int],
    num_processes: int,
    on_progress: OnProgress | None = None,
    host_tiers: Sequence[int] | None = None,
    disk_tiers: Sequence[int] | None = None,
) -> list[ReplayReport]:
    """Replay the trace once per capacity. Return the reports in the order of `capacities`.

    The processes import the calling script: it must call this under `if __name__ == "__main__":`.

    Args:
        capacities: in blocks; each replaces `settings.num_blocks`.
        num_processes: number of replays that run at the same time.
        host_tiers: in blocks; each replaces `settings.host_tier`, for every capacity. The reports of one
            capacity are adjacent. None uses the value of the settings.
        disk_tiers: the same for `settings.disk_tier`, for every capacity and host tier.
        on_progress: called in this thread: when a replay is complete, or the hits of an infinite cache are
            counted, and a few times per second meanwhile.
    Raises:
        InvalidArgumentError: there are no capacities, or a replay refuses a setting.
        TraceError: as in `run_replay`.
        WorkerLostError: a process ended before its replay.
        OutOfThreadsError: the system cannot start a thread, here or in a process.

    An exception in the calling thread, such as KeyboardInterrupt, ends all processes before it propagates.
    """
    points = [
        replace(settings, num_blocks=capacity, host_tier=host_tier, disk_tier=disk_tier)
        for capacity in capacities
        for host_tier in ([settings.host_tier] if host_tiers is None else host_tiers)
        for disk_tier in ([settings.disk_tier] if disk_tiers is None else disk_tiers)
    ]
    if not points:
        raise InvalidArgumentError("a sweep needs at least one capacity")
    points[-1].check()  # before processes start; each replay checks its own point
    found: dict[int, Any] = {}  # by the number of the point; at -1 the infinite cache

    def note(number: int, job: "Future[ReplayReport | InfiniteCache]") -> str:
        found[number] = one = job.result()
        cache = "an infinite cache" if number < 0 else f"{one.num_blocks:,} blocks"
        return f"{cache}: token hit rate {one.token_hit_rate:.1%}"

    jobs: dict[int, Callable[[], ReplayReport | InfiniteCache]] = {-1: partial(count_infinite_hits, settings)}
    jobs.update(enumerate(partial(run_replay, point, report_share) for point in points))
    with WorkerProcesses(min(num_processes, len(points))) as workers:
        try:
            run_jobs(workers, jobs, note, on_progress)
        except WorkerLostError as error:
            num_ended = len(found.keys() - {-1})
            raise WorkerLostError(
                f"a process of the sweep ended after {num_ended} of {len(points)} replays: {error}"
            ) from error
    reports: list[ReplayReport] = [found[number] for number in range(len(points))]
    for report in reports:
        report.infinite_cache = found[-1]
    return reports


def count_infinite_hits(settings: ReplaySettings) -> InfiniteCache:
    """Count the hits of a cache that never evicts on the requests of `settings`.

    Uses the trace, limit, block size and convention; ignores capacities, clock and groups.
    Raises:
        TraceError: the trace cannot be read.
    """
    trace = settings.open_trace()
    block_size = trace.pool_block_size
    cached: set[BlockHash] = set()
    found = InfiniteCache()
    num_blocks = num_tokens = 0
    for request in trace.read_requests():
        candidates = request.block_hashes[: request.max_hit_tokens // block_size]
        num_hits = len(list(takewhile(cached.__contains__, candidates)))
        cached.update(request.block_hashes)
        found.blocks_hit += num_hits
        found.tokens_hit += min(num_hits * block_size, request.input_length)
        num_blocks += request.num_cacheable_blocks
        num_tokens += request.input_length
    found.num_blocks = len(cached)
    found.set_rates(num_blocks, num_tokens)
    return found
