"""A report on a paged KV cache claims five gains. What are they here? See benchmarks/README.md."""

import heapq
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import make_parser, read_options, start_run, write_results
from request_runs import AGENTIC

import kv_pool
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.report import ReplayReport
from kv_pool.lab.settings import EngineRates, ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.trace import Trace, TraceRequest
from kv_pool.manager.kv_cache_manager import KVCacheManager

BATCH, MAX_LENGTH, BLOCK_SIZE = 256, 2048, 16
TOKEN_BYTES = 64 * 1024
"""Bytes of K and V per token such that 256 sequences of 2,048 tokens need the claim's 32 GB."""
ALL_BLOCKS = BATCH * MAX_LENGTH // BLOCK_SIZE
COPIES = 4
"""Copies of each request, so that the end of the replay, with few running requests, has little weight."""
AT_ONCE = EngineRates(prefill_tokens_per_s=1e7, speedup=1e6, max_running=BATCH)
"""All requests wait from the start; their number or memory is the limit, not the processor."""


@dataclass
class Workload:
    """Requests of at most 2,048 tokens, prompt and output together, that all arrive at the start."""

    name: str
    requests: list[TraceRequest]
    path: str

    def list_lengths(self) -> list[int]:
        return [request.input_length + request.output_length for request in self.requests]


