"""`WorkerProcesses`: a `concurrent.futures.Executor` of processes that end at once when the caller ends.

`open_executor` opens these, or the workers of a Dask or Ray cluster; `run_jobs` runs jobs on any of them.
"""

import logging
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from threading import Lock, Thread, get_ident
from typing import Any, ParamSpec, TypeVar

from kv_pool.core.arguments import as_count
from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    MissingDependencyError,
    WorkerLostError,
    describe_install,
)
from kv_pool.lab.report import OnProgress
from kv_pool.loggers import get_logger
from kv_pool.threads import start_thread, submit

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_NAME = "kv_pool replays"

_LOOK_S = 0.2


@dataclass(frozen=True)
class _Worker:
    """A process, and the pipe on which it gets calls and returns results."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def end(self) -> None:
        """Kill the process, wait for its end, and close both."""
        self.process.kill()
        self.process.join()
        with suppress(ValueError):  # another thread, which starts a process, is reading its exit status
            self.process.close()
        self.pipe.close()


class WorkerProcesses(Executor):
    """Runs jobs in processes; use it in a `with` statement, which ends them.

    Each process runs one job at a time, and starts with its first job. An exception that leaves the `with`
    block, such as KeyboardInterrupt, kills all processes before it propagates. They also end if this process
    is killed. If a worker is lost, the future of its job raises WorkerLostError; the other workers go on, and
    another one starts for the next job.

    The processes import the calling script: it must use this under `if __name__ == "__main__":`.

    Args:
        num_processes: number of jobs that run at the same time.
    Raises:
        InvalidArgumentError: `num_processes` is below 1.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = as_count("num_processes", num_processes, 1)
        # Spawned, not forked: forking is unsafe if the caller runs threads.
        self._context = multiprocessing.get_context("spawn")
        # Each thread passes its jobs to a worker of its own.
        self._threads = ThreadPoolExecutor(num_processes)
        self._workers: dict[int, _Worker] = {}  # by thread
        self._shares: dict[int, float] = {}  # of running jobs that report them, by thread
        self._lock = Lock()
        self._is_closed = False
        self._is_killed = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self._kill()

    def submit(
        self,
        fn: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> "Future[_Result]":
        """Queue the call `fn(*args, **kwargs)` for a worker. All of it must pickle.

        Raises:
            OutOfThreadsError: the system cannot start the thread of a worker.
        """
        if self._is_closed:
            raise RuntimeError("no job can be submitted after the shutdown")
        return submit(self._threads, _NAME, self._run, (fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes after the queued jobs, or after the running ones if `cancel_futures` is set.

        Args:
            wait: return after the processes have ended. If False, they end when the last job has ended.
        """
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=cancel_futures)
        if not wait:
            start_thread(_NAME, self.shutdown)
            return
        try:
            self._threads.shutdown()
        finally:
            self._kill()

    def _run(self, call: _Call) -> Any:
        """Return what the worker of this thread returns for a call, or raise its error."""
        thread_id = get_ident()
        worker = self._workers.get(thread_id) or self._start(thread_id)
        try:
            worker.pipe.send(call)
            while isinstance(result := worker.pipe.recv(), _Share):
                self._shares[thread_id] = result.share
        except (EOFError, OSError) as error:
            with self._lock:
                is_lost = self._workers.pop(thread_id, None) is not None
            if is_lost:  # otherwise `_kill` ends it
                worker.end()
            raise WorkerLostError(
                "a worker process ended before its job: it was killed, the machine ran out of memory "
                f"({self._num_processes} processes; use fewer), or a script starts it outside "
                "`if __name__ == '__main__':`"
            ) from error
        finally:
            self._shares.pop(thread_id, None)
        if isinstance(result, Exception):
            raise result
        return result

    def _start(self, thread_id: int) -> "_Worker":
        """Start the worker of a thread with SIGINT, SIGTERM and SIGHUP blocked, here and in the thread.

        Raises:
            WorkerLostError: all workers have been killed.
        """
        with self._lock:
            if self._is_killed:
                raise WorkerLostError("the worker processes were ended before this job")
            if hasattr(signal, "pthread_sigmask"):
                resource_tracker.ensure_running()  # it unblocks signals
                signal.pthread_sigmask(signal.SIG_BLOCK, _list_signals())
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers[thread_id] = worker = _Worker(process, ours)
        return worker

    def _kill(self) -> None:
        """Kill all workers, including running jobs, and cancel the queued jobs."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:  # a shutdown without waiting may be here, too
            self._is_killed = True
            workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.process.kill()
        self._threads.shutdown()
        for worker in workers.values():
            worker.end()


@dataclass(frozen=True)
class _Share:
    """A message of a worker before its result: the share of the job that is done."""

    share: float


_caller: Connection | None = None


def report_share(doing: str, share: float | None) -> None:
    """Report progress of the job that this process runs; no-op in other processes than `WorkerProcesses`."""
    if _caller is not None and share is not None:
        with suppress(OSError):  # the caller is gone, and this process ends, too
            _caller.send(_Share(share))


def count_running(executor: Executor) -> float:
    """Return the running jobs of `WorkerProcesses`, each by the share of it that it has reported."""
    return sum(list(executor._shares.values())) if isinstance(executor, WorkerProcesses) else 0.0


def run_jobs(
    executor: Executor,
    jobs: Mapping[_Key, Callable[[], _Result]],
    note: Callable[[_Key, "Future[_Result]"], str],
    on_progress: OnProgress | None = None,
    num_before: int = 0,
) -> None:
    """Run jobs to their ends. After an exception, the jobs that have not started are cancelled.

    Args:
        jobs: calls that pickle, by key.
        note: called in this thread with the key and the future of each job that ends. It returns what the
            progress says of the job, or raises the job's error.
        on_progress: called in this thread: when a job has ended, and a few times per second meanwhile.
        num_before: number of other jobs that ended before; the progress counts them.
    Raises:
        OutOfThreadsError: the system cannot start the thread of a worker.
    """
    num_jobs = num_before + len(jobs)
    last = "finished before" if num_before else "no run yet"
    keys: dict[Future[_Result], _Key] = {}
    pending: set[Future[_Result]] = set()

    def notify() -> None:
        if on_progress is not None:
            num_ended = num_jobs - len(pending)
            share = (num_ended + count_running(executor)) / num_jobs
            on_progress(f"{num_ended} of {num_jobs}, {last}", share)

    try:
        for key, job in jobs.items():
            keys[submit(executor, _NAME, job)] = key
        pending.update(keys)
        if num_before:
            notify()
        while pending:
            ended, _ = wait(pending, _LOOK_S, FIRST_COMPLETED)
            for future in ended:
                last = note(keys[future], future)
                pending.remove(future)
                notify()
            if not ended:
                notify()
    finally:
        for future in keys:
            future.cancel()  # no-op after the end of its job


def work(pipe: Connection) -> None:
    """Run the calls that arrive, in order, and send back each result or exception, until the pipe closes.

    A call that cannot be read, such as one of a module that only the caller can import, is an exception, too.
    """
    # SIGINT stays blocked: the process that started this one handles Ctrl-C and ends this one.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _list_signals() - {signal.SIGINT})
    get_logger("kv_pool.lab").setLevel(logging.ERROR)  # the caller has opened the trace
    get_logger("kv_pool.core").setLevel(logging.CRITICAL)  # the replay raises the error
    global _caller
    _caller = pipe
    watcher: Thread | None = None
    while True:
        try:
            try:
                function, arguments, options = pipe.recv()
            except (EOFError, OSError):
                os._exit(1)
            watcher = watcher or start_thread(_NAME, _end_with_caller)  # without one, the call is refused
            pipe.send(function(*arguments, **options))
        except Exception as error:
            if not isinstance(error, KVPoolError):
                error.add_note(traceback.format_exc())  # pickling drops the traceback
            pipe.send(error)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _list_signals() -> set[signal.Signals]:
    return {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


CONNECT_S = 5
"""Seconds to wait for an answer of a cluster."""


@contextmanager
def open_executor(address: str | None, num_processes: int) -> Iterator[Executor]:
    """Yield an executor, and end it or disconnect from it at the end.

    Args:
        address: dask://HOST:PORT of a Dask scheduler, ray://HOST:PORT of a Ray Client server, or None for
            local processes.
        num_processes: number of local processes.
    Raises:
        InvalidArgumentError: the address is none of these.
        MissingDependencyError: the package of the cluster is not installed.
        WorkerLostError: the cluster does not answer.
    """
    if address is None:
        with WorkerProcesses(num_processes) as workers:
            yield workers
        return
    kind, _, place = address.partition("://")
    if kind not in ("dask", "ray") or ":" not in place:
        raise InvalidArgumentError(
            f"{address!r} is not an address such as dask://HOST:8786 or ray://HOST:10001"
        )
    with (_connect_to_dask if kind == "dask" else _connect_to_ray)(place) as executor:
        yield executor


def _check_listens(what: str, place: str) -> None:
    """Raise WorkerLostError at once if nothing listens: the clusters' clients would try again and again."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), port), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise WorkerLostError(f"no {what} answers at {place}: {error}") from error


@contextmanager
def _connect_to_dask(place: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(f"dask:// needs distributed: {describe_install('dask')}") from error
    _check_listens("Dask scheduler", place)
    try:
        client = Client(f"tcp://{place}", timeout=CONNECT_S, set_as_default=False)
    except Exception as error:  # another server may answer anything
        raise WorkerLostError(f"no Dask scheduler answers at {place}: {error}") from error
    with client:
        yield client.get_executor(pure=False)


@contextmanager
def _connect_to_ray(place: str) -> Iterator[Executor]:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"ray:// needs Ray: {describe_install('ray')}") from error
    _check_listens("Ray cluster", place)
    try:
        connection = ray.init(f"ray://{place}", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerLostError(
            f"no Ray cluster answers at {place}: {error}. A cluster with token authentication also needs "
            "its token in RAY_AUTH_TOKEN"
        ) from error
    with connection:
        yield RayExecutor()


class RayExecutor(Executor):
    """Runs each job as a Ray task, which takes one CPU.

    `ray.init` must have been called. Each task may run in another process; jobs are pickled by cloudpickle.
    """

    def __init__(self) -> None:
        import ray

        self._call = ray.remote(_call)

    def submit(
        self,
        fn: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> "Future[_Result]":
        """Start a task that calls `fn(*args, **kwargs)`."""
        future: Future[_Result] = self._call.remote(fn, args, kwargs).future()
        return future


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*arguments, **options)
