"""`export_metrics`: the metrics of a replay for Prometheus, served while it runs or written at its end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.report import OnProgress
from kv_pool.lab.trace_writer import check_can_write, writing
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.reports.pool_reading import PoolSources
from kv_pool.threads import REST_S


@contextmanager
def export_metrics(
    target: str | None, model_name: str, on_progress: OnProgress
) -> Iterator[tuple[Callable[[KVCacheManager], object] | None, OnProgress]]:
    """Export the metrics of the replay that runs in a `with` block.

    Args:
        target: a port of 127.0.0.1 to serve them; a file, or - for standard output, to write them at the end
            of the block; None to do nothing.
        model_name: a label of the metrics.
        on_progress: called with the progress of the replay.
    Yields:
        `on_start` and `on_progress` for `run_replay`. The replay's thread holds a lock, and releases it for
        the threads that read the pool at each progress.
    Raises:
        InvalidArgumentError: the port cannot be served.
        TraceError: the file cannot be written.
        MissingDependencyError: prometheus_client is not installed.
    """
    if target is None:
        yield None, on_progress
        return
    from kv_pool.metrics.prometheus import PoolMetrics  # first: its error says what to install

    lock = threading.RLock()
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    if target.isdigit():
        try:
            server, _ = start_http_server(int(target), "127.0.0.1", registry)
        except (OSError, OverflowError) as error:
            raise InvalidArgumentError(f"--metrics: cannot serve at port {target}: {error}") from error
        print(f"metrics: http://127.0.0.1:{server.server_port}/metrics", flush=True)
    elif target != "-":
        check_can_write(target, "the metrics")

    def start(manager: KVCacheManager) -> None:
        sources = PoolSources(pool=manager, lock=lock, model_name=model_name)
        registry.register(PoolMetrics([sources], names=()))

    def let_read(now: str, share: float | None) -> None:
        on_progress(now, share)
        lock.release()
        time.sleep(REST_S)
        lock.acquire()

    with lock:
        yield start, let_read
    text = generate_latest(registry).decode()
    if target == "-":
        print(text, end="")
    elif not target.isdigit():
        with writing(target, "the metrics"):
            Path(target).write_text(text)
