"""`ReplayReport`: the results of a replay, with the provenance needed to repeat it."""

import csv
import platform
import subprocess
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from kv_pool.core.block import COMPILED
from kv_pool.errors import TraceError
from kv_pool.lab.request_outcomes import BreakdownRow
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_writer import writing
from kv_pool.version import __version__

_GIT_S = 5.0


class CallTimes(msgspec.Struct):
    """The wall times of one kind of allocator call, in nanoseconds."""

    calls: int = 0
    median_ns: int = 0
    p99_ns: int = 0
    total_ns: int = 0


def summarize_calls(durations_ns: "array[int]") -> CallTimes:
    """Return the count, median, 99th percentile (nearest rank) and sum of the durations."""
    if not durations_ns:
        return CallTimes()
    ordered = sorted(durations_ns)
    return CallTimes(
        calls=len(ordered),
        median_ns=int(median(ordered)),
        p99_ns=ordered[find_rank(len(ordered), 99) - 1],
        total_ns=sum(ordered),
    )


class Waits(msgspec.Struct):
    """The times that requests waited for blocks, in simulated milliseconds."""

    requests: int = 0
    mean_ms: float = 0.0
    median_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


def summarize_waits(waits_ms: "array[float]") -> Waits:
    """Return the count, mean, median, 99th percentile (nearest rank) and maximum of the waiting times."""
    if not waits_ms:
        return Waits()
    ordered = sorted(waits_ms)
    return Waits(
        requests=len(ordered),
        mean_ms=fsum(ordered) / len(ordered),
        median_ms=median(ordered),
        p99_ms=ordered[find_rank(len(ordered), 99) - 1],
        max_ms=ordered[-1],
    )


OnProgress = Callable[[str, float | None], None]
"""Called with what is done now, and the share of all that is done; None if that is not known."""

_Report = TypeVar("_Report")


