import pytest

from kv_pool import BlockPool, InvalidBlockError, KVCacheBlock


def test_a_hash_can_be_set_again_only_after_a_reset():
    block = KVCacheBlock(1)
    block.set_block_hash(b"first", 16)
    with pytest.raises(InvalidBlockError, match="block 1 already carries a hash"):
        block.set_block_hash(b"second", 32)
    assert (block.block_hash, block.block_hash_num_tokens) == (b"first", 16)
    block.reset_hash()
    assert (block.block_hash, block.block_hash_num_tokens) == (None, None)
    block.set_block_hash(b"second", 32)
    assert block.block_hash == b"second"


def test_hash_and_count_are_read_only():
    block = KVCacheBlock(1)
    with pytest.raises(AttributeError):
        block.block_hash = b"key"
    with pytest.raises(AttributeError):
        block.block_hash_num_tokens = 3


def test_unknown_attributes_are_refused():
    with pytest.raises(AttributeError):
        KVCacheBlock(1).note = "x"


def test_repr_names_neighbours_by_id():
    block = KVCacheBlock(3, prev_free_block=KVCacheBlock(2), next_free_block=KVCacheBlock(4))
    assert repr(block) == (
        "KVCacheBlock(block_id=3, ref_cnt=0, _block_hash=None, _block_hash_num_tokens=None, "
        "prev_free_block=2, next_free_block=4)"
    )


def test_a_block_refers_to_its_pool_weakly():
    pool = BlockPool(3, True, 4)
    block = pool.blocks[2]
    assert block.pool is pool
    assert KVCacheBlock(9, pool=pool).pool is pool
    del pool
    assert block.pool is None


def test_a_key_may_have_any_type():
    marker = object()
    block = KVCacheBlock(3, _block_hash=marker, _block_hash_num_tokens=8)
    assert block.block_hash is marker
    assert (block.block_hash_num_tokens, block._block_hash_num_tokens) == (8, 8)
    block._block_hash_num_tokens = None
    assert block.block_hash_num_tokens is None
