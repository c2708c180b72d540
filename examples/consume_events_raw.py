"""Read the stream with only zmq and msgspec: what a subscriber in another language has to do.

Run it: python examples/consume_events_raw.py [ENDPOINT REPLAY_ENDPOINT]
Without endpoints it starts its own publisher over a short-lived pool. Needs the extra zmq.

Live batches: a PUB socket sends three frames: topic, sequence (8 bytes, big-endian), payload. The payload is
msgpack: an array of ts, events and rank; an event is a map with its class under `type`.
Missed batches: a DEALER socket sends an empty frame and the first sequence it needs. Each reply is an empty
frame and the same three frames; the last has 8 bytes of ff as its sequence.
Not handled here: restarts of the publisher, and batches that are lost for good.
"""

import struct
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import msgspec
import zmq

Batches = Generator[tuple[int, list[Any]], None, None]
END = b"\xff" * 8


def read(context: "zmq.Context[Any]", endpoint: str, replay_endpoint: str) -> Batches:
    """Yield (sequence, events) of each batch, from the oldest that the publisher still has."""
    live = context.socket(zmq.SUB)
    live.connect(endpoint)
    live.subscribe(b"")
    expected = 0
    try:
        while True:
            # At the start, after a gap, and after a silence: the latest batch may have been missed.
            for sequence, events in fetch(context, replay_endpoint, expected):
                yield sequence, events
                expected = sequence + 1
            while live.poll(1000):
                _topic, number, payload = live.recv_multipart()
                (sequence,) = struct.unpack(">Q", number)
                if sequence < expected:
                    continue  # already replayed
                if sequence > expected:
                    break  # the replay has this one, too
                yield sequence, msgspec.msgpack.decode(payload)[1]
                expected = sequence + 1
    finally:
        live.close(linger=0)


def fetch(context: "zmq.Context[Any]", replay_endpoint: str, start: int) -> Batches:
    """Yield the batches that the publisher still has from `start` on; the first may be a later one."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay_endpoint)
    dealer.send_multipart([b"", struct.pack(">Q", start)])
    try:
        while dealer.poll(5000):
            _empty, _topic, number, payload = dealer.recv_multipart()
            if number == END:
                return
            yield struct.unpack(">Q", number)[0], msgspec.msgpack.decode(payload)[1]
        raise TimeoutError(f"{replay_endpoint} does not answer")
    finally:
        dealer.close(linger=0)


def print_stream(endpoint: str, replay_endpoint: str, num_batches: int | None) -> None:
    held: set[int] = set()
    with zmq.Context() as context, closing(read(context, endpoint, replay_endpoint)) as stream:
        for sequence, events in stream:
            for event in events:
                match event["type"]:
                    case "BlockStored":
                        held.update(event["block_hashes"])
                    case "BlockRemoved":
                        held.difference_update(event["block_hashes"])
                    case "AllBlocksCleared":
                        held.clear()
            print(f"{sequence}: {', '.join(event['type'] for event in events)}; {len(held)} cached blocks")
            if num_batches is not None and sequence + 1 >= num_batches:
                break


if len(sys.argv) > 2:
    print_stream(sys.argv[1], sys.argv[2], None)
else:
    # Only the publisher below uses kv_pool.
    from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, RequestId
    from kv_pool.events import PublisherConfig, StreamState, ZMQEventPublisher

    pool = BlockPool(11, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool)
    hasher = BlockHasher("sha256_cbor", block_size=4)
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with ZMQEventPublisher(config, StreamState()) as publisher:
        for number in range(4):
            request = Request(
                RequestId(f"r{number}"), [1, 2, 3, 4, *range(100 * number, 100 * number + 12)], hasher
            )
            prefix = manager.get_computed_blocks(request)
            manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
            manager.free(request)
            publisher.publish(manager.take_events())
        pool.reset_prefix_cache()
        publisher.publish(manager.take_events())
        assert publisher.endpoint is not None
        assert publisher.replay_endpoint is not None
        print_stream(publisher.endpoint, publisher.replay_endpoint, num_batches=5)

# prints:
# 0: BlockStored; 4 cached blocks
# 1: BlockStored; 7 cached blocks
# 2: BlockStored; 10 cached blocks
# 3: BlockRemoved, BlockStored; 10 cached blocks
# 4: AllBlocksCleared; 0 cached blocks
