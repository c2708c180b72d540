"""A live replay with lower tiers: onboarded blocks and their bytes."""

import functools
import random
from contextlib import contextmanager

import pytest
from control.live_checks import LAST, Clock, make_live, run_for
from lab.made_trace import make_random_records, record

from kv_pool import ControlError
from kv_pool.control import ControlClient, ControlServer
from kv_pool.errors import LayoutMismatchError

# The first prompt again, after others have used all blocks.
AGAIN = [
    record(40, [1, 2, 3, 4, 5], 2, 0),
    *[
        record(40, [10 * at + 6, 10 * at + 7, 10 * at + 8, 10 * at + 9, 10 * at + 10], 2, 1000 * at)
        for at in (1, 2, 3)
    ],
    record(40, [1, 2, 3, 4, 5], 2, 5000),
    LAST,
]


@pytest.fixture(params=[False, True], ids=["pool", "manager"])
def replaying(request):
    return functools.partial(run_replay, manager=request.param)


@contextmanager
def run_replay(folder, records, **settings):
    """Yield a live replay, and a function that runs it for a number of seconds."""
    clock = Clock()
    settings = {"blocks": 12, "block_bytes": 64, **settings}
    replay = make_live(folder / "trace.jsonl", records, clock, **settings)
    try:
        yield replay, lambda seconds: run_for(seconds, clock, replay)
    finally:
        replay.tiers.close()


def test_evicted_prompt_is_onboarded_from_host_memory(replaying, tmp_path):
    with replaying(tmp_path, AGAIN, host_tier=50) as (replay, run):
        run(8)
        assert replay.get_progress().num_finished == 5
        report = replay.tiers.get_report()
        # Its last block is recomputed, as an engine computes the last token.
        assert report.hit_blocks == {"GPU": 0, "CPU": 4}
        assert (report.tiers[0].num_read, report.num_dropped) == (4, 0)


def test_overflow_is_onboarded_from_disk_even_after_a_restart(replaying, tmp_path):
    cold = {"host_tier": 2, "disk_tier": str(tmp_path / "cold"), "disk_tier_blocks": 100}
    with replaying(tmp_path, AGAIN, **cold) as (replay, run):
        run(8)
        assert replay.get_progress().num_finished == 5
        hits = replay.tiers.get_report().hit_blocks
        assert hits["STORAGE"] + hits["CPU"] == 4
        assert hits["STORAGE"] >= 2
    with replaying(tmp_path, AGAIN[-2:], **cold) as (replay, run):
        run(6.5)
        assert replay.get_progress().num_finished == 1
        assert replay.tiers.get_report().hit_blocks["STORAGE"] == 4
    with pytest.raises(LayoutMismatchError), replaying(tmp_path, AGAIN, block_bytes=32, **cold):
        pass


@pytest.mark.parametrize("seed", range(4))
def test_busy_pool_with_tiers_has_correct_bytes(replaying, tmp_path, seed):
    draw = random.Random(seed)
    records = make_random_records(draw, 60, 8, partial_ids=True)
    records = [{**one, "timestamp": 200 * at, "output_length": 12} for at, one in enumerate(records)]
    most = max(-(-(one["input_length"] + 12) // 8) for one in records)
    settings = {
        "blocks": most + 6,
        "host_tier": draw.choice([0, 6]),
        "disk_tier": str(tmp_path / "cold"),
        "disk_tier_blocks": 40,
        "defrag_threshold": 0.05,
        "defrag_interval": 0,
        "max_evictions": 4,
        "run_length": 2,
    }
    with replaying(tmp_path, [*records, LAST], **settings) as (replay, run):
        run(40)
        assert replay.get_progress().num_finished == 60
        assert sum(replay.tiers.get_report().hit_blocks.values()) > 0
        assert replay.pool.get_statistics().moved_blocks > 0


def test_running_pool_reports_its_tiers(replaying, tmp_path):
    with (
        replaying(tmp_path, AGAIN, host_tier=50) as (replay, run),
        ControlServer(replay.pool, tmp_path / "here.sock", tiers=replay.tiers.get_report),
        ControlClient(tmp_path / "here.sock") as client,
    ):
        run(8)
        found = client.list_tiers()
        assert found == replay.tiers.get_report()
        assert [tier.medium for tier in found.tiers] == ["CPU"]
    with (
        ControlServer(replay.pool, tmp_path / "here.sock"),
        ControlClient(tmp_path / "here.sock") as client,
        pytest.raises(ControlError, match="has no lower tiers; kv-pool serve adds them with --host-tier"),
    ):
        client.list_tiers()
