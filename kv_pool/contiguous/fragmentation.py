"""Measures of fragmentation, computed from the lengths of the maximal free runs."""

from collections.abc import Sequence

from kv_pool.core.arguments import as_count


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
