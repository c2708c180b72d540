import random
from types import SimpleNamespace

import numpy as np
import pytest
from drawing import ids, state

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
from kv_pool.core import invariants
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

HASHER = BlockHasher("sha256", "s", 4)


def make_manager(num_blocks=8, **options):
    return KVCacheManager(BlockPool(num_blocks + 1, options.pop("caching", True), 4, **options))


def make_request(name, tokens):
    return Request(name, tokens, HASHER)


def start(manager, request):
    """Look up and allocate, as a scheduler does with a new request."""
    prefix = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
    if blocks is not None:
        request.num_computed_tokens = request.num_tokens
    return prefix.num_tokens, blocks


def test_a_prompt_gets_blocks_and_its_full_ones_are_cached():
    manager = make_manager()
    _, blocks = start(manager, make_request("a", range(10)))
    assert ids(blocks[0]) == manager.get_block_ids("a") == [1, 2, 3]
    assert state(manager.block_pool) == "free: 4 5 6 7 8 | in use: 1* 2* 3"
    assert manager.usage == pytest.approx(3 / 8)


def test_a_second_request_shares_the_prefix():
    manager = make_manager()
    start(manager, make_request("a", range(10)))
    hit, blocks = start(manager, make_request("b", [*range(8), 90, 91]))
    assert hit == 8
    assert ids(blocks[0]) == [4]
    assert manager.get_block_ids("b") == [1, 2, 4]
    assert state(manager.block_pool) == "free: 5 6 7 8 | in use: 1*x2 2*x2 3 4"


def test_looking_up_changes_nothing():
    manager = make_manager()
    first = make_request("a", range(8))
    start(manager, first)
    manager.free(first)
    before = state(manager.block_pool)
    assert manager.get_computed_blocks(make_request("b", range(9))).num_tokens == 8
    assert state(manager.block_pool) == before


def test_the_last_token_of_a_cached_prompt_is_recomputed():
    manager = make_manager()
    start(manager, make_request("a", range(8)))
    twin = make_request("b", range(8))
    assert manager.get_computed_blocks(twin).num_tokens == 4
    assert manager.get_computed_blocks(twin, max_num_tokens=8).num_tokens == 8
    start(manager, twin)
    assert manager.get_block_ids("b") == [1, 3]
    assert manager.block_pool.blocks[3].block_hash == manager.block_pool.blocks[2].block_hash
    invariants.check(manager.block_pool)


def test_a_freed_request_stays_cached_and_loses_its_tail_first():
    manager = make_manager(4)
    first = make_request("a", range(10))
    start(manager, first)
    manager.free(first)
    assert state(manager.block_pool) == "free: 3 4 2* 1*"
    hit, _ = start(manager, make_request("b", range(10)))
    assert hit == 8


def test_generated_tokens_take_a_block_when_needed():
    manager = make_manager()
    request = make_request("a", range(6))
    start(manager, request)
    taken = []
    for token in range(100, 107):
        request.append_output_token_ids([token])
        taken.append(ids(manager.allocate_slots(request, 1)[0]))
        request.num_computed_tokens += 1
    assert taken == [[], [], [3], [], [], [], [4]]
    assert state(manager.block_pool) == "free: 5 6 7 8 | in use: 1* 2* 3* 4"


def test_lookahead_slots_are_not_cached():
    manager = make_manager()
    request = make_request("a", range(6))
    assert ids(manager.allocate_slots(request, 6 + 6)[0]) == [1, 2, 3]
    assert state(manager.block_pool) == "free: 4 5 6 7 8 | in use: 1* 2 3"


def test_allocation_that_does_not_fit_is_none_without_change():
    manager = make_manager(4)
    start(manager, make_request("a", range(8)))
    before = state(manager.block_pool)
    assert start(manager, make_request("b", range(50, 64)))[1] is None
    assert state(manager.block_pool) == before
    with pytest.raises(InvalidArgumentError, match="request 'b' has no blocks"):
        manager.get_block_ids("b")


