"""When long work rests."""

from kv_pool.events.pace import Pace


class FakeClock:
    def __init__(self):
        self.now_ns = 0
        self.rests_s = []

    def read(self):
        return self.now_ns

    def sleep(self, seconds):
        self.rests_s.append(seconds)
        self.now_ns += 1_000


def test_work_rests_once_it_has_gone_on_for_so_long():
    clock = FakeClock()
    pace = Pace(300, 0.5, clock.read, clock.sleep)
    rested = []
    for _ in range(7):
        clock.now_ns += 100
        pace.step()
        rested.append(len(clock.rests_s))
    assert rested == [0, 0, 1, 1, 1, 2, 2]
    assert set(clock.rests_s) == {0.5}
