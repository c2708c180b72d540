"""Preemption by swap with the trace clock: copies and their duration.

Expected times are computed by hand from the rates in `timed_replay`.
"""

import pytest
from lab.timed_replay import run_timed


def run(requests, num_blocks, num_host_blocks=100, **options):
    return run_timed(requests, num_blocks, num_host_blocks=num_host_blocks, **options)[0]


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
    report = run(TWO, 7, preemption="cost", block_bytes=block_bytes)
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
