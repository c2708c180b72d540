"""The sources of `kv-pool top`, a control socket, a `/metrics` and an event stream: each shown as `Frame`s.

reading of a pool, text of /metrics -> samples by the names of metrics -> Frame -> Watched: with rates
"""

import re
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import msgspec

from kv_pool.control.client import ControlClient
from kv_pool.errors import ControlError, KVPoolError
from kv_pool.events.mirror import PrefixMirror, apply_item
from kv_pool.metrics.metric_table import PREFIXES, list_metrics
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.pool_view import PoolMap

if TYPE_CHECKING:
    from kv_pool.events.subscriber import KVEventSubscriber

HIT, LOOKED_UP = "hit tokens", "looked up tokens"
TIMEOUT_S = 2.0
_SECONDS_OF_RATES = 10.0
_NUM_POINTS = 60
_MAX_ROWS = 100
_SNAPSHOT_S, _QUIET_S = 5.0, 0.1
_MAX_BYTES = 32 * 2**20
_MAX_VALUE = 1e15

_TITLES = {one.exposed_name: one.title for one in list_metrics(*PREFIXES) if one.title} | {
    "vllm:num_requests_waiting": "requests waiting",
    "vllm:generation_tokens_total": "generation tokens",
    "sglang:num_queue_reqs": "queue reqs",
    "sglang:num_retracted_requests_total": "retracted requests",
    "sglang:prompt_tokens_total": LOOKED_UP,
    "sglang:evicted_tokens_total": "evicted",
    "sglang:generation_tokens_total": "generation tokens",
}
"""Words for the metrics that are shown. Of several with the same words, the first of this table is shown."""

_NOT_ADDED = ("_size_tokens", "_run_blocks", "_ratio", "_rate")
"""Ends of names of which the highest value of all pools and engines is shown, not the sum."""

_KEYS = ("state", "cause", "kind", "medium", "phase", "num_gpu_blocks")
"""Labels by which samples are kept apart."""

_SAMPLE = re.compile(r"^((?:vllm:|sglang:|kv_pool_)\w+(?<!_bucket))(?:\{(.*)\})? +(\S+)", re.MULTILINE)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
"""They skip what is not shown and what is invalid, in a quarter of the time of prometheus_client's parser."""


class Bar(msgspec.Struct, frozen=True):
    """The use of one kind of memory. Cached blocks are free, but can be hit; None for unknown."""

    name: str
    used: float
    total: float
    cached: float | None = None
    unit: str = "blocks"


class Frame(msgspec.Struct, kw_only=True):
    """The state of a source at one moment.

    Attributes:
        trouble: why the source does not answer now; "" if it does.
        counters: numbers that only grow, unless the server is restarted.
        rates: the counters per second, over the last ten seconds.
        levels: other numbers and words.
        hit_rate: share of the looked-up tokens that was hit, since the start; None if none was looked up.
        hit_rates: the same over the last ten seconds, at each of the last seconds and now.
        tables: rows by the title of the table.
    """

    source: str = ""
    time_s: float = msgspec.field(default_factory=time.time)
    trouble: str = ""
    bars: list[Bar] = []
    counters: dict[str, float] = {}
    rates: dict[str, float] = {}
    levels: dict[str, Any] = {}
    hit_rate: float | None = None
    hit_rates: list[float | None] = []
    map: PoolMap | None = None
    tables: dict[str, list[dict[str, Any]] | None] = {}


class Watched:
    """A source, its last frame, and one frame for each second of the last minute.

    Args:
        name: of the source.
        look: returns its state, with a map of up to that many cells. Raises KVPoolError without an answer.
    """

    def __init__(self, name: str, look: Callable[[int], Frame]) -> None:
        self.frame = Frame(source=name)
        self._look = look
        self._points: deque[Frame] = deque(maxlen=_NUM_POINTS)

    def look(self, num_cells: int) -> Frame:
        """Return a new frame with rates; the last one with its `trouble` if the source does not answer."""
        try:
            frame = self._look(num_cells)
        except KVPoolError as error:
            self.frame = msgspec.structs.replace(self.frame, trouble=str(error))
            return self.frame
        now, counts, points = frame.time_s, frame.counters, self._points
        if points and any(counts.get(name, 0) < count for name, count in points[-1].counters.items()):
            points.clear()  # the server was restarted
        early = next((one for one in points if now - _SECONDS_OF_RATES <= one.time_s < now), None)
        if early is not None:
            seconds = now - early.time_s
            frame.rates = {name: (counts[name] - early.counters.get(name, 0)) / seconds for name in counts}
        frame.source, frame.hit_rate = self.frame.source, _find_hit_rate(counts)
        frame.hit_rates = [*(one.hit_rates[-1] for one in points), _find_hit_rate(frame.rates)]
        if not points or now - points[-1].time_s >= 1:
            points.append(frame)
        self.frame = frame
        return frame


def _find_hit_rate(counts: dict[str, float]) -> float | None:
    return counts.get(HIT, 0) / counts[LOOKED_UP] if counts.get(LOOKED_UP) else None


def look_at_pool(client: ControlClient, num_cells: int) -> Frame:
    """Return the state of a pool. Raises what `ControlClient` raises."""
    view = client.view(num_cells, _MAX_ROWS, _MAX_ROWS)
    samples = (
        (metric.exposed_name, " ".join(labels), value)
        for metric in list_metrics("kv_pool")
        for labels, value in metric.read_values(view.reading).items()
        if not isinstance(value, Histogram)
    )
    tables = {"migrations": view.migrations, "hot prefixes": view.prefixes, "sequences": view.sequences}
    frame = _make_frame(samples, {view.reading.model_name})
    frame.time_s, frame.map, frame.tables = view.reading.time_s, view.map, msgspec.to_builtins(tables)
    return frame


