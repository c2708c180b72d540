"""Growing and shrinking a pool that is in use. Drawn as in made_pool.py."""

import pytest
from adapter.made_pool import check, draw, fill, make, make_scattered, make_storage, read, state, take
from drawing import hash_of

from kv_pool import (
    CopyFailedError,
    InvalidArgumentError,
    InvalidBlockError,
    OutOfBlocksError,
    PoolExhaustedError,
)


def test_a_grown_pool_allocates_the_new_ids():
    pool = make(4, storage=make_storage(11))
    take(pool, 1, 4)
    with pytest.raises(PoolExhaustedError):
        take(pool, 2, 1)
    pool.grow(6)
    assert (pool.total_blocks, pool.get_free_blocks()) == (10, 6)
    assert take(pool, 2, 6) == [5, 6, 7, 8, 9, 10]
    pool.pin(list(range(1, 11)))
    check(pool)


def test_a_pool_cannot_outgrow_its_storage():
    pool = make(10, storage=make_storage(11))
    with pytest.raises(InvalidArgumentError, match="blocks 0 to 10; with 1 more the pool would have 1 to 11"):
        pool.grow(1)
    with pytest.raises(InvalidArgumentError):
        pool.grow(-1)
    assert pool.total_blocks == 10


def test_shrink_moves_blocks_in_use_with_their_bytes():
    told = []
    pool = make_scattered(storage=make_storage(), on_moved=told.append)
    fill(pool)
    before = {name: read(pool, name) for name in pool.list_sequences()}
    pool.shrink(5)
    assert draw(pool) == "14253"
    assert {name: read(pool, name) for name in pool.list_sequences()} == before
    assert [sorted(relocation.moves) for relocation in told] == [[(7, 2), (9, 4)]]
    assert pool.get_free_blocks() == 0
    check(pool)


@pytest.mark.parametrize(
    ("num_blocks", "error", "said"),
    [
        (6, OutOfBlocksError, "in use among the highest 6"),
        (10, InvalidArgumentError, "10 of 10 blocks cannot be removed; at least 2 must be left"),
        (9, InvalidArgumentError, "at least 2 must be left"),
        (-1, InvalidArgumentError, "-1 of 10"),
    ],
)
def test_a_refused_shrink_changes_nothing(num_blocks, error, said):
    pool = make_scattered()
    pool.reserved_blocks = 2
    before = state(pool)
    with pytest.raises(error, match=said):
        pool.shrink(num_blocks)
    assert state(pool) == before
    assert pool.total_blocks == 10


def test_pinned_blocks_cannot_be_removed():
    pool = make_scattered()
    pool.pin([9])
    with pytest.raises(InvalidBlockError, match="block 9 is pinned"):
        pool.shrink(3)
    pool.shrink(1)
    assert pool.total_blocks == 9
    check(pool)


def test_a_failed_copy_keeps_the_size():
    def copy(*arguments):
        raise RuntimeError("the device is gone")

    pool = make_scattered(storage=make_storage(copy=copy))
    before = state(pool)
    with pytest.raises(CopyFailedError):
        pool.shrink(5)
    assert state(pool) == before
    assert pool.total_blocks == 10


def test_removed_high_priority_blocks_are_forgotten():
    pool = make()
    for sequence_id in (1, 2):
        take(pool, sequence_id, 5, priority=1)
        pool.cache_prefix(sequence_id, [hash_of(10 * sequence_id + number) for number in range(5)])
        pool.free_sequence(sequence_id)
    pool.shrink(6)
    assert len(take(pool, 3, 4)) == 4
    pool.grow(6)
    assert len(take(pool, 4, 6)) == 6
    check(pool)
