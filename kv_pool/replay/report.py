"""`ReplayReport`: what a replay did, with enough provenance to do it again."""

import platform
import sys
from array import array
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median

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
        p99_ns=ordered[max(0, -(-len(ordered) * 99 // 100) - 1)],
        total_ns=sum(ordered),
    )


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


class ReplayReport(msgspec.Struct):
    """What a replay did. Blocks are pool blocks of `block_size` tokens.

    Attributes:
        num_blocks: capacity, the null block not counted.
        requests, refused_requests: refused are those that could not fit even alone; they count in both
            hit-rate denominators.
        preempted: how often a running request lost its blocks to another (trace clock).
        late_requests: whose timestamp lay before their predecessor's; they arrive with it (trace clock).
        broken_lines: lines passed over; `first_broken` says what was wrong with the first.
        blocks_looked_up: full prompt blocks of all requests.
        blocks_hit, tokens_hit: found cached when a request was first admitted.
        evictions: blocks that lost their hash because they were handed out again.
        peak_blocks_in_use, mean_blocks_in_use: the mean is over time (trace clock) or requests.
        blocks_per_run: mean length of the runs of consecutive ids in the block tables.
        simulated_ms: from first arrival to last completion (trace clock).
        wall_seconds: what the replay itself took.
        look_up, allocate, free: time per call of the manager.
    """

    block_size: int
    num_blocks: int
    convention: str
    clock: str
    requests: int = 0
    refused_requests: int = 0
    preempted: int = 0
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
    simulated_ms: float = 0.0
    wall_seconds: float = 0.0
    look_up: CallTimes = msgspec.field(default_factory=CallTimes)
    allocate: CallTimes = msgspec.field(default_factory=CallTimes)
    free: CallTimes = msgspec.field(default_factory=CallTimes)
    settings: dict[str, str | bool | int | float] = msgspec.field(default_factory=dict)
    provenance: Provenance | None = None


def write_json(report: object, path: str) -> None:
    """Write a report (or a list of them) as indented JSON. Raises TraceError where the file can not be."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    try:
        with open(path, "wb") as file:
            file.write(text + b"\n")
    except OSError as error:
        raise TraceError(f"{path}: can not write the report: {error.strerror}") from error
