"""A copy that fails part-way: a typed error, every source intact, and nothing to undo."""

import pytest
from storage.made_storage import allocate, make_way, read_all

from kv_pool import CopyFailedError, KVPoolError
from kv_pool.storage import KVStorage
from kv_pool.storage.copy_cpu import copy_on_cpu


class CopyThatBreaksOff:
    """A copy that makes the first `num_good` moves on the CPU and fails at the next one."""

    def __init__(self, num_good):
        self.num_good = num_good

    def __call__(self, source, target, sources, targets):
        copy_on_cpu(source, target, sources[: self.num_good], targets[: self.num_good])
        raise OSError("the device fell off the bus")


def make_pair(num_good):
    """Return a storage of ten blocks whose copies fail, and one over the same memory whose copies work."""
    good = allocate(make_way("cpu", None), "L|2BNHD", num_blocks=10)
    return KVStorage.wrap(good.tensors, "L|2BNHD", copy=CopyThatBreaksOff(num_good)), good


MOVES = [(9, 1), (8, 2), (7, 3), (6, 4)]


@pytest.mark.parametrize("num_good", range(5))
def test_all_blocks_but_the_targets_are_intact(num_good):
    broken, good = make_pair(num_good)
    before = read_all(good)
    with pytest.raises(
        CopyFailedError, match="copying 4 blocks from cpu to cpu failed: the device fell"
    ) as caught:
        broken.apply_moves(MOVES)
    assert isinstance(caught.value.__cause__, OSError)
    after = read_all(good)
    assert (after[0], after[5:]) == (before[0], before[5:])


def test_a_refused_plan_copies_nothing():
    _, good = make_pair(0)
    before = read_all(good)
    for wrong in ([(9, 1), (8, 1)], [(9, 1), (2, 2)], [(9, 1), (10, 2)], [(9, 1), ("a", 2)]):
        with pytest.raises(KVPoolError):
            good.apply_moves(wrong)
    assert read_all(good) == before


def test_a_failed_copy_does_not_change_the_source_storage():
    broken, good = make_pair(2)
    other = allocate(make_way("cpu", None), "L|2BNHD", num_blocks=4)
    before, there = read_all(good), read_all(other)
    with pytest.raises(CopyFailedError):
        broken.copy_to(other, [(9, 0), (8, 1), (7, 2)])
    assert read_all(good) == before
    assert read_all(other)[3] == there[3]


def test_a_failed_resize_changes_nothing():
    broken, good = make_pair(2)
    tensors, before = broken.tensors, read_all(good)
    with pytest.raises(CopyFailedError):
        broken.resize(20)
    assert broken.tensors is tensors
    assert broken.num_blocks == 10
    assert read_all(good) == before
