"""Measure the cost and the gain of runs of consecutive block ids. See benchmarks/README.md."""

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from measuring import Options, gc_off, make_parser, read_options, start_run, write_results
from request_runs import BenchRequest

from kv_pool.contiguous.compaction import Relocation, apply_moves, gather, pack, take_run
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.contiguous.plan import plan_pack
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockMove, GroupId
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay

BLOCK_SIZE = 16
RUN_LENGTH = 16
MAX_RUN = 64
# (clock, tokens per block, blocks)
REPLAYS = [
    ("instant", 512, 10_000),
    ("instant", 512, 3_000),
    ("trace", 512, 10_000),
    ("trace", 512, 3_000),
    ("instant", 16, 100_000),
    ("trace", 16, 100_000),
]
USES = (0.5, 0.8, 0.9, 0.95)
MODES = ("eviction order", "runs preferred", "on demand", "packed", "threshold", "64 a step")
# The spans of a block of Llama-3-8B, 2 MiB for 16 tokens: (bytes, distance between the starts).
KIB = 1024
LAYOUTS = {
    "K and V apart, 32 layers": [(32 * KIB, 32 * KIB)] * 64,
    "32 layers": [(64 * KIB, 64 * KIB)] * 32,
    "block outermost": [(2048 * KIB, 2048 * KIB)],
}


def copy_nothing(moves: Sequence[BlockMove]) -> None:
    """Do nothing; another script measures the copies of bytes."""


# ---- a trace through both pools ------------------------------------------------------------------


def replay(options: Options) -> list[dict[str, Any]]:
    rows = []
    replays = REPLAYS[:1] if options.quick else REPLAYS
    for clock, block_size, num_blocks in replays:
        reports: dict[bool, list[Any]] = {False: [], True: []}
        for _ in range(options.runs):
            for runs in (False, True):
                gc.collect()
                settings = ReplaySettings(
                    options.trace,
                    num_blocks,
                    block_size,
                    clock=clock,
                    limit=300 if options.quick else None,
                    runs=runs,
                )
                reports[runs].append(run_replay(settings))
        times = {
            runs: [sum(call.total_ns for call in (r.look_up, r.allocate, r.free)) / 1e6 for r in found]
            for runs, found in reports.items()
        }
        plain, with_runs = reports[False][0], reports[True][0]
        rows.append(
            {
                "clock": clock,
                "block_size": block_size,
                "num_blocks": num_blocks,
                "blocks_per_run": [plain.blocks_per_run, with_runs.blocks_per_run],
                "hit_rate": [plain.token_hit_rate, with_runs.token_hit_rate],
                "allocator_ms": [times[False], times[True]],
                "ratio": statistics.median(
                    mine / theirs for mine, theirs in zip(times[True], times[False], strict=True)
                ),
            }
        )
    return rows


def show_replay(rows: list[dict[str, Any]]) -> None:
    print("\nthe trace, in eviction order -> with runs preferred")
    print(
        f"{'clock':8}{'tokens':>7}{'blocks':>9}{'blocks per run':>19}{'token hit rate':>20}"
        f"{'points':>8}{'allocator ms':>16}{'ratio':>7}"
    )
    for row in rows:
        (short, long), (before, after) = row["blocks_per_run"], row["hit_rate"]
        times = [statistics.median(times) for times in row["allocator_ms"]]
        print(
            f"{row['clock']:8}{row['block_size']:>7}{row['num_blocks']:>9,}"
            f"{f'{short:.2f} -> {long:.2f}':>19}{f'{before:.2%} -> {after:.2%}':>20}"
            f"{100 * (after - before):>+8.2f}{f'{times[0]:.0f} -> {times[1]:.0f}':>16}{row['ratio']:>7.2f}"
        )


# ---- searching -----------------------------------------------------------------------------------


