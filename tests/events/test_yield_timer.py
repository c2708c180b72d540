"""`YieldTimer` yields on time."""

from kv_pool.events.yield_timer import YieldTimer


class FakeClock:
    def __init__(self):
        self.now_ns = 0
        self.rests_s = []

    def read(self):
        return self.now_ns

    def sleep(self, seconds):
        self.rests_s.append(seconds)
        self.now_ns += 1_000


def test_pace_sleeps_after_work_ns():
    clock = FakeClock()
    yield_timer = YieldTimer(300, 0.5, clock.read, clock.sleep)
    rested = []
    for _ in range(7):
        clock.now_ns += 100
        yield_timer.yield_if_due()
        rested.append(len(clock.rests_s))
    assert rested == [0, 0, 1, 1, 1, 2, 2]
    assert set(clock.rests_s) == {0.5}
