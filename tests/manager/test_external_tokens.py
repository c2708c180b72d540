"""Tokens whose KV is computed elsewhere: their slots, and when their blocks are cached."""

import pytest
from manager.table_drawing import make_manager, make_request, start, stop

from kv_pool import FullAttentionSpec, InvalidArgumentError, MambaSpec

FULL = FullAttentionSpec(block_size=4)


def allocate(manager, request, num_new, num_external, **options):
    """Allocate slots after the prefix for external and new tokens; count the external ones."""
    prefix = manager.get_computed_blocks(request)
    added = manager.allocate_slots(
        request, num_new, prefix, num_external_computed_tokens=num_external, **options
    )
    if added is not None:
        request.num_computed_tokens = prefix.num_tokens + num_external
    return added


def test_external_tokens_of_a_running_request_are_refused():
    manager = make_manager((FULL,), 8)
    a = make_request("a", range(9))
    start(manager, a, 4)
    with pytest.raises(InvalidArgumentError, match="external tokens must come first"):
        manager.allocate_slots(a, 1, num_external_computed_tokens=4)
    with pytest.raises(InvalidArgumentError, match="num_external_computed_tokens is -1"):
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
