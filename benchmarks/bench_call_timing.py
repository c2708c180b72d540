"""Measure the cost of timing `GPUKVPool`'s calls. See benchmarks/README.md."""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from platform import python_version

from measuring import find_cpu_model

import kv_pool
from kv_pool import BlockAllocationRequest, BlockId, GPUKVPool, SequenceId
from kv_pool.adapter.allocation import as_request

NUM_REQUESTS = 100
REQUEST_BLOCKS = 10


class UntimedPool(GPUKVPool):
    """The same calls without timing."""

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        request = as_request(request)
        with self.lock:
            return [block.block_id for block in self._allocation.append(request)]

    def free(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        with self.lock:
            self.holdings.drop(*self.holdings.find_drops(block_ids, sequence_id))


class UntimedAgain(UntimedPool):
    """The same class again; its difference is the noise."""


def measure(pool: GPUKVPool, requests: list[BlockAllocationRequest]) -> tuple[float, float]:
    """Return processor time in nanoseconds per call of `allocate` and of `free`."""
    started = time.thread_time_ns()
    given = [pool.allocate(request) for request in requests]
    between = time.thread_time_ns()
    for ids in given:
        pool.free(ids)
    ended = time.thread_time_ns()
    return (between - started) / len(requests), (ended - between) / len(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3000)
    options = parser.parse_args()
    provenance = {
        "command": " ".join(["python", "benchmarks/bench_call_timing.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": find_cpu_model(),
        "python": python_version(),
        "kv_pool": f"{kv_pool.__version__}, {'compiled' if kv_pool.COMPILED else 'plain'}",
    }
    print("  ".join(f"{name}: {value}" for name, value in provenance.items()))
    requests = [BlockAllocationRequest(REQUEST_BLOCKS, SequenceId(number)) for number in range(NUM_REQUESTS)]
    pools = [(kind.__name__, kind(options.blocks, 16)) for kind in (UntimedPool, GPUKVPool, UntimedAgain)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in pools}
    gc.disable()
    for _ in range(options.runs):
        pools = [*pools[1:], pools[0]]  # each pool is first equally often
        for name, pool in pools:
            times[name].append(measure(pool, requests))
    print(
        f"\n{'nanoseconds a call of 10 blocks':<34} {'median':>8} {'p10':>8} {'p90':>8}   against UntimedPool"
    )
    for at, call in enumerate(("allocate", "free")):
        untimed = statistics.median(pair[at] for pair in times["UntimedPool"])
        for name, pairs in times.items():
            values = sorted(pair[at] for pair in pairs)
            median = statistics.median(values)
            p10, p90 = values[len(values) // 10], values[len(values) * 9 // 10]
            print(f"{call:<10} {name:<23} {median:8.0f} {p10:8.0f} {p90:8.0f}   {median / untimed - 1:+.1%}")


if __name__ == "__main__":
    main()
