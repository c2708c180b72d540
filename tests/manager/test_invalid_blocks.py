import pytest
from drawing import ids, state

from kv_pool import BlockHasher, BlockPool, BlockSwapper, InvalidBlockError, KVCacheManager, Request
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

HASHER = BlockHasher("sha256", "s", 4)


def make(num_blocks=12, groups=None):
    return KVCacheManager(BlockPool(num_blocks + 1, True, 4), groups=groups)


def start(manager, name, tokens, num_external=0, **options):
    request = Request(name, tokens, HASHER)
    prefix = manager.get_computed_blocks(request)
    num_new = request.num_tokens - prefix.num_tokens - num_external
    added = manager.allocate_slots(
        request, num_new, prefix, num_external_computed_tokens=num_external, **options
    )
    assert added is not None
    request.num_computed_tokens = request.num_tokens
    return request


def test_blocks_computed_from_a_bad_block_are_evicted_too():
    manager = make()
    start(manager, "a", range(18))
    start(manager, "b", range(50, 60))
    report = manager.report_invalid_blocks({2})
    assert report.num_valid_tokens == {"a": 4}
    assert sorted(ids(report.evicted_blocks)) == [2, 3, 4, 5]
    assert state(manager.block_pool) == "free: 9 10 11 12 | in use: 1* 2 3 4 5 6* 7* 8"


def test_what_another_request_has_computed_itself_stays():
    """In one step, two requests compute the same prefix; one of them is loaded, badly."""
    manager = make()
    prompts = [Request(name, range(18), HASHER) for name in "ab"]
    prefixes = [manager.get_computed_blocks(request) for request in prompts]
    for request, prefix in zip(prompts, prefixes, strict=True):
        assert manager.allocate_slots(request, 18, prefix) is not None
    report = manager.report_invalid_blocks([1])
    assert report.num_valid_tokens == {"a": 0}
    assert ids(report.evicted_blocks) == [1, 2, 3, 4, 5]
    assert manager.get_computed_blocks(Request("c", range(18), HASHER)).num_tokens == 16


def test_external_tokens_may_come_from_a_bad_block():
    manager = make()
    start(manager, "a", range(13))
    request = Request("b", range(13), HASHER)
    manager.allocate_slots(request, 1, num_external_computed_tokens=12, delay_cache_blocks=True)
    request.num_computed_tokens = 12
    manager.cache_blocks(request, 12)
    assert manager.report_invalid_blocks([1]).num_valid_tokens == {"a": 0, "b": 0}


def test_a_request_past_the_bad_block_is_named_if_it_shares_more():
    """The request continued with content that had been evicted as bad."""
    groups = [FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=6)]
    manager = make(groups=groups)
    for name, num_tokens in (("a", 17), ("b", 18)):
        request = Request(name, range(num_tokens), HASHER)
        prefix = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 16 if name == "a" else 2, prefix) is not None
    assert [manager.get_block_ids(name, 1) for name in ("a", "b")] == [[3, 4, 5, 6], [0, 0, 5, 6, 8]]
    report = manager.report_invalid_blocks([3, 4])
    assert report.num_valid_tokens == {"a": 0, "b": 0}
    assert {1, 2, 5, 6} < set(ids(report.evicted_blocks))


def test_what_follows_a_bad_block_of_unknown_length_is_evicted():
    """Its length was taken for one block, and longer blocks of the other group as proof that it is good."""
    manager = make(groups=[FullAttentionSpec(block_size=4), FullAttentionSpec(block_size=8)])
    manager.free(start(manager, "a", range(16)))
    keys = Request("b", range(16), HASHER).block_hashes
    bad, after = (manager.block_pool.get_cached_block(keys[place], [0])[0] for place in (2, 3))
    bad.num_key_tokens = -1  # as in a dump by a pool that did not know it
    assert after in manager.report_invalid_blocks([bad.block_id]).evicted_blocks


