"""Tests of comparisons: results, the optimum, continuation, broken policies, executors."""

import json
import resource
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import msgspec
import pytest
from lab.compare.made_comparison import MINE, CountingExecutor, make_settings, write_random_trace
from lab.made_trace import record, write_trace

from kv_pool import InvalidArgumentError, TraceError
from kv_pool.core.policy_names import list_policies
from kv_pool.errors import WorkerLostError
from kv_pool.lab.compare.compare import compare_policies
from kv_pool.lab.compare.comparison import read_comparison
from kv_pool.lab.compare.policy_run import Failure, Origin, PolicySource, attempt, read_source, run_policy
from kv_pool.lab.compare.references import measure_references
from kv_pool.lab.replay_request import CONVENTIONS
from kv_pool.lab.report import write_json
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.sweep import count_infinite_hits
from kv_pool.lab.worker_processes import WorkerProcesses


@pytest.fixture
def traces(tmp_path):
    return [
        write_random_trace(tmp_path / f"{seed}.jsonl", seed, num_sessions=20 * (seed % 2)) for seed in (3, 4)
    ]


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def strip_times(comparison):
    """Return the JSON of a comparison without what depends on the clock."""
    found = json.loads(msgspec.json.encode(comparison))
    for trace in found["traces"]:
        del trace["provenance"]["date"]
        for row in trace["rows"]:
            del row["seconds"]
    return found


@pytest.mark.parametrize("runs", [False, True])
def test_rows_equal_single_replays(traces, runs):
    settings = make_settings(traces, ["s3fifo", "flat:sieve"], runs=runs)
    found = compare_policies(settings, CountingExecutor())
    for compared, of_trace in zip(settings.traces, found.traces, strict=True):
        names = [(row.policy, row.num_blocks) for row in of_trace.rows]
        policies = ["lru", "s3fifo", "flat:sieve", "optimum"]
        ceiling = count_infinite_hits(compared.settings)
        assert names == [(name, size) for size in (12, 30) for name in policies] + [
            ("infinite", ceiling.num_blocks)
        ]
        assert of_trace.infinite_cache == ceiling
        for row in of_trace.rows[:-1]:
            report = run_replay(replace(compared.settings, policy=row.policy, num_blocks=row.num_blocks))
            assert (row.blocks_hit, row.tokens_hit) == (report.blocks_hit, report.tokens_hit)
            assert row.blocks_hit + row.blocks_missed == report.blocks_looked_up
            assert row.token_hit_rate == report.token_hit_rate
            assert row.block_hit_rate == report.block_hit_rate
            if row.policy != "optimum":
                assert row.evictions == report.evictions
                assert row.origin == "replay"
    assert not found.contradictions
    assert [record.name for record in found.policies] == ["lru", "s3fifo", "flat:sieve"]


def test_refused_requests_are_not_admitted(tmp_path):
    records = [record(16, [1, 2]), record(16, [1, 2]), record(80, list(range(10, 20)))]
    path = write_trace(tmp_path / "trace.jsonl", records)
    found = compare_policies(make_settings([path], [], [4]), CountingExecutor())
    lru = found.traces[0].rows[0]
    assert (lru.blocks_hit, lru.blocks_missed, lru.admitted) == (1, 13, 3)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_is_above_the_optimum(tmp_path, seed, convention):
    path = write_random_trace(tmp_path / "trace.jsonl", seed, num_requests=80)
    names = [name for name in list_policies() if name != "lru"]
    policies = [*names, *(f"flat:{name}" for name in ("lru", "s3fifo", "sieve", "lirs", "arc"))]
    settings = make_settings([path], policies, [8, 17, 40], resamples=0, convention=convention)
    found = compare_policies(settings, CountingExecutor())
    errors = [row.error for row in found.traces[0].rows if row.error is not None]
    assert not errors
    assert not found.contradictions
    best = {row.num_blocks: row for row in found.traces[0].rows if row.policy == "optimum"}
    for row in found.traces[0].rows[:-1]:
        assert row.blocks_hit <= best[row.num_blocks].blocks_hit <= found.traces[0].infinite_cache.blocks_hit
        assert row.tokens_hit <= best[row.num_blocks].tokens_hit <= found.traces[0].infinite_cache.tokens_hit


