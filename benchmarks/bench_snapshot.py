"""Measure how long a snapshot of the event stream delays other threads. See benchmarks/README.md."""

import gc
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from measuring import (
    Options,
    make_parser,
    read_options,
    resident_bytes,
    start_run,
    write_results,
)
from request_runs import BLOCK_SIZE, draw_tokens

import kv_pool
from kv_pool.core.kv_events import MEDIUM_GPU, BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.events.stream_state import StreamState
from kv_pool.ids import GroupId
from kv_pool.threads import YieldTimer

BATCH_BLOCKS = 64
STEP_BLOCKS = 64
HELD_UP_NS = 200_000
NEVER_RESTS = 10**15
SWITCH_INTERVALS_S = (0.005, 0.001, 0.0002)
# The kinds of the pool's thread: "works" never releases the GIL, "steps" waits 5 ms after each 5 ms.
POOL_THREADS = ("works", "steps")
STEP_NS = 5_000_000

Result = dict[str, Any]


def make_state(num_blocks: int, seed: int, keeps_token_ids: bool) -> StreamState:
    """Return a state with requests of 1 to 256 blocks; half continue from a block of an earlier request."""
    rng = random.Random(seed)
    state = StreamState(keeps_token_ids=keeps_token_ids)
    known: list[int | bytes] = []
    while len(known) < num_blocks:
        length = min(rng.randrange(1, 257), num_blocks - len(known))
        hashes: list[int | bytes] = [rng.getrandbits(64) for _ in range(length)]
        parent = rng.choice(known) if known and rng.random() < 0.5 else None
        state.apply([make_stored(rng, hashes, parent)])
        known += hashes
    return state


