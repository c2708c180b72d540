import random

import pytest
from drawing import ids, state

from kv_pool import BlockHasher, BlockPool, BlockSwapper, InvalidBlockError, KVCacheManager, Request
from kv_pool.core import invariants
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


def test_the_request_recomputes_and_caches_its_blocks_again():
    manager = make()
    request = start(manager, "a", range(18))
    request.num_computed_tokens = manager.report_invalid_blocks([3]).num_valid_tokens["a"]
    assert request.num_computed_tokens == 8
    assert manager.allocate_slots(request, 10) is not None
    assert manager.get_block_ids("a") == [1, 2, 3, 4, 5]
    assert state(manager.block_pool) == "free: 6 7 8 9 10 11 12 | in use: 1* 2* 3* 4* 5"


def test_requests_that_share_a_bad_block_recompute_it_separately():
    manager = make()
    first = start(manager, "a", range(12))
    second = start(manager, "b", [*range(8), 90, 91])
    assert manager.get_block_ids("b") == [1, 2, 4]
    report = manager.report_invalid_blocks([2])
    assert report.num_valid_tokens == {"a": 4, "b": 4}
    for request in (first, second):
        request.num_computed_tokens = 4
        assert manager.allocate_slots(request, request.num_tokens - 4) is not None
        request.num_computed_tokens = request.num_tokens
    assert manager.get_block_ids("a")[:1] == manager.get_block_ids("b")[:1] == [1]
    assert not set(manager.get_block_ids("a")[1:]) & set(manager.get_block_ids("b")[1:])
    assert manager.take_block_copies() == []
    manager.free(first)
    manager.free(second)
    invariants.check(manager.block_pool)
    assert manager.get_num_free_blocks() == 12


def test_a_free_cached_block_can_be_bad_too():
    manager = make()
    manager.free(start(manager, "a", range(12)))
    report = manager.report_invalid_blocks([2])
    assert report.num_valid_tokens == {}
    assert manager.get_computed_blocks(Request("b", range(12), HASHER)).num_tokens == 4


def test_groups_of_other_block_sizes_lose_later_tokens():
    manager = make(groups=[FullAttentionSpec(block_size=4), FullAttentionSpec(block_size=8)])
    start(manager, "a", range(17))
    bad = manager.get_block_ids("a", 0)[3]
    report = manager.report_invalid_blocks([bad])
    assert report.num_valid_tokens == {"a": 12}
    evicted = {*manager.get_block_ids("a", 0)[3:], *manager.get_block_ids("a", 1)[1:]}
    assert set(ids(report.evicted_blocks)) == evicted


def test_a_request_continues_only_from_a_complete_window():
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=9)]
    manager = make(16, groups=groups)
    request = start(manager, "a", range(16))
    request.append_output_token_ids([1])
    manager.allocate_slots(request, 1)
    assert manager.get_table("a", 1).num_null_blocks == 2
    bad = manager.get_block_ids("a", 0)
    assert manager.report_invalid_blocks([bad[4]]).num_valid_tokens == {"a": 16}
    assert manager.report_invalid_blocks([bad[3]]).num_valid_tokens == {"a": 0}


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


def test_a_request_never_continues_from_a_bad_state():
    manager = make(groups=[FullAttentionSpec(block_size=4), MambaSpec(block_size=4)])
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


@pytest.mark.parametrize("kind", GROUPS_THAT_FORGET)
def test_windows_and_states_of_an_ended_request_are_evicted(kind):
    """A window needs no earlier block: its wrong blocks were hit at once."""
    manager = make(60, GROUPS_THAT_FORGET[kind])
    group_id = len(manager.groups) - 1
    request = start(manager, "a", range(32), num_external=12)
    bad = [block for block in manager.get_table("a", group_id).blocks[:3] if not block.is_null]
    manager.free(request)
    assert manager.report_invalid_blocks([bad[-1].block_id]).num_valid_tokens == {}
    assert count_hit(manager, [*range(32), 7]) <= 8
    start(manager, "b", range(12))
    manager.take_block_copies()
    assert count_hit(manager, [*range(32), 7]) <= 12
    start(manager, "c", range(32))
    assert count_hit(manager, [*range(32), 7]) == 32


def test_content_from_a_bad_encoder_does_not_outlive_its_request():
    manager = make(groups=[FullAttentionSpec(block_size=4), CrossAttentionSpec(block_size=4)])
    request = start(manager, "a", range(9), num_encoder_tokens=4)
    (encoder_id,) = manager.get_block_ids("a", 1)
    manager.free(request)
    assert manager.report_invalid_blocks([encoder_id]).num_valid_tokens == {}
    assert count_hit(manager, range(9)) == 0


