"""`EvictedRuns`: remembers evicted runs in at most 32 bytes each; a random test against a slow model."""

import random

import pytest

from kv_pool.policies._evicted_runs import NUM_WAYS, EvictedRuns


def make_key(number):
    return number.to_bytes(16, "big") + bytes(4)


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_found_until_they_are_removed(seed):
    rng = random.Random(seed)
    runs = EvictedRuns(32)
    model = {}
    num_removed = 0
    for stamp in range(1, 2000):
        key = make_key(rng.randrange(80))
        if rng.random() < 0.5:
            expected = model.pop(key, None)
            assert runs.pop(key) == expected
            continue
        if key in model:
            continue
        value = (stamp, stamp / 2, stamp % 8, rng.randrange(1, 9))
        forgotten = runs.add(key, *value)
        if forgotten is not None:
            num_removed += 1
            removed = [other for other, known in model.items() if known == forgotten]
            assert len(removed) == 1
            del model[removed[0]]
        model[key] = value
        assert len(model) <= 32
    assert num_removed > 100


def test_a_full_set_forgets_the_run_that_was_freed_first():
    runs = EvictedRuns(NUM_WAYS)
    for stamp in (3, 1, 4, 2):
        assert not runs.add(make_key(stamp), stamp, 0.0, 0, 1)
    assert runs.add(make_key(5), 5, 0.0, 0, 1) == (1, 0.0, 0, 1)


@pytest.mark.parametrize("num_runs", [3_000, 10_000, 30_000])
def test_an_evicted_run_takes_at_most_32_bytes(num_runs):
    runs = EvictedRuns(num_runs)
    num_places = runs.num_sets * NUM_WAYS
    assert num_runs <= num_places < 2 * num_runs
    tables = (runs.keys, runs.stamps, runs.times, runs.sizes)
    num_bytes = len(runs.kinds) + sum(len(one) * one.itemsize for one in tables)
    assert num_bytes / num_places <= 32
