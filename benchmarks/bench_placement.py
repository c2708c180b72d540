"""Where should runs be allocated: buddy, first fit, oldest content? The same requests go through all three.

    python benchmarks/bench_placement.py [--requests 20000] [--blocks 4000] [--json FILE]

A request hits the cached part of its prompt, allocates the rest in one call, as a run if there is one, and
grows block by block. Prompts are repeatedly requested documents (Zipf). The cache is always full: all blocks
not in use are cached.
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

from measuring import describe_run, write_results

from kv_pool import BlockAllocationRequest, BlockId, GPUKVPool, SequenceId
from kv_pool.contiguous import fragmentation
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.errors import PoolExhaustedError

BLOCK_SIZE = 16
NUM_DOCUMENTS = 2_000
NUM_BATCHES = 50


class Workload:
    """Yield requests as (hashes of the prompt, number of blocks to grow by), the same for every lane."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._sizes = [min(96, max(2, int(self._rng.lognormvariate(2.8, 0.8)))) for _ in range(NUM_DOCUMENTS)]
        self._weights = [1 / (rank + 1) for rank in range(NUM_DOCUMENTS)]
        self._num_tails = 0

    def draw(self, count: int) -> list[tuple[list[bytes], int]]:
        requests = []
        for document in self._rng.choices(range(NUM_DOCUMENTS), self._weights, k=count):
            hashes = [self._name(document, at) for at in range(self._sizes[document])]
            for _ in range(self._rng.randrange(1, 8)):
                self._num_tails += 1
                hashes.append(self._name(NUM_DOCUMENTS, self._num_tails))
            requests.append((hashes, self._rng.randrange(1, 24)))
        return requests

    def _name(self, document: int, position: int) -> bytes:
        return document.to_bytes(8, "big") + position.to_bytes(8, "big")


class Lane:
    """One placement, with its measurements since `forget`."""

    def __init__(self, placement: str, num_blocks: int, use: float, seed: int) -> None:
        self.placement = placement
        self._rng = random.Random(seed)
        self._pool = GPUKVPool(num_blocks, BLOCK_SIZE, placement=placement)
        self._most = int(num_blocks * use)
        self._running: dict[SequenceId, int] = {}
        self._num_admitted = 0
        self.forget()

    def forget(self) -> None:
        self.num_asked = self.num_hits = self.num_prompt_blocks = self.num_prompt_runs = 0
        self.taken_us: list[float] = []
        self.single_us: list[float] = []
        self.unusable: list[float] = []
        self.largest_loss: list[float] = []

    def serve(self, requests: list[tuple[list[bytes], int]]) -> None:
        for hashes, num_grown in requests:
            while self._pool.total_blocks - self._pool.get_free_blocks() + len(hashes) > self._most:
                self._step()
            self._admit(hashes, num_grown)
        lengths = self._pool.block_pool.list_free_runs()
        self.unusable.append(fragmentation.get_unusable_share(lengths, 16))
        self.largest_loss.append(fragmentation.get_largest_run_loss(lengths))

    def _admit(self, hashes: list[bytes], num_grown: int) -> None:
        self._num_admitted += 1
        sequence_id = SequenceId(self._num_admitted)
        hits = self._pool.claim_prefix(sequence_id, hashes)  # type: ignore[arg-type]
        self.num_asked += len(hashes)
        self.num_hits += len(hits)
        count = len(hashes) - len(hits)
        if count:
            request = BlockAllocationRequest(count, sequence_id, contiguous="prefer")
            start = time.perf_counter_ns()
            ids = self._pool.allocate(request)
            if count > 1:
                self.taken_us.append((time.perf_counter_ns() - start) / 1e3)
                self.num_prompt_blocks += count
                self.num_prompt_runs += count_runs(ids)
        self._pool.cache_prefix(sequence_id, hashes)  # type: ignore[arg-type]
        self._running[sequence_id] = num_grown

    def _step(self) -> None:
        """Grow some requests by a block, and end the finished ones."""
        for sequence_id, num_left in list(self._running.items()):
            if num_left == 0:
                self._pool.free_sequence(sequence_id)
                del self._running[sequence_id]
            elif self._rng.random() < 0.2:
                start = time.perf_counter_ns()
                try:
                    self._pool.allocate(BlockAllocationRequest(1, sequence_id))
                except PoolExhaustedError:
                    self._running[sequence_id] = 0
                    continue
                self.single_us.append((time.perf_counter_ns() - start) / 1e3)
                self._running[sequence_id] -= 1

    def report(self) -> dict[str, Any]:
        return {
            "placement": self.placement,
            "blocks_per_run": self.num_prompt_blocks / self.num_prompt_runs,
            "u16": statistics.mean(self.unusable),
            "outside_largest_run": statistics.mean(self.largest_loss),
            "hit_rate": self.num_hits / self.num_asked,
            "run_us": statistics.median(self.taken_us),
            "single_us": statistics.median(self.single_us),
        }


def count_runs(ids: list[BlockId]) -> int:
    return 1 + sum(second != first + 1 for first, second in itertools.pairwise(ids))


def measure(options: argparse.Namespace, use: float) -> list[dict[str, Any]]:
    lanes = [Lane(placement, options.blocks, use, options.seed) for placement in PLACEMENTS]
    workload = Workload(options.seed)
    gc.collect()
    gc.disable()
    for batch in range(NUM_BATCHES):
        requests = workload.draw(options.requests // NUM_BATCHES)
        if batch == NUM_BATCHES // 5:
            for lane in lanes:
                lane.forget()  # the caches are full from here on
        for lane in lanes if batch % 2 else reversed(lanes):
            lane.serve(requests)
    gc.enable()
    return [{"use": use, **lane.report()} for lane in lanes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    about = describe_run(list(PLACEMENTS))
    print(
        f"{'in use':>7} {'placement':<10}{'blocks a run':>13}{'U(16)':>7}{'outside largest':>17}{'hits':>8}"
        f"{'us a run':>10}{'us a block':>12}"
    )
    for use in (0.5, 0.8, 0.9):
        for row in measure(options, use):
            rows.append(row)
            print(
                f"{use:>7.0%} {row['placement']:<10}{row['blocks_per_run']:>13.2f}{row['u16']:>7.1%}"
                f"{row['outside_largest_run']:>17.1%}{row['hit_rate']:>8.2%}{row['run_us']:>10.1f}"
                f"{row['single_us']:>12.1f}"
            )
    if options.json is not None:
        write_results(options.json, {"run": about, "rows": rows})


if __name__ == "__main__":
    main()
