"""Measure the cost and the gain of compaction in a full cache. See benchmarks/README.md."""

import argparse
import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

from measuring import describe_run, write_results

import kv_pool
from kv_pool import BlockAllocationRequest, GPUKVPool, GroupId, SequenceId
from kv_pool.contiguous.defragmenter import Defragmenter

BLOCK_SIZE = 16
RUN_LENGTH = 16
NUM_DOCUMENTS = 1_000
USES = (0.5, 0.8, 0.9, 0.95)
MODES = ("no compaction", "packed", "default", "64 a step", "64 a step, evicting")


class Life:
    """Growing requests for repeatedly requested documents, each with its own tail.

    Every block is cached, in use or not. After the first requests no block of the pool is empty.
    """

    def __init__(self, num_blocks: int, use: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = GPUKVPool(num_blocks, BLOCK_SIZE, run_length=RUN_LENGTH)
        self.num_wanted = int(use * num_blocks)
        self.sizes = [min(96, max(2, int(self.rng.lognormvariate(2.5, 0.8)))) for _ in range(NUM_DOCUMENTS)]
        self.weights = [1 / (rank + 1) for rank in range(NUM_DOCUMENTS)]
        self.running: dict[SequenceId, list[bytes]] = {}
        self.num_requests = self.num_tails = self.num_taken = self.num_asked = self.num_hits = 0

    def step(self) -> None:
        """Start one request, end as many as it needs, and grow eight others by a block."""
        [document] = self.rng.choices(range(NUM_DOCUMENTS), self.weights)
        hashes = [b"%d/%d" % (document, position) for position in range(self.sizes[document])]
        hashes += self.make_tail(self.rng.randrange(1, 12))
        while self.count_in_use() + len(hashes) > self.num_wanted and self.running:
            self.end(self.rng.choice(list(self.running)))
        self.num_requests += 1
        sequence_id = SequenceId(self.num_requests)
        hits = self.pool.claim_prefix(sequence_id, hashes)  # type: ignore[arg-type]
        self.num_asked += len(hashes)
        self.num_hits += len(hits)
        self.running[sequence_id] = hashes[: len(hits)]
        self.grow(sequence_id, hashes[len(hits) :])
        for _ in range(8):
            if self.count_in_use() < self.num_wanted:
                self.grow(self.rng.choice(list(self.running)), self.make_tail(1))

    def make_tail(self, num_blocks: int) -> list[bytes]:
        self.num_tails += num_blocks
        return [b"tail %d" % number for number in range(self.num_tails - num_blocks, self.num_tails)]

    def grow(self, sequence_id: SequenceId, hashes: list[bytes]) -> None:
        self.pool.allocate(BlockAllocationRequest(len(hashes), sequence_id, contiguous="no"))
        self.num_taken += len(hashes)
        self.running[sequence_id] += hashes
        self.pool.cache_prefix(sequence_id, self.running[sequence_id])  # type: ignore[arg-type]

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
        for document, size in enumerate(self.sizes):
            hashes = [b"%d/%d" % (document, position) for position in range(size)]
            found.append(
                next(
                    (
                        position
                        for position, name in enumerate(hashes)
                        if not pool.get_cached_block(name, [GroupId(0)])  # type: ignore[arg-type]
                    ),
                    size,
                )
            )
        return found


def measure(options: argparse.Namespace, use: float, mode: str) -> dict[str, Any]:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke test of this script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.steps = 800, 300
    mode = "compiled" if kv_pool.COMPILED else "plain"
    print(f"kv_pool {mode}, {options.blocks:,} blocks, {options.steps:,} requests, seed {options.seed}")
    print(
        f"{'in use':>6}  {'compaction':<20}{'U(16)':>7}{'max':>7}{'moves/bl':>9}{'evicted':>9}{'changes':>9}"
        f"{'hits':>8}{'step us':>10}{'max us':>9}"
    )
    rows = []
    for use in USES[2:3] if options.quick else USES:
        for name in MODES:
            rows.append(measure(options, use, name))
            show(rows[-1])
    if options.json is not None:
        answer = {"provenance": describe_run([mode]), "rows": rows}
        write_results(options.json, answer)


if __name__ == "__main__":
    main()