def test_a_request_never_continues_from_a_bad_state():
    manager = make(groups=[FullAttentionSpec(block_size=4), MambaSpec(block_size=4)])
    start(manager, "a", range(9))
    assert manager.report_invalid_blocks([2]).num_valid_tokens == {"a": 0}
    single = MambaSpec(block_size=100, has_states_at_block_ends=False)
    manager = KVCacheManager(BlockPool(13, False, 4), groups=[FullAttentionSpec(block_size=4), single])
    start(manager, "a", range(9))
    assert manager.report_invalid_blocks([2]).num_valid_tokens == {"a": 0}
    manager = make(groups=[FullAttentionSpec(block_size=4), CrossAttentionSpec(block_size=4)])
    start(manager, "a", range(9), num_encoder_tokens=4)
    assert manager.report_invalid_blocks([2]).num_valid_tokens == {"a": 4}
    (encoder_id,) = manager.get_block_ids("a", 1)
    assert manager.report_invalid_blocks([encoder_id]).num_valid_tokens == {"a": 0}


def test_an_invalid_report_changes_nothing():
    manager = make()
    start(manager, "a", range(12))
    before = state(manager.block_pool)
    for block_id in (0, -1, 13):
        with pytest.raises(InvalidBlockError, match="reported as invalid"):
            manager.report_invalid_blocks([2, block_id])
    assert state(manager.block_pool) == before
    assert manager.get_table("a").num_cached_blocks == 3


# ---- content that outlives its request ---------------------------------------------------------------


def count_hit(manager, tokens):
    return manager.get_computed_blocks(Request("probe", tokens, HASHER)).num_tokens


@pytest.mark.parametrize("way", ["loader freed", "sharer freed", "evict_blocks"])
def test_descendants_of_a_bad_block_do_not_come_back(way):
    """They were hit again as soon as their prefix was computed by another request."""
    manager = make(40)
    other = start(manager, "other", range(100, 117))
    manager.free(other)
    loader = start(manager, "loader", range(17), num_external=4)
    bad = manager.get_block_ids("loader")[0]
    if way == "sharer freed":
        manager.free(start(manager, "sharer", [*range(17), *range(50, 62)]))
    else:
        manager.free(loader)
    if way == "evict_blocks":
        manager.evict_blocks([bad])
    else:
        assert manager.report_invalid_blocks([bad]).num_valid_tokens == (
            {"loader": 0} if way == "sharer freed" else {}
        )
    if way == "sharer freed":
        manager.free(loader)
    start(manager, "next", range(5))
    assert count_hit(manager, [*range(17), *range(50, 62), 7]) == 4
    assert count_hit(manager, [*range(100, 117), 7]) == 16, "another prefix is kept"


GROUPS_THAT_FORGET = {
    "window": [SlidingWindowSpec(block_size=4, sliding_window=8)],
    "full and chunk": [
        FullAttentionSpec(block_size=4),
        ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8),
    ],
    "full and window": [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=8)],
    "state": [FullAttentionSpec(block_size=4), MambaSpec(block_size=4)],
}


@pytest.mark.parametrize("is_leased", [False, True])
@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("kind", GROUPS_THAT_FORGET)
def test_a_request_is_named_though_the_bad_block_has_left_it(kind, delays, is_leased):
    groups = GROUPS_THAT_FORGET[kind]
    manager = make(60, groups)
    group_id = len(groups) - 1
    request = Request("a", range(40), HASHER)
    prefix = manager.get_computed_blocks(request)
    options = {"num_external_computed_tokens": 12, "delay_cache_blocks": delays}
    assert manager.allocate_slots(request, 8, prefix, **options) is not None
    bad = next(block for block in reversed(manager.get_table("a", group_id).blocks[:3]) if not block.is_null)
    generation = bad.generation
    hold = manager.block_pool.hold([bad], "leased") if is_leased else None
    request.num_computed_tokens = 20
    for _ in range(4):
        manager.allocate_slots(request, 5, delay_cache_blocks=delays)
        request.num_computed_tokens += 5
    assert bad.generation != generation or bad not in manager.get_table("a", group_id).blocks
    if bad.generation != generation:
        assert not is_leased
        return  # it is reused, so that its id says nothing of the load
    assert manager.report_invalid_blocks([bad.block_id]).num_valid_tokens == {"a": 0}
    manager.free(request)
    assert count_hit(manager, [*range(40), 7]) <= 8
    if hold is not None:
        hold.release()


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("writer", ["parent", "child"])
def test_a_copy_of_a_bad_block_is_bad(writer, is_made):
    """Only the request that kept the block was named."""
    manager = make(30)
    parent = start(manager, "parent", range(14), num_external=13)
    child = Request("child", [*range(14), 70, 71, 72], HASHER)
    child.num_computed_tokens = 14
    manager.fork(parent, child)
    bad = manager.get_block_ids("parent")[3]
    parent.append_output_token_ids([60, 61, 62])
    for request in (parent, child) if writer == "parent" else (child, parent):
        assert manager.allocate_slots(request, 3) is not None
    if is_made:
        manager.take_block_copies()
        parent.num_computed_tokens = child.num_computed_tokens = 17
    report = manager.report_invalid_blocks([bad])
    assert report.num_valid_tokens == {"parent": 12, "child": 12}
    assert count_hit(manager, [*range(14), 60, 61, 62]) == count_hit(manager, [*range(14), 70, 71, 72]) == 12


