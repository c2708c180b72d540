"""Single blocks of a `GPUKVPool` or a manager at a manager: cached ones are copied, blocks in use refused."""

import pytest
from adapter.made_pool import make, make_site, make_storage

from kv_pool import (
    BlockAllocationRequest,
    BlockHasher,
    BlockPool,
    InvalidArgumentError,
    KVCacheManager,
    Request,
)
from kv_pool.migration import BlocksSubject, SequenceSubject
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.pool_site import PoolSite

HASHER = BlockHasher("xxh3_128", "0", 4)


@pytest.fixture
def source():
    """A site of a pool by ids, and the ids of two cached blocks of sequence 1."""
    pool = make(8, storage=make_storage(9))
    ids = pool.allocate(BlockAllocationRequest(2, 1))
    pool.cache_prefix(1, [b"first hash here!", b"and the second!!"])
    return make_site(pool), pool, BlocksSubject(tuple(ids))


def make_manager(block_size=4, **options):
    manager = KVCacheManager(BlockPool(9, True, block_size), **options)
    return manager, PoolSite(ManagerSequences(manager, make_storage(9)))


def reserve(target, source, subject):
    selection = source.select(subject, False)
    return target.reserve(subject, selection.offered, selection.state)


def test_cached_blocks_of_a_pool_by_ids_are_copied_to_a_manager(source):
    site, pool, subject = source
    pool.free_sequence(1)
    manager, target = make_manager(pool.block_size)
    reservation = reserve(target, site, subject)
    target.insert(reservation)
    target.adopt(reservation)
    assert sum(block.block_hash is not None for block in manager.block_pool.blocks) == 2


def test_blocks_in_use_are_refused_with_the_way_out(source):
    site, pool, subject = source
    manager, target = make_manager(pool.block_size)
    with pytest.raises(InvalidArgumentError, match="move the request instead"):
        reserve(target, site, subject)
    assert manager.get_num_free_blocks() == 8


def test_the_watermark_is_kept_from_requests_only():
    manager, source = make_manager()
    manager.allocate_slots(Request("a", range(100, 116), HASHER), 16)
    subject = BlocksSubject(tuple(manager.get_block_ids("a")))
    other, target = make_manager(watermark=0.25)
    other.allocate_slots(Request("b", range(16), HASHER), 16)
    assert (other.get_num_free_blocks(), other.watermark_blocks) == (4, 2)
    assert len(reserve(target, source, subject).blocks) == 4


def test_all_that_follows_tables_sees_a_request_leave():
    """Only the retention did: the tokens of an owner's request stayed here after it had moved away."""
    manager, site = make_manager(tracks_owners=True)
    subject = SequenceSubject("moved")
    assert manager.allocate_slots(Request("moved", range(9), HASHER, cache_salt="tenant"), 9) is not None
    site.freeze(subject, site.select(subject, for_move=True).rows)
    site.release(subject, "target")
    assert not manager._owners._running
    assert manager.evict_owned(cache_salt="tenant") == 2
