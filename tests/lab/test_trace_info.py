"""The figures of a trace equal those of a slow model, and those of the replay's own count."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from lab.made_trace import make_random_records, record, write_trace
from lab.test_schemas import validator

from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.sweep import count_infinite_hits
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_info import Percentiles, TraceInfo, describe_trace, summarize

DATA = Path(__file__).parent / "data"


def describe(path, **options):
    return describe_trace(Trace(path, **options))


def percentile(values, share):
    """Return a percentile by nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def check_percentiles(found, values):
    assert found.count == len(values)
    if values:
        assert found.mean == pytest.approx(sum(values) / len(values), rel=0.005)
        ranks = [percentile(values, share) for share in (0.1, 0.5, 0.9, 0.99, 1.0)]
        assert [found.p10, found.p50, found.p90, found.p99, found.max] == pytest.approx(ranks, rel=0.005)


@pytest.mark.parametrize("seed", range(6))
def test_figures_equal_a_slow_model(tmp_path, seed):
    rng = random.Random(seed)
    records = make_random_records(rng, 200, 8, partial_ids=seed % 2 == 0)
    for one in records:
        if rng.random() < 0.9:
            one["session_id"] = rng.randrange(20)
        if rng.random() < 0.5:
            one["tenant"] = rng.choice("ab")
    found = describe(write_trace(tmp_path / "trace.jsonl", records), block_size=8)

    uses, distances = {}, []
    for one in records:
        for hash_id in one["hash_ids"]:
            uses.setdefault(hash_id, []).append(one["timestamp"] / 1000)
    for times in uses.values():
        distances += [later - time for time, later in pairwise(times)]
    sessions = {}
    for one in records:
        if "session_id" in one:
            session = (one.get("tenant"), one["session_id"])
            sessions.setdefault(session, []).append(one["timestamp"] / 1000)
    gaps = [b - a for times in sessions.values() for a, b in pairwise(times)]
    once = sum(len(times) == 1 for times in uses.values())
    minutes = [one["timestamp"] // 60_000 for one in records]

    assert found.requests == 200
    assert found.tokens_in == sum(one["input_length"] for one in records)
    assert found.tokens_out == sum(one["output_length"] for one in records)
    assert found.blocks_looked_up == sum(len(one["hash_ids"]) for one in records)
    assert (found.distinct_blocks, found.blocks_used_once) == (len(uses), once)
    assert found.share_used_once == once / len(uses)
    reused = [len(times) for times in uses.values() if len(times) > 1]
    assert found.uses_per_reused_block == pytest.approx(sum(reused) / len(reused))
    assert found.inconsistent_requests == 0
    assert (found.sessions, found.tenants) == (len(sessions), 2)
    assert found.busiest_minute == max(map(minutes.count, minutes))
    span = (records[-1]["timestamp"] - records[0]["timestamp"]) / 1000
    assert (found.span_s, found.requests_per_s) == pytest.approx((span, 200 / span))
    check_percentiles(found.turns, [len(times) for times in sessions.values()])
    check_percentiles(found.turn_gaps_s, gaps)
    check_percentiles(found.input_length, [one["input_length"] for one in records])
    check_percentiles(found.output_length, [one["output_length"] for one in records])
    check_percentiles(found.blocks_per_request, [len(one["hash_ids"]) for one in records])
    check_percentiles(found.reuse_distance_s, distances)


@pytest.mark.parametrize("partial_ids", [False, True])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_ceilings_equal_the_replays_own_count(tmp_path, convention, partial_ids):
    for seed in range(5):
        records = make_random_records(random.Random(seed), 150, 8, partial_ids)
        path = write_trace(tmp_path / "trace.jsonl", records)
        settings = ReplaySettings(str(path), 1, convention=convention, trace_block_size=8)
        expected = count_infinite_hits(settings)
        if convention.startswith("ids"):
            # The replay pads prompts to whole ids; a hit in a partial block counts the tokens that it has.
            expected.num_blocks = describe(path, block_size=8).distinct_blocks
        assert describe(path, block_size=8).ceilings[convention] == expected


def test_token_id_traces_have_blocks_of_the_given_size(tmp_path):
    tokens = list(range(40))
    path = write_trace(tmp_path / "trace.jsonl", [{"token_ids": tokens}, {"token_ids": [*tokens, 1]}])
    found = describe_trace(Trace(path), 10)
    assert (found.block_size, found.blocks_looked_up, found.distinct_blocks) == (10, 8, 4)
    expected = count_infinite_hits(ReplaySettings(str(path), 1, block_size=10))
    assert found.ceilings["full_blocks_cap"] == expected


def test_shared_traces_have_their_published_figures():
    found = describe("mooncake_conversation")
    assert (found.requests, found.tokens_in, found.tokens_out) == (12_031, 144_793_823, 4_122_048)
    assert (found.blocks_looked_up, found.distinct_blocks) == (288_500, 182_790)
    blocks = found.blocks_per_request
    assert (blocks.p50, blocks.p90, blocks.p99, blocks.max) == (14, 54, 167, 247)
    assert round(found.share_used_once, 3) == 0.758
    assert round(found.uses_per_reused_block - 1, 1) == 2.4


def test_contradictory_ids_are_counted(tmp_path):
    lines = [
        record(32, [1, 2, 3, 4]),
        record(32, [1, 9, 3, 4]),  # a known id behind an unknown one
        record(16, [7, 7]),
        record(16, [1, 2]),
    ]
    found = describe(write_trace(tmp_path / "trace.jsonl", lines), block_size=8)
    assert found.inconsistent_requests == 2


def test_late_requests_are_counted(tmp_path):
    lines = [record(8, [1], 0, time) for time in (5000, 3000, 3000, 9000, 1000)]
    found = describe(write_trace(tmp_path / "trace.jsonl", lines), block_size=8)
    assert (found.late_requests, found.span_s) == (2, 4.0)
    assert found.reuse_distance_s.max == 6.0


def test_percentiles_of_nothing_are_zero():
    assert summarize([]) == Percentiles()


def test_result_matches_its_schema(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", make_random_records(random.Random(3), 50, 8, True))
    found = json.loads(msgspec.json.encode(describe(path, block_size=8)))
    schema = validator("trace_info")
    schema.validate(found)
    assert list(found) == schema.schema["required"] == list(TraceInfo.__struct_fields__)
    assert not schema.is_valid(found | {"requests": "1"})
    percentiles = schema.schema["$defs"]["percentiles"]
    assert percentiles["required"] == list(Percentiles.__struct_fields__)
