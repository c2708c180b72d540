"""Where should runs be allocated: buddy, first fit, oldest content? The same requests go through all three.

A request hits the cached part of its prompt, allocates the rest in one call, as a run if there is one, and
grows block by block. Prompts are repeatedly requested documents (Zipf). The cache is always full: all blocks
not in use are cached. See benchmarks/README.md.
"""

import itertools
import random
import statistics
from typing import Any

from measuring import Options, gc_off, make_parser, read_options, start_run, timed, write_results
from request_runs import Documents

from kv_pool import BlockAllocationRequest, BlockId, GPUKVPool, SequenceId
from kv_pool.contiguous import fragmentation
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.errors import PoolExhaustedError

BLOCK_SIZE = 16
NUM_DOCUMENTS = 2_000
NUM_BATCHES = 50


class Lane:
    """One placement, with its measurements since `forget`."""

    def __init__(self, placement: str, num_blocks: int, use: float, seed: int) -> None:
        self.placement = placement
        self._rng = random.Random(seed)
        self._pool = GPUKVPool(num_blocks, BLOCK_SIZE, placement=placement, eviction_policy=None)
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

    def serve(self, requests: list[tuple[list[Any], int]]) -> None:
        for hashes, num_grown in requests:
            while self._pool.total_blocks - self._pool.get_free_blocks() + len(hashes) > self._most:
                self._step()
            self._admit(hashes, num_grown)
        lengths = self._pool.block_pool.list_free_runs()
        self.unusable.append(fragmentation.get_unusable_share(lengths, 16))
        self.largest_loss.append(fragmentation.get_largest_run_loss(lengths))

    def _admit(self, hashes: list[Any], num_grown: int) -> None:
        self._num_admitted += 1
        sequence_id = SequenceId(self._num_admitted)
        hits = self._pool.claim_prefix(sequence_id, hashes)
        self.num_asked += len(hashes)
        self.num_hits += len(hits)
        count = len(hashes) - len(hits)
        if count:
            request = BlockAllocationRequest(count, sequence_id, contiguous="prefer")
            ids = timed(self.taken_us if count > 1 else [], self._pool.allocate, request)
            if count > 1:
                self.num_prompt_blocks += count
                self.num_prompt_runs += count_runs(ids)
        self._pool.cache_prefix(sequence_id, hashes)
        self._running[sequence_id] = num_grown

    def _step(self) -> None:
        """Grow some requests by a block, and end the finished ones."""
        for sequence_id, num_left in list(self._running.items()):
            if num_left == 0:
                self._pool.free_sequence(sequence_id)
                del self._running[sequence_id]
            elif self._rng.random() < 0.2:
                try:
                    timed(self.single_us, self._pool.allocate, BlockAllocationRequest(1, sequence_id))
                except PoolExhaustedError:
                    self._running[sequence_id] = 0
                    continue
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


def measure(options: Options, use: float) -> list[dict[str, Any]]:
    lanes = [Lane(placement, options.blocks, use, options.seed) for placement in PLACEMENTS]
    rng = random.Random(options.seed)
    documents = Documents(NUM_DOCUMENTS, 2.8, rng)
    with gc_off():
        for batch in range(NUM_BATCHES):
            num_requests = options.requests // NUM_BATCHES
            requests = [(documents.draw(7), rng.randrange(1, 24)) for _ in range(num_requests)]
            if batch == NUM_BATCHES // 5:
                for lane in lanes:
                    lane.forget()  # the caches are full from here on
            for lane in lanes if batch % 2 else reversed(lanes):
                lane.serve(requests)
    return [{"use": use, **lane.report()} for lane in lanes]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=4_000)
    options = read_options(parser)
    rows = []
    provenance = start_run(options, compared=list(PLACEMENTS))
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
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
