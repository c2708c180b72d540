"""Moves are applied completely or not at all, and change only ids."""

import pytest
from contiguous.slot_engine import CopyFailedError, SlotEngine, make_run_pool
from damages import damages
from drawing import blocks, cache, hash_of, ids, make_request, state

from kv_pool import (
    InvalidArgumentError,
    InvalidBlockError,
)
from kv_pool.contiguous import invariants
from kv_pool.contiguous.compaction import apply_moves, clear_run, gather, pack, shrink
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.evicting import find_own_hash
from kv_pool.core.pool_state import ReuseWatcher
from kv_pool.errors import PoolInterruptedError
from kv_pool.ids import BlockMove
from kv_pool.metrics.residency import KVCacheMetricsCollector

PICTURE = "free: 2 3* 6 8 | in use: 1* 4*x2 5 7"


def moves(*pairs):
    return [BlockMove(*pair) for pair in pairs]


def make_engine(picture=PICTURE, **options):
    pool = make_run_pool(picture, **options)
    engine = SlotEngine(pool)
    engine.write(pool.blocks, "slot")
    return pool, engine


# ---- C1 to C3: invalid moves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "error", "broken"),
    [
        ([(4, 2), (4, 6)], InvalidArgumentError, "C1: block 4"),
        ([(4, 2), (5, 2)], InvalidArgumentError, "C1: block 2"),
        ([(4, 2), (2, 6)], InvalidArgumentError, "C1: block 2"),
        ([(4, 2), (2, 4)], InvalidBlockError, "C2: block 2 is neither in use nor cached"),
        ([(4, 5), (5, 4)], InvalidBlockError, "C2: blocks 4 and 5 are both in use"),
        ([(4, 3), (3, 4), (5, 3)], InvalidArgumentError, "C1: block 3"),
        ([(4, 3), (3, 4), (4, 2)], InvalidArgumentError, "C1: block [34]"),
        ([(4, 3), (3, 4), (3, 4)], InvalidArgumentError, "C1: block 3"),
        ([(4, 3), (3, 5), (5, 4)], InvalidArgumentError, "C1: block 3"),
        ([(7, 3), (3, 7)], InvalidBlockError, "C3: block 7 is held by a test: it cannot be moved"),
        ([(4, 4)], InvalidArgumentError, "C1: block 4"),
        ([(6, 2)], InvalidBlockError, "C2: block 6 is neither in use nor cached"),
        ([(4, 5)], InvalidBlockError, "C2: block 5 is in use"),
        ([(0, 2)], InvalidBlockError, "C3"),
        ([(4, 0)], InvalidBlockError, "C3"),
        ([(4, 9)], InvalidBlockError, "C3"),
        ([(7, 2)], InvalidBlockError, "C3: block 7 is held by a test: it cannot be moved"),
        ([(4, 8)], InvalidBlockError, "C3: block 8 is watched until its reuse"),
        ([(8, 2)], InvalidBlockError, "C3: block 8 is watched until its reuse"),
    ],
)
def test_an_invalid_move_changes_nothing(pairs, error, broken):
    pool, engine = make_engine("free: 2 3* 6 | in use: 1* 4*x2 5 7 8")
    pool.hold(blocks(pool, 7), "held by a test")
    pool.hold(blocks(pool, 4), "held, and moved", movable=True)
    pool.unpin_blocks(blocks(pool, 8), print)
    before = invariants.Snapshot(pool)
    with pytest.raises(error, match=broken):
        apply_moves(pool, moves(*pairs), engine.copy)
    assert engine.copies == []
    invariants.check_nothing_moved(before, pool)


@pytest.mark.parametrize("is_evicted_before", [False, True])
def test_an_overwritten_block_has_no_hash_of_its_own(is_evicted_before):
    pool, engine = make_engine("free: 2* | in use: 1")
    [target] = blocks(pool, 2)
    if is_evicted_before:
        pool.evict_blocks([2])
        assert find_own_hash(target) is not None
    apply_moves(pool, moves((1, 2)), engine.copy)
    assert (target.block_id, target.key, find_own_hash(target)) == (1, None, None)


# ---- C4 to C10: each broken once ---------------------------------------------------------------------


def change_a_reference(pool):
    pool.blocks[2].ref_cnt += 1