EXECUTORS = {
    "threads": lambda: ThreadPoolExecutor(2),
    "processes": lambda: ProcessPoolExecutor(1, mp_context=get_context("spawn")),
    "worker processes": lambda: WorkerProcesses(2),
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_gives_the_same_results(traces, mine, name):
    settings = make_settings(traces, ["s3fifo", f"{mine}:Mine", f"{mine}:Broken"])
    expected = compare_policies(settings, CountingExecutor())
    with EXECUTORS[name]() as executor:
        assert strip_times(compare_policies(settings, executor)) == strip_times(expected)


def test_broken_policy_fails_its_own_runs_only(traces, mine):
    notes = []
    settings = make_settings(traces, [f"{mine}:Broken", "sieve"])
    found = compare_policies(settings, CountingExecutor(), on_progress=lambda *note: notes.append(note))
    for of_trace in found.traces:
        for row in of_trace.rows:
            if row.policy.endswith("Broken"):
                assert row.error.startswith(f"CachePolicyError: the cache policy {mine}:Broken is broken: ")
                assert row.blocks_hit is row.gap_closed is None
            else:
                assert row.error is None
                assert row.blocks_hit is not None
    assert [share for _, share in notes] == [number / 14 for number in range(1, 15)]
    assert sum(": CachePolicyError: " in now for now, _ in notes) == 4


def test_capacity_that_fits_no_request_fails_its_runs(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3]), record(24, [1, 2, 3])])
    found = compare_policies(make_settings([path], ["sieve"], [2, 3]), CountingExecutor())
    errors = {(row.policy, row.num_blocks) for row in found.traces[0].rows if row.error is not None}
    assert errors == {("lru", 2), ("sieve", 2)}
    row = found.traces[0].rows[0]
    assert "InvalidArgumentError: no request fits: the pool has 2 blocks" in row.error


class Stop(BaseException):
    pass


def stop_at(number):
    def stop(now, share):
        if now.startswith(f"{number} of "):
            raise Stop

    return stop


def test_interrupted_comparison_goes_on(traces, tmp_path):
    settings = make_settings(traces, ["s3fifo"])
    finished = tmp_path / "compare.json.runs"
    expected = compare_policies(settings, CountingExecutor())
    with pytest.raises(Stop):
        compare_policies(settings, CountingExecutor(), str(finished), stop_at(5))
    lines = finished.read_bytes().splitlines()
    assert len(lines) == 5
    assert all(json.loads(line)["key"] for line in lines)
    finished.write_bytes(finished.read_bytes()[:-30])  # as after a power failure: the last line is cut
    executor, notes = CountingExecutor(), []
    found = compare_policies(settings, executor, str(finished), lambda *note: notes.append(note))
    assert executor.num_jobs == 2 + 2 * 2 * 2 - 4
    assert (notes[0], notes[-1][1]) == (("4 of 10, finished before", 0.4), 1.0)
    assert strip_times(found) == strip_times(expected)
    assert not finished.exists()


def test_only_what_has_changed_is_run_again(traces, mine, tmp_path):
    settings = make_settings(traces[:1], [f"{mine}:Broken", f"{mine}:Mine", "sieve"])
    finished = str(tmp_path / "runs")

    def count_jobs(again=settings):
        executor = CountingExecutor()
        compare_policies(again, executor, finished)
        return executor.num_jobs

    assert count_jobs() == 1 + 2 * 4
    assert count_jobs() == 2  # those that failed
    assert count_jobs(replace_policies(settings, "sieve", f"{mine}:Broken", "fifo")) == 4
    mine.write_text(MINE.replace("else 1\n", "else 1  # changed\n"))
    assert count_jobs() == 4
    assert count_jobs(make_settings(traces[:1], settings.policies, limit=100)) == 9
    with open(traces[0], "a") as file:
        file.write(json.dumps(record(8, [1])) + "\n")
    assert count_jobs() == 9


