"""Tests of sweeps: equal to single replays, errors, and worker processes."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import msgspec
import pytest
from lab.made_trace import make_random_records, write_trace
from made_threads import no_new_threads

from kv_pool import InvalidArgumentError
from kv_pool.errors import OutOfThreadsError
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.sweep import count_infinite_hits, run_sweep

TIMES = ("wall_seconds", "look_up", "allocate", "free")


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, make_random_records(random.Random(3), 100, 8, partial_ids=True))
    return ReplaySettings(str(path), 1, trace_block_size=8)


def without_times(report):
    counts = msgspec.structs.asdict(report)
    for name in TIMES:
        del counts[name]
    del counts["infinite_cache"]  # only sweeps have it
    counts["provenance"] = msgspec.structs.replace(report.provenance, date="")
    return counts


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sweep_equals_single_replays_in_order(settings, num_processes):
    capacities = [20, 6, 60]
    finished = []
    reports = run_sweep(settings, capacities, num_processes, lambda *now: finished.append(now))
    singles = [
        run_replay(ReplaySettings(settings.trace, capacity, trace_block_size=8)) for capacity in capacities
    ]
    assert [without_times(report) for report in reports] == [without_times(report) for report in singles]
    assert {text[:6] for text, _ in finished} >= {"1 of 4", "2 of 4", "3 of 4", "4 of 4"}
    assert all(0 <= share <= 1 for _, share in finished)
    assert finished[-1][1] == 1.0
    assert reports[1].tokens_hit < reports[0].tokens_hit < reports[2].tokens_hit


def test_each_capacity_is_replayed_with_each_tier(settings):
    reports = run_sweep(settings, [20, 6], 2, None, [0, 30])
    sizes = [(report.num_blocks, sum(tier.capacity for tier in report.tiers)) for report in reports]
    assert sizes == [(20, 0), (20, 30), (6, 0), (6, 30)]
    assert reports[3].tokens_hit > reports[2].tokens_hit
    (alone,) = run_sweep(replace(settings, host_tier=30), [6], 1)
    assert without_times(alone) == without_times(reports[3])


def test_sweep_reports_include_the_infinite_cache(settings):
    reports = run_sweep(settings, [20, 1000], 2)
    assert [report.infinite_cache for report in reports] == [count_infinite_hits(settings)] * 2
    assert reports[0].tokens_hit < reports[0].infinite_cache.tokens_hit == reports[1].tokens_hit


def test_too_small_capacity_stops_the_sweep(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [{"token_ids": list(range(40))}])
    with pytest.raises(InvalidArgumentError, match="the pool has 2 blocks of 16 tokens"):
        run_sweep(ReplaySettings(str(path), 1), [2, 3], 1)


def test_sweep_ends_when_the_infinite_cache_cannot_be_counted(settings, monkeypatch):
    """It used to run all its replays before. Those that have not started are cancelled."""
    has_ended, started = Event(), []

    class Workers(ThreadPoolExecutor):
        def __exit__(self, *error):
            has_ended.set()
            super().__exit__(*error)

    monkeypatch.setattr("kv_pool.lab.sweep.WorkerProcesses", Workers)
    monkeypatch.setattr(
        "kv_pool.lab.sweep.run_replay", lambda *call: started.append(call) or has_ended.wait(60)
    )
    monkeypatch.setattr("kv_pool.lab.sweep.count_infinite_hits", divmod)
    with pytest.raises(TypeError, match="divmod"):
        run_sweep(settings, [20, 6, 60], 2)
    assert len(started) < 3


def test_sweep_of_an_unguarded_script_names_the_cause(settings, tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        "from kv_pool.lab import ReplaySettings, run_sweep\n"
        f"run_sweep(ReplaySettings({settings.trace!r}, 1, trace_block_size=8), [20], 1)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "outside `if __name__ == '__main__':`" in ended.stderr.splitlines()[-1]


def test_sweep_without_capacities_is_refused(settings):
    with pytest.raises(InvalidArgumentError, match="at least one capacity"):
        run_sweep(settings, [], 1)


def test_sweep_without_threads_raises_a_typed_error(settings):
    with no_new_threads(), pytest.raises(OutOfThreadsError, match="kv_pool replays"):
        run_sweep(settings, [20], 1)
