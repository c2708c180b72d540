"""Tests of goals: shares, prices, one goal per plan."""

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.lab.plan.plan_report import PlanGoal, Prices, parse_prices, parse_share


@pytest.mark.parametrize(("text", "share"), [("0.35", 0.35), ("35%", 0.35), (" .5 ", 0.5), ("33.3 %", 0.333)])
def test_shares_are_numbers_or_percentages(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "half", "-1", "1,5", "50 %%"])
def test_other_texts_are_not_shares(text):
    with pytest.raises(InvalidArgumentError, match=r"is not a share; write it as 0\.35 or 35%"):
        parse_share(text)


def test_prices_by_million_tokens_or_by_hour():
    assert parse_prices("gpu=0.03, prefill=0.2", 1.0) == Prices(0.03, 0.2)
    assert parse_prices("host=2,gpu=3,disk=1,prefill=4", 1.0) == Prices(3.0, 4.0, 2.0, 1.0)
    # 10,000 tokens a second are 36 million an hour.
    assert parse_prices("gpu=1,gpu-hour=3.6", 10_000.0).prefill == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu=1", "needs gpu, and either prefill or gpu-hour"),
        ("prefill=1", "needs gpu"),
        ("gpu=1,prefill=1,gpu-hour=1", "either prefill or gpu-hour"),
        ("gpu=1,gpu=2,prefill=1", "each at most once"),
        ("gpu=1,ram=2,prefill=1", "'ram=2' is not a price"),
        ("gpu=one,prefill=1", "'one' is not a number"),
        ("gpu=0,prefill=1", "the price gpu is 0.0; it must be above 0"),
        ("gpu=nan,prefill=1", "the price gpu is nan"),
    ],
)
def test_incomplete_prices_are_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_prices(text, 1.0)


def test_plan_has_one_goal():
    with pytest.raises(InvalidArgumentError, match="not target_hit_rate and memory_bytes"):
        PlanGoal(0.5, 100)
    with pytest.raises(InvalidArgumentError, match="it must be above 0 and below 1"):
        PlanGoal(1.5)
    assert [PlanGoal().name, PlanGoal(0.5).name, PlanGoal(None, 1).name] == ["knee", "target", "memory"]
