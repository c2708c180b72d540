"""Measure the cost of the pool's operations, per block. See benchmarks/README.md for the columns."""

import gc
import json
import os
import random
import statistics
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring import (
    Options,
    Row,
    Sample,
    interleave,
    make_parser,
    print_header,
    read_options,
    resident_bytes,
    run_child,
    start_run,
    time_ms,
    write_results,
)
from plain_source import import_plain, import_plain_aside
from request_runs import (
    BLOCK_SIZE,
    REQUEST_BLOCKS,
    BenchRequest,
    draw_tokens,
    fill_cache,
    make_request,
    make_vllm_hasher,
    run_request,
)

COMPILED, PLAIN, VLLM = "kv_pool compiled", "kv_pool plain", "vLLM"

HIT_BLOCKS = 256
# A pool whose map, keys and blocks fit into the processor's caches, in addition to the one of --blocks.
SMALL_BLOCKS = 10_000
# Work per sample: at most a few milliseconds, less than the usual time slice of another process.
SAMPLE_BLOCKS = 1_000
# More if each block is a different one, so that the caches' earlier content is soon replaced.
EVICTED_BLOCKS = 4_000
PROMPT_TOKENS = 50_000
HEAVY_MODULES = ("torch", "zmq", "matplotlib", "numpy")
# kv_pool's name of an algorithm -> vLLM's name.
VLLM_HASH_NAMES = {"xxh3_128": "xxhash", "sha256": "sha256", "sha256_cbor": "sha256_cbor"}


HashRequest = Callable[[BenchRequest], Sequence[bytes]]


@dataclass
class Implementation:
    """A compared pool: its class, and a function that returns its request hasher by kv_pool's name."""

    name: str
    pool_class: Callable[..., Any]
    make_hasher: Callable[[str], HashRequest]


# ---- the implementations -------------------------------------------------------------------------


def wrap_kv_pool(name: str, package: ModuleType) -> Implementation:
    def make_hasher(algorithm: str) -> HashRequest:
        # vLLM uses PYTHONHASHSEED as the seed if it is set.
        seed = os.environ.get("PYTHONHASHSEED")
        hash_request: HashRequest = package.BlockHasher(algorithm, seed, BLOCK_SIZE).hash_request
        return hash_request

    return Implementation(name, package.BlockPool, make_hasher)


def import_vllm() -> Implementation:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import envs
    from vllm.v1.core.block_pool import BlockPool

    envs.enable_envs_cache()  # as vLLM's engine does after start-up
    return Implementation(VLLM, BlockPool, lambda algorithm: make_vllm_hasher(VLLM_HASH_NAMES[algorithm]))


def import_one(name: str) -> Implementation:
    """Import only the implementation with this name."""
    if name == VLLM:
        return import_vllm()
    if name == PLAIN:
        return wrap_kv_pool(PLAIN, import_plain())
    import kv_pool

    return wrap_kv_pool(COMPILED, kv_pool)


def import_all() -> list[Implementation]:
    """Import all implementations that are available; print which are missing and why."""
    found = []
    plain = import_plain_aside()
    import kv_pool

    if kv_pool.COMPILED:
        found.append(wrap_kv_pool(COMPILED, kv_pool))
    else:
        print("missing: kv_pool compiled; the installed kv_pool is plain Python")
    if plain.COMPILED:
        raise RuntimeError("the package loaded as plain Python is compiled")
    found.append(wrap_kv_pool(PLAIN, plain))
    try:
        found.append(import_vllm())
    except ImportError as error:
        print(f"missing: vLLM ({error}); ratios to it are omitted")
    return found


# ---- rows measured in this process ---------------------------------------------------------------


def sample_take_and_free(num_blocks: int, take: int, implementation: Implementation) -> Sample:
    pool = implementation.pool_class(num_blocks, True, BLOCK_SIZE)
    rounds = SAMPLE_BLOCKS // take

    def sample() -> float:
        start = time.perf_counter_ns()
        for _ in range(rounds):
            pool.free_blocks(pool.get_new_blocks(take))
        return (time.perf_counter_ns() - start) / (rounds * take)

    return sample


def sample_evictions(num_blocks: int, seed: int, events: bool, implementation: Implementation) -> Sample:
    rng = random.Random(seed)
    pool = implementation.pool_class(num_blocks, True, BLOCK_SIZE, enable_kv_cache_events=events)
    fill_cache(pool, rng, REQUEST_BLOCKS)
    num_cached = len(pool.cached_block_hash_to_block)
    num_requests = EVICTED_BLOCKS // REQUEST_BLOCKS

    def sample() -> float:
        requests = [make_request(rng, REQUEST_BLOCKS, events) for _ in range(num_requests)]
        num_events = 0
        start = time.perf_counter_ns()
        if events:
            for request in requests:
                run_request(pool, request)
                num_events += len(pool.take_events())
        else:
            for request in requests:
                run_request(pool, request)
        elapsed = time.perf_counter_ns() - start
        # Every allocated block evicted a cached one and is cached itself.
        if len(pool.cached_block_hash_to_block) != num_cached or num_cached != num_blocks - 1:
            raise RuntimeError(f"{implementation.name}: the cache did not stay full")
        if num_events != (num_requests * (REQUEST_BLOCKS + 1) if events else 0):
            raise RuntimeError(f"{implementation.name}: {num_events} events")
        return elapsed / (num_requests * REQUEST_BLOCKS)

    return sample


