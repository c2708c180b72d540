"""Random requests over a device, a host tier and a disk tier that are all too small for them.

Real storages and files move every byte. After each step the test verifies that every request reads its own
tokens, that every cached block matches its key, that the tiers match a list model, and that mirrors of the
events know every block. Meanwhile the tiers are restarted, blocks on disk are damaged, blocks are
invalidated, the prefix cache is reset, and plans stay open while other requests run.
"""

import random
from collections import Counter

import pytest
from events.pool_map import pool_map
from tiers.slow_tiers import SlowTiers, WatchedCache
from tiers.test_swap_random import SHAPES
from tiers.tier_engine import TierEngine

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.publisher_blocks import to_wire_hash
from kv_pool.events.stream_state import StreamState
from kv_pool.tiers import invariants


class WatchedEngine(TierEngine):
    cache_type = WatchedCache


class Life:
    """A scheduler that takes random actions in steps."""

    def __init__(self, folder, seed, groups, write, prefetches):
        self.random = random.Random(seed)
        num_groups = 1 if groups is None else len(groups)
        num_blocks = self.random.randint(9, 13) * num_groups
        num_host, num_disk = self.random.choice([(3, 12), (6, 8), (10, 0), (2, 30), (20, 25)])
        self.engine = WatchedEngine(
            folder,
            num_blocks,
            num_host * num_groups,
            num_disk * num_groups,
            groups,
            events=True,
            write=write,
            max_prefetch_blocks=6 if prefetches else 0,
        )
        self.prefetches = prefetches
        # The list model does not cover write-through and prefetching, which have no fixed time.
        self.models = write == "back" and not prefetches
        self.watch()
        self.families = [self.make_tokens(self.random.randint(8, 30)) for _ in range(6)]
        self.waiting, self.running, self.plans = [], [], []
        self.damaged = set()
        self.num_made = 0
        self.counts = Counter()
        self.mirror, self.exact_mirror = PrefixMirror(), PrefixMirror(counts_copies=False)
        self.state = StreamState()

    def watch(self):
        engine = self.engine
        if self.models:
            tiers = engine.cache.tiers
            engine.cache.model = model = SlowTiers(*(tier.capacity for tier in tiers))
            model.tiers = [tier.list_keys() for tier in tiers]

    def make_tokens(self, num_tokens):
        return [self.random.randrange(3) for _ in range(num_tokens)]

    # ---- a step ----------------------------------------------------------------------------------

    def step(self):
        for action in self.random.choices(
            (self.arrive, self.finish, self.preempt, self.wrong, self.restart, self.reset, self.damage),
            (8, 5, 3, 0.6, 0.6, 0.3, 1),
            k=2,
        ):
            action()
        self.close_plans()
        for request in list(self.running):
            if self.random.random() < 0.6:
                self.grow(request)
        for request in list(self.waiting):
            if self.random.random() < 0.5:
                self.start(request)
            elif self.prefetches and self.random.random() < 0.7:
                self.prefetch(request)
        if self.prefetches and self.random.random() < 0.7:
            assert self.engine.cache.wait_for_prefetch(60)
        self.engine.run()
        self.check()

    def arrive(self):
        if len(self.waiting) < 6:
            family = self.random.choice(self.families)
            tokens = family[: self.random.randint(1, len(family))]
            tokens = tokens + self.make_tokens(self.random.randint(1, 5))
            self.num_made += 1
            self.waiting.append(self.engine.make_request(f"r{self.num_made}", tokens))

    def finish(self):
        if self.running:
            request = self.running.pop(self.random.randrange(len(self.running)))
            self.engine.manager.free(request)

    def preempt(self):
        if self.running:
            request = self.running.pop(self.random.randrange(len(self.running)))
            self.engine.manager.free(request)
            request.num_computed_tokens = 0
            self.waiting.append(request)

    def grow(self, request):
        num_left = request.num_tokens - request.num_computed_tokens
        if not num_left:
            if request.num_tokens < 36:
                request.append_output_token_ids(self.make_tokens(self.random.randint(1, 5)))
        elif self.engine.grow(request, self.random.randint(1, num_left), **self.draw_options()):
            self.counts["grown"] += 1

    def start(self, request):
        if self.random.random() < 0.2:
            self.open_plan(request)
            return
        found = self.engine.start(request, self.random.choice([None, 1, 5]), **self.draw_options())
        if found is None:
            request.num_computed_tokens = 0
            return
        self.counts["device"] += found[0]
        self.counts["tiers"] += found[1]
        self.waiting.remove(request)
        self.running.append(request)

    def draw_options(self):
        """Draw whether blocks are cached when they are allocated or after they are written."""
        return {"delay_cache_blocks": self.random.random() < 0.4}

    def open_plan(self, request):
        engine = self.engine
        prefix = engine.manager.get_computed_blocks(request)
        hit = engine.onboarder.find_prefix(request, prefix)
        self.check_hit(request, prefix, hit)
        if hit.num_tokens:
            plan = engine.onboarder.plan_onboard(request, hit, prefix)
            if plan is not None:
                self.waiting.remove(request)
                self.plans.append((request, plan))
                self.counts["open"] += 1

    def close_plans(self):
        """Close plans between two steps, so that each plan was open during at least one step."""
        for request, plan in self.plans:
            if self.random.random() < 0.2:
                plan.abort()
            elif plan.apply():
                request.num_computed_tokens = plan.num_computed_tokens
                self.engine.promise(request)
                self.engine.check(request)
                self.running.append(request)
                continue
            self.counts["found out"] += plan.is_unreadable
            self.waiting.append(request)
        self.plans = []

    def check_hit(self, request, prefix, hit):
        """Compare a hit with a full scan: each longer prefix lacks a block that its next token attends to."""
        engine = self.engine
        num_hashed = len(request.block_hashes) * 4
        alignment = engine.manager.alignment
        longest = 0
        for end in range(
            prefix.num_tokens + alignment, min(request.num_tokens - 1, num_hashed) + 1, alignment
        ):
            needed = [
                key
                for group in engine.groups
                for position, key in enumerate(engine.keys_of(request, group.group_id))
                if max(prefix.num_tokens, group.count_skipped_tokens(end)) // group.block_size <= position
                and position < end // group.block_size
            ]
            if all(key in engine.cache for key in needed):
                longest = end - prefix.num_tokens
        assert hit.num_tokens == longest
        assert sum(hit.num_tokens_by_medium.values()) == longest

    def prefetch(self, request):
        self.counts["prefetched"] += self.engine.onboarder.prefetch(request)
        if self.random.random() < 0.1:
            self.engine.onboarder.cancel_prefetch(request.request_id)

    # ---- faults ----------------------------------------------------------------------------------

    def wrong(self):
        """Invalidate blocks and everything that was computed from them."""
        if not self.running:
            return
        engine = self.engine
        table = engine.manager.get_table(self.random.choice(self.running).request_id).blocks
        blocks = [block for block in table if not block.is_null]
        if not blocks:
            return
        block = self.random.choice(blocks)
        wrong = {block.block_hash} - {None}
        engine.kv[block.block_id] = 12345
        report = engine.manager.report_invalid_blocks([block.block_id])
        assert not any(key in engine.cache for key in wrong)
        self.counts["wrong"] += 1
        for request in list(self.running):
            num_valid = report.num_valid_tokens.get(request.request_id)
            if num_valid is not None:
                request.num_computed_tokens = min(request.num_computed_tokens, num_valid)
            if num_valid == 0:
                self.running.remove(request)
                engine.manager.free(request)
                self.waiting.append(request)

    def restart(self):
        if self.plans:
            return
        engine = self.engine
        engine.cache.flush()
        on_disk = [set(tier.list_keys()) for tier in engine.cache.tiers[1:]]
        engine.cache.close()
        engine.open()
        self.counts["restarted"] += 1
        for before, tier in zip(on_disk, engine.cache.tiers[1:], strict=True):
            lost = before - set(tier.list_keys())
            assert lost == before & self.damaged, "exactly the damaged blocks are gone"
            assert set(tier.list_keys()) <= before
            assert tier.reopened.num_dropped == len(lost)
        self.damaged.clear()
        self.watch()

    def reset(self):
        if not self.running and not self.plans and self.engine.manager.reset_prefix_cache():
            self.counts["reset"] += 1
            assert [len(tier) for tier in self.engine.cache.tiers] == [0] * len(self.engine.cache.tiers)

    def damage(self):
        """Damage a block on disk, possibly one of an open plan."""
        for tier in self.engine.cache.tiers[1:]:
            if keys := tier.list_keys():
                key = self.random.choice(keys)
                if key in self.damaged:
                    return
                self.damaged.add(key)
                with open(self.engine.folder / "blocks", "r+b") as file:
                    file.seek(tier._slot_of[key] * 4096)
                    first = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([first[0] ^ 255]))

    # ---- checks ----------------------------------------------------------------------------------

    def check(self):
        engine = self.engine
        cache = engine.cache
        if cache.tiers[1:]:  # without those overwritten by good blocks, or detected
            self.damaged = {key for key in self.damaged if key in cache.tiers[1] and self.is_damaged(key)}
        for request in self.running:
            engine.check(request)
        invariants.check(engine.onboarder)
        engine.check_cached(self.damaged)
        if self.models:
            assert [tier.list_keys() for tier in cache.tiers] == cache.model.tiers
        self.check_events()

    def is_damaged(self, key):
        tier = self.engine.cache.tiers[1]
        return not tier.read_apart([key], [tier._slot_of[key]]).keys

    def check_events(self):
        engine = self.engine
        events = engine.manager.take_events()
        self.mirror.apply("pool", events)
        self.exact_mirror.apply("pool", self.state.apply(events))
        expected = pool_map(engine.pool) | {
            (get_group_id(key), tier.medium, to_wire_hash(get_block_hash(key)))
            for tier in engine.cache.tiers
            for key in tier.list_keys()
        }
        assert self.mirror.get_blocks("pool") == expected
        assert self.exact_mirror.get_blocks("pool") == expected
        assert not self.mirror.get_counts("pool").num_removed_unknown


@pytest.mark.parametrize("prefetches", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_random_requests(tmp_path, seed, shape, write, prefetches):
    life = Life(tmp_path / "tier", seed, SHAPES[shape], write, prefetches)
    for _ in range(80):
        life.step()
    life.engine.cache.close()


def test_random_requests_reach_every_event(tmp_path):
    counts = Counter()
    for seed in range(8):
        life = Life(tmp_path / f"tier{seed}", seed, None, "back", seed % 2 == 1)
        for _ in range(80):
            life.step()
        life.engine.cache.close()
        counts += life.counts
    wanted = {"grown", "device", "tiers", "open", "wrong", "restarted", "reset", "found out", "prefetched"}
    assert not wanted - counts.keys()
