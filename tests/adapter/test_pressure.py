"""Too few free blocks: reserve, eviction by policy, refusal, migration hook; and retained blocks."""

import pytest
from adapter.made_pool import check, draw, make, make_storage, state, take
from drawing import hash_of

from kv_pool import (
    BlockAllocationRequest,
    InvalidArgumentError,
    LRUEviction,
    PoolExhaustedError,
)


def make_full(**options):
    """Make three sequences of three blocks each in a pool of nine."""
    pool = make(9, **options)
    for sequence_id in (1, 2, 3):
        take(pool, sequence_id, 3)
    return pool


def test_the_reserve_is_for_higher_priorities():
    pool = make(reserved_blocks=3)
    take(pool, 1, 6)
    with pytest.raises(PoolExhaustedError, match="4 are free of 10, 3 of them reserved"):
        take(pool, 2, 2)
    assert len(take(pool, 2, 1)) == 1
    assert len(take(pool, 3, 2, priority=1)) == 2
    assert len(take(pool, 4, 1, priority=2)) == 1
    check(pool)


def test_a_request_evicts_no_higher_priority_nor_itself():
    pool = make(9, eviction_policy=LRUEviction())
    take(pool, 1, 3, priority=2)
    take(pool, 2, 3, priority=1)
    take(pool, 3, 3)
    with pytest.raises(PoolExhaustedError):
        take(pool, 3, 1)
    take(pool, 4, 2)
    assert pool.list_sequences() == [1, 2, 4]
    take(pool, 5, 7, priority=2)
    assert pool.list_sequences() == [5]
    check(pool)


def test_a_policy_may_exclude_sequences_or_name_unknown_ones():
    class OnlySecond:
        def rank(self, sequences):
            assert [sequence.sequence_id for sequence in sequences] == [1, 2, 3]
            assert [sequence.num_blocks for sequence in sequences] == [3, 3, 3]
            return [77, 2, 2]

    pool = make_full(eviction_policy=OnlySecond())
    take(pool, 4, 3)
    assert pool.list_sequences() == [1, 3, 4]
    check(pool)


def test_an_exception_in_on_evicted_stops_the_eviction():
    def fail(sequence_id, ids):
        raise RuntimeError("not listening")

    pool = make_full(eviction_policy=LRUEviction(), on_evicted=fail)
    before = state(pool)
    with pytest.raises(RuntimeError, match="not listening"):
        take(pool, 4, 1)
    assert state(pool) == before


# ---- the migration hook --------------------------------------------------------------------------


def test_a_hook_makes_room_on_another_device():
    asked = []

    def move_away(request, num_missing):
        asked.append((request.sequence_id, num_missing))
        pool.migrate_blocks(pool.blocks_of(1), 1)

    pool = make_full(storage=make_storage(), migration_hook=move_away)
    other = make(device_id=1, storage=make_storage())
    pool.connect(other)
    take(pool, 4, 2)
    assert asked == [(4, 2)]
    assert (pool.blocks_of(1), other.blocks_of(1)) == ([], [4, 5, 6])
    check(pool)
    check(other)


def test_a_batch_is_retried_as_a_whole_after_the_hook():
    asked = []

    def free_one(request, num_missing):
        assert pool.list_sequences() == [1, 2, 3], "the batch was not taken back before the hook was called"
        asked.append((request.sequence_id, num_missing))
        pool.free_sequence(1)

    pool = make(10, migration_hook=free_one)
    for sequence_id in (1, 2, 3):
        take(pool, sequence_id, 3)
    batches = pool.allocate_many([BlockAllocationRequest(1, 4), BlockAllocationRequest(2, 5)])
    assert asked == [(5, 2)]
    assert batches == [pool.blocks_of(4), pool.blocks_of(5)]
    check(pool)


def test_a_batch_refused_after_the_hook_takes_nothing():
    asked = []
    pool = make_full(
        migration_hook=lambda request, num_missing: asked.append((request.sequence_id, num_missing))
    )
    pool.free_sequence(3)
    with pytest.raises(
        PoolExhaustedError, match=r"Tried: the migration hook, no eviction \(eviction_policy is None\)\."
    ):
        pool.allocate_many([BlockAllocationRequest(2, 4, pinned=True), BlockAllocationRequest(3, 4)])
    assert asked == [(4, 2)]
    with pytest.raises(PoolExhaustedError, match="Tried: no eviction"):
        pool.allocate_many([BlockAllocationRequest(5, 4), BlockAllocationRequest(5, 5)])
    with pytest.raises(InvalidArgumentError):
        pool.allocate_many([BlockAllocationRequest(1, 4), BlockAllocationRequest(0, 5)])
    assert len(asked) == 1
    assert (draw(pool), pool.num_pinned_blocks, pool.list_sequences()) == ("111222...", 0, [1, 2])
    check(pool)


