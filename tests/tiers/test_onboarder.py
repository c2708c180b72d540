"""Tests of `TierOnboarder`: evicted blocks are loaded from host memory and disk, and nothing else is."""

import pytest
from tiers.tier_engine import TierEngine

from kv_pool import (
    BlockHasher,
    BlockPool,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVCacheManager,
    MultiModalFeature,
    PlaceholderRange,
    PlanClosedError,
    PoolInterruptedError,
    PrefixRules,
    Request,
)
from kv_pool.core import invariants as core_invariants
from kv_pool.manager.block_groups.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.storage.block_storage import make_host_buffer
from kv_pool.tiers import invariants
from kv_pool.tiers.host_tier import HostTier, view_rows
from kv_pool.tiers.onboarder import OnboardPlan, TierOnboarder
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache


def make_engine(tmp_path, *args, **options):
    return TierEngine(tmp_path / "tier", *args, **options)


def run_and_free(engine, name, first, num_tokens=16):
    request = engine.make_request(name, range(first, first + num_tokens))
    assert engine.compute(request) is not None
    engine.manager.free(request)
    return request


def again(engine, request):
    return engine.make_request(request.request_id + "'", request.all_token_ids)


def fill(engine, num_requests=3):
    """Run requests of four full blocks and one token each; the device keeps the blocks of the last one."""
    return [run_and_free(engine, f"r{number}", 100 * number, 17) for number in range(num_requests)]


def start_fork(engine):
    """Start a fork whose private block completes a block of a prompt that the tiers have."""
    first, *_ = fill(engine, 4)
    parent = engine.make_request("parent", first.all_token_ids[:10])
    engine.compute(parent)
    child = engine.make_request("child", first.all_token_ids[:12])
    child.num_computed_tokens = 10
    engine.manager.fork(parent, child)
    assert engine.grow(child, 2)
    assert len(engine.manager.copies) == 1
    return first, child


def test_admit_continues_a_prefix_completed_by_a_fork(tmp_path):
    """`admit` refused it until the copies were made, but the documented order makes them later."""
    engine = make_engine(tmp_path, num_blocks=12)
    first, child = start_fork(engine)
    request = again(engine, first)
    assert engine.start(request) == (12, 4)
    engine.run()
    for computed in (child, request):
        engine.check(computed)
    engine.check_cached()
    invariants.check(engine.onboarder)


def test_aborted_plan_leaves_no_copy_into_a_free_block(tmp_path):
    engine = make_engine(tmp_path, num_blocks=12)
    first, child = start_fork(engine)
    plan = make_plan(engine, again(engine, first))
    engine.scheduled.clear()
    engine.manager.free(child)
    assert len(engine.manager.copies) == 1
    plan.abort()
    assert engine.manager.take_block_copies() == []
    core_invariants.check(engine.pool)


def make_plan(engine, request, num_new_tokens=1):
    prefix = engine.manager.get_computed_blocks(request)
    hit = engine.onboarder.find_prefix(request, prefix)
    return engine.onboarder.plan_onboard(request, hit, prefix, num_new_tokens=num_new_tokens)


def test_abort_restores_the_state(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, request := again(engine, first))
    [hold] = engine.pool.holds.list_holds()
    assert hold.blocks[::-1] == plan.list_blocks()
    invariants.check(engine.onboarder)
    with pytest.raises(InvalidBlockError, match="are not all loaded"):
        plan.commit()
    plan.load()
    plan.abort()
    assert engine.pool.holds.list_immovable_ids() == []
    assert engine.manager.get_num_free_blocks() == 8
    assert engine.manager.get_computed_blocks(request).num_tokens == 0
    assert engine.onboarder.find_prefix(request).num_tokens == 16
    for close in (plan.abort, plan.commit, plan.load, plan.apply):
        with pytest.raises(PlanClosedError, match="already aborted"):
            close()
    assert engine.onboarder.get_statistics().num_aborted == 1
    invariants.check(engine.onboarder)


