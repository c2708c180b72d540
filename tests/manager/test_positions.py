"""Positions map to (block, offset) and to slots, and back."""

import doctest
import random

import pytest

from kv_pool import InvalidArgumentError, InvalidBlockError
from kv_pool.manager import positions
from kv_pool.manager.positions import find_place, find_position, list_slots


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_position_maps_to_a_place_of_its_own_and_back(block_size):
    table = random.Random(block_size).sample(range(1, 100), 7)
    num_tokens = 7 * block_size
    places = [find_place(table, position, block_size) for position in range(num_tokens)]
    assert len(set(places)) == num_tokens
    assert [find_position(table, *place, block_size) for place in places] == list(range(num_tokens))
    slots = list_slots(table, 0, num_tokens, block_size).tolist()
    assert [divmod(slot, block_size) for slot in slots] == places


def test_a_range_of_slots_is_that_part_of_all():
    table = [5, 3, 8]
    whole = list_slots(table, 0, 12, 4).tolist()
    assert all(
        list_slots(table, start, stop, 4).tolist() == whole[start:stop]
        for start in range(13)
        for stop in range(start, 13)
    )


def test_what_is_not_in_the_table_is_refused():
    with pytest.raises(InvalidArgumentError, match="12 of them"):
        find_place([5, 3, 8], 12, 4)
    with pytest.raises(InvalidArgumentError):
        find_place([5, 3, 8], -1, 4)
    with pytest.raises(InvalidArgumentError):
        list_slots([5, 3, 8], 4, 13, 4)
    with pytest.raises(InvalidBlockError, match="block 4"):
        find_position([5, 3, 8], 4, 0, 4)
    with pytest.raises(InvalidArgumentError, match="offset 4"):
        find_position([5, 3, 8], 5, 4, 4)


def test_the_examples_of_the_docstrings_run():
    assert doctest.testmod(positions).attempted == 3
