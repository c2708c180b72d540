"""Tests of `CopyLink`."""

from kv_pool.lab.replay_tiers import CopyLink


def test_copies_are_serial_and_empty_ones_immediate():
    link = CopyLink(2000.0)  # 2 bytes per millisecond
    assert link.copy(100, 10.0) == 60.0
    assert link.copy(20, 10.0) == 70.0
    assert link.copy(20, 200.0) == 210.0
    assert link.free_ms == 210.0
    assert link.copy(0, 5.0) == 5.0