def test_commit_is_refused_after_invalidation(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, request := again(engine, first))
    assert plan.load()
    engine.cache.forget(engine.keys_of(first)[2:3])
    assert not plan.apply()
    assert engine.onboarder.find_prefix(request).num_tokens == 8
    invariants.check(engine.onboarder)


def test_admit_returns_tokens_by_medium(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    request = again(engine, first)
    assert engine.onboarder.admit(request) == {"GPU": 0, "CPU": 4, "STORAGE": 12}
    same = engine.make_request("same", first.all_token_ids)
    assert engine.onboarder.admit(same, max_prefix_tokens=8) == {"GPU": 8, "CPU": 0, "STORAGE": 0}
    assert same.num_computed_tokens == 8
    assert engine.onboarder.get_statistics().num_tokens_by_medium == {"GPU": 8, "CPU": 4, "STORAGE": 12}
    invariants.check(engine.onboarder)


def test_admit_with_an_unreadable_block_uses_those_before_it(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=1)
    first, *_ = fill(engine, 4)
    engine.damage(engine.keys_of(first)[2])
    request = again(engine, first)
    assert engine.onboarder.admit(request, 3) == {"GPU": 0, "CPU": 0, "STORAGE": 8}
    assert request.num_computed_tokens == 8
    assert len(engine.manager.get_block_ids(request.request_id)) == 3
    assert engine.onboarder.get_statistics().num_unreadable == 1
    invariants.check(engine.onboarder)


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("num_new_tokens", [None, 8])
@pytest.mark.parametrize("write", ["back", "through"])
def test_admit_caches_the_same_blocks_with_a_hit_in_tiers(tmp_path, delays, num_new_tokens, write):
    """After a hit in tiers only the loaded blocks were cached: 2 of 5 instead of all."""
    engine = make_engine(tmp_path, num_host_blocks=30, write=write)
    where = {}
    for name, has_hit in (("hit", True), ("none", False)):
        if has_hit:
            run_and_free(engine, "first", 0, 8)
            run_and_free(engine, "other", 500, 25)
        request = engine.make_request(name, range(0 if has_hit else 900, 20 if has_hit else 920))
        found = engine.onboarder.admit(request, num_new_tokens, delay_cache_blocks=delays)
        assert sum(found.values()) == (8 if has_hit else 0)
        where[name] = engine.where(request)
        engine.schedule(request, num_new_tokens or 20 - request.num_computed_tokens)
        engine.run()
        engine.manager.free(request)
        engine.check_cached()
        invariants.check(engine.onboarder)
    if delays:
        assert where == {"hit": "DD---", "none": "-----"}
    else:
        all_of_it = num_new_tokens is None
        assert where == {"hit": "DDDDD" if all_of_it else "DDDD-", "none": "DDDDD" if all_of_it else "DD---"}


@pytest.mark.parametrize("rules", [None, PrefixRules(retention_interval=4)])
@pytest.mark.parametrize(
    "window", [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=8)]
)
def test_admit_caches_the_loaded_state_and_the_next_one(rules, window):
    """Without rules, the loaded one can be hit in the same step; the one that the step writes, after it."""
    pool = BlockPool(19, True, 4)
    manager = KVCacheManager(pool, groups=[window, MambaSpec(block_size=4)], prefix_rules=rules)
    onboarder = TierOnboarder(manager, TieredCache(pool, None, [Tier(60)]))

    def start(name, num_tokens, first=0, max_prefix_tokens=None):
        request = Request(name, range(first, first + num_tokens), BlockHasher("sha256", block_size=4))
        return request, onboarder.admit(request, max_prefix_tokens=max_prefix_tokens)

    for first, num_tokens in ((0, 16), (100, 60)):
        for end in range(4, num_tokens + 1, 4):  # a step that ends there has a state there
            manager.take_block_copies()
            manager.free(start("old", end, first)[0])
    manager.take_block_copies()
    assert start("new", 24)[1] == {"GPU": 0, "CPU": 16}
    written = start("written", 17, 0, 16)[1]
    assert written == (None if rules else {"GPU": 16, "CPU": 0})
    assert start("unwritten", 25)[1] is None
    manager.take_block_copies()
    assert start("unwritten", 25)[1] == {"GPU": 24, "CPU": 0}
    core_invariants.check(pool)