def change_the_order(pool):
    block = pool.free_block_queue.popleft()
    pool.free_block_queue.append(block)


def leave_the_block_list(pool):
    pool.blocks = (*pool.blocks[:2], pool.blocks[4], pool.blocks[3], pool.blocks[2], *pool.blocks[5:])


def leave_a_watcher(pool):
    pool.reuse_watchers[7] = pool.reuse_watchers.pop(6)


def leave_secondary_keys(pool):
    pool.cached_block_hashes_by_block[7] = pool.cached_block_hashes_by_block.pop(2)


def lose_a_key(pool):
    pool.evict_blocks([1])


def send_an_event(pool):
    pool.kv_event_queue.append("event")


def move_another_block(pool):
    pool.blocks[1].block_id, pool.blocks[7].block_id = 7, 1


def forget_the_epoch(pool):
    pool.epoch -= 1


@damages(
    (change_a_reference, "C5"),
    (change_the_order, "C5"),
    (leave_the_block_list, "C6"),
    (leave_a_watcher, "C6"),
    (leave_secondary_keys, "C6"),
    (lose_a_key, "C5|C7"),
    (send_an_event, "C7"),
    (move_another_block, "C8"),
    (forget_the_epoch, "C8"),
)
def test_c5_to_c8_damage_after_a_move_is_detected(damage, broken):
    pool, engine = make_engine(enable_kv_cache_events=True)
    cache(pool, pool.blocks[7], 4)  # a second copy of block 4's content
    pool.cache_partial_block(make_request([b"more"]), pool.blocks[4], 4, 0, 4)
    pool.reuse_watchers[6] = ReuseWatcher(print, 0.0)
    before = invariants.Snapshot(pool)
    relocation = apply_moves(pool, moves((4, 2), (3, 8)), engine.copy)
    invariants.check_relocation(before, pool, relocation)
    invariants.check(pool)
    damage(pool)
    with pytest.raises(AssertionError, match=f"^({broken}): "):
        invariants.check_relocation(before, pool, relocation)


def test_c10_ids_exchanged_before_the_copy_are_detected():
    pool, engine = make_engine()
    before = invariants.Snapshot(pool)
    engine.fail_after = 0
    pool.swap_block_ids([(4, 2)])
    with pytest.raises(CopyFailedError):
        engine.copy(moves((4, 2)))
    with pytest.raises(AssertionError, match=r"^C10: "):
        invariants.check_nothing_moved(before, pool)


# ---- exchanges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [[(4, 3), (3, 4)], [(3, 4), (4, 3)]], ids=str)
def test_an_exchange_changes_only_the_two_ids(pair):
    pool, engine = make_engine(enable_kv_cache_events=True)
    used, cached = blocks(pool, 4, 3)
    before, slots, planned = invariants.Snapshot(pool), dict(engine.slots), moves(*pair, (5, 2))
    relocation = apply_moves(pool, planned, engine.copy)
    assert (used.block_id, cached.block_id) == (3, 4)
    assert state(pool) == "free: 5 4* 6 8 | in use: 1* 2 3*x2 7"
    assert relocation.moves == planned
    assert relocation.make_remap().tolist() == [0, 1, 2, 4, 3, 2, 6, 7, 8]
    invariants.check(pool)
    invariants.check_relocation(before, pool, relocation)
    invariants.check_bytes(slots, engine.slots, planned, scratch_ids=[0])
    assert pool.get_cached_block(hash_of(3), [0]) == [cached]


def test_exchanges_are_copied_in_batches_of_scratch_slots():
    pool, engine = make_engine("free: 1* 2* 3* | in use: 4 5 6")
    planned = moves((4, 1), (1, 4), (5, 2), (2, 5), (6, 3), (3, 6))
    apply_moves(pool, planned, engine.copy, scratch_ids=[90, 91])
    assert engine.copies == [
        [(1, 90), (2, 91)],
        [(4, 1), (5, 2)],
        [(90, 4), (91, 5)],
        [(3, 90)],
        [(6, 3)],
        [(90, 6)],
    ]
    assert engine.read(pool.blocks[1:]) == ["slot/4", "slot/5", "slot/6", "slot/1", "slot/2", "slot/3"]


