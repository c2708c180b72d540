"""Measure the cost and the gain of compaction in a full cache. See benchmarks/README.md."""

import gc
import random
import statistics
import time
from typing import Any

from measuring import Options, make_parser, read_options, start_run, write_results
from request_runs import Documents

from kv_pool import BlockAllocationRequest, GPUKVPool, GroupId, SequenceId
from kv_pool.contiguous.defragmenter import Defragmenter

BLOCK_SIZE = 16
RUN_LENGTH = 16
NUM_DOCUMENTS = 1_000
MODES = ("no compaction", "packed", "default", "64 a step", "64 a step, evicting")


class Life:
    """Growing requests for repeatedly requested documents, each with its own tail.

    Every block is cached, in use or not. After the first requests no block of the pool is empty.
    """

    def __init__(self, num_blocks: int, use: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = GPUKVPool(num_blocks, BLOCK_SIZE, run_length=RUN_LENGTH)
        self.num_wanted = int(use * num_blocks)
        self.documents = Documents(NUM_DOCUMENTS, 2.5, self.rng)
        self.running: dict[SequenceId, list[Any]] = {}
        self.num_requests = self.num_taken = self.num_asked = self.num_hits = 0

    def step(self) -> None:
        """Start one request, end as many as it needs, and grow eight others by a block."""
        hashes = self.documents.draw(11)
        while self.count_in_use() + len(hashes) > self.num_wanted and self.running:
            self.end(self.rng.choice(list(self.running)))
        self.num_requests += 1
        sequence_id = SequenceId(self.num_requests)
        hits = self.pool.claim_prefix(sequence_id, hashes)
        self.num_asked += len(hashes)
        self.num_hits += len(hits)
        self.running[sequence_id] = hashes[: len(hits)]
        self.grow(sequence_id, hashes[len(hits) :])
        for _ in range(8):
            if self.count_in_use() < self.num_wanted:
                self.grow(self.rng.choice(list(self.running)), self.documents.make_tail(1))

    def grow(self, sequence_id: SequenceId, hashes: list[Any]) -> None:
        self.pool.allocate(BlockAllocationRequest(len(hashes), sequence_id, contiguous="no"))
        self.num_taken += len(hashes)
        self.running[sequence_id] += hashes
        self.pool.cache_prefix(sequence_id, self.running[sequence_id])

    def end(self, sequence_id: SequenceId) -> None:
        self.pool.free_sequence(sequence_id)
        del self.running[sequence_id]

    def count_in_use(self) -> int:
        return self.pool.total_blocks - self.pool.get_free_blocks()

    def list_cached(self) -> list[bytes | None]:
        """Return the keys of the free blocks, the next to be evicted first; None for an empty block."""
        return [block.block_hash for block in self.pool.block_pool.free_block_queue.get_all_free_blocks()]

    def count_hits(self) -> list[int]:
        """Return how many blocks of each document would be hit now."""
        pool = self.pool.block_pool
        found = []
        for document, size in enumerate(self.documents.sizes):
            hashes = enumerate(self.documents.list_hashes(document))
            missing = (at for at, name in hashes if not pool.get_cached_block(name, [GroupId(0)]))
            found.append(next(missing, size))
        return found


def measure(options: Options, use: float, mode: str) -> dict[str, Any]:
    life = Life(options.blocks, use, options.seed)
    pool = life.pool
    is_bounded = mode.startswith("64")
    defragmenter = Defragmenter(
        pool,
        interval_s=0,
        max_moves=64 if is_bounded else None,
        max_evictions=options.blocks // 100 if "evicting" in mode else 0,
    )
    rates: list[float] = []
    step_us: list[float] = []
    empty = num_moved = num_evicted = num_differences = num_compared = 0
    before = (0, 0, 0)
    gc.collect()
    for step in range(options.steps):
        life.step()
        keys = life.list_cached()
        evictions = pool.block_pool.num_evictions
        hits = life.count_hits() if step % 100 == 0 else None
        start = time.perf_counter_ns()
        moved = 0
        if mode == "packed":
            moved = pool.defragment() if pool.get_fragmentation_rate() > defragmenter.threshold else 0
        elif mode != "no compaction":
            moved = defragmenter.step()
        elapsed_us = (time.perf_counter_ns() - start) / 1e3
        if step == options.steps // 4:  # the cache is full from here on
            before = (life.num_taken, life.num_asked, life.num_hits)
        if step >= options.steps // 4:
            num_moved += moved
            num_evicted += pool.block_pool.num_evictions - evictions
            num_differences += keys != life.list_cached()
            if hits is not None:
                num_compared += 1
                num_differences += hits != life.count_hits()
            empty += keys.count(None)
            rates.append(pool.get_fragmentation_rate())
            if moved:
                step_us.append(elapsed_us)
    after = (life.num_taken, life.num_asked, life.num_hits)
    num_taken, num_asked, num_hits = (last - first for first, last in zip(before, after, strict=True))
    return {
        "use": use,
        "mode": mode,
        "unusable_share": {"mean": statistics.mean(rates), "max": max(rates)},
        "steps_above_10_percent": sum(rate > 0.10 for rate in rates) / len(rates),
        "moves_per_block": num_moved / num_taken,
        "evicted_by_compaction": num_evicted,
        "steps_with_other_keys_or_hits": num_differences,
        "hits_compared": num_compared,
        "hit_rate": num_hits / num_asked,
        "empty_blocks": empty / len(rates),
        "step_us": {"median": statistics.median(step_us), "max": max(step_us)} if step_us else None,
        "blocks_taken": num_taken,
    }


def show(row: dict[str, Any]) -> None:
    step = row["step_us"]
    times = f"{step['median']:>10.0f}{step['max']:>9.0f}" if step else f"{'-':>10}{'-':>9}"
    rates = row["unusable_share"]
    print(
        f"{row['use']:>6.0%}  {row['mode']:<20}{rates['mean']:>7.1%}{rates['max']:>7.1%}"
        f"{row['moves_per_block']:>9.2f}{row['evicted_by_compaction']:>9,}"
        f"{row['steps_with_other_keys_or_hits']:>9,}{row['hit_rate']:>8.2%}{times}"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--use", type=float, nargs="+", default=[0.5, 0.8, 0.9, 0.95])
    options = read_options(parser, blocks=800, steps=300, use=[0.9])
    provenance = start_run(options)
    print(
        f"{'in use':>6}  {'compaction':<20}{'U(16)':>7}{'max':>7}{'moves/bl':>9}{'evicted':>9}{'changes':>9}"
        f"{'hits':>8}{'step us':>10}{'max us':>9}"
    )
    rows = []
    for use in options.use:
        for name in MODES:
            rows.append(measure(options, use, name))
            show(rows[-1])
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
