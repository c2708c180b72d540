"""Measure a scrape of a large pool, and what metrics cost an engine's steps. See benchmarks/README.md."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from measuring import Row, in_turn, make_parser, print_header, read_options, start_run, write_results

from kv_pool import BlockAllocationRequest, BlockHasher, GPUKVPool, KVCacheManager, Request
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control import ControlledManager
from kv_pool.ids import BlockHash, RequestId, SequenceId
from kv_pool.metrics.block_ages import BlockAges
from kv_pool.metrics.prometheus import PoolMetrics, encode_metrics
from kv_pool.reports import PoolSources, read_pool

BLOCK_SIZE = 16
HASHER = BlockHasher(block_size=BLOCK_SIZE)
NUM_RUNNING = 64
SCRAPE_EVERY_S = 1.0


class TimedLock:
    """A pool's lock that notes for how long it was held, in milliseconds of the thread's processor time."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.held_ms: list[float] = []
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._since_ns = time.thread_time_ns()

    def __exit__(self, *raised: Any) -> None:
        self.held_ms.append((time.thread_time_ns() - self._since_ns) / 1e6)
        self._lock.__exit__(*raised)


def make_scattered(num_blocks: int, seed: int) -> GPUKVPool:
    """Return a full pool of which a random half of the sequences has ended: many short free runs."""
    pool, draw, number = GPUKVPool(num_blocks, BLOCK_SIZE), random.Random(seed), 0
    while pool.get_free_blocks():
        number += 1
        length = min(draw.randint(1, 32), pool.get_free_blocks())
        pool.allocate(BlockAllocationRequest(num_blocks=length, sequence_id=SequenceId(number)))
        pool.cache_prefix(SequenceId(number), [BlockHash(draw.randbytes(32)) for _ in range(length)])
    for one in draw.sample(range(1, number + 1), number // 2):
        pool.free_sequence(SequenceId(one))
    return pool


def measure_scrapes(pool: GPUKVPool, runs: int) -> list[Row]:
    """Return rows of times of readings and scrapes, for how long they held the lock, and of looks at ages."""
    lock = TimedLock(pool.lock)
    ages = BlockAges(lambda: pool.block_pool)
    ages.look()
    sources = PoolSources(pool=pool, lock=lock, ages=ages.get_histograms)
    metrics = PoolMetrics([sources])
    calls: dict[str, Callable[[], object]] = {
        "reading": lambda: read_pool(sources),
        "scrape": lambda: encode_metrics(metrics),
        "look at ages": ages.look,
    }
    rows = []
    for name, call in calls.items():
        lock.held_ms.clear()
        times = []
        for _ in range(runs):
            started_ns = time.thread_time_ns()
            call()
            times.append((time.thread_time_ns() - started_ns) / 1e6)
        held = {"lock held": list(lock.held_ms)} if lock.held_ms else {}
        rows.append(Row(name, "ms", {"in all": times} | held))
    return rows


class Engine:
    """Requests over a `KVCacheManager`; prompts share a quarter, a step decodes a token of each."""

    def __init__(self, seed: int) -> None:
        self.manager = KVCacheManager(RunBlockPool(8_000, True, BLOCK_SIZE))
        self.pool = ControlledManager(self.manager)
        self._draw = random.Random(seed)
        self._running: list[tuple[Request, int]] = []
        self._number = 0

    def step(self) -> None:
        """Run one step."""
        with self.pool.lock:
            while len(self._running) < NUM_RUNNING:
                self._number += 1
                shared = self._draw.randrange(20)
                tokens = [*range(shared, shared + 256), *self._draw.choices(range(50_000), k=768)]
                request = Request(RequestId(str(self._number)), tokens, HASHER)
                prefix = self.manager.get_computed_blocks(request)
                self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
                request.num_computed_tokens = request.num_tokens
                self._running.append((request, self._draw.randint(50, 400)))
            going_on = []
            for request, num_left in self._running:
                request.append_output_token_ids([self._number])
                self.manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                if num_left > 1:
                    going_on.append((request, num_left - 1))
                else:
                    self.manager.free(request)
            self._running = going_on


@contextmanager
def watched(pool: ControlledManager) -> Iterator[None]:
    """Watch a pool as a control server does that is scraped every second."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(SCRAPE_EVERY_S):
            encode_metrics(metrics)

    with BlockAges(lambda: pool.block_pool) as ages:
        metrics = PoolMetrics([PoolSources(pool=pool, ages=ages.get_histograms)])
        thread = threading.Thread(target=scrape)
        thread.start()
        yield
        stop.set()
        thread.join()


def measure_steps(runs: int, seed: int, steps: int) -> Row:
    """Return a row of the processor time of the process per step, in turn without and with metrics."""
    row = Row("step", "us", {"without": [], "with metrics": []}, "without")
    engine = Engine(seed)
    for _ in range(500):
        engine.step()
    for run in range(runs):
        for name in in_turn(list(row.samples), run):
            with ExitStack() as stack:
                if name != "without":
                    stack.enter_context(watched(engine.pool))
                started_ns = time.process_time_ns()
                for _ in range(steps):
                    engine.step()
                row.samples[name].append((time.process_time_ns() - started_ns) / 1e3 / steps)
    return row


def main() -> None:
    parser = make_parser(__doc__, runs=20)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=25_000)
    options = read_options(parser, blocks=2_000, runs=2, steps=20)
    provenance = start_run(options)
    print_header("without / with")
    rows = measure_scrapes(make_scattered(options.blocks, options.seed), 10 * options.runs)
    for row in rows:
        row.print()
        print(f"{'':38}longest: " + ", ".join(f"{name} {max(ms):.3f} ms" for name, ms in row.samples.items()))
    rows.append(measure_steps(options.runs, options.seed, options.steps))
    rows[-1].print()
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
