"""Measures of fragmentation, computed from the lengths of the maximal free runs; a counter of free runs."""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import i64

from kv_pool.core.arguments import as_count

_IN_USE: Final = 0
"""The age of an id in use, see `FreeRunIndex`."""


def get_unusable_share(run_lengths: Sequence[int], run_length: int) -> float:
    """Return U(n) = 1 - n * sum(floor(r / n)) / F: the share of free blocks unusable for runs of n, 0 to 1.

    0 if no block is free. U(1) is 0. Always report U together with its n.

    Raises:
        InvalidArgumentError: `run_length` is below 1.
    """
    run_length = as_count("run_length", run_length, 1)
    num_free = sum(run_lengths)
    if not num_free:
        return 0.0
    return 1.0 - run_length * sum(length // run_length for length in run_lengths) / num_free


def get_fragmentation_rate(run_lengths: Sequence[int], run_length: int) -> float:
    """Return 1 - sum(floor(r / k)) / floor(F / k): the share of possible runs lost to fragmentation, 0 to 1.

    k is `find_run_length(F, run_length)`. F consecutive free blocks make floor(F / k) runs, so the rate is 0
    if all free blocks are consecutive, for any F. It is at most U(k). A run counts wherever it starts: ids
    begin at 1, so the only run of 16 in a pool of 16 blocks does not start at a multiple of 16. 0 if no
    block is free.

    Raises:
        InvalidArgumentError: `run_length` is below 1.
    """
    num_free = sum(run_lengths)
    k = find_run_length(num_free, run_length)
    if not num_free:
        return 0.0
    return 1.0 - sum(length // k for length in run_lengths) / (num_free // k)


def find_run_length(num_free: int, run_length: int) -> int:
    """Return `run_length`, or with fewer free blocks the largest power of two that fits; 1 if none is free.

    Raises:
        InvalidArgumentError: `run_length` is below 1.
    """
    run_length = as_count("run_length", run_length, 1)
    return run_length if num_free >= run_length else 1 << max(0, num_free.bit_length() - 1)


def get_largest_run_loss(run_lengths: Sequence[int]) -> float:
    """Return 1 - max(r) / F: the share of free blocks outside the largest run, 0 to 1.

    One block in use in the middle of an empty pool raises it to 0.5: use it for reports, not for control.
    """
    num_free = sum(run_lengths)
    return 1.0 - max(run_lengths) / num_free if num_free else 0.0


class FreeRunCounter:
    """Counts the free ids of a pool, and the disjoint runs of one length among them, as ids change.

    Args:
        ages: the age of each id, see `FreeRunIndex`.
    """

    def __init__(self, ages: bytearray, run_length: int) -> None:
        self.run_length: i64 = run_length
        self.num_runs: i64 = 0
        self.num_free: i64 = 0
        for run in ages.split(bytes([_IN_USE])):
            self.num_runs += len(run) // self.run_length
            self.num_free += len(run)

    def note_change(self, ages: bytearray, first: i64, end: i64, age: i64) -> None:
        """Update the counts for ids `[first, end)` that are about to get this age."""
        unit = self.run_length
        left: i64 = ages.rfind(_IN_USE, 0, first) + 1
        right: i64 = ages.find(_IN_USE, end)
        if right < 0:
            right = len(ages)
        whole: i64 = (right - left) // unit
        sides: i64 = (first - left) // unit + (right - end) // unit
        num_in_use: i64 = ages.count(_IN_USE, first, end)
        if num_in_use == 0:
            self.num_runs -= whole
        elif num_in_use == end - first:
            self.num_runs -= sides
        else:
            for run in ages[left:right].split(bytes([_IN_USE])):
                self.num_runs -= len(run) // unit
        self.num_runs += sides if age == _IN_USE else whole
        self.num_free += num_in_use
        if age == _IN_USE:
            self.num_free -= end - first
