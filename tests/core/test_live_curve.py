"""The sample of a live curve: exact if it has all blocks, bounded, and sound in every state."""

import random
from math import ceil
from types import SimpleNamespace

import pytest
from core.policy_pool import BLOCK_SIZE, HASHER, make_manager, run

from kv_pool import BlockPool, CorruptedPoolError, Request
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.live_curve import MAX_MULTIPLE, NUM_STEPS, ROW, STEPS_PER_CAPACITY, LiveCurve
from kv_pool.core.sampled_stack import SampledBlock

KINDS = {"plain": BlockPool, "runs": RunBlockPool}


class SlowCurve:
    """The LRU stack as a list, most recent block first, and the look-ups by their distance in it."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.order = []
        self.steps = [0.0] * ROW
        self.weight = 1.0
        self.looked_up = self.hit = 0.0
        self.until_next_period = self.period = 2 * capacity

    def look_up(self, chain, num_hits):
        for keys, is_hit in ((chain[:num_hits], 1), (chain[num_hits:], 0)):
            for key in keys:
                distance = self.order.index(key) + 1 if key in self.order else 10**9
                step = -(-distance * STEPS_PER_CAPACITY // self.capacity)
                self.steps[min(step, NUM_STEPS + 1)] += self.weight
            self.looked_up += self.weight * len(keys)
            self.hit += self.weight * len(keys) * is_hit
            self.until_next_period -= len(keys)
            while self.until_next_period <= 0:
                self.until_next_period += self.period
                self.weight *= 2 ** (1 / 16)
        self.order = [*chain, *[key for key in self.order if key not in chain]]


def make_sampled(num_blocks):
    """Return a manager whose live curve has all blocks in its sample."""
    manager = make_manager(num_blocks, None, live_curve=True)
    manager.block_pool.parts[:] = [LiveCurve(num_blocks, BLOCK_SIZE, lambda: 0.0, max_rate=1.0)]
    return manager


def make_prompts(rng, num_requests, max_blocks):
    """Yield the tokens of requests that continue each other's prefixes, with a partial block at the end."""
    chains = [[]]
    for number in range(num_requests):
        known = rng.choice(chains[-20:])
        keep = rng.randrange(len(known) // BLOCK_SIZE + 1) * BLOCK_SIZE
        length = rng.randint(1, max_blocks) * BLOCK_SIZE
        new = [1000 * number + position for position in range(length)]
        chains.append([*known[:keep], *new][: max_blocks * BLOCK_SIZE])
        yield [*chains[-1], 10**9 + number]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_sample_of_all_blocks_has_exact_stack_distances(kind, seed):
    rng = random.Random(seed)
    capacity = rng.choice([16, 20, 50, 64])
    options = {"early_share": 0.0} if kind == "runs" else {}
    manager = make_manager(capacity, None, KINDS[kind], live_curve=True, **options)
    pool = manager.block_pool
    curve = LiveCurve(capacity, BLOCK_SIZE, lambda: 0.0, max_rate=1.0)
    pool.parts.append(curve)
    slow = SlowCurve(capacity)
    for number, tokens in enumerate(make_prompts(rng, 300, 12)):
        num_hits = run(manager, str(number), tokens)
        slow.look_up(Request("r", tokens, HASHER).block_hashes, num_hits)
        invariants.check(pool)
    assert curve.rate == 1.0
    assert [sum(curve.counts[step::ROW]) for step in range(ROW)] == pytest.approx(slow.steps)
    assert (curve.looked_up_blocks, curve.hit_blocks) == pytest.approx((slow.looked_up, slow.hit))
    assert curve.weight == pytest.approx(slow.weight)
    # The pool hits what is within its capacity; a running request's partial block takes one block of that.
    last_step = -(-(capacity - 1) * STEPS_PER_CAPACITY // capacity)
    assert sum(slow.steps[: last_step + 1]) <= slow.hit * 1.000001
    assert sum(slow.steps[: STEPS_PER_CAPACITY + 1]) >= slow.hit * 0.999999
    assert curve.hit_tokens == pytest.approx(BLOCK_SIZE * slow.hit)
    assert curve.looked_up_tokens > BLOCK_SIZE * slow.looked_up  # each prompt has a partial block


def make_blocks(*keys):
    """Return blocks that look like cached ones; no key for a null block."""
    return [KVCacheBlock(1, 1, key, is_null=key is None) for key in keys]


@pytest.mark.parametrize("seed", range(20))
def test_the_stack_is_sound_after_any_calls(seed):
    """Calls as hybrid models, long generations, resets and resizes make them, on a small sample."""
    rng = random.Random(seed)
    pool = BlockPool(rng.choice([9, 40, 200]), True, 4, live_curve=True)
    curve = LiveCurve(
        pool.num_gpu_blocks - 1, 4, lambda: 0.0, max_samples=rng.choice([1, 3, 60, 600]), max_rate=1.0
    )
    pool.parts[:] = [curve]
    chains = [[]]
    for number in range(600):
        known = rng.choice(chains[-8:])
        chain = [
            *known[: rng.choice([len(known), rng.randrange(len(known) + 1)])],
            *(b"%d %d" % (number, n) for n in range(rng.randrange(9))),
        ]
        chains.append(chain)
        start_at = rng.choice([min(len(known), len(chain)), rng.randrange(len(chain) + 1)])
        nulls = rng.randrange(start_at + 1) if rng.random() < 0.3 else 0
        table = make_blocks(*[None] * nulls, *chain[nulls:])
        kind = rng.random()
        if kind < 0.4:
            curve.note_touched(table[:start_at], 0, True)
        elif kind < 0.97:
            request = SimpleNamespace(num_prompt_tokens=4 * rng.randrange(12)) if rng.random() < 0.5 else None
            cached = table[start_at:]
            if cached and rng.random() < 0.1:
                cached[rng.randrange(len(cached))] = make_blocks(None)[0]
            curve.note_cached(request, table, cached, start_at, 4, 0)
        elif kind < 0.98:
            curve.note_resized(rng.randint(2, 301))
            limit = ceil(MAX_MULTIPLE * curve.capacity * curve.rate)
            assert (curve.stack.limit, curve.looked_up_blocks, sum(curve.counts)) == (limit, 0, 0)
        else:
            curve.note_reset()
            assert not curve.stack.blocks
        invariants.check_live_curve(pool)
    assert len(curve.stack.blocks) <= curve.stack.limit
    assert sum(curve.counts) <= curve.looked_up_blocks + 1e-6 or curve.rate < 1


def spoil_stamps(stack):
    stack.order[0].stamp = stack.order[1].stamp


def spoil_keys(stack):
    stack.blocks[b"other"] = stack.order[0]


def spoil_parent(stack):
    stack.order[0].parent = SampledBlock(b"gone", None, 0, 0)


def spoil_limit(stack):
    stack.limit = 1


@pytest.mark.parametrize(
    ("spoil", "number"), [(spoil_stamps, "D1"), (spoil_keys, "D2"), (spoil_parent, "D3"), (spoil_limit, "D4")]
)
def test_a_spoilt_stack_violates_an_invariant(spoil, number):
    manager = make_sampled(30)
    run(manager, "a", range(21))
    stack = manager.block_pool.live_curve.stack
    spoil(stack)
    with pytest.raises(CorruptedPoolError, match=f"^{number}: "):
        invariants.check(manager.block_pool)