def test_a_good_block_with_the_same_key_stays():
    """The request that continues with a descendant of the bad block, after its good twin, was not named."""
    manager = make(30)
    twin = Request("twin", range(17), HASHER)
    loader = Request("loader", range(17), HASHER)
    nothing = [manager.get_computed_blocks(request) for request in (twin, loader)]
    manager.allocate_slots(twin, 4, nothing[0])
    manager.allocate_slots(loader, 13, nothing[1], num_external_computed_tokens=4)
    twin.num_computed_tokens, loader.num_computed_tokens = 4, 17
    good, bad = manager.get_block_ids("twin")[0], manager.get_block_ids("loader")[0]
    sharer = start(manager, "sharer", [*range(16), 7, 8])
    assert manager.get_block_ids("sharer")[:2] == [good, manager.get_block_ids("loader")[1]]
    for request in (twin, loader):
        manager.free(request)
    assert manager.report_invalid_blocks([bad]).num_valid_tokens == {"sharer": 4}
    assert count_hit(manager, range(17)) == 4
    sharer.num_computed_tokens = 4
    assert manager.allocate_slots(sharer, 14) is not None
    assert count_hit(manager, range(17)) == 16


def test_a_request_that_computed_everything_itself_is_not_named():
    manager = make(30)
    first, second = (Request(name, range(17), HASHER) for name in ("first", "second"))
    nothing = manager.get_computed_blocks(first), manager.get_computed_blocks(second)
    for request, prefix in zip((first, second), nothing, strict=True):
        manager.allocate_slots(request, 17, prefix)
        request.num_computed_tokens = 17
    bad = manager.get_block_ids("first")[1]
    assert manager.report_invalid_blocks([bad]).num_valid_tokens == {"first": 4}
    assert count_hit(manager, range(17)) == 16


def test_further_reports_never_name_more_valid_tokens():
    manager = make(30)
    request = start(manager, "a", range(18))
    table = manager.get_block_ids("a")
    assert manager.report_invalid_blocks([table[1]]).num_valid_tokens == {"a": 4}
    assert manager.report_invalid_blocks([table[3]]).num_valid_tokens == {"a": 4}
    request.num_computed_tokens = 4
    assert manager.allocate_slots(request, 14) is not None
    request.num_computed_tokens = 18
    assert manager.report_invalid_blocks([table[3]]).num_valid_tokens == {"a": 12}


def test_a_request_named_again_replaces_what_it_shares():
    manager = make(20)
    parent = start(manager, "parent", range(18))
    child = Request("child", range(18), HASHER)
    child.num_computed_tokens = 18
    manager.fork(parent, child)
    manager.evict_blocks([2])
    for request in (parent, child):  # they go on nevertheless
        request.append_output_token_ids([60, 61])
        assert manager.allocate_slots(request, 2) is not None
        request.num_computed_tokens += 2
    report = manager.report_invalid_blocks([manager.get_block_ids("parent")[4]])
    child.num_computed_tokens = report.num_valid_tokens["child"]
    assert child.num_computed_tokens == 4
    assert manager.allocate_slots(child, 16) is not None
    shared = set(manager.get_block_ids("parent")) & set(manager.get_block_ids("child"))
    assert shared == {1}


def test_a_request_caches_nothing_after_evict_blocks():
    manager = make(30)
    request = start(manager, "a", range(18))
    manager.evict_blocks([manager.get_block_ids("a")[1]])
    request.append_output_token_ids(range(50, 60))
    manager.allocate_slots(request, 10)
    request.num_computed_tokens = 28
    manager.cache_blocks(request, 28)
    assert count_hit(manager, [*range(18), *range(50, 60)]) == 4
    start(manager, "b", range(9))
    assert count_hit(manager, [*range(18), *range(50, 60)]) == 8


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


@pytest.mark.parametrize("ended", ["parent", "child", "both"])
def test_a_continued_copy_of_a_bad_block_is_evicted(ended):
    manager = make(30)
    parent = start(manager, "parent", range(14), num_external=13)
    child = Request("child", [*range(14), 70, 71, 72], HASHER)
    child.num_computed_tokens = 14
    manager.fork(parent, child)
    bad = manager.get_block_ids("parent")[3]
    parent.append_output_token_ids([60, 61, 62])
    assert manager.allocate_slots(parent, 3) is not None  # in a copy
    assert manager.allocate_slots(child, 3) is not None
    manager.take_block_copies()
    parent.num_computed_tokens = child.num_computed_tokens = 17
    for request in (parent, child):
        if ended in (request.request_id, "both"):
            manager.free(request)
    named = manager.report_invalid_blocks([bad]).num_valid_tokens
    assert named == {name: 12 for name in ("parent", "child") if ended not in (name, "both")}
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


