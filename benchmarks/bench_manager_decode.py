"""Measure the cost of a request and of a decode step. See benchmarks/README.md for the columns."""

import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from measuring import (
    Options,
    describe_core,
    gc_off,
    in_turn,
    make_parser,
    read_options,
    start_run,
    write_results,
)
from request_runs import (
    BLOCK_SIZE,
    draw_tokens,
    make_vllm_config,
    make_vllm_hasher,
    make_vllm_manager,
    make_vllm_request,
)

import kv_pool
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.manager.slot_mapping import SlotMapping

OURS, VLLM = "kv_pool", "vLLM"
ALGORITHM = "sha256_cbor"
WINDOW_TOKENS = 128
PROMPT_LENGTHS = (128, 512, 2048, 8192)
CHUNK_TOKENS = 2048
# Prompt tokens of a running sequence, plus up to 15: at each step another sixteenth needs a block.
DECODE_PROMPT_TOKENS = 512
TOKENS_PER_SAMPLE = 2_048
# Blocks of the pool for single requests; the longest request needs an eighth of them.
POOL_BLOCKS = 4_096
GROUPS = {"full": ["full"], "full + window": ["full", "window"]}
"""A model with full attention in all layers, and one with a window in some layers."""

# CPU time of this thread; time used by other processes does not count.
now = time.thread_time_ns


@dataclass
class Shape:
    """The parameters of a manager."""

    groups: list[str]
    num_blocks: int
    max_num_sequences: int
    max_num_tokens: int


class Lane(ABC):
    """A manager, its engine's block tables, and a factory of its requests."""

    name: str
    manager: Any

    @abstractmethod
    def make_request(self, request_id: str, token_ids: list[int]) -> Any:
        """Return a request with its hashes."""

    @abstractmethod
    def admit(self, request: Any) -> tuple[int, Any]:
        """Look up and allocate slots for the first chunk. Return the number of tokens hit, and the blocks."""

    def run_request(self, request: Any) -> int:
        """Look up, allocate slots chunk by chunk, free. Return the number of tokens hit."""
        manager = self.manager
        num_hits, blocks = self.admit(request)
        num_computed = min(num_hits + CHUNK_TOKENS, request.num_tokens)
        while num_computed < request.num_tokens and blocks is not None:
            request.num_computed_tokens = num_computed
            num_new = min(CHUNK_TOKENS, request.num_tokens - num_computed)
            blocks = manager.allocate_slots(request, num_new)
            num_computed += num_new
        manager.free(request)
        if blocks is None:
            raise RuntimeError("a request does not fit into the pool")
        return num_hits

    @abstractmethod
    def begin(self, requests: list[Any]) -> None:
        """Allocate slots for all prompts, and rows in the batch."""

    @abstractmethod
    def allocate(self, requests: list[Any]) -> None:
        """Allocate a slot for the next token of each sequence."""

    @abstractmethod
    def update_table(self) -> None:
        """Update the batch's block table."""

    def compute_slots(self) -> None:
        """Compute the slot of each sequence's next token, if the host does that."""
        return None

    @abstractmethod
    def read_table(self, num_rows: int) -> list[list[int]]:
        """Return the rows of the first group."""

    def end_step(self, requests: list[Any], token_id: int) -> None:
        """Append one token to each sequence. Runs between two steps and is not measured."""
        for request in requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids([token_id])


