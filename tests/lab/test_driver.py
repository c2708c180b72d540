"""Tests of `ReplayDriver`: allocations, preemption and counts."""

import pytest

from kv_pool import BlockPool, KVCacheManager
from kv_pool.lab.driver import ReplayDriver
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.trace import TraceRequest

BLOCK_SIZE = 4


def make_request(line, num_tokens):
    ids = list(range(100 * line, 100 * line + -(-num_tokens // BLOCK_SIZE)))
    traced = TraceRequest(line, 0.0, num_tokens, 0, ids, None)
    return ReplayRequest.from_trace(traced, BLOCK_SIZE, trace_block_size=BLOCK_SIZE)


def make_driver(num_blocks):
    manager = KVCacheManager(BlockPool(num_blocks + 1, True, BLOCK_SIZE))
    return ReplayDriver(manager, ReplaySettings("", num_blocks))


def end(driver, *requests):
    for request in requests:
        driver.receive(request, request.num_tokens)
        driver.end(request, 0.0)


def test_blocks_per_run_is_a_mean_over_all_tables():
    driver = make_driver(10)
    first, second, third = make_request(1, 4), make_request(2, 4), make_request(3, 12)
    driver.allocate(first, 4)
    driver.allocate(second, 4)
    driver.allocate(third, 8)  # blocks 3 4
    end(driver, first, second)
    third.num_computed_tokens = 8
    driver.allocate(third, 4)  # block 5: 1 and 2 were freed after 6 to 10
    assert driver.manager.get_block_ids("3") == [3, 4, 5]
    end(driver, third)
    report = driver.finish(0.0)
    assert report.blocks_per_run == pytest.approx((1 + 1 + 3) / 3)
    assert report.free.calls == 3


def test_a_gap_in_a_block_table_ends_a_run():
    driver = make_driver(3)
    first, second = make_request(1, 4), make_request(2, 12)
    driver.allocate(second, 4)  # block 1
    driver.allocate(first, 4)  # block 2
    second.num_computed_tokens = 4
    driver.allocate(second, 4)  # block 3
    assert driver.manager.get_block_ids("2") == [1, 3]
    end(driver, second)
    assert driver.finish(0.0).blocks_per_run == 1.0


def test_waiting_counts_only_requests_that_can_wait():
    driver = make_driver(10)
    for line, waited_ms in enumerate((None, 0.0, 6.0), 1):
        request = make_request(line, 4)
        driver.receive(request, 4)
        driver.allocate(request, 4)
        driver.end(request, 10.0, waited_ms)
    waiting = driver.finish(0.0).waiting
    assert (waiting.requests, waiting.mean_ms, waiting.max_ms) == (2, 3.0, 6.0)


def test_rates_without_requests_are_zero():
    report = make_driver(3).finish(0.0)
    assert (report.token_hit_rate, report.block_hit_rate, report.mean_request_token_hit_rate) == (0, 0, 0)
    assert (report.blocks_per_run, report.look_up.calls) == (0, 0)
