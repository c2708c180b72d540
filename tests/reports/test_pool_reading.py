"""A `PoolReading` agrees with the full scan of `PoolStatistics`, for every kind of pool."""

import random

import msgspec
import pytest

from kv_pool import (
    BlockAllocationRequest,
    BlockHasher,
    BlockPool,
    CorruptedPoolError,
    GPUKVPool,
    KVCacheManager,
    Request,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control import ControlledManager
from kv_pool.core.invariants import check
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


def test_evictions_are_counted_by_their_cause():
    pool = GPUKVPool(12, 4)
    blocks = pool.block_pool

    def fill(number, num_blocks):
        pool.allocate(BlockAllocationRequest(num_blocks=num_blocks, sequence_id=number))
        pool.cache_prefix(number, [bytes([number, one]) * 16 for one in range(num_blocks)])
        pool.free_sequence(number)

    fill(1, 12)
    fill(2, 5)
    blocks.evict_blocks({blocks.blocks[1].block_id})
    blocks.remove_last_blocks(2)
    evictions = read_pool(PoolSources(pool=pool)).evictions
    assert (evictions["reuse"], evictions["evict"], evictions["shrink"]) == (5, 1, 2)
    fill(3, 10)
    assert blocks.reset_prefix_cache()
    fill(4, 3)
    blocks.is_changing = True  # as after an interrupt
    reading = read_pool(PoolSources(pool=pool))
    assert (reading.is_interrupted, reading.interrupted_calls) == (True, 1)
    pool.repair()
    after = read_pool(PoolSources(pool=pool))
    assert (after.is_interrupted, after.interrupted_calls) == (False, 1)
    assert (after.evictions["reset"], after.evictions["repair"]) == (10, 3)
    assert sum(after.evictions.values()) == blocks.num_evictions


def test_checks_of_invariants_are_counted_with_their_failures():
    pool = BlockPool(11, True, 4)
    check(pool)
    pool.blocks[3].ref_cnt = 1
    with pytest.raises(CorruptedPoolError):
        check(pool)
    reading = read_pool(PoolSources(pool=pool))
    assert (reading.invariant_checks, reading.invariant_failures) == (2, 1)


def test_managers_count_the_tokens_that_their_requests_looked_up_and_hit():
    manager, hasher = KVCacheManager(BlockPool(11, True, 4)), BlockHasher(block_size=4)
    for request_id in ("a", "b"):
        request = Request(request_id, range(10), hasher)
        manager.allocate_slots(request, 10, manager.get_computed_blocks(request))
    reading = read_pool(PoolSources(pool=manager))
    assert (reading.looked_up_tokens, reading.hit_tokens, reading.hit_rate) == (20, 8, 0.4)
