import pytest
from drawing import state
from tiers.swap_engine import SwapEngine

from kv_pool import (
    AllBlocksCleared,
    BlockHasher,
    BlockPool,
    BlockRemoved,
    BlockRetention,
    BlockStored,
    BlockSwapper,
    CopyFailedError,
    InvalidArgumentError,
    InvalidTypeError,
    KVCacheManager,
    Request,
    RetentionDirective,
)
from kv_pool.contiguous import compaction
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.events import PrefixMirror
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.block_groups.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kv_pool.tiers.invariants import check_swapper

FULL_AND_WINDOW = (FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=6))


def picture(engine):
    """Return both pools' state, and the requests on each side."""
    manager, swapper = engine.manager, engine.swapper
    groups = range(len(manager.groups))
    return (
        state(manager.block_pool),
        state(swapper.host_pool),
        {name: [manager.get_block_ids(name, i) for i in groups] for name in manager.list_request_ids()},
        {name: [swapper.get_host_block_ids(name, i) for i in groups] for name in swapper.list_swapped_out()},
        [repr(plan) for plan in swapper.list_open_plans()],
    )


def started(engine, name, tokens):
    request = engine.make_request(name, tokens)
    assert engine.start(request) is not None
    return request


def swapped(engine, name, tokens):
    request = started(engine, name, tokens)
    engine.run(engine.swapper.swap_out(request))
    return request


def moves(plan):
    return [tuple(move) for move in plan.moves]


# ---- out -----------------------------------------------------------------------------------------


def test_a_swapped_out_request_stays_cached_on_the_device():
    engine = SwapEngine(8, 8)
    request = started(engine, "a", range(10))
    plan = engine.swapper.swap_out(request)
    assert moves(plan) == [(1, 1), (2, 2), (3, 3)]
    engine.run(plan)
    assert state(engine.manager.block_pool) == "free: 3 4 5 6 7 8 2* 1*"
    assert state(engine.swapper.host_pool) == "free: 4 5 6 7 8 | in use: 1* 2* 3"
    assert engine.swapper.get_host_block_ids("a") == [1, 2, 3]
    assert not engine.manager.holds_blocks("a")
    engine.check_on_host(request)
    check_swapper(engine.swapper)


def test_a_failed_copy_leaves_the_request_running_in_its_blocks():
    engine = SwapEngine(8, 8, events=True)
    request = started(engine, "a", range(10))
    engine.swapper.take_events()
    before = picture(engine)
    for num_done in range(3):
        with pytest.raises(CopyFailedError):
            engine.fail(engine.swapper.swap_out(request), num_done)
        after = picture(engine)
        assert (after[0], after[2:]) == (before[0], before[2:])
        assert engine.swapper.host_pool.get_num_free_blocks() == 8
        engine.check(request)
        engine.check_cached()
    assert engine.swapper.take_events() == []
    request.append_output_token_ids([7])
    assert engine.grow(request, 1)


def test_after_an_interrupted_copy_the_plan_is_still_open():
    engine = SwapEngine(8, 8)
    request = started(engine, "a", range(10))
    plan = engine.swapper.swap_out(request)

    def interrupt(moves):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan.apply(interrupt)
    assert engine.swapper.list_open_plans() == [plan]
    plan.abort()
    engine.check(request)
    check_swapper(engine.swapper)


def test_an_error_of_a_copy_that_interrupts_the_pool_is_raised():
    """`apply` raised PoolInterruptedError instead."""
    engine = SwapEngine(8, 8)
    plan = engine.swapper.swap_out(started(engine, "a", range(10)))

    def fail(moves):
        engine.manager.block_pool.is_changing = True
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        plan.apply(fail)
    engine.manager.repair()
    plan.abort()
    check_swapper(engine.swapper)


def test_an_invalid_block_cannot_be_hit_on_the_host():
    engine = SwapEngine(8, 8)
    request = started(engine, "a", range(12))
    engine.manager.evict_blocks([2])
    engine.run(engine.swapper.swap_out(request))
    assert state(engine.swapper.host_pool) == "free: 4 5 6 7 8 | in use: 1* 2 3"
    engine.run(engine.swapper.swap_in(request))
    assert engine.manager.get_table("a").num_cached_blocks == 1
    engine.check(request)