def test_free_hits_count_as_needed_blocks():
    """Four blocks, two of them free hits: a prompt of five blocks does not fit, although 2 + 3 are "free"."""
    manager = make_manager(4)
    first = make_request("a", range(8))
    start(manager, first)
    manager.free(first)
    before = state(manager.block_pool)
    assert start(manager, make_request("b", [*range(8), *range(50, 62)])) == (8, None)
    assert state(manager.block_pool) == before
    hit, blocks = start(manager, make_request("c", [*range(8), *range(50, 58)]))
    assert (hit, len(blocks[0])) == (8, 2)


def test_hits_are_not_taken_as_new_blocks():
    manager = make_manager(3)
    first = make_request("a", range(8))
    start(manager, first)
    manager.free(first)
    hit, blocks = start(manager, make_request("b", [*range(8), 1, 2, 3, 4]))
    assert hit == 8
    assert manager.get_block_ids("b") == [1, 2, 3]
    assert ids(blocks[0]) == [3]


def test_delayed_blocks_are_hit_after_cache_blocks():
    manager = make_manager()
    request = make_request("a", range(10))
    manager.allocate_slots(request, 10, delay_cache_blocks=True)
    assert manager.get_computed_blocks(make_request("b", range(10))).num_tokens == 0
    manager.cache_blocks(request, 5)
    assert manager.get_computed_blocks(make_request("b", range(10))).num_tokens == 4
    manager.cache_blocks(request, 10)
    manager.cache_blocks(request, 10)
    assert manager.get_computed_blocks(make_request("b", range(10))).num_tokens == 8


def test_caching_more_tokens_than_slots_is_refused():
    manager = make_manager()
    request = make_request("a", range(12))
    manager.allocate_slots(request, 4, delay_cache_blocks=True)
    with pytest.raises(InvalidArgumentError, match="has slots for 4 tokens, not 8"):
        manager.cache_blocks(request, 8)
    assert state(manager.block_pool) == "free: 2 3 4 5 6 7 8 | in use: 1"


def test_without_caching_there_are_no_hits():
    manager = make_manager(caching=False)
    start(manager, make_request("a", range(8)))
    assert manager.get_computed_blocks(make_request("b", range(8))).blocks == ([],)
    assert state(manager.block_pool) == "free: 3 4 5 6 7 8 | in use: 1 2"


def test_blocks_may_be_coarser_than_hashes():
    manager = KVCacheManager(BlockPool(9, True, 4), block_size=8)
    start(manager, make_request("a", range(20)))
    assert state(manager.block_pool) == "free: 4 5 6 7 8 | in use: 1* 2* 3"
    assert manager.get_computed_blocks(make_request("b", range(20))).num_tokens == 16
    assert manager.get_computed_blocks(make_request("c", [*range(12), 99])).num_tokens == 8
    with pytest.raises(InvalidArgumentError, match="block_size 6 is not a multiple"):
        KVCacheManager(BlockPool(9, True, 4), block_size=6)


def test_double_free_is_refused():
    manager = make_manager()
    request = make_request("a", range(4))
    start(manager, request)
    manager.free(request)
    with pytest.raises(InvalidArgumentError, match="request 'a' has no blocks: never allocated, or freed"):
        manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 8


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


def test_a_prefix_survives_the_eviction_of_other_blocks():
    manager = make_manager(4)
    for name, tokens in (("a", range(8)), ("x", range(50, 54))):
        request = make_request(name, tokens)
        start(manager, request)
        manager.free(request)
    late = make_request("b", range(9))
    prefix = manager.get_computed_blocks(late)
    manager.block_pool.evict_blocks({3})
    assert ids(manager.allocate_slots(late, 1, prefix)[0]) == [4]


def test_a_prefix_of_another_request_is_refused():
    manager = make_manager()
    start(manager, make_request("a", range(8)))
    prefix = manager.get_computed_blocks(make_request("b", range(9)))
    with pytest.raises(InvalidArgumentError, match="was found for request 'b', not 'c'"):
        manager.allocate_slots(make_request("c", range(9)), 1, prefix)


def test_a_prefix_for_a_request_with_blocks_is_refused():
    manager = make_manager()
    start(manager, make_request("a", range(8)))
    running = make_request("b", range(9))
    prefix = manager.get_computed_blocks(running)
    start(manager, running)
    with pytest.raises(InvalidArgumentError, match="has blocks already"):
        manager.allocate_slots(running, 1, prefix)


