"""Tests of the instant clock against reference results of two real traces, and against a slow model."""

import json
import random
from pathlib import Path

import pytest
from lab.made_trace import make_random_records, record, write_trace
from lab.slow_cache import SlowCache

from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay

DATA = Path(__file__).parent / "data"
REFERENCE = json.loads((DATA / "reference_hit_rates.json").read_text())["traces"]
COUNTS = ("requests", "refused_requests", "blocks_looked_up", "blocks_hit", "tokens_in", "tokens_hit")
RATES = ("block_hit_rate", "token_hit_rate", "mean_request_token_hit_rate")
# These cases take seconds each in plain Python. Others are marked slow (default convention) or nightly.
QUICK = {(convention, capacity) for convention in CONVENTIONS for capacity in ("1000", "unlimited")}
QUICK_AGENTIC = {("full_blocks_cap", "1000")}


def list_cases(trace, quick=None):
    cases = []
    for convention, capacities in REFERENCE[trace]["conventions"].items():
        for capacity in capacities:
            slow = quick is not None and (convention, capacity) not in quick
            long = pytest.mark.slow if convention == "full_blocks_cap" else pytest.mark.night
            marks = [long] if slow else []
            cases.append(pytest.param(convention, capacity, marks=marks, id=f"{convention}-{capacity}"))
    return cases


def assert_reference(report, expected):
    assert {name: getattr(report, name) for name in COUNTS} == {name: expected[name] for name in COUNTS}
    assert {name: round(getattr(report, name), 6) for name in RATES} == {
        name: expected[name] for name in RATES
    }


@pytest.mark.parametrize(("convention", "capacity"), list_cases("mooncake_conversation", QUICK))
def test_mooncake_trace_gives_the_reference_counts(convention, capacity):
    num_blocks = 200_000 if capacity == "unlimited" else int(capacity)
    report = run_replay(ReplaySettings("mooncake_conversation", num_blocks, convention=convention))
    assert report.block_size == REFERENCE["mooncake_conversation"]["block_size_tokens"]
    assert_reference(report, REFERENCE["mooncake_conversation"]["conventions"][convention][capacity])


@pytest.mark.slow
@pytest.mark.parametrize(("convention", "capacity"), list_cases("agentic_coding_a", QUICK_AGENTIC))
def test_agentic_trace_gives_the_reference_counts(convention, capacity):
    num_blocks = 310_000 if capacity == "unlimited" else int(capacity)
    path = str(DATA / "agentic_coding_a.jsonl.xz")
    report = run_replay(ReplaySettings(path, num_blocks, convention=convention))
    assert report.block_size == REFERENCE["agentic_coding_a"]["block_size_tokens"]
    assert_reference(report, REFERENCE["agentic_coding_a"]["conventions"][convention][capacity])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("partial_ids", [True, False], ids=["partial blocks have ids", "or none"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_random_traces_match_a_slow_model(tmp_path, convention, partial_ids, seed):
    rng = random.Random(seed)
    block_size = rng.choice([2, 5, 8])
    capacity = rng.randrange(4, 40)
    records = [
        record(1, [10**6] if partial_ids else []),
        *make_random_records(rng, 150, block_size, partial_ids),
    ]
    model = SlowCache(capacity, block_size, convention)
    for traced in records:
        model.run(traced)
    report = run_replay(
        ReplaySettings(
            str(write_trace(tmp_path / "trace.jsonl", records)),
            capacity,
            convention=convention,
            trace_block_size=block_size,
        )
    )
    assert {name: getattr(report, name) for name in model.counts} == model.counts
    assert model.counts["blocks_hit"] > 0
    assert model.counts["evictions"] > 0
    assert report.mean_request_token_hit_rate == pytest.approx(model.sum_rates / len(records))
    assert report.token_hit_rate == model.counts["tokens_hit"] / model.counts["tokens_in"]
    assert report.block_hit_rate == model.counts["blocks_hit"] / model.counts["blocks_looked_up"]
    assert report.mean_blocks_in_use == pytest.approx(model.sum_in_use / len(records))
