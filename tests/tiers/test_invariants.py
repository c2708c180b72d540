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


def table_of(engine, name):
    """Return the only table of a request on the host."""
    return engine.swapper._host._tables[name][0]


def plan_of(engine):
    return engine.swapper.list_open_plans()[0]


def copy_into_a_cached_block(engine):
    moves = plan_of(engine).moves
    moves[0] = BlockMove(moves[0].source, engine.manager.get_block_ids("running")[0])


def name_a_host_block_in_a_plan(engine):
    plan_of(engine)._targets[0][0] = engine.swapper.host_pool.blocks[1]


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (lambda engine: engine.swapper._host._tables.update(running=[]), "W1"),
        (lambda engine: engine.swapper.host_pool.free_blocks(table_of(engine, "swapped").blocks[2:]), "T1"),
        (lambda engine: engine.swapper.host_pool.get_new_blocks(1), "T2"),
        (lambda engine: setattr(table_of(engine, "swapped"), "num_null_blocks", 1), "T4"),
        (name_a_host_block_in_a_plan, "W2"),
        (lambda engine: setattr(table_of(engine, "swapped"), "num_cached_blocks", 3), "W3"),
        (lambda engine: plan_of(engine).moves.append(plan_of(engine).moves[0]), "W4"),
        (copy_into_a_cached_block, "X8"),
        (lambda engine: setattr(plan_of(engine), "state", PlanState.ABORTED), "X7"),
    ],
)
def test_each_broken_invariant_is_named(spoil, number):
    engine = make_engine()
    spoil(engine)
    with pytest.raises(CorruptedPoolError, match=number):
        check_swapper(engine.swapper)
