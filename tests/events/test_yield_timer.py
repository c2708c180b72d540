"""`YieldTimer` yields on time."""

from kv_pool.events.yield_timer import REST_S, YieldTimer


def test_pace_sleeps_after_work_ns():
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
