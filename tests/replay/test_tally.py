"""Tests of `Tally`."""

import pytest

from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import Tally
from kv_pool.replay.trace import TraceRequest

BLOCK_SIZE = 4


def make_tally(num_blocks, **options):
    return Tally(ReplayReport(BLOCK_SIZE, num_blocks, "full_blocks_cap", "instant"), **options)


def make_request(line, num_tokens):
    ids = list(range(100 * line, 100 * line + -(-num_tokens // BLOCK_SIZE)))
    traced = TraceRequest(line, 0.0, num_tokens, 0, ids, None)
    return ReplayRequest(traced, BLOCK_SIZE, trace_block_size=BLOCK_SIZE)


def test_blocks_per_run_is_a_mean_over_all_tables():
    tally = make_tally(10)
    tally.note_table(4, 1)
    tally.note_table(5, 2)
    assert tally.finish(0.0, 0).blocks_per_run == pytest.approx(9 / 3)


def test_waiting_counts_only_requests_that_can_wait():
    tally = make_tally(10)
    for line, waited_ms in enumerate((None, 0.0, 6.0)):
        request = make_request(line, 4)
        tally.note_arrival(request, 1)
        tally.note_end(request, 1, 10.0, waited_ms)
    waiting = tally.finish(0.0, 0).waiting
    assert (waiting.requests, waiting.mean_ms, waiting.max_ms) == (2, 3.0, 6.0)


def test_wall_seconds_come_from_the_clock():
    times = iter((100.0, 102.5))
    assert make_tally(3, clock=lambda: next(times)).finish(0.0, 0).wall_seconds == 2.5


def test_rates_without_requests_are_zero():
    report = make_tally(3).finish(0.0, 0)
    assert (report.token_hit_rate, report.block_hit_rate, report.mean_request_token_hit_rate) == (0, 0, 0)
    assert (report.blocks_per_run, report.look_up.calls) == (0, 0)
