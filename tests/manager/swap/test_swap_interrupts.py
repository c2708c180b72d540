"""Calls of a `BlockSwapper` that a signal handler interrupts: each request is in one place, complete."""

import random
from collections import Counter
from functools import partial

import pytest
from interrupting import (
    alarm_that_raises,
    interrupt_everywhere,
    interrupt_twice_at_random,
    run_until_interrupted,
)
from manager.swap.test_swapper import FULL_AND_WINDOW
from manager.swap_engine import SwapEngine

from kv_pool import RetentionDirective
from kv_pool.manager.retention.invariants import check_retention
from kv_pool.manager.swap import invariants as swap_invariants

SHAPES = {
    "full": {},
    "full and window": {"groups": FULL_AND_WINDOW},
    "retention": {"has_retention": True},
}


class Swapping:
    """A running request, one that shares its blocks, one swapped out, and one with a prefix on the host."""

    def __init__(self, shape, before):
        options = SHAPES[shape]
        self.engine = engine = SwapEngine(24, 24, events=True, **options)
        self.swapper = engine.swapper
        self.requests = {}
        if engine.manager.retention is not None:
            engine.manager.retention.set_directives("running", [RetentionDirective(0, 8, priority=90)])
            engine.manager.retention.set_directives("sharing", [RetentionDirective(0, 4, priority=20)])
        for name, tokens in (
            ("gone", range(40, 56)),
            ("swapped", range(20, 30)),
            ("running", range(10)),
            ("sharing", [*range(8), 9, 9, 9]),
        ):
            self.requests[name] = engine.make_request(name, tokens)
            engine.start(self.requests[name])
            if name in ("gone", "swapped"):
                engine.run(self.swapper.swap_out(self.requests[name]))
            if name == "gone":
                self.swapper.drop(self.requests.pop(name))
                assert engine.manager.reset_prefix_cache()
        self.plan = None
        if before is not None:
            self.plan = before(self)
            engine.copy(self.plan)

    # ---- calls -----------------------------------------------------------------------------------

    def swap_out(self):
        return self.swapper.swap_out(self.requests["running"])

    def swap_in(self):
        return self.swapper.swap_in(self.requests["swapped"])

    def apply(self):
        plan = self.swap_out()
        self.engine.run(plan)

    def commit(self):
        self.plan.commit()

    def abort(self):
        self.plan.abort()

    def drop(self):
        self.swapper.drop(self.requests["swapped"])

    # ---- checks ----------------------------------------------------------------------------------

    def check(self):
        """Check references, holds and content, and that the engine can continue."""
        # Then make the next calls.
        self.swapper.list_open_plans()
        self.engine.manager.allocate_slots(self.requests["sharing"], 0)
        self.check_balance()
        for plan in self.swapper.list_open_plans():
            self.engine.copy(plan)
            plan.commit()
            self.check_balance()
        self.check_content()
        self.go_on()
        self.check_balance()
        self.check_content()

    def check_balance(self):
        engine, swapper = self.engine, self.swapper
        plans = swapper.list_open_plans()
        swap_invariants.check(swapper)
        named = Counter()
        for name in engine.manager.list_request_ids():
            for group_id in range(len(engine.manager.groups)):
                named.update(engine.manager.get_table(name, group_id).blocks)
        retention = engine.manager.retention
        if retention is not None:
            check_retention(retention)
        for block in engine.manager.block_pool.blocks[1:]:
            num_holds = engine.manager.block_pool.holds.count_references()
            assert block.ref_cnt == named[block] + num_holds.get(block, 0), block
        for pool in (engine.manager.block_pool, swapper.host_pool):
            assert sum(bool(hold.blocks) for hold in pool.holds.list_holds()) == len(plans)

    def check_content(self):
        engine = self.engine
        for name, request in self.requests.items():
            if engine.manager.holds_blocks(name):
                engine.check(request)
            elif self.swapper.is_swapped_out(name):
                engine.check_on_host(request)
            else:
                assert name == "swapped", f"{name} is nowhere"
        engine.check_cached()

    def go_on(self):
        """Move each request to the other side, or start it."""
        engine, swapper = self.engine, self.swapper
        for name, request in self.requests.items():
            if engine.manager.holds_blocks(name):
                engine.run(swapper.swap_out(request))
            elif swapper.is_swapped_out(name):
                engine.run(swapper.swap_in(request))
            else:
                request.num_computed_tokens = 0
                engine.start(request)


