"""A pool without options evicts under pressure, and no owner of an evicted sequence goes on unaware."""

import random

import pytest
from adapter.made_pool import check, take

from kv_pool import (
    BlockAllocationRequest,
    EvictedSequenceError,
    Eviction,
    GPUKVPool,
    InvalidBlockError,
    LRUEviction,
    PoolExhaustedError,
    UnknownSequenceError,
)
from kv_pool.adapter.evictions import Evictions

TO_MAKE_ROOM = r"sequence 1 was evicted to make room for sequence 4; its 3 blocks may hold other data now"


def make_full(**options):
    """Sequences 1, 2 and 3 of three blocks each fill the pool."""
    pool = GPUKVPool(9, 4, **options)
    for sequence_id in (1, 2, 3):
        take(pool, sequence_id, 3)
    return pool


def make_evicted(**options):
    """As `make_full`; sequence 4 then takes the blocks of sequence 1."""
    pool = make_full(**options)
    old_ids = pool.blocks_of(1)
    assert sorted(take(pool, 4, 3)) == sorted(old_ids)
    return pool, old_ids


def test_by_default_the_sequence_that_was_used_longest_ago_makes_room():
    pool = make_full()
    pool.note_access(1)
    take(pool, 4, 2)
    assert pool.list_sequences() == [3, 1, 4]
    assert GPUKVPool(9, 4, eviction_policy=LRUEviction()).get_free_blocks() == 9
    check(pool)


def test_by_default_pinned_sequences_stay_and_a_request_that_cannot_fit_evicts_none():
    pool = make_full()
    pool.pin(pool.blocks_of(2)[:1])
    with pytest.raises(PoolExhaustedError, match=r"0 are free of 9\. Tried: eviction \(too little may go\)"):
        take(pool, 4, 7)
    assert pool.list_sequences() == [1, 2, 3]
    take(pool, 4, 6)
    assert pool.list_sequences() == [2, 4]


def test_without_a_policy_no_sequence_is_evicted_and_the_refusal_says_why():
    pool = make_full(eviction_policy=None)
    with pytest.raises(PoolExhaustedError, match=r"Tried: no eviction \(eviction_policy is None\)"):
        take(pool, 4, 1)
    assert pool.list_sequences() == [1, 2, 3]


def test_a_run_is_made_by_moving_before_a_sequence_is_evicted_for_it():
    def make_scattered(**options):
        pool = GPUKVPool(9, 4, placement="oldest", **options)
        for sequence_id in (1, 2, 3, 4):
            take(pool, sequence_id, 1)
            take(pool, 9, 1, contiguous="no")
        pool.free_sequence(9)
        return pool

    pool = make_scattered(on_moved=lambda relocation: None)
    take(pool, 5, 4, contiguous="require")
    assert pool.list_sequences() == [1, 2, 3, 4, 5]
    pool = make_scattered()
    take(pool, 5, 4, contiguous="require")
    assert 1 not in pool.list_sequences()
    assert {eviction.for_sequence_id for eviction in pool.take_evictions()} == {5}
    pool = make_scattered(eviction_policy=None)
    with pytest.raises(PoolExhaustedError, match=r"no compaction \(ids change .* only with on_moved=\)"):
        take(pool, 5, 4, contiguous="require")


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
    ],
)
def test_whatever_uses_an_evicted_sequence_is_told_what_happened(use):
    pool, old_ids = make_evicted()
    with pytest.raises(EvictedSequenceError, match=TO_MAKE_ROOM) as raised:
        use(pool, old_ids)
    assert isinstance(raised.value, UnknownSequenceError)
    assert isinstance(raised.value, MemoryError)
    assert pool.list_sequences() == [2, 3, 4]
    check(pool)


