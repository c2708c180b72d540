from types import SimpleNamespace

import pytest
from drawing import state
from manager.table_drawing import make_request, start

from kv_pool import (
    BlockHasher,
    BlockPool,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVCacheManager,
    Request,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)


def make_manager(num_blocks=8, **options):
    return KVCacheManager(BlockPool(num_blocks + 1, options.pop("caching", True), 4, **options))


def test_caching_more_tokens_than_slots_is_refused():
    manager = make_manager()
    request = make_request("a", range(12))
    manager.allocate_slots(request, 4, delay_cache_blocks=True)
    with pytest.raises(InvalidArgumentError, match="has slots for 4 tokens, not 8"):
        manager.cache_blocks(request, 8)
    assert state(manager.block_pool) == "free: 2 3 4 5 6 7 8 | in use: 1"


def test_a_stale_prefix_is_refused_and_changes_nothing():
    manager = make_manager(3)
    first = make_request("a", range(8))
    start(manager, first)
    manager.free(first)
    late = make_request("b", range(9))
    prefix = manager.get_computed_blocks(late)
    start(manager, make_request("c", range(50, 58)))
    before = state(manager.block_pool)
    with pytest.raises(InvalidBlockError, match="was evicted or reused since"):
        manager.allocate_slots(late, 1, prefix)
    assert state(manager.block_pool) == before


def test_a_prefix_for_a_request_with_blocks_is_refused():
    manager = make_manager()
    start(manager, make_request("a", range(8)))
    running = make_request("b", range(9))
    prefix = manager.get_computed_blocks(running)
    start(manager, running)
    with pytest.raises(InvalidArgumentError, match="has blocks already"):
        manager.allocate_slots(running, 1, prefix)


def test_hashes_of_another_block_size_change_nothing():
    manager = make_manager()
    request = Request("a", range(16), BlockHasher(block_size=8))
    with pytest.raises(InvalidArgumentError, match="has 16 tokens but hashes for 8"):
        manager.allocate_slots(request, 16)
    assert state(manager.block_pool) == "free: 1 2 3 4 5 6 7 8"


@pytest.mark.parametrize("field", ["all_token_ids", "lora_request", "mm_features", "cache_salt"])
def test_a_request_without_valid_event_keys_changes_nothing(field):
    manager = make_manager(enable_kv_cache_events=True)
    first = make_request("a", range(8))
    start(manager, first)
    manager.free(first)
    manager.take_events()
    before = state(manager.block_pool)
    whole = make_request("b", range(16))
    fields = {name: getattr(whole, name) for name in dir(whole) if not name.startswith("_")}
    del fields[field]
    partial = SimpleNamespace(**fields)
    prefix = manager.get_computed_blocks(partial)
    with pytest.raises(InvalidTypeError, match=f"cannot be reported in an event: .*{field}"):
        manager.allocate_slots(partial, 8, prefix)
    assert state(manager.block_pool) == before
    assert manager.take_events() == []


def test_hash_lookahead_delays_caching_of_the_last_block():
    manager = make_manager(num_hash_lookahead_tokens=2)
    hasher = BlockHasher("sha256", "s", 4, num_lookahead_tokens=2)
    request = Request("a", range(9), hasher)
    start(manager, request)
    assert state(manager.block_pool) == "free: 4 5 6 7 8 | in use: 1* 2 3"
    request.append_output_token_ids([9])
    manager.allocate_slots(request, 1)
    assert state(manager.block_pool) == "free: 4 5 6 7 8 | in use: 1* 2* 3"
    assert manager.get_computed_blocks(Request("b", range(12), hasher)).num_tokens == 8


def test_a_prefix_whose_keys_were_moved_is_stale():
    manager = make_manager()
    start(manager, make_request("a", range(8)))
    late = make_request("b", range(9))
    prefix = manager.get_computed_blocks(late)
    (copy,) = manager.block_pool.get_new_blocks(1)
    manager.block_pool.move_block_hashes(manager.block_pool.blocks[1], copy)
    with pytest.raises(InvalidBlockError, match="was evicted or reused since"):
        manager.allocate_slots(late, 1, prefix)


@pytest.mark.parametrize("count", [-1, 9])
def test_computed_tokens_without_slots_are_refused(count):
    manager = make_manager()
    request = make_request("a", range(12))
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = count
    with pytest.raises(InvalidArgumentError, match=f"has num_computed_tokens {count}, but holds 2 blocks"):
        manager.allocate_slots(request, 4)
    assert manager.get_block_ids("a") == [1, 2]


def test_a_freed_request_with_computed_tokens_is_refused():
    manager = make_manager()
    request = make_request("a", range(8))
    start(manager, request)
    manager.free(request)
    with pytest.raises(InvalidArgumentError, match="set num_computed_tokens to 0 when the request is freed"):
        manager.allocate_slots(request, 1)


def test_a_block_size_that_is_not_an_int_is_refused():
    with pytest.raises(InvalidTypeError, match="block_size is of type float; expected int"):
        KVCacheManager(BlockPool(9, True, 4), 4.0)


