"""Blocks of sequences: allocating, sharing, freeing, pinning; and refused calls."""

from types import SimpleNamespace

import pytest
from adapter.made_pool import check, draw, make, make_scattered, make_storage, state, take

from kv_pool import (
    BlockAllocationRequest,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVPoolError,
    LRUEviction,
    PinLimitError,
    PoolExhaustedError,
    UnknownDeviceError,
    UnknownSequenceError,
)
from kv_pool.errors import PoolInterruptedError


def test_block_info_names_the_holders():
    pool = make()
    [block_id] = take(pool, 7, 1, pinned=True)
    info = pool.get_block_info(block_id)
    assert (info.block_id, info.ref_count, info.sequence_id, info.device_id) == (block_id, 1, 7, 0)
    assert info.is_pinned
    assert info.last_access_time > 0
    free = pool.get_block_info(block_id + 1)
    assert (free.ref_count, free.sequence_id, free.is_pinned, free.last_access_time) == (0, -1, False, 0.0)


def test_a_result_has_size_time_and_contiguity():
    pool = make(block_bytes=2048)
    result = pool.try_allocate(BlockAllocationRequest(3, 1))
    assert (result.success, result.block_ids, result.is_contiguous) == (True, [1, 2, 3], True)
    assert (result.allocated_memory, result.error) == (3 * 2048, None)
    assert result.allocation_time > 0
    assert make(storage=make_storage()).block_bytes == make_storage().block_bytes


def test_a_result_has_the_error():
    pool = make()
    result = pool.try_allocate(BlockAllocationRequest(11, 1))
    assert (result.success, result.block_ids, result.allocated_memory) == (False, [], 0)
    assert isinstance(result.error, PoolExhaustedError)
    assert str(result.error).startswith(
        "asked for 11 blocks for sequence 1, 10 are free of 10. Tried: nothing else."
    )
    with pytest.raises(InvalidArgumentError):
        pool.try_allocate(BlockAllocationRequest(-1, 1))


# ---- sharing -------------------------------------------------------------------------------------


def test_a_shared_block_has_the_last_access_of_its_holders():
    """An LRU policy over `BlockInfo` evicted recent blocks: it got only the oldest holder's time."""
    pool = make()
    [shared] = take(pool, 1, 1)
    pool.fork(1, 2)
    [alone] = take(pool, 3, 1)
    pool.note_access(2)
    info = pool.get_block_info(shared)
    assert (info.sequence_id, info.sequence_ids) == (1, (1, 2))
    assert info.last_access_time > pool.get_block_info(alone).last_access_time
    pool.note_access(3)
    assert min([shared, alone], key=lambda at: pool.get_block_info(at).last_access_time) == shared
    pool.free_sequence(1)
    assert pool.get_block_info(shared).sequence_ids == (2,)
    assert pool.get_block_info(9).sequence_ids == ()


def test_free_releases_for_the_longest_or_the_named_holder():
    pool = make()
    [shared] = take(pool, 1, 1)
    pool.fork(1, 2)
    pool.fork(2, 3)
    pool.free([shared], sequence_id=2)
    assert pool.blocks_of(2) == []
    pool.free([shared])
    assert pool.get_block_info(shared).sequence_id == 3
    check(pool)
    with pytest.raises(UnknownSequenceError, match="sequence 1 holds no blocks"):
        pool.free([shared], sequence_id=1)
    pool.free([shared])
    assert pool.get_free_blocks() == 10


@pytest.mark.parametrize(("parent", "child", "count"), [(9, 2, None), (1, 3, None), (1, 2, 4), (1, 2, -1)])
def test_an_invalid_fork_changes_nothing(parent, child, count):
    pool = make()
    take(pool, 1, 3)
    take(pool, 3, 1)
    before = state(pool)
    with pytest.raises(InvalidArgumentError):
        pool.fork(parent, child, count)
    assert state(pool) == before


# ---- batches -------------------------------------------------------------------------------------


