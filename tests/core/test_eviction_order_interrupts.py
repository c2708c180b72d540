"""Calls on a pool with bands that a signal handler interrupts: each takes effect completely or not at all."""

import random

import pytest
from core.banded_pool import check, list_bands, make_banded
from core.test_interrupts import WatchedBlockPool, WatchedRunBlockPool
from drawing import blocks, ids
from interrupting import interrupt_everywhere, interrupt_twice, interrupt_twice_at_random

from kv_pool import BlockPool
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.eviction_order import EXPIRED_BAND

KINDS = {"plain": BlockPool, "runs": RunBlockPool}
WATCHED = {"plain": WatchedBlockPool, "runs": WatchedRunBlockPool}
BANDS = {5: 7, 4: -5, 2: EXPIRED_BAND, 6: 7, 7: -5}
"""By block, besides the default band of 1 and 3, and the empty one of 9."""


def make(pool_type):
    pool = make_banded(pool_type=pool_type)
    pool.policy.bands = {pool.blocks[number].block_hash: band for number, band in BANDS.items()}
    for number in (5, 4, 2):
        pool.move_to_band(blocks(pool, number), BANDS[number])
    return pool


def reset(pool):
    pool.free_blocks(blocks(pool, 6, 7, 8))
    pool.reset_prefix_cache()


def ignore(block):
    pass


CALLS = {
    "get_new_blocks, 2": lambda pool: pool.get_new_blocks(2),
    "get_new_blocks, 4": lambda pool: pool.get_new_blocks(4),
    "get_new_blocks, all": lambda pool: pool.get_new_blocks(6),
    "take_blocks": lambda pool: pool.take_blocks(blocks(pool, 5, 1, 2)),
    "touch": lambda pool: pool.touch(blocks(pool, 5, 1, 2, 5)),
    "free_blocks": lambda pool: pool.free_blocks(blocks(pool, 7, 8, 6)),
    "free_out_of": lambda pool: pool.free_out_of(blocks(pool, 7, 8, 6)),
    "unpin_blocks": lambda pool: pool.unpin_blocks(blocks(pool, 7, 8, 6), ignore),
    "merge_bands": lambda pool: pool.merge_bands(),
    "add_blocks": lambda pool: pool.add_blocks(2),
    "remove_last_blocks": lambda pool: pool.free_blocks(blocks(pool, 8)) or pool.remove_last_blocks(2),
    "reset_prefix_cache": reset,
}
MOVES = {
    "to a new band": lambda pool: pool.move_to_band(blocks(pool, 1, 5, 3), 50),
    "to a band that is there": lambda pool: pool.move_to_band(blocks(pool, 1, 2), 7),
    "from bands that are empty then": lambda pool: pool.move_to_band(blocks(pool, 5, 4, 2, 9), 0),
}


def list_order(pool):
    return ids(pool.free_block_queue.get_all_free_blocks())


def check_placed(pool):
    """Check the invariants, and that each free block is in the band that the policy chooses."""
    check(pool)
    for band, found in list_bands(pool).items():
        for block in blocks(pool, *found):
            assert pool.policy.find_band(block) in (0, band)


def check_moved(pool):
    """Check the invariants, and that all blocks are still free and can be taken in band order."""
    check(pool)
    order = list_order(pool)
    assert sorted(order) == [1, 2, 3, 4, 5, 9]
    if isinstance(pool, RunBlockPool):
        pool.early_share = 0.0  # in order
    assert ids(pool.get_new_blocks(6)) == order
    check(pool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_bands_are_sound_after_an_interrupt_at_any_moment(name, kind):

    def draw(pool):
        """Return the bands without the order of their blocks, which a recovering policy may change."""
        if name.startswith(("free", "unpin", "reset")):
            return {band: sorted(found) for band, found in list_bands(pool).items()}
        return list_bands(pool)

    states = []
    for calls in ([], [lambda pool: pool.free_blocks(blocks(pool, 8))], [CALLS[name]]):
        pool = make(KINDS[kind])
        for call in calls:
            call(pool)
        states.append(draw(pool))
    if name == "reset_prefix_cache":
        pool = make(KINDS[kind])
        pool.free_blocks(blocks(pool, 6, 7, 8))
        states.append(draw(pool))

    def check_one(pool):
        if name == "merge_bands":
            check_moved(pool)
        else:
            check_placed(pool)
            assert draw(pool) in states

    tried, broken = interrupt_everywhere(lambda: make(KINDS[kind]), CALLS[name], check_one)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MOVES)
def test_an_interrupted_move_leaves_no_block_between_bands(name, kind):
    tried, broken = interrupt_everywhere(lambda: make(KINDS[kind]), MOVES[name], check_moved)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_open_bands_is_all_or_nothing(kind):
    def make_plain():
        pool = make_banded(pool_type=KINDS[kind])
        closed = type(pool)(7, True, 4)
        closed.policy = pool.policy
        for block in closed.get_new_blocks(6):
            if block.block_id > 2:
                closed._insert_block_hash(b"hash %d" % block.block_id, block, 4)
            closed.free_blocks([block])
        return closed

    def check_open(pool):
        check(pool)
        assert list_order(pool) == [2, 1, 3, 4, 5, 6]
        if pool._band_policy is None:
            pool.open_bands(pool.policy)
        pool.move_to_band(blocks(pool, 3), 5)
        assert list_bands(pool) == {-102: [2, 1], 0: [4, 5, 6], 5: [3]}
        check(pool)

    def open_bands(pool):
        pool.open_bands(pool.policy)

    tried, broken = interrupt_everywhere(make_plain, open_bands, check_open)
    assert not broken, f"{kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", WATCHED)
@pytest.mark.parametrize("name", CALLS)
def test_bands_are_sound_after_an_interrupted_undo(name, kind):
    def watch(pool, second):
        pool.on_recovery = second

    def complete(pool):
        pool.get_new_blocks(0)
        check(pool)

    tried, broken = interrupt_twice(lambda: make(WATCHED[kind]), CALLS[name], complete, watch, step=5)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MOVES)
def test_bands_are_sound_after_an_interrupted_recovery(name, kind):
    def complete(pool):
        pool.get_new_blocks(0)
        check_moved(pool)

    rng = random.Random(f"{name}, {kind}")
    tried, broken = interrupt_twice_at_random(lambda: make(KINDS[kind]), MOVES[name], complete, rng, 60)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"
