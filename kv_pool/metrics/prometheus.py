"""`PoolMetrics`: running pools as a collector of `prometheus_client`; `encode_metrics` for `GET /metrics`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kv_pool.errors import InvalidArgumentError, MissingDependencyError, describe_install
from kv_pool.metrics.metric_table import PREFIXES, Metric, Values, list_metrics
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.pool_reading import PoolReading, PoolSources, read_pools

try:
    from prometheus_client import metrics_core
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.openmetrics import exposition as openmetrics
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependencyError(
        f"metrics for Prometheus need prometheus_client: {describe_install('metrics')}"
    ) from error

_FAMILIES: dict[str, Any] = {
    "counter": metrics_core.CounterMetricFamily,
    "gauge": metrics_core.GaugeMetricFamily,
    "histogram": metrics_core.HistogramMetricFamily,
}


class PoolMetrics(Collector):
    """Reads pools at each scrape. Between scrapes it costs nothing.

        registry = CollectorRegistry()
        registry.register(PoolMetrics([PoolSources(pool=gpu_pool, model_name="qwen3-8b")]))
        start_http_server(9400, registry=registry)                      # prometheus_client's own: pull
        push_to_gateway("gateway:9091", job="batch", registry=registry) # or push

    Args:
        sources: of pools that differ in their model name or engine, or a function that returns readings of
            them.
        names: the metrics to export in addition to kv_pool's: "vllm" under the names of vLLM 0.33, "sglang"
            under SGLang's, or both; () beside an engine that exports them itself.
    Raises:
        InvalidArgumentError: an unknown set of names, or sources with the same labels.
        MissingDependencyError: when this module is imported without prometheus_client.

    Every metric has the labels `model_name` and `engine`; kv_pool's also have `pool`, the name of the source.
    """

    def __init__(
        self,
        sources: Iterable[PoolSources] | Callable[[], list[PoolReading]],
        names: Sequence[str] | str = "vllm",
    ) -> None:
        self._metrics = list_metrics("kv_pool", *([names] if isinstance(names, str) else names))
        if callable(sources):
            self._read = sources
            return
        known = list(sources)
        self._read = partial(read_pools, known)
        if len({one.labels for one in known}) < len(known):
            raise InvalidArgumentError(
                "two sources have the same model_name and engine; give each pool another engine, since "
                "Prometheus tells metrics apart by their labels"
            )

    def collect(self) -> Iterator[metrics_core.Metric]:
        """Read all pools and yield the metrics that they count."""
        readings = self._read()
        for metric in self._metrics:
            found = [(reading, metric.read_values(reading)) for reading in readings]
            if any(values for _, values in found):
                yield _make_family(metric, found)

    def describe(self) -> Iterator[metrics_core.Metric]:
        """Yield the metrics without values, so that a registry need not read the pools to know the names."""
        return (_make_family(metric, []) for metric in self._metrics)


def _make_family(metric: Metric, found: list[tuple[PoolReading, Values]]) -> Any:
    is_ours = metric.name.startswith(PREFIXES["kv_pool"])
    labels = ("model_name", "engine", *(("pool",) if is_ours else ()), *metric.labels)
    family = _FAMILIES[metric.type](metric.name, metric.help, labels=labels)
    for reading, values in found:
        common = (reading.model_name, reading.engine, *((reading.name,) if is_ours else ()))
        for own, value in values.items():
            if isinstance(value, Histogram):
                family.add_metric((*common, *own), list(value.iter_cumulative()), value.sum_s)
            else:
                family.add_metric((*common, *own), value)
    return family


def encode_metrics(metrics: PoolMetrics, accept: str = "") -> tuple[str, bytes]:
    """Return the answer to `GET /metrics`: its content type, and the body.

    Args:
        accept: the Accept header of the request: OpenMetrics if it prefers that, else Prometheus' text.
    """
    encode, content_type = choose_encoder(accept)
    if "openmetrics" in content_type:
        # That encoder replaces the colon in names, in samples only. No name of ours has to be escaped.
        body: bytes = openmetrics.generate_latest(metrics, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return openmetrics.CONTENT_TYPE_LATEST, body
    return content_type, encode(metrics)
