"""Tests of request outcomes: their sums equal the report."""

import json
import random

import msgspec
import pytest
from lab.made_trace import make_random_records, record, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.lab.request_outcomes import RequestOutcome, write_outcomes
from kv_pool.lab.settings import EngineRates, ReplaySettings
from kv_pool.lab.simulator import run_replay


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, make_random_records(random.Random(5), 200, 8, partial_ids=True))
    return str(path)


SETTINGS = {
    "instant": {},
    "small": {"num_blocks": 6},
    "trace clock": {"clock": "trace", "rates": EngineRates(1000.0, 20.0)},
    "swap": {
        "clock": "trace",
        "rates": EngineRates(1000.0, 20.0),
        "host_blocks": 30,
        "block_bytes": 64,
        "preemption": "swap",
    },
    "tiers": {"num_blocks": 8, "host_tier": 4, "disk_tier": 50},
    "groups": {"groups": "full,window:9", "chunk_tokens": 8},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_outcomes_add_up_to_the_report(trace, name):
    outcomes = []
    settings = ReplaySettings(trace, **{"num_blocks": 14, "trace_block_size": 8, **SETTINGS[name]})
    report = run_replay(settings, on_outcome=outcomes.append)
    done = [outcome for outcome in outcomes if outcome.outcome == "done"]
    assert sorted(outcome.line for outcome in outcomes) == list(range(1, 201))
    assert len(outcomes) - len(done) == report.refused_requests

    def add(field):
        return sum(getattr(outcome, field) for outcome in outcomes)

    assert add("input_length") == report.tokens_in
    assert add("tokens_hit") == report.tokens_hit
    assert add("blocks_hit") == report.blocks_hit
    assert add("blocks_looked_up") == report.blocks_looked_up
    assert add("tokens_hit_in_tiers") == sum(tier.tokens_hit for tier in report.tiers)
    assert add("tokens_out") == report.tokens_out
    assert add("preempted") == report.preempted
    assert sum(outcome.waited_ms for outcome in done) == pytest.approx(
        report.waiting.mean_ms * report.waiting.requests
    )
    assert all(outcome.end_ms >= outcome.arrival_ms + outcome.waited_ms for outcome in outcomes)
    # The groups share the pool's blocks; each has the blocks of its window, or all.
    assert all(0 < outcome.blocks <= report.peak_blocks_in_use for outcome in done)
    expected = {
        "small": report.refused_requests,
        "trace clock": report.preempted and report.tokens_out,
        "swap": report.swapped_out,
        "tiers": min(tier.tokens_hit for tier in report.tiers) if report.tiers else 0,
    }
    assert expected.get(name, report.tokens_hit) > 0


def test_outcome_of_one_request(tmp_path):
    records = [
        record(20, [1, 2, 3], 4, 5),
        record(22, [1, 2, 4], 0, 9, session_id="a", tenant="t"),
        record(80, range(10)),
    ]
    path = write_trace(
        tmp_path / "trace.jsonl", [{**line, "hash_ids": list(line["hash_ids"])} for line in records]
    )
    outcomes = []
    run_replay(ReplaySettings(str(path), 5, trace_block_size=8), on_outcome=outcomes.append)
    assert outcomes == [
        RequestOutcome(1, "done", None, 5.0, 5.0, 20, 4, blocks=3, blocks_looked_up=2),
        RequestOutcome(
            2, "done", "t/a", 9.0, 9.0, 22, 0, 0, 3, 2, blocks_hit=2, tokens_hit=16, tenant="t", turn=1
        ),
        RequestOutcome(3, "refused", None, 0.0, 0.0, 80, 0, blocks_looked_up=10),
    ]


def test_file_has_one_json_line_per_request(trace, tmp_path):
    path = tmp_path / "requests.jsonl"
    outcomes = []
    with write_outcomes(str(path)) as write:
        run_replay(
            ReplaySettings(trace, 14, trace_block_size=8),
            on_outcome=lambda it: (outcomes.append(it), write(it)),
        )
    lines = path.read_text().splitlines()
    assert [msgspec.json.decode(line, type=RequestOutcome) for line in lines] == outcomes
    assert list(json.loads(lines[0])) == list(RequestOutcome.__struct_fields__)


def test_full_disk_does_not_hide_errors_of_the_replay(tmp_path):
    trace = str(write_trace(tmp_path / "trace.jsonl", [record(80, list(range(10)))]))
    settings = ReplaySettings(trace, 5, trace_block_size=8)
    with pytest.raises(InvalidArgumentError, match="no request fits"), write_outcomes("/dev/full") as write:
        run_replay(settings, on_outcome=write)
