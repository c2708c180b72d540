"""Tier calls interrupted by a signal handler's exception leave no wrong state, leaks or wrong events."""

import contextlib
import itertools
import random
from collections import Counter

import pytest
from interrupting import interrupt_everywhere, interrupt_twice_at_random
from tiers.tier_engine import TierEngine

from kv_pool import AllBlocksCleared, BlockStored
from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hash
from kv_pool.errors import KVPoolError
from kv_pool.tiers import invariants


class Tiering:
    """An engine with a running request; blocks of others are on the device, in host memory and on disk.

    Args:
        before: a method to run before the call, without an interrupt.
    """

    def __init__(self, folder, before=None, **options):
        self.engine = engine = TierEngine(folder, 7, 2, 9, events=True, **options)
        self.requests = {
            name: engine.make_request(name, [*map(ord, name * 4), *range(7)]) for name in "abcde"
        }
        for request in self.requests.values():
            engine.compute(request)
            if request.request_id != "e":
                engine.manager.free(request)
                request.num_computed_tokens = 0
        places = [engine.where(request) for request in self.requests.values()]
        assert options or places == ["SS", "HH", "DD", "DD", "DD"]
        self.told = engine.pool.take_events()
        self.wrong = set()
        self.evicted = []
        self.stored = {key for tier in engine.cache.tiers for key in tier.list_keys()}
        self.plan = None
        if before is not None:
            before(self)

    # ---- calls -----------------------------------------------------------------------------------

    def admit(self, name="a"):
        self.engine.onboarder.admit(self.requests[name])

    def make_plan(self):
        onboarder, request = self.engine.onboarder, self.requests["a"]
        prefix = self.engine.manager.get_computed_blocks(request)
        self.plan = onboarder.plan_onboard(request, onboarder.find_prefix(request, prefix), prefix)

    def load(self):
        self.make_plan()
        assert self.plan.load()
        self.requests["a"].num_computed_tokens = self.plan.num_computed_tokens

    def commit(self):
        self.plan.commit()

    def abort(self):
        self.plan.abort()

    def take_all(self):
        pool = self.engine.pool
        self.taken = []
        pool.take_onto(self.taken, pool.get_num_free_blocks())

    def flush(self):
        self.engine.cache.flush()

    def forget(self):
        self.wrong = set(self.list_keys())
        self.engine.cache.forget(self.wrong)

    def evict(self):
        cached = [block for block in self.engine.pool.blocks if block.block_hash is not None]
        self.wrong = {block.block_hash for block in cached}
        self.evicted = [block.block_id for block in cached]
        self.engine.manager.evict_blocks(self.evicted)

    def free_and_reset(self):
        if self.engine.manager.holds_blocks("e"):
            self.engine.manager.free(self.requests["e"])
        self.engine.manager.reset_prefix_cache()

    def prefetch(self):
        self.engine.onboarder.prefetch(self.requests["a"])

    def prefetch_and_wait(self):
        self.prefetch()
        assert self.engine.cache.wait_for_prefetch(9.0)

    def compute_more(self):
        """Compute blocks that the next flush writes through."""
        request = self.requests["e"]
        request.append_output_token_ids([5] * 6)
        self.engine.grow(request, 6)
        self.engine.run()

    # ---- checks ----------------------------------------------------------------------------------

    def list_keys(self):
        return [key for request in self.requests.values() for key in self.engine.keys_of(request)]

    def check(self):
        engine = self.engine
        for block in getattr(self, "taken", ()):
            engine.pool.free_blocks([block])
        # Later calls must work.
        engine.onboarder.list_open_plans()
        engine.cache.list_indexes()
        with contextlib.suppress(KVPoolError):
            engine.manager.allocate_slots(self.requests["e"], 0)
        stored = {key for tier in engine.cache.tiers for key in tier.list_keys()}
        assert not self.wrong or stored in (self.stored, self.stored - self.wrong)
        if self.evicted:
            engine.manager.evict_blocks(self.evicted)
            assert not any(key in engine.cache for key in self.wrong)
        engine.cache.flush()
        self.check_state()
        for plan in engine.onboarder.list_open_plans():
            (plan.commit if plan.load() else plan.abort)()
            if plan.state.value == "committed":
                self.requests[plan.request_id].num_computed_tokens = plan.num_computed_tokens
        for request in self.requests.values():
            if engine.manager.holds_blocks(request.request_id):
                request.num_computed_tokens = min(
                    request.num_tokens, 4 * len(engine.manager.get_table(request.request_id).blocks)
                )
                engine.manager.free(request)
            request.num_computed_tokens = 0
        self.check_state()
        for request in self.requests.values():
            engine.compute(request)
            engine.manager.free(request)
            request.num_computed_tokens = 0
        self.check_state()
        assert engine.pool.get_num_free_blocks() == 7
        engine.cache.close()

    def check_state(self):
        engine = self.engine
        invariants.check(engine.onboarder)
        plans = engine.onboarder.list_open_plans()
        named = Counter(block for plan in plans for block in plan.list_blocks())
        for name in engine.manager.list_request_ids():
            named.update(engine.manager.get_table(name).blocks)
        for block in engine.pool.blocks[1:]:
            assert block.ref_cnt == named[block], block
        assert len(engine.pool.holds.list_holds()) == len(plans)
        engine.check_cached()
        self.check_events()

    def check_events(self):
        """Verify that the events describe the keys of each medium."""
        engine = self.engine
        self.told += engine.pool.take_events()
        there = set()
        for event in self.told:
            if isinstance(event, AllBlocksCleared):
                there.clear()
                continue
            names = {(event.medium, name, event.group_idx) for name in event.block_hashes}
            there = there | names if isinstance(event, BlockStored) else there - names
        found = {("GPU", key.external_hash, key.group_id) for key in engine.pool.iter_cached_keys()}
        for tier in engine.cache.tiers:
            found |= {
                (tier.medium, make_external_block_hash(get_block_hash(key)), get_group_id(key))
                for key in tier.list_keys()
            }
        assert there == found


CALLS = {
    "admit": (None, Tiering.admit, {}),
    "plan": (None, Tiering.make_plan, {}),
    "commit": (Tiering.load, Tiering.commit, {}),
    "abort": (Tiering.load, Tiering.abort, {}),
    "blocks are reused": (None, Tiering.take_all, {}),
    "flush": (Tiering.take_all, Tiering.flush, {}),
    "flush, written through": (Tiering.compute_more, Tiering.flush, {"write": "through"}),
    "forget": (None, Tiering.forget, {}),
    "evict": (None, Tiering.evict, {"write": "through"}),
    "reset": (None, Tiering.free_and_reset, {}),
    "prefetch": (None, Tiering.prefetch, {}),
    "flush, prefetched": (Tiering.prefetch_and_wait, Tiering.flush, {}),
}


def make_maker(folder, before, options):
    counter = itertools.count()
    made = []

    def make():
        if made:
            made.pop().engine.cache.close()
        made.append(Tiering(folder / str(next(counter)), before, **options))
        return made[-1]

    return make


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("admit", "evict") else name for name in CALLS],
)
def test_interrupted_call_is_completed(name, tmp_path):
    before, call, options = CALLS[name]
    tried, broken = interrupt_everywhere(make_maker(tmp_path, before, options), call, Tiering.check)
    assert tried > 0
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("name", CALLS)
def test_interrupted_recovery_is_completed(name, tmp_path):
    before, call, options = CALLS[name]
    make = make_maker(tmp_path, before, options)
    tried, broken = interrupt_twice_at_random(make, call, Tiering.check, random.Random(name), 25)
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"