def test_admit_without_free_blocks_changes_nothing(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    engine.compute(engine.make_request("big", range(500, 525)))
    statistics, num_free = engine.onboarder.get_statistics(), engine.manager.get_num_free_blocks()
    for request in (again(engine, first), engine.make_request("new", range(800, 817))):
        assert engine.onboarder.admit(request) is None
        assert request.num_computed_tokens == 0
        assert not engine.manager.holds_blocks(request.request_id)
    assert engine.onboarder.get_statistics() == statistics
    assert engine.manager.get_num_free_blocks() == num_free
    invariants.check(engine.onboarder)


def test_failed_copy_aborts_the_plan(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=30)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, request := again(engine, first))
    host = engine.cache.tiers[0]._storage
    copy, host._copy = host._copy, None  # not callable: the copy fails
    with pytest.raises(RuntimeError, match=r"copying 4 blocks .* failed"):
        plan.apply()
    host._copy = copy
    assert plan.state.value == "aborted"
    assert engine.compute(request) == (0, 16)


def fail_once(part, name, error):
    """Let the next call of this method raise an error."""

    def fail(*args):
        setattr(part, name, method)
        raise error

    method = getattr(part, name)
    setattr(part, name, fail)


@pytest.mark.parametrize("error", [ZeroDivisionError("odd tier"), KeyboardInterrupt()])
def test_after_an_error_of_a_tier_the_plan_can_be_aborted(tmp_path, error):
    """`apply` raised PoolInterruptedError instead of the tier's error."""
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, again(engine, first))
    fail_once(engine.cache.tiers[1], "load", error)
    with pytest.raises(type(error)):
        plan.apply()
    engine.manager.repair()
    assert engine.onboarder.list_open_plans() == [plan]
    plan.abort()
    assert engine.manager.get_num_free_blocks() == 8
    invariants.check(engine.onboarder)


