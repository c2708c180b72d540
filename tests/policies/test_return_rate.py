"""`ReturnRate` beats LRU where returns can be told apart, and loses little elsewhere; on a bundled trace."""

import pytest
from lab.made_trace import record, write_trace

from kv_pool import BlockPool
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay


def count_hits(trace, num_blocks, policy, limit=None):
    return run_replay(ReplaySettings(str(trace), num_blocks, policy=policy, limit=limit)).blocks_hit


@pytest.mark.parametrize("capacity", [pytest.param(1000, marks=pytest.mark.slow), 3000])
def test_a_share_of_the_gap_is_closed_on_the_bundled_trace(capacity):
    lru, ours, optimum = (
        count_hits("mooncake_conversation", capacity, policy, 2000)
        for policy in ("lru", "return_rate", "optimum")
    )
    assert lru + (optimum - lru) // 10 < ours <= optimum


def make_scans(path, seconds):
    """Write a trace of eight prompts that return between prompts that do not."""
    records, fresh = [], 1000
    for number in range(5000):
        is_known = number % 3 == 0
        first = number // 3 % 8 * 10 if is_known else fresh
        fresh += 0 if is_known else 10
        records.append(record(80, list(range(first, first + 10)), 0, int(number * seconds * 1000)))
    return write_trace(path, records)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, 0.0])
def test_scans_do_not_displace_what_returns(tmp_path, seconds):
    """A round of the known prompts has 240 blocks: LRU never hits. Time may also stand still."""
    trace = make_scans(tmp_path / "scans.jsonl", seconds)
    assert count_hits(trace, 150, "lru") == 0
    assert count_hits(trace, 150, "return_rate") > 0.7 * count_hits(trace, 150, "optimum")


def test_evictions_are_remembered_for_at_most_two_capacities():
    """Each takes at most 32 bytes: see the tests of `EvictedRuns`."""
    policy = BlockPool(10_001, True, 16, policy="return_rate").policy_host.policy
    assert 10_000 <= len(policy.evictions.keys) < 20_000
