"""`export_metrics`: the metrics of a replay for Prometheus, served while it runs or written at its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.report import OnProgress
from kv_pool.lab.trace_writer import check_can_write, writing
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.metrics.prometheus import PoolMetrics, encode_metrics
from kv_pool.reports.pool_reading import PoolReading, PoolSources, read_pools


@contextmanager
def export_metrics(
    target: str, model_name: str, on_progress: OnProgress
) -> Iterator[tuple[Callable[[KVCacheManager], object], OnProgress]]:
    """Export the metrics of the replay that runs in a `with` block.

    Args:
        target: a port of 127.0.0.1 to serve them, or a file to write them at the end of the block.
        model_name: a label of the metrics.
        on_progress: called with the progress of the replay.
    Yields:
        `on_start` and `on_progress` for `run_replay`. What is served was read at the last progress.
    Raises:
        InvalidArgumentError: the port cannot be served.
        TraceError: the file cannot be written.
    """
    sources: list[PoolSources] = []
    last: list[PoolReading] = []  # a scrape does not wait for the thread of the replay
    metrics = PoolMetrics(lambda: last[:], ())
    if target.isdecimal():
        _serve(metrics, int(target))
    else:
        check_can_write(target, "the metrics")

    def start(manager: KVCacheManager) -> None:
        sources[:] = [PoolSources(pool=manager, model_name=model_name)]

    def note(now: str, share: float | None) -> None:
        on_progress(now, share)
        last[:] = read_pools(sources)

    yield start, note
    last[:] = read_pools(sources)
    if not target.isdecimal():
        with writing(target, "the metrics"):
            Path(target).write_bytes(encode_metrics(metrics)[1])


def _serve(metrics: PoolMetrics, port: int) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, _ = start_http_server(port, "127.0.0.1", registry)
    except (OSError, OverflowError) as error:
        raise InvalidArgumentError(f"--metrics: cannot serve at port {port}: {error}") from error
    print(f"metrics: http://127.0.0.1:{server.server_port}/metrics", flush=True)
