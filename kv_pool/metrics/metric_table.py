"""`list_metrics`: what is measured of a running pool, from the table `metrics.toml`.

PoolSources -> read_pool -> PoolReading -> Metric.read -> Prometheus, OpenTelemetry
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from kv_pool.errors import InvalidArgumentError, describe_known
from kv_pool.regular_files import read_toml
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.pool_reading import PoolReading

PREFIXES = {"kv_pool": "kv_pool_", "vllm": "vllm:", "sglang": "sglang:"}
"""The beginning of the names of each set."""

LabelValues = tuple[str, ...]
Values = dict[LabelValues, float | Histogram]
"""The values of a metric, by those of its own labels; {} if the pool does not count it."""


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `metrics.toml`; see there."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    read: str | dict[str, str]
    help: str
    advice: str
    title: str = ""
    labels: LabelValues = ()

    @property
    def exposed_name(self) -> str:
        """The name in Prometheus' format."""
        return f"{self.name}_total" if self.type == "counter" else self.name

    def read_values(self, reading: PoolReading) -> Values:
        """Return what a reading says, by the values of the labels."""
        if isinstance(self.read, str):
            return _find(reading, self.read)
        return {
            (*labels, name): value
            for name, path in self.read.items()
            for labels, value in _find(reading, path).items()
        }


def _find(reading: PoolReading, path: str) -> Values:
    """Return the values of a field. Those of a dict are by its keys, and a space there separates labels."""
    field, _, part = path.partition(".")
    found: Any = getattr(reading, field)
    if field == "tiers":
        return {(tier.medium,): getattr(tier, part) for tier in found}
    if part:
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    if isinstance(found, Mapping):
        return {tuple(str(key).split()): value for key, value in found.items()}
    return {} if found is None else {(): found}


@cache
def list_metrics(*names: str) -> tuple[Metric, ...]:
    """Return the metrics of these sets: "kv_pool", "vllm", "sglang".

    Raises:
        InvalidArgumentError: an unknown set.
    """
    for name in names:
        if name not in PREFIXES:
            raise InvalidArgumentError(f"{name!r} is no set of metrics; {describe_known(name, PREFIXES)}")
    path = Path(__file__).with_name("metrics.toml")
    table = msgspec.convert(read_toml(path, "the table of metrics")["metric"], list[Metric])
    return tuple(one for name in names for one in table if one.name.startswith(PREFIXES[name]))
