"""The design of a KV pool by block ids: its protocol, its benchmark, its integrations, call by call.

The design contradicts itself once: `allocate` returns ids in the interface, but a result with `success` in an
example. Here `allocate` returns ids or raises, `try_allocate` returns the result. Its ids run from 0; here
block 0 is the null block, and `DevicePools` counts from 0.
"""

import random

import pytest
from adapter.made_pool import CountingClock, check, fill, read

from kv_pool import (
    BlockAllocationRequest,
    GPUKVPool,
    InvalidArgumentError,
    InvalidBlockError,
    UnknownDeviceError,
    UnknownSequenceError,
)
from kv_pool.adapter import KVPoolMigrationManager
from kv_pool.adapter.device_pools import DevicePools
from kv_pool.storage import KVStorage


def make_pool(total_blocks=20, device_id=0, **options):
    storage = KVStorage.allocate(total_blocks + 1, 16, 1, 1, 4)
    return GPUKVPool(total_blocks, 16, device_id=device_id, storage=storage, clock=CountingClock(), **options)


def test_block_info_is_a_mapping_of_the_blocks_in_use():
    pool = make_pool()
    ids = pool.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=7))
    system = pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=8, pinned=True))
    assert dict(pool.block_info).keys() == {*ids, *system}
    assert len(pool.block_info) == 4
    assert sorted(bid for bid, info in pool.block_info.items() if info.sequence_id == 7) == sorted(ids)
    assert [info.block_id for info in pool.block_info.values() if info.is_pinned] == system
    assert all(info.device_id == 0 for info in pool.block_info.values())
    free_id = next(block_id for block_id in range(1, 21) if block_id not in pool.block_info)
    for missing in (free_id, 0, 21):
        with pytest.raises(KeyError):
            pool.block_info[missing]
    pool.free(ids)
    assert list(pool.block_info) == system


# ---- its benchmark -------------------------------------------------------------------------------


def make_refusing_pool():
    """Return the benchmark's pool, which raises `MemoryError` when it is full.

    By default the pool would evict a sequence, like the design's three steps. The benchmark reuses sequence
    ids, so it would continue with the blocks of evicted sequences.
    """
    return GPUKVPool(total_blocks=10_000, block_size=16, eviction_policy=None)


def live_randomly(pool, rng, num_steps=1000):
    """The benchmark's second part: requests of 1 to 32 blocks; half of them lose their first half at once."""
    for _ in range(num_steps):
        num = rng.randint(1, 32)
        req = BlockAllocationRequest(num_blocks=num, sequence_id=rng.randint(0, 100))
        try:
            block_ids = pool.allocate(req)
        except MemoryError:
            break
        if rng.random() < 0.5:
            pool.free(block_ids[: len(block_ids) // 2])


@pytest.mark.parametrize("seed", range(2))
def test_the_benchmark_runs_with_blocks_for_its_second_part(seed):
    rng = random.Random(seed)
    pool = make_refusing_pool()
    live_randomly(pool, rng)
    for sequence_id in rng.sample(pool.list_sequences(), 20):
        pool.free_sequence(sequence_id)
    moved = pool.defragment()
    assert moved > 0
    assert pool.get_fragmentation_rate() < 0.1
    assert pool.defragment() == 0
    check(pool)


# ---- its integrations ----------------------------------------------------------------------------


def test_blocks_of_finds_the_blocks_of_a_forked_sequence():
    """`sequence_id` of a shared block is the sequence that has held it longest: the design's loop does not
    free those blocks for a forked sequence, and `free` of their ids would take them from the other one.
    """
    pool = make_pool(10)
    ids = pool.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=1))
    pool.fork(1, 2)
    own = pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=2))
    assert [bid for bid, info in pool.block_info.items() if info.sequence_id == 2] == own
    assert [bid for bid, info in pool.block_info.items() if 2 in info.sequence_ids] == sorted(ids + own)
    assert pool.free_sequence(2) == 1
    assert pool.blocks_of(1) == ids
    check(pool)


# ---- other devices -------------------------------------------------------------------------------


