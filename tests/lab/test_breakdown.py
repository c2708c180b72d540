"""Breakdowns equal slow models of them, and add up to the report."""

import random
from collections import defaultdict

import pytest
from lab.made_trace import make_random_records, record, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.lab.request_outcomes import BREAKDOWNS, Breakdown, RequestOutcome, parse_breakdowns
from kv_pool.lab.settings import EngineRates, ReplaySettings
from kv_pool.lab.simulator import run_replay

ALL = ",".join(BREAKDOWNS)
SETTINGS = {
    "instant": {"num_blocks": 9},
    "ids as blocks": {"num_blocks": 30, "convention": "ids_as_blocks_cap"},
    "other block size": {"num_blocks": 30, "block_size": 24},
    "trace clock": {"num_blocks": 14, "clock": "trace", "rates": EngineRates(1000.0, 20.0)},
    "tiers": {"num_blocks": 8, "host_tier": 4, "disk_tier": 50},
}


@pytest.fixture
def trace(tmp_path):
    rng = random.Random(5)
    records = make_random_records(rng, 200, 8, partial_ids=True)
    for one in records:
        one["timestamp"] *= 100
        if rng.random() < 0.8:
            one["session_id"] = rng.randrange(12)
        if rng.random() < 0.8:
            one["tenant"] = rng.choice(["a", "b"])
    return str(write_trace(tmp_path / "trace.jsonl", records)), records


def replay(path, **options):
    outcomes = []
    settings = ReplaySettings(path, **{"trace_block_size": 8, "by": ALL, **options})
    return run_replay(settings, on_outcome=outcomes.append), outcomes


def sum_up(rows, field):
    return sum(getattr(row, field) for row in rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_add_up_to_the_report(trace, name):
    report, _ = replay(trace[0], **SETTINGS[name])
    assert list(report.breakdowns) == list(BREAKDOWNS)
    for kind, rows in report.breakdowns.items():
        if kind != "position":
            assert sum_up(rows, "requests") == report.requests
            assert sum_up(rows, "refused_requests") == report.refused_requests
        assert sum_up(rows, "tokens_in") == report.tokens_in
        assert sum_up(rows, "tokens_hit") == report.tokens_hit > 0
        assert sum_up(rows, "tokens_hit_in_tiers") == sum(tier.tokens_hit for tier in report.tiers)
        assert sum_up(rows, "blocks_looked_up") == report.blocks_looked_up
        assert sum_up(rows, "blocks_hit") == report.blocks_hit
        for row in rows:
            assert row.token_hit_rate == row.tokens_hit / row.tokens_in
            assert row.block_hit_rate == (row.blocks_looked_up and row.blocks_hit / row.blocks_looked_up)


@pytest.mark.parametrize("name", SETTINGS)
def test_groups_equal_a_model_of_the_trace(trace, name):
    path, records = trace
    report, outcomes = replay(path, **SETTINGS[name])
    hits = {outcome.line: outcome.tokens_hit for outcome in outcomes}
    expected = {kind: defaultdict(lambda: [0, 0, 0]) for kind in ("session", "turn", "tenant", "minute")}
    turns = defaultdict(int)
    for line, one in enumerate(records, 1):
        tenant, session = one.get("tenant"), one.get("session_id")
        if session is not None:
            session = str(session) if tenant is None else f"{tenant}/{session}"
            turns[session] += 1
        keys = {
            "session": session,
            "turn": None if session is None else turns[session],
            "tenant": tenant,
            "minute": one["timestamp"] // 60_000,
        }
        for kind, key in keys.items():
            group = expected[kind][key]
            group[0] += 1
            group[1] += one["input_length"]
            group[2] += hits[line]
    for kind, groups in expected.items():
        rows = report.breakdowns[kind]
        assert {row.key: [row.requests, row.tokens_in, row.tokens_hit] for row in rows} == groups
        keys = [row.key for row in rows]
        if kind in ("turn", "minute"):
            assert keys == sorted(keys, key=lambda key: (key is None, key or 0))


@pytest.mark.parametrize("seed", range(10))
def test_positions_equal_a_model_token_by_token(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 7, 64, 1000, 1024, 1500])
    breakdown = Breakdown("position", block_size)
    expected = defaultdict(lambda: [0] * 6)
    for line in range(10):
        length = rng.randrange(1, 9000)
        num_blocks = length // block_size
        blocks_hit = rng.randrange(num_blocks + 1)
        tokens_hit = min(length, blocks_hit * block_size + rng.choice([0, 0, rng.randrange(block_size)]))
        in_tiers = rng.randrange(tokens_hit + 1)
        breakdown.add(
            RequestOutcome(
                line,
                "done",
                None,
                0.0,
                0.0,
                length,
                0,
                blocks_looked_up=num_blocks,
                blocks_hit=blocks_hit,
                tokens_hit=tokens_hit,
                tokens_hit_in_tiers=in_tiers,
            )
        )
        seen = set()
        for token in range(length):
            first = 0 if token < 1024 else 1 << token.bit_length() - 1
            row = expected[first]
            row[0] += first not in seen
            seen.add(first)
            row[1] += 1
            row[2] += token < tokens_hit
            row[3] += tokens_hit - in_tiers <= token < tokens_hit
            if token % block_size == 0:
                row[4] += token // block_size < num_blocks
                row[5] += token // block_size < blocks_hit
    rows = breakdown.finish()
    assert [row.key for row in rows] == sorted(expected)
    for row in rows:
        found = [row.requests, row.tokens_in, row.tokens_hit, row.tokens_hit_in_tiers]
        assert [*found, row.blocks_looked_up, row.blocks_hit] == expected[row.key]


def test_turns_are_numbered_by_arrival(tmp_path):
    """With the trace clock, a long request of a session may end after the next one of it."""
    lines = [record(80, list(range(10)), 50, 0, session_id="s"), record(8, [99], 0, 1, session_id="s")]
    path = str(write_trace(tmp_path / "trace.jsonl", lines))
    rates = EngineRates(1000.0, 20.0)
    report, outcomes = replay(path, num_blocks=50, clock="trace", rates=rates)
    assert [(outcome.line, outcome.turn) for outcome in outcomes] == [(2, 2), (1, 1)]
    assert [(row.key, row.tokens_in) for row in report.breakdowns["turn"]] == [(1, 80), (2, 8)]


@pytest.mark.parametrize(
    ("text", "kinds"), [("", ()), ("turn", ("turn",)), (" minute, turn,,minute ", ("minute", "turn"))]
)
def test_lists_of_kinds_are_parsed(text, kinds):
    assert parse_breakdowns(text) == kinds


def test_unknown_kinds_are_refused(trace):
    with pytest.raises(InvalidArgumentError, match="unknown --by 'hour'; known are session, turn, tenant"):
        replay(trace[0], num_blocks=9, by="turn,hour")
