"""Failing loads, forks, swaps, tiers, aborts and preemptions over real bytes: see `failing_loads.py`."""

from collections import Counter

import pytest
from lives.failing_loads import KINDS, live

LIVES_PER_TEST = 30


@pytest.mark.parametrize(
    "first",
    [
        *range(0, 120, LIVES_PER_TEST),
        *[pytest.param(first, marks=pytest.mark.night) for first in range(120, 10_000, LIVES_PER_TEST)],
    ],
)
def test_no_hit_reads_bytes_not_computed_from_its_tokens(tmp_path, first):
    for seed in range(first, first + LIVES_PER_TEST):
        live(seed, tmp_path / str(seed))


@pytest.mark.slow
def test_the_lives_reach_every_case(tmp_path):
    happened = Counter()
    for kind in KINDS:
        for seed in range(12):
            happened += live(seed, tmp_path / f"{kind} {seed}", kind).tally
    wanted = {
        *("hit", "hit in tiers", "loads", "failed", "reports", "named", "named, swapped", "named, in a plan"),
        *("continued", "failed steps", "forks", "evicted", "grown", "reset"),
        *(("closed", way, is_done) for way in ("out", "in", "tiers") for is_done in (True, False)),
    }
    assert not wanted - happened.keys()
