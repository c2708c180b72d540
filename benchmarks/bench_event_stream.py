"""Measure the cost of the event stream for the pool's thread, and the throughput of a publisher.

See benchmarks/README.md for the columns.
"""

import argparse
import gc
import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench_block_pool import BLOCK_SIZE, REQUEST_BLOCKS, BenchRequest, fill_cache, make_request, run_request
from measuring import describe_run, find_version, summarize, write_results

import kv_pool
from kv_pool import BlockPool
from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.events.config import PublisherConfig
from kv_pool.events.event_publisher import EventPublisher, NullEventPublisher
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.stream_state import StreamState
from kv_pool.events.zmq_module import zmq

SAMPLE_STEPS = 20
DISTINCT_BATCHES = 64
FREE_PORT = "tcp://127.0.0.1:0"


def make_publisher(num_batches: int, state: StreamState | None = None, **settings: Any) -> ZMQEventPublisher:
    """Return a publisher whose queue holds this number of batches."""
    config = PublisherConfig(
        endpoint=FREE_PORT,
        replay_endpoint=FREE_PORT,
        max_queue_size=num_batches + 1,
        hwm=num_batches + 1,
        max_unread_bytes=2**40,
        linger_s=60.0,
        **settings,
    )
    return ZMQEventPublisher(config, state)


def wait_until_idle(publisher: EventPublisher | None, pause_s: float = 0.0005) -> None:
    while publisher is not None and publisher.get_statistics().num_queued:
        time.sleep(pause_s)
    time.sleep(pause_s)


# ---- the pool's thread ---------------------------------------------------------------------------


class Steps:
    """A pool in which every block is cached: each request of 64 blocks evicts 64 and caches its own."""

    def __init__(
        self, num_blocks: int, seed: int, with_events: bool, publisher: EventPublisher | None
    ) -> None:
        rng = random.Random(seed)
        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE, enable_kv_cache_events=with_events)
        fill_cache(self.pool, rng, REQUEST_BLOCKS)
        self.pool.take_events()
        # Twice the pool, so that repeated requests have been evicted.
        self.num_requests = 2 * num_blocks // REQUEST_BLOCKS + 1
        self.requests = cycle([make_request(rng, REQUEST_BLOCKS) for _ in range(self.num_requests)])
        self.with_events = with_events
        self.publisher = publisher

    def run(self, requests: Sequence[BenchRequest]) -> int:
        """Return the time of the steps on this thread, in nanoseconds."""
        pool, with_events, publisher = self.pool, self.with_events, self.publisher
        start = time.perf_counter_ns()
        for request in requests:
            run_request(pool, request)
            if with_events:
                events = pool.take_events()
                if publisher is not None:
                    publisher.publish(events)
        return time.perf_counter_ns() - start

    def sample(self, idles: bool) -> float:
        """Return nanoseconds per block. `idles` waits for the publisher between steps, like a model run."""
        requests = list(islice(self.requests, SAMPLE_STEPS))
        elapsed_ns = 0
        for part in [[request] for request in requests] if idles else [requests]:
            wait_until_idle(self.publisher)
            elapsed_ns += self.run(part)
        return elapsed_ns / (SAMPLE_STEPS * REQUEST_BLOCKS)


def measure_steps(options: argparse.Namespace) -> dict[str, list[float]]:
    publishers = [make_publisher(10_000), make_publisher(10_000)]
    samplers: dict[str, Callable[[], float]] = {}
    for idles, publisher in ((False, publishers[0]), (True, publishers[1])):
        pace = "idle between" if idles else "step after step"
        for name, with_events, used in (
            ("events off", False, None),
            ("null publisher", True, NullEventPublisher()),
            ("ZMQ publisher", True, publisher),
        ):
            steps = Steps(options.blocks, options.seed, with_events, used)
            samplers[f"{name}, {pace}"] = partial(steps.sample, idles)
    return interleave(samplers, options.runs, publishers)


def interleave(
    samplers: dict[str, Callable[[], float]], runs: int, publishers: Sequence[EventPublisher]
) -> dict[str, list[float]]:
    """Run each in turn, with Python's GC off; the first run does not count."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    gc.collect()
    gc.disable()
    for run in range(-1, runs):
        for name, sample in samplers.items():
            measured = sample()
            if run >= 0:
                samples[name].append(measured)
    gc.enable()
    for publisher in publishers:
        publisher.close()
    return samples


# ---- one call ------------------------------------------------------------------------------------


def measure_calls(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return nanoseconds of `publish`: with an idle thread, with a busy one, and with many events."""
    batches = make_batches(options.seed)
    publisher = make_publisher(10_000_000)
    one = batches[0][:1]
    many = batches[0]

    def call_idle() -> float:
        wait_until_idle(publisher)
        start = time.perf_counter_ns()
        publisher.publish(one)
        return time.perf_counter_ns() - start

    def call_busy(events: list[KVCacheEvent]) -> float:
        for _ in range(20):
            publisher.publish(many)  # work for the publisher's thread
        start = time.perf_counter_ns()
        for _ in range(10):
            publisher.publish(events)
        elapsed_ns = time.perf_counter_ns() - start
        wait_until_idle(publisher)
        return elapsed_ns / 10

    return interleave(
        {
            "publisher waits, 1 event": call_idle,
            "publisher works, 1 event": lambda: call_busy(one),
            f"publisher works, {len(many)} events": lambda: call_busy(many),
        },
        options.runs,
        [publisher],
    )