def test_without_a_scratch_slot_exchanges_are_refused():
    pool, engine = make_engine()
    before = invariants.Snapshot(pool)
    with pytest.raises(InvalidArgumentError, match="1 exchanges need a scratch slot"):
        apply_moves(pool, moves((4, 3), (3, 4)), engine.copy, scratch_ids=[])
    invariants.check_nothing_moved(before, pool)
    pool, engine = make_engine("free: 1* 2* | in use: 3")
    assert pack(pool, engine.copy, scratch_ids=[]) == []


@pytest.mark.parametrize("num_calls", range(7))
def test_a_failed_exchange_loses_at_most_cached_blocks(num_calls):
    """The copies of two exchanges and a move fail in turn; each block in use keeps its bytes."""
    pool, engine = make_engine("free: 1* 2* 3 | in use: 4 5 6", enable_kv_cache_events=True)
    in_use, cached = blocks(pool, 4, 5, 6), blocks(pool, 1, 2)
    told = []

    def copy(planned):
        if len(engine.copies) == num_calls:
            engine.slots.update((target, "damaged") for _, target in planned)
            raise CopyFailedError("broken")
        engine.copy(planned)

    with pytest.raises(CopyFailedError):
        apply_moves(pool, moves((4, 1), (1, 4), (5, 2), (2, 5), (6, 3)), copy, on_moved=told.append)
    invariants.check(pool)
    assert engine.read(in_use) == ["slot/4", "slot/5", "slot/6"]
    expected = {  # ids of blocks in use, and the number of cached blocks that lost their content
        0: ([4, 5, 6], 0),
        1: ([4, 5, 3], 0),
        2: ([4, 5, 3], 1),
        3: ([1, 5, 3], 1),
        4: ([1, 5, 3], 0),
        5: ([1, 5, 3], 1),
        6: ([1, 2, 3], 1),
    }
    assert (ids(in_use), pool.num_evictions) == expected[num_calls]
    assert len(pool.take_events()) == pool.num_evictions
    for block, content in zip(cached, ["slot/1", "slot/2"], strict=True):
        assert block.block_hash is None or engine.read([block]) == [content]
    moved = {move for relocation in told for move in relocation.moves}
    assert {(4, 1), (5, 2), (6, 3)} & moved == {
        (source, block.block_id)
        for source, block in zip((4, 5, 6), in_use, strict=True)
        if block.block_id != source
    }


# ---- other data keyed by id --------------------------------------------------------------------------


def test_a_metrics_collector_follows_a_block_to_its_new_id():
    collector = KVCacheMetricsCollector(1.0)
    pool = RunBlockPool(4, True, 4, metrics_collector=collector)
    pool.get_new_blocks(3)
    followed = collector.block_metrics[3]
    pool.free_blocks(blocks(pool, 1))
    apply_moves(pool, moves((3, 1)), SlotEngine(pool).copy)
    assert collector.block_metrics[1] is followed


# ---- packing, taking a run, shrinking ----------------------------------------------------------------


def test_gather_stops_at_the_goal_and_reports_moves():
    pool, engine = make_engine("free: 2 5 7 8 | in use: 1 3 4 6 9")
    told = []
    assert gather(pool, engine.copy, run_length=2, goal=0.5, on_moved=told.append).moves == []
    assert told == []
    relocation = gather(pool, engine.copy, run_length=2, on_moved=told.append)
    assert told == [relocation]
    assert len(relocation.moves) == 2
    assert pool.get_fragmentation_rate(2) == 0


def test_no_run_of_an_interrupted_pool_is_cleared():
    pool, engine = make_engine()
    pool.is_changing = True
    with pytest.raises(PoolInterruptedError):
        clear_run(pool, 1, engine.copy, print)


def test_a_pool_shrinks_after_its_top_is_drained():
    pool, engine = make_engine("free: 1 2 5* | in use: 3 4* 6")
    kept = pool.blocks[6]
    relocation = shrink(pool, 2, engine.copy)
    assert relocation.moves == [(5, 1), (6, 2)]
    assert state(pool) == "free: 1* | in use: 2 3 4*"
    assert engine.read([kept]) == ["slot/6"]
    assert pool.get_cached_block(hash_of(5), [0]) is not None
    invariants.check(pool)
