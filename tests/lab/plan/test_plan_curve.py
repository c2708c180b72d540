"""Tests of `PlanCurve`: capacities for rates, and combined capacities of tiers."""

import random
from dataclasses import replace

import pytest
from lab.made_trace import make_random_records, record
from lab.plan.made_plan import make_settings

from kv_pool.lab.capacity import ModelKV
from kv_pool.lab.plan.plan_curve import PlanCurve
from kv_pool.lab.simulator import run_replay


def read_curve(settings):
    return PlanCurve(settings.open_trace(), ModelKV(1, 1, 1))


def test_capacity_for_a_rate_is_the_least_one(tmp_path):
    settings = make_settings(tmp_path, make_random_records(random.Random(1), 200, 8, True), clock="instant")
    curve = read_curve(settings)
    ceiling = curve.find_rate(curve.full_capacity)
    for share in (0.0, 0.3, 0.7, 1.0):
        found = curve.find_capacity(share * ceiling)
        rates = {n: run_replay(replace(settings, num_blocks=n)).token_hit_rate for n in (found - 1, found)}
        assert rates[found] >= share * ceiling
        assert found == curve.largest_request or rates[found - 1] < share * ceiling
    assert curve.find_capacity(ceiling + 1e-9) is None


def test_progress_goes_on_from_the_reading_to_the_pass(tmp_path):
    settings = make_settings(tmp_path, make_random_records(random.Random(1), 200, 8, True))
    shares = []
    curve = PlanCurve(settings.open_trace(), ModelKV(1, 1, 1), shares.append)
    assert shares == sorted(shares)
    assert len({share for share in shares if share > 0.5}) > 2
    assert shares[-1] <= 1
    num_notes = len(shares)
    curve.find_rate(curve.largest_request - 1)
    assert len(shares) == num_notes


def test_generated_blocks_are_part_of_the_trace_clock_only(tmp_path):
    records = [record(16, [1, 2], 9, 0), record(20, [1, 2, 3], 12, 500), record(16, [4, 5], 0, 700)]
    instant = read_curve(make_settings(tmp_path, records, clock="instant"))
    assert (instant.largest_request, instant.num_distinct, instant.span_hours) == (3, 4, 700 / 3_600_000)
    # 25 and 32 tokens: a full third block and a block of one token; a third and fourth full block.
    trace = read_curve(make_settings(tmp_path, records))
    assert (trace.largest_request, trace.num_distinct) == (4, 4 + 1 + 2)
    assert trace.tokens_in == instant.tokens_in == 52


def test_tiers_without_hits_add_all_their_blocks(tmp_path):
    unshared = [record(16, [2 * number, 2 * number + 1]) for number in range(10)]
    curve = read_curve(make_settings(tmp_path, unshared, clock="instant"))
    assert curve.combine(5, []) == 5
    assert curve.combine(5, [7]) == 12
    assert curve.combine(5, [7, 30]) == 42


def test_blocks_that_a_tier_gives_back_are_in_it_twice(tmp_path):
    # Two prompts of 4 blocks in turn: a pool of 6 blocks hits half of them.
    turns = [record(32, [1, 2, 3, 4] if turn % 2 else [5, 6, 7, 8]) for turn in range(1000)]
    curve = read_curve(make_settings(tmp_path, turns, clock="instant", convention="full_blocks"))
    assert curve.combine(4, [4]) == 6  # 4 + 4 - f * 4, with f = 1/2
    assert curve.combine(4, [8]) == 8
    assert curve.combine(8, [4]) == 12


@pytest.mark.parametrize("seed", range(5))
def test_combined_capacity_grows_with_the_tier(tmp_path, seed):
    settings = make_settings(tmp_path, make_random_records(random.Random(seed), 200, 8, True))
    curve = read_curve(settings)
    combined = [curve.combine(10, [tier]) for tier in range(1, 40)]
    assert combined == sorted(combined)
    assert all(10 <= found <= 10 + tier for tier, found in enumerate(combined, 1))