def find_rank(num_values: int, percent: int) -> int:
    """Return the rank of a percentile among some values in ascending order, from 1: the nearest rank."""
    return max(1, -(-num_values * percent // 100))


def find_share(part: float, whole: float) -> float:
    """Return a part as a share of the whole; 0 of nothing."""
    return part / whole if whole else 0.0


class Provenance(msgspec.Struct):
    """The origin of a report: command, versions, trace, seed, and commit of a checkout."""

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
    commit: str | None = None


def find_commit(root: Path) -> str | None:
    """Return the commit of a checkout or worktree of kv_pool.

    None without git, and for another folder, such as that of a project into which the package is installed.
    """
    try:
        is_ours = 'name = "kv_pool"' in (root / "pyproject.toml").read_text().splitlines()
        if not is_ours or not (root / ".git").exists():
            return None
        command = ["git", "--git-dir", str(root / ".git"), "rev-parse", "--verify", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def make_provenance(trace: Trace, digest: str, seed: str) -> Provenance:
    """Return the provenance of a run in this process, now. `digest` is that of the trace."""
    return Provenance(
        command=sys.argv,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_pool=__version__,
        compiled=COMPILED,
        python=platform.python_version(),
        platform=platform.platform(),
        dependencies={name: version(name) for name in ("msgspec", "xxhash", "numpy", "cbor2")},
        trace=str(trace.path),
        trace_sha256=digest,
        trace_block_size=trace.block_size,
        seed=seed,
        commit=find_commit(Path(__file__).parents[2]),
    )


class TierReport(msgspec.Struct):
    """The results of a lower tier in a replay. Blocks are blocks of one KV cache group.

    Attributes:
        medium: CPU or STORAGE.
        capacity: maximum number of blocks.
        blocks_hit, tokens_hit: hits in this tier; included in the report's hits. A token that needs blocks of
            several groups counts in the lowest of their tiers.
        blocks_written: blocks written from the tier above or the device.
        blocks_read: blocks read for hits. Blocks outside a group's window are not read.
        bytes_moved: bytes read and written; 0 if the size of a block is not known.
        evictions: blocks evicted from the tier.
        blocks_held: blocks in the tier at the end, which is the maximum.
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
    """The hits of a cache that never evicts, with one request at a time.

    Attributes:
        num_blocks: distinct full prompt blocks; a pool of this size evicts almost nothing.
        blocks_hit, tokens_hit: hits of all requests; none is refused.
        block_hit_rate, token_hit_rate: hits as shares of all full prompt blocks and of all prompt tokens.
    """

    num_blocks: int = 0
    blocks_hit: int = 0
    tokens_hit: int = 0
    block_hit_rate: float = 0.0
    token_hit_rate: float = 0.0

    def set_rates(self, blocks_looked_up: int, tokens_in: int) -> None:
        """Compute the rates from the hits; 0 of nothing."""
        self.block_hit_rate = find_share(self.blocks_hit, blocks_looked_up)
        self.token_hit_rate = find_share(self.tokens_hit, tokens_in)


class ReplayReport(msgspec.Struct):
    """The results of a replay. Blocks are pool blocks of `block_size` tokens of one KV cache group.

    Attributes:
        num_blocks: capacity of the pool, without the null block.
        requests, refused_requests: all requests, and those that would not fit into the empty pool. Refused
            requests count in both hit-rate denominators.
        preempted: preemptions of running requests (trace clock).
        swapped_out, swapped_in: preempted requests that were swapped out to the host instead of recomputed,
            and swap-ins.
        blocks_swapped_out, blocks_swapped_in: blocks copied by swaps, without blocks that the other side
            already had.
        bytes_moved: bytes copied by swaps in both directions.
        tokens_recomputed: tokens computed again after a preemption.

        late_requests: requests with an earlier timestamp than their predecessor; they arrive with it (trace
            clock).
        broken_lines, first_broken: number of skipped lines, and the error of the first.
        blocks_looked_up: full prompt blocks of all requests.
        blocks_hit, tokens_hit: hits at a request's first admission, on the device or in a lower tier.
        tokens_out: generated tokens; 0 with the instant clock, which computes prompts only.
        tiers: the lower tiers, fastest first, with their share of these hits.
        evictions: blocks that lost their hash because they were reused.
        peak_blocks_in_use, mean_blocks_in_use: the mean is over time (trace clock) or requests.
        p99_blocks_in_use: the least number of blocks not exceeded during 99 % of the time (trace clock).
        blocks_per_run: mean length of the runs of consecutive ids in the block tables.
        peak_running, mean_running: requests that have blocks; the mean is over time (trace clock).
        waiting: waiting times of ended requests: before admission and after preemptions (trace clock).
        simulated_ms: time from the first arrival to the last completion (trace clock).
        wall_seconds: duration of the replay itself.
        infinite_cache: hits of a cache that never evicts; in the reports of a sweep.
        breakdowns: hits by session, turn, tenant, minute or position, if the settings ask for them.
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
    p99_blocks_in_use: int = 0
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
    breakdowns: dict[str, list[BreakdownRow]] = msgspec.field(default_factory=dict)
    settings: dict[str, str | bool | int | float] = msgspec.field(default_factory=dict)
    provenance: Provenance | None = None


def encode_json(report: object) -> bytes:
    """Encode a report, or a list of reports, as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def read_json(path: str, kind: type[_Report], names: str) -> _Report:
    """Return the report in a file written by `write_json`.

    Args:
        names: what the file should contain, for the error messages.
    Raises:
        TraceError: the file cannot be read, or has no such report.
    """
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except OSError as error:
        raise TraceError(f"{path}: cannot read {names}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}: not the JSON of {names}: {error}") from error


def read_reports(path: str) -> list[ReplayReport]:
    """Return the reports of a file written by `write_json`. Raises TraceError if there are none."""
    kind: Any = list[ReplayReport] | ReplayReport
    found = read_json(path, kind, "a sweep or a replay")
    reports = [found] if isinstance(found, ReplayReport) else found
    if not reports:
        raise TraceError(f"{path}: the file contains no report")
    return reports


def write_json(report: object, path: str) -> None:
    """Write a report, or a list of reports, as indented JSON. Raises TraceError if that fails."""
    text = encode_json(report)
    with writing(path, "the report"), open(path, "wb") as file:
        file.write(text + b"\n")


def write_csv_rows(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one or more rows with the same columns as CSV. Raises TraceError.

    Text of undecodable file names is written as its bytes.
    """
    with (
        writing(path, "the table"),
        open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
