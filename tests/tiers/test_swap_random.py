"""Random requests over a device pool and a host pool that are both too small for them.

The real storage makes every copy, some of them only in part; plans stay open while other requests run. After
each step every request reads its own tokens back, wherever it is, and each cached block is compared with the
content that its hash stands for. Results are compared with a full scan.
"""

import random

import pytest
from tiers.swap_engine import SwapEngine
from tiers.test_swapper import FULL_AND_WINDOW, picture

from kv_pool import CopyFailedError, InvalidArgumentError, InvalidBlockError, PlanClosedError
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.tiers.invariants import check_swapper

SHAPES = {
    "full": None,
    "full-8": (FullAttentionSpec(block_size=8),),
    "full-and-window": FULL_AND_WINDOW,
    "window": (SlidingWindowSpec(block_size=4, sliding_window=9),),
    "sizes": (FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=8)),
    "chunks": (
        FullAttentionSpec(block_size=4),
        ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8),
    ),
    "mamba": (FullAttentionSpec(block_size=4), MambaSpec(block_size=8)),
}


class Life:
    """One scheduler with more requests than fit; each step calls a random method."""

    def __init__(self, seed, groups, events, watermark=0.0):
        self.random = random.Random(seed)
        num_groups = 1 if groups is None else len(groups)
        num_blocks = self.random.randint(7, 12) * num_groups
        num_host_blocks = self.random.choice([6, 10, 18]) * num_groups
        self.engine = SwapEngine(num_blocks, num_host_blocks, groups, events=events, watermark=watermark)
        self.families = [self.make_tokens(self.random.randint(8, 24)) for _ in range(6)]
        self.requests = {}  # by name; manager and swapper know where each one is
        self.num_made = 0
        self.invalid = set()  # open plans that share a block which was evicted since
        self.counts = dict.fromkeys(("out", "in", "failed", "shared", "later", "never", "fork"), 0)

    @property
    def swapper(self):
        return self.engine.swapper

    def make_tokens(self, num_tokens):
        return [self.random.randrange(3) for _ in range(num_tokens)]

    def running(self):
        return [self.requests[name] for name in self.engine.manager.list_request_ids()]

    def swapped(self):
        return [self.requests[name] for name in self.swapper.list_swapped_out()]

    def waiting(self):
        """Return the requests that hold no blocks on either side."""
        plans = {plan.request_id for plan in self.swapper.list_open_plans()}
        return [
            request
            for name, request in self.requests.items()
            if not self.engine.manager.holds_blocks(name)
            and not self.swapper.is_swapped_out(name)
            and name not in plans
        ]

    # ---- actions ---------------------------------------------------------------------------------

    def step(self):
        often = [self.start, self.grow, self.swap_out, self.swap_in, self.close]
        seldom = [self.arrive, self.arrive, self.finish, self.finish, self.fork, self.blunder, self.evict]
        action = self.random.choice([*often, *often, *seldom])
        action()
        self.check()

    def arrive(self):
        if len(self.requests) > 8:
            return
        family = self.random.choice(self.families)
        tokens = family[: self.random.randint(1, len(family))] + self.make_tokens(self.random.randint(1, 9))
        self.num_made += 1
        name = f"r{self.num_made}"
        self.requests[name] = self.engine.make_request(name, tokens)

    def start(self):
        if not (waiting := self.waiting()):
            return
        request = self.random.choice(waiting)
        request.num_computed_tokens = 0
        num_tokens = request.num_tokens if self.random.random() < 0.5 else None
        prefix = self.engine.manager.get_computed_blocks(request)
        num_left = request.num_tokens - prefix.num_tokens
        self.engine.start(request, num_left if num_tokens else self.random.randint(1, num_left))

    def grow(self):
        if not (running := self.running()):
            return
        request = self.random.choice(running)
        num_left = request.num_tokens - request.num_computed_tokens
        if not num_left:
            if request.num_tokens < 30:
                request.append_output_token_ids(self.make_tokens(self.random.randint(1, 6)))
            return
        self.engine.grow(request, self.random.randint(1, num_left))

    def swap_out(self):
        if not (running := self.running()):
            return
        request = self.random.choice(running)
        expected = self.judge_swap_out(request)
        before = picture(self.engine)
        assert self.swapper.can_swap_out(request) is expected
        assert picture(self.engine) == before
        plan = self.swapper.swap_out(request)
        self.settle(plan, expected, before)

    def swap_in(self):
        if not (swapped := self.swapped()):
            return
        request = self.random.choice(swapped)
        num_left = request.num_tokens - request.num_computed_tokens
        num_new, num_lookahead = self.random.randint(0, num_left), self.random.choice([0, 0, 0, 0, 3, 40])
        if any(isinstance(spec, MambaSpec) for spec in self.engine.manager.groups):
            num_lookahead = 0  # speculative tokens would need states of their own
        options = {"num_new_tokens": num_new, "num_lookahead_tokens": num_lookahead}
        expected = self.judge_swap_in(request, **options)
        before = picture(self.engine)
        assert self.swapper.can_swap_in(request, **options) is expected
        assert picture(self.engine) == before
        plan = self.swapper.swap_in(request, **options)
        self.settle(plan, expected, before)
        if plan is not None and plan.state.value == "committed" and num_new:
            assert self.engine.manager.allocate_slots(request, num_new, num_lookahead_tokens=num_lookahead), (
                "OK was a promise"
            )
            self.engine.compute(request, request.num_computed_tokens, request.num_computed_tokens + num_new)

    def settle(self, plan, expected, before):
        assert (plan is not None) == (expected is AllocStatus.OK)
        if plan is None:
            self.counts[expected.value] += 1
            assert picture(self.engine) == before
            return
        check_swapper(self.swapper)
        if self.random.random() < 0.6:  # otherwise some time later
            self.close_plan(plan)

    def close(self):
        if plans := self.swapper.list_open_plans():
            self.close_plan(self.random.choice(plans))

    def close_plan(self, plan):
        self.counts["shared"] += plan.num_shared_blocks
        if self.random.random() < 0.25:
            self.counts["failed"] += 1
            with pytest.raises(CopyFailedError):
                self.fail(plan)
        elif plan in self.invalid:
            with pytest.raises(InvalidBlockError, match="were reported as invalid"):
                self.engine.run(plan)
        else:
            self.counts[plan.direction.value] += 1
            self.engine.run(plan)
        with pytest.raises(PlanClosedError):
            self.random.choice([plan.commit, plan.abort])()

    def fail(self, plan):
        if plan.moves:
            self.engine.fail(plan, self.random.randint(0, len(plan.moves)))
        plan.abort()
        raise CopyFailedError("there was nothing to copy")

    def finish(self):
        """End or abort a request."""
        if not self.requests:
            return
        name = self.random.choice(list(self.requests))
        if self.engine.manager.holds_blocks(name):
            self.engine.manager.free(self.requests.pop(name))
        elif self.swapper.is_swapped_out(name):
            self.swapper.drop(self.requests.pop(name))

    def fork(self):
        if not (running := self.running()) or len(self.requests) > 8:
            return
        parent = self.random.choice(running)
        self.num_made += 1
        child = self.engine.make_request(f"r{self.num_made}", parent.all_token_ids)
        child.num_computed_tokens = parent.num_computed_tokens
        child.append_output_token_ids(self.make_tokens(2))
        self.engine.manager.fork(parent, child)
        self.requests[child.request_id] = child
        self.counts["fork"] += 1

    def evict(self):
        """Evict random blocks, as if they were invalid; plans that share them cannot be committed."""
        for pool in (self.engine.manager.block_pool, self.swapper.host_pool):
            if self.random.random() < 0.2:
                block = pool.blocks[self.random.randrange(1, pool.num_gpu_blocks)]
                pool.evict_blocks([block.block_id])
                plans = self.swapper.list_open_plans()
                self.invalid.update(plan for plan in plans if block in plan._shared)

    def blunder(self):
        """Check that a call for a request on the other side is refused and changes nothing."""
        if not self.requests:
            return
        request = self.random.choice(list(self.requests.values()))
        name = request.request_id
        calls = []
        if not self.engine.manager.holds_blocks(name):
            calls += [self.swapper.swap_out, self.swapper.can_swap_out, self.engine.manager.free]
        if not self.swapper.is_swapped_out(name):
            calls += [self.swapper.swap_in, self.swapper.can_swap_in, self.swapper.drop]
        call = self.random.choice(calls)
        before = picture(self.engine)
        with pytest.raises(InvalidArgumentError):
            call(request)
        assert picture(self.engine) == before

    # ---- the slow model --------------------------------------------------------------------------

    def judge_swap_out(self, request):
        tables = [
            self.engine.manager.get_table(request.request_id, i) for i in range(len(self.swapper._groups))
        ]
        return self.judge(request, tables, self.swapper.host_pool, 0, 0)

    def judge_swap_in(self, request, num_new_tokens, num_lookahead_tokens):
        tables = self.swapper._host._tables[request.request_id]
        num_tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        num_more = 0
        for spec, table in zip(self.engine.manager.groups, tables, strict=True):
            num_needed = -(-num_tokens // spec.block_size) - len(table.blocks)
            num_more += min(1, max(0, num_needed)) if isinstance(spec, MambaSpec) else max(0, num_needed)
        pool = self.engine.manager.block_pool
        num_to_leave = self.engine.manager.watermark_blocks if self.running() else 0
        return self.judge(request, tables, pool, num_more, num_to_leave)

    def judge(self, request, tables, pool, num_more, num_to_leave):
        """Compute the expected status by scanning all blocks of the pool for each block of the request."""
        num_computed = request.num_computed_tokens
        num_needed = num_taken = num_more
        for group, table in zip(self.swapper._groups, tables, strict=True):
            num_skipped = group.count_skipped_tokens(num_computed) // group.block_size
            for position, block in enumerate(table.blocks):
                if block.is_null or position < num_skipped:
                    continue
                is_full = (position + 1) * group.block_size <= num_computed
                copies = [other for other in pool.blocks if other.block_hash == block.block_hash]
                num_needed += 1
                if not is_full or block.block_hash is None or not copies:
                    num_taken += 1
                else:
                    (first,) = pool.get_cached_block(block.block_hash[:-4], [group.group_id])
                    num_taken += first.ref_cnt == 0
        if num_needed > pool.num_gpu_blocks - 1:
            return AllocStatus.NEVER
        if num_taken > pool.get_num_free_blocks() - num_to_leave:
            return AllocStatus.LATER
        return AllocStatus.OK

    def check(self):
        check_swapper(self.swapper)
        for request in self.running():
            self.engine.check(request)
        for request in self.swapped():
            self.engine.check_on_host(request)
        self.engine.check_cached()

    def end(self):
        """End all requests, and check that no block is in use."""
        for plan in self.swapper.list_open_plans():
            plan.abort()
        for request in self.running():
            self.engine.manager.free(request)
        for request in self.swapped():
            self.swapper.drop(request)
        self.check()
        for pool in (self.engine.manager.block_pool, self.swapper.host_pool):
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert self.swapper._host._tables == {}
        self.swapper.take_events()
        assert self.swapper.reset_prefix_cache()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_random_swaps_lose_no_byte_and_give_right_answers(shape, seed):
    life = Life(seed, SHAPES[shape], events=seed % 2 == 1, watermark=0.15 * ((seed + 1) % 3))
    for _ in range(500):
        life.step()
    life.end()
    assert min(life.counts[kind] for kind in ("out", "in", "failed", "later", "fork")) > 0, life.counts


def test_the_random_swaps_cover_all_events():
    counts = {}
    for seed in range(3):
        life = Life(seed, None, events=False)
        for _ in range(700):
            life.step()
        life.end()
        for kind, count in life.counts.items():
            counts[kind] = counts.get(kind, 0) + count
    assert min(counts.values()) > 5, counts
