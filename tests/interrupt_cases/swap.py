"""Calls of a `BlockSwapper` to interrupt: each request is in one place, with its bytes."""

from functools import partial

from interrupt_cases.case import Case, Subject, follow
from tiers.swap_engine import SwapEngine

from kv_pool import RetentionDirective
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.manager.retention.invariants import check_retention
from kv_pool.tiers.invariants import check_swapper

FULL_AND_WINDOW = (FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=6))


class Swapping(Subject):
    """A running request, one that shares its blocks, and one swapped out; another's blocks are on the host.

    Args:
        before: a call to make before the one to interrupt.
    """

    def __init__(self, before=None, **options):
        self.engine = engine = SwapEngine(24, 24, events=True, **options)
        self.manager, self.swapper = engine.manager, engine.swapper
        self.announced = set()
        self.requests = {}
        if self.manager.retention is not None:
            self.manager.retention.set_directives("running", [RetentionDirective(0, 8, priority=90)])
            self.manager.retention.set_directives("sharing", [RetentionDirective(0, 4, priority=20)])
        for name, tokens in (
            ("gone", range(40, 56)),
            ("swapped", range(20, 30)),
            ("running", range(10)),
            ("sharing", [*range(8), 9, 9, 9]),
        ):
            request = self.requests[name] = engine.make_request(name, tokens)
            engine.start(request)
            if name in ("gone", "swapped"):
                engine.run(self.swapper.swap_out(request))
        self.swapper.drop(self.requests.pop("gone"))
        self.freed = set()
        self.plan = None if before is None else before(self)
        if self.plan is not None:
            engine.copy(self.plan)

    # ---- calls -----------------------------------------------------------------------------------

    def swap_out(self):
        return self.swapper.swap_out(self.requests["running"])

    def swap_in(self):
        return self.swapper.swap_in(self.requests["swapped"])

    def apply(self):
        self.engine.run(self.swap_out())

    def commit(self):
        self.plan.commit()

    def abort(self):
        self.plan.abort()

    def drop(self):
        self.freed = {"swapped"}
        self.swapper.drop(self.requests["swapped"])

    def free_all(self):
        self.freed = set(self.requests)
        self.swapper.drop(self.requests["swapped"])
        for name in ("running", "sharing"):
            self.manager.free(self.requests[name])

    def reset(self):
        assert self.swapper.reset_prefix_cache()

    def list_pools(self):
        return [self.manager.block_pool, self.swapper.host_pool]

    # ---- the protocol of `try_case` ----------------------------------------------------------------

    def is_interrupted(self):
        return not self.swapper._plans.is_whole()

    def call_next(self):
        self.swapper.swap_out(self.engine.make_request("next", range(4)))

    def repair(self):
        self.manager.repair()

    def check(self, is_repaired):
        self.check_balance()
        if is_repaired:
            assert all(len(pool.cached_block_hash_to_block) == 0 for pool in self.list_pools())
        for plan in self.swapper.list_open_plans():
            self.engine.copy(plan)
            plan.commit()
            self.check_balance()
        for _ in range(3):
            self.check_content()
            self.go_on()
            self.check_balance()
        for name, request in self.requests.items():
            if self.swapper.is_swapped_out(name):
                self.swapper.drop(request)
            else:
                self.manager.free(request)
        for pool in self.list_pools():
            assert pool.get_num_free_blocks() == 24
        assert not self.manager.detached_tables
        assert self.swapper.reset_prefix_cache()
        self.check_balance()

    def check_balance(self):
        check_swapper(self.swapper)
        if self.manager.retention is not None:
            check_retention(self.manager.retention)
        held = {plan.request_id for plan in self.swapper.list_open_plans()}
        assert self.manager.detached_tables.keys() == held | set(self.swapper.list_swapped_out())
        counts = self.manager.block_pool.holds.count_references()
        for name in self.manager.list_request_ids():
            for group_id in range(len(self.manager.groups)):
                for block in self.manager.get_table(name, group_id).blocks:
                    counts[block] = counts.get(block, 0) + 1
        for block in self.manager.block_pool.blocks[1:]:
            assert block.ref_cnt == counts.get(block, 0), block
        for pool in self.list_pools():
            of_plans = [hold for hold in pool.holds.list_holds() if "open plan" in hold.reason]
            assert len(of_plans) == len(held)
        self.check_events()

    def check_events(self):
        """Verify that the events describe the keys of both pools."""
        self.announced = follow(self.announced, self.swapper.take_events())
        assert self.announced == {
            (pool.medium, key.external_hash, key.group_id)
            for pool in self.list_pools()
            for key in pool.iter_cached_keys()
        }

    def check_content(self):
        for name, request in self.requests.items():
            if self.manager.holds_blocks(name):
                self.engine.check(request)
            elif self.swapper.is_swapped_out(name):
                self.engine.check_on_host(request)
        self.engine.check_cached()

    def go_on(self):
        """Move each request to the other side, or start it."""
        for name, request in self.requests.items():
            if self.manager.holds_blocks(name):
                self.engine.run(self.swapper.swap_out(request))
            elif self.swapper.is_swapped_out(name):
                self.engine.run(self.swapper.swap_in(request))
            else:
                assert name in self.freed, f"{name} is nowhere"
                request.num_computed_tokens = 0
                self.engine.start(request)


SHAPES = {"": {}, ", a window": {"groups": FULL_AND_WINDOW}, ", retention": {"has_retention": True}}
CALLS = {
    "swap_out": (None, Swapping.swap_out),
    "swap_in": (None, Swapping.swap_in),
    "apply": (None, Swapping.apply),
    "commit out": (Swapping.swap_out, Swapping.commit),
    "commit in": (Swapping.swap_in, Swapping.commit),
    "abort out": (Swapping.swap_out, Swapping.abort),
    "abort in": (Swapping.swap_in, Swapping.abort),
    "drop": (None, Swapping.drop),
    "reset_prefix_cache": (Swapping.free_all, Swapping.reset),
}
CASES = [
    Case(f"{name}{shape}", partial(Swapping, before, **options), call)
    for shape, options in SHAPES.items()
    for name, (before, call) in CALLS.items()
]
