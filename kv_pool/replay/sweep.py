"""`run_sweep`: one trace at many capacities, of the pool and of a tier, in parallel processes."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.infinite_cache import count_infinite_hits
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.simulator import ReplaySettings, run_replay


def run_sweep(
    settings: ReplaySettings,
    capacities: Sequence[int],
    num_processes: int,
    on_done: Callable[[ReplayReport], None] | None = None,
    host_tiers: Sequence[int] | None = None,
    disk_tiers: Sequence[int] | None = None,
) -> list[ReplayReport]:
    """Replay the trace once per capacity; the reports in the order of `capacities`.

    Args:
        capacities: in blocks; each replaces `settings.num_blocks`.
        host_tiers: in blocks; each replaces `settings.host_tier`, for every capacity in turn: its reports
            come one after another. None for that of the settings.
        disk_tiers: the same for `settings.disk_tier`, for every host tier in turn.
        on_done: called with each report as it is finished.
    Raises:
        InvalidArgumentError: no capacities, or a setting that a replay refuses.
        TraceError: as `run_replay`.
    """
    points = [
        replace(settings, num_blocks=capacity, host_tier=host_tier, disk_tier=disk_tier)
        for capacity in capacities
        for host_tier in ([settings.host_tier] if host_tiers is None else host_tiers)
        for disk_tier in ([settings.disk_tier] if disk_tiers is None else disk_tiers)
    ]
    if not points:
        raise InvalidArgumentError("a sweep needs at least one capacity")
    if num_processes < 1:
        raise InvalidArgumentError(f"num_processes is {num_processes}; a sweep needs at least 1")
    # Spawned, not forked: a worker starts clean whatever threads the caller runs.
    context = multiprocessing.get_context("spawn")
    reports: dict[int, ReplayReport] = {}
    workers = min(num_processes, len(points))
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        infinite_cache = executor.submit(count_infinite_hits, settings)
        futures = {executor.submit(run_replay, point): index for index, point in enumerate(points)}
        try:
            for future in as_completed(futures):
                report = future.result()
                reports[futures[future]] = report
                if on_done is not None:
                    on_done(report)
            bound = infinite_cache.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    for report in reports.values():
        report.infinite_cache = bound
    return [reports[index] for index in range(len(points))]
