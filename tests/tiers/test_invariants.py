import pytest
from tiers.swap_engine import SwapEngine

from kv_pool import BlockMove, CorruptedPoolError
from kv_pool.tiers.invariants import check_swapper
from kv_pool.tiers.open_plans import PlanState


def make_engine():
    """One request is running, one is swapped out, one is being swapped in."""
    engine = SwapEngine(12, 12)
    for name, first in (("running", 0), ("swapped", 20), ("arriving", 40)):
        request = engine.make_request(name, range(first, first + 10))
        engine.start(request)
        if name != "running":
            engine.run(engine.swapper.swap_out(request))
    engine.swapper.swap_in(request)
    check_swapper(engine.swapper)
    return engine


def be_in_two_places(engine):
    engine.swapper._host._tables["running"] = []


def lose_a_host_reference(engine):
    engine.swapper.host_pool.free_blocks([engine.swapper._host._tables["swapped"][0].blocks[2]])


def keep_a_host_reference(engine):
    engine.swapper.host_pool.get_new_blocks(1)


def lose_a_device_reference(engine):
    engine.manager.block_pool.free_blocks(engine.manager.get_table("running").blocks[:1])


def name_a_block_of_the_other_pool(engine):
    blocks = engine.swapper._host._tables["swapped"][0].blocks
    blocks[0] = engine.manager.block_pool.blocks[blocks[0].block_id]


def name_a_host_block_on_the_device(engine):
    blocks = engine.manager.get_table("running").blocks
    blocks[0] = engine.swapper.host_pool.blocks[blocks[0].block_id]


def count_a_block_as_null(engine):
    engine.swapper._host._tables["swapped"][0].num_null_blocks = 1


def count_a_block_as_cached(engine):
    engine.swapper._host._tables["swapped"][0].num_cached_blocks = 3


def copy_twice_into_one(engine):
    (plan,) = engine.swapper.list_open_plans()
    plan.moves.append(BlockMove(1, plan.moves[0].target))


def copy_into_a_cached_block(engine):
    (plan,) = engine.swapper.list_open_plans()
    plan.moves[0] = BlockMove(plan.moves[0].source, engine.manager.get_block_ids("running")[0])


def name_a_host_block_in_a_plan(engine):
    (plan,) = engine.swapper.list_open_plans()
    plan._targets[0][0] = engine.swapper.host_pool.blocks[1]


def list_a_closed_plan(engine):
    engine.swapper.list_open_plans()[0].state = PlanState.ABORTED


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (be_in_two_places, "W1"),
        (lose_a_host_reference, "T1"),
        (keep_a_host_reference, "T2"),
        (lose_a_device_reference, "T1"),
        (name_a_block_of_the_other_pool, "T1"),
        (name_a_host_block_on_the_device, "T1"),
        (name_a_host_block_in_a_plan, "W2"),
        (count_a_block_as_null, "T4"),
        (count_a_block_as_cached, "W3"),
        (copy_twice_into_one, "W4"),
        (copy_into_a_cached_block, "X8"),
        (list_a_closed_plan, "X7"),
    ],
)
def test_each_broken_invariant_is_named(spoil, number):
    engine = make_engine()
    spoil(engine)
    with pytest.raises(CorruptedPoolError, match=number):
        check_swapper(engine.swapper)
