"""A pool without options evicts under pressure, and every owner of an evicted sequence is notified."""

import random

import pytest
from adapter.made_pool import check, make_scattered, make_storage, take

from kv_pool import (
    BlockAllocationRequest,
    EvictedSequenceError,
    Eviction,
    GPUKVPool,
    InvalidBlockError,
    LRUEviction,
    PinLimitError,
    PinnedBlockError,
    PoolExhaustedError,
    UnknownSequenceError,
)
from kv_pool.ids import BlockMove, is_run
from kv_pool.manager.sequences.evictions import Evictions

TO_MAKE_ROOM = r"sequence 1 was evicted to make room for sequence 4; its 3 blocks may hold other data now"


def make_full(**options):
    """Make a pool that sequences 1, 2 and 3 fill with three blocks each."""
    pool = GPUKVPool(9, 4, **options)
    for sequence_id in (1, 2, 3):
        take(pool, sequence_id, 3)
    return pool


def make_evicted(**options):
    """Like `make_full`; then sequence 4 takes the blocks of sequence 1."""
    pool = make_full(**options)
    old_ids = pool.blocks_of(1)
    assert sorted(take(pool, 4, 3)) == sorted(old_ids)
    return pool, old_ids


def test_pinned_sequences_and_hopeless_requests_evict_nothing():
    pool = make_full(placement="oldest", on_moved=lambda relocation: None)
    pool.pin([5])
    with pytest.raises(
        PoolExhaustedError, match=r"0 are free of 9\. Tried: eviction \(too few blocks may be evicted\)"
    ):
        take(pool, 4, 7)
    with pytest.raises(PoolExhaustedError, match="no run even if all candidates are evicted"):
        take(pool, 4, 5, contiguous="require")
    assert pool.list_sequences() == [1, 2, 3]
    take(pool, 4, 6)
    assert pool.list_sequences() == [2, 4]


def test_blocks_move_before_a_sequence_is_evicted_for_a_run():
    pool = make_scattered(eviction_policy=LRUEviction(), on_moved=lambda relocation: None)
    take(pool, 6, 5, contiguous="require")
    assert pool.list_sequences() == [1, 2, 3, 4, 5, 6]
    pool = make_scattered(eviction_policy=LRUEviction())
    take(pool, 6, 5, contiguous="require")
    assert 1 not in pool.list_sequences()
    assert {eviction.for_sequence_id for eviction in pool.take_evictions()} == {6}


def test_watched_blocks_are_no_place_to_move_to():
    """A sequence was evicted in vain: the watched blocks were counted as if blocks could move there."""
    pool = GPUKVPool(8, 4, placement="oldest", on_moved=lambda relocation: None)
    for sequence_id in range(1, 9):
        take(pool, sequence_id, 1)
    blocks = pool.block_pool.blocks
    pool.block_pool.holds.open_place_hold("watched", lambda: {blocks[4]: 0.0, blocks[6]: 0.0})
    for sequence_id in (2, 4, 6):
        pool.free_sequence(sequence_id)
    assert take(pool, 9, 3, contiguous="require") == [1, 2, 3]
    assert pool.list_sequences() == [5, 7, 8, 9]
    check(pool)


def test_no_more_are_evicted_for_a_required_run_than_a_few_moves_need():
    pool = GPUKVPool(9, 4, placement="oldest", on_moved=lambda relocation: None)
    for sequence_id in range(1, 10):
        take(pool, sequence_id, 1)
    pool.pin([5])
    for sequence_id in (3, 2, 7, 8, 9):
        pool.note_access(sequence_id)
    # Blocks 1, 4 and 6 are enough, but no run of them is one move away, since 5 stays; with 3, one is.
    assert is_run(take(pool, 10, 3, contiguous="require", max_moves=1))
    assert pool.list_sequences() == [5, 2, 7, 8, 9, 10]
    check(pool)


