"""Calls that change lower tiers, to interrupt: no wrong content, no leak, no wrong event."""

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

from interrupt_cases.case import Case, follow
from tiers.tier_engine import TierEngine

from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hash
from kv_pool.tiers import invariants
from kv_pool.tiers.pool_dump import dump_pool, load_pool

NUM_BLOCKS = 7


class Tiering:
    """An engine with a running request; blocks of others are on the device, in host memory and on disk.

    Args:
        before: a method to run before the call, without an interrupt.
    """

    def __init__(self, before=None, **options):
        self.folder = tempfile.TemporaryDirectory()
        self.engine = engine = TierEngine(
            Path(self.folder.name, "tier"), NUM_BLOCKS, 2, 9, events=True, **options
        )
        self.requests = {
            name: engine.make_request(name, [*map(ord, name * 4), *range(7)]) for name in "abcde"
        }
        for request in self.requests.values():
            engine.compute(request)
            if request.request_id != "e":
                self.free(request)
        places = [engine.where(request) for request in self.requests.values()]
        assert options or places == ["SS", "HH", "DD", "DD", "DD"]
        self.announced = set()
        self.read_events()
        self.wrong = set()
        self.damaged = ()
        self.plan = None
        self.admits = False
        if before is not None:
            before(self)

    def free(self, request):
        self.engine.manager.free(request)
        request.num_computed_tokens = 0

    # ---- calls -----------------------------------------------------------------------------------

    def admit(self):
        self.admits = True
        self.engine.onboarder.admit(self.requests["a"])

    def damage(self):
        self.damaged = self.engine.keys_of(self.requests["a"])[1:]
        self.engine.damage(*self.damaged)

    def make_plan(self):
        onboarder, request = self.engine.onboarder, self.requests["a"]
        prefix = self.engine.manager.get_computed_blocks(request)
        self.plan = onboarder.plan_onboard(request, onboarder.find_prefix(request, prefix), prefix)

    def make_and_load(self):
        self.make_plan()
        assert self.plan.load()

    def load(self):
        self.plan.load()

    def commit(self):
        self.plan.commit()

    def abort(self):
        self.plan.abort()

    def take_all(self):
        request = self.requests["x"] = self.engine.make_request("x", range(90, 106))
        self.engine.manager.allocate_slots(request, 16, delay_cache_blocks=True)

    def flush(self):
        self.engine.cache.flush()

    def forget(self):
        self.engine.cache.forget(self.wrong)

    def note_wrong(self):
        self.wrong = {key for request in self.requests.values() for key in self.engine.keys_of(request)}

    def evict(self):
        cached = [block for block in self.engine.pool.blocks if block.block_hash is not None]
        self.engine.manager.evict_blocks([block.block_id for block in cached])

    def free_e(self):
        self.free(self.requests["e"])

    def reset(self):
        assert self.engine.manager.reset_prefix_cache()

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

    def dump_and_clear(self):
        self.free_e()
        dump_pool(Path(self.folder.name, "dump"), self.engine.pool, storage=self.engine.device)
        assert self.engine.manager.reset_prefix_cache()

    def load_dump(self):
        load_pool(Path(self.folder.name, "dump"), self.engine.pool, storage=self.engine.device)

    # ---- the protocol of `try_case` ----------------------------------------------------------------

    def is_interrupted(self):
        return not self.engine.onboarder._plans.is_whole()

    def call_next(self):
        self.engine.onboarder.admit(self.engine.make_request("next", range(40, 48)))

    def repair(self):
        self.engine.manager.repair()

    def close(self):
        self.engine.cache.close()
        self.folder.cleanup()

    def check(self, is_repaired):
        engine = self.engine
        if is_repaired:
            assert len(engine.pool.cached_block_hash_to_block) == 0
            assert not any(len(tier) for tier in engine.cache.tiers)
        self.check_state()
        engine.cache.flush()
        self.check_state()
        assert not (self.admits and engine.onboarder.list_open_plans())
        for plan in engine.onboarder.list_open_plans():
            (plan.commit if plan.load() else plan.abort)()
            self.check_state()
        for name in engine.manager.list_request_ids():
            self.free(self.requests[name])
        for request in self.requests.values():
            request.num_computed_tokens = 0
            engine.compute(request)
            self.free(request)
            self.check_state()
        assert engine.pool.get_num_free_blocks() == NUM_BLOCKS
        engine.restart_tiers()
        engine.check_cached(self.damaged)

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
        assert engine.manager.detached_tables.keys() == {plan.request_id for plan in plans}
        engine.check_cached(self.damaged)
        self.check_events()

    def read_events(self):
        self.announced = follow(self.announced, self.engine.pool.take_events())

    def check_events(self):
        """Verify that the events describe the keys of each medium."""
        self.read_events()
        engine = self.engine
        found = {("GPU", key.external_hash, key.group_id) for key in engine.pool.iter_cached_keys()}
        for tier in engine.cache.tiers:
            found |= {
                (tier.medium, make_external_block_hash(get_block_hash(key)), get_group_id(key))
                for key in tier.list_keys()
            }
        assert self.announced == found


CALLS = {
    "admit": (None, Tiering.admit, {}),
    "admit, a block is damaged": (Tiering.damage, Tiering.admit, {}),
    "plan_onboard": (None, Tiering.make_plan, {}),
    "load": (Tiering.make_plan, Tiering.load, {}),
    "commit": (Tiering.make_and_load, Tiering.commit, {}),
    "abort": (Tiering.make_and_load, Tiering.abort, {}),
    "blocks are reused": (None, Tiering.take_all, {}),
    "flush": (Tiering.take_all, Tiering.flush, {}),
    "flush, written through": (Tiering.compute_more, Tiering.flush, {"write": "through"}),
    "flush, prefetched": (Tiering.prefetch_and_wait, Tiering.flush, {}),
    "forget": (Tiering.note_wrong, Tiering.forget, {}),
    "evict": (None, Tiering.evict, {"write": "through"}),
    "reset": (Tiering.free_e, Tiering.reset, {}),
    "prefetch": (None, Tiering.prefetch, {}),
    "load_pool": (Tiering.dump_and_clear, Tiering.load_dump, {}),
}
CASES = [
    Case(name, partial(Tiering, before, **options), call) for name, (before, call, options) in CALLS.items()
]
