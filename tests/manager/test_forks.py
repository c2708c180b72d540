"""Forks share blocks; the first to write to a shared block gets another one, and a copy to make."""

import pytest
from manager.table_drawing import draw, grow, make_manager, make_request, start, stop, take_copies

from kv_pool import (
    AllocStatus,
    BlockHasher,
    BlockPool,
    FullAttentionSpec,
    InvalidArgumentError,
    KVCacheManager,
    LoRARequest,
    MambaSpec,
    MultiModalFeature,
    OutOfBlocksError,
    PlaceholderRange,
    PoolInterruptedError,
    PrefixRules,
    Request,
)
from kv_pool.manager.invariants import check_copies

FULL = FullAttentionSpec(block_size=4)


def fork(manager, parent, name, tokens=(), num_common=None):
    """Return a child that continues with other tokens after the parent's computed ones."""
    num_computed = parent.num_computed_tokens if num_common is None else num_common
    child = make_request(name, [*parent.all_token_ids[:num_computed], *tokens])
    child.num_computed_tokens = parent.num_computed_tokens
    manager.fork(parent, child)
    return child


def make_parent(num_tokens=10, groups=(FULL,), num_blocks=20):
    manager = make_manager(groups, num_blocks)
    a = make_request("a", range(num_tokens))
    start(manager, a)
    return manager, a


def test_first_writer_of_a_shared_block_gets_a_copy():
    manager, a = make_parent()
    b = fork(manager, a, "b", [50])
    grow(manager, b)
    assert draw(manager, b) == "1*x2 2*x2 4"
    assert draw(manager, a) == "1*x2 2*x2 3x2"  # the second reference is the copy's
    assert take_copies(manager) == [(3, 4)]
    assert draw(manager, a) == "1*x2 2*x2 3"
    grow(manager, a, [60])
    assert draw(manager, a) == "1*x2 2*x2 3"
    assert take_copies(manager) == []
    stop(manager, a, b)


@pytest.mark.parametrize(
    ("num_computed", "message"),
    [
        (8, "has 10 computed tokens, but its fork 'b' has 8"),
        (12, "its fork 'b' has 12; set the child's"),
    ],
)
def test_a_fork_with_another_token_count_is_refused(num_computed, message):
    manager, a = make_parent()
    b = make_request("b", range(14))
    b.num_computed_tokens = num_computed
    with pytest.raises(InvalidArgumentError, match=message):
        manager.fork(a, b)
    assert not manager.holds_blocks("b")
    stop(manager, a)


def test_a_fork_in_the_middle_of_a_step_is_refused():
    manager = make_manager((FULL,))
    a, b = make_request("a", range(8)), make_request("b", range(9))
    manager.allocate_slots(a, 8)
    with pytest.raises(InvalidArgumentError, match="cached for 8 tokens, but num_computed_tokens is 0"):
        manager.fork(a, b)
    stop(manager, a)


def test_a_fork_of_a_hit_within_a_block_copies_the_hit():
    """The child's block was copied from the parent's, before the hit was copied to that one."""
    groups = (FULL, MambaSpec(block_size=4))
    manager = make_manager(groups, 20, 2, prefix_rules=PrefixRules(retention_interval=0))
    first, parent, child = (make_request(name, range(11), 2) for name in ("first", "parent", "child"))
    for num_new in (8, 2, 1):
        assert manager.allocate_slots(first, num_new) is not None
        first.num_computed_tokens += num_new
        take_copies(manager)
    prefix = manager.get_computed_blocks(parent)
    hits = [blocks[-1].block_id for blocks in prefix.blocks]
    assert prefix.num_tokens == 10
    manager.allocate_slots(parent, 1, prefix)
    parent.num_computed_tokens = child.num_computed_tokens = 10
    manager.fork(parent, child)
    manager.allocate_slots(child, 1)
    ends = [manager.get_block_ids(name, group)[-1] for name in ("child", "parent") for group in (0, 1)]
    assert take_copies(manager) == list(zip(hits * 2, ends, strict=True))
    stop(manager, first, parent, child)


def test_two_hits_within_one_block_copy_what_is_there():
    """The second hit ends in the block that is still to get a copy for the first."""
    manager = make_manager(
        (FULL, MambaSpec(block_size=4)), 20, 2, prefix_rules=PrefixRules(retention_interval=0)
    )
    first, second, third = (
        make_request(name, range(end), 2) for name, end in (("a", 11), ("b", 13), ("c", 14))
    )
    for num_new in (8, 2, 1):
        assert manager.allocate_slots(first, num_new) is not None
        first.num_computed_tokens += num_new
        take_copies(manager)
    for request in (second, third):
        prefix = manager.get_computed_blocks(request)
        assert prefix.num_tokens == 10
        manager.allocate_slots(request, request.num_tokens - 10, prefix)
    check_copies(manager)
    moves = take_copies(manager)
    assert len(moves) == 4
    assert {source for source, _ in moves}.isdisjoint(target for _, target in moves)
    stop(manager, first, second, third)


