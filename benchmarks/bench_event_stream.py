"""Measure the cost of the event stream for the pool's thread, and the throughput of a publisher.

See benchmarks/README.md for the columns.
"""

import json
import random
import select
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from measuring import (
    Options,
    Row,
    Sample,
    interleave,
    make_parser,
    print_header,
    read_options,
    start_run,
    write_results,
)
from request_runs import BLOCK_SIZE, REQUEST_BLOCKS, BenchRequest, fill_cache, make_request, run_request

from kv_pool import BlockPool
from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.events.event_publisher import EventPublisher, NullEventPublisher, PublisherConfig
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.sockets import zmq
from kv_pool.events.stream_state import StreamState

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
        fill_cache(self.pool, rng)
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


def measure_steps(options: Options) -> Row:
    publishers = [make_publisher(10_000), make_publisher(10_000)]
    samples: dict[str, Sample] = {}
    for idles, publisher in ((False, publishers[0]), (True, publishers[1])):
        pace = "idle between" if idles else "step after step"
        for name, with_events, used in (
            ("events off", False, None),
            ("null publisher", True, NullEventPublisher()),
            ("ZMQ publisher", True, publisher),
        ):
            steps = Steps(options.blocks, options.seed, with_events, used)
            samples[f"{name}, {pace}"] = partial(steps.sample, idles)
    title = f"a step on the pool's thread, {REQUEST_BLOCKS} blocks, full cache"
    row = interleave(title, "ns/block", samples, options.runs)
    for publisher in publishers:
        publisher.close()
    return row


# ---- one call ------------------------------------------------------------------------------------


def measure_calls(options: Options) -> Row:
    """Measure nanoseconds of `publish`: with an idle thread, with a busy one, and with many events."""
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

    samples: dict[str, Sample] = {
        "publisher waits, 1 event": call_idle,
        "publisher works, 1 event": lambda: call_busy(one),
        f"publisher works, {len(many)} events": lambda: call_busy(many),
    }
    row = interleave("one call of publish()", "ns", samples, options.runs)
    publisher.close()
    return row


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


def send(
    publish: Callable[[list[Any]], None],
    endpoint: str,
    batches: list[list[Any]],
    clear: list[Any],
    num_batches: int,
    wait: Callable[[], object],
) -> dict[str, float]:
    """Publish batches to a subscriber in another process.

    Returns:
        What arrived: `batches`, `bytes` and `seconds`; and what publishing cost: `publish_ns` in the calls,
        and `cpu_s` of this process until the last batch has arrived.
    """
    command = [sys.executable, __file__, "--child-subscriber", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while not select.select([child.stdout], [], [], 0.01)[0]:
            publish(clear)
        child.stdout.readline()
        wait()
        start_ns, start_cpu_s = time.perf_counter_ns(), time.process_time()
        for events in islice(cycle(batches), num_batches):
            publish(events)
        publish_ns = time.perf_counter_ns() - start_ns
        publish(clear)
        answer: dict[str, float] = json.loads(child.stdout.readline())
        cpu_s = time.process_time() - start_cpu_s
    if answer["batches"] != num_batches:
        raise RuntimeError(f"{answer['batches']} of {num_batches} batches arrived")
    return {**answer, "publish_ns": publish_ns, "cpu_s": cpu_s}


def measure_throughput(options: Options, state: StreamState | None, positional: bool) -> dict[str, float]:
    num_batches: int = options.batches
    batches = make_batches(options.seed)
    with make_publisher(2 * num_batches + 10_000, state, positional=positional) as publisher:
        assert publisher.endpoint is not None
        wait = partial(wait_until_idle, publisher)
        sent = send(publisher.publish, publisher.endpoint, batches, [AllBlocksCleared()], num_batches, wait)
        if publisher.get_statistics().num_batches_dropped:
            raise RuntimeError("batches were dropped")
    return {
        "batches/s": num_batches / sent["seconds"],
        "MB/s": sent["bytes"] / sent["seconds"] / 1e6,
        "bytes/block": sent["bytes"] / (num_batches * REQUEST_BLOCKS),
        "blocks/s": num_batches * REQUEST_BLOCKS / sent["seconds"],
        "ns per publish()": sent["publish_ns"] / num_batches,
    }


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = make_parser(__doc__, runs=100)
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks of the pools")
    parser.add_argument(
        "--batches", type=int, default=20_000, help="number of batches sent to the other process"
    )
    parser.add_argument("--sendings", type=int, default=5, help="how often all batches are sent")
    parser.add_argument("--child-subscriber", metavar="ENDPOINT", help=SUPPRESS)
    options = read_options(parser, blocks=640, runs=3, batches=500, sendings=1)
    if options.child_subscriber:
        subscribe(options.child_subscriber)
        return
    provenance = start_run(options, "pyzmq", libzmq=zmq.zmq_version())
    print_header()
    rows = [measure_steps(options), measure_calls(options)]
    for row in rows:
        row.print()
    kinds = {"as they are": (False, False), "as arrays": (False, True), "through StreamState": (True, False)}
    throughput: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.sendings):
        for kind, (has_state, positional) in kinds.items():
            state = StreamState() if has_state else None
            throughput[kind].append(measure_throughput(options, state, positional))
    for kind, answers in throughput.items():
        samples = {unit: [answer[unit] for answer in answers] for unit in answers[0]}
        rows.append(Row(f"{options.batches:,} batches to another process, {kind}", "", samples))
        rows[-1].print()
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
