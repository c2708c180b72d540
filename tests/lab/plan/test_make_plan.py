"""Tests of `plan_capacity`: predictions beside replays, goals, demand, tiers, block sizes, errors."""

import json
import random
from dataclasses import replace

import pytest
from lab.made_trace import make_random_records, record
from lab.plan.made_plan import MODEL, make_settings, plan_records
from lab.test_schemas import validator

from kv_pool import InvalidArgumentError
from kv_pool.lab.capacity import ModelCompute
from kv_pool.lab.plan.make_plan import TOLERANCE, plan_capacity
from kv_pool.lab.plan.plan_report import PlanGoal, Prices
from kv_pool.lab.report import write_json
from kv_pool.lab.settings import EngineRates
from kv_pool.lab.simulator import run_replay

# Two prompts of four blocks of 8 tokens in turn. With `full_blocks`, 8 prompts hit one block more for each
# block of the pool beyond 4, and everything from 8 blocks on.
TURNS = [record(32, [1, 2, 3, 4] if turn % 2 else [5, 6, 7, 8], timestamp=1000 * turn) for turn in range(10)]


@pytest.mark.parametrize("seed", range(6))
def test_instant_predictions_equal_replays(tmp_path, seed):
    rng = random.Random(seed)
    records = make_random_records(rng, 150, 8, partial_ids=True)
    settings = make_settings(tmp_path, records, clock="instant")
    goals = [None, PlanGoal(target_hit_rate=0.1), PlanGoal(memory_bytes=(rng.randrange(12, 60) + 1) * 64)]
    for goal in goals:
        check = plan_capacity(settings, MODEL, goal, host_bytes=0, disk_bytes=0).checks[0]
        assert check.predicted_tokens == check.replayed_tokens
        assert (check.tolerance, check.agrees) == (0.0, True)


def test_target_is_the_least_capacity(tmp_path):
    settings = make_settings(tmp_path, TURNS, clock="instant", convention="full_blocks")
    assert plan_capacity(settings, MODEL, PlanGoal(target_hit_rate=0.5)).goal_blocks == 7
    assert run_replay(replace(settings, num_blocks=6)).token_hit_rate == 8 * 16 / 320
    plan = plan_capacity(settings, MODEL, PlanGoal(target_hit_rate=0.61))
    assert plan.goal_blocks == plan.recommended.num_blocks == 8
    assert plan.recommended.token_hit_rate == 0.8
    assert plan.recommended.prefill_speedup == pytest.approx(5)
    assert plan.recommended.memory_bytes == 9 * 64
    assert plan.tiers == []  # the pool has all hits


def test_target_above_the_ceiling_names_it(tmp_path):
    settings = make_settings(tmp_path, TURNS, clock="instant", convention="full_blocks")
    with pytest.raises(
        InvalidArgumentError, match=r"90\.00%: without evictions the trace has 80\.00%.*8 blocks"
    ):
        plan_capacity(settings, MODEL, PlanGoal(target_hit_rate=0.9))


def test_memory_below_the_largest_request_is_an_error(tmp_path):
    settings = make_settings(tmp_path, TURNS, clock="instant")
    with pytest.raises(
        InvalidArgumentError, match=r"hold 3 blocks of 8 tokens .* the largest request needs 4"
    ):
        plan_capacity(settings, MODEL, PlanGoal(memory_bytes=4 * 64))
    assert plan_capacity(settings, MODEL, PlanGoal(memory_bytes=5 * 64)).goal_blocks == 4


def test_tiers_hold_what_the_pool_evicts(tmp_path):
    settings = make_settings(tmp_path, TURNS, clock="instant", convention="full_blocks")
    plan = plan_capacity(
        settings, MODEL, PlanGoal(memory_bytes=5 * 64), host_bytes=12 * 64, disk_bytes=8 * 64
    )
    assert [tier.name for tier in plan.tiers] == ["host", "disk"]
    assert [check.name for check in plan.checks] == ["pool", "pool and host", "pool, host and disk"]
    assert (plan.checks[0].predicted_tokens, plan.checks[0].replayed_tokens) == (0, 0)
    for check in plan.checks[1:]:
        assert check.predicted_tokens == check.replayed_tokens == 8 * 32
    assert [tier.points for tier in plan.tiers] == [pytest.approx(80), 0]
    assert plan.tiers[0].points_per_gib == pytest.approx(80 / (12 * 64 / 2**30))


