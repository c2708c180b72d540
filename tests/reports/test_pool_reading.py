"""A `PoolReading` agrees with the full scan of `PoolStatistics`, for every kind of pool."""

import random

import msgspec
import pytest

from kv_pool import BlockAllocationRequest, BlockHasher, BlockPool, GPUKVPool, KVCacheManager, Request
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control import ControlledManager
from kv_pool.reports import PoolReading, PoolSources, read_pool

SAME = (
    *("total_blocks", "used_blocks", "free_blocks", "pinned_blocks", "reserved_blocks", "run_length"),
    *("largest_free_run", "epoch", "moved_blocks", "num_sequences", "evicted_sequences", "queued_events"),
)


@pytest.mark.parametrize("seed", range(5))
def test_a_reading_is_what_a_scan_of_all_blocks_finds(seed):
    draw = random.Random(seed)
    pool = GPUKVPool(300, 4, reserved_blocks=7, enable_kv_cache_events=True)
    for number in range(200):
        num_blocks, pinned = draw.randint(1, 20), draw.random() < 0.05
        pool.allocate(BlockAllocationRequest(num_blocks=num_blocks, sequence_id=number, pinned=pinned))
        hashes = [draw.randbytes(32) for _ in range(num_blocks)]
        pool.cache_prefix(number, hashes[: draw.randint(0, num_blocks)])
        if draw.random() < 0.5:
            sequence_id = draw.choice(pool.list_sequences())
            if not any(pool.get_block_info(one).is_pinned for one in pool.blocks_of(sequence_id)):
                pool.free_sequence(sequence_id)
        if draw.random() < 0.1:
            pool.defragment(max_moves=10)
        statistics, reading = pool.get_statistics(), read_pool(PoolSources(pool=pool))
        for name in SAME:
            assert getattr(reading, name) == getattr(statistics, name), name
        assert reading.cached_blocks == statistics.cached_free_blocks
        assert reading.fragmentation_rate == pytest.approx(statistics.fragmentation_rate)
        assert reading.holds["open"] == statistics.immovable_blocks
        assert reading.calls["take"] == statistics.allocation.num_calls
        assert sum(reading.evictions.values()) == statistics.evicted_blocks
    assert msgspec.json.decode(msgspec.json.encode(reading), type=PoolReading) == reading


@pytest.mark.parametrize("pool_class", [BlockPool, RunBlockPool])
def test_pools_and_managers_without_a_server_are_read(pool_class):
    pool = pool_class(11, True, 4)
    manager = KVCacheManager(pool)
    manager.allocate_slots(Request("a", range(10), BlockHasher(block_size=4)), 10)
    for source in (pool, manager, ControlledManager(manager)):
        reading = read_pool(PoolSources(pool=source, model_name="m"))
        assert (reading.total_blocks, reading.used_blocks, reading.usage) == (10, 3, 0.3)
        assert (reading.block_size, reading.model_name) == (4, "m")
        assert (reading.largest_free_run is None) == (pool_class is BlockPool)
        assert reading.num_sequences == (None if source is pool else 1)
