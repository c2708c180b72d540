"""Tests of the LRU curve: every capacity equals a replay, block by block."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from lab.curves.made_reuse import make_repeating_records, read_reuse
from lab.made_trace import make_random_records, write_trace
from lab.slow_cache import SlowCache

from kv_pool import InvalidArgumentError
from kv_pool.lab.curves.lru_curve import LruCurve
from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay

DATA = Path(__file__).parent.parent / "data"
REFERENCE = json.loads((DATA / "reference_hit_rates.json").read_text())["traces"]
PATHS = {
    "mooncake_conversation": "mooncake_conversation",
    "agentic_coding_a": str(DATA / "agentic_coding_a.jsonl.xz"),
}


def assert_equals_slow_model(path, records, block_size, convention, num_capacities=None):
    write_trace(path, records)
    reuse = read_reuse(ReplaySettings(str(path), 1, trace_block_size=block_size, convention=convention))
    curve = LruCurve(reuse)
    capacities = range(1, reuse.num_distinct + reuse.largest_request + 2)
    if num_capacities is not None:
        capacities = random.Random(1).sample(capacities, num_capacities)
    for capacity in capacities:
        model = SlowCache(capacity, block_size, convention)
        for traced in records:
            model.run(traced)
        assert curve.count_hits(capacity) == (model.counts["blocks_hit"], model.counts["tokens_hit"]), (
            capacity
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("partial_ids", [True, False], ids=["partial blocks have ids", "or none"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_capacity_equals_a_slow_model(tmp_path, convention, partial_ids, seed):
    records = make_random_records(random.Random(seed), 60, 4, partial_ids)
    assert_equals_slow_model(tmp_path / "trace.jsonl", records, 4, convention, num_capacities=25)


@pytest.mark.parametrize("seed", range(12))
def test_copies_of_recomputed_blocks_are_counted(tmp_path, seed):
    records = make_repeating_records(seed, 80, 4)
    path = tmp_path / "trace.jsonl"
    assert_equals_slow_model(path, records, 4, "full_blocks_cap", num_capacities=30)
    assert read_reuse(ReplaySettings(str(path), 1, trace_block_size=4)).num_recomputed > 10


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("block_size", [1, 4, 5, 12, 24])
def test_any_block_size_equals_a_replay(tmp_path, convention, block_size):
    path = write_trace(
        tmp_path / "trace.jsonl", make_random_records(random.Random(block_size), 60, 12, partial_ids=True)
    )
    settings = ReplaySettings(
        str(path), 1, block_size=block_size, trace_block_size=12, convention=convention, limit=50
    )
    reuse = read_reuse(settings)
    curve = LruCurve(reuse)
    for capacity in random.Random(2).sample(range(1, reuse.num_distinct + 20), 6):
        try:
            report = run_replay(replace(settings, num_blocks=capacity))
            expected = (report.blocks_hit, report.tokens_hit)
        except InvalidArgumentError:  # no request fits
            expected = (0, 0)
        assert curve.count_hits(capacity) == expected


@pytest.mark.parametrize("with_hash_ids", [False, True])
def test_traces_with_token_ids_equal_a_replay(tmp_path, with_hash_ids):
    rng = random.Random(3)
    records = [{"token_ids": [rng.randrange(2) for _ in range(rng.randrange(1, 40))]} for _ in range(60)]
    if with_hash_ids:
        records[::3] = make_random_records(rng, 20, 2, partial_ids=True)
    path = write_trace(tmp_path / "trace.jsonl", records)
    settings = ReplaySettings(str(path), 1, block_size=2, trace_block_size=2)
    curve = LruCurve(read_reuse(settings))
    for capacity in (20, 27, 60, 500):
        report = run_replay(replace(settings, num_blocks=capacity))
        assert curve.count_hits(capacity) == (report.blocks_hit, report.tokens_hit)
        assert report.blocks_hit > 0


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("agentic") else []) for name in PATHS],
)
def test_real_traces_give_the_reference_counts(name, convention):
    curve = LruCurve(read_reuse(ReplaySettings(PATHS[name], 1, convention=convention)))
    for capacity, expected in REFERENCE[name]["conventions"][convention].items():
        num_blocks = 10**7 if capacity == "unlimited" else int(capacity)
        assert curve.count_hits(num_blocks) == (expected["blocks_hit"], expected["tokens_hit"])