@pytest.mark.parametrize("where", ["load", "commit"])
def test_an_interrupted_admit_leaves_no_plan_behind(tmp_path, where):
    """Its plan stayed open, and nothing that the caller had could abort it."""
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    request = again(engine, first)
    if where == "load":
        fail_once(engine.cache.tiers[1], "load", KeyboardInterrupt())
    else:
        fail_once(OnboardPlan, "_commit", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.onboarder.admit(request)
    for other in (request, engine.make_request("other", range(800, 817))):
        with pytest.raises(PoolInterruptedError):
            engine.onboarder.admit(other)
    engine.manager.repair()
    assert engine.onboarder.list_open_plans() == []
    assert engine.manager.get_num_free_blocks() == 8
    assert engine.onboarder.admit(request) == {"GPU": 0, "CPU": 0, "STORAGE": 0}
    invariants.check(engine.onboarder)


def test_failed_offload_loses_only_its_blocks(tmp_path, caplog):
    engine = make_engine(tmp_path)
    copy, engine.device._copy = engine.device._copy, None
    first, *_ = fill(engine, 3)
    engine.device._copy = copy
    assert engine.cache.num_dropped > 0
    assert "were not offloaded" in caplog.text
    assert engine.compute(again(engine, first)) == (0, 0)
    engine.check_cached()
    invariants.check(engine.onboarder)


@pytest.mark.parametrize("how", ["evict", "report"])
def test_invalidated_content_is_not_found_again(tmp_path, how):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    engine.compute(request := again(engine, first))
    keys = engine.keys_of(first)
    wrong = engine.manager.get_block_ids(request.request_id)[1]
    if how == "evict":
        engine.manager.evict_blocks([wrong])
    else:
        engine.manager.report_invalid_blocks([wrong])
    void = keys[1:]
    assert not any(key in engine.cache for key in void)
    engine.manager.free(request)
    for number in range(4):
        run_and_free(engine, f"other{number}", 5000 + 100 * number, 17)
    assert not any(key in engine.cache for key in void)
    engine.restart_tiers()
    assert not any(key in engine.cache for key in void)
    invariants.check(engine.onboarder)


def test_descendants_of_a_bad_block_are_found_in_all_tiers(tmp_path):
    """A block that was offloaded and loaded again is a second device block, and its request was not named."""
    engine = make_engine(tmp_path, num_blocks=12, num_host_blocks=6, num_disk_blocks=30)
    tokens = range(17)
    loader = engine.make_request("loader", tokens)
    prefix = engine.manager.get_computed_blocks(loader)
    engine.manager.allocate_slots(loader, 13, prefix, num_external_computed_tokens=4)
    loader.num_computed_tokens = 17
    first = engine.manager.get_table("loader").blocks[0]
    hold = engine.pool.hold([first], "a load that fails")
    engine.manager.free(loader)
    other = run_and_free(engine, "other", 5000, 41)  # everything else goes to the tiers
    engine.pool.evict_blocks([first.block_id])  # the host tier gets the prefix from elsewhere
    keys = engine.keys_of(loader)
    engine.cache._note_parents([])
    assert [engine.cache.find_tier(key) is not None for key in keys] == [False, True, True, True]
    num_other = sum(key in engine.cache for key in engine.keys_of(other))
    engine.manager.report_invalid_blocks([first.block_id])
    assert not any(key in engine.cache for key in keys)
    assert sum(key in engine.cache for key in engine.keys_of(other)) == num_other, "another prefix is kept"
    hold.release()


@pytest.mark.parametrize("knows", [True, False])
def test_descendants_are_found_on_a_disk_after_a_restart(tmp_path, knows):
    engine = make_engine(tmp_path)
    if not knows:
        engine.cache.tiers[1].parents = {}  # a folder of an earlier version
    first, second, *_ = fill(engine, 6)
    assert engine.where(first) == engine.where(second) == "SSSS"
    engine.restart_tiers()
    engine.compute(request := again(engine, engine.make_request("r", first.all_token_ids[:5])))
    (bad, _) = engine.manager.get_block_ids(request.request_id)
    engine.manager.report_invalid_blocks([bad])
    assert engine.where(first) == "----"
    assert engine.where(second) == ("SSSS" if knows else "----")
    engine.manager.free(request)


def test_a_block_loaded_from_a_tier_is_bad_if_its_original_is(tmp_path):
    engine = make_engine(tmp_path, num_blocks=14)
    first, *_ = fill(engine, 6)
    requests = [engine.make_request(name, first.all_token_ids) for name in "xy"]
    engine.compute(requests[0])
    original = engine.manager.get_table("x").blocks[1]
    key = original.block_hash
    engine.pool._maybe_evict_cached_block(original)
    engine.compute(requests[1])
    loaded = engine.manager.get_table("y").blocks[1]
    assert loaded is not original
    assert loaded.block_hash == key
    engine.pool._insert_block_hash(key, original, 8)
    named = engine.manager.report_invalid_blocks([original.block_id]).num_valid_tokens
    assert named == {"x": 4, "y": 4}
    assert key not in engine.cache
    assert loaded.block_hash is None


def test_a_plan_is_void_though_its_content_is_stored_again(tmp_path):
    """The tier had the key again at the commit, for other bytes than the plan had read."""
    engine = make_engine(tmp_path, num_host_blocks=20)
    first, *_ = fill(engine, 4)
    request = again(engine, first)
    prefix = engine.manager.get_computed_blocks(request)
    plan = engine.onboarder.plan_onboard(request, engine.onboarder.find_prefix(request, prefix), prefix)
    assert plan.load()
    engine.manager.report_invalid_blocks([plan.list_blocks()[-1].block_id])
    assert not any(key in engine.cache for key in plan.keys)
    engine.cache.tiers[0].put(plan.keys, engine.device, [1] * len(plan.keys))
    with pytest.raises(InvalidBlockError, match="abort the plan"):
        plan.commit()
    plan.abort()


@pytest.mark.parametrize("groups", [None, (FullAttentionSpec(block_size=8),)])
def test_written_through_blocks_need_no_copy_on_eviction(tmp_path, groups):
    engine = make_engine(tmp_path, num_host_blocks=30, write="through", groups=groups)
    first = run_and_free(engine, "first", 0, 17)
    assert not any(key in engine.cache for key in engine.keys_of(first)), "flushed before the step wrote them"
    engine.cache.flush()
    assert all(key in engine.cache for key in engine.keys_of(first))
    engine.check_cached()
    num_stored = engine.cache.get_statistics()[0].num_stored
    engine.start(engine.make_request("other", range(900, 931)))
    engine.cache.flush_evicted()
    assert engine.cache.get_statistics()[0].num_stored == num_stored
    engine.run()
    engine.check_cached()
    invariants.check(engine.onboarder)


@pytest.mark.parametrize("is_reused", [True, False])
def test_blocks_cached_after_their_step_are_stored(tmp_path, is_reused):
    """By the next flush, or when they are reused before it."""
    engine = make_engine(tmp_path, num_host_blocks=30, write="through")
    request = engine.make_request("a", range(17))
    assert engine.manager.allocate_slots(request, 17, delay_cache_blocks=True) is not None
    engine.schedule(request, 17)
    engine.run()
    if is_reused:
        engine.manager.free(request)
        engine.compute(engine.make_request("other", range(900, 931)))
        assert engine.where(request) == "HHHH"
    engine.cache.flush()
    assert all(key in engine.cache.tiers[0] for key in engine.keys_of(request))
    engine.check_cached()
    invariants.check(engine.onboarder)


def test_blocks_reused_before_they_are_written_are_not_stored(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=30, write="through")
    request = engine.make_request("a", range(17))
    assert engine.manager.allocate_slots(request, 17) is not None
    engine.manager.free(request)
    engine.compute(engine.make_request("other", range(900, 931)))
    assert engine.where(request) == "----"
    engine.check_cached()


def test_partial_blocks_are_not_stored(tmp_path):
    engine = make_engine(tmp_path, groups=(FullAttentionSpec(block_size=8),))
    request = engine.make_request("a", range(21))
    engine.compute(request)
    table = engine.manager.get_table("a").blocks
    key = engine.pool.cache_partial_block(request, table[2], 20, 0, 8)
    assert key is not None
    engine.manager.free(request)
    engine.pool.get_new_blocks(8)
    engine.cache.flush()
    assert engine.cache.tiers[0].list_keys() == engine.keys_of(request)[::-1]


def test_only_blocks_inside_a_window_are_read(tmp_path):
    groups = (
        FullAttentionSpec(block_size=4),
        SlidingWindowSpec(block_size=4, sliding_window=5),
    )
    engine = make_engine(tmp_path, num_blocks=20, num_host_blocks=60, groups=groups)
    first = run_and_free(engine, "first", 0, 33)
    run_and_free(engine, "second", 500, 35)
    request = again(engine, first)
    plan = make_plan(engine, request)
    assert len(plan.keys) == 8 + 1
    assert plan.apply()
    request.num_computed_tokens = plan.num_computed_tokens
    engine.check(request)
    engine.check_cached()
    invariants.check(engine.onboarder)


def test_prefetch_reads_blocks_into_host_memory(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=8)
    first, *_ = fill(engine, 6)
    assert engine.where(first) == "SSSS"
    request = again(engine, first)
    assert engine.onboarder.prefetch(request) == 4
    assert engine.cache.wait_for_prefetch(60)
    assert engine.where(first) == "SSSS", "only a flush moves blocks"
    engine.cache.flush()
    assert engine.where(first) == "HHHH"
    assert engine.onboarder.prefetch(request) == 0
    engine.check_cached()
    assert engine.compute(request) == (0, 16)
    assert engine.onboarder.get_statistics().num_tokens_by_medium == {"GPU": 0, "CPU": 16, "STORAGE": 0}
    invariants.check(engine.onboarder)


def test_prefetch_is_limited_to_half_the_host_tier(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=4)
    first, *_ = fill(engine, 4)
    assert engine.where(first) == "SSSS"
    assert engine.onboarder.prefetch(again(engine, first)) == 2
    assert engine.cache.wait_for_prefetch(60)
    engine.cache.flush()
    assert engine.where(first) == "HHSS"
    assert engine.onboarder.prefetch(again(engine, first)) == 2


@pytest.mark.parametrize("why", ["cancelled", "forgotten", "reset", "closed"])
def test_cancelled_or_outdated_prefetch_is_dropped(tmp_path, why):
    engine = make_engine(tmp_path, num_host_blocks=8)
    first, *_ = fill(engine, 6)
    request = again(engine, first)
    engine.onboarder.prefetch(request)
    if why == "cancelled":
        engine.onboarder.cancel_prefetch(request.request_id)
    elif why == "forgotten":
        engine.cache.forget(engine.keys_of(first))
    elif why == "reset":
        assert engine.manager.reset_prefix_cache()
    else:
        engine.cache.close()
        return
    assert engine.cache.wait_for_prefetch(60)
    engine.cache.flush()
    assert engine.where(first) == ("SSSS" if why == "cancelled" else "----")
    engine.check_cached()
    invariants.check(engine.onboarder)


def test_prefetch_counts_unreadable_blocks(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=8)
    first, *_ = fill(engine, 6)
    engine.damage(engine.keys_of(first)[1])
    engine.onboarder.prefetch(again(engine, first))
    assert engine.cache.wait_for_prefetch(60)
    engine.cache.flush()
    assert engine.where(first) == "H-HH"
    assert engine.cache.get_statistics()[1].num_read_errors == 1
    engine.check_cached()


def test_plan_refuses_other_hits_and_requests_with_blocks(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    request, other = again(engine, first), engine.make_request("other", range(9))
    hit = engine.onboarder.find_prefix(request)
    with pytest.raises(InvalidArgumentError, match="this is request 'other'"):
        engine.onboarder.plan_onboard(other, hit)
    plan = engine.onboarder.plan_onboard(request, hit)
    with pytest.raises(InvalidArgumentError, match="already has an open plan"):
        engine.onboarder.plan_onboard(request, hit)
    assert plan.apply()
    with pytest.raises(InvalidArgumentError, match="has blocks already; free them first"):
        engine.onboarder.plan_onboard(request, hit)
    engine.manager.free(request)
    hit = engine.onboarder.find_prefix(request)
    engine.cache.forget(engine.keys_of(first))
    with pytest.raises(InvalidBlockError, match="call find_prefix"):
        engine.onboarder.plan_onboard(request, hit)


def test_mixing_tiers_with_and_without_bytes_is_refused(tmp_path):
    engine = make_engine(tmp_path)
    engine.cache.close()
    for storage, tiers, write, message in (
        (engine.device, [Tier(4)], "back", "has no bytes"),
        (None, engine.cache.tiers[:1], "back", "has bytes"),
        (None, [], "back", "tiers is empty"),
        (None, [Tier(4)], "sideways", "back, through"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            TieredCache(engine.pool, storage, tiers, write)
    TieredCache(engine.pool, None, [Tier(4)])
    with pytest.raises(InvalidArgumentError, match="already has lower tiers"):
        TieredCache(engine.pool, None, [Tier(4)])


def test_pending_blocks_cannot_be_moved(tmp_path):
    engine = make_engine(tmp_path)
    first = run_and_free(engine, "first", 0, 17)
    engine.pool.holds.clock = lambda: 3.0
    taken = engine.pool.get_new_blocks(8)
    with pytest.raises(InvalidBlockError, match="C3: block 2 is not yet offloaded to a lower tier"):
        engine.pool.swap_block_ids([(1, 2)])
    [report] = engine.pool.explain_holds(2)
    assert (report.since, report.is_movable, report.has_references) == (3.0, False, False)
    engine.cache.flush()
    engine.check_cached()
    assert engine.where(first).count("-") == 0
    assert engine.pool.explain_holds(2) == []
    engine.pool.swap_block_ids([(1, 2)])
    engine.pool.free_blocks(taken)


class WithinBlocks:
    """States and attention over blocks of 8 tokens, hashes over 4: a hit may end within a block.

    The tiers have the first 40 tokens of `prompt`; the device has its first 12, one and a half blocks.
    """

    prompt = tuple(range(1, 41))

    def __init__(self, *sizes):
        self.device = make_host_buffer(8, 13, "the test")
        self.rows = view_rows(self.device)
        self.hasher = BlockHasher(block_size=4)
        self.pool = BlockPool(13, True, 4)
        groups = [FullAttentionSpec(block_size=8), MambaSpec(block_size=8)]
        self.manager = KVCacheManager(self.pool, groups=groups, prefix_rules=PrefixRules())
        media = ("CPU", "STORAGE")
        tiers = [
            HostTier(size, self.device, None, medium) for size, medium in zip(sizes, media, strict=False)
        ]
        self.cache = TieredCache(self.pool, self.device, tiers)
        self.onboarder = TierOnboarder(self.manager, self.cache)
        self.run(self.prompt[:33], 8, 8, 8, 8, 1)
        for number in (1, 2, 3):
            self.run(range(60 * number, 60 * number + 72), *[8] * 9)
        self.run(self.prompt[:13], 12, 1)

    def make_request(self, name, num_tokens):
        return Request(name, self.prompt[:num_tokens], self.hasher)

    def run(self, token_ids, *steps):
        request = Request("ended", token_ids, self.hasher)
        for number, num_tokens in enumerate(steps):
            prefix = self.manager.get_computed_blocks(request) if number == 0 else None
            assert self.manager.allocate_slots(request, num_tokens, prefix) is not None
            self.cache.flush()
            self.write(request, num_tokens)
        self.manager.free(request)

    def write(self, request, num_tokens):
        for source, target in self.manager.take_block_copies():
            self.rows[target] = self.rows[source]
        blocks = self.manager.get_table(request.request_id).blocks
        for position in range(request.num_computed_tokens, request.num_computed_tokens + num_tokens):
            token = request.all_token_ids[position]
            self.rows[blocks[position // 8].block_id, position % 8] = token % 256
        request.num_computed_tokens += num_tokens


def test_a_load_behind_a_hit_within_a_block_is_not_overwritten():
    """The copy of the hit's last block came after the load, and the block was cached with both contents."""
    engine = WithinBlocks(50)
    request = engine.make_request("r", 33)
    assert engine.onboarder.admit(request) == {"GPU": 0, "CPU": 32}
    engine.write(request, 1)
    ids = engine.manager.get_block_ids("r")[:4]
    assert engine.rows[ids].ravel().tolist() == list(engine.prompt[:32])


@pytest.mark.parametrize("num_tokens", [13, 17, 25, 33])
def test_the_tokens_of_a_hit_within_a_block_add_up(num_tokens):
    """It raised IndexError, or left out the tokens of the block that the device has in part."""
    engine = WithinBlocks(1, 50)
    request = engine.make_request("r", num_tokens)
    found = engine.onboarder.admit(request)
    assert sum(found.values()) == request.num_computed_tokens
    assert request.num_computed_tokens == (32 if num_tokens == 33 else 12)


def test_options_that_admit_refuses_change_nothing(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    request = again(engine, first)
    for option in ("num_lookahead_tokens", "num_external_computed_tokens"):
        with pytest.raises(InvalidArgumentError, match=option):
            engine.onboarder.admit(request, **{option: -1})
        invariants.check(engine.onboarder)


class Bare:
    """A request with some attributes of another one only."""

    def __init__(self, request, **others):
        names = ("request_id", "all_token_ids", "lora_request", "mm_features", "cache_salt", "num_tokens")
        for name in (*names, "block_hashes", "num_computed_tokens"):
            setattr(self, name, others.get(name, getattr(request, name)))


@pytest.mark.parametrize("rules", [None, PrefixRules()])
@pytest.mark.parametrize("num_cached", [0, 8])
def test_what_cannot_be_cached_is_refused_before_it_has_blocks(num_cached, rules):
    pool = BlockPool(40, True, 4)
    manager = KVCacheManager(pool, prefix_rules=rules)
    cache = TieredCache(pool, None, [Tier(50)])
    onboarder = TierOnboarder(manager, cache)
    hasher = BlockHasher(block_size=4)
    for name, tokens in (("old", range(num_cached)), ("large", range(1000, 1156))):
        if tokens:
            request = Request(name, tokens, hasher)
            manager.allocate_slots(request, len(tokens))
            request.num_computed_tokens = len(tokens)
            manager.free(request)
    whole = Request("new", range(20), hasher)
    bare = Bare(whole, block_hashes=whole.block_hashes[:3] if rules is None else whole.block_hashes)
    assert onboarder.find_both(Request("new", range(20), hasher))[1].num_tokens == num_cached
    match = "has 20 tokens but hashes for 12" if rules is None else "a request with num_prompt_tokens"
    with pytest.raises(InvalidArgumentError if rules is None else InvalidTypeError, match=match):
        onboarder.admit(bare)
    assert not manager.holds_blocks("new")
    assert (bare.num_computed_tokens, pool.get_num_free_blocks()) == (0, 39)
    assert sum(onboarder.admit(whole).values()) == num_cached


@pytest.mark.parametrize(
    ("groups", "rules", "images", "num_hit"),
    [
        ((), PrefixRules(), (), 16),
        ((), PrefixRules(eagle_groups=[0]), (), 12),  # as on the device
        ((CrossAttentionSpec(block_size=4),), PrefixRules(), ("one",), 16),
        ((CrossAttentionSpec(block_size=4),), PrefixRules(), ("one", "two"), 0),  # the hashes lack the second
    ],
)
def test_tiers_hit_what_the_device_may_hit(groups, rules, images, num_hit):
    pool, hasher = BlockPool(10, True, 4), BlockHasher(block_size=4)
    manager = KVCacheManager(pool, groups=[FullAttentionSpec(block_size=4), *groups], prefix_rules=rules)
    onboarder = TierOnboarder(manager, TieredCache(pool, None, [Tier(20, "CPU")]))
    features = [
        MultiModalFeature(image, PlaceholderRange(9 * place, 2)) for place, image in enumerate(images)
    ]
    options = {"num_encoder_tokens": 2 * len(features)} if groups else {}
    first, second = (
        Request(name, range(17), hasher, mm_features=made)
        for name, made in (("first", features[:1]), ("second", features))
    )
    assert manager.allocate_slots(first, 17, **options) is not None
    manager.free(first)
    pool.free_blocks(pool.get_new_blocks(9))
    assert onboarder.admit(second, **options) == {"GPU": 0, "CPU": num_hit}