def test_host_copies_of_ended_requests_are_evicted():
    manager, swapper, request, table = make_swapped()
    swapper.drop(request)
    manager.report_invalid_blocks([table[0].block_id])
    assert not len(swapper.host_pool.cached_block_hash_to_block)


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


def test_a_request_in_an_open_plan_is_named():
    manager = make(12)
    swapper = BlockSwapper(manager, BlockPool(31, True, 4, medium="CPU"))
    request = start(manager, "a", range(14))
    bad = manager.get_block_ids("a")[1]
    plan = swapper.swap_out(request)
    assert manager.report_invalid_blocks([bad]).num_valid_tokens == {"a": 4}
    plan.commit()
    assert state(swapper.host_pool).endswith("in use: 1* 2 3 4")


def test_a_reset_evicts_host_copies_or_is_refused():
    manager, swapper, request, _ = make_swapped()
    assert not manager.reset_prefix_cache(), "a request is swapped out"
    swapper.drop(request)
    assert manager.reset_prefix_cache()
    assert not len(swapper.host_pool.cached_block_hash_to_block)


@pytest.mark.parametrize("seed", range(100))
def test_random_reports_leave_no_bad_content_to_hit(seed):
    """Random requests over few tokens; the model tracks each block's content by the requests' writes."""
    chance = random.Random(seed)
    manager = make(20)
    running, num_hit = {}, {}
    for number in range(30):
        if chance.random() < 0.6:
            tokens = [token for _ in range(chance.randint(1, 4)) for token in [chance.randint(0, 1)] * 4]
            request = Request(f"r{number}", [*tokens, 7], HASHER)
            prefix = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None:
                request.num_computed_tokens = request.num_tokens
                running[request.request_id] = request
                num_hit[request.request_id] = prefix.num_tokens // 4
        elif running and chance.random() < 0.5:
            manager.free(running.pop(chance.choice(list(running))))
        elif running:
            held = sorted({block_id for name in running for block_id in manager.get_block_ids(name)})
            bad = set(chance.sample(held, min(len(held), chance.randint(1, 2))))
            tables = {name: manager.get_block_ids(name) for name in running}
            # What a request with a bad block has computed after it is bad, too. The contents of bad blocks
            # are known by the prompts of those that held them.
            wrong = set(bad)
            for _ in tables:
                least = {
                    name: 4 * min(place for place, block_id in enumerate(table) if block_id in wrong)
                    for name, table in tables.items()
                    if wrong & set(table)
                }
                wrong |= {
                    block_id
                    for name, num_valid in least.items()
                    for place, block_id in enumerate(tables[name])
                    if place >= max(num_valid // 4, num_hit[name])
                }
            prefixes = {
                tuple(running[name].all_token_ids[: (place + 1) * 4])
                for name, table in tables.items()
                for place, block_id in enumerate(table)
                if block_id in bad
            }
            report = manager.report_invalid_blocks(bad)
            expected = report.num_valid_tokens
            assert expected.keys() >= least.keys()
            for name, num_valid in expected.items():
                assert num_valid <= least.get(name, 1000)
                tokens = tuple(running[name].all_token_ids)
                assert any(tokens[: len(prefix)] == prefix for prefix in prefixes), "another prompt"
            assert set(ids(report.evicted_blocks)) >= wrong
            for block in report.evicted_blocks:
                assert block.block_hash is None
            for name, num_valid in expected.items():
                request = running[name]
                request.num_computed_tokens = num_valid
                if manager.allocate_slots(request, request.num_tokens - num_valid) is None:
                    request.num_computed_tokens = 0
                    manager.free(running.pop(name))
                else:
                    request.num_computed_tokens = request.num_tokens
            manager.take_block_copies()
            writers = [
                block_id
                for name in expected
                if name in running
                for block_id in manager.get_block_ids(name)[expected[name] // 4 :]
            ]
            assert len(writers) == len(set(writers))
        invariants.check(manager.block_pool)
    for request in running.values():
        manager.free(request)
    assert manager.get_num_free_blocks() == 20


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
