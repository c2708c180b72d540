"""Copies over a link follow each other."""

from kv_pool.replay.link import Link


def test_copies_are_made_one_after_the_other():
    link = Link(2000.0)  # 2 bytes a millisecond
    assert link.copy(100, 10.0) == 60.0
    assert link.copy(20, 10.0) == 70.0
    assert link.copy(20, 200.0) == 210.0
    assert link.free_ms == 210.0


def test_nothing_to_copy_waits_for_nothing():
    link = Link(1.0)
    link.copy(100, 0.0)
    assert link.copy(0, 5.0) == 5.0
