"""A life finds each planted omission, in a bounded number of steps. Only plain sources can be patched."""

import pytest
from lives.disk_omissions import DISK_OMISSIONS
from lives.doubt_omissions import DOUBT_OMISSIONS
from lives.event_omissions import EVENT_OMISSIONS
from lives.life import Life
from lives.omissions import OMISSIONS

from kv_pool import COMPILED
from kv_pool.errors import KVPoolError

ALL = [*OMISSIONS, *EVENT_OMISSIONS, *DOUBT_OMISSIONS, *DISK_OMISSIONS]
SEEDS = range(6)
NUM_STEPS = 1500


def find(omission, monkeypatch, folder):
    """Return the first finding, and how many steps it took."""
    calls, num_before = [], 0
    omission.plant(monkeypatch, calls)
    for seed in SEEDS:
        life = Life(omission.kind, seed, folder / str(seed))
        try:
            life.run(NUM_STEPS)
        except (AssertionError, KVPoolError) as error:
            assert calls, "found, but not by the omission"
            return error, num_before + life.num_steps
        num_before += life.num_steps
    return None, num_before


@pytest.mark.skipif(COMPILED, reason="compiled classes cannot be patched")
@pytest.mark.parametrize("omission", ALL, ids=lambda omission: omission.name)
def test_a_life_finds_a_planted_omission(monkeypatch, tmp_path, omission):
    error, num_steps = find(omission, monkeypatch, tmp_path)
    assert error is not None, f"not found in {num_steps} steps"
