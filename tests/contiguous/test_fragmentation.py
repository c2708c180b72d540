"""The formulas, on runs that can be counted by hand."""

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.contiguous.fragmentation import get_failure_index, get_largest_run_loss, get_unusable_share


@pytest.mark.parametrize(
    ("run_lengths", "run_length", "share"),
    [([], 4, 0), ([1, 2, 5], 1, 0), ([4, 4], 4, 0), ([3, 3], 4, 1), ([5, 3], 4, 0.5), ([9, 3], 4, 1 / 3)],
)
def test_the_unusable_share_is_what_no_run_of_that_length_covers(run_lengths, run_length, share):
    assert get_unusable_share(run_lengths, run_length) == pytest.approx(share)


@pytest.mark.parametrize(("run_lengths", "loss"), [([], 0), ([7], 0), ([4, 4], 0.5), ([1, 2, 1], 0.5)])
def test_the_largest_run_loss_is_what_lies_outside_the_largest_run(run_lengths, loss):
    assert get_largest_run_loss(run_lengths) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("run_lengths", "run_length", "index"),
    [([], 4, 0), ([1] * 40, 4, 1 - 11 / 40), ([3], 4, 0), ([2, 2], 4, 0)],
)
def test_the_failure_index_tells_scattered_from_too_few(run_lengths, run_length, index):
    assert get_failure_index(run_lengths, run_length) == pytest.approx(index)


@pytest.mark.parametrize("formula", [get_unusable_share, get_failure_index])
def test_a_run_without_blocks_is_refused(formula):
    with pytest.raises(InvalidArgumentError, match="run_length is 0"):
        formula([1], 0)
