"""Exponential back-off."""

from kv_pool.events.growing_pause import GrowingPause


def test_pauses_double_up_to_the_maximum():
    pause = GrowingPause(1.0, 5.0)
    due = []
    for now in (0.0, 10.0, 20.0, 30.0, 40.0):
        pause.plan(now)
        due.append(pause.due_s - now)
    assert due == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_nothing_is_due_before_plan_or_after_end():
    pause = GrowingPause(1.0, 5.0)
    assert not pause.is_due(100.0)
    pause.plan(0.0)
    assert (pause.is_due(0.5), pause.is_due(1.0)) == (False, True)
    pause.end()
    assert not pause.is_due(100.0)


def test_pauses_are_short_again_after_end():
    pause = GrowingPause(1.0, 5.0)
    pause.plan(0.0)
    pause.plan(0.0)
    pause.end()
    pause.plan(0.0)
    assert pause.due_s == 1.0
