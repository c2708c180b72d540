"""Measure the cost of a router's index of which node has which prefix. See benchmarks/README.md."""

import gc
import json
import random
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from measuring import (
    Options,
    Row,
    make_parser,
    print_header,
    read_options,
    resident_bytes,
    run_child,
    start_run,
    write_results,
)

from kv_pool import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.events.mirror import PrefixMirror

BLOCK_SIZE = 16
PROMPT_BLOCKS = 200
EVENT_BLOCKS = 8  # per store; a removal is one event per block, as pools publish it
LOOKUPS_PER_SAMPLE = 50
MIRROR, TOKENS, SETS = "PrefixMirror", "PrefixMirror with tokens", "dict of sets"


class Prompt(NamedTuple):
    """A prompt of some publishers. Its tokens are consecutive numbers, created when needed."""

    number: int
    hashes: list[int]
    publishers: list[str]

    @property
    def token_ids(self) -> range:
        return range(self.number * PROMPT_BLOCKS * BLOCK_SIZE, (self.number + 1) * PROMPT_BLOCKS * BLOCK_SIZE)

    def list_stores(self) -> list[BlockStored]:
        stores = []
        tokens = self.token_ids
        for first in range(0, PROMPT_BLOCKS, EVENT_BLOCKS):
            end = first + EVENT_BLOCKS
            parent = self.hashes[first - 1] if first else None
            token_ids = [*tokens[first * BLOCK_SIZE : end * BLOCK_SIZE]]
            stores.append(
                BlockStored([*self.hashes[first:end]], parent, token_ids, BLOCK_SIZE, None, "GPU", None)
            )
        return stores

    def list_removals(self) -> list[BlockRemoved]:
        return [BlockRemoved([one], "GPU") for one in reversed(self.hashes)]


class DictOfSets:
    """The simplest mirror: a set of hashes per publisher, and one walk per publisher."""

    def __init__(self) -> None:
        self.held: dict[str, set[Any]] = {}

    def apply(self, publisher_id: str, events: Sequence[Any]) -> None:
        held = self.held.setdefault(publisher_id, set())
        for event in events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.block_hashes)
            else:
                held.clear()

    def find_prefix(self, block_hashes: Sequence[int]) -> dict[str, int]:
        found = {}
        for publisher_id, held in self.held.items():
            count = 0
            for block_hash in block_hashes:
                if block_hash not in held:
                    break
                count += 1
            if count:
                found[publisher_id] = count
        return found


def make_prompts(num_blocks: int, num_publishers: int, seed: int) -> list[Prompt]:
    """Return prompts on one to four publishers each, with `num_blocks` stored blocks in total."""
    rng = random.Random(seed)
    names = [f"engine-{number}" for number in range(num_publishers)]
    prompts: list[Prompt] = []
    left = num_blocks
    while left > 0:
        publishers = rng.sample(names, min(rng.randint(1, 4), num_publishers))
        prompts.append(Prompt(len(prompts), [rng.getrandbits(64) for _ in range(PROMPT_BLOCKS)], publishers))
        left -= PROMPT_BLOCKS * len(publishers)
    rng.shuffle(prompts)
    return prompts


def copy_hashes(hashes: Sequence[int]) -> list[int]:
    """Return equal hashes that are other objects, as in a router that received a request."""
    return [one + 1 - 1 for one in hashes]


def fill(mirror: Any, prompts: list[Prompt]) -> tuple[float, float]:
    """Return ns and bytes per block."""
    gc.collect()
    before = resident_bytes()
    elapsed_ns = num_blocks = 0
    for prompt in prompts:
        for publisher in prompt.publishers:
            # As after decoding: every stream has its own hash objects.
            stores = prompt._replace(hashes=copy_hashes(prompt.hashes)).list_stores()
            start = time.perf_counter_ns()
            mirror.apply(publisher, stores)
            elapsed_ns += time.perf_counter_ns() - start
            num_blocks += PROMPT_BLOCKS
    return elapsed_ns / num_blocks, (resident_bytes() - before) / num_blocks


def sample_churn(mirror: Any, prompts: list[Prompt], rng: random.Random) -> float:
    """Remove a prompt block by block and store it again; return ns per block and change."""
    prompt = rng.choice(prompts)
    publisher = prompt.publishers[0]
    removals, stores = prompt.list_removals(), prompt.list_stores()
    start = time.perf_counter_ns()
    for removal in removals:
        mirror.apply(publisher, [removal])
    for store in stores:
        mirror.apply(publisher, [store])
    return (time.perf_counter_ns() - start) / (2 * PROMPT_BLOCKS)


def sample_lookups(find: Callable[[Any], dict[str, int]], asked: list[Any], expected: list[Any]) -> float:
    """Return µs per look-up."""
    start = time.perf_counter_ns()
    found = [find(one) for one in asked]
    elapsed_ns = time.perf_counter_ns() - start
    if found != expected:
        raise RuntimeError("a look-up returned a wrong result")
    return elapsed_ns / len(asked) / 1000


