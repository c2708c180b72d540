"""Each invariant check of the adapter detects its damage."""

import pytest
from adapter.made_pool import make_storage

from kv_pool import BlockAllocationRequest, CorruptedPoolError, Eviction, GPUKVPool
from kv_pool.adapter.invariants import check
from kv_pool.manager.sequences.holdings import Holder


def make_pool():
    pool = GPUKVPool(10, 4, placement="oldest")
    pool.allocate(BlockAllocationRequest(3, 1))
    pool.fork(1, 2, 2)
    pool.pin([1])
    return pool


def test_a_pool_in_use_is_consistent():
    pool = make_pool()
    check(pool)
    [taken] = pool.block_pool.get_new_blocks(1)
    check(pool, [taken])


def lose_a_block(pool):
    pool.holdings.holders[2].blocks.clear()


def forget_a_holder(pool):
    del pool.holdings.holders_of[pool.block_pool.blocks[3]]


def keep_an_entry_without_holders(pool):
    pool.holdings.holders_of[pool.block_pool.blocks[9]] = ()


def hold_a_free_block(pool):
    pool.holdings.holders[1].blocks[pool.block_pool.blocks[9]] = None


def count_a_reference_too_many(pool):
    pool.block_pool.blocks[2].ref_cnt += 1


def pin_too_many(pool):
    pool.holdings.pins.limit = 0


def pin_a_free_block(pool):
    pool.holdings.pins.owners[pool.block_pool.blocks[9]] = {None: 1}


def pin_in_the_name_of_another_sequence(pool):
    pool.holdings.pins.owners[pool.block_pool.blocks[1]][Holder(4, 0, 0.0)] = 1


def use_a_small_storage(pool):
    pool.storage = make_storage(10)


def hold_blocks_after_an_eviction(pool):
    pool.holdings.evictions.note(Eviction(1, (1, 2)), is_notified=True)


def book_under_another_id(pool):
    pool.holdings.holders[3] = Holder(4, 0, 0.0)


@pytest.mark.parametrize(
    ("damage", "number"),
    [
        (lose_a_block, "A1"),
        (book_under_another_id, "A1"),
        (forget_a_holder, "A2"),
        (keep_an_entry_without_holders, "A2"),
        (hold_a_free_block, "A3"),
        (count_a_reference_too_many, "A4"),
        (pin_too_many, "A5"),
        (pin_a_free_block, "A5"),
        (pin_in_the_name_of_another_sequence, "A5"),
        (use_a_small_storage, "A6"),
        (hold_blocks_after_an_eviction, "A7"),
    ],
)
def test_damage_is_named_by_its_number(damage, number):
    pool = make_pool()
    damage(pool)
    with pytest.raises(CorruptedPoolError, match=f"^{number}:"):
        check(pool)


def test_a_pinned_block_without_holder_is_detected():
    pool = make_pool()
    taken = pool.block_pool.get_new_blocks(1)
    pool.holdings.pins.owners[taken[0]] = {None: 1}
    with pytest.raises(CorruptedPoolError, match=r"^A5:"):
        check(pool, taken)


def test_an_unaccounted_reference_is_detected():
    pool = make_pool()
    pool.block_pool.get_new_blocks(1)
    with pytest.raises(CorruptedPoolError, match=r"^A4: block 4 has 1 references"):
        check(pool)
