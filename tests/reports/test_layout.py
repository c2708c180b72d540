"""The state of every block and the runs of sequences, as one picture of bytes."""

import random
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from adapter.made_pool import check, make, make_scattered, take

from kv_pool import KVPoolError, LRUEviction
from kv_pool.reports import BlockState, PoolLayout

LETTERS = "0.*#P"
"""In the order of `BlockState`: null, empty, cached, in use, pinned."""


def draw(layout):
    """Draw the states from block 0 on; `-` precedes a block that is joined to the block before it."""
    return "".join(
        ("-" if join else " ") + LETTERS[state]
        for state, join in zip(layout.states, layout.joins, strict=True)
    )


def make_used():
    """Return a pool: sequence 1 has 1 2 3 6, sequence 2 has 4 5 (4 pinned); 7 8 are cached, 9 10 empty."""
    pool = make(run_length=2)
    take(pool, 1, 3)
    take(pool, 2, 2)
    take(pool, 1, 1)
    pool.pin([4])
    take(pool, 3, 2)
    pool.cache_prefix(3, [b"first", b"second"])
    pool.free_sequence(3)
    return pool


def test_states_and_runs_of_sequences_are_reported():
    layout = make_used().get_layout()
    assert draw(layout) == " 0 #-#-# P-# # * * . ."
    assert list(layout.holders) == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert layout.num_free == 4


def test_the_holder_count_is_capped_at_255():
    pool = make(2)
    take(pool, 0, 1)
    for sequence_id in range(1, 300):
        pool.fork(0, sequence_id)
    assert list(pool.get_layout().holders) == [0, 255, 0]


def test_a_block_taken_from_the_block_pool_has_no_holder():
    pool = make(2)
    pool.block_pool.get_new_blocks(1)
    layout = pool.get_layout()
    assert draw(layout) == " 0 # ."
    assert layout.holders == bytes(3)


def test_watched_blocks_are_cached_if_free_else_pinned():
    pool = make(3)
    watched = pool.block_pool.get_new_blocks(2)
    pool.block_pool.unpin_blocks(watched, lambda block: None)
    assert draw(pool.get_layout()) == " 0 * * ."
    pool.block_pool.touch(watched)
    assert draw(pool.get_layout()) == " 0 P P ."
    pool.block_pool.free_blocks(watched)
    assert draw(pool.get_layout()) == " 0 * * ."


def test_a_layout_names_its_pool_and_epoch():
    pool = make_scattered(device_id=3, run_length=2)
    before = pool.get_layout()
    pool.defragment()
    after = pool.get_layout()
    assert (after.block_size, after.run_length, after.device_id) == (4, 2, 3)
    assert after.epoch > before.epoch == 0
    assert draw(before) == " 0 # . # . # . # . # ."
    assert draw(after) == " 0 # # # # # . . . . ."
    assert (before.fragmentation_rate, after.fragmentation_rate) == (1.0, pool.get_fragmentation_rate())
    assert after.list_free_runs() == [5]


def test_a_layout_does_not_change_with_the_pool():
    pool = make(3)
    layout = pool.get_layout()
    take(pool, 1, 2)
    assert draw(layout) == " 0 . . ."
    with pytest.raises(AttributeError):
        layout.states = b""


def test_a_layout_survives_a_json_round_trip():
    layout = make_used().get_layout()
    assert msgspec.json.decode(msgspec.json.encode(layout), type=PoolLayout) == layout


# ---- random --------------------------------------------------------------------------------------


def scan(pool):
    """Return states, joins and holders, computed block by block with public methods."""
    states, joins, holders = [BlockState.NULL], [0], [0]
    tables = [pool.blocks_of(sequence_id) for sequence_id in pool.list_sequences()]
    pairs = {(first, second) for table in tables for first, second in pairwise(table)}
    watched = pool.block_pool.reuse_watchers
    for block_id in range(1, pool.total_blocks + 1):
        info = pool.get_block_info(block_id)
        is_found = pool.block_pool.blocks[block_id].block_hash is not None or block_id in watched
        if info.is_pinned:
            states.append(BlockState.IMMOVABLE)
        elif info.ref_count:
            states.append(BlockState.IN_USE)
        else:
            states.append(BlockState.CACHED if is_found else BlockState.EMPTY)
        joins.append(int((block_id - 1, block_id) in pairs))
        holders.append(sum(block_id in table for table in tables))
    return bytes(states), bytes(joins), bytes(holders)


def take_a_random_step(draw, pool):
    sequence_id = draw.randrange(8)
    held = pool.blocks_of(sequence_id)
    chosen = draw.sample(held, draw.randint(0, len(held)))
    name = draw.choice(
        ["allocate"] * 4 + ["cache_prefix"] * 2 + ["claim_prefix", "free", "free_sequence", "fork"]
        + ["pin", "unpin", "defragment", "evict", "reset", "watch"]
    )  # fmt: skip
    if name == "allocate":
        take(pool, sequence_id, draw.randint(1, 7), contiguous=draw.choice(["require", "prefer", "no"]))
    elif name == "cache_prefix":
        hashes = [bytes([sequence_id % 3, position]) for position in range(draw.randint(0, len(held)))]
        pool.cache_prefix(sequence_id, hashes)
    elif name == "claim_prefix":
        pool.claim_prefix(sequence_id, [bytes([draw.randrange(3), position]) for position in range(4)])
    elif name == "free":
        pool.free(chosen, sequence_id)
    elif name == "free_sequence":
        pool.free_sequence(sequence_id)
    elif name == "fork":
        pool.fork(sequence_id, draw.randrange(8), draw.randint(0, len(held)))
    elif name == "pin":
        pool.pin(chosen)
    elif name == "unpin":
        pool.unpin([block_id for block_id in chosen if pool.get_block_info(block_id).is_pinned])
    elif name == "defragment":
        pool.defragment(max_evictions=draw.choice([0, 3]))
    elif name == "evict":
        pool.evict(draw.randint(1, 5))
    elif name == "reset":
        pool.block_pool.reset_prefix_cache()
    elif name == "watch" and pool.get_free_blocks() > 2:
        pool.block_pool.unpin_blocks(pool.block_pool.get_new_blocks(2), lambda block: None)


@pytest.mark.parametrize("seed", range(40))
def test_a_layout_agrees_with_a_slow_scan(seed):
    draw = random.Random(seed)
    pool = make(
        draw.choice([24, 40]),
        eviction_policy=draw.choice([None, LRUEviction()]),
        on_moved=draw.choice([None, lambda relocation: None]),
        run_length=draw.randint(1, 6),
        max_pinned_blocks=8,
    )
    for _ in range(120):
        with suppress(KVPoolError):  # a refused call is also a step
            take_a_random_step(draw, pool)
        check(pool)
        layout = pool.get_layout()
        assert (layout.states, layout.joins, layout.holders) == scan(pool)
        assert layout.num_free == pool.get_free_blocks()
        assert layout.fragmentation_rate == pool.get_fragmentation_rate()
        assert layout.epoch == pool.block_pool.epoch
