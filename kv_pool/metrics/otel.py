"""`observe_pools`: the metrics of running pools as instruments of an OpenTelemetry meter."""

import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial

from kv_pool.errors import MissingDependencyError, describe_install
from kv_pool.metrics.metric_table import PREFIXES, LabelValues, Metric, list_metrics
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.pool_reading import PoolReading, PoolSources, read_pools

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
    latest = _Latest(list(sources))
    for metric in list_metrics("kv_pool"):
        words = metric.name.removeprefix(PREFIXES["kv_pool"])
        name, unit = f"kv_pool.{words}", UNITS.get(words.rpartition("_")[2], "{" + words.split("_")[-1] + "}")
        if unit in ("s", "By", "1"):
            name = name.rpartition("_")[0]  # the unit is not part of the name
        create = meter.create_observable_gauge if metric.type == "gauge" else meter.create_observable_counter
        parts = {"": unit}
        if metric.type == "histogram":
            parts = {".count": "1", ".sum": unit, ".bucket": "1"}
        for part, of_part in parts.items():
            create(name + part, [partial(latest.observe, metric, part)], of_part, metric.help)


class _Latest:
    """One reading of each pool for all instruments of a collection."""

    def __init__(self, sources: list[PoolSources]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._readings: list[PoolReading] = []
        self._read_at_s = float("-inf")

    def observe(self, metric: Metric, part: str, _: CallbackOptions) -> Iterator[Observation]:
        """Yield the numbers of a metric, or of one part of a histogram."""
        with self._lock:
            if time.monotonic() - self._read_at_s > _SHARED_FOR_S:
                self._readings = read_pools(self._sources)
                self._read_at_s = time.monotonic()
            readings = self._readings
        for reading in readings:
            common = {"model_name": reading.model_name, "engine": reading.engine, "pool": reading.name}
            for own, value in metric.read_values(reading).items():
                for bound, number in _split(value, part):
                    labels = common | dict(zip((*metric.labels, "le"), (*own, *bound), strict=False))
                    yield Observation(number, {f"kv_pool.{label}": text for label, text in labels.items()})


def _split(value: float | Histogram, part: str) -> list[tuple[LabelValues, float]]:
    """Return the numbers of a value, those of buckets with their upper bounds."""
    if not isinstance(value, Histogram):
        return [((), value)]
    if part == ".bucket":
        return [((bound,), count) for bound, count in value.iter_cumulative()]
    return [((), value.count if part == ".count" else value.sum_s)]