@pytest.mark.parametrize("first", ["parent", "child"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_cached_state_is_not_overwritten_after_a_fork(first, is_ended):
    """The request that kept the block overwrote the state after 28 tokens; a later hit read another one."""
    hasher = BlockHasher("sha256", block_size=4)
    manager = KVCacheManager(
        BlockPool(61, True, 4),
        groups=[FullAttentionSpec(block_size=4), MambaSpec(block_size=8)],
        prefix_rules=PrefixRules(retention_interval=0),
    )
    states = {}

    def run(*requests):
        for source, target in manager.take_block_copies():
            states[target] = states.get(source)
        for request, num_new in requests:
            request.num_computed_tokens += num_new
            table = manager.get_block_ids(request.request_id, 1)
            states[table[(request.num_computed_tokens - 1) // 8]] = request.num_computed_tokens

    parent, child = (Request(name, range(32), hasher) for name in ("parent", "child"))
    manager.allocate_slots(parent, 28, manager.get_computed_blocks(parent))
    run((parent, 28))
    child.num_computed_tokens = 28
    manager.fork(parent, child)
    writers = [parent, child] if first == "parent" else [child, parent]
    if is_ended:
        manager.free(writers.pop())
    for request in writers:
        num_free = manager.get_num_free_blocks()
        assert manager.can_allocate(request, 1) is AllocStatus.OK
        assert manager.allocate_slots(request, 1) is not None
        assert num_free - manager.get_num_free_blocks() <= 2
    run(*((request, 1) for request in writers))
    later = Request("later", [*range(28), 7, 7], hasher)
    prefix = manager.get_computed_blocks(later)
    assert prefix.num_tokens == 28
    assert states[prefix.blocks[1][-1].block_id] == 28
    assert manager.allocate_slots(later, 2, prefix) is not None
    for request in writers:
        table = manager.get_block_ids(request.request_id, 1)
        assert states[table[3]] == 29


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        ([0, 1, 9], {}),
        ([0, 1, 2], {"cache_salt": "other"}),
        ([0, 1, 2], {"lora_request": LoRARequest(1, "sql", "/sql")}),
        ([0, 1, 2], {"mm_features": [MultiModalFeature("image", PlaceholderRange(1, 1))]}),
    ],
)
def test_a_fork_with_other_content_in_its_first_block_is_refused(tokens, options):
    """No hash covers a block that is not full: the child cached the parent's content under its own."""
    manager, a = make_parent(3)
    child = make_request("b", [*tokens, 3, 4], **options)
    child.num_computed_tokens = 3
    with pytest.raises(InvalidArgumentError, match="are not those of its parent"):
        manager.fork(a, child)
    assert not manager.holds_blocks("b")
    stop(manager, a)


def test_a_fork_counts_the_blocks_for_the_states_of_its_drafts():
    """They were taken, but not counted: the call raised in the middle."""
    groups = (FullAttentionSpec(block_size=4), MambaSpec(block_size=4, num_speculative_blocks=2))
    for num_free in range(6):
        manager = KVCacheManager(BlockPool(6 + num_free, True, 4), groups=groups)
        parent, child = make_request("p", range(16)), make_request("c", range(16))
        assert manager.allocate_slots(parent, 6) is not None
        parent.num_computed_tokens = child.num_computed_tokens = 6
        manager.fork(parent, child)
        assert manager.get_num_free_blocks() == num_free
        fits = num_free == 5  # the last blocks of both groups, two states, and a block for the drafts
        assert (manager.can_allocate(child, 1, num_lookahead_tokens=2) is AllocStatus.OK) == fits
        assert (manager.allocate_slots(child, 1, num_lookahead_tokens=2) is not None) == fits


def test_blocks_that_a_watcher_takes_are_missing_loudly():
    groups = [FullAttentionSpec(block_size=4), FullAttentionSpec(block_size=4)]
    manager = KVCacheManager(BlockPool(7, True, 4), groups=groups)
    pool = manager.block_pool
    first, *others = pool.get_new_blocks(6)
    pool.unpin_blocks([first], lambda block: pool.get_new_blocks(2))
    pool.unpin_blocks(others, lambda block: None)
    request = Request("r", range(12), BlockHasher(block_size=4))
    with pytest.raises(OutOfBlocksError, match="asked for 3 blocks"):
        manager.allocate_slots(request, 12)
    with pytest.raises(PoolInterruptedError):
        manager.allocate_slots(request, 4)
    manager.repair()
    assert not manager.holds_blocks("r")
