"""Placement of a request's blocks: next id, free run, cleared run, any blocks; and `on_moved`."""

import numpy as np
import pytest
from adapter.made_pool import (
    BreakingCopy,
    check,
    draw,
    fill,
    make,
    make_scattered,
    make_storage,
    read,
    read_block,
    state,
    take,
    write,
)

from kv_pool import (
    BlockAllocationRequest,
    CopyFailedError,
    GPUKVPool,
    PoolExhaustedError,
)


def test_a_free_run_is_taken():
    pool = make()
    take(pool, 1, 1)
    take(pool, 2, 2)
    take(pool, 3, 1)
    pool.free_sequence(2)
    assert take(pool, 4, 3) == [5, 6, 7]
    assert take(pool, 5, 2) == [2, 3]


def test_a_preferred_run_falls_back_to_scattered_blocks():
    pool = make_scattered()
    result = pool.try_allocate(BlockAllocationRequest(3, 6))
    assert result.success
    assert not result.is_contiguous
    check(pool)


def test_a_required_run_that_is_missing_is_refused():
    pool = make_scattered()
    before = state(pool)
    with pytest.raises(PoolExhaustedError, match=r"asked for a run of 3 blocks .*no compaction"):
        take(pool, 6, 3, contiguous="require")
    assert state(pool) == before
    assert len(take(pool, 6, 3, contiguous="no")) == 3


@pytest.mark.parametrize("contiguous", ["prefer", "require"])
def test_a_run_is_cleared_if_on_moved_is_set(contiguous):
    told = []
    pool = make_scattered(on_moved=told.append, storage=make_storage())
    fill(pool)
    before = {sequence_id: pool.blocks_of(sequence_id) for sequence_id in range(1, 6)}
    ids = take(pool, 6, 3, contiguous=contiguous)
    assert ids == list(range(ids[0], ids[0] + 3))
    [relocation] = told
    remap = relocation.make_remap()
    for sequence_id, old in before.items():
        assert [remap[block_id] for block_id in old] == pool.blocks_of(sequence_id)
        assert read(pool, sequence_id) == [16 * sequence_id]
    check(pool)


def test_no_more_blocks_move_than_max_moves():
    pool = make_scattered(on_moved=lambda relocation: None, storage=make_storage())
    before = draw(pool)
    assert not pool.try_allocate(BlockAllocationRequest(5, 6, contiguous="require", max_moves=1)).success
    assert draw(pool) == before
    assert not pool.try_allocate(BlockAllocationRequest(5, 7, max_moves=1)).is_contiguous
    check(pool)


def test_an_unheld_block_taken_from_block_pool_can_move():
    pool = make_scattered(storage=make_storage())
    [taken] = pool.block_pool.get_new_blocks(1)
    write(pool, taken.block_id, 7)
    pool.free_sequence(1)
    place = taken.block_id
    assert pool.defragment() > 0
    assert taken.block_id != place
    assert read_block(pool, taken.block_id) == 7
    check(pool, [taken])


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_failed_copy_moves_nothing(num_good):
    told = []
    copy = BreakingCopy()
    pool = make_scattered(on_moved=told.append, storage=make_storage(copy=copy))
    fill(pool)
    copy.num_good = num_good
    before = state(pool)
    for attempt in (
        pool.defragment,
        lambda: take(pool, 6, 3, contiguous="require"),
        lambda: take(pool, 6, 3),
    ):
        with pytest.raises(CopyFailedError, match="the device fell off the bus"):
            attempt()
        assert state(pool) == before
        assert told == []
    result = pool.try_allocate(BlockAllocationRequest(3, 6))
    assert isinstance(result.error, CopyFailedError)
    assert [read(pool, sequence_id) for sequence_id in range(1, 6)] == [[16], [32], [48], [64], [80]]
    check(pool)


def test_a_request_may_have_numpy_numbers():
    pool = GPUKVPool(20, 16)
    numbers = {"num_blocks": 2, "sequence_id": 7, "priority": 1, "max_moves": 1}
    ids = pool.allocate(
        BlockAllocationRequest(
            **{name: np.int64(value) for name, value in numbers.items()},
            pinned=np.True_,
            device_id=np.int64(0),
        )
    )
    assert pool.blocks_of(7) == ids
    assert pool.num_pinned_blocks == 2
    assert pool.describe_sequences().sequences[0].priority == 1
