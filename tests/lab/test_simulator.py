"""Tests of `run_replay`: refused settings, reports, events and provenance."""

import hashlib
import platform
import random
import sys
from itertools import pairwise

import msgspec
import pytest
from lab.made_trace import make_random_records, record, write_trace

import kv_pool
from kv_pool import BlockRemoved, BlockStored, InvalidArgumentError
from kv_pool.events.event_publisher import NullEventPublisher
from kv_pool.lab import simulator
from kv_pool.lab.event_feed import EventFeed
from kv_pool.lab.settings import CLOCKS, EngineRates, ReplaySettings
from kv_pool.lab.simulator import run_replay


@pytest.fixture
def trace(tmp_path):
    """A trace of a hundred requests with blocks of 8 tokens."""
    path = tmp_path / "trace.jsonl"
    return str(write_trace(path, make_random_records(random.Random(1), 100, 8, partial_ids=True)))


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"clock": "wall"}, "unknown clock 'wall'; known are instant, trace"),
        ({"convention": "papers"}, "unknown convention 'papers'; known are full_blocks_cap"),
        ({"groups": "full,half"}, "'half' in groups 'full,half' is not a group; write full, window:TOKENS"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; it must be 1 or more"),
        (
            {"chunk_tokens": 7, "groups": "full,mamba"},
            "a step of 7 prompt tokens is too short; it needs at least 8",
        ),
        ({"watermark": 1.0}, "watermark is 1.0; it is a share of the pool, 0 to below 1"),
        ({"keep_session_s": -1.0}, "session_s is -1.0"),
        ({"keep_session_s": 60.0}, "has no session_id, so there are no sessions to keep"),
        ({"preemption": "never"}, "unknown preemption 'never'; known are cost, swap, recompute"),
        ({"host_blocks": -1}, "host_blocks is -1"),
        ({"host_blocks": 9, "block_bytes": 1}, "which only the trace clock has"),
        (
            {"host_blocks": 9, "clock": "trace"},
            "need the bytes of a block",
        ),
        ({"limit": 0}, "limit is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 0}, "num_blocks is 0; the pool needs at least 1"),
        ({"trace_block_size": 0}, "trace_block_size is 0"),
        ({"timestamp_unit": "m"}, "timestamp_unit is 'm'"),
    ],
)
def test_invalid_settings_are_refused(trace, setting, why):
    with pytest.raises(InvalidArgumentError, match=why):
        run_replay(ReplaySettings(**{"trace": trace, "num_blocks": 10, **setting}))


@pytest.mark.parametrize(
    ("clock", "smallest"), [("instant", 3), ("trace", 4)], ids=["prompts", "prompts with output"]
)
def test_error_for_a_too_small_pool_names_the_need(tmp_path, clock, smallest):
    records = [record(40, [1, 2, 3, 4, 5]), record(20, [1, 2, 6], 7), record(30, [1, 2, 7, 8])]
    path = write_trace(tmp_path / "trace.jsonl", records)
    settings = ReplaySettings(str(path), 2, clock=clock, trace_block_size=8)
    with pytest.raises(
        InvalidArgumentError,
        match=f"has 2 blocks of 8 tokens, the smallest request needs {smallest}; use a larger capacity$",
    ):
        run_replay(settings)


@pytest.mark.parametrize("clock", CLOCKS)
def test_limit_takes_the_first_requests(tmp_path, clock):
    records = [record(8, [number]) for number in range(10)]
    path = write_trace(tmp_path / "trace.jsonl", [*records, "not json"])
    report = run_replay(ReplaySettings(str(path), 10, clock=clock, limit=7, trace_block_size=8))
    assert (report.requests, report.tokens_in) == (7, 56)


@pytest.mark.parametrize("clock", CLOCKS)
def test_progress_is_reported_during_the_replay(trace, clock):
    told = []
    run_replay(ReplaySettings(trace, 20, clock=clock, trace_block_size=8), lambda *now: told.append(now))
    assert told[0][0].startswith("1 requests, token hit rate 0.0%, pool ")
    assert all(0 <= before <= after <= 1 for (_, before), (_, after) in pairwise(told))


def test_progress_counts_waiting_requests_as_unfinished(tmp_path, monkeypatch):
    """Progress was the share of the file read, which ends long before a queue of requests does."""
    monkeypatch.setattr(simulator, "_SECONDS_BETWEEN_PROGRESS", 0.0)
    path = write_trace(tmp_path / "trace.jsonl", [record(8, [number], 80, 0) for number in range(20)])
    told = []
    settings = ReplaySettings(str(path), 30, clock="trace", trace_block_size=8)
    run_replay(settings, lambda *now: told.append(now))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    all_have_arrived = [share for now, share in told if now.startswith("20 requests, ")]
    assert all_have_arrived[0] < 0.2
    assert len(set(all_have_arrived)) > 10
    assert shares[-1] > 0.9


