"""Compare `GPUKVPool` with the targets of the design for pools by block id. See benchmarks/README.md."""

import argparse
import random
import sys
import time
from statistics import mean, median

from measuring import find_cpu_model

from kv_pool import COMPILED, BlockAllocationRequest, GPUKVPool, SequenceId, __version__

NUM_BLOCKS = 10_000


def time_call(call: object, *arguments: object) -> tuple[float, object]:
    """Return processor seconds of this thread, and the call's result."""
    started = time.thread_time_ns()
    answer = call(*arguments)  # type: ignore[operator]
    return (time.thread_time_ns() - started) / 1e9, answer


def fill_and_free() -> tuple[list[float], list[float]]:
    """Run the first part: 1,000 requests of 10 blocks, one sequence each; then free all."""
    pool = GPUKVPool(total_blocks=NUM_BLOCKS, block_size=16)
    taking, freeing = [], []
    given = []
    for number in range(1000):
        request = BlockAllocationRequest(num_blocks=10, sequence_id=SequenceId(number))
        seconds, ids = time_call(pool.allocate, request)
        taking.append(seconds)
        given.append(ids)
    for ids in given:
        freeing.append(time_call(pool.free, ids)[0])
    return taking, freeing


def live_and_compact(seed: int) -> tuple[float, float, float, int, float]:
    """Run the second and third part in a pool with free blocks, such that 1,000 blocks or more must move."""
    rng = random.Random(seed)
    pool = GPUKVPool(total_blocks=NUM_BLOCKS, block_size=16, eviction_policy=None)
    for _ in range(1000):
        sequence_id = SequenceId(rng.randint(0, 100))
        try:
            ids = pool.allocate(
                BlockAllocationRequest(num_blocks=rng.randint(1, 32), sequence_id=sequence_id)
            )
        except MemoryError:
            break
        if rng.random() < 0.5:
            pool.free(ids[: len(ids) // 2])
    utilization = pool.get_statistics().utilization
    for sequence_id in rng.sample(pool.list_sequences(), 20):
        pool.free_sequence(sequence_id)
    before = pool.get_fragmentation_rate()
    seconds, moved = time_call(pool.defragment, 0, 1000)
    pool.defragment()
    assert isinstance(moved, int)
    return utilization, before, pool.get_fragmentation_rate(), moved, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    GPUKVPool(64, 16).defragment()  # so that imports are not measured
    taking, freeing = fill_and_free()
    utilization, before, after, moved, seconds = live_and_compact(options.seed)
    targets = [
        ("allocate 10 blocks, mean", mean(taking) * 1e6, "us", 20.0),
        ("free 10 blocks, mean", mean(freeing) * 1e6, "us", 10.0),
        ("fragmentation after compaction", after * 100, "%", 10.0),
        (f"compaction, {moved:,} blocks moved", seconds * 1e3, "ms", 5.0),
        ("blocks not in use when full", (1 - utilization) * 100, "%", 10.0),
    ]
    state = "compiled" if COMPILED else "plain"
    print(f"kv_pool {__version__}, {state}, Python {sys.version.split()[0]}, {find_cpu_model()}")
    print(f"medians: allocate {median(taking) * 1e6:.1f} us, free {median(freeing) * 1e6:.1f} us")
    print(f"fragmentation before compaction: {before:.1%}")
    for name, value, unit, limit in targets:
        print(f"{name:34} {value:8.2f} {unit:2}  target < {limit:g} {unit}")
    missed = [name for name, value, _, limit in targets if value >= limit]
    assert not missed, f"missed: {', '.join(missed)}"


if __name__ == "__main__":
    main()
