"""Measure the cost of a batch's block tables and slots per decode step. See benchmarks/README.md."""

import gc
import random
from collections import defaultdict

import numpy as np
import numpy.typing as npt
from measuring import (
    Options,
    Row,
    make_parser,
    print_header,
    read_options,
    start_run,
    timed,
    write_results,
)

from kv_pool import BlockPool
from kv_pool.ids import RequestId
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.slot_mapping import SlotMapping

BLOCK_SIZE = 16
NUM_WARM_UP = 20
BOTH = {"this, both": ("update", "fill_decode"), "rebuilt, both": ("rebuild by rows", "slots one by one")}
"""Table and slots together, as sums of two parts."""


class Sequences:
    """Requests that decode one token each per step, with their tables, also as lists of ids.

    This is a manager's work and not measured; the rebuilding methods do not pay for their lists.
    """

    def __init__(self, num_requests: int, num_tokens: int, num_steps: int, window: int, seed: int) -> None:
        rng = random.Random(seed)
        most = num_tokens * 3 // 2 + num_steps
        self.num_columns = -(-most // BLOCK_SIZE)
        self.pool = BlockPool(num_requests * self.num_columns + 1, False, BLOCK_SIZE)
        self.window = window
        # Half to one and a half of the length, so that some need a new block at each step.
        self.positions = np.array(
            [rng.randint(num_tokens // 2, num_tokens * 3 // 2 - 1) for _ in range(num_requests)]
        )
        self.tables = [BlockTable() for _ in range(num_requests)]
        self.id_lists: list[list[int]] = [[] for _ in range(num_requests)]
        self._allocate()

    def step(self) -> None:
        self.positions += 1
        self._allocate()

    def _allocate(self) -> None:
        for table, ids, position in zip(self.tables, self.id_lists, self.positions.tolist(), strict=True):
            missing = position // BLOCK_SIZE + 1 - len(table.blocks)
            if missing > 0:
                blocks = self.pool.get_new_blocks(missing)
                table.blocks.extend(blocks)
                ids.extend(block.block_id for block in blocks)
            num_null = max(0, position - self.window + 1) // BLOCK_SIZE if self.window else 0
            for at in range(table.num_null_blocks, num_null):
                self.pool.free_blocks([table.blocks[at]])
                table.blocks[at] = self.pool.null_block
                ids[at] = 0
                table.num_edits += 1
            table.num_null_blocks = num_null


def rebuild_from_lists(id_lists: list[list[int]]) -> npt.NDArray[np.int32]:
    """Build a new padded array from lists of ids, as wide as the longest list."""
    longest = max(map(len, id_lists))
    return np.array([ids + [0] * (longest - len(ids)) for ids in id_lists], np.int32)


def rebuild_by_rows(id_lists: list[list[int]]) -> npt.NDArray[np.int32]:
    """Build the same array row by row into zeros."""
    array = np.zeros((len(id_lists), max(map(len, id_lists))), np.int32)
    for row, ids in zip(array, id_lists, strict=True):
        row[: len(ids)] = ids
    return array


def list_slots_one_by_one(id_lists: list[list[int]], positions: list[int]) -> npt.NDArray[np.int64]:
    return np.array(
        [
            ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for ids, position in zip(id_lists, positions, strict=True)
        ],
        np.int64,
    )


def make_batch(sequences: Sequences) -> BatchBlockTable:
    batch = BatchBlockTable(len(sequences.tables), sequences.num_columns, BLOCK_SIZE)
    for number, table in enumerate(sequences.tables):
        batch.add_request(RequestId(str(number)), table)
    batch.update()
    return batch


def decode(num_requests: int, window: int, options: Options) -> dict[str, list[float]]:
    """Run each method once per step on the same tables. Their results must be equal."""
    num_steps = NUM_WARM_UP + options.runs
    sequences = Sequences(num_requests, options.tokens, num_steps, window, options.seed)
    batch = make_batch(sequences)
    mapping = SlotMapping(batch, num_requests)
    times: dict[str, list[float]] = defaultdict(list)
    for step in range(num_steps):
        if step == NUM_WARM_UP:
            times.clear()
        sequences.step()
        id_lists = sequences.id_lists
        positions = sequences.positions.tolist()
        timed(times["update"], batch.update)
        slots = timed(times["fill_decode"], mapping.fill_decode, sequences.positions)
        rebuilt = timed(times["rebuild from lists"], rebuild_from_lists, id_lists)
        timed(times["rebuild by rows"], rebuild_by_rows, id_lists)
        listed = timed(times["slots one by one"], list_slots_one_by_one, id_lists, positions)
        if not np.array_equal(batch.get_rows()[:, : rebuilt.shape[1]], rebuilt) or (slots != listed).any():
            raise AssertionError("the methods disagree")
    for name, (first, second) in BOTH.items():
        times[name] = [one + other for one, other in zip(times[first], times[second], strict=True)]
    return times


def prefill(num_tokens: int, num_decoding: int, options: Options) -> tuple[int, dict[str, list[float]]]:
    """Measure a prefill chunk of one request among decoding ones. Return the number of blocks of all."""
    sequences = Sequences(num_decoding + 1, num_tokens * 2, 1, 0, options.seed)
    batch = make_batch(sequences)
    mapping = SlotMapping(batch, num_tokens + num_decoding)
    query_start_loc = np.array([*range(num_decoding + 1), num_decoding + num_tokens], np.int32)
    first_positions = np.array([*sequences.positions[:-1], 0], np.int32)
    times: dict[str, list[float]] = defaultdict(list)
    for run in range(NUM_WARM_UP + options.runs):
        if run == NUM_WARM_UP:
            times.clear()
        timed(times["fill_chunks"], mapping.fill_chunks, query_start_loc, first_positions)
        timed(times["rewrite"], batch.rewrite)
    return sum(len(table.blocks) for table in sequences.tables), times


def main() -> None:
    parser = make_parser(__doc__, runs=200)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=2000, help="mean length of a sequence")
    parser.add_argument("--window", type=int, default=512)
    options = read_options(parser)
    provenance = start_run(options)
    print_header()
    gc.disable()
    rows = []
    for window, words in ((0, "full attention"), (options.window, f"window of {options.window}")):
        for num_requests in options.requests:
            title = f"{num_requests} requests of {options.tokens} tokens, {words}"
            rows.append(Row(title, "us/step", decode(num_requests, window, options)))
            rows[-1].print()
            gc.collect()
    num_blocks, times = prefill(8192, 255, options)
    rows.append(Row(f"8,192 tokens beside 255 that decode, {num_blocks:,} blocks", "us/step", times))
    rows[-1].print()
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
