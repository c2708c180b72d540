"""Retention in a `GPUKVPool`: by priorities, directives, pins of directives, sessions."""

import pytest
from adapter.made_pool import check, make, take

from kv_pool import BlockHasher, LRUEviction, PoolExhaustedError, Request
from kv_pool.manager.retention.directive import RetentionDirective

HASHER = BlockHasher("sha256", block_size=4)


class SetClock:
    now = 0.0

    def __call__(self):
        return self.now


def start(pool, sequence_id, num_blocks, **options):
    """Allocate a sequence with all blocks cached under its own hashes; return its request."""
    request = Request(str(sequence_id), [sequence_id] * 4 * num_blocks, HASHER)
    take(pool, sequence_id, num_blocks, **options)
    pool.cache_prefix(sequence_id, request.block_hashes)
    return request


def count_hits(pool, request):
    return len(pool.block_pool.find_cached_prefix(request.block_hashes, len(request.block_hashes)))


def test_a_directive_retains_the_blocks_of_its_tokens():
    pool = make(8)
    pool.retention.set_directives("1", [RetentionDirective(0, 8, priority=90)])
    kept, other = start(pool, 1, 4), start(pool, 2, 4)
    pool.free_sequence(1)
    pool.free_sequence(2)
    assert pool.get_free_blocks() == 8
    take(pool, 3, 6)
    assert (count_hits(pool, kept), count_hits(pool, other)) == (2, 0)
    check(pool)


def test_directives_follow_blocks_freed_one_by_one():
    pool = make(8)
    pool.retention.set_directives("1", [RetentionDirective(4, 8, priority=90)])
    start(pool, 1, 3)
    [first, second, third] = pool.blocks_of(1)
    pool.free([third])
    pool.free([second])
    pool.free([first])
    assert pool.retention.num_retained == 1
    take(pool, 2, 7, contiguous="no")
    assert second not in pool.blocks_of(2)
    assert pool.retention.num_retained == 1


def test_an_ended_sequence_leaves_no_directives():
    pool = make(8)
    pool.retention.set_directives("1", [RetentionDirective(priority=90)])
    take(pool, 1, 2)
    pool.free_sequence(1)
    assert not pool.retention.is_active


def test_a_session_retains_a_conversation_until_its_deadline():
    clock = SetClock()
    pool = make(8, clock=clock)
    request = start(pool, 1, 4)
    with pool.lock:
        pool.retention.keep_session("chat", request, until=10.0)
    pool.free_sequence(1)
    take(pool, 2, 4)
    assert count_hits(pool, request) == 4
    pool.free_sequence(2)
    clock.now = 11.0
    assert pool.get_statistics().cached_free_blocks == 4
    assert pool.retention.num_sessions == 0
    take(pool, 3, 8)
    assert count_hits(pool, request) == 0
    check(pool)


def test_a_claimed_pinned_prefix_has_one_reference():
    pool = make(8)
    pool.retention.set_directives("1", [RetentionDirective(0, 8, pin=True)])
    request = start(pool, 1, 2)
    pool.free_sequence(1)
    assert pool.get_free_blocks() == 6
    ids = pool.claim_prefix(2, request.block_hashes)
    assert [pool.get_block_info(block_id).ref_count for block_id in ids] == [1, 1]
    check(pool)
    pool.free_sequence(2)
    assert pool.get_free_blocks() == 6
    check(pool)


def test_blocks_that_stay_pinned_do_not_count_as_freed():
    """Eviction counted them as freed: the sequence lost its blocks, and the allocation failed anyway."""
    evicted = []
    pool = make(
        8, eviction_policy=LRUEviction(), on_evicted=lambda sequence_id, ids: evicted.append(sequence_id)
    )
    pool.retention.set_directives("1", [RetentionDirective(0, 16, pin=True)])
    start(pool, 1, 4)
    start(pool, 2, 4)
    with pytest.raises(PoolExhaustedError, match="too few blocks may be evicted"):
        take(pool, 3, 5)
    assert evicted == []
    assert pool.list_victims(4) == [1, 2]
    assert pool.evict(5) == []
    assert pool.evict(4) == [1, 2]
    assert pool.get_free_blocks() == 4
    check(pool)


def test_retained_blocks_count_as_free_and_cached():
    pool = make(8)
    request = start(pool, 1, 4, priority=2)
    pool.free_sequence(1)
    statistics = pool.get_statistics()
    assert (statistics.free_blocks, statistics.cached_free_blocks, statistics.used_blocks) == (8, 4, 0)
    assert pool.retention.num_retained == 4
    assert (pool.get_layout().num_free, pool.list_victims(1), pool.evict(1)) == (8, [], [])
    take(pool, 2, 4)
    assert count_hits(pool, request) == 4


@pytest.mark.parametrize(("placement", "contiguous"), [("buddy", "prefer"), ("first_fit", "require")])
def test_a_retained_run_does_not_hide_an_empty_one(placement, contiguous):
    """The search found the retained run first, and then looked for no other one."""
    pool = make(40, placement=placement)
    request = start(pool, 1, 4, priority=2)
    take(pool, 2, 36, contiguous="no")
    pool.free_sequence(1)
    pool.free([9, 11, 37, 38, 39, 40], 2)
    assert take(pool, 3, 4, contiguous=contiguous) == [37, 38, 39, 40]
    assert count_hits(pool, request) == 4
    check(pool)


def test_blocks_with_expired_pins_count_as_free():
    clock = SetClock()
    pool = make(8, max_pinned_blocks=4, clock=clock)
    pool.retention.set_directives("1", [RetentionDirective(0, 16, pin=True, duration_s=5.0)])
    start(pool, 1, 4)
    pool.free_sequence(1)
    assert (pool.get_free_blocks(), pool.count_available(0)) == (4, 4)
    clock.now = 6.0
    assert (pool.get_free_blocks(), pool.count_available(0)) == (8, 8)
    check(pool)
