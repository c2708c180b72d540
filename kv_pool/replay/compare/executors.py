"""`open_executor`: local processes, or the workers of a Dask or Ray cluster."""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from kv_pool.errors import InvalidArgumentError, MissingDependencyError, WorkerLostError, describe_install
from kv_pool.replay.compare.ray_executor import RayExecutor
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
