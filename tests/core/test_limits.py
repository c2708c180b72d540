"""Counts that a pool cannot have are refused without a change."""

import pytest
from drawing import make_pool, state

from kv_pool import BlockPool, InvalidArgumentError, InvalidBlockError
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants

PICTURE = "free: 3 1* 4 | in use: 2"


@pytest.mark.parametrize("pool_class", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("name", ["add_blocks", "remove_last_blocks"])
def test_a_pool_cannot_be_resized_by_a_negative_number(name, pool_class):
    pool = make_pool(PICTURE, pool_class)
    with pytest.raises(InvalidArgumentError, match="by -1 blocks"):
        getattr(pool, name)(-1)
    assert state(pool) == PICTURE
    invariants.check(pool)


@pytest.mark.parametrize(("count", "what"), [(3, "block 2 is in use"), (5, "block 0 is null")])
def test_only_free_blocks_are_removed(count, what):
    pool = make_pool(PICTURE)
    with pytest.raises(InvalidBlockError, match=what):
        pool.remove_last_blocks(count)
    assert state(pool) == PICTURE
    invariants.check(pool)


@pytest.mark.parametrize("pairs", [[(1, 3), (3, 4)], [(0, 1)], [(1, 5)]])
def test_ids_are_swapped_once_and_only_those_of_the_pool(pairs):
    pool = make_pool(PICTURE)
    with pytest.raises(InvalidBlockError):
        pool.swap_block_ids(pairs)
    assert state(pool) == PICTURE
    invariants.check(pool)


@pytest.mark.parametrize("pool_class", [BlockPool, RunBlockPool])
def test_a_reference_count_cannot_overflow(pool_class):
    pool = make_pool(PICTURE, pool_class)
    most = pool.blocks[2]
    most.ref_cnt = 2**31 - 2
    pool.touch([most])
    with pytest.raises(InvalidBlockError, match="block 2 has 2147483647 references"):
        pool.touch([pool.blocks[1], most])
    assert most.ref_cnt == 2**31 - 1
    assert state(pool).startswith("free: 3 1* 4 |")