class Life:
    """Requests of 20 blocks (median) that start, grow block by block and end, at a given use."""

    def __init__(self, pool: RunBlockPool, use: float, rng: random.Random, *, caches: bool) -> None:
        self.pool = pool
        self.rng = rng
        self.caches = caches
        self.num_wanted = int(use * (pool.num_gpu_blocks - 1))
        self.tables: list[list[KVCacheBlock]] = []
        self.num_unwritten: list[int] = []  # token slots in the last block of each table
        self.num_taken = 0
        self.num_hashes = 0

    def step(self) -> None:
        """Start or end one request, so that the use stays constant, and grow eight others."""
        pool, rng = self.pool, self.rng
        num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if num_used >= self.num_wanted and self.tables:
            self.end(rng.randrange(len(self.tables)))
        else:
            count = min(max(1, int(rng.lognormvariate(math.log(20), 0.8))), pool.get_num_free_blocks())
            if count:
                self.add(pool.get_new_blocks(count))
        for _ in range(8):
            if self.tables and pool.get_num_free_blocks():
                position = rng.randrange(len(self.tables))
                table = self.tables[position]
                table.extend(pool.get_new_blocks_after(table[-1], 1))
                self.num_unwritten[position] = rng.randrange(BLOCK_SIZE)
                self.num_taken += 1

    def end(self, position: int) -> None:
        """End a request; the last one of the list takes its place."""
        self.pool.free_blocks(self.tables[position][::-1])
        self.tables[position] = self.tables[-1]
        self.tables.pop()
        self.num_unwritten[position] = self.num_unwritten[-1]
        self.num_unwritten.pop()

    def measure_use(self) -> tuple[float, float]:
        """Return utilisation (share of blocks in use) and token waste (share of unwritten slots in them)."""
        num_used = sum(map(len, self.tables))
        return num_used / (self.pool.num_gpu_blocks - 1), sum(self.num_unwritten) / (num_used * BLOCK_SIZE)

    def add(self, blocks: list[KVCacheBlock]) -> None:
        self.num_taken += len(blocks)
        self.tables.append(blocks)
        self.num_unwritten.append(self.rng.randrange(BLOCK_SIZE))
        if self.caches:
            hashes: list[Any] = [
                number.to_bytes(16, "big") for number in range(self.num_hashes, self.num_hashes + len(blocks))
            ]
            self.num_hashes += len(blocks)
            request: Any = BenchRequest([], hashes)
            self.pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, GroupId(0))