def test_a_negative_number_of_tokens_is_refused():
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match="num_new_tokens is -1"):
        manager.allocate_slots(make_request("a", range(4)), -1)


def test_hashes_of_another_block_size_change_nothing():
    manager = make_manager()
    request = Request("a", range(16), BlockHasher(block_size=8))
    with pytest.raises(InvalidArgumentError, match="has 16 tokens but hashes for 8"):
        manager.allocate_slots(request, 16)
    assert state(manager.block_pool) == "free: 1 2 3 4 5 6 7 8"


def test_a_reset_waits_for_running_requests():
    manager = make_manager(enable_kv_cache_events=True)
    request = make_request("a", range(8))
    start(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("b", range(8))).blocks == ([],)
    stored, cleared = manager.take_events()
    assert stored.kv_cache_spec_kind == "full_attention"
    assert type(cleared).__name__ == "AllBlocksCleared"


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_hit_what_a_slow_model_hits(seed):
    """The model finds the cached hashes by scanning blocks; tables only grow at their end."""
    rng = random.Random(seed)
    manager = make_manager(rng.randrange(3, 20))
    pool = manager.block_pool
    running, tables = {}, {}
    for step in range(150):
        roll = rng.random()
        if roll < 0.4:
            length = rng.randrange(1, 30)
            fork = rng.randrange(length + 1)
            request = make_request(
                str(step), [*range(fork), *(1000 + step + i for i in range(length - fork))]
            )
            cached = {block.block_hash for block in pool.blocks if block.block_hash}
            expected = 0
            for block_hash in request.block_hashes[: (length - 1) // 4]:
                if block_hash + b"\0\0\0\0" not in cached:
                    break
                expected += 4
            hit, blocks = start(manager, request)
            assert hit == expected
            if blocks is not None:
                running[request.request_id] = request
                tables[request.request_id] = manager.get_block_ids(request.request_id)
                assert len(tables[request.request_id]) == -(-length // 4)
        elif roll < 0.8 and running:
            request = rng.choice(list(running.values()))
            request.append_output_token_ids([rng.randrange(50)])
            if manager.allocate_slots(request, 1) is None:
                manager.free(running.pop(request.request_id))
                continue
            request.num_computed_tokens += 1
            table = manager.get_block_ids(request.request_id)
            before = tables[request.request_id]
            assert table[: len(before)] == before
            assert len(table) == -(-request.num_tokens // 4)
            tables[request.request_id] = table
        elif running:
            manager.free(running.pop(rng.choice(list(running))))
        invariants.check(pool)
        held = [block_id for name in running for block_id in manager.get_block_ids(name)]
        assert [block.ref_cnt for block in pool.blocks[1:]] == [
            held.count(block.block_id) for block in pool.blocks[1:]
        ]


@pytest.mark.parametrize("wrong", [2.0, "2", None])
def test_a_token_count_that_is_not_an_int_changes_nothing(wrong):
    manager = make_manager()
    first = make_request("a", range(8))
    start(manager, first)
    manager.free(first)
    before = state(manager.block_pool)
    late = make_request("b", range(9))
    prefix = manager.get_computed_blocks(late)
    with pytest.raises(InvalidTypeError, match=r"num_new_tokens is of type .*; expected int"):
        manager.allocate_slots(late, wrong, prefix)
    late.num_computed_tokens = wrong
    with pytest.raises(InvalidTypeError, match=r"num_computed_tokens is of type .*; expected int"):
        manager.allocate_slots(late, 1)
    assert state(manager.block_pool) == before


def test_numpy_integers_are_accepted_as_counts():
    manager = make_manager()
    assert ids(manager.allocate_slots(make_request("a", range(8)), np.int64(8))[0]) == [1, 2]


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


def test_hashes_that_are_not_bytes_change_nothing():
    manager = make_manager()
    request = make_request("a", range(8))
    request.block_hashes[1] = "text"
    with pytest.raises(InvalidTypeError, match="block hash 1 is a str; hashes are bytes"):
        manager.allocate_slots(request, 8)
    assert state(manager.block_pool) == "free: 1 2 3 4 5 6 7 8"


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


def test_a_hasher_with_smaller_blocks_is_refused():
    manager = make_manager()
    request = Request("a", range(8), BlockHasher(block_size=2))
    with pytest.raises(InvalidArgumentError, match="has 8 tokens but hashes for 16"):
        manager.get_computed_blocks(request)
    with pytest.raises(InvalidArgumentError, match="has 8 tokens but hashes for 16"):
        manager.allocate_slots(request, 8)
    assert state(manager.block_pool) == "free: 1 2 3 4 5 6 7 8"


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


def test_an_empty_prefix_of_another_request_is_refused():
    manager = make_manager()
    prefix = manager.get_computed_blocks(make_request("b", range(9)))
    assert prefix.blocks == ([],)
    with pytest.raises(InvalidArgumentError, match="was found for request 'b', not 'c'"):
        manager.allocate_slots(make_request("c", range(9)), 9, prefix)


def test_only_events_of_its_own_group_say_full_attention():
    manager = make_manager(enable_kv_cache_events=True)
    request = make_request("a", range(8))
    start(manager, request)
    blocks = manager.block_pool.get_new_blocks(2)
    manager.block_pool.cache_full_blocks(request, blocks, 0, 2, 4, 5)
    kinds = [event.kv_cache_spec_kind for event in manager.take_events()]
    assert kinds == ["full_attention", None]


def test_a_block_size_that_is_not_an_int_is_refused():
    with pytest.raises(InvalidTypeError, match="block_size is of type float; expected int"):
        KVCacheManager(BlockPool(9, True, 4), 4.0)


def test_a_request_grows_into_the_ids_after_its_own():
    manager = KVCacheManager(RunBlockPool(40, True, 4))
    request = make_request("a", range(30))
    for num_tokens in (16, 1, 4, 9):
        manager.allocate_slots(request, num_tokens)
        request.num_computed_tokens += num_tokens
    first = manager.get_block_ids("a")[0]
    assert manager.get_block_ids("a") == list(range(first, first + 8))


def test_a_request_continues_in_the_ids_after_its_prefix():
    manager = KVCacheManager(RunBlockPool(40, True, 4))
    first = make_request("first", range(16))
    start(manager, first)
    manager.free(first)
    second = make_request("second", range(30))
    prefix = manager.get_computed_blocks(second)
    manager.allocate_slots(second, 30 - prefix.num_tokens, prefix)
    ids_of_second = manager.get_block_ids("second")
    assert ids_of_second == list(range(ids_of_second[0], ids_of_second[0] + 8))


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


def test_the_last_holder_of_a_forked_block_writes_in_place():
    manager = make_manager()
    parent = make_request("a", range(5))
    start(manager, parent)
    children = []
    for name in ("b", "c"):
        child = make_request(name, range(5))
        child.num_computed_tokens = 5
        manager.fork(parent, child)
        children.append(child)
    for request in (*children, parent):
        request.append_output_token_ids([7])
        assert manager.allocate_slots(request, 1) == ((),)
    assert [manager.get_block_ids(name) for name in "abc"] == [[1, 2], [1, 3], [1, 4]]
    assert [tuple(copy) for copy in manager.take_block_copies()] == [(2, 3), (2, 4)]
    invariants.check(manager.block_pool)


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


def test_seeds_of_hashers_keep_two_managers_of_a_pool_apart():
    pool = BlockPool(41, True, 4)
    target, draft = KVCacheManager(pool), KVCacheManager(pool)
    start(target, Request("a", range(13), BlockHasher("sha256", "target", 4)))
    assert start(draft, Request("b", range(13), BlockHasher("sha256", "draft", 4)))[0] == 0
    # With the same seed, one model would hit what the other has computed.
    assert start(draft, Request("c", range(13), BlockHasher("sha256", "target", 4)))[0] == 12


def test_the_manager_frees_no_block_of_another_pool():
    manager, other = make_manager(), make_manager()
    own, foreign = manager.take_blocks(1), other.take_blocks(1)
    with pytest.raises(InvalidBlockError, match="belongs to another pool"):
        manager.free_blocks([*own, *foreign])
    assert (own[0].ref_cnt, foreign[0].ref_cnt) == (1, 1)
    manager.free_blocks(own)
    other.free_blocks(foreign)


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