class OwnLane(Lane):
    """kv_pool's `KVCacheManager`, `Request` and `BatchBlockTable`."""

    name = OURS

    def __init__(self, shape: Shape) -> None:
        pool = kv_pool.BlockPool(shape.num_blocks, True, BLOCK_SIZE)
        specs = {
            "full": FullAttentionSpec(block_size=BLOCK_SIZE),
            "window": SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=WINDOW_TOKENS),
        }
        self.manager = kv_pool.KVCacheManager(pool, groups=[specs[kind] for kind in shape.groups])
        self.hasher = kv_pool.BlockHasher(ALGORITHM, block_size=BLOCK_SIZE)
        self.tables = [
            BatchBlockTable(shape.max_num_sequences, -(-shape.max_num_tokens // BLOCK_SIZE), BLOCK_SIZE)
            for _ in shape.groups
        ]
        self.slot_mappings = [SlotMapping(table, shape.max_num_sequences) for table in self.tables]
        self.positions = np.zeros(0, np.int64)

    def make_request(self, request_id: str, token_ids: list[int]) -> Any:
        return kv_pool.Request(RequestId(request_id), token_ids, self.hasher)

    def admit(self, request: Any) -> tuple[int, Any]:
        prefix = self.manager.get_computed_blocks(request)
        num_new = min(CHUNK_TOKENS, request.num_tokens - prefix.num_tokens)
        return prefix.num_tokens, self.manager.allocate_slots(request, num_new, prefix)

    def begin(self, requests: list[Any]) -> None:
        for request in requests:
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                raise RuntimeError("the sequences do not fit into the pool")
            for group_id, table in enumerate(self.tables):
                table.add_request(
                    request.request_id, self.manager.get_table(request.request_id, GroupId(group_id))
                )
        self.update_table()
        self.positions = np.array([request.num_tokens for request in requests], np.int64)

    def allocate(self, requests: list[Any]) -> None:
        allocate_slots = self.manager.allocate_slots
        for request in requests:
            if allocate_slots(request, 1) is None:
                raise RuntimeError("the sequences do not fit into the pool")

    def update_table(self) -> None:
        for table in self.tables:
            table.update()

    def compute_slots(self) -> None:
        for slot_mapping in self.slot_mappings:
            slot_mapping.fill_decode(self.positions)

    def end_step(self, requests: list[Any], token_id: int) -> None:
        super().end_step(requests, token_id)
        self.positions += 1

    def read_table(self, num_rows: int) -> list[list[int]]:
        rows: list[list[int]] = self.tables[0].block_ids[:num_rows].tolist()
        return rows


class VllmLane(Lane):
    """vLLM's `KVCacheManager`, and its model runner's `MultiGroupBlockTable` as on a CPU."""

    name = VLLM

    def __init__(self, shape: Shape) -> None:
        import torch
        from vllm.v1.worker.block_table import MultiGroupBlockTable

        windows = [WINDOW_TOKENS if kind == "window" else None for kind in shape.groups]
        config = make_vllm_config(shape.num_blocks, BLOCK_SIZE, windows)
        self.manager = make_vllm_manager(config, BLOCK_SIZE)
        self.hasher = make_vllm_hasher(ALGORITHM)
        self.table = MultiGroupBlockTable(
            max_num_reqs=shape.max_num_sequences,
            max_num_batched_tokens=shape.max_num_sequences,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=[BLOCK_SIZE] * len(windows),
            max_num_blocks=[-(-shape.max_num_tokens // BLOCK_SIZE)] * len(windows),
        )
        for group_table in self.table.block_tables:
            # Configured like its model runner for CPUs, where nothing is copied to a device.
            group_table.block_table.gpu = group_table.block_table.cpu
        self.new_block_ids: list[Any] = []

    def make_request(self, request_id: str, token_ids: list[int]) -> Any:
        from vllm.v1.request import RequestStatus

        request = make_vllm_request(request_id, list(token_ids), 100_000, self.hasher)
        request.status = RequestStatus.RUNNING
        return request

    def admit(self, request: Any) -> tuple[int, Any]:
        hits, num_hits, _ = self.manager.get_computed_blocks(request)
        num_new = min(CHUNK_TOKENS, request.num_tokens - num_hits)
        return num_hits, self.manager.allocate_slots(request, num_new, num_hits, hits)

    def begin(self, requests: list[Any]) -> None:
        for row, request in enumerate(requests):
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                raise RuntimeError("the sequences do not fit into the pool")
            self.table.add_row(self.manager.get_block_ids(request.request_id), row)
        self.table.commit_block_table(len(requests))

    def allocate(self, requests: list[Any]) -> None:
        # Its scheduler sends the ids of new blocks, None if there are none, to the model runner.
        new_block_ids = []
        allocate_slots = self.manager.allocate_slots
        for request in requests:
            new_blocks = allocate_slots(request, 1)
            if new_blocks is None:
                raise RuntimeError("the sequences do not fit into the pool")
            new_block_ids.append(new_blocks.get_block_ids(allow_none=True))
        self.new_block_ids = new_block_ids

    def update_table(self) -> None:
        append_row = self.table.append_row
        for row, block_ids in enumerate(self.new_block_ids):
            if block_ids is not None:
                append_row(block_ids, row)
        self.table.commit_block_table(len(self.new_block_ids))

    def read_table(self, num_rows: int) -> list[list[int]]:
        rows: list[list[int]] = self.table[0].get_numpy_array()[:num_rows].tolist()
        return rows


LANES: dict[str, Callable[[Shape], Lane]] = {OURS: OwnLane, VLLM: VllmLane}


@dataclass
class Row:
    """A row of results: microseconds per request or step, for each lane and each part of the work."""

    title: str
    parts: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, lane: str, part: str, us: float) -> None:
        self.parts.setdefault(lane, {}).setdefault(part, []).append(round(us, 3))

    def median(self, lane: str, part: str) -> float:
        return statistics.median(self.parts[lane][part])

    def sum_medians(self, lane: str, parts: list[str]) -> float:
        return sum(self.median(lane, part) for part in parts if part in self.parts[lane])


def fill_cache(lanes: list[Lane], rng: random.Random, num_blocks: int) -> None:
    """Cache nearly every block of the pools, so that each allocated block evicts one."""
    for number in range(-(-num_blocks // (4096 // BLOCK_SIZE))):
        token_ids = draw_tokens(rng, 4096)
        for lane in lanes:
            lane.run_request(lane.make_request(f"filler {number}", token_ids))


def measure_requests(options: Options, names: list[str], groups: str) -> list[Row]:
    """Look up, allocate in chunks, free: new prompts, and prompts seen before."""
    num_blocks = POOL_BLOCKS * len(GROUPS[groups])
    lanes = [LANES[name](Shape(GROUPS[groups], num_blocks, 1, 16_384)) for name in names]
    rng = random.Random(options.seed)
    fill_cache(lanes, rng, num_blocks)
    rows = []
    with gc_off(frozen=True):
        for length in PROMPT_LENGTHS:
            new = Row(f"{groups}: {length:,} tokens, new")
            seen = Row(f"{groups}: {length:,} tokens, seen before")
            for run in range(-1, options.runs):
                prompts = [draw_tokens(rng, length) for _ in range(max(1, TOKENS_PER_SAMPLE // length))]
                for row in (new, seen):
                    num_hits = set()
                    for lane in in_turn(lanes, run):
                        requests = [lane.make_request(f"{n}", prompt) for n, prompt in enumerate(prompts)]
                        run_request = lane.run_request
                        num_hit_tokens = 0
                        start = now()
                        for request in requests:
                            num_hit_tokens += run_request(request)
                        elapsed = now() - start
                        num_hits.add(num_hit_tokens)
                        if run >= 0:
                            row.add(lane.name, "request", elapsed / len(requests) / 1e3)
                    if len(num_hits) != 1 or (num_hits == {0}) != (row is new):
                        raise RuntimeError(f"{row.title}: hits of {num_hits} tokens")
            rows += [new, seen]
            print_row(new, ["request"])
            print_row(seen, ["request"])
    return rows


def draw_prompts(rng: random.Random, num_sequences: int) -> list[list[int]]:
    lengths = [DECODE_PROMPT_TOKENS + number % BLOCK_SIZE for number in range(num_sequences)]
    return [draw_tokens(rng, length) for length in lengths]


def begin_decoding(lane: Lane, prompts: list[list[int]]) -> list[Any]:
    """Return requests with slots for their prompts and one generated token each."""
    batch = [lane.make_request(f"sequence {number}", prompt) for number, prompt in enumerate(prompts)]
    lane.begin(batch)
    for request in batch:
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids([1])
    return batch


def measure_steps(options: Options, names: list[str], groups: str, num_sequences: int) -> Row:
    """Measure steps that decode one token of each sequence."""
    max_num_tokens = DECODE_PROMPT_TOKENS + 2 * BLOCK_SIZE + options.steps + 2
    num_blocks = num_sequences * (-(-max_num_tokens // BLOCK_SIZE)) * len(GROUPS[groups]) * 5 // 4
    num_blocks = max(num_blocks, 2 * 4096 // BLOCK_SIZE * len(GROUPS[groups]))
    shape = Shape(GROUPS[groups], num_blocks, num_sequences, max_num_tokens)
    row = Row(f"{groups}: a step of {num_sequences:,} sequences")
    for run in range(options.decode_runs):
        lanes = [LANES[name](shape) for name in names]
        rng = random.Random(options.seed + run)
        fill_cache(lanes, rng, num_blocks)
        prompts = draw_prompts(rng, num_sequences)
        batches = {lane.name: begin_decoding(lane, prompts) for lane in lanes}
        with gc_off(frozen=True):
            for step in range(-BLOCK_SIZE, options.steps):
                for lane in in_turn(lanes, step):
                    batch = batches[lane.name]
                    start = now()
                    lane.allocate(batch)
                    allocated = now()
                    lane.update_table()
                    updated = now()
                    lane.compute_slots()
                    mapped = now()
                    lane.end_step(batch, 1)
                    if step >= 0:  # by then each sequence has got a block, so all code has run
                        row.add(lane.name, "allocate", (allocated - start) / 1e3)
                        row.add(lane.name, "table", (updated - allocated) / 1e3)
                        row.add(lane.name, "slots", (mapped - updated) / 1e3)
        check_same_shape(lanes, num_sequences)
    print_row(row, ["allocate", "table"])
    return row


def check_same_shape(lanes: list[Lane], num_sequences: int) -> None:
    """Verify that each sequence has the same number of blocks in all lanes."""
    counts = {
        tuple(sum(block_id > 0 for block_id in row) for row in lane.read_table(num_sequences))
        for lane in lanes
    }
    if len(counts) != 1:
        raise RuntimeError("the batch tables differ")


def ratio_to_vllm(row: Row, lane: str, parts: list[str]) -> float | None:
    return row.sum_medians(VLLM, parts) / row.sum_medians(lane, parts) if VLLM in row.parts else None


def print_row(row: Row, parts: list[str]) -> None:
    for lane in row.parts:
        figures = f"{row.sum_medians(lane, parts):>10.1f}"
        if len(parts) > 1:
            figures += f"{row.median(lane, 'allocate'):>10.1f}{row.median(lane, 'table'):>8.1f}"
            figures += f"{row.median(lane, 'slots'):>8.1f}" if lane == OURS else f"{'-':>8}"
        else:
            figures += " " * 26
        ratio = ratio_to_vllm(row, lane, parts)
        print(f"{row.title:44}{lane:8}{figures}{f'{ratio:.2f}' if ratio else '-':>13}", flush=True)


def find_lanes(options: Options) -> list[str]:
    if options.no_vllm:
        return [OURS]
    try:
        from vllm.v1.core import kv_cache_manager
        from vllm.v1.worker import block_table
    except ImportError as error:
        print(f"missing: vLLM ({error}); ratios to it are omitted", file=sys.stderr)
        return [OURS]
    del kv_cache_manager, block_table
    return [OURS, VLLM]


def main() -> None:
    parser = make_parser(__doc__, runs=60)
    parser.add_argument("--decode-runs", type=int, default=3, help="new managers for each row of steps")
    parser.add_argument(
        "--steps", type=int, default=128, help="measured steps of each, after some warm-up steps"
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--no-vllm", action="store_true", help="measure kv_pool only")
    options = read_options(parser, runs=2, decode_runs=1, steps=16, sequences=[16, 64])
    names = find_lanes(options)
    provenance = start_run(options, compared=[f"{OURS} {describe_core()}", *names[1:]])
    print(f"{'':52}{'µs':>10}{'allocate':>10}{'table':>8}{'slots':>8}{'vLLM / this':>13}")
    rows = []
    for groups in GROUPS:
        for num_sequences in options.sequences:
            rows.append((measure_steps(options, names, groups, num_sequences), ["allocate", "table"]))
    for groups in GROUPS:
        rows += [(row, ["request"]) for row in measure_requests(options, names, groups)]
    results = [
        {
            "title": row.title,
            "unit": "µs",
            "figures": {
                lane: {
                    "median": row.sum_medians(lane, parts),
                    "by_part": {part: row.median(lane, part) for part in samples},
                    "vllm_over_this": ratio_to_vllm(row, lane, parts),
                }
                for lane, samples in row.parts.items()
            },
            "samples": row.parts,
        }
        for row, parts in rows
    ]
    write_results(options, {"provenance": provenance, "rows": results})


if __name__ == "__main__":
    main()
