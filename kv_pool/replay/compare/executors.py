"""`open_executor`: local processes, or the workers of a Dask or Ray cluster."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from kv_pool.errors import InvalidArgumentError, MissingDependencyError, WorkerLostError, describe_install
from kv_pool.replay.worker_processes import WorkerProcesses

CONNECT_S = 30
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
    with _connect_to_dask(place) if kind == "dask" else _connect_to_ray(address) as executor:
        yield executor


@contextmanager
def _connect_to_dask(place: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(f"dask:// needs distributed: {describe_install('dask')}") from error
    try:
        client = Client(f"tcp://{place}", timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:  # a timeout is an OSError
        raise WorkerLostError(f"no Dask scheduler answers at {place}: {error}") from error
    with client:
        yield client.get_executor(pure=False)


@contextmanager
def _connect_to_ray(address: str) -> Iterator[Executor]:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"ray:// needs Ray: {describe_install('ray')}") from error
    try:
        connection = ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerLostError(
            f"no Ray cluster answers at {address}: {error}. A cluster with token authentication also needs "
            "its token in RAY_AUTH_TOKEN"
        ) from error
    with connection:
        yield RayExecutor()


_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


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
