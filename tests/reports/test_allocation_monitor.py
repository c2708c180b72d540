"""The history of a pool: windows, rates, threads, and what it keeps."""

import sys
import threading

import pytest
from adapter.made_pool import make, take

from kv_pool.reports.allocation_monitor import AllocationMonitor

HASHES = [b"a", b"b", b"c", b"d"]


class Watched:
    """A pool of ten blocks, and its monitor with a clock that tests set."""

    def __init__(self, **options):
        self.now = 0.0
        self.pool = make()
        self.monitor = AllocationMonitor(self.pool, clock=lambda: self.now, **options)

    def run(self, seconds, num_lookups=0, scenario=""):
        """Let time pass in steps of 30 s, with look-ups of four blocks, two of them hits, in each."""
        for _ in range(seconds // 30):
            for number in range(num_lookups):
                self.pool.claim_prefix(100 + number, HASHES)
                self.pool.free_sequence(100 + number)
            self.now += 30
            self.monitor.log_allocation_state(scenario)


def cache(pool, num_blocks):
    take(pool, 1, num_blocks)
    pool.cache_prefix(1, HASHES[:num_blocks])


@pytest.fixture
def watched():
    made = Watched(max_states=31)
    cache(made.pool, 2)
    made.monitor.log_allocation_state()
    return made


def list_rates(monitor, name):
    return [window.rates[name] for window in monitor.summarize().windows]


def test_rates_are_of_the_last_1_5_and_15_minutes(watched):
    watched.run(20 * 60)
    watched.run(60, num_lookups=3)
    assert list_rates(watched.monitor, "hit_tokens") == [6 * 8 / 60, 6 * 8 / 300, 6 * 8 / 900]
    assert list_rates(watched.monitor, "looked_up_tokens") == [6 * 16 / 60, 6 * 16 / 300, 6 * 16 / 900]
    assert [window.covered_s for window in watched.monitor.summarize().windows] == [60, 300, 900]


def test_after_a_start_the_windows_cover_what_there_is(watched):
    first = watched.monitor.summarize().windows
    assert [(window.covered_s, window.rates, window.utilization) for window in first] == [(0, {}, 0.2)] * 3
    watched.run(90, num_lookups=1)
    assert [window.covered_s for window in watched.monitor.summarize().windows] == [60, 90, 90]
    assert list_rates(watched.monitor, "hit_tokens") == [2 * 8 / 60, 3 * 8 / 90, 3 * 8 / 90]


def test_a_state_has_the_time_of_its_counts(watched):
    """It used to have the time at which the monitor began to wait for the pool's lock."""
    noting = threading.Thread(target=watched.monitor.log_allocation_state)
    with watched.pool.lock:
        noting.start()
        noting.join(0.2)
        assert noting.is_alive()
        watched.now += 30
    noting.join()
    assert watched.monitor.history[-1].timestamp == 30


def test_a_summary_is_made_while_another_thread_notes_states():
    """It used to raise RuntimeError: deque mutated during iteration."""
    watched, is_done = Watched(), threading.Event()
    state = watched.monitor.log_allocation_state()
    watched.monitor.history.extend([state] * 10_000)

    def note():
        while not is_done.is_set():
            watched.monitor.history.append(state)

    noting, interval_s = threading.Thread(target=note), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    noting.start()
    try:
        for _ in range(20):
            assert watched.monitor.summarize().scenarios == {"": 0}
    finally:
        is_done.set()
        noting.join()
        sys.setswitchinterval(interval_s)


def test_a_clock_that_is_set_back_gives_no_negative_rates(watched):
    watched.run(60, num_lookups=3)
    watched.now -= 1000
    watched.run(30, num_lookups=3)
    for window in watched.monitor.summarize().windows:
        assert all(rate >= 0 for rate in window.rates.values())


def test_only_the_last_states_are_kept(watched):
    watched.run(60 * 60)
    assert len(watched.monitor.history) == 31
    assert watched.monitor.history[0].timestamp == 60 * 60 - 900


def test_utilization_is_averaged_by_scenario_and_over_the_windows(watched):
    watched.run(300, scenario="chat")
    take(watched.pool, 2, 6)
    watched.run(60, scenario="long prompts")
    found = watched.monitor.summarize()
    assert found.scenarios == {"": 0.2, "chat": pytest.approx(0.2), "long prompts": pytest.approx(0.8)}
    assert [window.peak_utilization for window in found.windows] == [0.8] * 3
    assert found.windows[0].utilization == pytest.approx((0.2 + 0.8 * 3) / 4)