def look_at_metrics(url: str, token: str | None, _: int) -> Frame:
    """Return what a `/metrics` of vLLM, SGLang or kv_pool says. Raises ControlError if it cannot be read."""
    samples, models = [], set()
    try:
        for name, text, value in _SAMPLE.findall(_fetch(url, token)):
            labels = dict(_LABEL.findall(text))
            key = next((labels[key] for key in _KEYS if key in labels), "")
            samples.append((name, key, float(value)))
            models.add(labels.get("model_name", ""))
    except (OSError, ValueError, HTTPException) as error:
        raise ControlError(f"no metrics can be read at {url}: {error}") from error
    frame = _make_frame(samples, models)
    if not (frame.bars or frame.counters or frame.levels):
        raise ControlError(f"{url} has no metrics of kv_pool, vLLM or SGLang")
    return frame


def _fetch(url: str, token: str | None) -> str:
    """Return a page. Raises OSError, ValueError or HTTPException if it is not complete in time."""
    request = urllib.request.Request(url)
    if token is not None:  # not for the server that a redirection names
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    content, deadline_s = bytearray(), time.monotonic() + TIMEOUT_S
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        while part := reply.read1():
            content += part
            if len(content) > _MAX_BYTES or time.monotonic() > deadline_s:
                raise ValueError(f"no end after {len(content):,} bytes")
    return content.decode()


def _make_frame(samples: Iterable[tuple[str, str, float]], models: set[str]) -> Frame:
    """Return a frame of samples: the name of a metric, the value of one of `_KEYS` or "", and the value."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(int))
    for name, key, value in samples:
        if 0 <= value < _MAX_VALUE:  # and not NaN
            values, number = found[name], int(value) if value == value // 1 else value
            values[key] = max(values[key], number) if name.endswith(_NOT_ADDED) else values[key] + number
    counters: dict[str, float] = {}
    levels: dict[str, Any] = {"model": ", ".join(sorted(models - {""}))} if any(models) else {}
    for name, title in _TITLES.items():
        into = counters if name.endswith("_total") else levels
        for key, value in found[name].items():
            into.setdefault(f"{title} {key}".rstrip(), value)
    return Frame(bars=[*_make_bars(found)], counters=counters, levels=levels)


def _make_bars(found: dict[str, dict[str, float]]) -> Iterator[Bar]:
    blocks, usage = found["kv_pool_blocks"], found["vllm:kv_cache_usage_perc"]
    if blocks:
        yield Bar("GPU", blocks["used"], sum(blocks.values()), blocks.get("cached"))
        for medium, capacity in found["kv_pool_tier_capacity_blocks"].items():
            yield Bar(medium, found["kv_pool_tier_blocks"][medium], capacity)
    elif usage:  # the sum of a share of each engine
        sizes = found["vllm:cache_config_info"]
        known = {size: count for size, count in sizes.items() if re.fullmatch("[1-9][0-9]{0,14}", size)}
        total = sum((int(size) - 1) * count for size, count in known.items())  # without the null block
        share = usage[""] / (sum(sizes.values()) or 1)
        yield Bar("GPU", share * total, total) if total else Bar("GPU", share, 1, unit="")
    else:
        tokens = {name: values.get("", 0) for name, values in found.items()}
        if size := tokens.get("sglang:max_total_num_tokens"):
            used = tokens.get("sglang:kv_used_tokens") or tokens.get("sglang:num_used_tokens", 0)
            yield Bar("GPU", used, size, tokens.get("sglang:kv_evictable_tokens"), "tokens")
        if size := tokens.get("sglang:hicache_host_total_tokens"):
            yield Bar("CPU", tokens.get("sglang:hicache_host_used_tokens", 0), size, unit="tokens")


class MirroredStream:
    """An event stream of kv_pool, vLLM or SGLang, followed by a mirror."""

    def __init__(self, subscriber: "KVEventSubscriber", name: str) -> None:
        self._subscriber, self._name = subscriber, name
        self._mirror = PrefixMirror()
        self._mirror.add_publisher(name)
        self._limit_s = _SNAPSHOT_S

    def look(self, _: int) -> Frame:
        """Return what is cached; at first after a snapshot. Raises ControlError if no publisher answers."""
        deadline_s = time.monotonic() + self._limit_s
        while True:
            items = self._subscriber.poll(_QUIET_S)
            for item in items:
                apply_item(self._mirror, item, self._name)
            stream = self._subscriber.get_statistics()
            is_complete = stream.is_connected and not stream.is_recovering and not items
            if is_complete or time.monotonic() >= deadline_s:
                break
        self._limit_s = _QUIET_S
        if not stream.is_connected:
            raise ControlError(f"no publisher answers at {self._name}")
        blocks, places = self._mirror.get_counts(self._name), self._mirror.count_by_place(self._name)
        rows = [
            {"place": f"{medium}, group {group}", "num_blocks": num}
            for (group, medium), num in sorted(places.items())
        ]
        return Frame(
            counters={"stored": blocks.num_stored, "removed": blocks.num_removed},
            levels={"waits for missed": stream.is_recovering, "lost batches": stream.counts.num_lost},
            tables={"cached": rows},
        )
