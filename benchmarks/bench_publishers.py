"""Compare kv_pool's publisher with vLLM's: batches per second, and the cost of a block.

See benchmarks/README.md for the columns.
"""

import time
from collections.abc import Callable
from typing import Any

from bench_event_stream import make_batches, make_publisher, send
from measuring import Row, in_turn, make_parser, print_header, read_options, start_run, write_results

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.events.sockets import zmq
from kv_pool.events.stream_state import StreamState, slice_event

Batches = list[list[KVCacheEvent]]
MAX_QUEUED = 10_000_000


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
        self.publisher = make_publisher(MAX_QUEUED, state)
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
            hwm=MAX_QUEUED,
            max_queue_size=MAX_QUEUED,
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
    sent = send(
        publisher.publish,
        publisher.endpoint,
        publisher.convert(batches),
        publisher.make_clear(),
        num_batches,
        lambda: time.sleep(0.1),
    )
    publisher.close()
    num_blocks = num_batches * sum(
        len(event.block_hashes) for event in batches[0] if isinstance(event, BlockStored)
    )
    return {
        "batches/s": num_batches / sent["seconds"],
        "batches/CPU s": num_batches / sent["cpu_s"],
        "CPU us/block": sent["cpu_s"] / num_blocks * 1e6,
        "bytes/block": sent["bytes"] / num_blocks,
    }


def main() -> None:
    parser = make_parser(__doc__, runs=7)
    parser.add_argument("--batches", type=int, default=10_000, help="number of large batches per run")
    options = read_options(parser, runs=1, batches=200)
    makers: dict[str, Callable[[], Any]] = {
        "kv_pool, StreamState": lambda: Ours(StreamState()),
        "kv_pool, dense pool": lambda: Ours(StreamState(), is_dense=True),
        "kv_pool, no state": lambda: Ours(None),
    }
    if has_vllm():
        makers["vLLM"] = OfVllm
    provenance = start_run(options, "pyzmq", libzmq=zmq.zmq_version(), compared=list(makers))
    sizes = {
        "64 blocks stored and removed": (make_batches(options.seed), options.batches),
        "1 block stored and removed": (make_small_batches(options.seed), 4 * options.batches),
    }
    rows = []
    for size, (batches, num_batches) in sizes.items():
        answers: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
        for run in range(-1, options.runs):
            for name in in_turn(list(makers), run):
                answer = measure(makers[name], batches, num_batches)
                if run >= 0:
                    answers[name].append(answer)
        print(f"{num_batches:,} batches, each of {size}")
        print_header()
        for unit in answers["kv_pool, no state"][0]:
            samples = {name: [answer[unit] for answer in found] for name, found in answers.items()}
            rows.append(Row(f"{unit}, {size}", unit, samples))
            rows[-1].print()
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
