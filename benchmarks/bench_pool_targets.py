"""Compare `GPUKVPool` with the targets of the design for pools by block id. See benchmarks/README.md."""

import random
from statistics import mean, median

from measuring import make_parser, read_options, start_run, timed, write_results

from kv_pool import BlockAllocationRequest, GPUKVPool, SequenceId

NUM_BLOCKS = 10_000


def fill_and_free() -> tuple[list[float], list[float]]:
    """Run the first part: 1,000 requests of 10 blocks, one sequence each; then free all."""
    pool = GPUKVPool(total_blocks=NUM_BLOCKS, block_size=16)
    taking_us: list[float] = []
    freeing_us: list[float] = []
    requests = [BlockAllocationRequest(10, SequenceId(number)) for number in range(1000)]
    for ids in [timed(taking_us, pool.allocate, request) for request in requests]:
        timed(freeing_us, pool.free, ids)
    return taking_us, freeing_us


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
    times_us: list[float] = []
    moved: int = timed(times_us, pool.defragment, 0, 1000)
    pool.defragment()
    return utilization, before, pool.get_fragmentation_rate(), moved, times_us[0]


def main() -> None:
    options = read_options(make_parser(__doc__))
    provenance = start_run(options)
    GPUKVPool(64, 16).defragment()  # so that imports are not measured
    taking_us, freeing_us = fill_and_free()
    utilization, before, after, moved, compaction_us = live_and_compact(options.seed)
    targets = [
        ("allocate 10 blocks, mean", mean(taking_us), "us", 20.0),
        ("free 10 blocks, mean", mean(freeing_us), "us", 10.0),
        ("fragmentation after compaction", after * 100, "%", 10.0),
        (f"compaction, {moved:,} blocks moved", compaction_us / 1e3, "ms", 5.0),
        ("blocks not in use when full", (1 - utilization) * 100, "%", 10.0),
    ]
    print(f"medians: allocate {median(taking_us):.1f} us, free {median(freeing_us):.1f} us")
    print(f"fragmentation before compaction: {before:.1%}")
    for name, value, unit, limit in targets:
        print(f"{name:34} {value:8.2f} {unit:2}  target < {limit:g} {unit}")
    write_results(options, {"provenance": provenance, "targets": targets})
    missed = [name for name, value, _, limit in targets if value >= limit]
    assert not missed, f"missed: {', '.join(missed)}"


if __name__ == "__main__":
    main()