def test_a_batch_is_served_in_turn_and_freed_at_once():
    pool = make()
    batches = pool.allocate_many([BlockAllocationRequest(2, 1), BlockAllocationRequest(3, 2)])
    assert [len(batch) for batch in batches] == [2, 3]
    pool.free_many(batches)
    assert pool.get_free_blocks() == 10
    check(pool)


def test_a_batch_is_all_or_nothing():
    pool = make(max_pinned_blocks=4)
    take(pool, 1, 2)
    with pytest.raises(PoolExhaustedError, match="asked for 7 blocks for sequence 3, 4 are free of 10"):
        pool.allocate_many(
            [
                BlockAllocationRequest(2, 1),
                BlockAllocationRequest(2, 2, pinned=True),
                BlockAllocationRequest(7, 3),
            ]
        )
    assert draw(pool) == "11........"
    assert pool.num_pinned_blocks == 0
    check(pool)


# ---- caller errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([0], InvalidBlockError, "block 0 is not one of 1 to 10"),
        ([11], InvalidBlockError, "block 11 is not one of 1 to 10"),
        ([-1], InvalidBlockError, "block -1 is not one of"),
        ([1, 5], InvalidBlockError, "block 5 is held by no sequence"),
        ([1, 2, 1], InvalidBlockError, "block 1 is listed twice"),
        (["1"], InvalidTypeError, "is of type str; expected int"),
    ],
)
@pytest.mark.parametrize("method", ["free", "pin", "migrate"])
def test_wrong_ids_change_nothing(method, ids, error, match):
    pool, other = make(storage=make_storage()), make(device_id=1, storage=make_storage())
    pool.connect(other)
    take(pool, 1, 3)
    before = state(pool)
    call = {"free": pool.free, "pin": pool.pin, "migrate": lambda ids: pool.migrate_blocks(ids, 1)}[method]
    if method == "pin" and "twice" in match:
        return  # one more pin
    with pytest.raises(error, match=match):
        call(ids)
    assert state(pool) == before
    assert other.get_free_blocks() == 10


def test_a_double_free_changes_nothing():
    pool = make()
    ids = take(pool, 1, 2)
    take(pool, 2, 1)
    pool.free(ids)
    before = state(pool)
    with pytest.raises(InvalidBlockError, match="held by no sequence"):
        pool.free(ids)
    with pytest.raises(UnknownSequenceError, match="freed twice"):
        pool.free_sequence(1)
    again = take(pool, 1, 1)
    with pytest.raises(InvalidBlockError, match="not held by sequence 2"):
        pool.free(again, sequence_id=2)
    pool.free_sequence(1)
    assert sorted(state(pool).free) == sorted(before.free)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (BlockAllocationRequest(0, 1), InvalidArgumentError),
        (BlockAllocationRequest(-3, 1), InvalidArgumentError),
        (BlockAllocationRequest(2.0, 1), InvalidTypeError),
        (BlockAllocationRequest(1, 1, priority=3), InvalidArgumentError),
        (BlockAllocationRequest(1, -1), InvalidArgumentError),
        (BlockAllocationRequest(2, 1, contiguous="maybe"), InvalidArgumentError),
        (BlockAllocationRequest(1, 1, contiguous=["no"]), InvalidArgumentError),
        (BlockAllocationRequest(1, 1, device_id=5), UnknownDeviceError),
        (BlockAllocationRequest(11, 1), MemoryError),
        (BlockAllocationRequest(3, 1, pinned=True), PinLimitError),
    ],
)
def test_a_request_that_cannot_be_served_changes_nothing(request_, error):
    pool = make(max_pinned_blocks=2)
    take(pool, 1, 1)
    before = state(pool)
    with pytest.raises(error) as caught:
        pool.allocate(request_)
    assert isinstance(caught.value, KVPoolError)
    assert state(pool) == before


@pytest.mark.parametrize(
    "options", [{"total_blocks": 0}, {"reserved_blocks": 11}, {"storage": make_storage(num_blocks=10)}]
)
def test_invalid_pool_arguments_are_refused(options):
    with pytest.raises(InvalidArgumentError):
        make(**options)


