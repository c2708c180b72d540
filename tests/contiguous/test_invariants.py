"""Each of F1 to F3 is violated in turn, and its check detects it. C1 to C10: test_compaction.py."""

import pytest
from contiguous.slot_engine import make_run_pool
from damages import damages
from drawing import blocks

from kv_pool import CorruptedPoolError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.run_index import RETAINED
from kv_pool.core.eviction_order import BandPolicy

PICTURE = "free: 3 1* 2* | in use: 4*x2 5"


def lose_a_byte(pool):
    pool.run_index.ages.pop()


def miss_a_free_block(pool):
    pool.run_index.ages[3] = 0


def miss_a_block_in_use(pool):
    pool.run_index.ages[4] = 1


def list_the_null_block(pool):
    pool.run_index.ages[0] = 1


def let_the_front_be_younger(pool):
    pool.run_index.ages[1] = pool.run_index.ages[2] + 1


def see_the_future(pool):
    pool.run_index.ages[2] = pool.run_index.now + 1


def keep_a_block_of_the_default_band(pool):
    pool.run_index.ages[2] = RETAINED


def keep_nothing_of_a_higher_band(pool):
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 1), 1)
    pool.run_index.ages[1] = pool.run_index.now


def merge_bands_behind_the_index(pool):
    pool.open_bands(BandPolicy())
    pool.move_to_band(blocks(pool, 1), 1)
    pool.eviction_order.merge()


def forget_a_chunk(pool):
    pool.run_index.find_run(1)
    pool.run_index.buddies._order_at[1] = 0


def take_behind_the_chunks(pool):
    first = pool.run_index.find_run(1)
    pool.take_blocks([pool.blocks[first]])
    pool.run_index.buddies._changed.clear()


@damages(
    (lose_a_byte, "F1"),
    (miss_a_free_block, "F1"),
    (miss_a_block_in_use, "F1"),
    (list_the_null_block, "F1"),
    (let_the_front_be_younger, "F2"),
    (see_the_future, "F3"),
    (keep_a_block_of_the_default_band, "F3"),
    (keep_nothing_of_a_higher_band, "F3"),
    (merge_bands_behind_the_index, "F3"),
    (forget_a_chunk, "F4"),
    (take_behind_the_chunks, "F4"),
)
def test_each_damage_is_detected(damage, broken):
    pool = make_run_pool(PICTURE)
    pool.run_index.placement = "buddy"
    invariants.check(pool)
    damage(pool)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        invariants.check(pool)
