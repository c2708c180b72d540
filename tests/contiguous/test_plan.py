"""Plans contain no unnecessary and no invalid moves."""

import itertools
import random

import pytest
from contiguous.slot_engine import SlotEngine, make_run_pool
from drawing import blocks, cache, state

from kv_pool import InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.contiguous.compaction import apply_moves
from kv_pool.contiguous.plan import plan_clear_run, plan_drain, plan_gather, plan_pack
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.eviction_order import BandPolicy
from kv_pool.core.id_swap import find_targets


def make_random_pool(rng, num_blocks, cached_share=0.3):
    """Make a pool with blocks in use, cached and empty, in random order."""
    pool = RunBlockPool(num_blocks, True, 4)
    held = pool.get_new_blocks(num_blocks - 1)
    for block in held:
        if rng.random() < cached_share:
            cache(pool, block)
    rng.shuffle(held)
    for block in held[: rng.randrange(num_blocks)]:
        pool.free_blocks([block])
    return pool


def in_use(pool):
    return [block.block_id for block in pool.blocks[1:] if block.ref_cnt]


def hold_some(rng, pool, share):
    """Hold blocks of a random pool, some with a movable hold; return the ids of the others."""
    some = [block for block in pool.blocks[1:] if block.ref_cnt and rng.random() < share]
    pool.hold(some, "held by a test")
    pool.hold(
        [block for block in pool.blocks[1:] if block.ref_cnt and rng.random() < share],
        "movable",
        movable=True,
    )
    return {block.block_id for block in some}


# ---- pack ----------------------------------------------------------------------------------------


def test_pack_moves_the_highest_blocks_to_the_lowest_slots():
    pool = make_run_pool("free: 1 3 5 | in use: 2 4 6 7")
    assert plan_pack(pool) == [(6, 1), (7, 3)]


def test_in_a_full_cache_pack_exchanges_blocks():
    pool = make_run_pool("free: 2* 1* 5* | in use: 3 4 6")
    assert plan_pack(pool) == [(4, 1), (1, 4), (6, 2), (2, 6)]
    assert plan_pack(pool, max_moves=3) == [(6, 1), (1, 6)]
    assert plan_pack(pool, max_moves=1) == []
    assert plan_pack(pool, exchanges=False) == []


def test_in_a_full_cache_max_evictions_are_overwritten():
    pool = make_run_pool("free: 2* 1* | in use: 3")
    assert plan_pack(pool, max_evictions=2) == [(3, 1)]
    assert plan_pack(pool, max_evictions=1) == [(1, 2)]


def test_held_and_watched_blocks_stay_intact():
    pool = make_run_pool("free: 2 | in use: 1 3 4")
    pool.hold(blocks(pool, 4), "held by a test")
    pool.unpin_blocks(blocks(pool, 1), print)
    assert plan_pack(pool) == [(3, 2)]


def test_pack_does_not_overwrite_higher_bands():
    pool = make_run_pool("free: 1* 2* | in use: 3")
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 1), 1)
    assert state(pool) == "free: 2* 1* | in use: 3"
    assert plan_pack(pool, max_evictions=2) == [(1, 2)]
    pool.move_to_band(blocks(pool, 2), 100)
    assert plan_pack(pool, max_evictions=2, exchanges=False) == []
    assert plan_pack(pool, max_evictions=2) == [(3, 1), (1, 3)]


@pytest.mark.parametrize("seed", range(12))
def test_pack_without_cache_takes_the_fewest_moves(seed):
    rng = random.Random(seed)
    pool = make_random_pool(rng, rng.randrange(4, 10), cached_share=0)
    held = hold_some(rng, pool, 0.2)
    moves = plan_pack(pool)
    find_targets(pool, [move.target for move in moves])
    used = set(in_use(pool)) - held
    packed = (used - {move.source for move in moves}) | {move.target for move in moves}
    places = [block_id for block_id in range(1, pool.num_gpu_blocks) if block_id not in held]
    assert packed == set(places[: len(used)])
    fewest = min(
        (
            len(set(choice) - used)
            for choice in itertools.combinations(places, len(used))
            if max(choice, default=0) == max(packed, default=0)
        ),
        default=0,
    )
    assert len(moves) == fewest


# ---- gather --------------------------------------------------------------------------------------


def count_free_windows(pool, length):
    ages = bytes(pool.run_index.ages)
    return sum(all(ages[first : first + length]) for first in range(0, len(ages), length))


def test_gather_clears_the_emptiest_into_the_fullest_window():
    pool = make_run_pool("free: 5 6 7 9 12 15 | in use: 1 2 3 4 8 10 11 13 14")
    assert plan_gather(pool, 4) == [(4, 9)]


def test_gather_overwrites_the_oldest_content_up_to_a_limit():
    pool = make_run_pool("free: 9* 10* 2* 6* 7* 11* | in use: 1 3 4 5 8 12 13 14 15")
    assert plan_gather(pool, 4, exchanges=False) == []
    assert plan_gather(pool, 4, max_evictions=2) == [(8, 2)]
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 2), 1)
    assert plan_gather(pool, 4, max_evictions=2) == [(8, 6)]


def test_in_a_full_cache_gather_exchanges_blocks():
    pool = make_run_pool("free: 9* 10* 2* 6* 7* 11* | in use: 1 3 4 5 8 12 13 14 15")
    assert plan_gather(pool, 4) == [(8, 6), (6, 8)]
    assert plan_gather(pool, 4, max_moves=1) == []