def replace_policies(settings, *policies):
    return msgspec.structs.replace(settings, policies=policies)


def test_file_of_a_policy_is_sent_as_text(traces, mine):
    source = read_source(f"flat:{mine}:Mine")
    mine.unlink()
    moved = msgspec.convert(msgspec.to_builtins(source), PolicySource)
    choice = moved.load()
    assert (choice.name, choice.is_flat) == (f"flat:{mine}:Mine", True)
    assert choice.make().num_queues == 2


def test_module_of_a_policy_must_be_the_same(traces, tmp_path, monkeypatch):
    (tmp_path / "policy_of_a_module.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    name = "policy_of_a_module:Mine"
    source = read_source(name)
    assert source.load().name == name
    other = PolicySource(name, sha256="0" * 64)
    settings = make_settings(traces, []).traces[0].settings
    failure = attempt(partial(run_policy, replace(settings, num_blocks=20), other, Origin("")))
    assert isinstance(failure, Failure)
    assert "has another text in this process" in failure.message
    del sys.modules["policy_of_a_module"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nothing", "there is no cache policy 'nothing'"),
        ("nowhere.py:Mine", "there is no file nowhere.py"),
        ("MINE:Other", "Other is not a class derived from"),
    ],
)
def test_policy_that_is_not_found_stops_before_all_runs(traces, mine, policy, message):
    executor = CountingExecutor()
    with pytest.raises(InvalidArgumentError, match=message):
        compare_policies(make_settings(traces, [policy.replace("MINE", str(mine))]), executor)
    assert executor.num_jobs == 0


def test_changed_trace_is_reported_by_the_worker(traces):
    settings = make_settings(traces, []).traces[0].settings
    run = partial(run_policy, replace(settings, num_blocks=20), PolicySource("lru"), Origin("0" * 64))
    failure = attempt(run)
    assert failure.error == "TraceError"
    assert "the worker has another file of this name" in failure.describe()


def test_worker_with_another_version_is_reported(traces):
    compared = make_settings(traces, []).traces[0]
    origin = Origin(compared.settings.open_trace().digest(), "99.0")
    for call in (
        partial(run_policy, replace(compared.settings, num_blocks=20), PolicySource("lru"), origin),
        partial(measure_references, compared, origin),
    ):
        failure = attempt(call)
        assert failure.error == "InvalidArgumentError"
        assert "the comparison was started with 99.0; install the same version" in failure.message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clock": "trace"}, "with the trace clock, running requests hold blocks"),
        ({"keep_session_s": 1.0, "keep_prefix_tokens": 8}, "without kept sessions and prefixes only"),
    ],
    ids=["trace clock", "kept sessions and prefixes"],
)
def test_some_replays_have_no_optimum(traces, options, why):
    settings = make_settings(traces[:1], ["sieve"], **options)
    found = compare_policies(settings, CountingExecutor())
    for compared, of_trace in zip(settings.traces, found.traces, strict=True):
        assert of_trace.optimum_blocks is of_trace.optimum_tokens is None
        assert why in of_trace.why_no_optimum
        for row in of_trace.rows[:2]:
            report = run_replay(replace(compared.settings, policy=row.policy, num_blocks=row.num_blocks))
            assert (row.blocks_hit, row.tokens_hit) == (report.blocks_hit, report.tokens_hit)
        assert [row.policy for row in of_trace.rows] == ["lru", "sieve", "lru", "sieve", "infinite"]
        lru, sieve = of_trace.rows[:2]
        assert lru.gap_closed is sieve.gap_closed is None
        assert sieve.above_lru == pytest.approx(sieve.token_hit_rate - lru.token_hit_rate)
        assert sieve.above_lru_low <= sieve.above_lru_high


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], [3, 2], [1, 2]], "a block occurs after two different prefixes"),
        ([[1, 2], [1, 3], [2, 5]], "has the id of a block with another prefix"),
    ],
)
def test_ids_that_are_no_prefixes_have_no_optimum(tmp_path, prompts, message):
    path = write_trace(tmp_path / "trace.jsonl", [record(16, ids) for ids in prompts])
    found = compare_policies(make_settings([path], ["sieve"], [10]), CountingExecutor())
    assert message in found.traces[0].why_no_optimum
    assert [row.error for row in found.traces[0].rows] == [None] * 3


