"""The keys that a pool has cached."""

import pytest

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockStored,
    FullAttentionSpec,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
)


@pytest.mark.parametrize("use_int_block_hashes", [True, False])
def test_cached_keys_agree_with_the_events(use_int_block_hashes):
    pool = BlockPool(20, True, 4, enable_kv_cache_events=True, use_int_block_hashes=use_int_block_hashes)
    manager = KVCacheManager(
        pool, groups=[FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=8)]
    )
    request = Request("r", range(12), BlockHasher("sha256_cbor", block_size=4))
    manager.allocate_slots(request, 12)
    announced = {
        (event.group_idx, block_hash)
        for event in manager.take_events()
        if isinstance(event, BlockStored)
        for block_hash in event.block_hashes
    }
    keys = list(manager.iter_cached_keys())
    assert {(key.group_id, key.external_hash) for key in keys} == announced
    assert {(key.group_id, key.block_hash) for key in keys} == {
        (group_id, block_hash) for group_id in (0, 1) for block_hash in request.block_hashes
    }
    assert all(pool.get_cached_block(key.block_hash, [key.group_id]) for key in keys)
