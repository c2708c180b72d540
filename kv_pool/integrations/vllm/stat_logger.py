"""`PoolStatLogger`: vLLM's Prometheus logger, with kv_pool's metrics beside vLLM's own. Imports vLLM.

    the engine's process                                     the API server's process
    pool <- ControlServer  <- control socket, at a scrape -  read_engines <- GET /metrics

vLLM's statistics of a step have no place for those of a pool. So the pools are read at a scrape, and a step
costs nothing more.
"""

import os
from functools import cache
from multiprocessing import active_children
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics import loggers

from kv_pool.control.client import ControlClient
from kv_pool.errors import KVPoolError
from kv_pool.integrations.vllm.pool_control import find_socket
from kv_pool.integrations.vllm_warnings import warn
from kv_pool.metrics.prometheus import PoolMetrics
from kv_pool.reports.pool_reading import PoolReading

_TIMEOUT_S = 0.5
"""Short, because the API server answers nothing else during a scrape."""


def read_engines() -> list[PoolReading]:
    """Return a reading of the pool of each engine that this process has started.

    An engine that does not answer within half a second is left out, and the log has the reason once.
    """
    engines = [one.pid for one in active_children() if one.name.startswith("EngineCore") and one.pid]
    readings = []
    for path in {find_socket(process_id) for process_id in engines or [os.getpid()]}:
        try:
            with ControlClient(path, timeout_s=_TIMEOUT_S) as client:
                readings.append(client.read())
        except KVPoolError as error:
            warn(f"kv_pool's metrics lack those of an engine: {error}")
    return readings


@cache
def _register_metrics() -> None:
    REGISTRY.register(PoolMetrics(read_engines, ()))


class PoolStatLogger(loggers.PrometheusStatLogger):  # type: ignore[misc]
    """vLLM's own metrics, and kv_pool's in the same registry."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _register_metrics()


def replace_stat_logger() -> None:
    """Let engines that this process starts have a `PoolStatLogger` in place of vLLM's Prometheus logger."""
    loggers.PrometheusStatLogger = PoolStatLogger
