"""Each invariant of a manager is broken by hand, and its check names it."""

import pytest
from damages import damages
from manager.table_drawing import draw, grow, make_manager, make_request, start, take_copies

from kv_pool import (
    CorruptedPoolError,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.ids import BlockHash
from kv_pool.manager.invariants import check_manager, check_writes
from kv_pool.manager.kv_cache_manager import KVCacheManager

GROUPS = (
    FullAttentionSpec(block_size=4),
    SlidingWindowSpec(block_size=4, sliding_window=4),
    EncoderOnlyAttentionSpec(block_size=4),
)


def make_running():
    """a; its fork b, for which a copy is pending; c. Salts stand for what their encoder reads."""
    manager = make_manager(GROUPS)
    a = make_request("a", range(10), cache_salt="salt")
    start(manager, a)
    b = make_request("b", [*range(10), 50], cache_salt="salt")
    b.num_computed_tokens = 10
    manager.fork(a, b)
    grow(manager, a, [60])
    c = make_request("c", range(100, 106), cache_salt="salt")
    start(manager, c)
    return manager, [a, b, c]


def test_a_sound_manager_passes():
    manager, (a, b, c) = make_running()
    assert draw(manager, a) == "1*x2 2*x2 7 / - 5*x2 8 / "
    assert draw(manager, b) == "1*x2 2*x2 3x2 / 4* 5*x2 6x2 / "
    assert draw(manager, c) == "9* 10 / 11* 12 / "
    check_manager(manager, [a, b, c])
    assert take_copies(manager) == [(3, 7), (6, 8)]
    check_manager(manager, [a, b, c])


def table_of(manager, name, group_id=0):
    return manager.get_table(name, group_id)


def hold_a_free_block(manager):
    table_of(manager, "c").blocks[1] = manager.block_pool.blocks[20]


def hold_a_block_of_another_pool(manager):
    table_of(manager, "c").blocks[1] = make_manager(GROUPS).block_pool.blocks[10]


def forget_a_touch(manager):
    manager.block_pool.blocks[1].ref_cnt -= 1


def leak_a_block(manager):
    manager.block_pool.get_new_blocks(1)


def forget_the_source_of_a_copy(manager):
    manager.block_pool.blocks[3].ref_cnt -= 1


def lose_the_last_block(manager):
    manager.block_pool.free_blocks([table_of(manager, "c").blocks.pop()])


def add_blocks_to_an_encoder_only_table(manager):
    table_of(manager, "c", 2).blocks.append(manager.block_pool.null_block)


def release_a_block_that_is_read(manager):
    table = table_of(manager, "c", 1)
    manager.block_pool.free_blocks([table.blocks[0]])
    table.blocks[0] = manager.block_pool.null_block
    table.num_null_blocks = 1


def count_a_null_block_too_many(manager):
    table_of(manager, "a", 1).num_null_blocks = 2


def count_a_null_block_too_few(manager):
    table_of(manager, "a", 1).num_null_blocks = 0


def count_more_cached_blocks_than_there_are(manager):
    table_of(manager, "c").num_cached_blocks = 3


def cache_under_another_hash(manager):
    pool = manager.block_pool
    pool.evict_blocks([9])
    pool.cache_full_blocks(make_request("x", range(4)), table_of(manager, "c").blocks, 0, 1, 4, 0)


def cache_under_another_group(manager):
    pool = manager.block_pool
    pool.evict_blocks([9])
    pool.cache_full_blocks(make_request("x", range(100, 104)), table_of(manager, "c").blocks, 0, 1, 4, 1)


def release_the_source_of_a_copy(manager):
    manager.copies._holds[0].remove([manager.block_pool.blocks[3]])


def copy_to_nowhere(manager):
    manager.copies._source_of[manager.block_pool.blocks[20]] = manager.block_pool.blocks[3]


def copy_from_a_target(manager):
    blocks = manager.block_pool.blocks
    manager.copies._source_of[blocks[7]] = blocks[8]


@damages(
    (hold_a_free_block, "T1"),
    (hold_a_block_of_another_pool, "T1"),
    (forget_a_touch, "T2"),
    (leak_a_block, "T2"),
    (forget_the_source_of_a_copy, "T2"),
    (release_the_source_of_a_copy, "T6"),
    (lose_the_last_block, "T3"),
    (add_blocks_to_an_encoder_only_table, "T3"),
    (release_a_block_that_is_read, "T4"),
    (count_a_null_block_too_many, "T4"),
    (count_a_null_block_too_few, "T4"),
    (count_more_cached_blocks_than_there_are, "T5"),
    (cache_under_another_hash, "T5"),
    (cache_under_another_group, "T5"),
    (copy_to_nowhere, "T6"),
    (copy_from_a_target, "T6"),
)
def test_each_broken_invariant_of_a_manager_is_named(damage, broken):
    manager, requests = make_running()
    damage(manager)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}:"):
        check_manager(manager, requests)


