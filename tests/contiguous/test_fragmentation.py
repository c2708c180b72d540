"""The formulas, applied to runs counted by hand."""

import random

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.contiguous.fragmentation import (
    find_run_length,
    get_fragmentation_rate,
    get_unusable_share,
)


@pytest.mark.parametrize(
    ("run_lengths", "run_length", "share"),
    [([], 4, 0), ([1, 2, 5], 1, 0), ([4, 4], 4, 0), ([3, 3], 4, 1), ([5, 3], 4, 0.5), ([9, 3], 4, 1 / 3)],
)
def test_unusable_share_counts_blocks_outside_runs(run_lengths, run_length, share):
    assert get_unusable_share(run_lengths, run_length) == pytest.approx(share)


@pytest.mark.parametrize(
    ("run_lengths", "run_length", "rate"),
    [
        ([15], 16, 0),  # one run of 8 is possible, and exists; U(16) is 1
        ([5, 5, 5], 16, 1),
        ([8, 7], 16, 0),
        ([15, 15, 1], 16, 1),
        ([17, 15], 16, 0.5),
        ([1] * 160, 16, 1),
        ([16, 144, 15, 1], 16, 1 / 11),
    ],
)
def test_the_rate_is_the_share_of_missing_runs(run_lengths, run_length, rate):
    assert get_fragmentation_rate(run_lengths, run_length) == pytest.approx(rate)


@pytest.mark.parametrize("seed", range(50))
def test_the_rate_equals_a_count_block_by_block(seed):
    """Count runs by walking over the free blocks, and over as many consecutive ones."""

    def count(picture, length):
        found = at = 0
        while at + length <= len(picture):
            if picture[at : at + length] == "." * length:
                found, at = found + 1, at + length
            else:
                at += 1
        return found

    draw = random.Random(seed)
    run_length = draw.randint(1, 20)
    picture = "".join(draw.choices(".x", (draw.random(), draw.random()), k=draw.randint(1, 200)))
    num_free = picture.count(".")
    length = max((k for k in [run_length, 1, 2, 4, 8, 16] if k <= min(run_length, num_free)), default=1)
    assert find_run_length(num_free, run_length) == length
    possible = count("." * num_free, length)
    rate = 1 - count(picture, length) / possible if possible else 0.0
    runs = [len(run) for run in picture.split("x") if run]
    assert get_fragmentation_rate(runs, run_length) == pytest.approx(rate)
    assert 0 <= rate <= get_unusable_share(runs, length) + 1e-12


@pytest.mark.parametrize("formula", [get_unusable_share, get_fragmentation_rate])
def test_a_run_length_of_0_is_refused(formula):
    with pytest.raises(InvalidArgumentError, match="run_length is 0"):
        formula([1], 0)
