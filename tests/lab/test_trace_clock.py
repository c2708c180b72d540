"""Tests of the trace clock: requests overlap, wait, are preempted, and still finish.

Expected times are computed by hand from the rates in `timed_replay`.
"""

import random
from dataclasses import fields

import pytest
from lab.timed_replay import BLOCK_SIZE, draw_requests, run_timed

from kv_pool import InvalidArgumentError
from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.settings import EngineRates


def run(requests, num_blocks, convention="full_blocks_cap", **rates):
    return run_timed(requests, num_blocks, convention, **rates)[0]


def test_single_request_has_its_blocks_until_its_last_token():
    #   0 .. 16 prefill in 2 blocks, 16 .. 96 decode of 8 tokens in 3
    report = run([(0, 16, 8, [1, 2])], 10)
    assert report.simulated_ms == 96
    assert report.peak_blocks_in_use == 3
    assert report.mean_blocks_in_use == (16 * 2 + 80 * 3) / 96
    assert report.tokens_out == 8


def test_overlapping_requests_have_blocks_together():
    #   first   0 .. 16 prefill, 16 .. 96 decode
    #   second  10 arrives, 16 .. 32 prefill, 32 .. 112 decode
    report = run([(0, 16, 8, [1, 2]), (10, 16, 8, [3, 4])], 10)
    assert report.peak_blocks_in_use == 6
    assert report.simulated_ms == 112
    assert report.mean_blocks_in_use == (10 * 2 + 6 * 4 + 16 * 5 + 64 * 6 + 16 * 3) / 112
    assert report.p99_blocks_in_use == 6


def test_peak_of_less_than_a_hundredth_is_above_the_p99():
    #   0 .. 16 prefill in 2 blocks, 16 .. 8016 decode of 800 tokens in up to 102, then in 103 for 10 ms
    report = run([(1000, 16, 801, [1, 2])], 200)
    assert report.peak_blocks_in_use == 103
    assert report.p99_blocks_in_use == 102
    assert report.simulated_ms == 16 + 8010


def test_overlapping_requests_share_prefix_blocks():
    report = run([(0, 16, 8, [1, 2]), (10, 24, 8, [1, 2, 3])], 10)
    assert (report.blocks_hit, report.tokens_hit) == (2, 16)
    assert report.peak_blocks_in_use == 3 + 2
    # The second computes 8 tokens from 16 to 24 and generates until 104.
    assert report.simulated_ms == 104


def test_request_waits_until_blocks_are_free():
    requests = [(0, 24, 8, [1, 2, 3]), (0, 24, 0, [4, 5, 6])]
    # With enough blocks the second would compute from 24 to 48, while the first generates until 104.
    assert run(requests, 7).simulated_ms == 104
    waited = run(requests, 5)
    assert waited.simulated_ms == 104 + 24
    assert waited.peak_blocks_in_use == 4
    assert waited.preempted == 0


def test_max_running_limits_running_requests():
    requests = [(0, 16, 16, [1, 2]), (0, 16, 8, [3, 4])]
    report = run(requests, 20, max_running=1)
    assert report.peak_blocks_in_use == 4
    assert report.simulated_ms == (16 + 160) + (16 + 80)


def test_waiting_request_delays_those_behind_it():
    requests = [(0, 24, 8, [1, 2, 3]), (0, 24, 0, [4, 5, 6]), (0, 8, 0, [7])]
    # The third would fit next to the first and end at 32; queued after the second, it ends last.
    assert run(requests, 5).simulated_ms == 104 + 24 + 8


def test_last_admitted_is_preempted_and_completes_later():
    #   first   16 tokens, generates 12: blocks 3 and 4 at 16 and 96, ends at 136
    #   second  20 tokens in 3 blocks, would generate 4 into the last block; preempted by the first at 16
    # At 136 its first block is still cached: 12 tokens to compute, 4 to generate.
    report = run([(0, 16, 12, [1, 2]), (0, 20, 4, [3, 4, 5])], 5)
    assert report.preempted == 1
    assert report.simulated_ms == 136 + 12 + 40
    assert report.tokens_out == 12 + 4
    assert report.peak_blocks_in_use == 5


def test_prefix_found_after_preemption_is_not_a_hit():
    report = run([(0, 16, 12, [1, 2]), (0, 20, 4, [3, 4, 5])], 5)
    assert report.preempted == 1
    assert (report.blocks_hit, report.tokens_hit) == (0, 0)
    assert report.mean_request_token_hit_rate == 0


