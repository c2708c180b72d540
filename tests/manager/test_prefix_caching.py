from kv_pool import BlockHasher, BlockPool, FullAttentionSpec, KVCacheManager, MambaSpec, Request

HASHER = BlockHasher("sha256", "s", 4)


def test_the_second_fork_finds_the_shared_block_cached():
    groups = (FullAttentionSpec(block_size=4), MambaSpec(block_size=8))
    manager = KVCacheManager(BlockPool(17, True, 4), groups=groups)
    parent, child = Request("p", range(16), HASHER), Request("c", range(16), HASHER)
    manager.allocate_slots(parent, 12)
    # Block 2 is full and not cached: no prefix of both groups ends at token 12.
    parent.num_computed_tokens = child.num_computed_tokens = 12
    manager.fork(parent, child)
    for request in (parent, child):
        assert manager.allocate_slots(request, 4) is not None
        manager.take_block_copies()
        assert manager.get_table(request.request_id).num_cached_blocks == 4
    assert manager.get_block_ids("p")[:3] == manager.get_block_ids("c")[:3]
