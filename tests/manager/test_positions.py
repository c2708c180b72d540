"""Positions map to (block, offset) and to slots, and back."""

import doctest
import random

import pytest

from kv_pool import InvalidArgumentError, InvalidBlockError
from kv_pool.manager import positions
from kv_pool.manager.positions import find_block_and_offset, find_position, list_slots


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_position_maps_to_a_unique_slot_and_back(block_size):
    table = random.Random(block_size).sample(range(1, 100), 7)
    num_tokens = 7 * block_size
    places = [find_block_and_offset(table, position, block_size) for position in range(num_tokens)]
    assert len(set(places)) == num_tokens
    assert [find_position(table, *place, block_size) for place in places] == list(range(num_tokens))
    slots = list_slots(table, 0, num_tokens, block_size).tolist()
    assert [divmod(slot, block_size) for slot in slots] == places


def test_a_range_of_slots_is_a_slice_of_all_slots():
    table = [5, 3, 8]
    whole = list_slots(table, 0, 12, 4).tolist()
    assert all(
        list_slots(table, start, stop, 4).tolist() == whole[start:stop]
        for start in range(13)
        for stop in range(start, 13)
    )


def test_positions_outside_the_table_are_refused():
    with pytest.raises(InvalidArgumentError, match="12 of them"):
        find_block_and_offset([5, 3, 8], 12, 4)
    with pytest.raises(InvalidArgumentError):
        find_block_and_offset([5, 3, 8], -1, 4)
    with pytest.raises(InvalidArgumentError):
        list_slots([5, 3, 8], 4, 13, 4)
    with pytest.raises(InvalidBlockError, match="block 4"):
        find_position([5, 3, 8], 4, 0, 4)
    with pytest.raises(InvalidArgumentError, match="offset 4"):
        find_position([5, 3, 8], 5, 4, 4)


def test_the_examples_of_the_docstrings_run():
    assert doctest.testmod(positions).attempted == 3