def test_a_request_that_began_without_tokens_grows():
    """It raised IndexError: the last of no blocks."""
    manager = KVCacheManager(RunBlockPool(40, True, 4))
    request = make_request("a", range(8))
    assert manager.allocate_slots(request, 0) == ((),)
    assert len(manager.allocate_slots(request, 8)[0]) == 2


def test_a_state_after_speculative_tokens_is_not_cached():
    """A step of 3 tokens from 5 on ends at 8, in the next block; that after 6 tokens is not written."""
    manager = KVCacheManager(BlockPool(9, True, 2), groups=[MambaSpec(block_size=2)])
    request = Request("a", range(6), BlockHasher("sha256", "s", 2))
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    manager.allocate_slots(request, 3)
    assert manager.get_computed_blocks(request, max_num_tokens=6).num_tokens == 0


def test_a_fork_with_other_tokens_is_refused():
    manager = make_manager()
    parent = make_request("a", range(8))
    start(manager, parent)
    parent.num_computed_tokens = 8
    child = make_request("b", [*range(7), 50])
    child.num_computed_tokens = 8
    before = state(manager.block_pool)
    with pytest.raises(InvalidArgumentError, match="their hashes differ"):
        manager.fork(parent, child)
    assert state(manager.block_pool) == before
    assert not manager.holds_blocks("b")


def test_a_second_request_with_an_id_in_use_is_refused():
    """The second request silently got the blocks of the first one."""
    manager = make_manager()
    start(manager, make_request("a", range(8)))
    twin = make_request("a", range(50, 58))
    prefix = manager.get_computed_blocks(twin)
    before = state(manager.block_pool)
    with pytest.raises(InvalidArgumentError, match="two requests with this id"):
        manager.allocate_slots(twin, 8, prefix)
    assert state(manager.block_pool) == before


def test_tokens_before_the_window_are_not_recomputed():
    """The request was given slots in the null block."""
    manager = KVCacheManager(
        BlockPool(20, True, 4), groups=[SlidingWindowSpec(block_size=4, sliding_window=4)]
    )
    request = make_request("a", range(20))
    assert manager.allocate_slots(request, 16) is not None
    request.num_computed_tokens = 16
    assert manager.allocate_slots(request, 4) is not None
    request.num_computed_tokens = 4
    with pytest.raises(InvalidArgumentError, match="its first 12 tokens have left the window of group 0"):
        manager.allocate_slots(request, 16)


def schedule_drafts(group, num_prompt, num_drafts):
    """Return a manager and a request after a step with drafts, which are counted as computed."""
    manager = KVCacheManager(BlockPool(80, True, 4), groups=[FullAttentionSpec(block_size=4), group])
    request = make_request("a", range(num_prompt))
    manager.allocate_slots(request, num_prompt)
    request.num_computed_tokens = num_prompt
    request.append_output_token_ids([100])
    manager.allocate_slots(request, 1 + num_drafts)
    request.num_computed_tokens += 1 + num_drafts
    return manager, request


@pytest.mark.parametrize("how", ["allocate_slots", "release_skipped_blocks"])
@pytest.mark.parametrize(
    "group",
    [
        SlidingWindowSpec(block_size=4, sliding_window=8),
        ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8),
        MambaSpec(block_size=4),
    ],
    ids=["window", "chunk", "state"],
)
def test_blocks_of_a_next_token_are_there_after_rejected_drafts(group, how):
    """Or the call is refused: blocks were released by the count that included the drafts."""
    num_lost = 0
    for num_prompt in range(8, 24):
        for num_drafts in range(1, 7):
            manager, request = schedule_drafts(group, num_prompt, num_drafts)
            if how == "allocate_slots":
                manager.allocate_slots(request, 1)
            else:
                manager.release_skipped_blocks(request, request.num_computed_tokens + 4)
            num_computed = request.num_computed_tokens = num_prompt + 1  # all drafts were rejected
            request.append_output_token_ids([101])
            first = manager._groups[1].count_skipped_tokens(num_computed) // 4
            needed = manager.get_block_ids("a", 1)[first : num_computed // 4 + 1]
            if 0 not in needed:
                assert manager.allocate_slots(request, 1) is not None
                continue
            num_lost += 1
            before = state(manager.block_pool)
            with pytest.raises(InvalidArgumentError, match="have left the window of group 1"):
                manager.allocate_slots(request, 1)
            with pytest.raises(InvalidArgumentError, match="pass num_in_flight_tokens"):
                manager.can_allocate(request, 1)
            assert state(manager.block_pool) == before
    assert num_lost


def test_the_windows_of_drafts_in_flight_are_kept():
    for num_prompt in range(8, 24):
        group = SlidingWindowSpec(block_size=4, sliding_window=8)
        manager, request = schedule_drafts(group, num_prompt, 4)
        manager.allocate_slots(request, 1, num_in_flight_tokens=5)
        request.num_computed_tokens = num_prompt + 1
        request.append_output_token_ids([101])
        assert manager.allocate_slots(request, 1) is not None
