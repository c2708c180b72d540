"""Measure the cost of timing `GPUKVPool`'s calls. See benchmarks/README.md."""

import gc
import time
from collections.abc import Sequence

from measuring import Row, in_turn, make_parser, print_header, read_options, start_run, write_results

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
    parser = make_parser(__doc__, runs=3000, seeded=False)
    parser.add_argument("--blocks", type=int, default=10_000)
    options = read_options(parser)
    provenance = start_run(options)
    requests = [BlockAllocationRequest(REQUEST_BLOCKS, SequenceId(number)) for number in range(NUM_REQUESTS)]
    pools = [kind(options.blocks, 16) for kind in (UntimedPool, GPUKVPool, UntimedAgain)]
    names = [type(pool).__name__ for pool in pools]
    rows = [
        Row(f"{call} of 10 blocks", "ns/call", {name: [] for name in names}, "UntimedPool")
        for call in ("allocate", "free")
    ]
    gc.disable()
    for run in range(options.runs):
        for pool in in_turn(pools, run):
            for row, measured in zip(rows, measure(pool, requests), strict=True):
                row.samples[type(pool).__name__].append(measured)
    print_header("UntimedPool / this")
    for row in rows:
        row.print()
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