# ---- pins ----------------------------------------------------------------------------------------


def test_a_second_pin_does_not_count_towards_the_limit():
    pool = make(max_pinned_blocks=2)
    ids = take(pool, 1, 3)
    pool.pin(ids[:2])
    pool.pin(ids[:2])
    with pytest.raises(PinLimitError, match="2 blocks are pinned; 1 more would exceed the limit of 2"):
        pool.pin(ids)
    assert pool.num_pinned_blocks == 2
    with pytest.raises(InvalidBlockError, match=f"block {ids[2]} is not pinned"):
        pool.unpin(ids)
    assert pool.num_pinned_blocks == 2
    check(pool)


CHANGING_CALLS = {
    "allocate": lambda pool: take(pool, 3, 1),
    "try_allocate": lambda pool: pool.try_allocate(BlockAllocationRequest(1, 3)),
    "allocate_many": lambda pool: pool.allocate_many([BlockAllocationRequest(1, 3)]),
    "fork": lambda pool: pool.fork(1, 3),
    "cache_prefix": lambda pool: pool.cache_prefix(1, [b"hash"]),
    "claim_prefix": lambda pool: pool.claim_prefix(3, [b"hash"]),
    "free": lambda pool: pool.free([1]),
    "free_many": lambda pool: pool.free_many([[1], [2]]),
    "free_sequence": lambda pool: pool.free_sequence(1),
    "evict": lambda pool: pool.evict(1),
    "pin": lambda pool: pool.pin([1]),
    "unpin": lambda pool: pool.unpin([3]),
    "list_victims": lambda pool: pool.list_victims(1),
    "note_access": lambda pool: pool.note_access(1),
    "defragment": lambda pool: pool.defragment(),
    "grow": lambda pool: pool.grow(1),
    "shrink": lambda pool: pool.shrink(1),
}


class InterruptingClock:
    """A clock that can raise as a signal handler would, before a sequence has the blocks that were taken."""

    is_due = False

    def __call__(self):
        if self.is_due:
            raise KeyboardInterrupt
        return 1.0

    def interrupt(self, pool):
        self.is_due = True
        with pytest.raises(KeyboardInterrupt):
            take(pool, 99, 1)
        self.is_due = False


@pytest.mark.parametrize("name", CHANGING_CALLS)
def test_an_interrupted_pool_refuses_changes_until_repaired(name):
    clock = InterruptingClock()
    pool = make(clock=clock)
    take(pool, 1, 3)
    pool.pin([3], 1)
    clock.interrupt(pool)
    with pytest.raises(PoolInterruptedError, match="Call repair"):
        CHANGING_CALLS[name](pool)
    assert pool.blocks_of(1) == [1, 2, 3]
    pool.repair()
    check(pool)
    assert draw(pool) == "111......."
    assert pool.get_block_info(3).is_pinned
    assert take(pool, 2, 7) == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("callback", ["on_evicted", "rank", "on_moved", "on_reuse"])
def test_an_interrupt_that_a_callback_catches_is_not_forgotten(callback):
    """The call of the pool went on and cleared the mark, so that the block of the inner call was lost."""

    def interrupt(*given):
        clock.interrupt(pool)
        return [1]

    clock = InterruptingClock()
    options, num_blocks = {
        "on_evicted": ({"eviction_policy": LRUEviction(), "on_evicted": interrupt}, 6),
        "rank": ({"eviction_policy": SimpleNamespace(rank=interrupt)}, 6),
        "on_moved": ({"on_moved": interrupt}, 3),
        "on_reuse": ({}, 4),
    }[callback]
    pool = make_scattered(clock=clock, **options)
    if callback == "on_reuse":
        for watcher in (interrupt, str):  # the inner call takes the second block
            pool.block_pool.unpin_blocks(pool.block_pool.get_new_blocks(1), watcher)
    with pytest.raises(PoolInterruptedError):
        take(pool, 9, num_blocks)
    pool.repair()
    check(pool)
