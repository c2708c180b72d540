"""A pool that allocates consecutive ids."""

import random
import re

import pytest
from contiguous.slot_engine import make_run_pool
from drawing import blocks, cache, ids, state

from kv_pool import InvalidArgumentError, InvalidTypeError, OutOfBlocksError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.eviction_order import BandPolicy

# ---- runs on request -----------------------------------------------------------------------------


def test_aligned_slots_come_first_among_equally_old_ones():
    pool = RunBlockPool(65, True, 4)
    for num_blocks, slot in ((5, 8), (16, 16), (3, 4), (7, 8)):
        assert ids(pool.get_new_run(num_blocks))[0] % slot == 0


def list_places(ages, length, hand):
    """Yield possible places of a run in search order: each free run's aligned slots, then its ends."""
    slot = 1 << (length - 1).bit_length()
    places = []
    for start, end in ((hand, len(ages)), (1, hand + length - 1)):
        for run in re.finditer(rb"[^\0]+", ages[start:end]):
            first, last = start + run.start(), start + run.end() - length
            if first <= last:
                places += [place for place in range(first, last + 1) if place % slot == 0] + [first, last]
    return places


@pytest.mark.parametrize("seed", range(40))
def test_the_run_is_the_oldest_of_the_first_16_places(seed):
    rng = random.Random(seed)
    pool = RunBlockPool(rng.randrange(20, 80), True, 4)
    held = pool.get_new_blocks(pool.get_num_free_blocks())
    for number in range(len(held)):
        if rng.random() < 0.8:
            cache(pool, held[number], number)
    rng.shuffle(held)
    for block in held[: len(held) * 3 // 4]:
        pool.free_blocks([block])
    ages = bytes(pool.run_index.ages)
    length = rng.randrange(1, 6)
    places = list_places(ages, length, pool.run_index.oldest.hand)
    youngest = [max(ages[place : place + length]) for place in places]
    taken = pool.get_new_run(length)
    if taken is None:
        assert not places
    else:
        first = taken[0].block_id
        assert ids(taken) == list(range(first, first + length))
        assert max(ages[first : first + length]) == min(youngest[:16])
    invariants.check(pool)


def test_an_empty_run_that_is_not_aligned_is_taken_before_retained_blocks():
    pool = make_run_pool("free: 2* 3* 5 6 | in use: 1 4 7", placement="buddy")
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 2, 3), 1)
    assert ids(pool.get_new_run(2)) == [5, 6]
    assert ids(pool.get_new_run(2)) == [2, 3]


def test_a_run_longer_than_the_free_blocks_is_refused():
    pool = make_run_pool("free: 1 2 | in use: 3")
    with pytest.raises(OutOfBlocksError, match="asked for 3 blocks, 2 are free of 3"):
        pool.get_new_run(3)


@pytest.mark.parametrize(("count", "error"), [(-1, InvalidArgumentError), ("2", InvalidTypeError)])
def test_an_invalid_length_is_refused(count, error):
    with pytest.raises(error):
        make_run_pool("free: 1 2").get_new_run(count)


def test_a_large_pool_is_searched_in_parts():
    pool = RunBlockPool(300_001, True, 16, early_share=0.0)
    held = pool.get_new_blocks(300_000)
    pool.free_blocks(held[1:280_000:2] + held[290_000:290_004])
    answers = [pool.get_new_run(4) for _ in range(6)]
    found = [answer for answer in answers if answer]
    assert [ids(answer) for answer in found] == [list(range(290_001, 290_005))]


# ---- runs preferred ------------------------------------------------------------------------------


def test_a_young_block_is_not_evicted_for_a_run():
    pool = RunBlockPool(101, True, 4, early_share=0.1)
    held = pool.get_new_blocks(100)
    for block in held:
        cache(pool, block)
    order = random.Random(0).sample(held, 100)
    for block in order:
        pool.free_blocks([block])
    taken = pool.get_new_blocks(5)
    assert max(order.index(block) for block in taken) < 20


def test_other_blocks_are_taken_in_eviction_order():
    singles = " ".join(f"{block_id}*" for block_id in range(19, 0, -2))
    pool = make_run_pool(f"free: {singles} | in use: " + " ".join(map(str, range(2, 20, 2))))
    assert ids(pool.get_new_blocks(3)) == [15, 17, 19]


def test_a_sequence_grows_into_the_ids_after_it():
    pool = make_run_pool("free: 1 2 3 5 6 | in use: 4")
    assert ids(pool.get_new_blocks_after(pool.blocks[4], 1)) == [5]
    assert ids(pool.get_new_blocks_after(pool.blocks[5], 3)) == [6, 1, 2]
    assert state(pool) == "free: 3 | in use: 1 2 4 5 6"


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(InvalidArgumentError, match="early_share"):
        RunBlockPool(8, True, 4, early_share=share)


# ---- the index -----------------------------------------------------------------------------------


def test_a_raising_watcher_keeps_pool_and_index_consistent():
    pool = make_run_pool("free: 3 4 | in use: 1* 2")

    def refuse(block):
        raise KeyError(block.block_id)

    pool.unpin_blocks(blocks(pool, 1, 2), refuse)
    with pytest.raises(KeyError):
        pool.get_new_run(4)
    assert pool.get_num_free_blocks() == 4
    invariants.check(pool)


@pytest.mark.parametrize("num_blocks", [4, 40])
def test_renumbering_keeps_ages_in_order(num_blocks):
    pool = RunBlockPool(num_blocks, True, 4)
    rng = random.Random(num_blocks)
    for number in range(2_000):
        taken = pool.get_new_blocks(rng.randrange(1, num_blocks))
        for position, block in enumerate(taken):
            cache(pool, block, number * num_blocks + position)
        pool.free_blocks(taken[::-1])
        if number % 50 == 0:
            invariants.check(pool)
    assert pool.run_index.now <= 255


# ---- counting ------------------------------------------------------------------------------------


def test_runs_and_fragmentation_use_maximal_free_runs():
    pool = make_run_pool("free: 1 2* 3 5 7 8 | in use: 4 6")
    assert pool.list_free_runs() == [3, 1, 2]
    assert pool.get_fragmentation_rate(1) == 0
    assert pool.get_fragmentation_rate(2) == pytest.approx(1 - 4 / 6)
    assert pool.get_fragmentation_rate() == 1
    with pytest.raises(InvalidArgumentError):
        pool.get_fragmentation_rate(0)
