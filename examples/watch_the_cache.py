"""Observe a pool: its event stream, and the lifetimes of its blocks.

Run it: python examples/watch_the_cache.py
"""

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRemoved,
    BlockStored,
    KVCacheManager,
    KVCacheMetricsCollector,
    Request,
    RequestId,
)

collector = KVCacheMetricsCollector(sample_rate=1.0)
pool = BlockPool(5, True, 4, enable_kv_cache_events=True, metrics_collector=collector)
manager = KVCacheManager(pool)
hasher = BlockHasher("sha256_cbor", block_size=4)  # the same hashes in every process, and in vLLM

for name, first in (("first", 0), ("second", 100)):
    request = Request(RequestId(name), range(first, first + 12), hasher)
    manager.allocate_slots(request, request.num_tokens)
    manager.free(request)
    print(f"after the {name} request:")
    for event in manager.take_events():
        if isinstance(event, (BlockStored, BlockRemoved)):
            print(f"  {type(event).__name__}: {len(event.block_hashes)} hash(es)")

samples = collector.drain_events()
print(
    f"{len(samples)} blocks were evicted; were any of them hit? {any(s.reuse_gaps_seconds for s in samples)}"
)

# prints:
# after the first request:
#   BlockStored: 3 hash(es)
# after the second request:
#   BlockRemoved: 1 hash(es)
#   BlockRemoved: 1 hash(es)
#   BlockStored: 3 hash(es)
# 2 blocks were evicted; were any of them hit? False
