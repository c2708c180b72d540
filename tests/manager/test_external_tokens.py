"""Tokens whose KV is computed elsewhere: their slots, and when their blocks are cached."""

import pytest
from drawing import state
from manager.table_drawing import draw, grow, make_manager, make_request, start, stop

from kv_pool import AllocStatus, FullAttentionSpec, InvalidArgumentError, MambaSpec, SlidingWindowSpec
from kv_pool.manager.invariants import check_manager

FULL = FullAttentionSpec(block_size=4)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=5)


def allocate(manager, request, num_new, num_external, **options):
    """Allocate slots after the prefix for external and new tokens; count the external ones."""
    prefix = manager.get_computed_blocks(request)
    added = manager.allocate_slots(
        request, num_new, prefix, num_external_computed_tokens=num_external, **options
    )
    if added is not None:
        request.num_computed_tokens = prefix.num_tokens + num_external
    return added


def test_external_tokens_follow_the_prefix_and_are_cached():
    manager = make_manager((FULL,), 8)
    a, b = make_request("a", range(4)), make_request("b", range(14))
    start(manager, a)
    allocate(manager, b, num_new=4, num_external=6)
    assert draw(manager, b) == "1*x2 2* 3* 4"
    b.num_computed_tokens = 14
    check_manager(manager, [a, b])
    stop(manager, a, b)


def test_delayed_external_tokens_are_cached_after_arrival():
    manager = make_manager((FULL,), 8)
    a = make_request("a", range(13))
    allocate(manager, a, num_new=0, num_external=10, delay_cache_blocks=True)
    assert draw(manager, a) == "1 2 3"
    assert manager.get_computed_blocks(make_request("b", range(13))).num_tokens == 0
    manager.cache_blocks(a, 10)
    assert draw(manager, a) == "1* 2* 3"
    grow(manager, a)
    assert draw(manager, a) == "1* 2* 3* 4"
    stop(manager, a)


def test_an_aborted_transfer_leaves_nothing_cached():
    manager = make_manager((FULL,), 8)
    a = make_request("a", range(13))
    allocate(manager, a, num_new=0, num_external=12, delay_cache_blocks=True)
    manager.free(a)
    assert state(manager.block_pool) == "free: 3 2 1 4 5 6 7 8"
    assert manager.get_computed_blocks(make_request("b", range(13))).num_tokens == 0


def test_external_tokens_outside_the_window_get_no_blocks():
    manager = make_manager((WINDOW,), 8)
    a = make_request("a", range(15))
    allocate(manager, a, num_new=3, num_external=12)
    assert draw(manager, a) == "- - 1* 2"
    stop(manager, a)


def test_hits_that_external_tokens_push_out_are_not_touched():
    manager = make_manager((WINDOW,), 8)
    a, b = make_request("a", range(4)), make_request("b", range(15))
    start(manager, a)
    manager.free(a)
    allocate(manager, b, num_new=3, num_external=8)
    assert draw(manager, b) == "- - 2* 3"
    assert state(manager.block_pool).startswith("free: 4 5 6 7 8 1*")
    stop(manager, b)


def test_an_external_state_gets_a_block_of_its_own():
    manager = make_manager((MambaSpec(block_size=4),), 8)
    a = make_request("a", range(11))
    allocate(manager, a, num_new=3, num_external=8)
    assert draw(manager, a) == "- 1* 2"
    manager.take_block_copies()
    a.num_computed_tokens = 11
    check_manager(manager, [a])
    stop(manager, a)


def test_a_delayed_state_is_cached_after_arrival():
    manager = make_manager((MambaSpec(block_size=4),), 8)
    a, b = make_request("a", range(11)), make_request("b", range(11))
    allocate(manager, a, num_new=0, num_external=8, delay_cache_blocks=True)
    manager.cache_blocks(a, 8)
    assert draw(manager, a) == "- 1*"
    assert start(manager, b) == 8  # in the same step: the state has arrived
    stop(manager, a, b)


def test_delayed_blocks_are_cached_in_all_groups_at_once():
    manager = make_manager((FULL, WINDOW, MambaSpec(block_size=8)), 20)
    a, b = make_request("a", range(13)), make_request("b", range(13))
    allocate(manager, a, num_new=0, num_external=8, delay_cache_blocks=True)
    assert draw(manager, a) == "1 2 / - 3 / 4"
    manager.cache_blocks(a, 8)
    assert draw(manager, a) == "1* 2* / - 3* / 4*"
    assert start(manager, b) == 8
    stop(manager, a, b)


def test_external_tokens_are_counted_before_blocks_are_taken():
    manager = make_manager((FULL,), 3)
    a = make_request("a", range(16))
    before = state(manager.block_pool)
    status = manager.can_allocate(a, 4, num_external_computed_tokens=12)
    assert status is AllocStatus.NEVER
    assert allocate(manager, a, num_new=4, num_external=12) is None
    assert state(manager.block_pool) == before
    assert manager.can_allocate(a, 0, num_external_computed_tokens=12) is AllocStatus.OK


def test_external_tokens_of_a_running_request_are_refused():
    manager = make_manager((FULL,), 8)
    a = make_request("a", range(9))
    start(manager, a, 4)
    with pytest.raises(InvalidArgumentError, match="external tokens must come first"):
        manager.allocate_slots(a, 1, num_external_computed_tokens=4)
    with pytest.raises(InvalidArgumentError, match="num_external_computed_tokens -1"):
        manager.allocate_slots(make_request("b", range(9)), 1, num_external_computed_tokens=-1)
    stop(manager, a)


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("num_prefix", [0, 8])
def test_an_external_state_is_found_again(delays, block_size, num_prefix):
    """Loaded for the step in which it is read, the state was not cached; loaded before, it was."""
    manager = make_manager((FULL, MambaSpec(block_size=block_size)), 40)
    if num_prefix:
        a = make_request("a", range(num_prefix))
        start(manager, a)
        stop(manager, a)
    b, c = make_request("b", range(18)), make_request("c", [*range(16), 99])
    allocate(manager, b, 0 if delays else 2, 16 - num_prefix, delay_cache_blocks=delays)
    if not delays:
        # Another request must wait until the state is written.
        prefix = manager.get_computed_blocks(c)
        assert prefix.num_tokens == 16
        assert manager.allocate_slots(c, 1, prefix) is None
    manager.take_block_copies()
    if delays:
        manager.cache_blocks(b, 16)
        manager.allocate_slots(b, 2)
        manager.take_block_copies()
    b.num_computed_tokens = 18
    assert start(manager, c) == 16
    manager.take_block_copies()
    stop(manager, b, c)
