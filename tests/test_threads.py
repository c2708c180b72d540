import threading

import pytest
from made_threads import no_new_threads

from kv_pool.errors import OutOfThreadsError
from kv_pool.threads import start_thread


def test_a_thread_that_does_not_start_is_an_error_that_names_the_limit():
    with no_new_threads(), pytest.raises(OutOfThreadsError, match=r"'a name'.*ulimit -u"):
        start_thread("a name", print)
    assert "a name" not in {thread.name for thread in threading.enumerate()}


def test_a_thread_runs_its_target_and_does_not_keep_the_process():
    told = []
    thread = start_thread("a name", told.append, 3)
    thread.join(60)
    assert (told, thread.name, thread.daemon) == ([3], "a name", True)
