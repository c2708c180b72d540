"""The trace clock: requests that overlap, wait, lose their blocks, and finish all the same.

Times are worked out by hand: blocks of 8 tokens, 1 ms to compute a prompt token, 10 ms to generate one.
"""

import random
from dataclasses import fields

import pytest
from replay.made_trace import make_random_records

from kv_pool import BlockPool, InvalidArgumentError, KVCacheManager
from kv_pool.core import invariants
from kv_pool.replay.driver import ReplayDriver
from kv_pool.replay.replay_request import CONVENTIONS, ReplayRequest
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.settings import EngineRates
from kv_pool.replay.tally import Tally
from kv_pool.replay.trace import TraceRequest
from kv_pool.replay.trace_clock import TraceClock

BLOCK_SIZE = 8
MAX_CALLS = 50_000


class ImpatientDriver(ReplayDriver):
    """Fails the test where the simulated time stands still and the replay would never end."""

    num_calls = 0

    def allocate(self, request, num_new_tokens, prefix=None):
        self.num_calls += 1
        assert self.num_calls < MAX_CALLS, f"request {request.request_id} is allocated again and again"
        return super().allocate(request, num_new_tokens, prefix)


def make_rates(**changes):
    return EngineRates(**{"prefill_tokens_per_s": 1000.0, "decode_tokens_per_s": 100.0, **changes})


def run(requests, num_blocks, convention="full_blocks_cap", **rates):
    """Replay (arrival_ms, input_length, output_length, hash_ids) each; at the end all blocks are free."""
    pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
    tally = Tally(ReplayReport(BLOCK_SIZE, num_blocks, convention, "trace"))
    driver = ImpatientDriver(KVCacheManager(pool), tally)
    arriving = (
        ReplayRequest(
            TraceRequest(line, arrival_ms, input_length, output_length, hash_ids, None),
            BLOCK_SIZE,
            convention,
            BLOCK_SIZE,
        )
        for line, (arrival_ms, input_length, output_length, hash_ids) in enumerate(requests, 1)
    )
    report = TraceClock(driver, make_rates(**rates)).run(arriving, lambda: None)
    assert pool.get_num_free_blocks() == num_blocks
    invariants.check(pool)
    return report


def test_a_request_alone_holds_its_blocks_until_its_last_token():
    #   0 .. 16 prefill in 2 blocks, 16 .. 96 decode of 8 tokens in 3
    report = run([(0, 16, 8, [1, 2])], 10)
    assert report.simulated_ms == 96
    assert report.peak_blocks_in_use == 3
    assert report.mean_blocks_in_use == (16 * 2 + 80 * 3) / 96
    assert report.tokens_out == 8


def test_a_request_without_output_ends_with_its_prompt():
    report = run([(0, 20, 0, [1, 2, 3])], 10)
    assert report.simulated_ms == 20
    assert (report.peak_blocks_in_use, report.tokens_out) == (3, 0)


def test_overlapping_requests_hold_their_blocks_at_once():
    #   first   0 .. 16 prefill, 16 .. 96 decode
    #   second  10 arrives, 16 .. 32 prefill, 32 .. 112 decode
    report = run([(0, 16, 8, [1, 2]), (10, 16, 8, [3, 4])], 10)
    assert report.peak_blocks_in_use == 6
    assert report.simulated_ms == 112
    assert report.mean_blocks_in_use == (10 * 2 + 6 * 4 + 16 * 5 + 64 * 6 + 16 * 3) / 112


def test_requests_that_do_not_overlap_never_hold_blocks_at_once():
    report = run([(0, 16, 8, [1, 2]), (100, 16, 8, [3, 4])], 10)
    assert report.peak_blocks_in_use == 3
    assert report.simulated_ms == 196


def test_overlapping_requests_share_the_blocks_of_their_prefix():
    report = run([(0, 16, 8, [1, 2]), (10, 24, 8, [1, 2, 3])], 10)
    assert (report.blocks_hit, report.tokens_hit) == (2, 16)
    assert report.peak_blocks_in_use == 3 + 2
    # The second computes 8 tokens from 16 to 24 and generates until 104.
    assert report.simulated_ms == 104


def test_a_request_waits_until_another_ends_and_its_blocks_are_free():
    requests = [(0, 24, 8, [1, 2, 3]), (0, 24, 0, [4, 5, 6])]
    # With room for both the second computes from 24 to 48, while the first generates until 104.
    assert run(requests, 7).simulated_ms == 104
    waited = run(requests, 5)
    assert waited.simulated_ms == 104 + 24
    assert waited.peak_blocks_in_use == 4
    assert waited.preempted == 0


def test_no_more_than_max_running_requests_hold_blocks():
    requests = [(0, 16, 16, [1, 2]), (0, 16, 8, [3, 4])]
    report = run(requests, 20, max_running=1)
    assert report.peak_blocks_in_use == 4
    assert report.simulated_ms == (16 + 160) + (16 + 80)


def test_a_request_that_waits_holds_back_those_behind_it():
    requests = [(0, 24, 8, [1, 2, 3]), (0, 24, 0, [4, 5, 6]), (0, 8, 0, [7])]
    # The third would fit beside the first, and end at 32; behind the second it ends last.
    assert run(requests, 5).simulated_ms == 104 + 24 + 8


def test_the_last_admitted_loses_its_blocks_and_completes_later():
    #   first   16 tokens, generates 12: blocks 3 and 4 at 16 and 96, ends at 136
    #   second  20 tokens in 3 blocks, generates 4 into its last: loses them at 16 to the first
    # At 136 its first block is still cached: 12 tokens to compute, 4 to generate.
    report = run([(0, 16, 12, [1, 2]), (0, 20, 4, [3, 4, 5])], 5)
    assert report.preempted == 1
    assert report.simulated_ms == 136 + 12 + 40
    assert report.tokens_out == 12 + 4
    assert report.peak_blocks_in_use == 5


