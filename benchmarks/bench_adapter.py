"""Measure the cost of `GPUKVPool`'s calls and the fragmentation of free blocks. See benchmarks/README.md."""

import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from measuring import Options, make_parser, read_options, start_run, timed, write_results

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.ids import BlockHash, BlockId, SequenceId

REQUEST_BLOCKS = 10
TEN, ANY = (REQUEST_BLOCKS, REQUEST_BLOCKS), (1, 32)
NUM_THREADS = 8
NUM_SHARERS, SHARED_BLOCKS = 2_000, 100
Times = dict[str, list[float]]
Measured = tuple[Times, dict[str, Any]]


def is_one_run(ids: list[BlockId]) -> bool:
    return max(ids) - min(ids) == len(ids) - 1


def fill_and_empty(options: Options) -> Measured:
    """Allocate requests of 10 blocks until the pool is full, then free all in order of arrival."""
    times: Times = defaultdict(list)
    given = []
    for _ in range(options.runs):
        pool = GPUKVPool(options.blocks, 16)
        requests = [
            BlockAllocationRequest(REQUEST_BLOCKS, SequenceId(number))
            for number in range(options.blocks // REQUEST_BLOCKS)
        ]
        taken = [timed(times["allocate"], pool.allocate, request) for request in requests]
        for ids in taken:
            timed(times["free"], pool.free, ids)
        given += taken
    return times, {"in one run": sum(map(is_one_run, given)) / len(given)}


def live(
    options: Options, use: float, sizes: tuple[int, int], *, cached: bool = False, halves: bool = False
) -> Measured:
    """Let requests of some blocks start; random ones end so that at most this share of the pool is in use.

    Args:
        cached: cache every block, so that none is empty.
        halves: half of those that end free only the first half of their blocks; compact every 1,000 requests.
    """
    rng = random.Random(options.seed)
    times: Times = defaultdict(list)
    pool = GPUKVPool(options.blocks, 16)
    sequences: list[SequenceId] = []
    num_several = num_in_runs = moved = 0
    before, after = [], []
    num_warm_up = 0 if halves else 3 * int(options.blocks * use) // sizes[0]
    for step in range(num_warm_up + options.runs * 1000):
        if step == num_warm_up:
            times.clear()
            num_several = num_in_runs = 0
        sequence_id = SequenceId(step)
        num_blocks = rng.randint(*sizes)
        while pool.get_free_blocks() < options.blocks * (1 - use) + num_blocks:
            at = rng.randrange(len(sequences))
            held = pool.blocks_of(sequences[at])
            if halves and len(held) > 1 and rng.random() < 0.5:
                held = held[: len(held) // 2]
            else:
                sequences[at] = sequences[-1]
                sequences.pop()
            timed(times["free"], pool.free, held)
        ids = timed(times["allocate"], pool.allocate, BlockAllocationRequest(num_blocks, sequence_id))
        sequences.append(sequence_id)
        num_several += num_blocks > 1
        num_in_runs += num_blocks > 1 and is_one_run(ids)
        if cached:
            pool.cache_prefix(sequence_id, [BlockHash(rng.randbytes(32)) for _ in ids])
        if halves and step % 1000 == 999:
            before.append(pool.block_pool.get_unusable_share())
            moved += timed(times["defragment"], pool.defragment)
            after.append(pool.block_pool.get_unusable_share())
    facts = {"in one run": num_in_runs / num_several}
    if halves:
        facts |= {"U(16) before": statistics.mean(before), "U(16) after": statistics.mean(after)}
        facts["blocks moved"] = moved / options.runs
    return times, facts


def share(options: Options) -> Measured:
    """Let 2,000 sequences share 100 blocks, then end them in order of arrival."""
    times: Times = {"fork": [], "free_sequence": []}
    pool = GPUKVPool(options.blocks, 16)
    first = SequenceId(0)
    pool.allocate(BlockAllocationRequest(SHARED_BLOCKS, first))
    sharers = [SequenceId(1 + number) for number in range(NUM_SHARERS)]
    for _ in range(options.runs):
        for sequence_id in sharers:
            timed(times["fork"], pool.fork, first, sequence_id)
        for sequence_id in sharers:
            timed(times["free_sequence"], pool.free_sequence, sequence_id)
    return times, {"sequences": NUM_SHARERS, "blocks": SHARED_BLOCKS}


def count_calls(options: Options, num_threads: int, num_pools: int) -> tuple[float, float]:
    """Start and end sequences of 10 blocks, 8 at a time in all threads together.

    Returns:
        Calls per second, and per second of processor time.
    """
    pools = [GPUKVPool(options.blocks, 16) for _ in range(num_pools)]
    num_own = NUM_THREADS // num_threads
    num_steps = options.runs * 1000 // num_threads
    ready = threading.Barrier(num_threads + 1)

    def run(first: int, pool: GPUKVPool) -> None:
        ids = cast("Sequence[SequenceId]", range(first, first + num_own - 1 + num_steps))
        for sequence_id in ids[: num_own - 1]:
            pool.allocate(BlockAllocationRequest(REQUEST_BLOCKS, sequence_id))
        ready.wait()
        for started_id, ended_id in zip(ids[num_own - 1 :], ids, strict=False):
            pool.allocate(BlockAllocationRequest(REQUEST_BLOCKS, started_id))
            pool.free_sequence(ended_id)

    threads = [
        threading.Thread(target=run, args=(at * 10**9, pools[at % num_pools])) for at in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    ready.wait()
    started, started_cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    num_calls = 2 * num_threads * num_steps
    return num_calls / (time.perf_counter() - started), num_calls / (time.process_time() - started_cpu)


def compare_threads(options: Options) -> dict[str, Any]:
    """Measure one thread, eight, and eight with a pool each, in turn: the medians of 15 rates each.

    Eight threads with a pool each show what sharing the interpreter costs.
    """
    lanes = {
        "1 thread": (1, 1),
        f"{NUM_THREADS} threads": (NUM_THREADS, 1),
        f"{NUM_THREADS} threads, a pool each": (NUM_THREADS, NUM_THREADS),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in lanes}
    for _ in range(15):
        for name, (num_threads, num_pools) in lanes.items():
            rates[name].append(count_calls(options, num_threads, num_pools))
    row: dict[str, Any] = {"title": "10 blocks each, 8 sequences at a time"}
    for name, found in rates.items():
        per_second, per_cpu_second = (statistics.median(column) for column in zip(*found, strict=True))
        title = f"{row['title']}, {name}"
        print(f"{title:<68} {per_second:12,.0f} calls/s {per_cpu_second:12,.0f} calls/s of the processor")
        row[name] = {"per second": per_second, "per processor second": per_cpu_second}
    return row


def print_row(title: str, call: str, times: list[float]) -> dict[str, float]:
    micros = sorted(times)
    found = {f"p{share}": micros[int((len(micros) - 1) * share / 100)] for share in (10, 50, 90, 99)}
    print(
        f"{title:<46} {call:<11} {found['p50']:8.1f} {found['p10']:8.1f} {found['p90']:8.1f} "
        f"{found['p99']:8.1f} {len(micros):8}"
    )
    return {**found, "calls": len(micros)}


def main() -> None:
    parser = make_parser(__doc__, runs=20)
    parser.add_argument("--blocks", type=int, default=10_000)
    options = read_options(parser)
    provenance = start_run(options)
    print(f"{'microseconds a call':<58} {'median':>8} {'p10':>8} {'p90':>8} {'p99':>8} {'calls':>8}")
    rows = []
    for title, measure in (
        ("fill and empty, 10 blocks each", fill_and_empty),
        ("80% in use, 10 blocks each", partial(live, use=0.8, sizes=TEN)),
        ("99% in use, 10 blocks each", partial(live, use=0.99, sizes=TEN)),
        ("80% in use, all the rest cached", partial(live, use=0.8, sizes=TEN, cached=True)),
        ("90% in use, 1 to 32 blocks, halves given back", partial(live, use=0.9, sizes=(1, 32), halves=True)),
        (
            "90% in use, 1 to 32 blocks, all the rest cached",
            partial(live, use=0.9, sizes=(1, 32), cached=True),
        ),
        ("a prefix that 2,000 sequences share", share),
    ):
        times, facts = measure(options)
        calls = {call: print_row(title, call, values) for call, values in times.items()}
        print("    " + ", ".join(f"{name} {value:.3f}" for name, value in facts.items()))
        rows.append({"title": title, "calls": calls, **facts})
    rows.append(compare_threads(options))
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
