"""Bands of the free queue: the order in which blocks are reused."""

import pytest
from contiguous.slot_engine import make_run_pool
from core.banded_pool import PICTURE, ByHash, check, list_bands, make_banded
from drawing import blocks, ids, make_pool, state

from kv_pool import BlockPool, CorruptedPoolError, InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.contiguous.run_index import RETAINED
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.eviction_order import EMPTY_BAND, EXPIRED_BAND


def make_ordered(pool_type=BlockPool):
    """Bands: empty 9, expired 2, -5: 4, default 1 3, 7: 5."""
    pool = make_banded(pool_type=pool_type)
    for band, block_id in ((7, 5), (-5, 4), (EXPIRED_BAND, 2)):
        pool.move_to_band(blocks(pool, block_id), band)
    return pool


# ---- a pool without bands --------------------------------------------------------------------------


def test_a_pool_has_no_bands_by_default():
    pool = make_pool(PICTURE)
    queue = pool.free_block_queue
    assert not pool.eviction_order.is_open
    assert pool.eviction_order.list_bands() == []
    assert queue.append_before is queue.fake_free_list_tail
    linked = [queue.fake_free_list_head]
    while linked[-1].next_free_block is not None:
        linked.append(linked[-1].next_free_block)
    assert linked[1:-1] == queue.get_all_free_blocks()
    with pytest.raises(InvalidArgumentError, match=r"the pool has no bands; call open_bands\(\) first"):
        pool.move_to_band(blocks(pool, 1), 1)
    assert state(pool) == PICTURE


# ---- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_type", [BlockPool, RunBlockPool])
def test_a_refused_move_changes_nothing(pool_type):
    pool, other = make_ordered(pool_type), make_banded()
    before = list_bands(pool)
    cases = [
        ([1], 101, InvalidArgumentError, "the band is 101; bands go from -100 to 100"),
        ([1], -103, InvalidArgumentError, "the band is -103"),
        ([1, 6], 1, InvalidBlockError, "block 6 is in use; only free blocks are moved to a band"),
        ([1, 0], 1, InvalidBlockError, "block 0 is"),
    ]
    for block_ids, band, error, said in cases:
        with pytest.raises(error, match=said):
            pool.move_to_band(blocks(pool, *block_ids), band)
    with pytest.raises(InvalidBlockError, match="block 3 belongs to another pool"):
        pool.move_to_band([pool.blocks[1], other.blocks[3]], 1)
    assert list_bands(pool) == before
    check(pool)
    check(other)


def test_empty_bands_leave_no_markers():
    pool = make_banded()
    for band in range(1, 50):
        pool.move_to_band(blocks(pool, 1, 2), band)
        pool.move_to_band(blocks(pool, 3), -band)
    assert len(pool.eviction_order._ends) <= 6
    assert list_bands(pool) == {EMPTY_BAND: [9], -49: [3], 0: [4, 5], 49: [1, 2]}
    check(pool)


# ---- the queue's own methods ---------------------------------------------------------------------


def test_the_queue_neither_returns_nor_counts_markers():
    pool = make_ordered()
    queue = pool.free_block_queue
    order = blocks(pool, 9, 2, 4, 1, 3, 5)
    assert queue.get_all_free_blocks() == order
    assert list(queue.iter_blocks_after(None)) == order
    for position, block in enumerate(order):
        assert list(queue.iter_blocks_after(block)) == order[position + 1 :]
    queue.remove(pool.blocks[4])
    assert queue.num_free_blocks == 5
    queue.append(pool.blocks[4])
    assert ids(queue.get_all_free_blocks()) == [9, 2, 1, 3, 4, 5]
    queue.append_n(queue.popleft_n(2))
    queue.prepend_n([queue.popleft()])
    assert ids(queue.get_all_free_blocks()) == [1, 3, 4, 9, 2, 5]
    assert list_bands(pool) == {EMPTY_BAND: [1], 0: [3, 4, 9, 2], 7: [5]}
    check(pool)
    assert ids(queue.popleft_n(5)) == [1, 3, 4, 9, 2]
    assert queue.popleft() is pool.blocks[5]
    assert (queue.popleft_n(0), queue.num_free_blocks, queue.get_all_free_blocks()) == ([], 0, [])
    with pytest.raises(OutOfBlocksError):
        queue.popleft()
    with pytest.raises(InvalidArgumentError):
        queue.popleft_n(1)
    queue.num_free_blocks = 1
    with pytest.raises(CorruptedPoolError, match="num_free_blocks is 1 but no block is linked"):
        queue.popleft()
    with pytest.raises(CorruptedPoolError, match="num_free_blocks is 1 but fewer blocks are linked"):
        pool.get_new_blocks(1)


# ---- the pool's other methods --------------------------------------------------------------------


def test_a_freed_pool_is_collected_with_its_bands():
    import gc
    import weakref

    pool = make_ordered()
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


# ---- placements ------------------------------------------------------------------------------------


def test_a_second_placement_is_refused():
    pool = make_banded()
    with pytest.raises(InvalidArgumentError, match="the pool already has a band policy, "):
        pool.open_bands(ByHash(pool))
    pool.free_blocks(blocks(pool, 8))
    assert pool.policy.placed == [[8]]


# ---- the index of runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("make_iterable", [list, tuple, iter])
def test_ages_follow_moves_of_any_iterable_of_blocks(make_iterable):
    pool = make_run_pool(PICTURE)
    pool.open_bands(ByHash(pool))
    pool.move_to_band(make_iterable(blocks(pool, 1, 5)), 8)
    assert (pool.run_index.ages[1], pool.run_index.ages[5]) == (RETAINED, RETAINED)
    check(pool)


def test_ages_ignore_moves_behind_older_blocks_of_lower_bands():
    pool = make_run_pool(PICTURE)
    pool.open_bands(ByHash(pool))
    for band, block_id in ((-9, 1), (-8, 2), (-7, 3)):
        pool.move_to_band(blocks(pool, block_id), band)
    pool.rebuild_index()
    check(pool)
    pool.move_to_band(blocks(pool, 4), -7)
    check(pool)


def test_retained_blocks_are_chosen_last_for_a_run():
    pool = make_run_pool("free: 1* 2* 3* 4* 5* 6* | in use: 7 8", early_share=1.0)
    pool.open_bands(ByHash(pool))
    pool.move_to_band(blocks(pool, 1, 2), 8)
    assert ids(pool.get_new_run(2)) == [4, 5]
    assert sorted(ids(pool.get_new_blocks(2))) == [3, 6]
    assert pool.run_index.find(pool, 2, avoids_retained=True) is None
    assert ids(pool.get_new_run(2)) == [1, 2]
    check(pool)


def test_an_empty_run_is_taken_before_a_retained_chunk():
    pool = make_run_pool("free: 1 2 4* 5* | in use: 3 6 7", placement="buddy")
    pool.open_bands(ByHash(pool))
    pool.move_to_band(blocks(pool, 4, 5), 8)
    assert ids(pool.get_new_run(2)) == [1, 2]
    assert ids(pool.get_new_run(2)) == [4, 5]
    check(pool)
