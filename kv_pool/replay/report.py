"""`ReplayReport`: what a replay did, with enough provenance to do it again."""

import platform
import sys
from array import array
from datetime import UTC, datetime
from importlib.metadata import version
from math import fsum
from statistics import median
from typing import TypeVar

import msgspec

from kv_pool.core.mode import COMPILED
from kv_pool.errors import TraceError
from kv_pool.version import __version__


class CallTimes(msgspec.Struct):
    """Wall time of one kind of allocator call, in nanoseconds."""

    calls: int = 0
    median_ns: int = 0
    p99_ns: int = 0
    total_ns: int = 0


def summarize_calls(durations_ns: "array[int]") -> CallTimes:
    """Median, 99th percentile (nearest rank) and sum."""
    if not durations_ns:
        return CallTimes()
    ordered = sorted(durations_ns)
    return CallTimes(
        calls=len(ordered),
        median_ns=int(median(ordered)),
        p99_ns=_find_p99(ordered),
        total_ns=sum(ordered),
    )


class Waits(msgspec.Struct):
    """How long requests waited for blocks, in simulated milliseconds."""

    requests: int = 0
    mean_ms: float = 0.0
    median_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


def summarize_waits(waits_ms: "array[float]") -> Waits:
    """Mean, median, 99th percentile (nearest rank) and the longest."""
    if not waits_ms:
        return Waits()
    ordered = sorted(waits_ms)
    return Waits(
        requests=len(ordered),
        mean_ms=fsum(ordered) / len(ordered),
        median_ms=median(ordered),
        p99_ms=_find_p99(ordered),
        max_ms=ordered[-1],
    )


_Number = TypeVar("_Number", int, float)


