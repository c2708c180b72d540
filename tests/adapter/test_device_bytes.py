"""Blocks whose bytes are on a device: compaction by a pool, and tiers in host memory below it."""

import random

import numpy as np
import pytest
from adapter.made_pool import take

from kv_pool import BlockHasher, BlockPool, GPUKVPool, Request
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.storage import KVStorage
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tiered_cache import TieredCache

DEVICES = [pytest.param("cpu", marks=pytest.mark.torch), pytest.param("cuda:0", marks=pytest.mark.gpu)]


def make_storage(num_blocks, device):
    storage = KVStorage.allocate(num_blocks, 4, 2, 1, 8, "float16", device, library="torch")
    for block_id in range(num_blocks):
        storage.write_block(block_id, np.random.default_rng(block_id).bytes(storage.block_bytes))
    return storage


def read_sequences(pool, storage):
    return {
        sequence_id: [storage.read_block(block_id) for block_id in pool.blocks_of(sequence_id)]
        for sequence_id in pool.list_sequences()
    }


@pytest.mark.parametrize(
    ("device", "has_own_stream"),
    [
        pytest.param("cpu", False, marks=pytest.mark.torch, id="cpu"),
        pytest.param("cuda:0", False, marks=pytest.mark.gpu, id="gpu, the engine's stream"),
        pytest.param("cuda:0", True, marks=pytest.mark.gpu, id="gpu, its own stream"),
    ],
)
def test_a_compaction_moves_the_bytes(device, has_own_stream):
    rng = random.Random(0)
    storage = make_storage(65, device)
    if has_own_stream:
        storage.use_copy_stream()
    pool = GPUKVPool(64, 4, storage=storage, placement="oldest", on_moved=lambda moved: None)
    num_moves = 0
    for number in range(40):
        while pool.get_free_blocks() < 8:
            pool.free_sequence(rng.choice(pool.list_sequences()))
        take(pool, number, rng.randrange(1, 8))
        before = read_sequences(pool, storage)
        num_moves += pool.defragment()
        assert read_sequences(pool, storage) == before
    assert num_moves > 20


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefix_is_onboarded_from_a_host_memory_tier(device):
    storage = make_storage(9, device)
    pool = BlockPool(9, True, 4)
    cache = TieredCache(pool, storage, [HostTier(16, storage)])
    request = Request("a", range(32), BlockHasher("sha256", "s", 4))
    blocks = pool.get_new_blocks(8)
    expected = [storage.read_block(block.block_id) for block in blocks]
    pool.cache_full_blocks(request, blocks, 0, 8, 4, 0)
    pool.free_blocks(reversed(blocks))
    pool.free_blocks(pool.get_new_blocks(8))  # evicted to the tier
    cache.flush_evicted()
    keys = [make_block_hash_with_group_id(block_hash, 0) for block_hash in request.block_hashes]
    assert cache.has_all(keys)
    for block_id in range(1, 9):
        storage.write_block(block_id, bytes(storage.block_bytes))
    taken = pool.get_new_blocks(8)
    assert not cache.load(keys, [block.block_id for block in taken])
    assert [storage.read_block(block.block_id) for block in taken] == expected