# ---- through the publisher -----------------------------------------------------------------------


def make_batches(seed: int) -> list[list[KVCacheEvent]]:
    """Return batches of one step each: 64 blocks stored by one event, 64 removed by one event each.

    The first batch can follow the last: the blocks it removes exist then, and those it stores do not.
    """
    steps = Steps(DISTINCT_BATCHES * REQUEST_BLOCKS, seed, True, None)
    batches = []
    for request in islice(steps.requests, DISTINCT_BATCHES + steps.num_requests):
        run_request(steps.pool, request)
        batches.append(steps.pool.take_events())
    return batches[DISTINCT_BATCHES:]


def subscribe(endpoint: str) -> None:
    """Run in the other process: report when the publisher is connected, then count up to the clear."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.rcvhwm = 0
    socket.connect(endpoint)
    socket.subscribe(b"")
    last = int.from_bytes(socket.recv_multipart()[1])
    print("ready", flush=True)
    num_batches = num_bytes = start_ns = 0
    while True:
        _, sequence, payload = socket.recv_multipart()
        if int.from_bytes(sequence) != last + 1:
            raise RuntimeError(f"batch {int.from_bytes(sequence)} arrived after {last}")
        last += 1
        if len(payload) < 64:  # the final clear, or one from before the start
            if num_batches:
                break
            continue
        start_ns = start_ns or time.perf_counter_ns()
        num_batches += 1
        num_bytes += len(payload)
    elapsed_s = (time.perf_counter_ns() - start_ns) / 1e9
    print(json.dumps({"batches": num_batches, "bytes": num_bytes, "seconds": elapsed_s}), flush=True)
    context.destroy(linger=0)


def measure_throughput(
    options: argparse.Namespace, state: StreamState | None, positional: bool
) -> dict[str, float]:
    batches = make_batches(options.seed)
    num_batches: int = options.batches
    with make_publisher(2 * num_batches + 10_000, state, positional=positional) as publisher:
        assert publisher.endpoint is not None
        command = [sys.executable, __file__, "--child-subscriber", publisher.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            while not select.select([child.stdout], [], [], 0.01)[0]:
                publisher.publish([AllBlocksCleared()])
            child.stdout.readline()
            wait_until_idle(publisher)
            start_ns = time.perf_counter_ns()
            for events in islice(cycle(batches), num_batches):
                publisher.publish(events)
            publish_ns = time.perf_counter_ns() - start_ns
            publisher.publish([AllBlocksCleared()])
            answer: dict[str, float] = json.loads(child.stdout.readline())
        statistics = publisher.get_statistics()
    if answer["batches"] != num_batches or statistics.num_batches_dropped:
        raise RuntimeError(f"{answer['batches']} of {num_batches} batches arrived")
    return {
        "batches/s": num_batches / answer["seconds"],
        "MB/s": answer["bytes"] / answer["seconds"] / 1e6,
        "bytes/block": answer["bytes"] / (num_batches * REQUEST_BLOCKS),
        "blocks/s": num_batches * REQUEST_BLOCKS / answer["seconds"],
        "ns per publish()": publish_ns / num_batches,
    }


# ---- results -------------------------------------------------------------------------------------


def print_samples(title: str, unit: str, rows: dict[str, list[float]]) -> None:
    print(f"\n{title}\n{'':38}{'unit':>10}{'median':>12}{'p10':>12}{'p90':>12}{'runs':>6}")
    for name, samples in rows.items():
        low, median, high = summarize(samples)
        print(
            f"    {name:34}{unit:>10}{median:>12,.1f}{low:>12,.1f}{high:>12,.1f}{len(samples):>6}", flush=True
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks of the pools")
    parser.add_argument("--runs", type=int, default=100, help="runs of each row")
    parser.add_argument(
        "--batches", type=int, default=20_000, help="number of batches sent to the other process"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of token ids and hashes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    parser.add_argument("--child-subscriber", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.runs, options.batches = 640, 3, 500
    return options


def main() -> None:
    options = parse_options()
    if options.child_subscriber:
        subscribe(options.child_subscriber)
        return
    provenance = describe_run([]) | {
        "pyzmq": find_version("pyzmq"),
        "libzmq": zmq.zmq_version(),
        "core": "compiled" if kv_pool.COMPILED else "plain",
    }
    for key, value in provenance.items():
        print(f"{key:22}{value}")
    steps = measure_steps(options)
    print_samples(f"a step on the pool's thread, {REQUEST_BLOCKS} blocks, full cache", "ns/block", steps)
    calls = measure_calls(options)
    print_samples("one call of publish()", "ns", calls)
    kinds = {"as they are": (False, False), "as arrays": (False, True), "through StreamState": (True, False)}
    throughput: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(1 if options.quick else 5):
        for kind, (has_state, positional) in kinds.items():
            state = StreamState() if has_state else None
            throughput[kind].append(measure_throughput(options, state, positional))
    for kind, answers in throughput.items():
        rows = {unit: [answer[unit] for answer in answers] for unit in answers[0]}
        print_samples(f"{options.batches:,} batches to another process, {kind}", "", rows)
    if options.json:
        results = {"provenance": provenance, "steps": steps, "calls": calls, "throughput": throughput}
        write_results(options.json, results)


if __name__ == "__main__":
    main()
