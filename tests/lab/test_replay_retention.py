"""Tests of retention in replays: conversations, and the head of each prompt."""

import random

import pytest
from lab.made_trace import make_random_records, record, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.lab.settings import CLOCKS, EngineRates, ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.trace import Trace


def run(tmp_path, records, num_blocks, **settings):
    path = write_trace(tmp_path / "trace.jsonl", records)
    return run_replay(ReplaySettings(str(path), num_blocks, trace_block_size=8, **settings))


# A turn of two full blocks; other requests of ten or more blocks, one at 40 s; the next turn at 60 s.
STRANGERS = [record(24, [10 * n, 10 * n + 1, 10 * n + 2], timestamp=1000 * n) for n in (1, 2, 3, 4, 40)]
CONVERSATION = [
    record(17, [1, 2, 3], session_id=7),
    *STRANGERS,
    record(32, [1, 2, 4, 5], timestamp=60_000, session_id=7),
]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(("seconds", "blocks_hit"), [(0, 0), (30, 0), (70, 2)])
def test_session_blocks_are_retained_until_their_deadline(tmp_path, clock, seconds, blocks_hit):
    report = run(tmp_path, CONVERSATION, 10, clock=clock, keep_session_s=seconds)
    assert report.blocks_hit == blocks_hit


def test_speedup_shortens_the_time_between_turns(tmp_path):
    rates = EngineRates(speedup=10.0)
    report = run(tmp_path, CONVERSATION, 10, clock="trace", rates=rates, keep_session_s=30)
    assert report.blocks_hit == 2


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(("num_tokens", "blocks_hit"), [(0, 0), (8, 1), (16, 2)])
def test_prompt_heads_are_evicted_last(tmp_path, clock, num_tokens, blocks_hit):
    system_prompt = [record(17, [1, 2, 3])]
    others = [record(40, list(range(10 * n, 10 * n + 5)), timestamp=1000 * n) for n in range(1, 3)]
    again = [record(17, [1, 2, 3], timestamp=9000)]
    report = run(tmp_path, system_prompt + others + again, 9, clock=clock, keep_prefix_tokens=num_tokens)
    assert report.blocks_hit == blocks_hit


def test_session_ids_of_any_type_become_text(tmp_path):
    path = write_trace(
        tmp_path / "trace.jsonl",
        [record(8, [1], session_id=3), record(8, [1], session_id="a"), record(8, [1])],
    )
    assert [request.session_id for request in Trace(path, block_size=8)] == ["3", "a", None]


def test_retaining_sessions_needs_session_ids(tmp_path):
    with pytest.raises(InvalidArgumentError, match="has no session_id, so there are no sessions to keep"):
        run(tmp_path, STRANGERS, 10, keep_session_s=5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("groups", ["full", "full,window:9", "full,mamba"])
@pytest.mark.parametrize("host_blocks", [0, 50])
def test_all_options_together_are_repeatable(tmp_path, groups, host_blocks, seed):
    rng = random.Random(seed)
    records = [
        {**traced, "session_id": rng.randrange(5)}
        for traced in make_random_records(rng, 80, 8, partial_ids=True)
    ]
    settings = {
        "clock": "trace",
        "groups": groups,
        "chunk_tokens": 16,
        "watermark": 0.05,
        "host_blocks": host_blocks,
        "block_bytes": 1_000_000,
        "preemption": "swap",
        "keep_session_s": 0.2,
        "keep_prefix_tokens": 8,
        "rates": EngineRates(prefill_tokens_per_s=1000, decode_tokens_per_s=100),
    }
    num_blocks = rng.randrange(16, 30) * len(groups.split(","))
    first, second = (run(tmp_path, records, num_blocks, **settings) for _ in range(2))
    assert first.refused_requests == 0
    assert first.tokens_out == sum(traced["output_length"] for traced in records)
    assert first.swapped_out == first.swapped_in
    for name in (
        "blocks_hit",
        "evictions",
        "preempted",
        "swapped_out",
        "bytes_moved",
        "simulated_ms",
        "waiting",
    ):
        assert getattr(first, name) == getattr(second, name)
