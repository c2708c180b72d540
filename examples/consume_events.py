"""Follow a pool's events with kv_pool's subscriber, and know at any time what the pool holds.

Run it: python examples/consume_events.py [ENDPOINT REPLAY_ENDPOINT]
Without endpoints it starts a publisher of its own, over a pool that lives for a moment. Needs the extra zmq.
"""

import random
import sys

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
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

PROMPT = list(range(100, 116))  # every request begins with these 16 tokens: 4 blocks


def live(publisher: ZMQEventPublisher, num_requests: int) -> int:
    """A pool of 30 blocks serves requests; how many blocks it holds in the end."""
    pool = BlockPool(31, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool)
    hasher = BlockHasher("sha256_cbor", block_size=4)
    rng = random.Random(0)
    for number in range(num_requests):
        request = Request(f"r{number}", PROMPT + [rng.randrange(9999) for _ in range(16)], hasher)
        prefix = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        manager.free(request)
        publisher.publish(manager.take_events())
    return len(pool.cached_block_hash_to_block)


def consume(endpoint: str, replay_endpoint: str | None, num_batches: int | None) -> PrefixMirror:
    """Follow a publisher, for so many batches or until Ctrl-C."""
    mirror = PrefixMirror(learns_tokens=True)
    with KVEventSubscriber(endpoint, replay_endpoint) as subscriber:
        for item in follow(mirror, subscriber, "engine"):
            match item:
                case ReceivedBatch(sequence, batch):
                    told = ", ".join(type(event).__name__ for event in batch.events)
                    print(f"{sequence}: {told}")
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
        num_held = live(publisher, num_requests=9)
        assert publisher.endpoint is not None
        mirror = consume(publisher.endpoint, publisher.replay_endpoint, num_batches=9)
    print(f"the pool holds {num_held} blocks, the mirror {mirror.count_blocks('engine')}")
    found = mirror.find_prefix_of_tokens([*PROMPT, 1, 2, 3, 4])
    print(f"of another prompt that begins so, it holds {found['engine']} tokens")

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
# the pool holds 30 blocks, the mirror 30
# of another prompt that begins so, it holds 16 tokens