def measure(options: Options) -> list[Row]:
    prompts = make_prompts(options.blocks, options.publishers, options.seed)
    rng = random.Random(options.seed + 1)  # another seed than that of the prompts' hashes
    rows: list[Row] = []

    def add(title: str, unit: str, samples: dict[str, list[float]]) -> None:
        rows.append(Row(title, unit, samples))
        rows[-1].print()

    mirrors = make_mirrors()
    filled = {name: fill(mirror, prompts) for name, mirror in mirrors.items()}
    held = f"{options.blocks:,} blocks over {options.publishers} publishers"
    add(f"fill with {held}", "ns/block", {name: [figures[0]] for name, figures in filled.items()})
    memory = {name: measure_memory(name, options) for name in mirrors}
    add(f"memory of {held}", "B/block", {name: [figures[0]] for name, figures in memory.items()})
    add("memory when all were replaced twice", "B/block", {name: [one[1]] for name, one in memory.items()})

    gc.collect()
    gc.freeze()
    churn: dict[str, list[float]] = {name: [] for name in mirrors}
    for _ in range(options.runs):
        state = rng.getstate()
        for name, mirror in mirrors.items():
            rng.setstate(state)
            churn[name].append(sample_churn(mirror, prompts, rng))
    add("remove a prompt block by block, store it again", "ns/block", churn)

    for title, num_known in (
        ("all held", PROMPT_BLOCKS),
        ("half held", PROMPT_BLOCKS // 2),
        ("none held", 0),
    ):
        lookups: dict[str, list[float]] = {name: [] for name in mirrors}
        by_tokens: list[float] = []
        for _ in range(options.runs):
            chosen = [rng.choice(prompts) for _ in range(LOOKUPS_PER_SAMPLE)]
            expected = [dict.fromkeys(one.publishers, num_known) if num_known else {} for one in chosen]
            unknown = [rng.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
            for name, mirror in mirrors.items():
                asked = [copy_hashes(one.hashes[:num_known] + unknown[num_known:]) for one in chosen]
                lookups[name].append(sample_lookups(mirror.find_prefix, asked, expected))
            num_tokens = num_known * BLOCK_SIZE
            tokens = [
                [*one.token_ids[:num_tokens], *range(10**9, 10**9 + PROMPT_BLOCKS * BLOCK_SIZE - num_tokens)]
                for one in chosen
            ]
            in_tokens = [{name: num * BLOCK_SIZE for name, num in one.items()} for one in expected]
            by_tokens.append(sample_lookups(mirrors[TOKENS].find_prefix_of_tokens, tokens, in_tokens))
        lookups["by tokens"] = by_tokens
        add(f"look up {PROMPT_BLOCKS} blocks, {title}", "µs", lookups)

    clears: dict[str, list[float]] = {}
    for name, mirror in mirrors.items():
        start = time.perf_counter_ns()
        mirror.apply("engine-0", [AllBlocksCleared()])
        clears[name] = [(time.perf_counter_ns() - start) / 1e6]
    add("clear one publisher", "ms", clears)
    return rows


def print_memory(name: str, options: Options) -> None:
    """Print bytes per block of one kind of mirror, filled, and after replacing all its blocks twice."""
    mirror = make_mirrors()[name]
    prompts = make_prompts(options.blocks, options.publishers, options.seed)
    rng = random.Random(options.seed + 1)
    gc.collect()
    before = resident_bytes()
    _, filled = fill(mirror, prompts)
    for _ in range(2):
        for index in rng.sample(range(len(prompts)), len(prompts)):
            old = prompts[index]
            new = prompts[index] = old._replace(hashes=[rng.getrandbits(64) for _ in old.hashes])
            for publisher in old.publishers:
                for removal in old.list_removals():
                    mirror.apply(publisher, [removal])
                mirror.apply(publisher, new._replace(hashes=copy_hashes(new.hashes)).list_stores())
    gc.collect()
    num_blocks = sum(len(prompt.publishers) for prompt in prompts) * PROMPT_BLOCKS
    grown = (len(prompts) * PROMPT_BLOCKS) * 40  # the hashes of the new prompts
    print(json.dumps([filled, (resident_bytes() - before - grown) / num_blocks]))


def measure_memory(name: str, options: Options) -> list[float]:
    """Run `print_memory` in a separate process, so that no other mirror's memory is reused."""
    sizes = ["--blocks", str(options.blocks), "--publishers", str(options.publishers)]
    found: list[float] = run_child(__file__, "--memory-of", name, *sizes)
    return found


def make_mirrors() -> dict[str, Any]:
    return {MIRROR: PrefixMirror(), TOKENS: PrefixMirror(learns_tokens=True), SETS: DictOfSets()}


def parse_options() -> Options:
    parser = make_parser(__doc__, runs=50)
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="stored blocks of all publishers together"
    )
    parser.add_argument("--publishers", type=int, default=16)
    parser.add_argument("--memory-of", help=SUPPRESS)
    options = read_options(parser, blocks=20_000, runs=3)
    if options.blocks < PROMPT_BLOCKS or options.publishers < 1 or options.runs < 1:
        parser.error(f"at least {PROMPT_BLOCKS} blocks, 1 publisher, 1 run")
    return options


def main() -> None:
    options = parse_options()
    if options.memory_of is not None:
        print_memory(options.memory_of, options)
        return
    provenance = start_run(options, compared=[MIRROR, TOKENS, SETS])
    print_header()
    rows = measure(options)
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