@pytest.mark.parametrize("sizes", [(20, 20, 0), (20, 60, 0), (40, 10, 0), (20, 40, 80)])
def test_tiers_are_predicted_within_the_tolerance(tmp_path, sizes):
    records = make_conversations(random.Random(3), 400)
    settings = make_settings(tmp_path, records, clock="instant")
    pool, host, disk = sizes
    plan = plan_capacity(
        settings, MODEL, PlanGoal(memory_bytes=(pool + 1) * 64), host_bytes=host * 64, disk_bytes=disk * 64
    )
    assert plan.checks[0].predicted_tokens == plan.checks[0].replayed_tokens
    for check in plan.checks[1:]:
        assert abs(check.predicted - check.replayed) < 3 * TOLERANCE
        assert check.agrees == (abs(check.predicted - check.replayed) <= TOLERANCE)


def make_conversations(rng, num_turns, ms_between=50):
    """Return turns of 40 conversations that grow by two blocks."""
    lengths = {}
    records = []
    for turn in range(num_turns):
        name = rng.randrange(40)
        length = lengths[name] = lengths.get(name, 0) % 10 + 2
        ids = [1000 * name + block for block in range(length)]
        records.append(record(8 * length + 3, ids, rng.randrange(1, 20), ms_between * turn))
    return records


def test_running_requests_raise_the_recommendation(tmp_path):
    # Four prompts without common blocks arrive at once, and each runs for a second.
    records = [record(32, [4 * number + block for block in range(4)], 8) for number in range(4)]
    settings = make_settings(tmp_path, records, rates=EngineRates(1e9, 8.0))
    plan = plan_capacity(settings, MODEL)
    assert plan.demand is not None
    assert (plan.demand.peak_blocks, plan.demand.p99_blocks, plan.demand.peak_running) == (20, 20, 4)
    assert plan.goal_blocks == 5
    assert plan.recommended.num_blocks == 20
    assert plan.checks[0].waited_ms == 0
    given = plan_capacity(settings, MODEL, PlanGoal(memory_bytes=11 * 64), host_bytes=0, disk_bytes=0)
    assert given.recommended.num_blocks == 10
    assert given.checks[0].waited_ms > 0


def test_trace_clock_predicts_with_generated_blocks(tmp_path):
    settings = make_settings(tmp_path, make_conversations(random.Random(4), 600, ms_between=200))
    for num_blocks in (60, 120, 160, 240):
        goal = PlanGoal(memory_bytes=(num_blocks + 1) * 64)
        plan = plan_capacity(settings, MODEL, goal, host_bytes=0, disk_bytes=0)
        check, unlimited = plan.checks[0], plan.checks[-1]
        assert plan.demand.peak_blocks < 60
        assert check.agrees, num_blocks
        assert check.tolerance == TOLERANCE
        instant = plan_capacity(replace(settings, clock="instant"), MODEL, goal, host_bytes=0, disk_bytes=0)
        assert check.predicted < instant.checks[0].predicted - TOLERANCE  # prompts alone are not enough
        assert unlimited.name == "pool for all blocks"
        assert unlimited.predicted == plan.ceiling


def test_prices_choose_where_more_costs_more_than_it_saves(tmp_path):
    # In 9 s 256 tokens are hits in 8 blocks: 102,400 an hour. A block is 2**-24 GiB.
    settings = make_settings(tmp_path, TURNS, clock="instant", convention="full_blocks")
    gib_block = 2**24
    cheap = plan_capacity(settings, MODEL, PlanGoal(prices=Prices(gpu=0.001 * gib_block, prefill=1.0)))
    assert cheap.recommended.num_blocks == 8
    assert cheap.saved_per_hour == pytest.approx(0.1024)
    assert cheap.cost_per_hour == pytest.approx(0.009)
    dear = Prices(gpu=0.1 * gib_block, prefill=1.0, host=0.001 * gib_block)
    plan = plan_capacity(settings, MODEL, PlanGoal(prices=dear))
    assert plan.recommended.num_blocks == 4
    assert [(tier.name, tier.points) for tier in plan.tiers] == [("host", pytest.approx(80))]
    assert plan.checks[1].replayed == 0.8


