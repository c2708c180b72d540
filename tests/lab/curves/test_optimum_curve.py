"""Tests of optimal replacement: exhaustive search, a slow model, replays in the pool, and LRU below it."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from lab.curves.made_reuse import make_repeating_records, read_prompts, read_reuse, record_reuse
from lab.made_trace import make_random_records, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.lab.curves.optimum_curve import OptimumCurve
from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay

SIZE = 4


def search(prompts, capacity, count, keep_prefixes=False):
    """Return the largest sum of `count(prompt, number of blocks hit)` over all replacements.

    Args:
        keep_prefixes: True to evict no block before its children.
    """
    parents = {}
    best = {frozenset(): 0}  # by the set of cached blocks
    for prompt in prompts:
        if prompt.size.num_blocks > capacity:
            continue
        ids = [prompt.keys[start : start + 8] for start in range(0, len(prompt.keys), 8)]
        parents |= dict(zip(ids, [None, *ids], strict=False))
        after = {}
        for cached, value in best.items():
            num_hits = 0
            while num_hits < prompt.size.max_hit and ids[num_hits] in cached:
                num_hits += 1
            others = cached.difference(ids)
            most = min(len(others), capacity - prompt.size.num_blocks)
            for num_kept in range(0 if keep_prefixes else most, most + 1):
                for kept in combinations(others, num_kept):
                    state = frozenset(kept).union(ids)
                    if keep_prefixes and not all(parents[block] in {None, *state} for block in state):
                        continue
                    after[state] = max(after.get(state, 0), value + count(prompt, num_hits))
        best = after
    return max(best.values())


def count_blocks(prompt, num_hits):
    return num_hits


def count_tokens(prompt, num_hits):
    return min(num_hits * SIZE, prompt.size.input_length)


def list_small_cases(seeds):
    """Yield (settings, prompts) with few blocks for an exhaustive search."""
    for seed in seeds:
        rng = random.Random(seed)
        if seed % 2:
            yield make_repeating_records(seed, rng.choice([5, 7, 9]), SIZE, longest=3, num_kept=4)
        else:
            yield make_random_records(rng, rng.choice([5, 7]), SIZE, partial_ids=seed % 4 == 0)


@pytest.mark.parametrize("part", range(4))
def test_exhaustive_search_finds_no_more_hits(tmp_path, part):
    """At least 1,000 cases in all parts: traces, conventions and capacities."""
    num_cases = 0
    for records in list_small_cases(range(part * 25, part * 25 + 25)):
        path = write_trace(tmp_path / "trace.jsonl", records)
        for convention in CONVENTIONS:
            settings = ReplaySettings(str(path), 1, trace_block_size=SIZE, convention=convention)
            prompts, _, key_bytes = read_prompts(settings)
            reuse = record_reuse(prompts, SIZE, key_bytes)
            if reuse.num_distinct > 9:
                continue
            curve = OptimumCurve(reuse)
            for capacity in range(1, reuse.num_distinct + 1):
                num_cases += 1
                num_blocks, num_tokens = curve.count_hits(capacity)
                assert num_blocks == search(prompts, capacity, count_blocks)
                most_tokens = search(prompts, capacity, count_tokens)
                assert num_tokens <= most_tokens <= curve.bound_tokens(capacity)
                if curve.has_optimal_tokens:
                    assert num_tokens == most_tokens == curve.bound_tokens(capacity)
                keeping_prefixes = search(prompts, capacity, count_blocks, keep_prefixes=True)
                assert keeping_prefixes <= num_blocks
                if curve.is_prefix_closed:
                    assert keeping_prefixes == num_blocks
    assert num_cases >= 250


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_optimum_in_the_pool_equals_the_curve(tmp_path, convention, seed):
    records = make_random_records(random.Random(seed), 70, SIZE, partial_ids=True)
    if seed % 2:
        records = make_repeating_records(seed, 70, SIZE)
    path = write_trace(tmp_path / "trace.jsonl", records)
    settings = ReplaySettings(str(path), 1, trace_block_size=SIZE, convention=convention, policy="optimum")
    reuse = read_reuse(replace(settings, policy="lru"))
    curve = OptimumCurve(reuse)
    for capacity in random.Random(seed).sample(
        range(min(reuse.sizes.list_all("num_blocks")), reuse.num_distinct + 4), 5
    ):
        report = run_replay(replace(settings, num_blocks=capacity))
        assert (report.blocks_hit, report.tokens_hit) == curve.count_hits(capacity)


@pytest.mark.parametrize(
    "setting", [{"clock": "trace"}, {"groups": "full,window:9"}, {"disk_tier": 5}, {"keep_prefix_tokens": 8}]
)
def test_optimum_is_refused_where_it_is_none(setting):
    settings = ReplaySettings("mooncake_conversation", 500, policy="optimum", **setting)
    with pytest.raises(InvalidArgumentError, match=r"no optimum: .*the optimum is .*; leave the def"):
        run_replay(settings)