def test_a_block_found_invalid_during_its_copy_is_not_cached():
    engine = SwapEngine(8, 8)
    request = started(engine, "a", range(12))
    plan = engine.swapper.swap_out(request)
    engine.manager.evict_blocks([2])
    engine.run(plan)
    assert state(engine.swapper.host_pool) == "free: 4 5 6 7 8 | in use: 1* 2 3"


def test_a_cached_block_without_content_is_not_cached_on_host():
    engine = SwapEngine(8, 8)
    request = engine.make_request("a", range(12))
    engine.manager.allocate_slots(request, 12)
    request.num_computed_tokens = 6  # half of a step is counted
    plan = engine.swapper.swap_out(request)
    engine.copy(plan)
    plan.commit()
    assert state(engine.swapper.host_pool) == "free: 4 5 6 7 8 | in use: 1* 2 3"
    plan = engine.swapper.swap_in(request)
    assert (len(plan.moves), plan.num_shared_blocks) == (2, 1)
    engine.copy(plan)
    plan.commit()
    assert engine.manager.get_table("a").num_cached_blocks == 1


def test_a_partly_hashed_block_is_not_shared_as_a_full_one():
    engine = SwapEngine(8, 8, (FullAttentionSpec(block_size=8),))
    request = engine.make_request("a", range(16))
    engine.manager.allocate_slots(request, 16, delay_cache_blocks=True)
    pool = engine.manager.block_pool
    pool.cache_partial_block(request, pool.blocks[1], 4, 0, 8)
    engine.compute(request, 0, 16)
    engine.manager.get_table("a").num_cached_blocks = 0
    engine.run(engine.swapper.swap_out(request))
    assert state(engine.swapper.host_pool) == "free: 3 4 5 6 7 8 | in use: 1 2"


def test_blocks_with_pending_copies_are_not_swapped():
    engine = SwapEngine(8, 8)
    parent = started(engine, "p", range(10))
    child = engine.make_request("c", range(10))
    child.num_computed_tokens = 10
    engine.manager.fork(parent, child)
    child.append_output_token_ids([50])
    engine.manager.allocate_slots(child, 1)
    before = picture(engine)
    for call in (engine.swapper.can_swap_out, engine.swapper.swap_out):
        with pytest.raises(InvalidArgumentError, match="take_block_copies"):
            call(child)
    assert picture(engine) == before


# ---- in ------------------------------------------------------------------------------------------


def test_swap_in_copies_reused_blocks_and_shares_the_rest():
    engine = SwapEngine(4, 8)
    request = swapped(engine, "a", range(10))
    assert state(engine.manager.block_pool) == "free: 3 4 2* 1*"
    other = started(engine, "b", range(50, 60))  # takes 3, 4 and 2
    engine.manager.free(other)
    edits = engine.swapper._host._tables["a"][0].num_edits
    plan = engine.swapper.swap_in(request)
    assert (len(plan.moves), plan.num_shared_blocks, plan.num_computed_tokens) == (2, 1, 10)
    engine.run(plan)
    table = engine.manager.get_table("a")
    assert (table.num_cached_blocks, table.num_edits) == (2, edits + 1)
    assert state(engine.swapper.host_pool) == "free: 3 4 5 6 7 8 2* 1*"
    again = engine.make_request("c", range(10))
    assert engine.manager.get_computed_blocks(again).num_tokens == 8


def test_the_watermark_applies_while_others_hold_blocks():
    engine = SwapEngine(9, 8, watermark=0.3)  # 3 blocks
    request = swapped(engine, "a", range(19))
    other = started(engine, "b", range(50, 58))
    assert engine.swapper.can_swap_in(request) is AllocStatus.LATER
    assert engine.swapper.swap_in(request) is None
    engine.manager.free(other)
    # Without other requests it does not need to leave the watermark; it would wait forever.
    assert engine.swapper.can_swap_in(request, num_lookahead_tokens=17) is AllocStatus.OK
    assert engine.swapper.can_swap_in(request, num_lookahead_tokens=18) is AllocStatus.NEVER
    engine.run(engine.swapper.swap_in(request))


def test_a_swapped_request_keeps_its_count_of_computed_tokens():
    engine = SwapEngine()
    request = swapped(engine, "a", range(10))
    request.num_computed_tokens = 0
    before = picture(engine)
    for call in (engine.swapper.can_swap_in, engine.swapper.swap_in):
        with pytest.raises(InvalidArgumentError, match="swapped out with 10"):
            call(request)
    assert picture(engine) == before


