"""Tests of lists and ranges of capacities."""

import itertools

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.quantities import parse_count, parse_memory, parse_range


@pytest.mark.parametrize(
    ("text", "number"), [("1000", 1000), ("1_000", 1000), (" 10k", 10_000), ("1.5M", 1_500_000), ("0", 0)]
)
def test_counts_may_have_units(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "-1", "1.5", "k", "1e3", "1G", "1.0005k", "٣x"])
def test_counts_must_be_whole_numbers(text):
    with pytest.raises(InvalidArgumentError, match=r"is not a whole number such as 1000, 10k or 1\.5M"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3000,10,10", [10, 3000]),
        ("1k:100k:log3", [1000, 10_000, 100_000]),
        ("10:20:lin3,7", [7, 10, 15, 20]),
        ("1:4:log20", [1, 2, 3, 4]),
        ("5, 1:2:LIN2", [1, 2, 5]),
    ],
)
def test_numbers_are_sorted_and_unique(text, numbers):
    assert parse_range(text) == numbers


def test_log_range_has_its_ends_and_the_given_length():
    numbers = parse_range("1k:100k:log20")
    assert (numbers[0], numbers[-1], len(numbers)) == (1000, 100_000, 20)
    ratios = [after / before for before, after in itertools.pairwise(numbers)]
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-2)


def test_range_ends_are_parsed_like_numbers():
    assert parse_range("1GiB:4GiB:log3", parse_memory) == [2**30, 2**31, 2**32]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1k:100k", "'1k:100k' is not a range; write it as 1000,3k,10k, or FIRST:LAST:logN"),
        ("1:2:exp3", "is not a range"),
        ("1:2:3:log4", "is not a range"),
        ("0:10:log3", "is not a range: it needs 0 < FIRST < LAST and 2 to 10,000 values"),
        ("10:1:lin3", "it needs 0 < FIRST < LAST"),
        ("1:9:lin1", "2 to 10,000 values"),
        ("1:9:lin99999", "2 to 10,000 values"),
        ("a:9:lin2", "'a' is not a whole number"),
        ("1,,2", "'' is not a whole number"),
    ],
)
def test_error_names_the_invalid_part(text, why):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_range(text)
    assert why in str(caught.value)
