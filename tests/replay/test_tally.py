"""Counts while a replay runs."""

import pytest

from kv_pool import BlockPool, KVCacheManager
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import Tally
from kv_pool.replay.trace import TraceRequest

BLOCK_SIZE = 4


def make_tally(num_blocks):
    manager = KVCacheManager(BlockPool(num_blocks + 1, True, BLOCK_SIZE))
    return Tally(manager, ReplayReport(BLOCK_SIZE, num_blocks, "full_blocks_cap", "instant"))


def make_request(line, num_tokens):
    ids = list(range(100 * line, 100 * line + -(-num_tokens // BLOCK_SIZE)))
    traced = TraceRequest(line, 0.0, num_tokens, 0, ids, None)
    return ReplayRequest(traced, BLOCK_SIZE, trace_block_size=BLOCK_SIZE)


def test_the_smallest_refused_need_is_kept():
    tally = make_tally(3)
    answers = [
        tally.count_request(make_request(line, 4), need * BLOCK_SIZE)
        for line, need in enumerate((5, 3, 4, 6))
    ]
    assert answers == [False, True, False, False]
    assert tally.smallest_refused == 4
    assert (tally.report.requests, tally.report.refused_requests) == (4, 3)


def test_blocks_in_use_are_those_that_are_not_free():
    tally = make_tally(10)
    first, second = make_request(1, 12), make_request(2, 5)
    tally.allocate(first, 12)
    assert tally.num_blocks_in_use == 3
    tally.allocate(second, 5)
    assert tally.num_blocks_in_use == 5
    tally.free(first)
    assert tally.num_blocks_in_use == 2
    assert tally.report.peak_blocks_in_use == 5


def test_an_allocation_that_does_not_fit_is_refused_and_still_a_call():
    tally = make_tally(2)
    assert not tally.allocate(make_request(1, 12), 12)
    assert tally.num_blocks_in_use == 0
    assert tally.finish(0.0).allocate.calls == 1


def test_blocks_per_run_is_the_mean_over_all_block_tables():
    tally = make_tally(10)
    first, second, third = make_request(1, 4), make_request(2, 4), make_request(3, 12)
    tally.allocate(first, 4)
    tally.allocate(second, 4)
    tally.allocate(third, 8)  # blocks 3 4
    tally.free(first)
    tally.free(second)
    third.num_computed_tokens = 8
    tally.allocate(third, 4)  # block 5: 1 and 2 were freed after 6 to 10
    assert tally.manager.get_block_ids("3") == [3, 4, 5]
    tally.free(third)
    report = tally.finish(0.0)
    assert report.blocks_per_run == pytest.approx((1 + 1 + 3) / 3)
    assert report.free.calls == 3


def test_a_gap_in_a_block_table_ends_a_run():
    tally = make_tally(3)
    first, second = make_request(1, 4), make_request(2, 12)
    tally.allocate(second, 4)  # block 1
    tally.allocate(first, 4)  # block 2
    second.num_computed_tokens = 4
    tally.allocate(second, 4)  # block 3
    assert tally.manager.get_block_ids("2") == [1, 3]
    tally.free(second)
    assert tally.finish(0.0).blocks_per_run == 1.0


def test_rates_without_requests_are_zero():
    report = make_tally(3).finish(0.0)
    assert (report.token_hit_rate, report.block_hit_rate, report.mean_request_token_hit_rate) == (0, 0, 0)
    assert (report.blocks_per_run, report.look_up.calls) == (0, 0)
