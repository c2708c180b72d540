"""Follow a pool's events with kv_pool's subscriber, and keep a mirror of its cached blocks.

Run it: python examples/consume_events.py [ENDPOINT REPLAY_ENDPOINT]
Without endpoints it starts its own publisher over a short-lived pool. Needs the extra zmq.
"""

import random
import sys

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, RequestId
from kv_pool.events import (
    BatchesLost,
    KVEventSubscriber,
    PrefixMirror,
    PublisherConfig,
    PublisherRestarted,
    ReceivedBatch,
    StreamState,
    ZMQEventPublisher,
    follow,
)

PROMPT = list(range(100, 116))  # every request starts with these 16 tokens: 4 blocks


def live(publisher: ZMQEventPublisher, num_requests: int) -> int:
    """Run requests through a pool of 30 blocks, and return how many blocks it has cached at the end."""
    pool = BlockPool(31, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool)
    hasher = BlockHasher("sha256_cbor", block_size=4)
    rng = random.Random(0)
    for number in range(num_requests):
        request = Request(RequestId(f"r{number}"), PROMPT + [rng.randrange(9999) for _ in range(16)], hasher)
        prefix = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        manager.free(request)
        publisher.publish(manager.take_events())
    return len(pool.cached_block_hash_to_block)


def consume(endpoint: str, replay_endpoint: str | None, num_batches: int | None) -> PrefixMirror:
    """Follow a publisher for `num_batches` batches, or until Ctrl-C."""
    mirror = PrefixMirror(learns_tokens=True)
    with KVEventSubscriber(endpoint, replay_endpoint) as subscriber:
        for item in follow(mirror, subscriber, "engine"):
            match item:
                case ReceivedBatch(sequence, batch):
                    names = ", ".join(type(event).__name__ for event in batch.events)
                    print(f"{sequence}: {names}")
                    if num_batches is not None and sequence + 1 >= num_batches:
                        break
                case BatchesLost(first, last, is_healed):
                    print(f"{first} to {last} are lost; {'a snapshot follows' if is_healed else 'for good'}")
                case PublisherRestarted():
                    print("the publisher has restarted")
    return mirror


if len(sys.argv) > 1:
    consume(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, None)
else:
    config = PublisherConfig(
        endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", buffer_steps=100
    )
    with ZMQEventPublisher(config, StreamState()) as publisher:
        num_cached = live(publisher, num_requests=9)
        assert publisher.endpoint is not None
        mirror = consume(publisher.endpoint, publisher.replay_endpoint, num_batches=9)
    print(f"cached blocks: {num_cached} in the pool, {mirror.count_blocks('engine')} in the mirror")
    found = mirror.find_prefix_of_tokens([*PROMPT, 1, 2, 3, 4])
    print(f"cached tokens of another prompt with the same start: {found['engine']}")

# prints:
# 0: BlockStored
# 1: BlockStored
# 2: BlockStored
# 3: BlockStored
# 4: BlockStored
# 5: BlockStored
# 6: BlockRemoved, BlockStored
# 7: BlockRemoved, BlockStored
# 8: BlockRemoved, BlockStored
# cached blocks: 30 in the pool, 30 in the mirror
# cached tokens of another prompt with the same start: 16
