"""Read the stream with zmq and msgspec alone: all that a reader in another language has to do.

Run it: python examples/consume_events_raw.py [ENDPOINT REPLAY_ENDPOINT]
Without endpoints it starts a publisher of its own, over a pool that lives for a moment. Needs the extra zmq.

Live: PUB, three frames: topic, sequence (8 bytes, big-endian), payload. A payload is msgpack: an array of
ts, events, rank; an event is a map with its class under `type`. Missed batches: a DEALER sends an empty frame
and the sequence it wants; each reply is an empty frame and three as before; the last has 8 bytes of ff for
its sequence. Left out here: restarts of the publisher, batches that are lost for good.
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
    """Sequence and events of each batch, from the oldest that the publisher still has."""
    live = context.socket(zmq.SUB)
    live.connect(endpoint)
    live.subscribe(b"")
    expected = 0
    try:
        while True:
            # At the start, after a gap, and when it is quiet: the last batch may be the one that was missed.
            for sequence, events in fetch(context, replay_endpoint, expected):
                yield sequence, events
                expected = sequence + 1
            while live.poll(1000):
                _topic, number, payload = live.recv_multipart()
                (sequence,) = struct.unpack(">Q", number)
                if sequence < expected:
                    continue  # replayed already
                if sequence > expected:
                    break  # the replay has it, too
                yield sequence, msgspec.msgpack.decode(payload)[1]
                expected = sequence + 1
    finally:
        live.close(linger=0)


def fetch(context: "zmq.Context[Any]", replay_endpoint: str, start: int) -> Batches:
    """What the publisher has from `start` on. It may begin later, if that is all there is."""
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
            print(f"{sequence}: {', '.join(event['type'] for event in events)}; {len(held)} blocks are held")
            if num_batches is not None and sequence + 1 >= num_batches:
                break


if len(sys.argv) > 2:
    print_stream(sys.argv[1], sys.argv[2], None)
else:
    # Only what publishes is ours.
    from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
    from kv_pool.events import PublisherConfig, StreamState, ZMQEventPublisher

    pool = BlockPool(11, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool)
    hasher = BlockHasher("sha256_cbor", block_size=4)
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with ZMQEventPublisher(config, StreamState()) as publisher:
        for number in range(4):
            request = Request(f"r{number}", [1, 2, 3, 4, *range(100 * number, 100 * number + 12)], hasher)
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
# 0: BlockStored; 4 blocks are held
# 1: BlockStored; 7 blocks are held
# 2: BlockStored; 10 blocks are held
# 3: BlockRemoved, BlockStored; 10 blocks are held
# 4: AllBlocksCleared; 0 blocks are held
