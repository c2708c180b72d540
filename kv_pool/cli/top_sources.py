"""The sources of `kv-pool top`, a control socket, a `/metrics` and an event stream: each returns `Frame`s."""

import re
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Iterable
from http.client import HTTPException
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kv_pool.control.client import ControlClient
from kv_pool.control.network_port import read_token
from kv_pool.control.socket_path import get_default_folder
from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.events.mirror import PrefixMirror, apply_item
from kv_pool.reports.pool_view import PoolMap

HIT, LOOKED_UP, EVICTED = "hit tokens", "looked-up tokens", "evicted: "
SECONDS_OF_RATES = 10.0
_NUM_POINTS = 120
_MAX_ROWS = 100
_TIMEOUT_S = 2.0
_SNAPSHOT_S = 10.0
_MAX_BYTES = 32 * 2**20
_WANTED = re.compile(r"^(?:vllm:|sglang:|kv_pool_)\w+(?<!_bucket)[ {].*", re.MULTILINE)


class Bar(msgspec.Struct, frozen=True):
    """The use of one kind of memory; None for unknown. Cached blocks are free, but can be hit."""

    name: str
    used: float | None
    total: float | None = None
    cached: float | None = None
    unit: str = "blocks"


class Frame(msgspec.Struct, kw_only=True):
    """What a source shows at one moment.

    Attributes:
        trouble: why the source does not answer; "" if it does.
        counters: numbers that only grow, unless the server is restarted; `EVICTED` and a cause for evictions.
        rates: the counters per second, over the last ten seconds.
        levels: other numbers and words.
        hit_rate, recent_hit_rate: share of the looked-up tokens that was hit, since the start and lately.
        hit_rates: the same for each of the last seconds; None where nothing was looked up.
        tables: rows by the title of the table.
        absent: what this kind of source does not have.
    """

    source: str
    time_s: float = msgspec.field(default_factory=time.time)
    trouble: str = ""
    bars: list[Bar] = []
    counters: dict[str, float] = {}
    rates: dict[str, float] = {}
    levels: dict[str, Any] = {}
    hit_rate: float | None = None
    recent_hit_rate: float | None = None
    hit_rates: list[float | None] = []
    map: PoolMap | None = None
    tables: dict[str, list[dict[str, Any]] | None] = {}
    absent: str = ""


class Source(Protocol):
    """A running server or stream."""

    name: str

    def look(self, num_cells: int) -> Frame:
        """Return its state, with a map of up to `num_cells` cells. Raises KVPoolError without an answer."""

    def close(self) -> None:
        """Close its connections."""


