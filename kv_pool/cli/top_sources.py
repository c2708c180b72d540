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
from kv_pool.metrics.metric_table import list_metrics
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.pool_view import PoolMap

if TYPE_CHECKING:
    from kv_pool.events.subscriber import KVEventSubscriber

HIT, LOOKED_UP = "hit tokens", "looked up tokens"
TIMEOUT_S = 2.0
_SECONDS_OF_RATES = 10.0
_NUM_POINTS = 120
_MAX_ROWS = 100
_SNAPSHOT_S = 5.0
_MAX_BYTES = 32 * 2**20
_MAX_VALUE = 1e15

_NAMES = {
    HIT: "kv_pool_hit_tokens_total vllm:prefix_cache_hits_total sglang:cached_tokens_total",
    LOOKED_UP: "kv_pool_looked_up_tokens_total vllm:prefix_cache_queries_total sglang:prompt_tokens_total",
    "evicted ": "kv_pool_evictions_total sglang:evicted_tokens_total",
}
"""The counters of all kinds of sources. The first metric that a source has is taken."""

_OTHERS = re.compile(
    r"(?:kv_pool_|vllm:(?:num_)?|sglang:(?:num_)?)"
    r"(block_size_tokens|sequences|evicted_sequences|pinned_blocks|reserved_blocks|held_blocks|overdue_leases"
    r"|fragmentation_ratio|largest_free_run_blocks|moved_blocks|tier_(?:stored|read)_blocks|migrations"
    r"|invariant_failures|interrupted(?:_calls)?|requests_(?:running|waiting)|preemptions|cache_hit_rate"
    r"|(?:running|queue)_reqs|retracted_requests|generation_tokens)(?:_total)?"
)
"""Metrics that are shown under their own names."""

_SGLANG_MEMORY = {
    "GPU": ("kv_used", "max_total_num", "kv_evictable"),
    "CPU": ("hicache_host_used", "hicache_host_total", ""),
}
"""The metrics of the used, all and cached tokens of each medium, without `sglang:` and `_tokens`."""

_NOT_ADDED = ("_size_tokens", "_run_blocks", "_ratio", "_rate")
"""Ends of names of which the highest value of all pools and engines is shown, not the sum."""

_KEYS = ("state", "cause", "kind", "medium", "phase", "num_gpu_blocks")
"""Labels by which samples are kept apart."""

_SAMPLE = re.compile(r"^((?:vllm:|sglang:|kv_pool_)\w+(?<!_bucket))(?:\{(.*)\})? +(\S+)", re.MULTILINE)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')

Sample = tuple[str, str, float]
"""The name of a metric, the value of a label or "", and the value of the sample."""


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
    """A source, its last frame, and its counters in the last two minutes, one point per second.

    Args:
        name: of the source.
        look: returns its state, with a map of up to that many cells. Raises KVPoolError without an answer.
    """

    def __init__(self, name: str, look: Callable[[int], Frame]) -> None:
        self.frame = Frame(source=name)
        self._look = look
        self._points: deque[tuple[float, dict[str, float], float | None]] = deque(maxlen=_NUM_POINTS)

    def look(self, num_cells: int) -> Frame:
        """Return a new frame with rates; the last one with its `trouble` if the source does not answer."""
        try:
            frame = self._look(num_cells)
        except KVPoolError as error:
            self.frame = msgspec.structs.replace(self.frame, trouble=str(error))
            return self.frame
        now, counts, points = frame.time_s, frame.counters, self._points
        if points and any(counts.get(name, 0) < count for name, count in points[-1][1].items()):
            points.clear()  # the server was restarted
        early = next((one for one in points if now - _SECONDS_OF_RATES <= one[0] < now), None)
        if early is not None:
            then, before, _ = early
            frame.rates = {name: (counts[name] - before.get(name, 0)) / (now - then) for name in counts}
        lately = _find_hit_rate(frame.rates)
        frame.source, frame.hit_rate = self.frame.source, _find_hit_rate(counts)
        frame.hit_rates = [*(rate for *_, rate in points), lately]
        if not points or now - points[-1][0] >= 1:
            points.append((now, counts, lately))
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