@pytest.mark.parametrize(
    "use",
    [
        lambda pool, ids: pool.free_sequence(1),
        lambda pool, ids: pool.blocks_of(1),
        lambda pool, ids: take(pool, 1, 1),
        lambda pool, ids: pool.try_allocate(BlockAllocationRequest(1, 1)),
        lambda pool, ids: pool.allocate_many([BlockAllocationRequest(1, 1)]),
        lambda pool, ids: pool.fork(1, 8),
        lambda pool, ids: pool.fork(2, 1),
        lambda pool, ids: pool.cache_prefix(1, [b"h"]),
        lambda pool, ids: pool.claim_prefix(1, [b"h"]),
        lambda pool, ids: pool.note_access(1),
        lambda pool, ids: pool.free(ids, sequence_id=1),
        lambda pool, ids: pool.pin(ids, sequence_id=1),
        lambda pool, ids: pool.unpin(ids, sequence_id=1),
    ],
)
def test_calls_for_an_evicted_sequence_raise(use):
    pool, old_ids = make_evicted()
    with pytest.raises(EvictedSequenceError, match=TO_MAKE_ROOM) as raised:
        use(pool, old_ids)
    assert isinstance(raised.value, UnknownSequenceError)
    assert isinstance(raised.value, MemoryError)
    assert pool.list_sequences() == [2, 3, 4]
    check(pool)


def test_stale_ids_do_not_free_blocks_of_another_sequence():
    pool, old_ids = make_evicted()
    for call in (lambda: pool.free(old_ids), lambda: pool.free_many([old_ids[:1]])):
        with pytest.raises(
            EvictedSequenceError, match=r"stale id of sequence 1, which was evicted to make room"
        ):
            call()
    assert len(pool.blocks_of(4)) == 3
    pool.free(old_ids[:1], sequence_id=4)
    pool.free(pool.blocks_of(2))  # no evicted sequence held these
    assert [eviction.block_ids for eviction in pool.take_evictions()] == [tuple(old_ids)]
    pool.free(old_ids[1:])
    assert pool.list_sequences() == [3]
    check(pool)


def connect_two(pool, storage):
    other = GPUKVPool(9, 4, device_id=1, storage=storage)
    pool.connect(other)
    return other


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda pool, ids: pool.pin(ids),
        lambda pool, ids: pool.unpin(ids[:1]),
        lambda pool, ids: pool.migrate_blocks(ids, 1),
        lambda pool, ids: pool.free(ids),
    ],
    ids=["pin", "unpin", "migrate_blocks", "free"],
)
def test_stale_ids_do_not_affect_another_sequence(use, is_free):
    """`pin`, `unpin` and `migrate_blocks` used to act on the blocks of the present holder."""
    pool, old_ids = make_evicted(storage=make_storage(10))
    other = connect_two(pool, make_storage(10))
    if is_free:
        pool.free_sequence(4)
    else:
        pool.pin(old_ids, sequence_id=4)
    with pytest.raises(EvictedSequenceError, match=r"stale id of sequence 1, which was evicted to make room"):
        use(pool, old_ids)
    assert (pool.num_pinned_blocks, other.get_free_blocks()) == (0 if is_free else 3, 9)
    assert pool.list_sequences() == ([2, 3] if is_free else [2, 3, 4])
    check(pool)
    # Once the owner is notified, the ids mean the blocks of the present holder.
    pool.take_evictions()
    if is_free:
        with pytest.raises(InvalidBlockError, match="held by no sequence"):
            use(pool, old_ids)
    else:
        pool.unpin(old_ids, sequence_id=4)
        pool.pin(old_ids)
        pool.unpin(old_ids)
        assert len(pool.migrate_blocks(old_ids, 1)) == 3
        assert other.blocks_of(4) == [4, 5, 6]
    check(pool)


def test_try_migrate_blocks_returns_the_error_for_stale_ids():
    pool, old_ids = make_evicted(storage=make_storage(10))
    connect_two(pool, make_storage(10))
    assert isinstance(pool.try_migrate_blocks(old_ids, 1).error, EvictedSequenceError)


def test_a_named_sequence_pins_its_own_blocks_only():
    pool = make_full()
    with pytest.raises(InvalidBlockError, match="is not held by sequence 2"):
        pool.pin([*pool.blocks_of(2), *pool.blocks_of(1)], sequence_id=2)
    with pytest.raises(UnknownSequenceError, match="sequence 7 holds no blocks"):
        pool.pin([1], sequence_id=7)
    assert pool.num_pinned_blocks == 0
    pool.pin(pool.blocks_of(2), sequence_id=2)
    with pytest.raises(InvalidBlockError, match="is not held by sequence 3"):
        pool.unpin(pool.blocks_of(2), sequence_id=3)
    assert pool.num_pinned_blocks == 3
    check(pool)


