"""Tests of worker processes: results, errors, lost workers, and the end of all of them."""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from lab.compare.made_comparison import (
    CountingExecutor,
    make_settings,
    report_and_wait,
    write_random_trace,
)
from made_threads import call_without_threads

from kv_pool import InvalidArgumentError
from kv_pool.errors import OutOfThreadsError, WorkerLostError
from kv_pool.lab.compare.compare import compare_policies
from kv_pool.lab.sweep import run_sweep
from kv_pool.lab.worker_processes import (
    WorkerProcesses,
    count_running,
    report_share,
    run_jobs,
    work,
)


def test_results_and_errors_are_those_of_the_calls():
    with WorkerProcesses(2) as workers:
        found = [workers.submit(divmod, number, 3) for number in range(20)]
        failed = workers.submit(divmod, 1, 0)
        named = workers.submit(int, "z", base=36)
    assert [future.result() for future in found] == [divmod(number, 3) for number in range(20)]
    with pytest.raises(ZeroDivisionError) as caught:
        failed.result()
    assert "function(*arguments" in caught.value.__notes__[0]
    assert named.result() == 35


def test_call_that_cannot_be_pickled_fails_alone():
    with WorkerProcesses(1) as workers:
        failed, done = workers.submit(lambda: 1), workers.submit(os.getpid)
    with pytest.raises(Exception, match="pickle"):
        failed.result()
    assert done.result() != os.getpid()


def test_call_that_a_worker_cannot_import_fails_alone(monkeypatch):
    module = ModuleType("module_of_the_caller")
    exec("def answer(): return 42", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with WorkerProcesses(1) as workers:
        failed, done = workers.submit(module.answer), workers.submit(abs, -1)
    with pytest.raises(ModuleNotFoundError, match="module_of_the_caller"):
        failed.result()
    assert done.result() == 1


def test_lost_worker_fails_its_job_only():
    with WorkerProcesses(1) as workers:
        lost = workers.submit(os._exit, 1)
        others = [workers.submit(abs, -number) for number in range(20)]
    with pytest.raises(WorkerLostError, match="ended before its job"):
        lost.result()
    assert [future.result() for future in others] == list(range(20))


def interrupt_with_jobs(jobs):
    with WorkerProcesses(1) as workers:
        jobs += [workers.submit(time.sleep, 200), workers.submit(abs, 1), workers]
        while not jobs[0].running():
            pass
        raise KeyboardInterrupt


def test_exception_in_the_block_kills_running_jobs():
    started = time.monotonic()
    jobs = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_with_jobs(jobs)
    _, queued, workers = jobs
    assert time.monotonic() - started < 100
    assert queued.cancelled()
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="after the shutdown"):
        workers.submit(abs, 1)


def test_shutdown_can_cancel_queued_jobs():
    with WorkerProcesses(1) as workers:
        first = workers.submit(time.sleep, 0.2)
        while not first.running():
            pass
        queued = workers.submit(abs, 1)
        workers.shutdown(cancel_futures=True)
    assert queued.cancelled()
    assert first.result() is None


def test_shutdown_may_meet_the_end_of_the_block(capfd):
    """Both ended the same processes: a process was closed twice, or closed while it was running."""
    for _ in range(4):
        with WorkerProcesses(2) as workers:
            done = workers.submit(abs, -1)
            workers.shutdown(wait=False)
        assert done.result() == 1
    assert "Traceback" not in capfd.readouterr().err


def test_shares_of_running_jobs_arrive_before_their_results(tmp_path):
    ended, shares = {}, []

    def note(name, future):
        ended[name] = future.result()
        return name

    def end_when_halfway(text, share):
        shares.append(share)
        if share == 0.5:
            (tmp_path / "a").touch()
            (tmp_path / "b").touch()

    jobs = {name: partial(report_and_wait, tmp_path / name) for name in ("a", "b")}
    with WorkerProcesses(2) as workers:
        run_jobs(workers, jobs, note, end_when_halfway)
        assert count_running(workers) == 0
    assert ended == {"a": "done", "b": "done"}
    assert 0.5 in shares
    assert shares[-1] == 1.0
    report_share("outside of a worker", 0.5)
    assert count_running(CountingExecutor()) == 0


def test_number_of_processes_is_checked():
    with pytest.raises(InvalidArgumentError, match="num_processes is 0"):
        WorkerProcesses(0)


def test_worker_without_threads_refuses_each_call():
    """Regression: only the first call was answered, the next one waited for ever."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=call_without_threads, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    with ours:
        for _ in range(3):
            ours.send((abs, (-1,), {}))
            assert ours.poll(60)
            assert isinstance(ours.recv(), OutOfThreadsError)
    process.join(60)
    assert process.exitcode == 1


def test_replays_of_comparisons_and_sweeps_report_their_shares(tmp_path, monkeypatch):
    shares = []
    monkeypatch.setattr("kv_pool.lab.worker_processes._caller", SimpleNamespace(send=shares.append))
    monkeypatch.setattr("kv_pool.lab.sweep.WorkerProcesses", ThreadPoolExecutor)
    settings = make_settings([write_random_trace(tmp_path / "trace.jsonl", 3)], [])
    compare_policies(settings, CountingExecutor())
    num_compared = len(shares)
    run_sweep(settings.traces[0].settings, [20], 1)
    assert len(shares) > num_compared > 0