def test_an_unknown_request_is_named():
    manager, (a, b, _) = make_running()
    with pytest.raises(CorruptedPoolError, match=r"^T7: request 'c' has blocks"):
        check_manager(manager, [a, b])


def test_a_broken_pool_invariant_is_named():
    manager, requests = make_running()
    manager.block_pool.free_block_queue.num_free_blocks += 1
    with pytest.raises(CorruptedPoolError, match=r"^Q1:"):
        check_manager(manager, requests)


def test_a_broken_run_pool_invariant_is_named():
    pool = RunBlockPool(9, True, 4)
    manager = KVCacheManager(pool)
    request = make_request("a", range(10))
    start(manager, request)
    check_manager(manager, [request])
    pool.run_index.ages[1] = 1
    with pytest.raises(CorruptedPoolError, match=r"^F1:"):
        check_manager(manager, [request])


# ---- steps ---------------------------------------------------------------------------------------


def make_step():
    """a and its fork b, before the step in which both write token 10."""
    manager = make_manager(GROUPS[:1])
    a = make_request("a", range(11))
    start(manager, a, 10)
    b = make_request("b", [*range(10), 50])
    b.num_computed_tokens = 10
    manager.fork(a, b)
    manager.allocate_slots(a, 1)
    manager.allocate_slots(b, 1)
    return manager, a, b


def test_a_step_with_one_writer_for_each_block_passes():
    manager, a, b = make_step()
    check_writes(manager, [(a, 1), (b, 1)])


def test_two_writers_are_named():
    manager, a, b = make_step()
    table_of(manager, "b").blocks[2] = table_of(manager, "a").blocks[2]
    with pytest.raises(CorruptedPoolError, match=r"^T8: request 'a', group 0, entry 2 .* request 'b'"):
        check_writes(manager, [(a, 1), (b, 1)])
    with pytest.raises(CorruptedPoolError, match=r"^T8:"):
        check_writes(manager, [(a, 1), (b, 0)])


def test_a_missing_block_is_named():
    manager, a, b = make_step()
    with pytest.raises(CorruptedPoolError, match=r"^T8: .* entry 3 is about to be written, but has no block"):
        check_writes(manager, [(a, 3), (b, 0)])


def test_a_block_with_the_hash_of_other_content_is_named():
    manager, a, b = make_step()
    block = table_of(manager, "a").blocks[2]
    manager.block_pool._insert_block_hash(BlockHash(b"x" * 36), block, 12)
    with pytest.raises(CorruptedPoolError, match=r"^T8: .* is cached as other content"):
        check_writes(manager, [(a, 1), (b, 1)])


def test_a_hit_on_a_block_of_this_step_is_no_second_writer():
    """Attention reads blocks that the same step has written; a state is read before."""
    for spec, is_fine in ((FullAttentionSpec(block_size=4), True), (MambaSpec(block_size=4), False)):
        manager = make_manager((spec,))
        a, b = make_request("a", range(8)), make_request("b", range(9))
        manager.allocate_slots(a, 8)
        manager.take_block_copies()  # without this, the manager does not give b the state in the same step
        prefix = manager.get_computed_blocks(b)
        manager.allocate_slots(b, 1, prefix)
        b.num_computed_tokens = 8
        if is_fine:
            check_writes(manager, [(a, 8), (b, 1)])
        else:
            with pytest.raises(CorruptedPoolError, match=r"^T8:"):
                check_writes(manager, [(a, 8), (b, 1)])