def test_a_dropped_request_leaves_its_prefix_on_the_host():
    engine = SwapEngine()
    request = swapped(engine, "a", range(10))
    engine.swapper.drop(request)
    assert state(engine.swapper.host_pool) == "free: 3 4 5 6 7 8 2* 1*"
    assert engine.swapper.list_swapped_out() == []
    check_swapper(engine.swapper)
    before = picture(engine)
    with pytest.raises(InvalidArgumentError, match="not swapped out"):
        engine.swapper.drop(request)
    assert picture(engine) == before
    assert engine.swapper.reset_prefix_cache()
    assert state(engine.swapper.host_pool) == "free: 3 4 5 6 7 8 2 1"


# ---- several groups ------------------------------------------------------------------------------


def test_encoder_blocks_are_swapped_too():
    groups = (FullAttentionSpec(block_size=4), CrossAttentionSpec(block_size=4))
    engine = SwapEngine(16, 16, groups)
    request = engine.make_request("a", range(6))
    engine.manager.allocate_slots(request, 6, num_encoder_tokens=10)
    request.num_computed_tokens = 6
    engine.kv[3:6] = [[1] * 4, [2] * 4, [3] * 4]
    engine.run(engine.swapper.swap_out(request))
    engine.kv[:] = 0
    # 3 of 16 blocks are the encoder's, however many tokens are decoded.
    assert engine.swapper.can_swap_in(request, num_lookahead_tokens=46) is AllocStatus.OK
    assert engine.swapper.can_swap_in(request, num_lookahead_tokens=47) is AllocStatus.NEVER
    engine.run(engine.swapper.swap_in(request))
    assert engine.kv[engine.manager.get_block_ids("a", 1)].tolist() == [[1] * 4, [2] * 4, [3] * 4]


# ---- retention -----------------------------------------------------------------------------------


def test_covered_blocks_stay_on_the_device_and_are_shared_again():
    pool = BlockPool(9, True, 4)
    retention = BlockRetention(pool, lambda: 0.0)
    manager = KVCacheManager(pool, retention=retention)
    swapper = BlockSwapper(manager, BlockPool(9, True, 4, medium="CPU"))
    request = SwapEngine().make_request("a", range(10))
    retention.set_directives("a", [RetentionDirective(0, 8, priority=90)])
    manager.allocate_slots(request, 10)
    request.num_computed_tokens = 10
    swapper.swap_out(request).commit()
    assert (retention.num_retained, manager.get_num_free_blocks()) == (2, 8)
    other = SwapEngine().make_request("b", range(50, 74))
    manager.allocate_slots(other, 24)
    assert retention.num_retained == 2
    # Kept blocks count as free, so they are needed like the block that is copied; there is none.
    assert swapper.can_swap_in(request, num_new_tokens=0) is AllocStatus.LATER
    manager.free(other)
    plan = swapper.swap_in(request)
    assert (len(plan.moves), plan.num_shared_blocks, retention.num_retained) == (1, 2, 0)
    plan.commit()
    check_swapper(swapper)
    swapper.swap_out(request).commit()
    assert retention.num_retained == 2
    swapper.drop(request)
    assert manager.reset_prefix_cache()


# ---- events --------------------------------------------------------------------------------------


def test_a_reset_does_not_clear_blocks_stored_after_it():
    """The host's `AllBlocksCleared` came after the device's next stores, so readers dropped these stores."""
    engine = SwapEngine(6, 8, events=True)
    mirror = PrefixMirror()
    for first in (0, 20, 40):
        request = swapped(engine, f"r{first}", range(first, first + 9))
        engine.swapper.drop(request)
        assert engine.swapper.reset_prefix_cache()
    engine.start(engine.make_request("after", range(60, 69)))
    events = engine.swapper.take_events()
    assert [type(event) for event in events].count(AllBlocksCleared) == 6
    mirror.apply("here", events)
    hashes = engine.make_request("again", range(60, 69)).block_hashes
    assert mirror.find_prefix(hashes) == {"here": 2}
    engine.swapper.drop(swapped(engine, "last", range(80, 89)))
    assert [event.medium for event in engine.swapper.take_events()] == ["GPU", "CPU"]


@pytest.mark.parametrize("taken_alone", ["device", "host"])
def test_a_reset_is_in_order_after_one_pools_events_were_taken(taken_alone):
    engine = SwapEngine(6, 8, events=True)
    engine.swapper.drop(swapped(engine, "before", range(9)))
    assert engine.swapper.reset_prefix_cache()
    pool = engine.manager.block_pool if taken_alone == "device" else engine.swapper.host_pool
    assert [type(event) for event in pool.take_events()] == [BlockStored, AllBlocksCleared]
    engine.start(engine.make_request("after", range(60, 69)))
    kinds = [type(event) for event in engine.swapper.take_events()]
    assert kinds == [BlockStored, AllBlocksCleared, BlockStored]