def search(options: Options) -> list[dict[str, Any]]:
    rows = []
    sizes = (2_000,) if options.quick else (10_000, 1_000_000)
    for num_blocks, use in itertools.product(sizes, (0.5, 0.9)):
        rng = random.Random(options.seed)
        pool = RunBlockPool(num_blocks + 1, True, BLOCK_SIZE)
        life = Life(pool, use, rng, caches=True)
        for _ in range(2_000 if options.quick else max(20_000, num_blocks // 10)):
            life.step()
        search_us: list[float] = []
        take_us: list[float] = []
        num_found = 0
        now = time.perf_counter_ns
        with gc_off():
            for number in range(500 if options.quick else 20_000):
                count = rng.randrange(2, MAX_RUN + 1)
                start = now()
                pool.run_index.find_run(count)
                search_us.append((now() - start) / 1e3)
                start = now()
                run = pool.get_new_run(count)  # searches again
                take_us.append((now() - start) / 1e3)
                if run is not None:
                    num_found += 1
                    life.add(run)
                if number % 4 == 0:
                    life.step()
                while pool.get_usage() > use:
                    life.end(rng.randrange(len(life.tables)))
        rows.append(
            {
                "num_blocks": num_blocks,
                "use": use,
                "searches": len(search_us),
                "found": num_found / len(search_us),
                "search_us": summarize(search_us),
                "take_us": summarize(take_us),
            }
        )
    return rows


def summarize(times: list[float]) -> dict[str, float]:
    ordered = sorted(times) or [0.0]
    return {
        "median": statistics.median(ordered),
        "p99": ordered[max(0, -(-len(ordered) * 99 // 100) - 1)],
        "max": ordered[-1],
    }


def show_search(rows: list[dict[str, Any]]) -> None:
    print(f"\na run of 2 to {MAX_RUN} blocks, us")
    print(
        f"{'blocks':>10}{'in use':>8}{'found':>7}{'search':>9}{'p99':>7}{'max':>9}"
        f"{'with taking':>13}{'p99':>7}"
    )
    for row in rows:
        found, taken = row["search_us"], row["take_us"]
        print(
            f"{row['num_blocks']:>10,}{row['use']:>8.0%}{row['found']:>7.0%}{found['median']:>9.1f}"
            f"{found['p99']:>7.1f}{found['max']:>9.1f}{taken['median']:>13.1f}{taken['p99']:>7.1f}"
        )


# ---- fragmentation over a long life --------------------------------------------------------------


class Packed:
    """A pool without bytes that a `Defragmenter` compacts."""

    def __init__(self, pool: RunBlockPool) -> None:
        self.pool = pool
        self.num_moved = 0
        self.step_us: list[float] = []

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        start = time.perf_counter_ns()
        if goal is None:
            relocations = pack(self.pool, copy_nothing, max_moves=max_moves, max_evictions=max_evictions)
        else:
            relocations = [
                gather(self.pool, copy_nothing, goal=goal, max_moves=max_moves, max_evictions=max_evictions)
            ]
        self.step_us.append((time.perf_counter_ns() - start) / 1e3)
        num_moved = sum(len(relocation.moves) for relocation in relocations)
        self.num_moved += num_moved
        return num_moved

    def get_fragmentation_rate(self) -> float:
        return self.pool.get_fragmentation_rate(RUN_LENGTH)

    def note(self, relocation: Relocation) -> None:
        self.num_moved += len(relocation.moves)


def live(options: Options) -> list[dict[str, Any]]:
    rows = []
    num_blocks, num_steps = (1_000, 500) if options.quick else (10_000, 12_000)
    for caches, use, mode in itertools.product((False, True), USES, MODES):
        rng = random.Random(options.seed)
        pool = RunBlockPool(
            num_blocks + 1, True, BLOCK_SIZE, early_share=0.0 if mode == "eviction order" else 0.2
        )
        life = Life(pool, use, rng, caches=caches)
        packed = Packed(pool)
        defragmenter = Defragmenter(
            packed,
            interval_s=0,
            max_moves=64 if mode == "64 a step" else None,
            max_evictions=num_blocks // 100,
        )
        num_refused = num_runs = num_taken = num_moved = num_evicted = 0
        rates: list[float] = []
        uses: list[tuple[float, float]] = []
        for step in range(num_steps):
            life.step()
            if mode in ("threshold", "64 a step"):
                defragmenter.step()
            if mode == "packed" and packed.get_fragmentation_rate() > defragmenter.threshold:
                packed.defragment(num_blocks // 100)
            if mode == "on demand" and step % 20 == 0 and pool.get_num_free_blocks() >= RUN_LENGTH:
                num_runs += 1
                run = take_run(pool, RUN_LENGTH, copy_nothing, packed.note)
                if run is None:
                    num_refused += 1
                else:
                    life.add(run)
            if step == num_steps // 4:  # the pool has reached its final use
                num_taken, num_moved, num_evicted = life.num_taken, packed.num_moved, pool.num_evictions
                packed.step_us.clear()
            if step > num_steps // 4 and step % 25 == 0:
                rates.append(pool.get_unusable_share(RUN_LENGTH))
                uses.append(life.measure_use())
        num_taken = life.num_taken - num_taken
        tables = [[block.block_id for block in table] for table in life.tables]
        rows.append(
            {
                "caches": caches,
                "use": use,
                "mode": mode,
                "unusable_share": {"mean": statistics.mean(rates), "max": max(rates)},
                "utilisation": statistics.mean(used for used, _ in uses),
                "token_waste": statistics.mean(waste for _, waste in uses),
                "moves_per_block": (packed.num_moved - num_moved) / num_taken,
                "step_us": summarize(packed.step_us),
                "blocks_taken": num_taken,
                "runs_refused": num_refused,
                "runs_asked": num_runs,
                "evictions_per_block": (pool.num_evictions - num_evicted) / num_taken,
                "blocks_per_request": statistics.mean(map(len, tables)),
                "descriptors_per_request": {
                    name: statistics.mean(count_descriptors(spans, table) for table in tables)
                    for name, spans in LAYOUTS.items()
                },
            }
        )
    return rows


def count_descriptors(spans: Sequence[tuple[int, int]], block_ids: Sequence[int]) -> int:
    """Return the number of memory pieces of a request's blocks. Merges neighbours within each span only.

    Args:
        spans: for each span of a block, its bytes and the distance to the next block's span.
    """
    count = 0
    for span_bytes, stride in spans:
        end = -1
        for block_id in block_ids:
            count += block_id * stride != end
            end = block_id * stride + span_bytes
    return count


def show_life(rows: list[dict[str, Any]]) -> None:
    print(f"\nfree blocks that cannot serve a run of {RUN_LENGTH}, over a long random life")
    print(
        f"{'cache':6}{'asked':>6}{'in use':>8}{'waste':>7}  {'compaction':15}{'U mean':>8}{'U max':>7}"
        f"{'moves/block':>13}{'evictions/block':>17}{'a step, us':>12}{'p99':>8}"
    )
    for row in rows:
        share, step = row["unusable_share"], row["step_us"]
        print(
            f"{'full' if row['caches'] else 'none':6}{row['use']:>6.0%}{row['utilisation']:>8.1%}"
            f"{row['token_waste']:>7.1%}  {row['mode']:15}{share['mean']:>8.3f}{share['max']:>7.3f}"
            f"{row['moves_per_block']:>13.3f}{row['evictions_per_block']:>17.3f}"
            f"{step['median']:>12.0f}{step['p99']:>8.0f}"
        )
    print("\na request's pieces of memory, neighbours merged, as a transfer would describe them; cache full")
    print(f"{'asked':>6}  {'compaction':15}{'blocks':>8}" + "".join(f"{name:>27}" for name in LAYOUTS))
    for row in rows:
        if row["caches"]:
            pieces = "".join(f"{count:>27.1f}" for count in row["descriptors_per_request"].values())
            print(f"{row['use']:>6.0%}  {row['mode']:15}{row['blocks_per_request']:>8.1f}{pieces}")


# ---- planning and remapping ----------------------------------------------------------------------


def plan(options: Options) -> dict[str, Any]:
    num_blocks, num_moves = (1_000, 100) if options.quick else (10_000, 1_000)
    samples: dict[str, list[float]] = {"plan": [], "apply": [], "remap": [], "all": []}
    now = time.perf_counter_ns
    for number in range(20 if options.quick else 100):
        rng = random.Random(options.seed + number)
        pool = RunBlockPool(num_blocks + 1, True, BLOCK_SIZE)
        life = Life(pool, 1.0, rng, caches=True)
        while pool.get_num_free_blocks():
            life.step()
        held = [block for table in life.tables for block in table]
        free = rng.sample(held, 2 * num_moves)
        pool.evict_blocks([block.block_id for block in free])
        pool.free_blocks(free)
        with gc_off():
            start = now()
            moves = plan_pack(pool, max_moves=num_moves)
            planned = now()
            relocation = apply_moves(pool, moves, copy_nothing)
            applied = now()
            relocation.make_remap()
            end = now()
        if len(moves) != num_moves:
            raise RuntimeError(f"{len(moves)} moves were planned instead of {num_moves}")
        for name, duration in zip(
            samples, (planned - start, applied - planned, end - applied, end - start), strict=True
        ):
            samples[name].append(duration / 1e3)
    return {
        "num_blocks": num_blocks,
        "num_moves": num_moves,
        "us": {k: summarize(v) for k, v in samples.items()},
    }


def show_plan(row: dict[str, Any]) -> None:
    print(f"\n{row['num_moves']:,} moves in a pool of {row['num_blocks']:,}, most of it cached, us")
    for name, times in row["us"].items():
        print(f"  {name:8}{times['median']:>9.0f}   p99 {times['p99']:.0f}")


def main() -> None:
    parser = make_parser(__doc__, runs=3)
    parser.add_argument("--trace", default="mooncake_conversation", help="name of a bundled trace, or a file")
    options = read_options(parser, runs=3)
    provenance = start_run(options)
    results: dict[str, Any] = {"provenance": provenance}
    for name, measure, show in (
        ("plan", plan, show_plan),
        ("search", search, show_search),
        ("life", live, show_life),
        ("replay", replay, show_replay),
    ):
        results[name] = measure(options)
        show(results[name])
    write_results(options, results)


if __name__ == "__main__":
    main()