def test_a_sequence_migrates_between_connected_pools():
    here, there = make_pool(), make_pool(device_id=1)
    here.connect(there)
    there.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=9))
    old = here.allocate(BlockAllocationRequest(num_blocks=4, sequence_id=12))
    fill(here)
    contents = read(here, 12)
    manager = KVPoolMigrationManager(here)
    result = manager.migrate_to_remote(sequence_id=12, target_node_id=1)
    assert result == {"old_blocks": old, "new_blocks": there.blocks_of(12), "target_node": 1}
    assert read(there, 12) == contents
    assert (here.list_sequences(), here.get_free_blocks()) == ([], 20)
    with pytest.raises(UnknownSequenceError):
        manager.migrate_to_remote(12, 1)
    with pytest.raises(
        UnknownDeviceError, match=r"device 2 is not connected to device 0; the connected devices are \[1\]"
    ):
        manager.migrate_to_remote(9, 2)
    with pytest.raises(InvalidArgumentError, match="node 'gpu-node-2' is reached through a migrator"):
        manager.migrate_to_remote(9, "gpu-node-2")
    check(here)
    check(there)


# ---- ids from 0, and requests by device ----------------------------------------------------------


def make_devices(*sizes):
    return DevicePools([make_pool(size, device_id) for device_id, size in enumerate(sizes)])


def test_ids_run_from_0_over_all_devices():
    pools = make_devices(4, 6)
    first = pools.allocate(BlockAllocationRequest(num_blocks=4, sequence_id=1, device_id=0))
    second = pools.allocate(BlockAllocationRequest(num_blocks=6, sequence_id=1, device_id=1))
    assert (sorted(first), sorted(second)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert [pools.get_block_info(block_id).block_id for block_id in range(10)] == list(range(10))
    assert [pools.get_block_info(block_id).device_id for block_id in (0, 3, 4, 9)] == [0, 0, 1, 1]
    for block_id in (-1, 10):
        with pytest.raises(InvalidBlockError, match="is not one of 0 to 9"):
            pools.get_block_info(block_id)
    pools.free([*first[:2], *second[2:]])
    assert pools.get_free_blocks() == 6
    assert [pool.get_free_blocks() for pool in pools.pools.values()] == [2, 4]


def test_a_request_goes_to_its_or_the_emptiest_device():
    pools = make_devices(4, 6)
    ids = pools.allocate(BlockAllocationRequest(num_blocks=5, sequence_id=1))
    assert pools.get_block_info(ids[0]).device_id == 1
    ids = pools.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=2))
    assert pools.get_block_info(ids[0]).device_id == 0
    with pytest.raises(UnknownDeviceError, match=r"there is no device 2; there are \[0, 1\]"):
        pools.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=3, device_id=2))
    with pytest.raises(MemoryError):
        pools.allocate(BlockAllocationRequest(num_blocks=7, sequence_id=3))


def test_blocks_migrate_between_devices_under_common_ids():
    pools = make_devices(8, 8)
    ids = pools.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=1, device_id=0))
    fill(pools.pools[0])
    contents = read(pools.pools[0], 1)
    new_ids = pools.migrate_blocks(ids, target_device_id=1)
    assert all(8 <= block_id < 16 for block_id in new_ids)
    assert new_ids == pools.to_ids(1, pools.pools[1].blocks_of(1))
    assert read(pools.pools[1], 1) == contents
    assert pools.migrate_blocks([], 1) == []
    other = pools.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=2, device_id=0))
    for mixed in (new_ids, [*new_ids, *other]):
        with pytest.raises(InvalidArgumentError, match="migrate those of one device at a time"):
            pools.migrate_blocks(mixed, 1)
    for pool in pools.pools.values():
        check(pool)


def test_compaction_and_rate_cover_all_devices():
    pools = make_devices(40, 40)
    for device_id in (0, 1):
        for sequence_id in range(20):
            pools.allocate(BlockAllocationRequest(2, sequence_id, device_id=device_id))
        for sequence_id in range(0, 20, 2):
            pools.pools[device_id].free_sequence(sequence_id)
    rate = pools.get_fragmentation_rate()
    assert rate == pools.pools[0].get_fragmentation_rate() == pools.pools[1].get_fragmentation_rate()
    assert pools.defragment() > 0
    assert pools.get_fragmentation_rate() < rate
    pools.allocate(BlockAllocationRequest(20, 50, device_id=0))
    pools.allocate(BlockAllocationRequest(20, 50, device_id=1))
    assert (pools.get_free_blocks(), pools.get_fragmentation_rate()) == (0, 0.0)


def test_duplicate_or_missing_devices_are_refused():
    with pytest.raises(InvalidArgumentError, match="device 0 is already connected"):
        DevicePools([make_pool(), make_pool()])
    with pytest.raises(InvalidArgumentError, match="pools is empty"):
        DevicePools([])
