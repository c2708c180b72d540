"""Blocks that the device gave up come back from host memory and from disk, and nothing else does."""

import pytest
from tiers.tier_engine import TierEngine

from kv_pool import InvalidArgumentError, InvalidBlockError, PlanClosedError
from kv_pool.core import invariants as core_invariants
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.tiers import invariants
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
    """Requests of four full blocks and a token each, of which the device keeps the last's."""
    return [run_and_free(engine, f"r{number}", 100 * number, 17) for number in range(num_requests)]


def test_blocks_go_from_the_device_to_host_memory_to_disk(tmp_path):
    engine = make_engine(tmp_path)
    requests = fill(engine, 4)
    assert [engine.where(request) for request in requests] == ["HSSS", "HHHH", "DDDH", "DDDD"]
    engine.check_cached()
    invariants.check(engine.read_back)


def test_a_request_goes_on_from_what_the_tiers_have(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    before = engine.where(first)
    assert "S" in before
    request = again(engine, first)
    prefix = engine.manager.get_computed_blocks(request)
    hit = engine.read_back.find_prefix(request, prefix)
    assert prefix.num_tokens + hit.num_tokens == 16
    assert hit.num_tokens_by_medium == {"CPU": 4 * before.count("H"), "STORAGE": 4 * before.count("S")}
    assert engine.compute(request) == (0, 16)
    told = engine.read_back.get_statistics()
    assert told.num_tokens_by_medium == {"GPU": 0, **hit.num_tokens_by_medium}
    assert engine.where(first) == "DDDD"
    assert all(key in engine.cache for key in engine.keys_of(first)), "they stay where they were read"
    engine.check_cached()
    invariants.check(engine.read_back)


def test_what_was_read_back_is_not_copied_again(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=30)
    first, *_ = fill(engine, 4)
    engine.compute(request := again(engine, first))
    engine.manager.free(request)
    num_stored = engine.cache.tiers[0].get_statistics().num_stored
    other = run_and_free(engine, "other", 700, 29)
    gone = engine.where(first).count("H")
    assert gone
    del other
    assert engine.cache.tiers[0].get_statistics().num_stored - num_stored < 7, "less than was taken"
    engine.check_cached()


def test_looking_changes_nothing(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    order = [tier.list_keys() for tier in engine.cache.tiers]
    request = again(engine, first)
    hit = engine.read_back.find_prefix(request, engine.manager.get_computed_blocks(request))
    assert hit.num_tokens == 16
    assert engine.read_back.find_prefix(request, None, max_num_tokens=11).num_tokens == 8
    assert [tier.list_keys() for tier in engine.cache.tiers] == order


def test_blocks_that_are_taken_in_this_step_can_be_hit_in_it(tmp_path):
    engine = make_engine(tmp_path, num_blocks=12)
    first, *_ = fill(engine, 3)
    other = engine.make_request("other", range(900, 909))
    assert engine.start(other) == (0, 0)
    pending = engine.cache.list_pending()
    assert set(pending) & set(engine.keys_of(first))
    request = again(engine, first)
    num_device, num_tiers = engine.start(request)
    assert num_device + num_tiers == 16
    assert num_tiers > 0
    engine.run()
    engine.check_cached()
    invariants.check(engine.read_back)


def start_fork(engine):
    """In this step a fork gets a block of its own, which completes a block of a prompt that tiers have."""
    first, *_ = fill(engine, 4)
    parent = engine.make_request("parent", first.all_token_ids[:10])
    engine.compute(parent)
    child = engine.make_request("child", first.all_token_ids[:12])
    child.num_computed_tokens = 10
    engine.manager.fork(parent, child)
    assert engine.grow(child, 2)
    assert len(engine.manager.copies) == 1
    return first, child


def test_a_prefix_that_a_fork_completes_in_this_step_is_read_on_from_tiers(tmp_path):
    """`admit` refused it until the copies were made, which the documented order does after it."""
    engine = make_engine(tmp_path, num_blocks=12)
    first, child = start_fork(engine)
    request = again(engine, first)
    assert engine.start(request) == (12, 4)
    engine.run()
    for computed in (child, request):
        engine.check(computed)
    engine.check_cached()
    invariants.check(engine.read_back)


def test_a_plan_that_outlives_a_fork_leaves_no_copy_into_a_free_block(tmp_path):
    engine = make_engine(tmp_path, num_blocks=12)
    first, child = start_fork(engine)
    plan = make_plan(engine, again(engine, first))
    engine.scheduled.clear()
    engine.manager.free(child)
    assert len(engine.manager.copies) == 1
    plan.abort()
    assert engine.manager.take_block_copies() == []
    core_invariants.check(engine.pool)


def test_no_room_changes_nothing(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    engine.compute(engine.make_request("big", range(500, 525)))
    order = [tier.list_keys() for tier in engine.cache.tiers]
    num_free = engine.manager.get_num_free_blocks()
    request = again(engine, first)
    assert engine.start(request) is None
    assert [sorted(tier.list_keys()) for tier in engine.cache.tiers] == [sorted(keys) for keys in order]
    assert engine.manager.get_num_free_blocks() == num_free
    assert not engine.read_back.list_open_plans()
    invariants.check(engine.read_back)


def make_plan(engine, request, num_new_tokens=1):
    prefix = engine.manager.get_computed_blocks(request)
    hit = engine.read_back.find_prefix(request, prefix)
    return engine.read_back.plan_read_back(request, hit, prefix, num_new_tokens=num_new_tokens)


def test_an_aborted_plan_leaves_no_trace(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, request := again(engine, first))
    assert sorted(engine.read_back.list_device_ids_in_flight()) == sorted(
        block.block_id for block in plan.list_blocks()
    )
    [hold] = engine.pool.holds.list_holds()
    assert [block.block_id for block in hold.blocks] == engine.read_back.list_device_ids_in_flight()
    invariants.check(engine.read_back)
    plan.load()
    plan.abort()
    assert engine.pool.holds.list_fixed_ids() == []
    assert engine.manager.get_num_free_blocks() == 8
    assert engine.manager.get_computed_blocks(request).num_tokens == 0
    assert engine.read_back.find_prefix(request).num_tokens == 16
    for close in (plan.abort, plan.commit, plan.load, plan.apply):
        with pytest.raises(PlanClosedError, match="aborted before"):
            close()
    assert engine.read_back.get_statistics().num_aborted == 1
    invariants.check(engine.read_back)


def test_a_plan_that_was_not_loaded_is_not_committed(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, again(engine, first))
    with pytest.raises(InvalidBlockError, match="not all blocks"):
        plan.commit()
    assert plan.apply()


def test_what_is_found_wrong_while_a_plan_is_open_is_not_committed(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, request := again(engine, first))
    assert plan.load()
    engine.cache.forget(engine.keys_of(first)[2:3])
    assert not plan.apply()
    assert engine.read_back.find_prefix(request).num_tokens == 8
    invariants.check(engine.read_back)


def test_tiers_give_nothing_up_that_an_open_plan_reads(tmp_path):
    engine = make_engine(tmp_path, num_blocks=12, num_host_blocks=4, num_disk_blocks=0)
    first = run_and_free(engine, "first", 0, 17)
    run_and_free(engine, "second", 100, 45)
    plan = make_plan(engine, request := again(engine, first))
    run_and_free(engine, "third", 200, 25)
    assert engine.cache.num_dropped > 0
    assert plan.apply()
    request.num_computed_tokens = plan.num_computed_tokens
    engine.check(request)
    engine.check_cached()
    invariants.check(engine.read_back)


def damage(engine, key):
    """Flip a byte of a block on disk."""
    slot = engine.cache.tiers[1].get_slot(key)
    with open(engine.folder / "blocks", "r+b") as file:
        file.seek(slot * 4096)
        first = file.read(1)
        file.seek(slot * 4096)
        file.write(bytes([first[0] ^ 255]))


def test_a_block_that_cannot_be_read_makes_the_prefix_shorter(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=1)
    first, *_ = fill(engine, 4)
    damage(engine, engine.keys_of(first)[2])
    plan = make_plan(engine, request := again(engine, first))
    assert not plan.apply()
    assert plan.is_unreadable
    assert engine.pool.get_num_free_blocks() == 8
    assert engine.compute(request) == (0, 8)
    assert engine.read_back.get_statistics().num_unreadable == 1
    assert engine.cache.get_statistics()[1].num_read_errors == 1
    engine.check_cached()
    invariants.check(engine.read_back)


def test_a_request_is_admitted_with_what_is_where(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    request = again(engine, first)
    assert engine.read_back.admit(request) == {"GPU": 0, "CPU": 4, "STORAGE": 12}
    assert request.num_computed_tokens == 16
    assert len(engine.manager.get_block_ids(request.request_id)) == 5
    same = engine.make_request("same", first.all_token_ids)
    assert engine.read_back.admit(same, max_prefix_tokens=8) == {"GPU": 8, "CPU": 0, "STORAGE": 0}
    assert same.num_computed_tokens == 8
    assert engine.read_back.get_statistics().num_tokens_by_medium == {"GPU": 8, "CPU": 4, "STORAGE": 12}
    invariants.check(engine.read_back)


def test_where_a_block_can_not_be_read_a_request_is_admitted_with_the_blocks_before_it(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=1)
    first, *_ = fill(engine, 4)
    damage(engine, engine.keys_of(first)[2])
    request = again(engine, first)
    assert engine.read_back.admit(request, 3) == {"GPU": 0, "CPU": 0, "STORAGE": 8}
    assert request.num_computed_tokens == 8
    assert len(engine.manager.get_block_ids(request.request_id)) == 3
    assert engine.read_back.get_statistics().num_unreadable == 1
    invariants.check(engine.read_back)


def test_blocks_that_are_still_to_be_computed_become_findable_when_they_are_cached(tmp_path):
    engine = make_engine(tmp_path)
    request = engine.make_request("a", range(9))
    assert engine.read_back.admit(request, delay_cache_blocks=True) == {"GPU": 0, "CPU": 0, "STORAGE": 0}
    assert engine.where(request) == "--"
    engine.schedule(request, 9)
    engine.run()
    assert engine.where(request) == "DD"


def test_a_request_without_room_is_not_admitted_and_nothing_changes(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    engine.compute(engine.make_request("big", range(500, 525)))
    statistics, num_free = engine.read_back.get_statistics(), engine.manager.get_num_free_blocks()
    for request in (again(engine, first), engine.make_request("new", range(800, 817))):
        assert engine.read_back.admit(request) is None
        assert request.num_computed_tokens == 0
        assert not engine.manager.holds_blocks(request.request_id)
    assert engine.read_back.get_statistics() == statistics
    assert engine.manager.get_num_free_blocks() == num_free
    invariants.check(engine.read_back)


def test_a_copy_that_breaks_off_aborts_the_plan(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=30)
    first, *_ = fill(engine, 4)
    plan = make_plan(engine, request := again(engine, first))
    host = engine.cache.tiers[0]._storage
    copy, host._copy = host._copy, None  # not callable: breaks off
    with pytest.raises(RuntimeError, match="broke off"):
        plan.apply()
    host._copy = copy
    assert plan.state.value == "aborted"
    assert engine.compute(request) == (0, 16)


def test_a_copy_to_a_tier_that_breaks_off_loses_the_block_and_no_more(tmp_path, caplog):
    engine = make_engine(tmp_path)
    copy, engine.device._copy = engine.device._copy, None
    first, *_ = fill(engine, 3)
    engine.device._copy = copy
    assert engine.cache.num_dropped > 0
    assert "were not stored" in caplog.text
    assert engine.compute(again(engine, first)) == (0, 0)
    engine.check_cached()
    invariants.check(engine.read_back)


@pytest.mark.parametrize("how", ["evict", "report"])
def test_content_that_was_found_wrong_does_not_come_back(tmp_path, how):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    engine.compute(request := again(engine, first))
    keys = engine.keys_of(first)
    wrong = engine.manager.get_block_ids(request.request_id)[1]
    if how == "evict":
        engine.manager.evict_blocks([wrong])
        void = keys[1:2]
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
    invariants.check(engine.read_back)


def test_a_reset_of_the_prefix_cache_empties_the_tiers(tmp_path):
    engine = make_engine(tmp_path)
    requests = fill(engine, 4)
    assert engine.manager.reset_prefix_cache()
    assert [len(tier) for tier in engine.cache.tiers] == [0, 0]
    engine.restart_tiers()
    assert [engine.compute(again(engine, request)) for request in requests[:1]] == [(0, 0)]


def test_blocks_that_were_on_disk_are_found_after_a_restart(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=1, num_disk_blocks=30)
    requests = fill(engine, 4)
    engine.cache.flush()
    engine.cache.close()
    other = make_engine(tmp_path, num_disk_blocks=30)
    other.promised = engine.promised
    assert other.cache.tiers[1].reopened.num_dropped == 0
    assert other.compute(again(other, requests[0]))[1] >= 12
    other.check_cached()


@pytest.mark.parametrize("groups", [None, (FullAttentionSpec(block_size=8),)])
def test_written_through_blocks_need_no_copy_when_they_go(tmp_path, groups):
    engine = make_engine(tmp_path, num_host_blocks=30, write="through", groups=groups)
    first = run_and_free(engine, "first", 0, 17)
    assert not any(key in engine.cache for key in engine.keys_of(first)), "not written yet when flushed"
    engine.cache.flush()
    assert all(key in engine.cache for key in engine.keys_of(first))
    engine.check_cached()
    num_stored = engine.cache.get_statistics()[0].num_stored
    engine.start(engine.make_request("other", range(900, 931)))
    engine.cache.store_pending()
    assert engine.cache.get_statistics()[0].num_stored == num_stored
    engine.run()
    engine.check_cached()
    invariants.check(engine.read_back)


def test_blocks_cached_after_their_step_are_stored_if_they_are_taken_before_the_next_flush(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=30, write="through")
    request = engine.make_request("a", range(17))
    assert engine.manager.allocate_slots(request, 17, delay_cache_blocks=True) is not None
    engine.schedule(request, 17)
    engine.run()
    engine.manager.free(request)
    assert engine.start(engine.make_request("other", range(900, 931))) == (0, 0)
    engine.run()
    assert engine.where(request) == "HHHH"
    engine.check_cached()
    invariants.check(engine.read_back)


def test_blocks_cached_after_their_step_are_written_through_by_the_next_flush(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=30, write="through")
    request = engine.make_request("a", range(17))
    assert engine.manager.allocate_slots(request, 17, delay_cache_blocks=True) is not None
    engine.schedule(request, 17)
    engine.run()
    engine.cache.flush()
    assert set(engine.cache.tiers[0].list_keys()) == set(engine.keys_of(request))
    engine.check_cached()


def test_blocks_that_are_taken_before_the_step_that_was_to_write_them_are_not_stored(tmp_path):
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


def test_of_a_window_only_what_is_attended_to_is_read(tmp_path):
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
    invariants.check(engine.read_back)


def test_blocks_that_wait_are_read_ahead_into_host_memory(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=8)
    first, *_ = fill(engine, 6)
    assert engine.where(first) == "SSSS"
    request = again(engine, first)
    assert engine.read_back.prefetch(request) == 4
    assert engine.cache.wait_for_prefetch(60)
    assert engine.where(first) == "SSSS", "nothing changes but in a flush"
    engine.cache.flush()
    assert engine.where(first) == "HHHH"
    assert engine.read_back.prefetch(request) == 0
    engine.check_cached()
    assert engine.compute(request) == (0, 16)
    assert engine.read_back.get_statistics().num_tokens_by_medium == {"GPU": 0, "CPU": 16, "STORAGE": 0}
    invariants.check(engine.read_back)


def test_no_more_is_read_ahead_than_half_the_host_memory(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=4)
    first, *_ = fill(engine, 4)
    assert engine.where(first) == "SSSS"
    assert engine.read_back.prefetch(again(engine, first)) == 2
    assert engine.cache.wait_for_prefetch(60)
    engine.cache.flush()
    assert engine.where(first) == "HHSS"
    assert engine.read_back.prefetch(again(engine, first)) == 2


@pytest.mark.parametrize("why", ["cancelled", "forgotten", "reset", "closed"])
def test_what_nobody_wants_any_more_is_not_read_ahead(tmp_path, why):
    engine = make_engine(tmp_path, num_host_blocks=8)
    first, *_ = fill(engine, 6)
    request = again(engine, first)
    engine.read_back.prefetch(request)
    if why == "cancelled":
        engine.read_back.cancel_prefetch(request.request_id)
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
    invariants.check(engine.read_back)


def test_reading_ahead_notices_what_cannot_be_read(tmp_path):
    engine = make_engine(tmp_path, num_host_blocks=8)
    first, *_ = fill(engine, 6)
    damage(engine, engine.keys_of(first)[1])
    engine.read_back.prefetch(again(engine, first))
    assert engine.cache.wait_for_prefetch(60)
    engine.cache.flush()
    assert engine.where(first) == "H-HH"
    assert engine.cache.get_statistics()[1].num_read_errors == 1
    engine.check_cached()


def test_requests_that_hold_blocks_or_ask_for_another_hit_are_refused(tmp_path):
    engine = make_engine(tmp_path)
    first, *_ = fill(engine, 4)
    request, other = again(engine, first), engine.make_request("other", range(9))
    hit = engine.read_back.find_prefix(request)
    with pytest.raises(InvalidArgumentError, match="this is request 'other'"):
        engine.read_back.plan_read_back(other, hit)
    plan = engine.read_back.plan_read_back(request, hit)
    with pytest.raises(InvalidArgumentError, match="a plan is open"):
        engine.read_back.plan_read_back(request, hit)
    assert plan.apply()
    with pytest.raises(InvalidArgumentError, match="has blocks already"):
        engine.read_back.plan_read_back(request, hit)
    engine.manager.free(request)
    hit = engine.read_back.find_prefix(request)
    engine.cache.forget(engine.keys_of(first))
    with pytest.raises(InvalidBlockError, match="call find_prefix"):
        engine.read_back.plan_read_back(request, hit)


def test_tiers_and_pool_have_bytes_or_have_none(tmp_path):
    engine = make_engine(tmp_path)
    engine.cache.close()
    for storage, tiers, write, message in (
        (engine.device, [Tier(4)], "back", "has no bytes"),
        (None, engine.cache.tiers[:1], "back", "has bytes"),
        (None, [], "back", "no tiers"),
        (None, [Tier(4)], "sideways", "back, through"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            TieredCache(engine.pool, storage, tiers, write)
    TieredCache(engine.pool, None, [Tier(4)])
    with pytest.raises(InvalidArgumentError, match="colder tiers already"):
        TieredCache(engine.pool, None, [Tier(4)])


def test_blocks_that_are_pending_do_not_move(tmp_path):
    engine = make_engine(tmp_path)
    first = run_and_free(engine, "first", 0, 17)
    engine.pool.holds.clock = lambda: 3.0
    taken = engine.pool.get_new_blocks(8)
    with pytest.raises(InvalidBlockError, match="C3: block 2 is still to be stored in a colder tier"):
        engine.pool.swap_block_ids([(1, 2)])
    [report] = engine.pool.explain_holds(2)
    assert (report.since, report.is_movable, report.has_references) == (3.0, False, False)
    engine.cache.flush()
    engine.check_cached()
    assert engine.where(first).count("-") == 0
    assert engine.pool.explain_holds(2) == []
    engine.pool.swap_block_ids([(1, 2)])
    engine.pool.free_blocks(taken)
