"""Compare kv_pool's publisher with vLLM's: batches per second, and the cost of a block.

See benchmarks/README.md for the columns.
"""

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import bench_event_stream
from bench_event_stream import FREE_PORT, make_batches
from measuring import describe_run, find_version, summarize, write_results

import kv_pool
from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.events.config import PublisherConfig
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.stored_spans import slice_event
from kv_pool.events.stream_state import StreamState
from kv_pool.events.zmq_module import zmq

Batches = list[list[KVCacheEvent]]


def join_removals(batches: Batches) -> Batches:
    """Return the batches as a pool with `dense_events` makes them: one event for all evictions of a call."""
    joined: Batches = []
    for *events, stored in batches:
        removals = [event for event in events if isinstance(event, BlockRemoved)]
        hashes = [block_hash for event in removals for block_hash in event.block_hashes]
        joined.append([BlockRemoved(hashes, removals[0].medium, removals[0].group_idx), stored])
    return joined


def make_small_batches(seed: int) -> Batches:
    """Return batches of one removed and one stored block, like those of a decoding request."""
    small: Batches = []
    for *removals, stored in make_batches(seed):
        if not isinstance(stored, BlockStored) or len(removals) != len(stored.block_hashes):
            raise RuntimeError("a step must be one store and one removal per block")
        for position, removal in enumerate(removals):
            parent = stored.block_hashes[position - 1] if position else stored.parent_block_hash
            small.append([removal, slice_event(stored, position, position + 1, parent)])
    return small


# ---- publishers ----------------------------------------------------------------------------------


class Ours:
    """kv_pool's publisher, with or without a state."""

    def __init__(self, state: StreamState | None, is_dense: bool = False) -> None:
        self.is_dense = is_dense
        config = PublisherConfig(
            endpoint=FREE_PORT,
            replay_endpoint=FREE_PORT,
            hwm=10_000_000,
            max_queue_size=10_000_000,
            max_unread_bytes=2**40,
            linger_s=60.0,
        )
        self.publisher = ZMQEventPublisher(config, state)
        assert self.publisher.endpoint is not None
        self.endpoint = self.publisher.endpoint
        self.publish: Callable[[list[Any]], None] = self.publisher.publish
        self.close = self.publisher.close

    def convert(self, batches: Batches) -> list[list[Any]]:
        return join_removals(batches) if self.is_dense else [list(batch) for batch in batches]

    def make_clear(self) -> list[Any]:
        return [AllBlocksCleared()]


class OfVllm:
    """vLLM's publisher, with vLLM's event classes."""

    def __init__(self) -> None:
        from vllm.distributed import kv_events

        self.classes = kv_events
        with zmq.Context() as context, context.socket(zmq.PUB) as probe:
            ports = [probe.bind_to_random_port("tcp://127.0.0.1") for _ in range(2)]
        self.endpoint = f"tcp://127.0.0.1:{ports[0]}"
        self.publisher = kv_events.ZmqEventPublisher(
            0,
            endpoint=f"tcp://*:{ports[0]}",
            replay_endpoint=f"tcp://*:{ports[1]}",
            hwm=10_000_000,
            max_queue_size=10_000_000,
        )
        self.close: Callable[[], None] = self.publisher.shutdown

    def publish(self, events: list[Any]) -> None:
        self.publisher.publish(self.classes.KVEventBatch(ts=time.time(), events=events))

    def convert(self, batches: Batches) -> list[list[Any]]:
        return [[self.convert_event(event) for event in batch] for batch in batches]

    def make_clear(self) -> list[Any]:
        return [self.classes.AllBlocksCleared()]

    def convert_event(self, event: KVCacheEvent) -> Any:
        own = getattr(self.classes, type(event).__name__)
        return own(**{name: getattr(event, name) for name in event.__struct_fields__})


def has_vllm() -> bool:
    try:
        import vllm.distributed.kv_events  # noqa: F401, tests that it exists
    except ImportError:
        return False
    return True


# ---- measuring -----------------------------------------------------------------------------------


def measure(make_publisher: Callable[[], Any], batches: Batches, num_batches: int) -> dict[str, float]:
    """Publish to a subscriber in another process. Return batches per second until the last arrives."""
    publisher = make_publisher()
    converted = publisher.convert(batches)
    clear = publisher.make_clear()
    command = [sys.executable, bench_event_stream.__file__, "--child-subscriber", publisher.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while not select.select([child.stdout], [], [], 0.05)[0]:
            publisher.publish(clear)
        child.stdout.readline()
        time.sleep(0.1)
        start_cpu_s = time.process_time()
        for events in islice(cycle(converted), num_batches):
            publisher.publish(events)
        publisher.publish(clear)
        answer: dict[str, float] = json.loads(child.stdout.readline())
        cpu_s = time.process_time() - start_cpu_s
    publisher.close()
    if answer["batches"] != num_batches:
        raise RuntimeError(f"{answer['batches']} of {num_batches} batches arrived")
    num_blocks = num_batches * sum(
        len(event.block_hashes) for event in batches[0] if isinstance(event, BlockStored)
    )
    return {
        "batches/s": num_batches / answer["seconds"],
        "batches/CPU s": num_batches / cpu_s,
        "CPU us/block": cpu_s / num_blocks * 1e6,
        "bytes/block": answer["bytes"] / num_blocks,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="runs of each publisher, interleaved")
    parser.add_argument("--batches", type=int, default=10_000, help="number of large batches per run")
    parser.add_argument("--seed", type=int, default=0, help="seed of token ids and hashes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.batches = 1, 200
    return options


def main() -> None:
    options = parse_options()
    makers: dict[str, Callable[[], Any]] = {
        "kv_pool, StreamState": lambda: Ours(StreamState()),
        "kv_pool, dense pool": lambda: Ours(StreamState(), is_dense=True),
        "kv_pool, no state": lambda: Ours(None),
    }
    if has_vllm():
        makers["vLLM"] = OfVllm
    provenance = describe_run(["vllm"] if has_vllm() else []) | {
        "pyzmq": find_version("pyzmq"),
        "libzmq": zmq.zmq_version(),
        "core": "compiled" if kv_pool.COMPILED else "plain",
    }
    for key, value in provenance.items():
        print(f"{key:22}{value}")
    sizes = {
        "64 blocks stored and removed": (make_batches(options.seed), options.batches),
        "1 block stored and removed": (make_small_batches(options.seed), 4 * options.batches),
    }
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for size, (batches, num_batches) in sizes.items():
        rows = results[size] = {name: [] for name in makers}
        for run in range(-1, options.runs):
            for name, make_publisher in makers.items():
                answer = measure(make_publisher, batches, num_batches)
                if run >= 0:
                    rows[name].append(answer)
        print(f"\n{num_batches:,} batches, each of {size}")
        for unit in ("batches/s", "batches/CPU s", "CPU us/block", "bytes/block"):
            for name, answers in rows.items():
                low, median, high = summarize([answer[unit] for answer in answers])
                print(f"    {name:24}{unit:>14}{median:>12,.2f}{low:>12,.2f}{high:>12,.2f}{len(answers):>4}")
    if options.json:
        write_results(options.json, {"provenance": provenance, "results": results})


if __name__ == "__main__":
    main()
