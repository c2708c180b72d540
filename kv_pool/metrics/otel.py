"""`observe_pools`: the metrics of running pools as instruments of an OpenTelemetry meter."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kv_pool.errors import MissingDependencyError, describe_install
from kv_pool.metrics.metric_table import PREFIXES, LabelValues, Metric, list_metrics
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.pool_reading import PoolReading, PoolSources, read_pool

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
except ImportError as error:
    raise MissingDependencyError(f"OpenTelemetry is not installed: {describe_install('otel')}") from error

UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "tokens": "{token}", "blocks": "{block}"}
"""The units by the last word of a name."""

_SHARED_FOR_S = 0.2
"""The instruments of a meter are read one after another: all of them show the same reading."""


def observe_pools(meter: Meter, sources: Iterable[PoolSources]) -> None:
    """Create an observable instrument for each metric of kv_pool. Between two collections it costs nothing.

        meter = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]).get_meter("kv_pool")
        observe_pools(meter, [PoolSources(pool=gpu_pool, model_name="qwen3-8b")])

    Args:
        sources: the pools. They stay referenced for as long as the meter's provider.

    Names and units follow OpenTelemetry's conventions: the counter `kv_pool_tier_stored_blocks_total` is
    `kv_pool.tier_stored_blocks` in `{block}`, and attributes have the prefix `kv_pool.`. There are no
    observable histograms: a histogram is the three counters `.count`, `.sum` and, by its upper bound in the
    attribute `le`, `.bucket`.
    """
    read = _SharedReadings(list(sources)).read
    for metric in list_metrics("kv_pool"):
        words = metric.name.removeprefix(PREFIXES["kv_pool"])
        name, unit = f"kv_pool.{words}", UNITS.get(words.rpartition("_")[2], "{" + words.split("_")[-1] + "}")
        if unit in ("s", "By", "1"):
            name = name.rpartition("_")[0]  # the unit is not part of the name
        if metric.type == "gauge":
            meter.create_observable_gauge(name, [partial(_observe, read, metric, _as_is)], unit, metric.help)
        elif metric.type == "counter":
            meter.create_observable_counter(
                name, [partial(_observe, read, metric, _as_is)], unit, metric.help
            )
        else:
            for part, of_part, split in (
                ("count", "1", _count),
                ("sum", unit, _sum),
                ("bucket", "1", _split),
            ):
                callback = partial(_observe, read, metric, split)
                meter.create_observable_counter(f"{name}.{part}", [callback], of_part, metric.help)


Split = Callable[[float | Histogram], Iterator[tuple[LabelValues, float]]]
"""Yields the numbers of a value, each with the bound that it counts up to, if it has one."""


def _as_is(value: float | Histogram) -> Iterator[tuple[LabelValues, float]]:
    if not isinstance(value, Histogram):
        yield (), value


def _count(value: float | Histogram) -> Iterator[tuple[LabelValues, float]]:
    if isinstance(value, Histogram):
        yield (), value.count


def _sum(value: float | Histogram) -> Iterator[tuple[LabelValues, float]]:
    if isinstance(value, Histogram):
        yield (), value.sum_s


def _split(value: float | Histogram) -> Iterator[tuple[LabelValues, float]]:
    if isinstance(value, Histogram):
        for bound, count in value.iter_cumulative():
            yield (bound,), count


def _observe(
    read: Callable[[], list[PoolReading]], metric: Metric, split: Split, _: CallbackOptions
) -> Iterator[Observation]:
    for reading in read():
        common = {"model_name": reading.model_name, "engine": reading.engine, "pool": reading.name}
        for own, value in metric.read_values(reading).items():
            for bound, number in split(value):
                labels = common | dict(zip((*metric.labels, "le"), (*own, *bound), strict=False))
                yield Observation(number, {f"kv_pool.{label}": text for label, text in labels.items()})


class _SharedReadings:
    """One reading of each pool for all instruments of a collection."""

    def __init__(self, sources: list[PoolSources]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._readings: list[PoolReading] = []
        self._read_at_s = float("-inf")

    def read(self) -> list[PoolReading]:
        with self._lock:
            if time.monotonic() - self._read_at_s > _SHARED_FOR_S:
                self._readings = [read_pool(one) for one in self._sources]
                self._read_at_s = time.monotonic()
            return self._readings
