import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from made_threads import no_new_threads

from kv_pool.errors import OutOfThreadsError
from kv_pool.threads import start_thread, submit


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
