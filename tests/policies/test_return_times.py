"""`ReturnTimes`: rates of return by class and age, and reuse distances, against slow models."""

import random
from math import exp

import pytest

from kv_pool.policies._return_times import NUM_AGES, NUM_COHORTS, ReturnTimes


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
            within = [cohort for cohort in returns.cohorts if cohort.start < stamp][-1].total - size
            after = sum(blocks for other, _, blocks in inside if other > stamp)
            assert abs(returns.leave(stamp, kind, size) - after) <= within
        assert sum(cohort.total for cohort in returns.cohorts) == sum(blocks for _, _, blocks in inside)
        for kind in range(2):
            counted = sum(cohort.counts[kind] for cohort in returns.cohorts)
            assert counted == sum(blocks for _, other, blocks in inside if other == kind)
        assert len(returns.cohorts) <= NUM_COHORTS


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
    shares = [1 - exp(-rate * width) for rate, width in zip(rates, returns.widths, strict=True)]
    for age in range(NUM_AGES):
        assert returns._find_value(rates, shares, age) == pytest.approx(
            find_best(rates, returns.widths, age), rel=0.01
        )


@pytest.mark.parametrize("seed", range(20))
def test_recent_evictions_equal_those_of_a_list(seed):
    """The blocks after the stamp are at most the number asked for, and their evicted ones are counted."""
    rng = random.Random(seed)
    returns = ReturnTimes(capacity=rng.choice([8, 100, 1000]), num_classes=2)
    entries = []  # [stamp, class, blocks in the cache, evicted blocks]
    for step in range(3000):
        action = rng.random()
        if action < 0.5 or not entries:
            kind, num_blocks = rng.randrange(2), rng.randint(1, 20)
            entries.append([returns.enter(float(step), kind, num_blocks), kind, num_blocks, 0])
            continue
        entry = rng.choice(entries)
        stamp, kind, num_cached, num_evicted = entry
        if action < 0.75:
            num_blocks = rng.randint(0, num_cached)
            returns.note_evicted(stamp, num_blocks)
            entry[2:] = num_cached - num_blocks, num_evicted + num_blocks
        else:
            returns.leave(stamp, kind, num_cached)
            returns.leave(stamp, kind, num_evicted, True)
            entries.remove(entry)
        num_asked = rng.randint(0, 2000)
        stamp, num_found = returns.count_recent(num_asked)
        recent = [entry for entry in entries if entry[0] > stamp]
        assert num_found == sum(entry[3] for entry in recent)
        assert sum(entry[2] + entry[3] for entry in recent) <= num_asked