def _make_frame(samples: Iterable[Sample], models: set[str]) -> Frame:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(int))
    for name, key, value in samples:
        if 0 <= value < _MAX_VALUE:  # and not NaN
            values, number = found[name], int(value) if value == value // 1 else value
            values[key] = max(values[key], number) if name.endswith(_NOT_ADDED) else values[key] + number
    counters: dict[str, float] = {}
    levels: dict[str, Any] = {"model": ", ".join(sorted(models - {""}))} if any(models) else {}
    titles = {names: title for title, names in _NAMES.items()}
    titles |= {match[0]: f"{match[1].replace('_', ' ')} " for match in map(_OTHERS.fullmatch, found) if match}
    for names, title in titles.items():
        into = counters if names.endswith("_total") else levels
        into |= {f"{title}{key}".strip(): value for key, value in _find_first(found, names).items()}
    return Frame(bars=[*_make_bars(found)], counters=counters, levels=levels)


def _find_first(found: dict[str, dict[str, float]], names: str) -> dict[str, float]:
    return next(filter(None, map(found.get, names.split())), {})


def _make_bars(found: dict[str, dict[str, float]]) -> Iterator[Bar]:
    blocks, usage = found["kv_pool_blocks"], found["vllm:kv_cache_usage_perc"]
    if blocks:
        yield Bar("GPU", blocks["used"], sum(blocks.values()), blocks.get("cached"))
        for medium, capacity in found["kv_pool_tier_capacity_blocks"].items():
            yield Bar(medium, found["kv_pool_tier_blocks"][medium], capacity)
    elif usage:  # the sum of a share of each engine
        sizes = found["vllm:cache_config_info"]
        total = sum(int(size) * count for size, count in sizes.items() if re.fullmatch("[0-9]{1,15}", size))
        share = usage[""] / (sum(sizes.values()) or 1)
        yield Bar("GPU", share * total, total) if total else Bar("GPU", share, 1, unit="")
    else:
        for medium, names in _SGLANG_MEMORY.items():
            used, size, cached = (found[f"sglang:{name}_tokens"].get("") for name in names)
            if size:
                yield Bar(medium, used or found["sglang:num_used_tokens"][""], size, cached, "tokens")


class MirroredStream:
    """An event stream of kv_pool, vLLM or SGLang, followed by a mirror."""

    def __init__(self, subscriber: "KVEventSubscriber", name: str) -> None:
        self._subscriber = subscriber
        self._mirror, self._name = PrefixMirror(), name
        self._mirror.add_publisher(name)
        self._has_begun = False

    def look(self, _: int) -> Frame:
        """Return what is cached; at first after a snapshot. Raises ControlError if no publisher answers."""
        wait_s, limit_s = (0.0, 0.1) if self._has_begun else (0.2, _SNAPSHOT_S)
        deadline_s, is_complete = time.monotonic() + limit_s, False
        while not is_complete and time.monotonic() < deadline_s:
            items = self._subscriber.poll(wait_s)
            for item in items:
                apply_item(self._mirror, item, self._name)
            stream, blocks = self._subscriber.get_statistics(), self._mirror.get_counts(self._name)
            is_ready = self._has_begun or (stream.is_connected and not stream.is_recovering)
            is_complete = is_ready and not items
        self._has_begun = True
        if not stream.is_connected:
            raise ControlError(f"no publisher answers at {self._name}")
        places = sorted(self._mirror.count_by_place(self._name).items())
        rows = [{"place": f"{medium}, group {group}", "num_blocks": num} for (group, medium), num in places]
        counters: dict[str, float] = {"stored": blocks.num_stored, "removed": blocks.num_removed}
        levels = {"waits for missed": stream.is_recovering, "lost batches": stream.counts.num_lost}
        return Frame(counters=counters, levels=levels, tables={"cached": rows})
