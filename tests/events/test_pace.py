"""When long work rests."""

import time

import pytest

from kv_pool.events.pace import Pace


class FakeClock:
    def __init__(self, monkeypatch):
        self.now_ns = 0
        self.rests_s = []
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.rests_s.append(seconds)
        self.now_ns += 1_000


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch)


def test_work_rests_once_it_has_gone_on_for_so_long(clock):
    pace = Pace(work_ns=300, rest_s=0.5)
    rested = []
    for _ in range(7):
        clock.now_ns += 100
        pace.step()
        rested.append(len(clock.rests_s))
    assert rested == [0, 0, 1, 1, 1, 2, 2]
    assert set(clock.rests_s) == {0.5}