def test_prices_choose_among_capacities_for_running_requests(tmp_path):
    settings = make_settings(tmp_path, make_conversations(random.Random(4), 300))
    dear = plan_capacity(settings, MODEL, PlanGoal(prices=Prices(gpu=2.0**30, prefill=1.0)))
    assert dear.demand is not None
    assert dear.goal_blocks == dear.recommended.num_blocks == dear.demand.p99_blocks > dear.largest_request
    # Of the points of the curve that are large enough, none saves more.
    cheap = plan_capacity(settings, MODEL, PlanGoal(prices=Prices(gpu=100_000.0, prefill=1.0)))
    per_rate = cheap.saved_per_hour / cheap.recommended.token_hit_rate
    net = {
        point.num_blocks: point.token_hit_rate * per_rate - point.memory_bytes / 2**30 * 100_000
        for point in cheap.points
        if point.num_blocks >= cheap.demand.p99_blocks
    }
    assert cheap.saved_per_hour - cheap.cost_per_hour == pytest.approx(max(net.values()))
    assert cheap.recommended.num_blocks == max(net, key=net.get) > cheap.demand.p99_blocks


def test_prices_need_arrival_times(tmp_path):
    settings = make_settings(tmp_path, [record(32, [1, 2, 3, 4]) for _ in range(3)], clock="instant")
    with pytest.raises(InvalidArgumentError, match="all requests of the trace arrive at the same time"):
        plan_capacity(settings, MODEL, PlanGoal(prices=Prices(1.0, 1.0)))


def test_small_blocks_share_more_of_a_token_trace(tmp_path):
    # Prompts of 64 tokens have the first 48 in common: 3 blocks of 16, 1 of 32, none of 64.
    prompts = [[*range(48), *range(1000 * number, 1000 * number + 16)] for number in range(1, 9)]
    records = [{"token_ids": prompt, "timestamp": 10 * number} for number, prompt in enumerate(prompts)]
    settings = make_settings(tmp_path, records, clock="instant", trace_block_size=None, block_size=32)
    plan = plan_capacity(settings, MODEL, PlanGoal(memory_bytes=8 * 64 * 17))
    found = {size.block_size: (size.num_blocks, size.token_hit_rate) for size in plan.block_sizes}
    assert found[16] == (8 * 17 // 2 - 1, 7 * 48 / 512)
    assert found[32] == (8 * 17 // 4 - 1, 7 * 32 / 512)
    assert found[64] == (8 * 17 // 8 - 1, 0)
    assert plan.best_block_size == 16
    last = plan.checks[-1]
    assert (last.name, last.predicted_tokens, last.replayed_tokens) == ("pool, blocks of 16", 336, 336)


def test_hash_ids_allow_multiples_of_their_block_size_only(tmp_path):
    plan = plan_records(tmp_path, TURNS, clock="instant", memory=60)
    assert [size.block_size for size in plan.block_sizes] == [8, 16, 32, 64, 128]
    assert plan_records(tmp_path, TURNS, clock="instant", memory=60, block_sizes=[4, 6]).block_sizes == []


def test_speed_up_in_flops_counts_linear_and_attention(tmp_path):
    # 10 prompts of 32 tokens, 8 hit completely: with `full_blocks_cap` 24 tokens of each.
    settings = make_settings(tmp_path, TURNS, clock="instant")
    compute = ModelCompute(hidden_size=2, num_heads=1, intermediate_size=4)
    model = replace(MODEL, compute=compute)
    check = plan_capacity(settings, model, PlanGoal(memory_bytes=64 * 64)).checks[0]
    assert check.speedup_by_tokens == pytest.approx(320 / (320 - 8 * 24))
    linear = 2 * 1 * (2 * 2 * (1 + 1) * 2 + 3 * 2 * 4)  # 2 FLOPs per weight; head size 2
    attention = 2 * 1 * 1 * 2
    whole = linear * 32 + attention * 32**2
    hit = linear * 24 + attention * 24**2
    assert check.speedup_by_flops == pytest.approx(10 * whole / (10 * whole - 8 * hit))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "fifo"}, "a plan ignores policy"),
        ({"groups": "full,window:16", "host_tier": 4}, "a plan ignores groups, host_tier"),
        ({"clock": "wall"}, "unknown clock 'wall'"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        plan_capacity(make_settings(tmp_path, TURNS, **changes), MODEL)


def test_plan_matches_its_schema(tmp_path):
    settings = make_settings(tmp_path, make_conversations(random.Random(5), 100))
    prices = PlanGoal(prices=Prices(2.0**24, 1.0, 2.0**20, 2.0**10))
    for goal in (None, PlanGoal(target_hit_rate=0.2), prices):
        path = tmp_path / "plan.json"
        write_json(plan_capacity(settings, MODEL, goal), str(path))
        validator("plan").validate(json.loads(path.read_text()))