def test_events_of_the_device_precede_those_of_the_host():
    engine = SwapEngine(3, 4, events=True)
    request = swapped(engine, "a", range(9))
    events = engine.swapper.take_events()
    assert [(type(e), e.medium, len(e.block_hashes)) for e in events] == [
        (BlockStored, "GPU", 2),
        (BlockStored, "CPU", 2),
    ]
    assert events[0].block_hashes == events[1].block_hashes
    assert events[1].token_ids == list(range(8))
    assert [e.kv_cache_spec_kind for e in events] == ["full_attention"] * 2
    engine.manager.free(started(engine, "b", range(50, 62)))
    engine.swapper.take_events()
    engine.run(engine.swapper.swap_in(request))
    events = engine.swapper.take_events()
    assert [(type(e), e.medium) for e in events] == [(BlockRemoved, "GPU")] * 3 + [(BlockStored, "GPU")]
    assert engine.swapper.take_events() == []


# ---- refused calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_request_in_an_open_plan_is_refused_elsewhere(direction):
    engine = SwapEngine()
    request = started(engine, "a", range(10))
    plan = engine.swapper.swap_out(request)
    if direction == "in":
        engine.run(plan)
        plan = engine.swapper.swap_in(request)
    child = engine.make_request("child", range(10))
    child.num_computed_tokens = request.num_computed_tokens
    before = picture(engine)
    manager, swapper = engine.manager, engine.swapper
    calls = [manager.free, swapper.swap_out, swapper.swap_in, swapper.drop]
    calls += [lambda request: manager.fork(request, child), lambda request: manager.cache_blocks(request, 8)]
    calls += [lambda request: manager.get_block_ids("a"), lambda request: manager.allocate_slots(request, 1)]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call(request)
    assert picture(engine) == before
    check_swapper(swapper)
    engine.run(plan)
    assert picture(engine)[4] == []


def test_a_commit_without_valid_event_keys_changes_nothing():
    engine = SwapEngine(events=True)
    request = started(engine, "a", range(10))
    plan = engine.swapper.swap_out(request)
    request.lora_request = object()
    before = picture(engine)
    with pytest.raises(InvalidTypeError):
        plan.commit()
    assert picture(engine) == before
    request.lora_request = None
    engine.run(plan)


def test_incompatible_pools_are_refused():
    manager = KVCacheManager(BlockPool(9, True, 4))
    for host_pool in (BlockPool(9, True, 8), BlockPool(9, False, 4), manager.block_pool):
        with pytest.raises(InvalidArgumentError, match="host pool"):
            BlockSwapper(manager, host_pool)


def test_without_caching_everything_is_copied_both_ways():
    engine = SwapEngine(caching=False)
    request = swapped(engine, "a", range(10))
    plan = engine.swapper.swap_in(request)
    assert len(plan.moves) == 3
    engine.run(plan)
    engine.check(request)


@pytest.mark.parametrize("ends", ["commit", "abort"])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_compaction_moves_no_block_of_an_open_swap_plan(direction, ends):
    """The ids in the moves belonged to other blocks by the time the copies were made."""
    pool, host_pool = RunBlockPool(12, True, 4), RunBlockPool(12, True, 4, medium="CPU")
    manager = KVCacheManager(pool)
    swapper = BlockSwapper(manager, host_pool)
    in_front, on_host = pool.get_new_blocks(3), host_pool.get_new_blocks(3)
    request = Request("a", range(10), BlockHasher(block_size=4))
    manager.allocate_slots(request, 10)
    request.num_computed_tokens = 10
    plan = swapper.swap_out(request)
    if direction != "out":
        plan.commit()
        pool.evict_blocks(range(1, 12))
        plan = swapper.swap_in(request)
    pool.free_blocks(in_front)
    host_pool.free_blocks(on_host)
    moves = list(plan.moves)
    for one_pool in (pool, host_pool):
        assert compaction.pack(one_pool, lambda moves: None, max_evictions=5) == []
    assert plan.moves == moves != []
    getattr(plan, ends)()
    for one_pool in (pool, host_pool):
        assert one_pool.holds.list_holds() == []