def test_a_window_of_0_blocks_is_refused():
    with pytest.raises(InvalidArgumentError, match="run_length is 0"):
        plan_gather(make_run_pool("free: 1"), 0)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("max_moves", [1, 5, None])
def test_gather_moves_fewer_blocks_than_pack(seed, max_moves):
    rng = random.Random(seed)
    length = rng.choice([2, 4, 5])
    pool = make_random_pool(rng, length * rng.randrange(6, 30), cached_share=0)
    num_packed = len(plan_pack(pool))
    num_free = pool.get_num_free_blocks()
    num_moved = 0
    while moves := plan_gather(pool, length, max_moves=max_moves):
        assert max_moves is None or len(moves) <= max_moves
        find_targets(pool, [move.target for move in moves])
        pool.swap_block_ids(moves)
        num_moved += len(moves)
    # Besides one window, that of the null block may have empty slots left.
    assert num_free - length * count_free_windows(pool, length) <= 2 * (length - 1)
    assert num_moved <= num_packed


# ---- clear a run ---------------------------------------------------------------------------------


def test_the_window_with_fewest_blocks_in_use_is_cleared():
    pool = make_run_pool("free: 1 4 5 7 | in use: 2 3 6 8")
    assert plan_clear_run(pool, 3) == (3, [(3, 1)])


def test_cached_blocks_move_out_while_slots_are_empty():
    pool = make_run_pool("free: 2* 4 5 | in use: 1 3 6 7")
    assert plan_clear_run(pool, 2) == (4, [])
    pool = make_run_pool("free: 5* 1 2 4 | in use: 3 6")
    assert plan_clear_run(pool, 3) == (1, [(3, 4)])


def test_a_window_with_a_held_block_is_never_cleared():
    pool = make_run_pool("free: 1 3 4 | in use: 2 5 6")
    hold = pool.hold(blocks(pool, 2), "held by a test")
    assert plan_clear_run(pool, 3) == (3, [(5, 1)])
    hold.add(blocks(pool, 5))
    assert plan_clear_run(pool, 3) is None


def test_higher_bands_make_a_window_cost_more():
    pool = make_run_pool("free: 1* 3* 5* 7* | in use: 2 4 6")
    assert plan_clear_run(pool, 2) == (1, [(2, 3)])
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 1, 3), 7)
    assert plan_clear_run(pool, 2) == (4, [(4, 7)])
    assert plan_clear_run(pool, 2, avoids_retained=True) == (4, [(4, 7)])
    assert plan_clear_run(pool, 3).first_block_id == 5
    assert plan_clear_run(pool, 3, avoids_retained=True) is None


def test_a_run_in_a_full_cache_evicts_only_the_next_blocks():
    pool = make_run_pool("free: 7* 4* 1* 2* 3* | in use: 5 6")
    assert plan_clear_run(pool, 2) == (3, [(3, 7)])
    pool = make_run_pool("free: 3* 6* 5* 1* | in use: 2 4 7")
    assert plan_clear_run(pool, 2) == (5, [(5, 3)])
    assert plan_clear_run(pool, 2, max_moves=0) == (5, [])
    assert plan_clear_run(pool, 3) == (3, [(4, 6)])
    pool = make_run_pool("free: 6* 1* 3* | in use: 2 4 5")
    assert plan_clear_run(pool, 3) == (1, [(2, 6)])
    hold = pool.hold(blocks(pool, 6), "held by a test")
    assert plan_clear_run(pool, 2) == (1, [(2, 3)])
    hold.release()
    assert plan_clear_run(make_run_pool("free: 1* 3* | in use: 2"), 2, max_moves=0) is None


def test_no_window_can_be_cleared_without_slots_outside():
    assert plan_clear_run(make_run_pool("free: 1 | in use: 2 3"), 2) is None
    assert plan_clear_run(make_run_pool("free: 1"), 5) is None
    with pytest.raises(InvalidArgumentError):
        plan_clear_run(make_run_pool("free: 1"), 0)


@pytest.mark.parametrize("seed", range(20))
def test_after_its_moves_a_cleared_window_is_free(seed):
    rng = random.Random(seed)
    pool = make_random_pool(rng, rng.randrange(4, 40))
    held = hold_some(rng, pool, 0.1)
    length = rng.randrange(1, 6)
    clearance = plan_clear_run(pool, length)
    if clearance is None:
        return
    first, moves = clearance
    apply_moves(pool, moves, SlotEngine(pool).copy)
    window = range(first, first + length)
    assert all(pool.blocks[block_id].ref_cnt == 0 for block_id in window)
    assert held.isdisjoint(window)


# ---- drain ---------------------------------------------------------------------------------------


def test_blocks_in_use_move_below_the_bar():
    pool = make_run_pool("free: 1 3 6 | in use: 2 4 5")
    assert plan_drain(pool, 3) == [(4, 1), (5, 3)]


def test_a_drain_that_does_not_fit_is_refused():
    pool = make_run_pool("free: 1 4 | in use: 2 3 5 6")
    with pytest.raises(OutOfBlocksError, match="2 blocks are in use among the highest 3, 1 are free below"):
        plan_drain(pool, 3)
    hold = pool.hold(blocks(pool, 6), "held by a test")
    with pytest.raises(InvalidBlockError, match="block 6 is held by a test: it cannot be drained"):
        plan_drain(pool, 3)
    hold.release()
    with pytest.raises(InvalidArgumentError):
        plan_drain(pool, 7)
