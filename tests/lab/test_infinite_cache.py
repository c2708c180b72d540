"""Tests of the infinite cache: the hits of a pool that is large enough for the whole trace."""

import random

import pytest
from lab.made_trace import make_random_records, write_trace

from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.sweep import count_infinite_hits


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("block_size", [None, 5, 16])
def test_hits_equal_those_of_a_pool_without_evictions(tmp_path, convention, block_size):
    path = write_trace(
        tmp_path / "trace.jsonl", make_random_records(random.Random(7), 150, 8, partial_ids=True)
    )
    settings = ReplaySettings(
        str(path), 10_000, trace_block_size=8, convention=convention, block_size=block_size, limit=120
    )
    report = run_replay(settings)
    bound = count_infinite_hits(settings)
    assert report.evictions == 0
    assert (bound.blocks_hit, bound.tokens_hit) == (report.blocks_hit, report.tokens_hit)
    assert (bound.block_hit_rate, bound.token_hit_rate) == (report.block_hit_rate, report.token_hit_rate)
    assert bound.tokens_hit > 0
    assert run_replay(ReplaySettings(str(path), bound.num_blocks // 2, trace_block_size=8)).evictions > 0


def test_token_id_traces_are_counted(tmp_path):
    tokens = list(range(40))
    path = write_trace(tmp_path / "trace.jsonl", [{"token_ids": tokens}, {"token_ids": [*tokens, 1]}])
    bound = count_infinite_hits(ReplaySettings(str(path), 1))
    assert (bound.num_blocks, bound.blocks_hit, bound.tokens_hit) == (2, 2, 32)
