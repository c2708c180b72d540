"""`run_sweep`: replays a trace at many capacities of the pool and its tiers, in parallel processes."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from kv_pool.errors import InvalidArgumentError, KVPoolError, OutOfThreadsError, WorkerLostError
from kv_pool.replay.infinite_cache import count_infinite_hits
from kv_pool.replay.report import InfiniteCache, ReplayReport
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.simulator import run_replay
from kv_pool.threads import start_thread, submit

_Job = tuple[Callable[[ReplaySettings], ReplayReport | InfiniteCache], ReplaySettings]


def run_sweep(
    settings: ReplaySettings,
    capacities: Sequence[int],
    num_processes: int,
    on_done: Callable[[ReplayReport], None] | None = None,
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
        on_done: called with each report when it is complete.
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
    if num_processes < 1:
        raise InvalidArgumentError(f"num_processes is {num_processes}; a sweep needs at least 1")
    workers = _Workers()
    try:
        # In another thread, so that no signal handler interrupts the start of a worker.
        with ThreadPoolExecutor(1) as starter:
            submit(starter, "kv_pool sweep", workers.start, min(num_processes, len(points))).result()
        return _share_out(settings, points, workers.pipes, on_done)
    finally:
        workers.end()


def _share_out(
    settings: ReplaySettings,
    points: Sequence[ReplaySettings],
    idle: Sequence[Connection],
    on_done: Callable[[ReplayReport], None] | None,
) -> list[ReplayReport]:
    """Send each worker one job at a time. Return the reports in the order of `points`.

    The last job counts the hits of an infinite cache, for all reports.
    """
    jobs: list[_Job] = [*((run_replay, point) for point in points), (count_infinite_hits, settings)]
    reports: dict[int, ReplayReport] = {}
    infinite_cache: InfiniteCache | None = None
    index_at: dict[Connection, int] = {}
    unsent = iter(enumerate(jobs))
    try:
        for pipe in idle:
            _send_next(unsent, pipe, index_at)
        while index_at:
            for ready in wait(list(index_at)):
                assert isinstance(ready, Connection)
                result = _receive_result(ready)
                if isinstance(result, Exception):
                    raise result
                index = index_at.pop(ready)
                if isinstance(result, InfiniteCache):
                    infinite_cache = result
                else:
                    reports[index] = result
                    if on_done is not None:
                        on_done(result)
                _send_next(unsent, ready, index_at)
    except _PipeClosedError as error:
        raise WorkerLostError(
            f"a process of the sweep ended after {len(reports)} of {len(points)} replays; it was killed, the "
            f"machine ran out of memory ({len(idle)} replays ran at once; use fewer processes), or a script "
            "calls run_sweep() outside `if __name__ == '__main__':`"
        ) from error
    for report in reports.values():
        report.infinite_cache = infinite_cache
    return [reports[index] for index in range(len(points))]


class _PipeClosedError(Exception):
    """The process at the other end of a pipe has ended."""


def _send_next(unsent: Iterator[tuple[int, _Job]], pipe: Connection, index_at: dict[Connection, int]) -> None:
    for index, job in unsent:
        index_at[pipe] = index
        try:
            pipe.send(job)
        except OSError as error:
            raise _PipeClosedError from error
        return


def _receive_result(pipe: Connection) -> ReplayReport | InfiniteCache | Exception:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError) as error:
        raise _PipeClosedError from error


class _Workers:
    """The worker processes of a sweep, each connected by a pipe. Closing a pipe ends its process at once."""

    def __init__(self) -> None:
        # Spawned, not forked: forking is unsafe if the caller runs threads.
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[Connection] = []

    def start(self, num_processes: int) -> None:
        """Start the workers with SIGINT, SIGTERM and SIGHUP blocked, here and in the calling thread."""
        if hasattr(signal, "pthread_sigmask"):
            resource_tracker.ensure_running()  # it unblocks signals
            signal.pthread_sigmask(signal.SIG_BLOCK, _list_signals())
        for _ in range(num_processes):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self.pipes.append(ours)

    def end(self) -> None:
        """Kill all workers, including running replays."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


def _work(pipe: Connection) -> None:
    """Run the jobs that arrive, in order, and send back each result or exception."""
    # SIGINT stays blocked: the process of the sweep handles Ctrl-C and ends this one.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _list_signals() - {signal.SIGINT})
    jobs: SimpleQueue[_Job] = SimpleQueue()
    try:
        start_thread("kv_pool sweep", _receive, pipe, jobs)
    except OutOfThreadsError as error:
        pipe.send(error)
        _receive(pipe, jobs)  # until the sweep has read the error and closes the pipe
    while True:
        function, settings = jobs.get()
        try:
            pipe.send(function(settings))
        except Exception as error:
            if not isinstance(error, KVPoolError):
                error.add_note(traceback.format_exc())  # pickling drops the traceback
            pipe.send(error)


def _receive(pipe: Connection, jobs: "SimpleQueue[_Job]") -> None:
    """Queue the jobs that arrive. End this process when the pipe closes, as the sweep has ended."""
    while True:
        try:
            jobs.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)


def _list_signals() -> set[signal.Signals]:
    return {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
