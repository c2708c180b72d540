"""`PoolLock`: reentrant, fair enough, and free after any interrupt."""

import os
import random
import signal
import threading
from _thread import RLock

import pytest
from interrupting import alarm_that_raises, interrupt_everywhere, run_until_interrupted

from kv_pool import BlockAllocationRequest, ForkedPoolError, GPUKVPool
from kv_pool.adapter import pool_lock
from kv_pool.adapter.pool_lock import PoolLock


def is_free(lock):
    """Return whether another thread can take the lock."""
    taken = []

    def take():
        taken.append(lock.acquire(False))
        if taken[0]:
            lock.release()

    run_together([take])
    return taken[0]


def run_together(works):
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "deadlock"


class HeldLock(PoolLock):
    """A lock held by another thread until `let_go`, which may be interrupted and repeated: it is in C."""

    def __init__(self):
        super().__init__()
        self.end = threading.Lock()
        self.end.acquire()
        self.held = threading.Lock()
        taken = threading.Event()
        threading.Thread(target=self._hold, args=(taken,), daemon=True).start()
        taken.wait()

    def _hold(self, taken):
        with self.held, self:
            taken.set()
            self.end.acquire()

    def begin_to_let_go(self):
        if self.end.locked():
            self.end.release()

    def let_go(self):
        self.begin_to_let_go()
        with self.held:
            pass


def enter(lock):
    with lock:
        pass


def enter_twice(lock):
    with lock, lock:
        pass


def check_free(lock):
    assert not lock._is_owned()
    assert is_free(lock)


def check_interrupts(make, call):
    tried, broken = interrupt_everywhere(make, call, check_free)
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("call", [enter, enter_twice])
def test_an_interrupt_leaves_the_lock_free(call):
    check_interrupts(PoolLock, call)


def test_the_check_detects_a_lock_left_held():
    class Naive(RLock):
        def __enter__(self):
            return self.acquire()

    _, broken = interrupt_everywhere(Naive, enter, check_free)
    assert len(broken) == 1


def test_an_interrupted_inner_entry_keeps_the_outer_one():
    lock = PoolLock()

    def check(lock):
        assert not is_free(lock)

    with lock:
        tried, broken = interrupt_everywhere(lambda: lock, enter, check)
    assert tried > 0
    assert not broken
    assert is_free(lock)


@pytest.mark.parametrize("num_failures", [0, 2, pool_lock._NUM_TRIES])
def test_an_interrupt_while_waiting_leaves_the_lock_free(num_failures, monkeypatch):
    """The holder releases after a number of tries; after the last one the thread blocks or is about to."""
    locks = []
    num_pauses = 0

    def make():
        nonlocal num_pauses
        num_pauses = 0
        locks.append(HeldLock())
        return locks[-1]

    def pause(seconds):
        nonlocal num_pauses
        num_pauses += 1
        if num_pauses > num_failures:
            locks[-1].let_go()
        elif num_pauses == pool_lock._NUM_TRIES:
            locks[-1].begin_to_let_go()

    monkeypatch.setattr(pool_lock, "sleep", pause)

    def check(lock):
        lock.let_go()
        check_free(lock)

    tried, broken = interrupt_everywhere(make, enter, check)
    assert tried > num_failures
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("seed", range(3))
def test_signals_at_random_times_leave_the_lock_free(seed):
    """Another thread keeps taking the lock, so that most entries wait."""
    lock = PoolLock()
    ended = threading.Event()

    def compete():
        while not ended.is_set():
            with lock:
                sum(range(100))

    thread = threading.Thread(target=compete, daemon=True)
    thread.start()
    rng = random.Random(seed)
    try:
        with alarm_that_raises():
            for turn in range(200):
                run_until_interrupted(lambda call=(enter, enter_twice)[turn % 2]: call(lock), rng)
                assert not lock._is_owned()
    finally:
        ended.set()
        thread.join()
    assert is_free(lock)


def test_one_thread_at_a_time_and_no_starvation():
    """Each of eight threads continues until all have held the lock 50 times."""
    lock = PoolLock()
    turns = dict.fromkeys(range(8), 0)
    inside = []
    ended = threading.Event()

    def work(number):
        while not ended.is_set():
            with lock:
                with lock:
                    inside.append(number)
                    sum(range(100))
                assert inside == [number]
                inside.clear()
                turns[number] += 1
                if min(turns.values()) >= 50:
                    ended.set()

    run_together([lambda number=number: work(number) for number in turns])
    assert min(turns.values()) >= 50
    assert is_free(lock)


def test_a_thread_blocks_after_many_tries_and_gets_the_lock(monkeypatch):
    pauses = []
    last_try = threading.Event()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == pool_lock._NUM_TRIES:
            last_try.set()

    monkeypatch.setattr(pool_lock, "sleep", pause)
    lock = HeldLock()
    waiting = threading.Thread(target=enter, args=(lock,), daemon=True)
    waiting.start()
    last_try.wait()
    assert waiting.is_alive()
    lock.let_go()
    waiting.join(timeout=120)
    assert not waiting.is_alive(), "deadlock"
    assert len(pauses) == pool_lock._NUM_TRIES
    assert sum(pauses) == pytest.approx(0.01275)
    assert is_free(lock)


# ---- forks of the process ------------------------------------------------------------------------


def run_in_fork(work):
    """Return whether `work()` is True in a child process, which is killed if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        is_right = False
        try:
            is_right = work()
        finally:
            os._exit(0 if is_right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_during_another_threads_call_raises_in_the_child():
    """The child waited for the lock for ever."""
    pool = GPUKVPool(9, 4)
    is_held, may_end = threading.Event(), threading.Event()

    def call():
        with pool.lock:
            is_held.set()
            may_end.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    is_held.wait(60)

    def use():
        for _ in range(2):
            try:
                pool.allocate(BlockAllocationRequest(1, 1))
            except ForkedPoolError:
                continue
            return False
        return len(GPUKVPool(9, 4).allocate(BlockAllocationRequest(1, 1))) == 1

    try:
        assert run_in_fork(use)
    finally:
        may_end.set()
        thread.join()
    assert len(pool.allocate(BlockAllocationRequest(1, 1))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("holds", [False, True])
def test_a_fork_by_the_only_thread_in_a_call_has_a_working_copy(holds):
    pool = GPUKVPool(9, 4)
    pool.allocate(BlockAllocationRequest(3, 1))

    def use():
        ids = pool.allocate(BlockAllocationRequest(2, 2))
        return pool.blocks_of(2) == ids and pool.get_free_blocks() == 4

    if holds:
        with pool.lock:
            assert run_in_fork(use)
    else:
        assert run_in_fork(use)
    assert pool.list_sequences() == [1]