def test_units_are_sessions_or_roots(traces):
    found = compare_policies(make_settings(traces, []), CountingExecutor())
    assert [of_trace.unit for of_trace in found.traces] == ["session", "root"]
    assert found.traces[0].units == 20


def test_trace_that_breaks_off_raises(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [*[record(8, [1])] * 200, "broken"])
    with pytest.raises(TraceError, match=r"no optimum of .*trace\.jsonl:201"):
        compare_policies(make_settings([path], [], [10]), CountingExecutor())


class LosingExecutor(CountingExecutor):
    """Loses the worker of one job."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def submit(self, fn, /, *args, **kwargs):
        def lose():
            raise WorkerLostError("a worker process ended before its job")

        if self.num_jobs == self.number:
            return super().submit(lose)
        return super().submit(fn, *args, **kwargs)


def test_lost_worker_is_an_error_of_its_run(traces, tmp_path):
    settings, finished = make_settings(traces[:1], ["sieve"], [12]), tmp_path / "runs"
    found = compare_policies(settings, LosingExecutor(2), str(finished))
    errors = [row.error for row in found.traces[0].rows]
    assert errors == [None, "WorkerLostError: a worker process ended before its job", None, None]
    assert len(finished.read_bytes().splitlines()) == 2
    with pytest.raises(WorkerLostError, match="no optimum of"):
        compare_policies(settings, LosingExecutor(0))


def test_comparison_is_repeated_from_its_json(traces, tmp_path):
    path = tmp_path / "compare.json"
    settings = make_settings(traces, ["lru", "optimum", "sieve"], block_bytes=64, seed=5)
    found = compare_policies(settings, CountingExecutor())
    write_json(found, str(path))
    read = read_comparison(str(path))
    assert read == found
    assert read.settings == settings
    assert strip_times(compare_policies(read.settings, CountingExecutor())) == strip_times(found)


@pytest.mark.parametrize("text", ["", "[]", '{"settings": 1}', "[" * 100_000])
def test_other_json_is_no_comparison(tmp_path, text):
    path = tmp_path / "compare.json"
    path.write_text(text)
    with pytest.raises(TraceError, match="not the JSON of a comparison"):
        read_comparison(str(path))
    with pytest.raises(TraceError, match="cannot read a comparison"):
        read_comparison(str(tmp_path))


def test_invalid_settings_are_refused(traces):
    for settings, message in [
        (make_settings([], []), "at least one trace"),
        (make_settings(traces, [], []), "at least one capacity"),
        (make_settings(traces, [], [0]), "num_blocks is 0"),
        (make_settings(traces, [], resamples=-1), "resamples is -1"),
        (make_settings(traces, [], policy="sieve"), "sets the cache policy itself"),
        (make_settings(traces, [], by="turn"), "sets the cache policy itself"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            compare_policies(settings, CountingExecutor())


def test_finished_runs_that_cannot_be_kept_are_an_error(traces, tmp_path):
    with pytest.raises(TraceError, match="cannot write finished runs"):
        compare_policies(make_settings(traces, []), CountingExecutor(), str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TraceError, match="cannot write finished runs: File too large"):
            compare_policies(make_settings(traces, []), CountingExecutor(), str(tmp_path / "runs"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