def sample_prefix_hits(num_blocks: int, seed: int, one_call: bool, implementation: Implementation) -> Sample:
    """Measure hits. `one_call` uses `find_cached_prefix`; vLLM has no such call and ignores it."""
    pool = implementation.pool_class(num_blocks, True, BLOCK_SIZE)
    prefixes = [
        request.block_hashes
        for request in fill_cache(pool, random.Random(seed), HIT_BLOCKS)
        if len(request.block_hashes) == HIT_BLOCKS
    ]
    num_hits = min(SAMPLE_BLOCKS // HIT_BLOCKS, len(prefixes))
    one_call = one_call and implementation.name != VLLM
    group_ids = [0]
    turn = 0

    def sample() -> float:
        nonlocal turn
        chosen = [prefixes[(turn + index) % len(prefixes)] for index in range(num_hits)]
        turn += num_hits
        num_found = 0
        start = time.perf_counter_ns()
        for hashes in chosen:
            if one_call:
                blocks = pool.find_cached_prefix(hashes, HIT_BLOCKS)
            else:
                blocks = []
                for block_hash in hashes:
                    found = pool.get_cached_block(block_hash, group_ids)
                    if found is None:
                        break
                    blocks.append(found[0])
            pool.touch(blocks)
            pool.free_blocks(reversed(blocks))
            num_found += len(blocks)
        elapsed = time.perf_counter_ns() - start
        if num_found != num_hits * HIT_BLOCKS:
            raise RuntimeError(f"{implementation.name}: {num_found} blocks hit")
        return elapsed / num_found

    return sample


def sample_hashing(algorithm: str, token_ids: list[int], implementation: Implementation) -> Sample:
    make_hasher = implementation.make_hasher

    def sample() -> float:
        hash_request = make_hasher(algorithm)  # each time: vLLM keeps the root hash in a global
        request = BenchRequest(token_ids, [])
        start = time.perf_counter_ns()
        hashes = hash_request(request)
        elapsed = time.perf_counter_ns() - start
        if len(hashes) != len(token_ids) // BLOCK_SIZE:
            raise RuntimeError(f"{implementation.name}: {len(hashes)} hashes")
        return elapsed / 1e6

    return sample


def measure_here(implementations: list[Implementation], options: Options) -> list[Row]:
    num_blocks: int = options.blocks
    seed: int = options.seed
    rows = []

    def measure(title: str, unit: str, make_sample: Callable[[Implementation], Sample]) -> None:
        samples = {implementation.name: make_sample(implementation) for implementation in implementations}
        rows.append(interleave(title, unit, samples, options.runs, VLLM))
        rows[-1].print()

    for take in (1, 10, 100, 1000):
        title = f"take and give back {take} of {num_blocks:,} blocks"
        measure(title, "ns/block", partial(sample_take_and_free, num_blocks, take))
    for size in (SMALL_BLOCKS, num_blocks):
        for events in (False, True):
            kind = "events" if events else "no events"
            title = f"full cache of {size:,}, {kind}: take {REQUEST_BLOCKS}, cache, free"
            measure(title, "ns/block", partial(sample_evictions, size, seed, events))
    title = f"hit of {HIT_BLOCKS} blocks by get_cached_block, touch, free"
    measure(title, "ns/block", partial(sample_prefix_hits, num_blocks, seed, False))
    title = f"hit of {HIT_BLOCKS} blocks by find_cached_prefix (vLLM: get_cached_block), touch, free"
    measure(title, "ns/block", partial(sample_prefix_hits, num_blocks, seed, True))
    token_ids = draw_tokens(random.Random(seed), PROMPT_TOKENS)
    for algorithm in VLLM_HASH_NAMES:
        title = f"hash {PROMPT_TOKENS:,} tokens, {algorithm}"
        measure(title, "ms/prompt", partial(sample_hashing, algorithm, token_ids))
    check_same_hashes(implementations, token_ids)
    return rows


def check_same_hashes(implementations: list[Implementation], token_ids: list[int]) -> None:
    """Verify that all agree on `sha256_cbor`, which is defined byte for byte."""
    answers = {tuple(one.make_hasher("sha256_cbor")(BenchRequest(token_ids, []))) for one in implementations}
    if len(answers) != 1:
        raise RuntimeError("the implementations disagree about sha256_cbor")


# ---- rows measured in child processes ------------------------------------------------------------


time_collection = time_ms(gc.collect)


def build_and_drop(name: str, num_blocks: int) -> dict[str, float]:
    """Build one pool in this process and drop it. Return the measurements by row."""
    pool_class = import_one(name).pool_class
    gc.collect()
    gc.freeze()  # from here on a collection visits the pool only
    empty_ms = statistics.median(time_collection() for _ in range(5))
    before = resident_bytes()
    start = time.perf_counter_ns()
    pools = [pool_class(num_blocks, True, BLOCK_SIZE)]
    build_ns = time.perf_counter_ns() - start
    built = resident_bytes()
    first_ms = time_collection()
    later_ms = statistics.median(time_collection() for _ in range(5))
    start = time.perf_counter_ns()
    pools.clear()
    drop_ms = (time.perf_counter_ns() - start) / 1e6
    dropped = resident_bytes()
    drop_collect_ms = time_collection()
    collected = resident_bytes()
    return {
        "build": build_ns / 1e9,
        "memory": (built - before) / num_blocks,
        "first": first_ms - empty_ms,
        "later": later_ms - empty_ms,
        "drop": drop_ms,
        "kept": (dropped - before) / num_blocks,
        "drop_collect": drop_ms + drop_collect_ms,
        "kept_collect": (collected - before) / num_blocks,
    }


BUILD_ROWS = {
    "build": ("build a pool of {:,} blocks", "s"),
    "memory": ("memory of {:,} blocks", "B/block"),
    "first": ("first full GC beside {:,} blocks", "ms"),
    "later": ("later full GC beside {:,} blocks", "ms"),
    "drop": ("drop {:,} blocks: del", "ms"),
    "kept": ("memory not returned after del", "B/block"),
    "drop_collect": ("drop {:,} blocks: del and gc.collect()", "ms"),
    "kept_collect": ("memory not returned after del and gc.collect()", "B/block"),
}


def measure_builds(names: list[str], options: Options) -> list[Row]:
    num_blocks: int = options.build_blocks
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(1 if options.quick else 5):
        for name in names:
            answers[name].append(run_child(__file__, "--child-builds", name, str(num_blocks)))
    rows = []
    for key, (title, unit) in BUILD_ROWS.items():
        samples = {name: [answer[key] for answer in answers[name]] for name in names}
        rows.append(Row(title.format(num_blocks), unit, samples, VLLM))
        rows[-1].print()
    return rows


def measure_imports(names: list[str], options: Options) -> list[Row]:
    """Measure `import kv_pool` inside new interpreters."""
    report = f"[m for m in {HEAVY_MODULES!r} if m in sys.modules]"
    clock = "import sys, time, json"
    before = {
        COMPILED: f"{clock}; start = time.perf_counter_ns(); import kv_pool",
        PLAIN: (
            f"{clock}; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r}); "
            "from plain_source import import_plain; start = time.perf_counter_ns(); import_plain(False)"
        ),
    }
    row = Row("import kv_pool in a fresh process", "ms", {name: [] for name in names}, VLLM)
    for run in range(-1, 2 if options.quick else 10):
        for name in names:
            code = f"{before[name]}; print(json.dumps([time.perf_counter_ns() - start, {report}]))"
            # -P: ignore the current directory, so that the installed kv_pool is imported.
            elapsed_ns, heavy = run_child("-P", "-c", code)
            if heavy:
                raise RuntimeError(f"import kv_pool imports {', '.join(heavy)}")
            if run >= 0:  # the first writes the bytecode files
                row.samples[name].append(elapsed_ns / 1e6)
    row.print()
    print(f"{'':4}not imported by it: {', '.join(HEAVY_MODULES)}")
    return [row]


# ---- the command ---------------------------------------------------------------------------------


def parse_options() -> Options:
    parser = make_parser(__doc__, runs=100)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of the pools in most rows")
    parser.add_argument(
        "--build-blocks", type=int, default=1_000_000, help="blocks of the pools in the rows on building"
    )
    parser.add_argument("--child-builds", nargs=2, help=SUPPRESS)
    options = read_options(parser, runs=3, blocks=5_000, build_blocks=20_000)
    if options.runs < 1 or min(options.blocks, options.build_blocks) <= 1_000:
        parser.error("at least 1 run and more than 1,000 blocks")
    return options


def main() -> None:
    options = parse_options()
    if options.child_builds:
        name, num_blocks = options.child_builds
        print(json.dumps(build_and_drop(name, int(num_blocks))))
        return
    implementations = import_all()
    names = [implementation.name for implementation in implementations]
    provenance = start_run(options, compared=names)
    print_header("vLLM / this")
    rows = measure_here(implementations, options)
    builds = names
    if options.quick and VLLM in names:
        builds = [name for name in names if name != VLLM]
        print("not measured with --quick: building vLLM's pool, whose import alone takes seconds")
    rows += measure_builds(builds, options)
    rows += measure_imports([name for name in names if name != VLLM], options)
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