class Collector(NullEventPublisher):
    """A publisher that collects its events."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def publish(self, events):
        self.batches.append(events)


@pytest.mark.parametrize("clock", CLOCKS)
def test_events_match_the_counts_of_the_report(trace, clock):
    publisher = Collector()
    settings = ReplaySettings(trace, 12, clock=clock, trace_block_size=8)
    report = run_replay(settings, feed=EventFeed(publisher))
    events = [event for batch in publisher.batches for event in batch]
    assert len(publisher.batches) == report.requests + 1
    removals = [event for event in events if isinstance(event, BlockRemoved)]
    assert sum(len(event.block_hashes) for event in removals) == report.evictions > 0
    assert count(report) == count(run_replay(settings))


@pytest.mark.parametrize("clock", CLOCKS)
def test_events_include_those_of_tiers(trace, clock):
    publisher = Collector()
    settings = ReplaySettings(
        trace, 12, clock=clock, trace_block_size=8, host_tier=5, disk_tier=9, block_bytes=1000
    )
    report = run_replay(settings, feed=EventFeed(publisher))
    events = [event for batch in publisher.batches for event in batch]
    for tier in report.tiers:
        told = [event for event in events if event.medium == tier.medium]
        stored = [len(event.block_hashes) for event in told if isinstance(event, BlockStored)]
        removed = [len(event.block_hashes) for event in told if isinstance(event, BlockRemoved)]
        assert (sum(stored), sum(removed)) == (tier.blocks_written, tier.evictions)
        assert tier.blocks_hit > 0
    assert count(report) == count(run_replay(settings))


def count(report):
    """Return the report without values that differ between runs."""
    counts = msgspec.structs.asdict(report)
    for name in ("wall_seconds", "look_up", "allocate", "free", "provenance"):
        del counts[name]
    return counts


def test_report_contains_its_provenance(trace):
    report = run_replay(ReplaySettings(trace, 12, trace_block_size=8, seed="42"))
    provenance = report.provenance
    with open(trace, "rb") as file:
        assert provenance.trace_sha256 == hashlib.sha256(file.read()).hexdigest()
    assert provenance.trace == trace
    assert provenance.trace_block_size == 8
    assert provenance.seed == "42"
    assert provenance.kv_pool == kv_pool.__version__
    assert provenance.compiled is kv_pool.COMPILED
    assert provenance.python == platform.python_version()
    assert provenance.platform == platform.platform()
    assert provenance.command == sys.argv
    assert set(provenance.dependencies) == {"msgspec", "xxhash", "numpy", "cbor2"}
    assert provenance.date.endswith("+00:00")


def test_report_contains_its_settings(trace):
    rates = EngineRates(prefill_tokens_per_s=123.0, max_running=7)
    settings = ReplaySettings(trace, 12, block_size=4, clock="trace", rates=rates, trace_block_size=8)
    report = run_replay(settings)
    assert (report.num_blocks, report.block_size, report.clock) == (12, 4, "trace")
    assert report.convention == "full_blocks_cap"
    shown = {"clock": "trace", "block_size": 4, "states": "steps", "runs": False, "max_running": 7}
    assert report.settings.items() >= {**shown, "prefill_tokens_per_s": 123.0}.items()
    assert report.settings.keys() == settings.describe().keys()
    assert {"limit", "chunk_tokens", "by"}.isdisjoint(report.settings)  # they are None


@pytest.mark.parametrize("clock", CLOCKS)
def test_every_call_of_the_manager_is_timed(trace, clock):
    report = run_replay(ReplaySettings(trace, 1000, clock=clock, trace_block_size=8))
    assert report.free.calls == 100 + report.preempted
    assert report.look_up.calls >= 100
    assert report.allocate.calls >= 100
    for times in (report.look_up, report.allocate, report.free):
        assert 0 < times.median_ns <= times.p99_ns <= times.total_ns
    assert report.wall_seconds > 0


@pytest.mark.parametrize("seed", ["0", "other"])
def test_hash_seed_does_not_change_hits(tmp_path, seed):
    path = write_trace(tmp_path / "trace.jsonl", [{"token_ids": list(range(40))}] * 2)
    report = run_replay(ReplaySettings(str(path), 10, block_size=4, seed=seed))
    assert (report.blocks_looked_up, report.blocks_hit) == (20, 9)


@pytest.mark.parametrize("clock", CLOCKS)
def test_run_pool_lengthens_runs_and_keeps_counts_close(trace, clock):
    plain, with_runs = (
        run_replay(ReplaySettings(trace, 60, block_size=2, clock=clock, runs=runs)) for runs in (False, True)
    )
    assert with_runs.requests == plain.requests
    assert with_runs.blocks_per_run > plain.blocks_per_run
    assert with_runs.settings["runs"] is True
