"""All requests that each fit into the pool alone end, in any mix: for the scheduler of the examples, with
preemption by recomputation and by swap. All small mixes are tried."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager.example_scheduler import Scheduler, Sequence, StandIn, generate_without_blocks

from kv_pool import (
    BlockHasher,
    BlockPool,
    KVCacheManager,
)
from kv_pool.core import invariants
from kv_pool.manager.preemption import PreemptionKind
from kv_pool.tiers.swapper import BlockSwapper

BLOCK_SIZE = 2
HASHER = BlockHasher("sha256", "s", BLOCK_SIZE)

RULES = {
    "recompute": lambda loss: PreemptionKind.RECOMPUTE,
    "swap": lambda loss: PreemptionKind.SWAP,
    "either": lambda loss: list(PreemptionKind)[loss.num_computed_tokens % 2],
}


class Counting:
    """An engine that only counts: no bytes, for speed."""

    class Nothing:
        def apply_moves(self, moves):
            pass

        def copy_to(self, other, moves):
            pass

    device = host = Nothing()

    def run(self, batch):
        for request, num_tokens in batch:
            assert num_tokens > 0
            assert request.num_computed_tokens + num_tokens <= request.num_tokens
        return [1 + request.num_tokens % 3 for request, _ in batch]


def make_scheduler(
    num_blocks,
    rule,
    budget=512,
    watermark=0.0,
    num_host_blocks=2,
    *,
    with_bytes=False,
    whole_prompts=True,
    **options,
):
    manager = KVCacheManager(BlockPool(num_blocks + 1, True, BLOCK_SIZE), watermark=watermark, **options)
    swapper = BlockSwapper(manager, BlockPool(num_host_blocks + 1, True, BLOCK_SIZE, medium="CPU"))
    engine = StandIn(manager, num_host_blocks + 1) if with_bytes else Counting()
    return Scheduler(manager, swapper, engine, RULES[rule], budget, 8, whole_prompts)


def run(scheduler, requests, arrivals=None):
    """Step until all requests have ended; each step must compute something."""
    arrivals = dict.fromkeys(requests, 0) if arrivals is None else arrivals
    # In each step the last request to be preempted computes a token. It loses its tokens to a more important
    # request only, and there are no more of these than requests.
    longest = len(requests) * sum(request.max_tokens for request in requests) + max(arrivals.values()) + 1
    for now in range(longest):
        for request in requests:
            if arrivals[request] == now:
                assert scheduler.add(request)
        if not scheduler.num_unfinished and now >= max(arrivals.values()):
            break
        had_work = scheduler.num_unfinished > 0
        computed = scheduler.step()
        assert (sum(computed.values()) > 0) == had_work
        invariants.check(scheduler.manager.block_pool)
        invariants.check(scheduler.swapper.host_pool)
    assert all(request.num_tokens == request.max_tokens for request in requests)
    pool, host_pool = scheduler.manager.block_pool, scheduler.swapper.host_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert host_pool.get_num_free_blocks() == host_pool.num_gpu_blocks - 1


def make_requests(shapes, priorities, *, shares_prompts):
    requests = []
    for number, ((num_prompt, num_output), priority) in enumerate(zip(shapes, priorities, strict=False)):
        first = 0 if shares_prompts else 100 * number
        request = Sequence(f"r{number}", list(range(first, first + num_prompt)), HASHER, num_output, priority)
        request.arrival_ms = float(number)
        requests.append(request)
    return requests


def list_mixes(num_blocks, num_requests):
    """Yield prompt and output lengths of requests that fit alone: small, half of the pool, all of it."""
    num_slots = num_blocks * BLOCK_SIZE
    shapes = {(1, 2), (num_blocks, 1), (num_blocks, num_blocks), (1, num_slots - 1), (num_slots - 1, 1)}
    if num_requests == 2:
        return list(itertools.product(shapes, repeat=2))
    return list(itertools.combinations_with_replacement(sorted(shapes), num_requests))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("watermark", [0.0, 0.5])
@pytest.mark.parametrize(
    "num_blocks", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_every_small_mix_of_requests_ends(num_blocks, watermark, rule):
    done = Counter()
    for num_requests in (2, 3):
        for shapes, budget, shares_prompts, whole_prompts in itertools.product(
            list_mixes(num_blocks, num_requests), [1, 3, 8], [False, True], [False, True]
        ):
            # The important request: the first, or the last.
            for priorities in ((1,) + (0,) * (num_requests - 1), (0,) * (num_requests - 1) + (1,)):
                scheduler = make_scheduler(num_blocks, rule, budget, watermark, whole_prompts=whole_prompts)
                run(scheduler, make_requests(shapes, priorities, shares_prompts=shares_prompts))
                done += scheduler.done
    if not watermark:
        assert (done["swapped out"] > 50) == (rule != "recompute")
        assert (done["freed, to be recomputed"] > 50) or rule == "swap"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_larger_mixes_end_with_the_right_tokens(data):
    """Random arrivals and priorities, common prefixes; bytes are written, copied and read."""
    num_blocks = data.draw(st.integers(2, 12), "blocks")
    num_slots = num_blocks * BLOCK_SIZE
    scheduler = make_scheduler(
        num_blocks,
        data.draw(st.sampled_from(list(RULES)), "rule"),
        data.draw(st.integers(1, 20), "budget"),
        data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]), "watermark"),
        data.draw(st.integers(1, 12), "host blocks"),
        with_bytes=True,
        whole_prompts=data.draw(st.booleans(), "whole prompts"),
    )
    requests = []
    arrivals = {}
    for number in range(data.draw(st.integers(1, 7), "requests")):
        num_prompt = data.draw(st.integers(1, num_slots - 1), "prompt")
        num_output = data.draw(st.integers(1, num_slots - num_prompt), "output")
        num_shared = data.draw(st.integers(0, num_prompt), "shared")
        prompt = [*range(num_shared), *range(100 * number, 100 * number + num_prompt - num_shared)]
        request = Sequence(f"r{number}", prompt, HASHER, num_output, data.draw(st.integers(0, 2), "priority"))
        arrivals[request] = data.draw(st.integers(0, 30), "arrival")
        request.arrival_ms = float(arrivals[request])
        requests.append(request)
    run(scheduler, requests, arrivals)
    for request in requests:
        assert request.all_token_ids == generate_without_blocks(request)