def test_preempted_request_keeps_generated_tokens():
    #   first   0 .. 24 prefill, generates 24: blocks 4, 5, 6 of 7 at 24, 104, 184, ends at 264
    #   second  24 .. 36 prefill of 12 tokens, generates 4 until 76, needs a third block, is preempted;
    # at 104 and 184 the first gets blocks, and too few are left for the second
    # From 264 the second computes 8 tokens and generates the remaining 8.
    report = run([(0, 24, 24, [1, 2, 3]), (0, 12, 12, [4, 5])], 7)
    assert report.preempted == 1
    assert report.simulated_ms == 264 + 8 + 80
    assert report.tokens_out == 24 + 12


def test_preempted_request_goes_to_the_front_of_the_queue():
    #   as in test_last_admitted_..., and a third arrives at 5, when all blocks are in use
    # At 16 two blocks are free, too few for the second. The third waits behind it until 136, is computed
    # from 148 to 156, and generates until 236.
    report = run([(0, 16, 12, [1, 2]), (0, 20, 4, [3, 4, 5]), (5, 8, 8, [6])], 5)
    assert report.preempted == 1
    assert report.simulated_ms == 156 + 80


def test_generated_blocks_are_cached():
    #   the first's prompt and output take both blocks; the second takes the one with the output
    report = run([(0, 8, 8, [1]), (500, 8, 0, [2]), (600, 16, 0, [1, 3])], 2)
    assert report.evictions == 2
    assert report.blocks_hit == 1


def test_speedup_makes_requests_arrive_faster():
    requests = [(0, 8, 0, [1]), (2000, 8, 0, [2])]
    assert run(requests, 10).simulated_ms == 2008
    assert run(requests, 10, speedup=4.0).simulated_ms == 508


def test_late_requests_arrive_with_their_predecessor():
    requests = [(0, 8, 0, [1]), (100, 8, 0, [2]), (50, 8, 0, [3]), (100, 8, 0, [4]), (300, 8, 0, [5])]
    report = run(requests, 10)
    assert report.late_requests == 1
    assert report.simulated_ms == 308
    assert report.peak_blocks_in_use == 3


def test_late_requests_are_counted_at_every_speedup():
    report = run([(0, 8, 0, [1]), (1000, 8, 0, [2]), (900, 8, 0, [3])], 10, speedup=10.0)
    assert report.late_requests == 1
    assert report.simulated_ms == 100 + 8 + 8


def test_request_too_large_with_its_output_is_refused():
    requests = [(0, 16, 33, [1, 2]), (0, 16, 32, [1, 2])]
    report = run(requests, 6)
    assert (report.requests, report.refused_requests) == (2, 1)
    assert report.tokens_out == 32
    assert (report.tokens_in, report.blocks_looked_up) == (32, 4)
    assert report.peak_blocks_in_use == 6


@pytest.mark.parametrize("convention", ["full_blocks_cap", "ids_as_blocks_cap"])
def test_request_that_preempts_itself_waits_for_others(convention):
    #   first   0 .. 16 prefill, generates 12: block 3 of 5 at 16, block 4 at 96, ends at 136
    #   second  32: computed, needs a third block, is preempted; at 96 the first gets one of its blocks;
    # 136 .. 144 prefill, generates until 224
    report = run([(0, 16, 12, [1, 2]), (0, 16, 8, [3, 4])], 5, convention)
    assert report.preempted == 1
    assert report.simulated_ms == 224
    assert report.tokens_out == 20


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("partial_ids", [True, False])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_accepted_request_finishes(convention, partial_ids, seed):
    rng = random.Random(seed)
    num_blocks = rng.randrange(4, 16)
    requests = draw_requests(rng, partial_ids)
    report = run(requests, num_blocks, convention, max_running=rng.choice([2, 5, 100]))
    expected_out = num_refused = 0
    for _, input_length, output_length, hash_ids in requests:
        num_prompt = input_length if convention.startswith("full_blocks") else len(hash_ids) * BLOCK_SIZE
        if -(-(num_prompt + output_length) // BLOCK_SIZE) > num_blocks:
            num_refused += 1
        else:
            expected_out += output_length
    assert report.refused_requests == num_refused
    assert report.tokens_out == expected_out
    assert report.requests == len(requests)
    assert report.tokens_in == sum(input_length for _, input_length, _, _ in requests)
    assert 0 < report.peak_blocks_in_use <= num_blocks
    assert 0 < report.mean_blocks_in_use <= report.peak_blocks_in_use
    assert 0 < report.blocks_hit < report.blocks_looked_up


def test_random_small_pools_preempt():
    """Without preemptions the test above would be meaningless."""
    requests = draw_requests(random.Random(0))
    assert run(requests, 10).preempted > 0


@pytest.mark.parametrize("name", [field.name for field in fields(EngineRates)])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_invalid_rates_are_refused(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name} is {value}; it must be above 0"):
        EngineRates(**{name: value})
