"""Tests of a plan's sentences and picture."""

import random

import pytest
from lab.made_trace import record
from lab.plan.made_plan import MODEL, make_settings
from lab.plan.test_make_plan import TURNS, make_conversations
from msgspec.structs import replace

from kv_pool.lab.pictures.hit_rates import draw_plan
from kv_pool.lab.plan.make_plan import plan_capacity
from kv_pool.lab.plan.plan_report import PlanGoal, Prices
from kv_pool.lab.plan.plan_words import describe_plan, format_bytes, report_plan
from kv_pool.lab.settings import EngineRates
from kv_pool.lab.tables import ReportTable


def describe(folder, records, goal=None, tiers=None, **changes):
    settings = make_settings(folder, records, **changes)
    return describe_plan(plan_capacity(settings, MODEL, goal, host_bytes=tiers, disk_bytes=tiers))


def test_sizes_are_in_gib_or_mib():
    assert format_bytes(80 * 2**30) == "80.0 GiB"
    assert format_bytes(1.5 * 2**20) == "1.5 MiB"


def test_target_says_whether_the_replay_reaches_it(tmp_path):
    lines = describe(
        tmp_path, TURNS, PlanGoal(target_hit_rate=0.61), clock="instant", convention="full_blocks"
    )
    assert lines[0] == "0.0 MiB (8 blocks) is the least capacity with a hit rate of 61.00%."
    assert lines[1].startswith("Its hit rate is 80.00% of the prompt tokens; the most is 80.00%, from ")
    assert "One request at a time" in lines[3]
    assert "Lower tiers add nothing: the pool has all hits." in lines
    assert "The replay has 80.00% and reaches 61.00%." in lines
    assert lines[-1].startswith("All predictions agree with their replays: the largest difference is 0.00")


def test_too_little_memory_says_that_requests_wait(tmp_path):
    records = [record(32, [4 * number + block for block in range(4)], 8) for number in range(4)]
    rates = EngineRates(1e9, 8.0)
    lines = describe(tmp_path, records, PlanGoal(memory_bytes=11 * 64), 0, rates=rates)
    assert any(line.startswith("The recommended pool has less than that: requests wait") for line in lines)
    lines = describe(tmp_path, records, rates=rates)
    assert lines[:2] == [
        "The curve has no knee; 0.0 MiB (5 blocks) is the least capacity with all hits.",
        "Running requests need more: recommended is 0.0 MiB (20 blocks), which holds them during 99% of the "
        "time.",
    ]


def test_difference_above_the_tolerance_is_said(tmp_path):
    records = make_conversations(random.Random(4), 600)
    lines = describe(tmp_path, records, PlanGoal(memory_bytes=61 * 64), 0)
    assert any(
        line.startswith("The prediction for the pool differs from its replay by 1.")
        and "more than 1.00: use the replayed rate. Requests waited" in line
        for line in lines
    )
    assert not any(line.startswith("All predictions agree") for line in lines)


def test_prices_and_tiers_have_their_sentences(tmp_path):
    prices = Prices(gpu=0.1 * 2**24, prefill=1.0, host=0.001 * 2**24)
    lines = describe(tmp_path, TURNS, PlanGoal(prices=prices), clock="instant", convention="full_blocks")
    assert lines[0].endswith("(4 blocks) is where savings minus costs are largest.")
    assert lines[2] == "It costs 0.5 an hour, and its hits save 0."
    assert any(line.startswith("A host tier of 0.0 MiB adds 80.00 points") for line in lines)


def test_a_capacity_that_is_not_of_the_curve_is_not_counted(tmp_path):
    plan = plan_capacity(make_settings(tmp_path, make_conversations(random.Random(1), 80)), MODEL)
    apart = replace(plan.recommended, num_blocks=plan.points[-1].num_blocks + 1)
    shown = report_plan(replace(plan, recommended=apart)).shown
    curve = next(part for part in shown if isinstance(part, ReportTable))
    note = shown[shown.index(curve) + 1]
    assert note.startswith(f"the table shows {len(curve.rows) - 1} of {len(plan.points)} capacities; ")


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_picture_is_drawn(tmp_path, name):
    plan = plan_capacity(make_settings(tmp_path, make_conversations(random.Random(1), 80)), MODEL)
    draw_plan(plan, str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 5000
    if name.endswith("svg"):
        text = (tmp_path / name).read_text()
        for label in ("recommended", "replayed, with its tiers", "demand of running requests"):
            assert f"<!-- {label} -->" in text, label