def make_workloads(trace: Trace, folder: Path, limit: int | None) -> list[Workload]:
    """Return the trace's workloads: short requests, with shared and with unique ids; and all requests,
    with lengths divided such that the longest is 2,048."""
    requests = list(trace)[:limit]
    longest = max(request.input_length + request.output_length for request in requests)
    short = [one for one in requests if one.input_length + one.output_length <= MAX_LENGTH]
    scaled = [
        replace(
            one,
            input_length=max(1, one.input_length * MAX_LENGTH // longest),
            output_length=max(1, one.output_length * MAX_LENGTH // longest),
        )
        for one in requests
    ]
    return [
        write_workload("short", short, folder, trace.block_size or 1, True),
        write_workload("short, nothing shared", short, folder, trace.block_size or 1, False),
        write_workload("scaled, nothing shared", scaled, folder, trace.block_size or 1, False),
    ]


def write_workload(
    name: str, requests: list[TraceRequest], folder: Path, trace_block_size: int, shares: bool
) -> Workload:
    """Write the requests, `COPIES` times, to a trace file; all arrive at once."""
    path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.jsonl"
    next_id = 0
    with path.open("w") as file:
        for number, request in enumerate(requests * COPIES):
            if shares:
                # Copies share only id 0, which all requests of the trace share.
                shift = number // len(requests) << 32
                ids = [hash_id + shift if hash_id else 0 for hash_id in request.hash_ids or []]
            else:
                num_ids = -(-request.input_length // trace_block_size)
                ids = list(range(next_id, next_id + num_ids))
                next_id += num_ids
            record = {
                "timestamp": 0,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": ids,
            }
            file.write(json.dumps(record) + "\n")
    return Workload(name, requests, str(path))


def replay(workload: Workload, rates: EngineRates, trace_block_size: int, **changes: Any) -> ReplayReport:
    """Replay a workload through a pool of the preallocated memory, in blocks of 16 tokens."""
    settings = ReplaySettings(
        workload.path,
        ALL_BLOCKS,
        block_size=BLOCK_SIZE,
        clock="trace",
        rates=rates,
        trace_block_size=trace_block_size,
    )
    return run_replay(replace(settings, **changes))


# ---- fragmentation -------------------------------------------------------------------------------


def measure_inner_waste(workload: Workload, trace_block_size: int) -> float:
    """Return the share of empty slots in the manager's blocks, over batches of 256 at full length."""
    num_slots = num_tokens = 0
    lengths = workload.list_lengths()
    for first in range(0, len(lengths), BATCH):
        manager = KVCacheManager(kv_pool.BlockPool(ALL_BLOCKS + 1, False, BLOCK_SIZE))
        for number, length in enumerate(lengths[first : first + BATCH]):
            traced = TraceRequest(number, 0.0, length, 0, [], None)
            request = ReplayRequest.from_trace(traced, BLOCK_SIZE, trace_block_size=trace_block_size)
            if manager.allocate_slots(request, length) is None:
                raise RuntimeError("256 sequences do not fit into their preallocated memory")
            num_slots += len(manager.get_block_ids(request.request_id)) * BLOCK_SIZE
            num_tokens += length
    return 1 - num_tokens / num_slots


class FirstFit:
    """First fit: contiguous slots for each sequence's final length, in the first gap that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self.holes = [(0, num_slots)]
        self.num_free = num_slots

    def take(self, length: int) -> int | None:
        for index, (start, size) in enumerate(self.holes):
            if size >= length:
                self.holes[index : index + 1] = [(start + length, size - length)] if size > length else []
                self.num_free -= length
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        self.num_free += length
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (start, length)]):
            if merged and sum(merged[-1]) == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self.holes = merged


def measure_outer_waste(workload: Workload) -> float:
    """Return the mean share of free memory when first fit finds no gap for the next request."""
    memory = FirstFit(BATCH * MAX_LENGTH)
    ends: list[tuple[float, int, int]] = []
    now = 0.0
    shares = []
    for request, length in zip(workload.requests, workload.list_lengths(), strict=True):
        start = memory.take(length)
        while start is None:
            shares.append(memory.num_free / (BATCH * MAX_LENGTH))
            now, old_start, old_length = heapq.heappop(ends)
            memory.give_back(old_start, old_length)
            start = memory.take(length)
        heapq.heappush(ends, (now + max(1, request.output_length), start, length))
    return statistics.fmean(shares or [0.0])


# ---- latency -------------------------------------------------------------------------------------


def time_buffers(touches: bool, runs: int) -> float:
    """Return microseconds to allocate and free system memory for one sequence of maximum length."""
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        buffer = np.empty(MAX_LENGTH * TOKEN_BYTES, np.uint8)
        if touches:
            buffer[::4096] = 1
        del buffer
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def time_slots(runs: int) -> float:
    """Return microseconds to take one of 256 preallocated slots from a list, and to return it."""
    places = list(range(BATCH))
    random.Random(0).shuffle(places)
    start = time.perf_counter_ns()
    for _ in range(runs):
        place = places.pop()
        places.append(place)
    return (time.perf_counter_ns() - start) / runs / 1e3


def time_manager(report: ReplayReport) -> float:
    """Return microseconds in the manager for one sequence of a replay: all allocations and the free."""
    num_requests = report.requests - report.refused_requests
    return (report.allocate.total_ns + report.free.total_ns) / num_requests / 1e3


# ---- the five claims -----------------------------------------------------------------------------


def to_gib(num_blocks: float) -> float:
    return num_blocks * BLOCK_SIZE * TOKEN_BYTES / 2**30


def run_experiment(trace: Trace, limit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(claim: str, claimed: str, measured: str, meaning: str, **values: float) -> None:
        rows.append(
            {"claim": claim, "claimed": claimed, "measured": measured, "meaning": meaning, "values": values}
        )
        print(f"{claim:14}{claimed:>18}{measured:>20}   {meaning}", flush=True)

    trace_block_size = trace.block_size or 1
    print(f"{'':14}{'claimed':>18}{'measured':>20}")
    with tempfile.TemporaryDirectory() as folder:
        workloads = make_workloads(trace, Path(folder), limit)
        in_batch = {one.name: replay(one, AT_ONCE, trace_block_size) for one in workloads}
        for one in workloads:
            report = in_batch[one.name]
            peak, mean = to_gib(report.peak_blocks_in_use), to_gib(report.mean_blocks_in_use)
            add(
                "memory",
                "-60 %, 32 -> 22 GB",
                f"{peak / 32 - 1:+.0%}, 32 -> {peak:.1f} GB",
                f"{one.name}: most in use while {report.peak_running} run; mean over time {mean:.1f}",
                peak_gib=peak,
                mean_gib=mean,
                mean_length=statistics.mean(one.list_lengths()),
            )
        for one in workloads[1:]:
            before = 1 - statistics.mean(one.list_lengths()) / MAX_LENGTH
            first_fit, after = measure_outer_waste(one), measure_inner_waste(one, trace_block_size)
            add(
                "fragmentation",
                "30-40 % -> < 5 %",
                f"{before:.0%} -> {after:.1%}",
                f"{one.name}: reserved, never used; first fit of known lengths leaves {first_fit:.1%}",
                preallocated=before,
                first_fit=first_fit,
                blocks=after,
            )
        for name, path, capacity, block_size in [
            ("short requests, this memory", workloads[0].path, ALL_BLOCKS, BLOCK_SIZE),
            ("conversation, 10,000 blocks of 512", str(trace.path), 10_000, None),
            ("conversation, nothing evicted", str(trace.path), 200_000, None),
            ("coding agents, 10,000 blocks of 64", str(AGENTIC), 10_000, None),
            ("coding agents, nothing evicted", str(AGENTIC), 310_000, None),
        ]:
            if not Path(path).is_file():
                print(f"missing: {path}", file=sys.stderr)
                continue
            settings = ReplaySettings(path, capacity, block_size=block_size, limit=limit)
            report = run_replay(
                replace(settings, trace_block_size=512 if path == workloads[0].path else None)
            )
            rate = report.token_hit_rate
            add(
                "reuse", "0 -> 30-50 %", f"0 -> {rate:.0%}", f"{name}: prompt tokens hit", token_hit_rate=rate
            )
        for one in workloads:
            report = replay(one, replace(AT_ONCE, max_running=1_000_000), trace_block_size, watermark=0.01)
            add(
                "concurrency",
                "4 times",
                f"{report.mean_running / BATCH:.1f} times",
                f"{one.name}: {report.mean_running:,.0f} instead of 256 run, mean over time; peak "
                f"{report.peak_running:,}; {report.preempted:,} preempted",
                mean_running=report.mean_running,
                peak_running=report.peak_running,
                preempted=report.preempted,
            )
        ours = time_manager(in_batch["short, nothing shared"])
        for name, theirs in [
            ("memory of the system for the longest length, written to once", time_buffers(True, 5)),
            ("the same, not written to", time_buffers(False, 50)),
            ("a preallocated place from a list", time_slots(100_000)),
        ]:
            add(
                "latency",
                "-70 %",
                f"{theirs:,.2f} -> {ours:,.0f} µs",
                f"a sequence, all its blocks; before: {name}",
                ours_us=ours,
                theirs_us=theirs,
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__, seeded=False)
    parser.add_argument("--trace", default="mooncake_conversation", help="name of a bundled trace, or a file")
    parser.add_argument("--limit", type=int, help="maximum number of requests per trace; for a smoke test")
    options = read_options(parser)
    trace = Trace(options.trace)
    provenance = start_run(options, trace_sha256=trace.digest())
    rows = run_experiment(trace, options.limit)
    facts = {"batch": BATCH, "max_length": MAX_LENGTH, "block_size": BLOCK_SIZE, "token_bytes": TOKEN_BYTES}
    write_results(options, {"provenance": provenance, **facts, "rows": rows})


if __name__ == "__main__":
    main()