def test_a_pin_without_a_name_is_removed_from_the_longest_holder():
    pool = GPUKVPool(9, 4)
    [block_id] = take(pool, 1, 1)
    pool.fork(1, 2)
    pool.pin([block_id], 2)
    pool.pin([block_id], 1)
    pool.unpin([block_id])
    pool.free_sequence(1)
    assert pool.num_pinned_blocks == 1
    with pytest.raises(PinnedBlockError):
        pool.free_sequence(2)


def test_stale_ids_are_refused_after_remapping_too():
    """The owner has remapped its table when blocks moved, so it has ids that its sequence never had."""
    remapped = []
    pool = GPUKVPool(9, 4, placement="oldest", on_moved=lambda one: remapped.append(one.make_remap()))
    for sequence_id in (1, 2, 3):
        take(pool, sequence_id, 3)
    old_ids = pool.blocks_of(3)
    pool.note_access(1)
    pool.note_access(2)
    take(pool, 4, 2)
    pool.free_sequence(1)
    assert pool.defragment() > 0
    table = old_ids
    for remap in remapped:
        table = remap[table].tolist()
    stale = sorted({*table} & {*pool.blocks_of(4)} - {*old_ids})
    assert stale
    for use in (pool.pin, pool.free):
        with pytest.raises(EvictedSequenceError, match="stale id of sequence 3"):
            use(stale)
    assert [eviction.block_ids for eviction in pool.take_evictions()] == [tuple(old_ids)]
    pool.pin(stale)
    check(pool)


def test_the_error_for_a_free_block_names_the_evicted_sequence():
    pool = make_full()
    old_ids = pool.blocks_of(1)
    pool.evict(3)
    for use in (pool.pin, pool.free):
        with pytest.raises(
            InvalidBlockError, match=r"no sequence. Sequence 1 held it and was evicted by evict\(\)"
        ):
            use(old_ids)


def test_the_error_stays_until_the_sequence_is_freed():
    pool, _ = make_evicted()
    for _ in range(2):
        with pytest.raises(EvictedSequenceError):
            take(pool, 1, 1)
    with pytest.raises(EvictedSequenceError):
        pool.free_sequence(1)
    with pytest.raises(UnknownSequenceError, match="holds no blocks"):
        pool.free_sequence(1)
    assert pool.blocks_of(1) == []
    assert len(take(pool, 1, 1)) == 1


def test_sequences_can_start_again_after_take_evictions():
    pool, old_ids = make_evicted()
    take(pool, 5, 2)
    first, second = pool.take_evictions()
    assert first == Eviction(1, tuple(old_ids), 4)
    assert (second.sequence_id, second.for_sequence_id) == (2, 5)
    assert pool.take_evictions() == []
    take(pool, 1, 1)
    check(pool)


def test_on_evicted_allows_the_sequence_to_start_again():
    evicted = []
    pool, _ = make_evicted(on_evicted=lambda sequence_id, ids: evicted.append(sequence_id))
    assert evicted == [1]
    assert pool.blocks_of(1) == []
    with pytest.raises(EvictedSequenceError, match=TO_MAKE_ROOM):
        pool.note_access(1)
    take(pool, 1, 1)
    assert evicted == [1, 2]
    check(pool)


def test_sequences_returned_by_evict_count_as_notified():
    pool = make_full()
    assert pool.evict(0) == []
    assert pool.evict(4) == [1, 2]
    take(pool, 1, 1)
    with pytest.raises(EvictedSequenceError, match=r"sequence 2 was evicted by evict\(\)"):
        pool.free_sequence(2)