def make_plan_out(swapping):
    return swapping.swap_out()


def make_plan_in(swapping):
    return swapping.swap_in()


CALLS = {
    "swap_out": (None, Swapping.swap_out),
    "swap_in": (None, Swapping.swap_in),
    "apply": (None, Swapping.apply),
    "commit out": (make_plan_out, Swapping.commit),
    "commit in": (make_plan_in, Swapping.commit),
    "abort out": (make_plan_out, Swapping.abort),
    "abort in": (make_plan_in, Swapping.abort),
    "drop": (None, Swapping.drop),
}


@pytest.mark.parametrize(
    "shape",
    ["retention", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("full", "full and window"))],
)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_each_request_in_one_place(name, shape):
    before, call = CALLS[name]
    tried, broken = interrupt_everywhere(lambda: Swapping(shape, before), call, Swapping.check)
    assert tried > 0
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_recovery_leaves_requests_in_one_place(name):
    before, call = CALLS[name]
    make = partial(Swapping, "retention", before)
    tried, broken = interrupt_twice_at_random(make, call, Swapping.check, random.Random(name), 30)
    assert tried > 0
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


class Signals:
    """Move three requests at random, without bytes, until a signal interrupts."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.engine = SwapEngine(12, 12, events=True, has_retention=seed % 2 == 1)
        self.swapper = self.engine.swapper
        self.requests = [self.engine.make_request(name, [*range(8), *map(ord, name)]) for name in "abc"]

    def step(self):
        request = self.random.choice(self.requests)
        name = request.request_id
        manager, swapper = self.engine.manager, self.swapper
        plan = next((plan for plan in swapper.list_open_plans() if plan.request_id == name), None)
        if plan is not None:
            (plan.commit if self.random.random() < 0.7 else plan.abort)()
        elif manager.holds_blocks(name):
            num_slots = 4 * len(manager.get_table(name).blocks)
            request.num_computed_tokens = min(request.num_tokens, num_slots)
            if self.random.random() < 0.3:
                manager.free(request)
            else:
                swapper.swap_out(request)
        elif swapper.is_swapped_out(name):
            request.num_computed_tokens = swapper._host.num_computed_tokens[name]
            if self.random.random() < 0.3:
                swapper.drop(request)
            else:
                swapper.swap_in(request, num_new_tokens=0)
        elif self.random.random() < 0.1:
            swapper.reset_prefix_cache()
        else:
            request.num_computed_tokens = 0
            manager.allocate_slots(request, 9, manager.get_computed_blocks(request))
        manager.take_events()

    def check(self):
        engine, swapper = self.engine, self.swapper
        engine.manager.block_pool.get_new_blocks(0)
        swap_invariants.check_references(swapper)
        swap_invariants.check_places(swapper)
        for pool in (engine.manager.block_pool, swapper.host_pool):
            assert sum(bool(hold.blocks) for hold in pool.holds.list_holds()) == len(
                swapper.list_open_plans()
            )
        num_named = len(
            {
                block
                for name in engine.manager.list_request_ids()
                for block in engine.manager.get_table(name).blocks
            }
            | {block for plan in swapper.list_open_plans() for block in plan.list_blocks(swapper._device)}
        )
        assert engine.manager.block_pool.get_num_free_blocks() + num_named == 12


@pytest.mark.parametrize("seed", range(4))
def test_signals_at_random_times_lose_no_block(seed):
    signals = Signals(seed)
    with alarm_that_raises():
        for _ in range(250):
            run_until_interrupted(signals.step, signals.random)
            signals.check()
    while signals.swapper.list_open_plans():
        signals.swapper.list_open_plans()[0].commit()
    for request in signals.requests:
        if signals.engine.manager.holds_blocks(request.request_id):
            signals.engine.manager.free(request)
        elif signals.swapper.is_swapped_out(request.request_id):
            signals.swapper.drop(request)
    signals.check()
    assert signals.swapper.host_pool.get_num_free_blocks() == 12
    assert signals.swapper.reset_prefix_cache()