def test_block_ids_of_an_evicted_sequence_do_not_free_the_blocks_of_another():
    pool, old_ids = make_evicted()
    for call in (lambda: pool.free(old_ids), lambda: pool.free_many([old_ids[:1]])):
        with pytest.raises(EvictedSequenceError, match=r"one of sequence 1, which was evicted to make room"):
            call()
    assert len(pool.blocks_of(4)) == 3
    pool.free(old_ids[:1], sequence_id=4)
    pool.free(pool.blocks_of(2))  # no evicted sequence had these
    assert [eviction.block_ids for eviction in pool.take_evictions()] == [tuple(old_ids)]
    pool.free(old_ids[1:])
    assert pool.list_sequences() == [3]
    check(pool)


def test_the_error_stays_until_the_owner_has_freed_the_sequence():
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


def test_evictions_can_be_taken_and_the_sequences_begun_again():
    pool, old_ids = make_evicted()
    take(pool, 5, 2)
    first, second = pool.take_evictions()
    assert first == Eviction(1, tuple(old_ids), 4)
    assert (second.sequence_id, second.for_sequence_id) == (2, 5)
    assert pool.take_evictions() == []
    take(pool, 1, 1)
    check(pool)


def test_an_owner_that_is_called_begins_the_sequence_again_at_once():
    evicted = []
    pool, _ = make_evicted(on_evicted=lambda sequence_id, ids: evicted.append(sequence_id))
    assert evicted == [1]
    assert pool.blocks_of(1) == []
    with pytest.raises(EvictedSequenceError, match=TO_MAKE_ROOM):
        pool.note_access(1)
    take(pool, 1, 1)
    assert evicted == [1, 2]
    check(pool)


def test_what_evict_returns_is_told():
    pool = make_full()
    assert pool.evict(4) == [1, 2]
    take(pool, 1, 1)
    with pytest.raises(EvictedSequenceError, match=r"sequence 2 was evicted by evict\(\)"):
        pool.free_sequence(2)


def test_the_block_of_an_evicted_sequence_that_is_free_is_refused_by_its_state():
    pool = make_full()
    old_ids = pool.blocks_of(1)
    assert pool.evict(1) == [1]
    with pytest.raises(InvalidBlockError, match="held by no sequence"):
        pool.free(old_ids)


@pytest.mark.parametrize("seed", range(10))
def test_books_of_evictions_are_a_slow_list(seed):
    rng = random.Random(seed)
    book, slow = Evictions(), []
    for _ in range(300):
        sequence_id = rng.randrange(8)
        if rng.random() < 0.6:
            ids = tuple(rng.sample(range(12), rng.randint(1, 4)))
            is_told = rng.random() < 0.3
            book.note(Eviction(sequence_id, ids, 99), is_told=is_told)
            slow = [one for one in slow if one[0] != sequence_id] + [(sequence_id, ids, is_told)]
        elif rng.random() < 0.9:
            book.forget(sequence_id)
            slow = [one for one in slow if one[0] != sequence_id]
        else:
            assert [(one.sequence_id, one.block_ids) for one in book.take_all()] == [one[:2] for one in slow]
            slow = []
        assert book.list_sequences() == [one[0] for one in slow]
        stale = {block_id for _, ids, is_told in slow if not is_told for block_id in ids}
        for block_id in range(12):
            try:
                book.check_ids([block_id])
            except EvictedSequenceError:
                assert block_id in stale
            else:
                assert block_id not in stale
        for number in range(8):
            is_untold = any(one[0] == number and not one[2] for one in slow)
            try:
                book.check(number)
            except EvictedSequenceError:
                assert is_untold
            else:
                assert not is_untold


def test_evictions_do_not_pile_up_without_end(monkeypatch):
    monkeypatch.setattr("kv_pool.adapter.evictions._MAX_KEPT", 3)
    book = Evictions()
    for sequence_id in range(5):
        book.note(Eviction(sequence_id, (1,), 9), is_told=False)
    assert book.list_sequences() == [2, 3, 4]
    book.take_all()
    book.check_ids([1])
