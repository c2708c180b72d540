import re
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from made_threads import no_new_threads

from kv_pool.errors import OutOfThreadsError
from kv_pool.threads import REST_S, Workers, YieldTimer, start_thread, submit

PATIENCE_S = 30.0


def test_thread_start_failure_names_the_limit():
    with no_new_threads(), pytest.raises(OutOfThreadsError, match=r"'a name'.*ulimit -u"):
        start_thread("a name", print)
    assert "a name" not in {thread.name for thread in threading.enumerate()}


def test_thread_runs_its_target_as_a_daemon():
    report = []
    thread = start_thread("a name", report.append, 3)
    thread.join(60)
    assert (report, thread.name, thread.daemon) == ([3], "a name", True)


def test_executor_without_threads_names_the_limit():
    with (
        ThreadPoolExecutor(1) as executor,
        no_new_threads(),
        pytest.raises(OutOfThreadsError, match=r"'a name'.*ulimit -u"),
    ):
        submit(executor, "a name", print)
    with ThreadPoolExecutor(1) as executor:
        assert submit(executor, "a name", divmod, 7, 2).result() == (3, 1)


def test_all_threads_are_started_by_kv_pool_threads():
    package = Path(__file__).parents[1] / "kv_pool"
    if not package.is_dir():
        pytest.skip("no sources beside the tests")
    found = [
        f"{path.relative_to(package)}: {match[0]}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "threads.py"
        for match in re.finditer(r"\bThread\(|(executor|starter)\.(submit|map)\(", path.read_text())
    ]
    assert found == []


def test_submitted_work_returns_its_result_or_error():
    workers = Workers("a test", 2)
    assert workers.submit(lambda: 6 * 7).result(PATIENCE_S) == 42
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 / 0).result(PATIENCE_S)
    workers.stop()


def test_at_most_max_threads_run_at_once():
    workers = Workers("a test", 2)
    both, go = threading.Barrier(3), threading.Event()
    running = [workers.submit(lambda: (both.wait(PATIENCE_S), go.wait(PATIENCE_S))) for _ in range(2)]
    third = workers.submit(lambda: 3)
    both.wait(PATIENCE_S)
    assert not third.done()
    go.set()
    assert third.result(PATIENCE_S) == 3
    assert all(future.result(PATIENCE_S) for future in running)
    workers.stop()


def test_stop_cancels_work_that_has_not_started():
    workers = Workers("a test", 1)
    begun, go = threading.Event(), threading.Event()
    first = workers.submit(lambda: (begun.set(), go.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    second = workers.submit(lambda: 2)
    workers.stop()
    with pytest.raises(CancelledError):
        second.result(PATIENCE_S)
    with pytest.raises(CancelledError):
        workers.submit(lambda: 3).result(PATIENCE_S)
    go.set()
    assert first.result(PATIENCE_S)


def test_a_thousand_small_tasks_all_run():
    workers = Workers("a test", 4)
    futures = [workers.submit(lambda number=number: number) for number in range(1000)]
    assert [future.result(PATIENCE_S) for future in futures] == list(range(1000))
    workers.stop()


def test_workers_recover_after_a_thread_failed_to_start():
    workers = Workers("a test", 1)
    done = []
    with no_new_threads():
        for _ in range(3):
            with pytest.raises(OutOfThreadsError):
                workers.submit(lambda: done.append("never"))
    assert workers.submit(lambda: 6 * 7).result(PATIENCE_S) == 42
    assert not done
    workers.stop()


def test_work_waits_for_a_busy_thread_if_none_can_start():
    workers = Workers("a test", 2)
    begun, go = threading.Event(), threading.Event()
    first = workers.submit(lambda: (begun.set(), go.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    with no_new_threads():
        second = workers.submit(lambda: 2)
    go.set()
    assert second.result(PATIENCE_S) == 2
    assert first.result(PATIENCE_S)
    workers.stop()


def test_waiting_ends_when_all_work_is_done_or_too_late():
    workers = Workers("a test", 1)
    gate = threading.Event()
    done = []
    workers.submit(gate.wait)
    workers.submit(lambda: done.append(1))
    assert not workers.wait(0)
    gate.set()
    assert workers.wait(60)
    assert done == [1]
    workers.stop()
    assert workers.wait(60)


def test_stop_wakes_who_waits_for_work_that_it_cancels(monkeypatch):
    workers = Workers("a test", 1)
    workers.submit(int)
    assert workers.wait(60)
    monkeypatch.setattr(workers._condition, "notify", int)  # the idle thread is not awake yet
    future = workers.submit(int)
    waiter = Workers("the waiter", 1)
    waited = waiter.submit(workers.wait)
    assert not workers.wait(0.2)
    workers.stop()
    assert waited.result(60)
    assert future.cancelled()


def test_yield_timer_sleeps_after_work_ns():
    now_ns, rests_s, rested = 0, [], []

    def sleep(seconds):
        nonlocal now_ns
        rests_s.append(seconds)
        now_ns += 1_000

    yield_timer = YieldTimer(300, lambda: now_ns, sleep)
    for _ in range(7):
        now_ns += 100
        yield_timer.yield_if_due()
        rested.append(len(rests_s))
    assert rested == [0, 0, 1, 1, 1, 2, 2]
    assert set(rests_s) == {REST_S}
