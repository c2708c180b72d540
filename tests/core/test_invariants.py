"""Each invariant is violated by hand, and its check names it."""

from contextlib import nullcontext

import pytest
from core.policy_pool import make_manager, run, start
from damages import damages
from drawing import GROUP, blocks, hash_of, make_pool

from kv_pool import CorruptedPoolError, KVCacheBlock
from kv_pool.core import invariants
from kv_pool.core.cached_runs import RunQueue, unlink
from kv_pool.core.eviction_order import EMPTY_BAND, BandPolicy

PICTURE = "free: 3 1* 2* | in use: 4*x2 5"


def test_a_sound_pool_passes():
    invariants.check(make_pool(PICTURE))


def link_to_nowhere(pool):
    pool.blocks[3].next_free_block = None


def leave_the_last_block_out(pool):
    pool.free_block_queue.num_free_blocks -= 1


def count_one_too_many(pool):
    pool.free_block_queue.num_free_blocks += 1


def point_back_elsewhere(pool):
    pool.blocks[1].prev_free_block = pool.blocks[2]


def put_something_before_the_head(pool):
    pool.free_block_queue.fake_free_list_head.prev_free_block = pool.blocks[5]


def put_something_after_the_tail(pool):
    pool.free_block_queue.fake_free_list_tail.next_free_block = pool.blocks[5]


def reference_a_free_block(pool):
    pool.blocks[1].ref_cnt = 1


def lose_a_reference(pool):
    pool.blocks[5].ref_cnt = 0


def link_a_block_in_use(pool):
    pool.blocks[5].next_free_block = pool.blocks[4]


def queue_a_stranger(pool):
    pool.free_block_queue.append(KVCacheBlock(9))


def swap_two_blocks(pool):
    pool.blocks[1].block_id, pool.blocks[2].block_id = 2, 1


def adopt_a_block(pool):
    pool.blocks[1].owner = None


def flag_a_second_null_block(pool):
    pool.blocks[5].is_null = True


def hash_the_null_block(pool):
    pool.null_block.set_block_hash(b"x")


def go_below_zero(pool):
    pool.blocks[5].ref_cnt = -1


def forget_a_mapped_block(pool):
    pool.blocks[1].reset_hash()


def carry_an_unmapped_hash(pool):
    pool.blocks[5].set_block_hash(b"unmapped")


def leave_an_empty_entry(pool):
    pool.cached_block_hash_to_block._cache[b"x"] = {}


def map_under_a_wrong_id(pool):
    pool.cached_block_hash_to_block._cache[hash_of(1) + GROUP] = {7: blocks(pool, 1)[0]}


def be_one_of_two_and_say_alone(pool):
    key = hash_of(1) + GROUP
    pool.blocks[5].set_block_hash(key)
    pool.cached_block_hash_to_block.insert(key, pool.blocks[5])
    pool.blocks[1]._next_cached_id = 0


def count_a_key_too_many(pool):
    pool.cached_block_hash_to_block._num_keys += 1


def keep_a_secondary_key_without_a_primary(pool):
    pool.cached_block_hashes_by_block[5] = {b"x": None}


def free_a_held_block(pool):
    pool.hold([pool.blocks[5]], "read by a test")
    pool.free_blocks([pool.blocks[5]] * 2)


def hold_more_often_than_there_are_references(pool):
    for _ in range(3):
        pool.hold([pool.blocks[5]], "read by a test")
    pool.free_blocks([pool.blocks[5]] * 2)


def hold_the_null_block(pool):
    pool.hold([pool.blocks[5]], "read by a test")._blocks[pool.null_block] = None


def hold_a_block_of_another_pool(pool):
    pool.hold([pool.blocks[5]], "read by a test")._blocks[make_pool(PICTURE).blocks[5]] = None


def open_two_bands(pool):
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 1), 1)
    return pool.eviction_order


def append_behind_the_default_band(pool):
    open_two_bands(pool)
    pool.free_block_queue.append_before = pool.free_block_queue.fake_free_list_tail


def append_before_a_stranger(pool):
    pool.free_block_queue.append_before = KVCacheBlock(-1)


def lose_the_end_of_a_band(pool):
    end = open_two_bands(pool)._ends[1]
    end.prev_free_block.next_free_block = end.next_free_block
    end.next_free_block.prev_free_block = end.prev_free_block


def forget_the_end_of_a_band(pool):
    del open_two_bands(pool)._ends[1]


def mix_up_two_bands(pool):
    ends = open_two_bands(pool)._ends
    ends[1], ends[EMPTY_BAND] = ends[EMPTY_BAND], ends[1]


