"""`PrefixRules` by example: which blocks are cached, where hits end, which blocks are copied and kept."""

import pytest
from manager.table_drawing import draw, make_manager, make_request, stop, take_copies

from kv_pool import (
    AllocStatus,
    BlockPool,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVCacheManager,
    MambaSpec,
    PrefixRules,
    SlidingWindowSpec,
)
from kv_pool.manager.invariants import check_manager

FULL = FullAttentionSpec(block_size=4)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=5)
STATE = MambaSpec(block_size=4)


def make(*groups, hash_block_size=4, num_blocks=20, **rules):
    return make_manager(groups, num_blocks, hash_block_size, prefix_rules=PrefixRules(**rules))


def step(manager, request, end):
    """Allocate and count the tokens up to `end`, as one step without copies; return the new block ids."""
    prefix = None if manager.holds_blocks(request.request_id) else manager.get_computed_blocks(request)
    num_hits = prefix.num_tokens if prefix else 0
    added = manager.allocate_slots(request, end - request.num_computed_tokens - num_hits, prefix)
    request.num_computed_tokens = end
    return [[block.block_id for block in blocks] for blocks in added]


# ---- tokens in flight ----------------------------------------------------------------------------


def test_windows_of_tokens_in_flight_are_kept():
    manager = make_manager((WINDOW,))
    a = make_request("a", range(20))
    step(manager, a, 12)
    manager.allocate_slots(a, 1, num_in_flight_tokens=4)
    assert draw(manager, a) == "- 2* 3* 4"
    a.num_computed_tokens = 13
    manager.release_skipped_blocks(a, 12)
    assert draw(manager, a) == "- - 3* 4"
    stop(manager, a)


def test_can_allocate_does_not_count_blocks_of_tokens_in_flight():
    manager = make_manager((WINDOW,), 3)
    a = make_request("a", range(20))
    step(manager, a, 12)
    assert manager.can_allocate(a, 4, num_in_flight_tokens=8) is AllocStatus.LATER
    assert manager.allocate_slots(a, 4, num_in_flight_tokens=8) is None
    assert manager.can_allocate(a, 4) is AllocStatus.OK
    stop(manager, a)


# ---- hits within a block -------------------------------------------------------------------------


def test_blocks_of_copies_are_kept_until_the_caller_frees_them():
    manager = make(FULL, STATE, hash_block_size=2)
    a = make_request("a", range(11), 2)
    for end in (8, 10, 11):
        step(manager, a, end)
    moves, retained = manager.take_block_copies_with_blocks()
    assert [tuple(move) for move in moves] == [(5, 6)]
    assert [block.block_id for block in retained] == [5, 6]
    check_manager(manager, [a], held_elsewhere=retained)
    manager.free_blocks(retained)
    assert take_copies(manager) == []
    stop(manager, a)


def test_a_partial_hit_is_stale_after_its_block_was_evicted():
    manager = make(FULL, STATE, hash_block_size=2)
    a = make_request("a", range(11), 2)
    for end in (8, 10, 11):
        step(manager, a, end)
        take_copies(manager)
    b = make_request("b", range(11), 2)
    prefix = manager.get_computed_blocks(b)
    manager.block_pool.evict_blocks([6])
    with pytest.raises(InvalidBlockError, match="position 2 of the cached prefix"):
        manager.allocate_slots(b, 1, prefix)
    stop(manager, a)


# ---- states of drafts and in the middle of a step ------------------------------------------------


def test_a_state_that_no_request_can_hit_takes_one_block():
    states = MambaSpec(block_size=64, has_states_at_block_ends=False, num_speculative_blocks=1)
    manager = KVCacheManager(BlockPool(10, False, 4), groups=[FULL, states])
    a = make_request("a", range(9))
    manager.allocate_slots(a, 9)
    assert draw(manager, a) == "1 2 3 / 4 5"
    a.num_computed_tokens = 9
    manager.free(a)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "rules", "message"),
    [
        ([FULL, WINDOW], {"retention_interval": 6}, "must be a multiple of 4"),
        ([FULL], {"retention_interval": 4}, "set it to 0"),
        ([FULL], {"eagle_groups": [1]}, "there is no group 1; there are 1"),
        ([FULL, WINDOW], {"lookup_groups": [[0]]}, r"each of \[0, 1\] must be listed once"),
        ([FULL], {"eagle_groups": [0], "num_reprefillable_tokens": 4}, "which must be more"),
        (
            [FULL, ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8)],
            {"eagle_groups": [1]},
            "cannot drop the last block",
        ),
    ],
)
def test_rules_that_do_not_fit_the_groups_are_refused(groups, rules, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make(*groups, **rules)


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ({"retention_interval": -1}, InvalidArgumentError),
        ({"num_reprefillable_tokens": -1}, InvalidArgumentError),
        ({"retention_interval": "0"}, InvalidTypeError),
        ({"partial_hits": 1}, InvalidTypeError),
        ({"eagle_groups": ["0"]}, InvalidTypeError),
        ({"details": {"renews_states": True}}, InvalidTypeError),
    ],
)
def test_wrong_rules_are_refused(rules, error):
    with pytest.raises(error, match=next(iter(rules))):
        PrefixRules(**rules)


@pytest.mark.parametrize(
    "make_spec",
    [
        lambda: MambaSpec(block_size=4, num_speculative_blocks=-1),
        lambda: MambaSpec(block_size=4, prefill_checkpoint_alignment=0),
        lambda: SlidingWindowSpec(block_size=4, sliding_window=4, extra_retained_tokens=-1),
    ],
)
def test_wrong_counts_of_a_spec_are_refused(make_spec):
    with pytest.raises(InvalidArgumentError):
        make_spec()


def test_checkpoints_in_a_step_need_rules():
    with pytest.raises(InvalidArgumentError, match="needs prefix_rules"):
        make_manager((FULL, MambaSpec(block_size=4, prefill_checkpoint_alignment=2)))


def test_a_state_without_block_ends_needs_a_pool_without_caching():
    with pytest.raises(InvalidArgumentError, match="enable_caching=False"):
        make_manager((FULL, MambaSpec(block_size=64, has_states_at_block_ends=False)))


def test_rules_need_the_length_of_the_prompt():
    class Sequence:
        request_id = "s"
        num_tokens = 9
        num_computed_tokens = 0
        block_hashes = make_request("s", range(9)).block_hashes

    manager = make(FULL, WINDOW)
    with pytest.raises(InvalidTypeError, match="num_prompt_tokens"):
        manager.allocate_slots(Sequence(), 9)
    assert not manager.list_request_ids()