def _find_p99(ordered: list[_Number]) -> _Number:
    return ordered[max(0, -(-len(ordered) * 99 // 100) - 1)]


class Provenance(msgspec.Struct):
    """Where a report comes from."""

    command: list[str]
    date: str
    kv_pool: str
    compiled: bool
    python: str
    platform: str
    dependencies: dict[str, str]
    trace: str
    trace_sha256: str
    trace_block_size: int | None
    seed: str


def take_provenance(trace: str, digest: str, trace_block_size: int | None, seed: str) -> Provenance:
    """Provenance of a run of this process, now."""
    return Provenance(
        command=sys.argv,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_pool=__version__,
        compiled=COMPILED,
        python=platform.python_version(),
        platform=platform.platform(),
        dependencies={name: version(name) for name in ("msgspec", "xxhash", "numpy", "cbor2")},
        trace=trace,
        trace_sha256=digest,
        trace_block_size=trace_block_size,
        seed=seed,
    )


class TierReport(msgspec.Struct):
    """What a colder tier did in a replay. Blocks are of one KV cache group.

    Attributes:
        medium: CPU or STORAGE.
        capacity: in blocks.
        blocks_hit, tokens_hit: hits that it gave, part of the report's. Of a token for which blocks of
            several groups are read, the coldest one counts.
        blocks_written: from the tier above or the device.
        blocks_read: for hits; what tokens after a window do not attend to is not read.
        bytes_moved: both ways; 0 where a block's bytes are not known.
        evictions: blocks that it had no more room for.
        blocks_held: at the end, which is the most.
    """

    medium: str
    capacity: int
    blocks_hit: int = 0
    tokens_hit: int = 0
    blocks_written: int = 0
    blocks_read: int = 0
    bytes_moved: int = 0
    evictions: int = 0
    blocks_held: int = 0


class InfiniteCache(msgspec.Struct):
    """Hits of a cache in which every prompt block stays, requests coming one at a time.

    Attributes:
        num_blocks: distinct full prompt blocks; a pool of this size evicts next to nothing.
        blocks_hit, tokens_hit: found cached, of all requests; none is refused.
        block_hit_rate, token_hit_rate: the same as shares of full prompt blocks and of prompt tokens.
    """

    num_blocks: int = 0
    blocks_hit: int = 0
    tokens_hit: int = 0
    block_hit_rate: float = 0.0
    token_hit_rate: float = 0.0


class ReplayReport(msgspec.Struct):
    """What a replay did. Blocks are pool blocks of `block_size` tokens of one KV cache group.

    Attributes:
        num_blocks: capacity, the null block not counted.
        requests, refused_requests: refused are those that could not fit even alone; they count in both
            hit-rate denominators.
        preempted: how often a running request lost its blocks to another (trace clock).
        swapped_out, swapped_in: how many of these were copied to the host instead of computed anew, and how
            often such a request came back.
        blocks_swapped_out, blocks_swapped_in: blocks copied for it; those that were on the other side already
            are not.
        bytes_moved: by these copies, both ways.
        tokens_recomputed: tokens computed again after a preemption.

        late_requests: whose timestamp lay before their predecessor's; they arrive with it (trace clock).
        broken_lines: lines passed over; `first_broken` says what was wrong with the first.
        blocks_looked_up: full prompt blocks of all requests.
        blocks_hit, tokens_hit: found cached when a request was first admitted, on the device or in a tier.
        tokens_out: generated tokens. The instant clock computes prompts only, so it has none.
        tiers: the colder tiers, from warm to cold, and what of these hits was theirs.
        evictions: blocks that lost their hash because they were handed out again.
        peak_blocks_in_use, mean_blocks_in_use: the mean is over time (trace clock) or requests.
        blocks_per_run: mean length of the runs of consecutive ids in the block tables.
        peak_running, mean_running: requests that hold blocks; the mean is over time (trace clock).
        waiting: of requests that ended: from arrival to admission, and after preemptions (trace clock).
        simulated_ms: from first arrival to last completion (trace clock).
        wall_seconds: what the replay itself took.
        infinite_cache: what a cache without an end would have hit; in the reports of a sweep.
        look_up, allocate, free: time per call of the manager.
    """

    block_size: int
    num_blocks: int
    convention: str
    clock: str
    requests: int = 0
    refused_requests: int = 0
    preempted: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    bytes_moved: int = 0
    tokens_recomputed: int = 0
    late_requests: int = 0
    broken_lines: int = 0
    first_broken: str | None = None
    blocks_looked_up: int = 0
    blocks_hit: int = 0
    tokens_in: int = 0
    tokens_hit: int = 0
    tokens_out: int = 0
    block_hit_rate: float = 0.0
    token_hit_rate: float = 0.0
    mean_request_token_hit_rate: float = 0.0
    evictions: int = 0
    peak_blocks_in_use: int = 0
    mean_blocks_in_use: float = 0.0
    blocks_per_run: float = 0.0
    peak_running: int = 0
    mean_running: float = 0.0
    waiting: Waits = msgspec.field(default_factory=Waits)
    simulated_ms: float = 0.0
    wall_seconds: float = 0.0
    look_up: CallTimes = msgspec.field(default_factory=CallTimes)
    allocate: CallTimes = msgspec.field(default_factory=CallTimes)
    free: CallTimes = msgspec.field(default_factory=CallTimes)
    tiers: list[TierReport] = msgspec.field(default_factory=list)
    infinite_cache: InfiniteCache | None = None
    settings: dict[str, str | bool | int | float] = msgspec.field(default_factory=dict)
    provenance: Provenance | None = None


def encode_json(report: object) -> bytes:
    """A report, or a list of them, as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def read_reports(path: str) -> list[ReplayReport]:
    """The reports of a file that `write_json` wrote. Raises TraceError if there are none."""
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read(), type=list[ReplayReport] | ReplayReport)
    except OSError as error:
        raise TraceError(f"{path}: can not read the reports: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}: not the JSON file of a sweep or a replay: {error}") from error
    reports = [found] if isinstance(found, ReplayReport) else found
    if not reports:
        raise TraceError(f"{path}: no report in it")
    return reports


def write_json(report: object, path: str) -> None:
    """Write a report (or a list of them) as indented JSON. Raises TraceError where the file can not be."""
    text = encode_json(report)
    try:
        with open(path, "wb") as file:
            file.write(text + b"\n")
    except OSError as error:
        raise TraceError(f"{path}: can not write the report: {error.strerror}") from error