# ---- host copies ---------------------------------------------------------------------------------------


def make_swapped(is_partial=False):
    """Return a manager, its swapper, a request that was loaded and is swapped out, and its old blocks."""
    manager = make(12)
    swapper = BlockSwapper(manager, BlockPool(31, True, 4, medium="CPU"))
    request = Request("a", range(10), HASHER)
    prefix = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 2, prefix, num_external_computed_tokens=8, delay_cache_blocks=is_partial)
    request.num_computed_tokens = 10
    table = manager.get_table("a").blocks.copy()
    swapper.swap_out(request).commit()
    return manager, swapper, request, table


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_swapped_out_request_is_named(is_partial):
    manager, swapper, request, table = make_swapped(is_partial)
    assert manager.report_invalid_blocks([table[1].block_id]).num_valid_tokens == {"a": 4}
    assert all(block.block_hash is None for block in swapper._host._tables["a"][0].blocks[1:])
    request.num_computed_tokens = 4
    plan = swapper.swap_in(request)
    plan.commit()
    assert manager.allocate_slots(request, 6) is not None
    assert count_hit(manager, range(10)) == 8
    manager.free(request)


@pytest.mark.parametrize("way", ["report_invalid_blocks", "evict_blocks"])
def test_an_open_plan_does_not_share_a_block_that_is_invalid(way):
    """A good request would have read the bad block of the host after its swap."""
    manager, swapper, _, table = make_swapped()
    manager.block_pool.evict_blocks([table[0].block_id, table[1].block_id])
    good = start(manager, "good", range(10))
    plan = swapper.swap_out(good)
    assert plan.num_shared_blocks == 2
    getattr(manager, way)([table[0].block_id])
    with pytest.raises(InvalidBlockError, match="abort it and make a new one"):
        plan.commit()
    with pytest.raises(InvalidBlockError, match="abort it and make a new one"):
        plan.apply(lambda moves: None)
    assert manager.holds_blocks("good"), "apply() has aborted the plan"
    assert len(swapper.swap_out(good).moves) == 3


def test_a_bad_block_that_left_before_it_was_cached_is_known():
    """It had no hash: what the full group computed from it stayed cached. Found by a random life."""
    full = FullAttentionSpec(block_size=4)
    manager = make(20, [full, ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8)])
    request = start(manager, "a", range(16), num_external=15, delay_cache_blocks=True)
    tables = [manager.get_table("a", group_id) for group_id in (0, 1)]
    last, bad = (table.blocks[3] for table in tables)
    manager.block_pool.hold([bad], "still loading")  # or the next step takes it
    request.append_output_token_ids([7])
    assert manager.allocate_slots(request, 1) is not None
    assert last.key is not None
    assert tables[1].blocks[3].is_null
    manager.free(request)
    manager.report_invalid_blocks([bad.block_id])
    assert last.key is None
    assert manager.get_computed_blocks(Request("b", range(17), HASHER)).num_tokens == 8


def test_a_window_that_has_moved_on_leaves_nothing_valid():
    """The second report repeated the tokens of the first, which the next token could no longer attend to."""
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=9)]
    manager = KVCacheManager(BlockPool(40, True, 4), groups=groups)
    request = Request("r", range(30), BlockHasher(block_size=4))
    other = Request("other", range(100, 104), BlockHasher(block_size=4))
    manager.allocate_slots(request, 18)
    request.num_computed_tokens = 18
    manager.allocate_slots(other, 4)
    manager.evict_blocks([manager.get_block_ids("r")[4]])
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 26
    manager.allocate_slots(request, 1)
    report = manager.report_invalid_blocks([manager.get_block_ids("other")[0]])
    assert report.num_valid_tokens == {"r": 0, "other": 0}