def test_one_sequence_of_a_batch_is_not_evicted_for_another():
    """It used to be: the result contained its ids, which another sequence held."""
    pool = make(9, eviction_policy=LRUEviction())
    take(pool, 1, 2)
    with pytest.raises(PoolExhaustedError):
        pool.allocate_many([BlockAllocationRequest(4, 2), BlockAllocationRequest(7, 3)])
    assert pool.get_free_blocks() >= 7
    batches = pool.allocate_many([BlockAllocationRequest(4, 2), BlockAllocationRequest(5, 3)])
    assert sorted(batches[0] + batches[1]) == list(range(1, 10))
    check(pool)


# ---- retained blocks -----------------------------------------------------------------------------


def cache_and_free(pool, sequence_id, numbers, priority=0):
    ids = take(pool, sequence_id, len(numbers), priority=priority)
    pool.cache_prefix(sequence_id, [hash_of(number) for number in numbers])
    pool.free_sequence(sequence_id)
    return ids


def find(pool, numbers):
    """Return which of these hashes are cached, each by itself."""
    return [number for number in numbers if pool.block_pool.get_cached_block(hash_of(number), [0])]


def test_a_prefix_outlives_its_sequence_and_can_be_claimed():
    pool = make()
    ids = take(pool, 1, 3)
    pool.cache_prefix(1, [hash_of(1), hash_of(2)])
    pool.cache_prefix(1, [hash_of(1), hash_of(2), hash_of(3)])
    pool.free_sequence(1)
    assert draw(pool) == "***......."
    assert pool.claim_prefix(2, [hash_of(1), hash_of(2), hash_of(9)]) == ids[:2]
    assert pool.claim_prefix(3, [hash_of(9)]) == []
    take(pool, 2, 1)
    assert pool.list_sequences() == [2]
    with pytest.raises(InvalidArgumentError, match="holds blocks"):
        pool.claim_prefix(2, [hash_of(1)])
    with pytest.raises(InvalidArgumentError, match="4 hashes for the 3 blocks"):
        pool.cache_prefix(2, [hash_of(1)] * 4)
    check(pool)


def test_events_report_cached_and_evicted_blocks():
    pool = make(enable_kv_cache_events=True)
    take(pool, 1, 3)
    pool.cache_prefix(1, [hash_of(1), hash_of(2)], token_ids=range(10, 19))
    pool.cache_prefix(1, [hash_of(1), hash_of(2), hash_of(3)])
    first, second = pool.take_events()
    assert len(first.block_hashes) == 2
    assert first.token_ids == list(range(10, 18))
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[1], [])
    assert pool.take_events() == []
    pool.free_sequence(1)
    take(pool, 2, 10)
    gone = [block_hash for event in pool.take_events() for block_hash in event.block_hashes]
    assert sorted(gone) == sorted(first.block_hashes + second.block_hashes)


def test_too_few_tokens_for_the_hashes_are_refused():
    pool = make(enable_kv_cache_events=True)
    take(pool, 1, 2)
    with pytest.raises(InvalidArgumentError, match="7 token ids for 2 blocks of 4 tokens"):
        pool.cache_prefix(1, [hash_of(1), hash_of(2)], token_ids=range(7))
    assert find(pool, [1, 2]) == pool.take_events() == []


@pytest.mark.parametrize("contiguous", ["no", "prefer"])
@pytest.mark.parametrize("high_first", [True, False])
def test_low_priority_is_evicted_before_high(high_first, contiguous):
    pool = make()
    batches = [(1, range(1, 6), 1), (2, range(6, 11), 0)]
    for sequence_id, numbers, priority in batches if high_first else reversed(batches):
        cache_and_free(pool, sequence_id, numbers, priority)
    take(pool, 3, 3, contiguous=contiguous)
    assert find(pool, range(1, 6)) == [1, 2, 3, 4, 5]
    take(pool, 4, 2, contiguous=contiguous)
    assert find(pool, range(1, 11)) == [1, 2, 3, 4, 5]
    take(pool, 5, 2, contiguous=contiguous)
    assert len(find(pool, range(1, 11))) == 3
    check(pool)


@pytest.mark.parametrize("on_moved", [None, lambda relocation: None], ids=["in place", "by moving"])
def test_a_required_run_evicts_high_priority_content_last(on_moved):
    pool = make(on_moved=on_moved)
    cache_and_free(pool, 1, range(1, 6), priority=1)  # the oldest, so a run would contain them
    cache_and_free(pool, 2, range(6, 11))
    take(pool, 3, 3, contiguous="require")
    assert find(pool, range(1, 6)) == [1, 2, 3, 4, 5]
    take(pool, 4, 5, contiguous="require")
    assert len(find(pool, range(1, 6))) <= 2
    check(pool)
