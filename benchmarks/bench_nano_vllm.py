"""Measure the cost of a prefix hit by the number of free blocks. See benchmarks/README.md for the columns."""

import hashlib
import random
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring import (
    Options,
    Row,
    Sample,
    describe_core,
    interleave,
    make_parser,
    print_header,
    read_options,
    start_run,
    write_results,
)
from request_runs import draw_tokens

from kv_pool.integrations.nano_vllm import BlockManager

OURS = f"kv_pool {describe_core()}"
THEIRS = "nano-vllm"

BLOCK_SIZE = 16
HIT_BLOCKS = 16
HITS_PER_SAMPLE = 2
# A constant number, so that the hit prompts fit into the CPU's caches for every pool size.
HIT_PROMPTS = 30


class BenchSequence:
    """The attributes of a nano-vllm `Sequence` that a block manager reads and writes."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.block_table: list[int] = []
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // BLOCK_SIZE)

    def block(self, i: int) -> list[int]:
        return self.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]


def import_theirs(checkout: Path) -> Any:
    """Load only the block manager of a nano-vllm source tree; the rest would load torch."""
    stub = ModuleType("nanovllm.engine.sequence")
    stub.__dict__["Sequence"] = BenchSequence
    for name in ("nanovllm", "nanovllm.engine"):
        sys.modules[name] = ModuleType(name)
    sys.modules["nanovllm.engine.sequence"] = stub
    path = checkout / "nanovllm" / "engine" / "block_manager.py"
    spec = spec_from_file_location("their_block_manager", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no block manager at {path}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BlockManager


def git_blob_id(checkout: Path) -> str:
    """Return the output of `git hash-object` for the block manager of a nano-vllm source tree."""
    content = (checkout / "nanovllm" / "engine" / "block_manager.py").read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def admit_and_finish(manager: Any, seq: BenchSequence, as_today: bool) -> int:
    """Make the scheduler's calls for a prompt. Return the number of tokens hit."""
    answer = manager.can_allocate(seq)
    if as_today:
        manager.allocate(seq, answer)
        num_cached_tokens = seq.num_cached_tokens
        seq.num_scheduled_tokens = len(seq) - num_cached_tokens
        manager.hash_blocks(seq)
    else:
        if not answer:
            raise RuntimeError("the prompt does not fit")
        manager.allocate(seq)
        num_cached_tokens = seq.num_cached_tokens
    manager.deallocate(seq)
    return num_cached_tokens


def sample_hits(num_blocks: int, seed: int, as_today: bool, manager_class: Callable[..., Any]) -> Sample:
    """Prepare a manager with all blocks free: first empty blocks, then as many blocks with prompts."""
    rng = random.Random(seed)
    manager = manager_class(num_blocks, BLOCK_SIZE)
    seqs = []
    for _ in range(num_blocks // 2 // HIT_BLOCKS):
        seqs.append(BenchSequence(draw_tokens(rng, HIT_BLOCKS * BLOCK_SIZE)))
        admit_and_finish(manager, seqs[-1], as_today)
    seqs = rng.sample(seqs, HIT_PROMPTS)

    def sample() -> float:
        chosen = [rng.choice(seqs) for _ in range(HITS_PER_SAMPLE)]
        num_cached_tokens = 0
        start = time.perf_counter_ns()
        for seq in chosen:
            num_cached_tokens += admit_and_finish(manager, seq, as_today)
        elapsed = time.perf_counter_ns() - start
        expected = HIT_BLOCKS - 1 if as_today else HIT_BLOCKS
        if num_cached_tokens != HITS_PER_SAMPLE * expected * BLOCK_SIZE:
            raise RuntimeError(f"{num_cached_tokens} tokens hit")
        return elapsed / (HITS_PER_SAMPLE * HIT_BLOCKS)

    return sample


def measure(num_blocks: int, as_today: bool, classes: dict[str, Any], options: Options) -> Row:
    row = Row(f"{num_blocks:,} blocks, as {'today' if as_today else 'in 2025'}", "ns/block", {}, THEIRS)
    # Not in turn: a walk along their free list leaves the CPU's caches cold for the next manager.
    for name, manager_class in classes.items():
        sample = sample_hits(num_blocks, options.seed, as_today, manager_class)
        row.samples |= interleave(row.title, row.unit, {name: sample}, options.runs).samples
    row.print()
    return row


def parse_options() -> Options:
    parser = make_parser(__doc__, runs=100)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument(
        "--nano-vllm", type=Path, nargs="+", default=[], help="source trees, one per version of the scheduler"
    )
    options = read_options(parser, runs=3, blocks=[1_000])
    # A hit allocates an empty block; without empty blocks it would evict a cached one.
    if options.runs < 1 or min(options.blocks) < 4 * HITS_PER_SAMPLE * options.runs:
        parser.error(f"at least 1 run, and {4 * HITS_PER_SAMPLE} blocks for each")
    return options


def main() -> None:
    options = parse_options()
    theirs = {}
    for checkout in options.nano_vllm:
        manager_class = import_theirs(checkout)
        theirs[hasattr(manager_class, "hash_blocks")] = manager_class
    files = [f"block_manager.py, git blob {git_blob_id(path)}" for path in options.nano_vllm]
    provenance = start_run(options, compared=[OURS, *files])
    print_header("nano-vllm / this")
    rows = []
    for as_today in (True, False):
        classes = {OURS: BlockManager}
        if as_today in theirs:
            classes[THEIRS] = theirs[as_today]
        rows += [measure(num_blocks, as_today, classes, options) for num_blocks in options.blocks]
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