class History:
    """The counters of a source in the last two minutes, one point per second."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, dict[str, float]]] = deque(maxlen=_NUM_POINTS)

    def add(self, frame: Frame) -> None:
        """Set the rates of a frame. If a counter is lower than before, a restart: begin again."""
        now, counts, points = frame.time_s, frame.counters, self._points
        if frame.trouble:
            return
        if points and any(counts.get(name, 0) < count for name, count in points[-1][1].items()):
            points.clear()
        base = next((point for point in points if now - SECONDS_OF_RATES <= point[0] < now), None)
        if base is not None:
            frame.rates = {
                name: (count - base[1].get(name, count)) / (now - base[0]) for name, count in counts.items()
            }
            frame.recent_hit_rate = _divide(frame.rates)
        frame.hit_rate = _divide(counts) or frame.hit_rate
        frame.hit_rates = [
            _divide({name: late.get(name, 0) - early.get(name, 0) for name in (HIT, LOOKED_UP)})
            for early, late in pairwise([*(its_counts for _, its_counts in points), counts])
        ]
        if not points or now - points[-1][0] >= 1:
            points.append((now, counts))


def _find_known(counts: dict[str, float | None]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count is not None}


def _divide(counts: dict[str, float]) -> float | None:
    return counts.get(HIT, 0) / counts[LOOKED_UP] if counts.get(LOOKED_UP) else None


class PoolSource:
    """A pool, over its control socket; reconnects."""

    def __init__(self, path: Path) -> None:
        self.name = path.name if path.parent == get_default_folder() else str(path)
        self._client = ControlClient(path, timeout_s=_TIMEOUT_S)
        self.close = self._client.close

    def look(self, num_cells: int) -> Frame:
        view = self._client.view(num_cells, _MAX_ROWS, _MAX_ROWS)
        found = view.reading
        levels: dict[str, Any] = {name: getattr(found, name) for name in _LEVELS}
        levels |= {f"{kind} holds": count for kind, count in found.holds.items()}
        counters: dict[str, float | None] = {HIT: found.hit_tokens, LOOKED_UP: found.looked_up_tokens}
        counters |= {EVICTED + cause: count for cause, count in found.evictions.items()}
        bars = [Bar("GPU", found.used_blocks, found.total_blocks, found.cached_blocks)]
        for tier in found.tiers:
            bars.append(Bar(tier.medium, tier.num_blocks, tier.capacity))
            counters |= {f"{tier.medium} stored": tier.num_stored, f"{tier.medium} read": tier.num_read}
        tables = {"migrations": view.migrations, "hot prefixes": view.prefixes, "sequences": view.sequences}
        return Frame(
            source=self.name,
            time_s=found.time_s,
            bars=bars,
            counters=_find_known(counters),
            levels=levels,
            map=view.map,
            tables=msgspec.to_builtins(tables),
        )


_LEVELS = (
    *("name", "model_name", "block_size", "num_sequences", "evicted_sequences", "pinned_blocks"),
    *("reserved_blocks", "fragmentation_rate", "largest_free_run", "moved_blocks", "overdue_leases"),
    *("invariant_failures", "interrupted_calls", "is_interrupted"),
)
"""Fields of a reading."""


class MetricsSource:
    """A `/metrics` of vLLM, SGLang or kv_pool.

    Raises:
        InvalidArgumentError: not a URL of HTTP, or a token that cannot be read; see `read_token`.
        MissingDependencyError: prometheus_client is not installed.
    """

    def __init__(self, url: str, token_file: str | None) -> None:
        import kv_pool.metrics.prometheus  # noqa: F401  # names the extra if prometheus_client is missing

        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"--url is {url!r}; it is such as http://localhost:8000/metrics")
        from prometheus_client.parser import text_string_to_metric_families

        self.name = url
        self._parse = text_string_to_metric_families
        self._request = urllib.request.Request(url)
        if token_file is not None:
            self._request.add_header("Authorization", f"Bearer {read_token(Path(token_file))}")

    def look(self, num_cells: int) -> Frame:
        found: dict[str, list[Any]] = defaultdict(list)
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT_S) as reply:
                text = reply.read(_MAX_BYTES).decode()
            for family in self._parse("\n".join(_WANTED.findall(text))):
                for sample in family.samples:
                    if isfinite(sample.value):
                        found[sample.name].append(sample)
        except (OSError, ValueError, HTTPException) as error:
            raise ControlError(f"no metrics can be read at {self.name}: {error}") from error
        if not found:
            raise ControlError(f"{self.name} has no metrics of kv_pool, vLLM or SGLang")
        counters = {label: _find_sum(found, names) for label, names in _COUNTERS.items()}
        for cause, count in _sum_by(found["kv_pool_evictions_total"], "cause").items():
            counters[EVICTED + cause] = count
        levels: dict[str, Any] = {label: _find_sum(found, names) for label, names in _GAUGES.items()}
        models = _sum_by(chain.from_iterable(found.values()), "model_name")
        return Frame(
            source=self.name,
            bars=_make_bars(found),
            counters=_find_known(counters),
            levels=levels | {"model": ", ".join(sorted(models))},
            hit_rate=_find_sum(found, "sglang:cache_hit_rate"),
            absent="map, prefixes, sequences and migrations; a control socket has them",
        )

    def close(self) -> None:
        """Do nothing: each look has a connection of its own."""


_COUNTERS = {
    HIT: "kv_pool_hit_tokens_total vllm:prefix_cache_hits_total sglang:cached_tokens_total",
    LOOKED_UP: "kv_pool_looked_up_tokens_total vllm:prefix_cache_queries_total sglang:prompt_tokens_total",
    f"{EVICTED}tokens": "sglang:evicted_tokens_total",
    "preemptions": "vllm:num_preemptions_total sglang:num_retracted_requests_total",
    "generated tokens": "vllm:generation_tokens_total sglang:generation_tokens_total",
}
_GAUGES = {
    "running": "vllm:num_requests_running sglang:num_running_reqs",
    "waiting": "vllm:num_requests_waiting sglang:num_queue_reqs",
    "sequences": "kv_pool_sequences",
    "evicted sequences": "kv_pool_evicted_sequences_total",
    "pinned blocks": "kv_pool_pinned_blocks",
    "largest free run": "kv_pool_largest_free_run_blocks",
    "fragmentation rate": "kv_pool_fragmentation_ratio",
    "moved blocks": "kv_pool_moved_blocks_total",
}


def _sum_by(samples: Iterable[Any], label: str) -> dict[str, float]:
    """Return the sums of the samples that have a label, by its value."""
    sums: dict[str, float] = {}
    for one in samples:
        if label in one.labels:
            sums[one.labels[label]] = sums.get(one.labels[label], 0) + one.value
    return sums


def _find_sum(found: dict[str, list[Any]], names: str) -> float | None:
    """Return the sum of the samples of the first of these names that has any, over engines and pools."""
    samples = next((found[name] for name in names.split() if found.get(name)), None)
    total = None if samples is None else sum(one.value for one in samples)
    return int(total) if total is not None and total == total // 1 else total


def _make_bars(found: dict[str, list[Any]]) -> list[Bar]:
    states, usage = _sum_by(found["kv_pool_blocks"], "state"), found["vllm:kv_cache_usage_perc"]
    if states:
        bars = [Bar("GPU", states.get("used"), sum(states.values()), states.get("cached"))]
        sizes = _sum_by(found["kv_pool_tier_capacity_blocks"], "medium")
        tiers = _sum_by(found["kv_pool_tier_blocks"], "medium")
        return [*bars, *(Bar(medium, count, sizes.get(medium)) for medium, count in tiers.items())]
    if usage:  # a share, of each engine
        blocks = [one.labels.get("num_gpu_blocks", "") for one in found["vllm:cache_config_info"]]
        total = sum(int(count) for count in blocks if count.isdecimal())
        share = sum(one.value for one in usage) / len(usage)
        return [Bar("GPU", share * total, total) if total else Bar("GPU", share, 1, unit="")]
    names = (
        "kv_used",
        "num_used",
        "kv_evictable",
        "max_total_num",
        "hicache_host_used",
        "hicache_host_total",
    )
    sums = (_find_sum(found, f"sglang:{name}_tokens") for name in names)
    used, used_before, cached, size, host_used, host_size = sums
    bars = [Bar("GPU", used_before if used is None else used, size, cached, "tokens")]
    return [*bars, Bar("CPU", host_used, host_size, unit="tokens")] if host_size else bars


class EventSource:
    """The event stream of kv_pool, vLLM or SGLang, followed by a mirror; reconnects."""

    def __init__(self, endpoint: str, replay: str | None) -> None:
        from kv_pool.events.subscriber import KVEventSubscriber

        self.name = endpoint
        self._subscriber = KVEventSubscriber(endpoint, replay)
        self.close = self._subscriber.close
        self._mirror = PrefixMirror()
        self._mirror.add_publisher(endpoint)
        self._has_begun = False

    def look(self, num_cells: int) -> Frame:
        began_s = time.monotonic()
        while True:
            items = self._subscriber.poll(0.0 if self._has_begun else 0.2)
            for item in items:
                apply_item(self._mirror, item, self.name)
            stream, blocks = self._subscriber.get_statistics(), self._mirror.get_counts(self.name)
            is_complete = self._has_begun or (stream.is_connected and not stream.is_recovering)
            limit_s = 0.1 if self._has_begun else _SNAPSHOT_S if stream.is_recovering else _TIMEOUT_S
            if (is_complete and not items) or time.monotonic() - began_s > limit_s:
                break
        self._has_begun = True
        if not stream.is_connected:
            raise ControlError(f"no publisher answers at {self.name}")
        places = sorted(self._mirror.count_by_place(self.name).items())
        return Frame(
            source=self.name,
            bars=[Bar(f"{medium}, group {group}", None, cached=count) for (group, medium), count in places],
            counters={
                "stored blocks": blocks.num_stored,
                f"{EVICTED}removed": blocks.num_removed,
                "batches": stream.counts.num_batches,
            },
            levels={
                "lost batches": stream.counts.num_lost,
                "restarts": stream.counts.num_restarts,
                "waits for missed batches": stream.is_recovering,
            },
            absent="all but cached blocks; a control socket has the rest",
        )