@pytest.mark.parametrize("seed", range(10))
def test_evictions_behave_like_the_slow_model(seed):
    rng = random.Random(seed)
    book, slow = Evictions(), []
    for _ in range(300):
        sequence_id = rng.randrange(8)
        if rng.random() < 0.5:
            ids = tuple(rng.sample(range(12), rng.randint(1, 4)))
            is_notified = rng.random() < 0.3
            book.note(Eviction(sequence_id, ids, 99), is_notified=is_notified)
            slow = [one for one in slow if one[0] != sequence_id] + [(sequence_id, ids, is_notified, {*ids})]
        elif rng.random() < 0.3:
            drawn = rng.sample(range(12), 4)
            moves = [BlockMove(*drawn[:2]), BlockMove(*drawn[2:])] + [BlockMove(*drawn[1::-1])] * rng.randint(
                0, 1
            )
            book.note_moved(moves)
            for *_, reached in slow:
                reached |= {target for source, target in moves if source in {*reached}}
        elif rng.random() < 0.9:
            book.forget(sequence_id)
            slow = [one for one in slow if one[0] != sequence_id]
        else:
            assert [(one.sequence_id, one.block_ids) for one in book.take_all()] == [one[:2] for one in slow]
            slow = []
        assert book.list_sequences() == [one[0] for one in slow]
        stale = {block_id for _, _, is_notified, reached in slow if not is_notified for block_id in reached}
        for block_id in range(12):
            try:
                book.check_ids([block_id])
            except EvictedSequenceError:
                assert block_id in stale
            else:
                assert block_id not in stale
        for number in range(8):
            is_unnotified = any(one[0] == number and not one[2] for one in slow)
            try:
                book.check(number)
            except EvictedSequenceError:
                assert is_unnotified
            else:
                assert not is_unnotified


def test_the_number_of_kept_evictions_is_limited(monkeypatch):
    monkeypatch.setattr("kv_pool.manager.sequences.evictions._MAX_KEPT", 3)
    book = Evictions()
    for sequence_id in range(5):
        book.note(Eviction(sequence_id, (1,), 9), is_notified=False)
    assert book.list_sequences() == [2, 3, 4]
    book.take_all()
    book.check_ids([1])


def test_on_evicted_may_take_blocks_itself():
    """It left the pool interrupted."""
    pool = GPUKVPool(10, 4, on_evicted=lambda *evicted: take(pool, 99, 1))
    take(pool, 1, 5)
    take(pool, 2, 4)
    with pytest.raises(PoolExhaustedError, match="too few blocks may be evicted"):
        take(pool, 3, 6)
    assert pool.list_sequences() == [2, 99]
    check(pool)
    assert take(pool, 3, 5)


def test_on_evicted_may_free_and_restart_other_victims():
    """The restarted sequence lost its record, so that its block could never be freed."""
    called = []

    def restart(sequence_id, ids):
        called.append(sequence_id)
        if sequence_id == 1:
            pool.free_sequence(2)
            take(pool, 2, 1)

    pool = make_full(on_evicted=restart)
    take(pool, 9, 5)
    assert called == [1]
    assert len(pool.blocks_of(2)) == 1
    check(pool)


def test_a_pinned_request_counts_what_on_evicted_has_pinned():
    pool = make_full(max_pinned_blocks=3, on_evicted=lambda *evicted: pool.pin(pool.blocks_of(3)))
    with pytest.raises(PinLimitError):
        take(pool, 9, 3, pinned=True)
    assert pool.list_sequences() == [2, 3]  # what was evicted for it stays evicted
    check(pool)
    assert take(pool, 9, 3)


def test_a_sequence_that_on_evicted_has_pinned_stays():
    pool = make_full(max_pinned_blocks=1, on_evicted=lambda *evicted: pool.pin(pool.blocks_of(2)[:1]))
    with pytest.raises(PoolExhaustedError):
        take(pool, 9, 5)
    assert 2 in pool.list_sequences()
    check(pool)


def test_a_refused_request_keeps_the_eviction_of_its_sequence():
    pool = make_full()
    assert pool.evict(1) == [1]
    for _ in range(2):
        with pytest.raises(EvictedSequenceError):
            pool.fork(1, 5)
        with pytest.raises(PoolExhaustedError):
            take(pool, 1, pool.total_blocks + 1)
    take(pool, 1, 1)
    with pytest.raises(UnknownSequenceError):
        pool.fork(7, 5)


def test_a_refused_batch_leaves_priorities_as_they_were():
    pool = make_full(eviction_policy=None)
    with pytest.raises(PoolExhaustedError):
        pool.allocate_many([BlockAllocationRequest(1, 1, priority=2), BlockAllocationRequest(30, 2)])
    assert {one.priority for one in pool.describe_sequences().sequences} == {0}
    check(pool)


def test_on_evicted_may_free_a_sequence_of_the_batch():
    def free(*evicted):
        if 8 in pool.list_sequences():
            pool.free_sequence(8)

    pool = make_full(on_evicted=free)
    with pytest.raises(PoolExhaustedError):
        pool.allocate_many([BlockAllocationRequest(count, 7 + count) for count in (1, 5, 30)])
    assert pool.list_sequences() == [3]
    check(pool)
