"""`ReturnTimes`: rates of return by class and age, and reuse distances, against slow models."""

import random

import pytest

from kv_pool.core.return_times import NUM_AGES, NUM_COHORTS, ReturnTimes


@pytest.mark.parametrize("seed", range(5))
def test_distances_are_those_of_a_list_within_one_cohort(seed):
    rng = random.Random(seed)
    returns = ReturnTimes(320, 2)
    inside = []  # stamp, class, blocks
    for now in range(400):
        size = rng.randrange(1, 12)
        kind = rng.randrange(2)
        inside.append((returns.enter(float(now), kind, size), kind, size))
        if rng.random() < 0.4:
            stamp, kind, size = inside.pop(rng.randrange(len(inside)))
            place = max(index for index, start in enumerate(returns.starts) if start < stamp)
            cohort = returns.totals[place] - size
            after = sum(blocks for other, _, blocks in inside if other > stamp)
            assert abs(returns.leave(stamp, kind, size) - after) <= cohort
        assert sum(returns.totals) == sum(blocks for _, _, blocks in inside)
        for kind in range(2):
            counted = sum(counts[kind] for counts in returns.counts)
            assert counted == sum(blocks for _, other, blocks in inside if other == kind)
        assert len(returns.starts) <= NUM_COHORTS


def find_best(rates, widths, age):
    """Return the largest value over all ages to stop at, in small steps of time."""
    left, time, best = 1.0, 0.0, 0.0
    for rate, width in list(zip(rates, widths, strict=True))[age:]:
        for _ in range(2000):
            time += left * width / 2000
            left -= left * rate * width / 2000
        best = max(best, (1 - left) / time)
    return best


def test_values_are_the_best_share_for_the_time():
    rng = random.Random(1)
    returns = ReturnTimes(100, 1)
    returns.set_scale(1.0)
    rates = [rng.random() / width for width in returns.widths]
    for age in range(NUM_AGES):
        assert returns._find_value(rates, age) == pytest.approx(
            find_best(rates, returns.widths, age), rel=0.01
        )


def test_a_class_that_returns_is_worth_more():
    returns = ReturnTimes(64, 2)
    returns.set_scale(10.0)
    stamps = []
    for now in range(2000):
        stamps.append((now, returns.enter(float(now), now % 2, 4)))
        if now % 2 and len(stamps) > 10:
            freed, stamp = stamps[-11] if stamps[-11][0] % 2 else stamps[-10]
            returns.leave(stamp, 1, 4)
            returns.note_return(1, float(now - freed), 4)
    returns.update_values()
    for seconds in (4.0, 8.0):
        age = returns.find_age(seconds)
        assert returns.values[NUM_AGES + age] > 4 * returns.values[age]
