"""Replays with lower tiers: hits and copies against a slow model, and the duration of copies.

Expected times are computed by hand from the rates in `timed_replay`.
"""

import random
from dataclasses import replace

import pytest
from lab.made_trace import make_random_records, record, write_trace
from lab.slow_tiers import SlowTiers
from lab.test_groups import MODELS
from lab.timed_replay import BLOCK_BYTES, draw_requests, run_timed

from kv_pool.lab.settings import TIER_WRITES, ReplaySettings
from kv_pool.lab.simulator import run_replay

TIERS = {
    "host": (10, 0),
    "host and disk": (8, 20),
    "disk": (0, 15),
    "all fits": (1000, 0),
    "one block": (1, 1),
}
"""Capacities in host memory and on disk."""


def run_both(tmp_path, seed, groups, chunk_tokens, tiers, write):
    rng = random.Random(seed)
    # From the first request the reader infers 8 tokens per id.
    records = [record(1, [10**6]), *make_random_records(rng, 150, 8, partial_ids=True)]
    kinds = groups.split(",")
    most = max(-(-traced["input_length"] // 8) for traced in records)
    capacity = len(kinds) * most + rng.randrange(10)
    model = SlowTiers(kinds, capacity, 8, chunk_tokens, [size for size in TIERS[tiers] if size], write)
    for traced in records:
        model.run(traced)
    settings = ReplaySettings(
        str(write_trace(tmp_path / "trace.jsonl", records)),
        capacity,
        trace_block_size=8,
        groups=groups,
        chunk_tokens=chunk_tokens,
        host_tier=TIERS[tiers][0],
        disk_tier=TIERS[tiers][1],
        tier_write=write,
        block_bytes=1000,
    )
    return model, run_replay(settings)


def assert_same(model, report):
    assert {name: getattr(report, name) for name in model.counts} == model.counts
    for tier, capacity, counts in zip(report.tiers, model.capacities, model.tier_counts, strict=True):
        assert tier.capacity == capacity
        assert {name: getattr(tier, name) for name in counts} == counts
        assert tier.bytes_moved == 1000 * (tier.blocks_written + tier.blocks_read)
        assert tier.blocks_held == tier.blocks_written - tier.evictions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("write", TIER_WRITES)
@pytest.mark.parametrize("tiers", TIERS)
def test_tier_hits_and_copies_match_a_slow_model(tmp_path, tiers, write, seed):
    assert_same(*run_both(tmp_path, seed, "full", None, tiers, write))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("write", TIER_WRITES)
@pytest.mark.parametrize("chunk_tokens", [None, 8, 20])
@pytest.mark.parametrize("groups", [groups for groups in MODELS if groups != "full"])
def test_tiers_with_several_groups_match_a_slow_model(tmp_path, groups, chunk_tokens, write, seed):
    tiers = random.Random(seed).choice(["host", "host and disk"])
    assert_same(*run_both(tmp_path, seed, groups, chunk_tokens, tiers, write))


@pytest.mark.parametrize("groups", ["full", "full,window:9"])
def test_random_traces_hit_every_tier(tmp_path, groups):
    """Without hits in every tier the tests above would be meaningless."""
    reports = [
        run_both(tmp_path, seed, groups, 8, "host and disk", write)[1]
        for seed in range(4)
        for write in TIER_WRITES
    ]
    for level in range(2):
        assert sum(report.tiers[level].blocks_hit for report in reports) > 0
        assert sum(report.tiers[level].evictions for report in reports) > 0


# ---- the trace clock ---------------------------------------------------------------------------

# The first request is computed until 24. At 100 the second reuses blocks 3 and 2 of the first, tail first;
# they are offloaded to the host. The second is computed from 102 to 126.
TWO = [(0, 24, 0, [1, 2, 3]), (100, 24, 0, [4, 5, 6])]


def test_step_waits_until_its_blocks_are_offloaded():
    report, _ = run_timed(TWO, 4, tiers=(10, 0))
    assert report.simulated_ms == 126
    assert report.tiers[0].blocks_written == 2


def test_request_is_computed_after_its_blocks_are_loaded():
    # At 200 id 1 is on the device and id 2 on the host. Ids 6 and 5 are offloaded for id 2 and the new block:
    # two copies out, one back, 8 tokens.
    report, _ = run_timed([*TWO, (200, 24, 0, [1, 2, 3])], 4, tiers=(10, 0))
    assert report.simulated_ms == 200 + 3 + 8
    assert (report.tokens_hit, report.tiers[0].tokens_hit) == (16, 8)
    assert (report.tiers[0].blocks_written, report.tiers[0].blocks_read) == (4, 1)
    assert report.tiers[0].bytes_moved == 5 * BLOCK_BYTES


def test_disk_hits_use_both_links():
    # As above, without a host tier: two writes and one read of 4 ms each.
    report, _ = run_timed([*TWO, (200, 24, 0, [1, 2, 3])], 4, tiers=(0, 10))
    assert report.simulated_ms == 200 + 12 + 8
    assert report.tiers[0].medium == "STORAGE"


def test_loading_request_does_not_delay_others():
    # The second request reuses the blocks of ids 3 and 2. The host tier has one block, so id 3 moves to disk,
    # by 104. From 200 to 204 the third reads id 3; nothing is offloaded, because the host's only block is
    # held. The fourth is computed from 201 to 209, and the third after it.
    requests = [
        (0, 24, 0, [1, 2, 3]),
        (100, 32, 0, [4, 5, 6, 7]),
        (200, 32, 0, [1, 2, 3, 8]),
        (201, 8, 0, [9]),
    ]
    report, _ = run_timed(requests, 5, tiers=(1, 10))
    assert [tier.tokens_hit for tier in report.tiers] == [8, 8]
    assert report.waiting.max_ms == 0
    assert report.simulated_ms == 217


def test_serial_requests_hit_as_with_the_instant_clock(tmp_path):
    rng = random.Random(5)
    records = [
        {**traced, "timestamp": number * 10_000, "output_length": 0}
        for number, traced in enumerate([record(1, [10**6]), *make_random_records(rng, 150, 8, True)])
    ]
    path = str(write_trace(tmp_path / "trace.jsonl", records))
    settings = ReplaySettings(
        path,
        20,
        trace_block_size=8,
        host_tier=8,
        disk_tier=20,
        block_bytes=BLOCK_BYTES,
        groups="full,window:9",
    )
    instant, timed = run_replay(settings), run_replay(replace(settings, clock="trace"))
    assert timed.tiers == instant.tiers
    assert (timed.tokens_hit, timed.evictions) == (instant.tokens_hit, instant.evictions)
    assert min(tier.tokens_hit for tier in timed.tiers) > 0


def run_random(groups, seed, chunk_tokens, swap_blocks):
    rng = random.Random(seed)
    requests = draw_requests(rng)
    report, num_aborted = run_timed(
        requests,
        rng.randrange(4, 16) * len(groups.split(",")),
        tiers=rng.choice([(0, 0), (3, 0), (10, 20), (100, 0), (0, 30)]),
        groups=groups,
        chunk_tokens=chunk_tokens,
        write=rng.choice(TIER_WRITES),
        watermark=rng.choice([0.0, 0.1]),
        num_host_blocks=swap_blocks,
        max_running=rng.choice([2, 5, 100]),
    )
    return requests, report, num_aborted


GROUPS = ["full", "window:9", "full,window:20", "full,mamba", "chunked:16,window:2"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("swap_blocks", [0, 20], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("chunk_tokens", [None, 8])
@pytest.mark.parametrize("groups", GROUPS)
def test_accepted_requests_generate_every_token_once(groups, chunk_tokens, swap_blocks, seed):
    requests, report, _ = run_random(groups, seed, chunk_tokens, swap_blocks)
    assert report.waiting.requests == report.requests - report.refused_requests > 0
    if not report.refused_requests:
        assert report.tokens_out == sum(output_length for _, _, output_length, _ in requests)
    assert report.tokens_hit >= sum(tier.tokens_hit for tier in report.tiers)


def test_random_small_pools_preempt_loading_requests():
    """Without such preemptions, and without swaps, the test above would be meaningless."""
    runs = [run_random("full", seed, 8, 0) for seed in range(20)]
    assert sum(num_aborted for _, _, num_aborted in runs) > 0
    assert sum(report.tiers[0].blocks_hit for _, report, _ in runs if report.tiers) > 0
    for groups in GROUPS:
        assert sum(run_random(groups, seed, 8, 20)[1].swapped_out for seed in range(8)) > 0
