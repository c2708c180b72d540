"""`run_sweep`: one trace at many capacities, in parallel processes."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.simulator import ReplaySettings, run_replay


def run_sweep(
    settings: ReplaySettings,
    capacities: Sequence[int],
    num_processes: int,
    on_done: Callable[[ReplayReport], None] | None = None,
) -> list[ReplayReport]:
    """Replay the trace once per capacity; the reports in the order of `capacities`.

    Args:
        capacities: in blocks; each replaces `settings.num_blocks`.
        on_done: called with each report as it is finished.
    Raises:
        InvalidArgumentError: no capacities, or a setting that a replay refuses.
        TraceError: as `run_replay`.
    """
    if not capacities:
        raise InvalidArgumentError("a sweep needs at least one capacity")
    if num_processes < 1:
        raise InvalidArgumentError(f"num_processes is {num_processes}; a sweep needs at least 1")
    # Spawned, not forked: a worker starts clean whatever threads the caller runs.
    context = multiprocessing.get_context("spawn")
    reports: dict[int, ReplayReport] = {}
    workers = min(num_processes, len(capacities))
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        futures = {
            executor.submit(run_replay, replace(settings, num_blocks=capacity)): index
            for index, capacity in enumerate(capacities)
        }
        try:
            for future in as_completed(futures):
                report = future.result()
                reports[futures[future]] = report
                if on_done is not None:
                    on_done(report)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return [reports[index] for index in range(len(capacities))]