def test_what_a_preempted_request_finds_again_is_no_hit():
    report = run([(0, 16, 12, [1, 2]), (0, 20, 4, [3, 4, 5])], 5)
    assert report.preempted == 1
    assert (report.blocks_hit, report.tokens_hit) == (0, 0)
    assert report.mean_request_token_hit_rate == 0


def test_a_preempted_request_keeps_the_tokens_that_it_generated():
    #   first   0 .. 24 prefill, generates 24: blocks 4, 5, 6 of 7 at 24, 104, 184, ends at 264
    #   second  24 .. 36 prefill of 12 tokens, generates 4 until 76, lacks a third block and loses its two;
    # at 104 and 184 the first moves on and leaves too few for it
    # From 264 it computes 8 tokens and generates the 8 that it has not generated yet.
    report = run([(0, 24, 24, [1, 2, 3]), (0, 12, 12, [4, 5])], 7)
    assert report.preempted == 1
    assert report.simulated_ms == 264 + 8 + 80
    assert report.tokens_out == 24 + 12


def test_a_preempted_request_goes_before_those_that_wait():
    #   as in test_the_last_admitted_..., and a third arrives at 5, when all blocks are in use
    # At 16 two blocks are free again, too few for the second: the third waits behind it until 136, is
    # computed from 148 to 156, and generates until 236.
    report = run([(0, 16, 12, [1, 2]), (0, 20, 4, [3, 4, 5]), (5, 8, 8, [6])], 5)
    assert report.preempted == 1
    assert report.simulated_ms == 156 + 80


def test_generated_blocks_are_cached_as_prompts_are():
    #   the first's prompt and output take both blocks; the second takes the one with the output
    report = run([(0, 8, 8, [1]), (500, 8, 0, [2]), (600, 16, 0, [1, 3])], 2)
    assert report.evictions == 2
    assert report.blocks_hit == 1


def test_arrivals_come_faster_by_the_speedup():
    requests = [(0, 8, 0, [1]), (2000, 8, 0, [2])]
    assert run(requests, 10).simulated_ms == 2008
    assert run(requests, 10, speedup=4.0).simulated_ms == 508


def test_simulated_time_begins_with_the_first_arrival():
    report = run([(5000, 16, 8, [1, 2])], 10)
    assert report.simulated_ms == 96
    assert report.mean_blocks_in_use == (16 * 2 + 80 * 3) / 96


def test_late_timestamps_are_counted_and_arrive_with_their_predecessor():
    requests = [(0, 8, 0, [1]), (100, 8, 0, [2]), (50, 8, 0, [3]), (100, 8, 0, [4]), (300, 8, 0, [5])]
    report = run(requests, 10)
    assert report.late_requests == 1
    assert report.simulated_ms == 308
    assert report.peak_blocks_in_use == 3


def test_late_timestamps_arrive_with_their_predecessor_at_every_speedup():
    report = run([(0, 8, 0, [1]), (1000, 8, 0, [2]), (900, 8, 0, [3])], 10, speedup=10.0)
    assert report.late_requests == 1
    assert report.simulated_ms == 100 + 8 + 8


def test_a_request_that_can_not_fit_with_all_its_output_is_refused():
    requests = [(0, 16, 33, [1, 2]), (0, 16, 32, [1, 2])]
    report = run(requests, 6)
    assert (report.requests, report.refused_requests) == (2, 1)
    assert report.tokens_out == 32
    assert (report.tokens_in, report.blocks_looked_up) == (32, 4)
    assert report.peak_blocks_in_use == 6


@pytest.mark.parametrize("convention", ["full_blocks_cap", "ids_as_blocks_cap"])
def test_a_request_that_is_preempted_by_its_own_need_waits_for_the_other(convention):
    #   first   0 .. 16 prefill, generates 12: block 3 of 5 at 16, block 4 at 96, ends at 136
    #   second  32: computed, needs a third block and loses its two; at 96 the first takes one of them;
    # 136 .. 144 prefill, generates until 224
    report = run([(0, 16, 12, [1, 2]), (0, 16, 8, [3, 4])], 5, convention)
    assert report.preempted == 1
    assert report.simulated_ms == 224
    assert report.tokens_out == 20


@pytest.mark.parametrize("convention", ["full_blocks", "ids_as_blocks"])
def test_a_fully_cached_request_that_is_preempted_by_its_own_need_ends(convention):
    report = run([(0, 16, 12, [1, 2]), (0, 16, 8, [3, 4])], 5, convention)
    assert report.tokens_out == 20


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("partial_ids", [True, False])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_request_that_is_not_refused_finishes(convention, partial_ids, seed):
    rng = random.Random(seed)
    num_blocks = rng.randrange(4, 16)
    requests = [
        (
            traced["timestamp"] if rng.random() < 0.95 else 0,
            traced["input_length"],
            traced["output_length"],
            traced["hash_ids"],
        )
        for traced in make_random_records(rng, 80, BLOCK_SIZE, partial_ids=partial_ids)
    ]
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


def test_random_small_pools_do_preempt():
    """Else the test above shows nothing about preemption."""
    rng = random.Random(0)
    requests = [
        (traced["timestamp"], traced["input_length"], traced["output_length"], traced["hash_ids"])
        for traced in make_random_records(rng, 80, BLOCK_SIZE, partial_ids=True)
    ]
    assert run(requests, 10).preempted > 0


@pytest.mark.parametrize("name", [field.name for field in fields(EngineRates)])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_rates_that_can_not_be_meant_are_refused(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name} is {value}; it is above 0"):
        EngineRates(**{name: value})
