"""Measure the cost of the pool's operations, per block. See benchmarks/README.md for the columns."""

import argparse
import gc
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring import Row, Sample, describe_run, interleave, resident_bytes, summarize, write_results
from plain_source import import_plain, import_plain_aside

COMPILED, PLAIN, VLLM = "kv_pool compiled", "kv_pool plain", "vLLM"

BLOCK_SIZE = 16
HASH_BYTES = 32
REQUEST_BLOCKS = 64
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


@dataclass
class BenchRequest:
    """The attributes of a request that kv_pool and vLLM read."""

    all_token_ids: list[int]
    block_hashes: list[bytes]
    request_id: str = "bench"
    lora_request: None = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: None = None
    prompt_embeds: None = None
    session_id: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


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
    from vllm import envs
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.block_pool import BlockPool

    envs.enable_envs_cache()  # as vLLM's engine does after start-up
    logging.getLogger("vllm").setLevel(logging.ERROR)

    def make_hasher(algorithm: str) -> HashRequest:
        hash_function = hashing.get_hash_fn_by_name(VLLM_HASH_NAMES[algorithm])
        kv_cache_utils.init_none_hash(hash_function)
        hash_request: HashRequest = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_function)
        return hash_request

    return Implementation(VLLM, BlockPool, make_hasher)


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


def make_request(rng: random.Random, num_blocks: int, with_tokens: bool = True) -> BenchRequest:
    """Return a request with new hashes; its tokens are read only for events."""
    num_tokens = num_blocks * BLOCK_SIZE if with_tokens else 0
    return BenchRequest(
        all_token_ids=[rng.randrange(128_000) for _ in range(num_tokens)],
        block_hashes=[rng.randbytes(HASH_BYTES) for _ in range(num_blocks)],
    )


def run_request(pool: Any, request: BenchRequest) -> None:
    """Allocate the request's blocks, cache all of them, free them tail first."""
    num_blocks = len(request.block_hashes)
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK_SIZE, 0)
    pool.free_blocks(reversed(blocks))


def fill_cache(pool: Any, rng: random.Random, request_blocks: int) -> list[BenchRequest]:
    """Cache every block of the pool, then free all. Return the requests, the next to be evicted first."""
    requests = []
    left = pool.get_num_free_blocks()
    while left:
        request = make_request(rng, min(request_blocks, left))
        run_request(pool, request)
        left -= len(request.block_hashes)
        requests.append(request)
    pool.take_events()
    return requests


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


def measure_here(implementations: list[Implementation], options: argparse.Namespace) -> list[Row]:
    num_blocks: int = options.blocks
    seed: int = options.seed
    rows = []

    def measure(title: str, unit: str, make_sample: Callable[[Implementation], Sample]) -> None:
        samples = {implementation.name: make_sample(implementation) for implementation in implementations}
        rows.append(interleave(title, unit, samples, options.runs))
        print_row(rows[-1])

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
    rng = random.Random(seed)
    token_ids = [rng.randrange(128_000) for _ in range(PROMPT_TOKENS)]
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


def time_collection() -> float:
    """Return the duration of one full collection, in ms."""
    start = time.perf_counter_ns()
    gc.collect()
    return (time.perf_counter_ns() - start) / 1e6


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


def run_child(*arguments: str) -> Any:
    """Run code in a new interpreter. Return the JSON in its last line of output."""
    command = [sys.executable, *arguments]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def measure_builds(names: list[str], options: argparse.Namespace) -> list[Row]:
    num_blocks: int = options.build_blocks
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(1 if options.quick else 5):
        for name in names:
            answers[name].append(run_child(__file__, "--child-builds", name, str(num_blocks)))
    rows = []
    for key, (title, unit) in BUILD_ROWS.items():
        samples = {name: [answer[key] for answer in answers[name]] for name in names}
        rows.append(Row(title.format(num_blocks), unit, samples))
        print_row(rows[-1])
    return rows


def measure_imports(names: list[str], options: argparse.Namespace) -> list[Row]:
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
    row = Row("import kv_pool in a fresh process", "ms", {name: [] for name in names})
    for run in range(-1, 2 if options.quick else 10):
        for name in names:
            code = f"{before[name]}; print(json.dumps([time.perf_counter_ns() - start, {report}]))"
            # -P: ignore the current directory, so that the installed kv_pool is imported.
            elapsed_ns, heavy = run_child("-P", "-c", code)
            if heavy:
                raise RuntimeError(f"import kv_pool imports {', '.join(heavy)}")
            if run >= 0:  # the first writes the bytecode files
                row.samples[name].append(elapsed_ns / 1e6)
    print_row(row)
    print(f"{'':4}not imported by it: {', '.join(HEAVY_MODULES)}")
    return [row]


# ---- results -------------------------------------------------------------------------------------


def ratio_to_vllm(row: Row, name: str) -> float | None:
    """Return vLLM's median divided by this one; None if one of them prints as 0.00."""
    if VLLM not in row.samples:
        return None
    median = summarize(row.samples[name])[1]
    theirs = summarize(row.samples[VLLM])[1]
    return theirs / median if min(median, theirs) >= 0.005 else None


def print_header() -> None:
    print(f"{'':26}{'unit':>10}{'median':>11}{'p10':>11}{'p90':>11}{'runs':>6}{'vLLM / this':>13}")


def print_row(row: Row) -> None:
    print(row.title)
    for name, samples in row.samples.items():
        low, median, high = summarize(samples)
        ratio = ratio_to_vllm(row, name)
        shown = "-" if ratio is None else f"{ratio:.2f}"
        figures = "".join(f"{figure:>11,.{2 if abs(figure) < 100 else 0}f}" for figure in (median, low, high))
        print(f"    {name:22}{row.unit:>10}{figures}{len(samples):>6}{shown:>13}", flush=True)


def write_json(path: Path, provenance: dict[str, Any], rows: list[Row]) -> None:
    results = []
    for row in rows:
        figures = {}
        for name, samples in row.samples.items():
            low, median, high = summarize(samples)
            figures[name] = {
                "median": median,
                "p10": low,
                "p90": high,
                "runs": len(samples),
                "vllm_over_this": ratio_to_vllm(row, name),
            }
        results.append({"title": row.title, "unit": row.unit, "figures": figures, "samples": row.samples})
    write_results(path, {"provenance": provenance, "rows": results})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of the pools in most rows")
    parser.add_argument(
        "--build-blocks", type=int, default=1_000_000, help="blocks of the pools in the rows on building"
    )
    parser.add_argument("--runs", type=int, default=100, help="runs of each row in this process")
    parser.add_argument("--seed", type=int, default=0, help="seed of token ids and hashes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke test: 3 runs, 2,000 blocks, no builds of vLLM; its figures mean nothing",
    )
    parser.add_argument("--child-builds", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.runs, options.blocks, options.build_blocks = 3, 5_000, 20_000
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
    provenance = describe_run(names)
    for key, value in provenance.items():
        listed = (
            ", ".join(f"{name} {number}" for name, number in value.items()) if key == "versions" else value
        )
        print(f"{key:22}{', '.join(listed) if isinstance(listed, list) else listed}")
    print()
    print_header()
    rows = measure_here(implementations, options)
    builds = names
    if options.quick and VLLM in names:
        builds = [name for name in names if name != VLLM]
        print("not measured with --quick: building vLLM's pool, whose import alone takes seconds")
    rows += measure_builds(builds, options)
    rows += measure_imports([name for name in names if name != VLLM], options)
    if options.json:
        write_json(options.json, provenance, rows)


if __name__ == "__main__":
    main()