def carry_an_unmapped_secondary_key(pool):
    pool.cached_block_hashes_by_block[1] = {b"x": None}


@damages(
    (link_to_nowhere, "Q1"),
    (leave_the_last_block_out, "Q1"),
    (count_one_too_many, "Q1"),
    (point_back_elsewhere, "Q2"),
    (put_something_before_the_head, "Q2"),
    (put_something_after_the_tail, "Q2"),
    (reference_a_free_block, "Q3"),
    (lose_a_reference, "Q3"),
    (link_a_block_in_use, "Q3"),
    (queue_a_stranger, "P1"),
    (swap_two_blocks, "P3"),
    (adopt_a_block, "P3"),
    (flag_a_second_null_block, "P4"),
    (hash_the_null_block, "P4"),
    (go_below_zero, "P5"),
    (forget_a_mapped_block, "P2"),
    (carry_an_unmapped_hash, "P2"),
    (keep_a_secondary_key_without_a_primary, "P6"),
    (free_a_held_block, "P7"),
    (hold_more_often_than_there_are_references, "P7"),
    (hold_the_null_block, "P7"),
    (hold_a_block_of_another_pool, "P7"),
    (append_behind_the_default_band, "P8"),
    (append_before_a_stranger, "P8"),
    (lose_the_end_of_a_band, "P8"),
    (forget_the_end_of_a_band, "P8"),
    (mix_up_two_bands, "P8"),
    (carry_an_unmapped_secondary_key, "P2"),
    (leave_an_empty_entry, "H1"),
    (map_under_a_wrong_id, "H1"),
    (be_one_of_two_and_say_alone, "H2"),
    (count_a_key_too_many, "H3"),
)
def test_check_detects_each_broken_invariant(damage, broken):
    pool = make_pool(PICTURE)
    damage(pool)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        invariants.check(pool)


@damages(
    (put_something_after_the_tail, None),
    (point_back_elsewhere, "Q2"),
    (link_to_nowhere, "Q2"),
    (reference_a_free_block, "Q3"),
    (lose_a_reference, "Q3"),
    (swap_two_blocks, "P3"),
    (hash_the_null_block, "P4"),
    (go_below_zero, "P5"),
    (carry_an_unmapped_hash, "P2"),
)
def test_check_of_slices_detects_what_is_wrong_with_a_block(damage, broken):
    pool = make_pool(PICTURE)
    damage(pool)
    with nullcontext() if broken is None else pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        for first in range(0, 6, 2):
            invariants.check_slice(pool, first, 2)


def make_policed():
    """Return a pool with a FIFO: a sequence of 4 blocks of which 2 go on elsewhere, and one block in use."""
    manager = make_manager(8, "fifo")
    run(manager, "a", range(16))
    run(manager, "b", [*range(8), 50, 51, 52, 53])
    start(manager, "c", [90, 91, 92, 93])
    return manager.block_pool


def get_run(pool, block_id):
    return pool.policy_host.table.find(pool.blocks[block_id])


def list_a_block_twice(pool):
    get_run(pool, 1).blocks.append(pool.blocks[5])


def forget_a_listed_block(pool):
    get_run(pool, 1).blocks.pop()


def say_free_in_use(pool):
    get_run(pool, 6).is_free = True


def count_a_child_too_many(pool):
    get_run(pool, 4).num_children += 1


def park_a_leaf(pool):
    run = get_run(pool, 4)
    unlink(run)
    run.is_parked = True


def be_in_another_queue(pool):
    get_run(pool, 4).queue = RunQueue(0)


def count_too_few_ordered(pool):
    pool.policy_host.num_ordered -= 1


def count_too_few_in_a_queue(pool):
    pool.policy_host.policy.queues[0].num_blocks -= 1


@damages(
    (list_a_block_twice, "K1"),
    (forget_a_listed_block, "K1"),
    (say_free_in_use, "K2"),
    (count_a_child_too_many, "K3"),
    (park_a_leaf, "K4"),
    (be_in_another_queue, "K4"),
    (count_too_few_ordered, "K5"),
    (count_too_few_in_a_queue, "K6"),
)
def test_check_detects_each_broken_invariant_of_runs(damage, broken):
    pool = make_policed()
    invariants.check(pool)
    damage(pool)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        invariants.check(pool)


def test_check_detects_a_lost_block():
    pool = make_pool(PICTURE)
    pool.num_gpu_blocks += 1
    with pytest.raises(CorruptedPoolError, match=r"^P1: 6 blocks of 7"):
        invariants.check(pool)