def make_stored(rng: random.Random, hashes: list[int | bytes], parent: int | bytes | None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=draw_tokens(rng, len(hashes) * BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
        extra_keys=[None] * len(hashes),
        group_idx=GroupId(0),
        kv_cache_spec_kind="full_attention",
    )


class PoolThread:
    """A thread that repeatedly takes and gives back blocks.

    Attributes:
        turns_ns: duration of each turn; if the thread sleeps, also the delay of each wake-up.
    """

    def __init__(self, kind: str) -> None:
        self.is_working = kind == "works"
        self.pool = kv_pool.BlockPool(10_000, True, BLOCK_SIZE)
        self.turns_ns: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "PoolThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pool, clock, turns_ns = self.pool, time.perf_counter_ns, self.turns_ns
        before = clock()
        while not self._stop.is_set():
            step_end = before + STEP_NS
            while before < step_end:
                pool.free_blocks(pool.get_new_blocks(STEP_BLOCKS))
                now = clock()
                turns_ns.append(now - before)
                before = now
            if not self.is_working:
                time.sleep(STEP_NS / 1e9)
                turns_ns.append(clock() - before - STEP_NS)
                before = clock()


class MeasuredTimer(YieldTimer):
    """Records the CPU time of its thread between two yields; waiting for a core does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces_ns: list[int] = []
        self._rested_ns = time.thread_time_ns()

    def yield_now(self) -> None:
        self.pieces_ns.append(time.thread_time_ns() - self._rested_ns)
        super().yield_now()
        self._rested_ns = time.thread_time_ns()


def take_and_encode(state: StreamState, yield_timer: YieldTimer | None) -> Result:
    """Take one snapshot and encode it list by list, like a publisher."""
    encoder = msgspec.msgpack.Encoder()
    start = time.perf_counter()
    _, chunks = state.iter_snapshot(yield_timer=yield_timer)
    num_events = num_bytes = 0
    for chunk in chunks:
        num_events += len(chunk)
        num_bytes += len(encoder.encode(chunk))
    return {"seconds": time.perf_counter() - start, "events": num_events, "bytes": num_bytes}


def measure_memory(options: Options) -> tuple[dict[str, float], StreamState]:
    """Return resident memory per block of states without token ids and with them, and the latter state."""
    per_block = {}
    states = []  # freed memory would be reused by the next state
    for keeps_token_ids in (False, True):
        gc.collect()
        before = resident_bytes()
        states.append(make_state(options.blocks, options.seed, keeps_token_ids))
        gc.collect()
        name = "with token ids" if keeps_token_ids else "without"
        per_block[name] = (resident_bytes() - before) / options.blocks
    return per_block, states[-1]


WAYS: dict[str, Callable[[], YieldTimer | None]] = {
    "no snapshot": lambda: None,
    "in pieces": lambda: None,
    "without rests": lambda: YieldTimer(work_ns=NEVER_RESTS),
}


def measure_stalls(state: StreamState, options: Options) -> list[Result]:
    """Measure turns of the pool's thread during snapshots, and without them."""
    rows = []
    for kind in POOL_THREADS:
        for interval_s in SWITCH_INTERVALS_S:
            for name, make_timer in WAYS.items():
                sys.setswitchinterval(interval_s)
                turns_ns: list[int] = []
                seconds = []
                for _ in range(options.runs):
                    with PoolThread(kind) as thread:
                        time.sleep(0.05)
                        first = len(thread.turns_ns)
                        if name == "no snapshot":
                            time.sleep(options.idle_s)
                        else:
                            seconds.append(take_and_encode(state, make_timer())["seconds"])
                        time.sleep(0.02)  # lets the last delayed turn end
                        turns_ns += thread.turns_ns[first:]
                sys.setswitchinterval(SWITCH_INTERVALS_S[0])
                turns_ns.sort()
                held_up = [turn for turn in turns_ns if turn > HELD_UP_NS]
                row = {
                    "pool thread": kind,
                    "switch interval ms": interval_s * 1e3,
                    "snapshot": name,
                    "snapshot s": statistics.median(seconds) if seconds else None,
                    "turns": len(turns_ns),
                    "turns over 0.2 ms": len(held_up),
                    "their median ms": statistics.median(held_up or [0]) / 1e6,
                    "their p99 ms": held_up[len(held_up) * 99 // 100] / 1e6 if held_up else 0.0,
                    "turns over 1 ms": sum(turn > 1_000_000 for turn in turns_ns),
                    "longest turn ms": turns_ns[-1] / 1e6,
                }
                rows.append(row)
                taken = "-" if not seconds else f"{row['snapshot s']:.2f}"
                print(
                    f"{kind:8}{interval_s * 1e3:6.1f}  {name:14}{taken:>7}{len(turns_ns):>12,}"
                    f"{len(held_up):>9,}"
                    f"{row['their median ms']:>9.2f}{row['their p99 ms']:>9.2f}{row['turns over 1 ms']:>9,}"
                    f"{row['longest turn ms']:>9.2f}",
                    flush=True,
                )
    return rows


def measure_apply(state: StreamState, options: Options) -> list[Result]:
    """Measure batches that store and remove blocks, during snapshots and without them."""
    rng = random.Random(options.seed)
    rows = []
    for name, make_timer in WAYS.items():
        stop = threading.Event()

        def snap(
            make_timer: Callable[[], YieldTimer | None] = make_timer, stop: threading.Event = stop
        ) -> None:
            while not stop.is_set():
                take_and_encode(state, make_timer())

        thread = threading.Thread(target=snap)
        if name != "no snapshot":
            thread.start()
        took_ns = []
        for _ in range(options.batches):
            hashes: list[int | bytes] = [rng.getrandbits(64) for _ in range(BATCH_BLOCKS)]
            batch: list[KVCacheEvent] = [make_stored(rng, hashes, None)]
            batch += [BlockRemoved([block_hash], MEDIUM_GPU, GroupId(0)) for block_hash in reversed(hashes)]
            time.sleep(0.002)
            start = time.perf_counter_ns()
            state.apply(batch)
            took_ns.append(time.perf_counter_ns() - start)
        stop.set()
        if thread.is_alive():
            thread.join()
        took_ns.sort()
        row = {
            "snapshot": name,
            "median us": took_ns[len(took_ns) // 2] / 1e3,
            "p99 us": took_ns[len(took_ns) * 99 // 100] / 1e3,
            "longest us": took_ns[-1] / 1e3,
        }
        rows.append(row)
        print(f"{name:14}" + "".join(f"{row[column]:14.1f}" for column in list(row)[1:]), flush=True)
    return rows


def main() -> None:
    parser = make_parser(__doc__, runs=5)
    parser.add_argument("--blocks", type=int, default=100_000, help="resident blocks")
    parser.add_argument("--batches", type=int, default=500, help="batches applied in each row")
    parser.add_argument("--idle-s", type=float, default=2.0, help="seconds measured without a snapshot")
    options = read_options(parser, blocks=2_000, runs=1, batches=20, idle_s=0.1)
    provenance = start_run(options)
    memory, state = measure_memory(options)
    for kept, per_block in memory.items():
        print(f"memory of a resident block, {kept:16}{per_block:8.0f} bytes")
    yield_timer = MeasuredTimer()
    take_and_encode(state, yield_timer)
    pieces_ms = sorted(piece / 1e6 for piece in yield_timer.pieces_ns)
    alone = [take_and_encode(state, None) for _ in range(options.runs)]
    seconds = statistics.median(one["seconds"] for one in alone)
    events, num_bytes = alone[0]["events"], alone[0]["bytes"]
    print(f"one snapshot, nothing else running: {seconds:.2f} s, {events:,} events, {num_bytes:,} bytes")
    print(
        f"work between two rests: {len(pieces_ms)} times, median {statistics.median(pieces_ms):.2f} ms, "
        f"longest {pieces_ms[-1]:.2f} ms\n"
    )
    print("turns of the pool's thread, all runs together")
    print(
        f"{'thread':8}{'switch':>6}  {'snapshot':14}{'taken':>7}{'turns':>12}{'> 0.2':>9}{'median':>9}"
        f"{'p99':>9}{'> 1 ms':>9}{'longest':>9}"
    )
    print(f"{'':8}{'ms':>6}  {'':14}{'in s':>7}{'':>12}{'ms':>9}{'of these, ms':>18}{'':>9}{'ms':>9}")
    stalls = measure_stalls(state, options)
    print(f"\napplying a batch of {BATCH_BLOCKS} stores and {BATCH_BLOCKS} removals")
    print(f"{'snapshot':14}{'median, us':>14}{'p99, us':>14}{'longest, us':>14}")
    applied = measure_apply(state, options)
    results = {
        "provenance": provenance,
        "resident_blocks": options.blocks,
        "memory_bytes_per_block": memory,
        "alone": alone,
        "pieces_ms": pieces_ms,
        "stalls": stalls,
        "apply": applied,
    }
    write_results(options, results)


if __name__ == "__main__":
    main()
