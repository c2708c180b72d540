"""Preemption by swap with the trace clock: copies, their duration, and no lost tokens.

Expected times are computed by hand: blocks of 8 tokens, 1 ms to compute a prompt token, 10 ms to generate a
token, 1 ms to copy a block.
"""

import random

import pytest
from replay.made_trace import make_random_records
from replay.test_trace_clock import BLOCK_SIZE, ImpatientDriver, make_rates

from kv_pool import BlockPool, KVCacheManager
from kv_pool.core import invariants
from kv_pool.manager.preemption import PreemptionCost
from kv_pool.replay.groups import PromptSteps, parse_groups
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.replay_tiers import CopyLink, HostSwap, swap_always
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import Tally
from kv_pool.replay.trace import TraceRequest
from kv_pool.replay.trace_clock import TraceClock

BLOCK_BYTES = 1000
COPY_RATE = 1e6


def run(
    requests,
    num_blocks,
    num_host_blocks=100,
    *,
    rule=swap_always,
    groups="full",
    chunk_tokens=None,
    watermark=0.0,
    **rates,
):
    """Replay requests (arrival_ms, input_length, output_length, hash_ids); assert that no block leaks."""
    specs = parse_groups(groups, BLOCK_SIZE)
    pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
    manager = KVCacheManager(
        pool,
        groups=specs,
        max_in_flight_tokens=chunk_tokens and max(chunk_tokens, BLOCK_SIZE),
        watermark=watermark,
    )
    report = ReplayReport(BLOCK_SIZE, num_blocks, "full_blocks_cap", "trace")
    swap = HostSwap(manager, num_host_blocks, BLOCK_BYTES, CopyLink(COPY_RATE), rule, report)
    arriving = (
        ReplayRequest(
            TraceRequest(line, arrival_ms, input_length, output_length, hash_ids, None),
            BLOCK_SIZE,
            "full_blocks_cap",
            BLOCK_SIZE,
        )
        for line, (arrival_ms, input_length, output_length, hash_ids) in enumerate(requests, 1)
    )
    steps = PromptSteps.for_groups(specs, chunk_tokens)
    driver = ImpatientDriver(manager, Tally(report), swap=swap)
    TraceClock(driver, make_rates(**rates), steps).run(arriving, lambda: None)
    assert pool.get_num_free_blocks() == num_blocks
    assert swap.swapper.host_pool.get_num_free_blocks() == num_host_blocks
    assert swap.swapper.list_swapped_out() == []
    invariants.check(pool)
    invariants.check(swap.swapper.host_pool)
    assert report.swapped_in == report.swapped_out <= report.preempted
    assert report.bytes_moved == BLOCK_BYTES * (report.blocks_swapped_out + report.blocks_swapped_in)
    return report


# The first request has 24 tokens and generates 24: it gets block 4 at 24, 5 at 104, 6 at 184 and ends at
# 264. The second has 12 tokens, computed at 36, generates 4 until 76, gets the last free block, and is
# preempted at 104.
TWO = [(0, 24, 24, [1, 2, 3]), (0, 12, 12, [4, 5])]


def test_swapped_request_continues_where_it_stopped():
    #   104: three blocks are copied out, including the block of the current step
    #   264: blocks not reused are shared, the others are copied back; 8 tokens are left to generate
    report = run(TWO, 7)
    assert (report.preempted, report.swapped_out, report.swapped_in) == (1, 1, 1)
    assert report.blocks_swapped_out == 3
    assert report.tokens_recomputed == 0
    assert report.tokens_out == 24 + 12
    assert report.simulated_ms == 264 + report.blocks_swapped_in + 80


def test_full_host_pool_causes_recomputation():
    report = run(TWO, 7, num_host_blocks=1)
    assert (report.preempted, report.swapped_out, report.bytes_moved) == (1, 0, 0)
    assert report.tokens_recomputed == 16 - 8
    assert report.simulated_ms == 264 + 8 + 80


@pytest.mark.parametrize(("block_bytes", "is_swapped"), [(1000, True), (10_000, False)])
def test_cost_rule_chooses_the_faster_way(block_bytes, is_swapped):
    # Computing 16 tokens takes 16 ms; copying 2 blocks out and in takes 4 ms or 40 ms.
    rule = PreemptionCost(prefill_tokens_per_s=1000, copy_bytes_per_s=COPY_RATE, block_bytes=block_bytes)
    report = run(TWO, 7, rule=rule)
    assert report.preempted == 1
    assert report.swapped_out == is_swapped


def test_waiting_includes_time_after_preemptions():
    #   the second is admitted at once, preempted at 104, admitted again at 264
    report = run(TWO, 7)
    assert report.waiting.requests == 2
    assert report.waiting.max_ms == report.waiting.p99_ms == 264 - 104
    assert report.waiting.mean_ms == report.waiting.median_ms == (264 - 104) / 2
    assert report.peak_running == 2
    assert report.mean_running == (264 + 104 + report.simulated_ms - 264) / report.simulated_ms


def test_prompt_steps_interleave():
    #   first   0..8, 16..24, 32..40        second  8..16, 24..32: ends
    report = run([(0, 24, 0, [1, 2, 3]), (0, 16, 0, [4, 5])], 10, chunk_tokens=8)
    assert report.simulated_ms == 40
    assert report.mean_running == (40 + 32) / 40


def test_watermark_delays_new_requests():
    requests = [(0, 24, 0, [1, 2, 3]), (0, 24, 0, [4, 5, 6])]
    assert run(requests, 9).peak_running == 2
    assert run(requests, 9, watermark=0.4).peak_running == 1


GROUPS = ["full", "window:9", "full,window:20", "full,mamba", "chunked:16,window:2"]


def make_requests(rng):
    return [
        (
            traced["timestamp"] if rng.random() < 0.95 else 0,
            traced["input_length"],
            traced["output_length"],
            traced["hash_ids"],
        )
        for traced in make_random_records(rng, 80, BLOCK_SIZE, partial_ids=True)
    ]


def run_random(groups, seed, chunk_tokens):
    rng = random.Random(seed)
    requests = make_requests(rng)
    report = run(
        requests,
        rng.randrange(4, 16) * len(groups.split(",")),
        rng.choice([3, 10, 100]),
        groups=groups,
        chunk_tokens=chunk_tokens,
        watermark=rng.choice([0.0, 0.1]),
        max_running=rng.choice([2, 5, 100]),
    )
    return requests, report


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("chunk_tokens", [None, 8, 20])
@pytest.mark.parametrize("groups", GROUPS)
def test_accepted_requests_generate_every_token_once(groups, chunk_tokens, seed):
    requests, report = run_random(groups, seed, chunk_tokens)
    assert report.requests == len(requests)
    assert report.waiting.requests == report.requests - report.refused_requests > 0
    if not report.refused_requests:
        assert report.tokens_out == sum(output_length for _, _, output_length, _ in requests)
    assert 0 < report.peak_blocks_in_use <= report.num_blocks


@pytest.mark.parametrize("groups", GROUPS)
def test_random_small_pools_swap(groups):
    """Without swaps the test above would be meaningless."""
    reports = [run_random(groups, seed, 8)[1] for seed in range(12)]
    assert sum(report.swapped_out for report in reports) > 0
    assert sum(report.preempted for report in reports) > sum(report.swapped_out for report in reports)
