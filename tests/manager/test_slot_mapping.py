"""Positions map to (block, offset) and to slots, and back; slots of a step by example.

test_batch_block_table_random.py compares these with a slow loop.
"""

import doctest
import random

import numpy as np
import pytest
from manager.table_makers import make_table

from kv_pool import InvalidArgumentError, InvalidTypeError
from kv_pool.manager import slot_mapping
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.slot_mapping import SlotMapping, find_block_and_offset, list_slots


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_position_maps_to_a_unique_slot(block_size):
    table = random.Random(block_size).sample(range(1, 100), 7)
    num_tokens = 7 * block_size
    places = [find_block_and_offset(table, position, block_size) for position in range(num_tokens)]
    assert len(set(places)) == num_tokens
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


def test_the_examples_of_the_docstrings_run():
    assert doctest.testmod(slot_mapping).attempted == 2


# ---- a step --------------------------------------------------------------------------------------


def make_mapping(*tables, max_num_tokens=12, **options):
    batch = BatchBlockTable(4, 3, 4)
    for name, table in zip("abcd", tables, strict=False):
        batch.add_request(name, table)
    batch.update()
    return SlotMapping(batch, max_num_tokens, **options)


def integers(*values):
    return np.array(values, np.int32)


WRONG_PLACES = [
    (8, "'b', row 1: no slot at position 8, 2 blocks of 4 tokens"),
    (12, "'b', row 1: no slot at position 12"),
    (-1, "'b', row 1: no slot at position -1"),
    (2**40, "no slot at position 1099511627776"),
]


@pytest.mark.parametrize(("position", "words"), WRONG_PLACES)
def test_a_position_without_a_block_raises_and_changes_nothing(position, words):
    mapping = make_mapping(make_table(7, 2, 3), make_table(9, 6), make_table(1, 4, 5))
    mapping.fill_decode(integers(0, 0, 0))
    before = mapping.slots.copy()
    with pytest.raises(InvalidArgumentError, match=words):
        mapping.fill_decode(np.array([0, position, 0]))
    with pytest.raises(InvalidArgumentError, match=words):
        mapping.fill_chunks(integers(0, 1, 2), np.array([0, position]))
    assert mapping.slots.tolist() == before.tolist()


@pytest.mark.parametrize(
    ("query_start_loc", "first_positions", "words"),
    [
        ((0, 1), (0, 0), "2 entries for 2 first_positions"),
        ((1, 2), (0,), "does not start at 0"),
        ((0, 2, 1), (0, 0), "decreases"),
        ((0, 1, 2, 3), (0, 0, 0), "positions for 3 rows, but the batch has 2 requests"),
        ((0, 13), (0,), "num_slots is 13 for 13 tokens"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(query_start_loc, first_positions, words):
    mapping = make_mapping(make_table(7, 2, 3), make_table(9))
    with pytest.raises(InvalidArgumentError, match=words):
        mapping.fill_chunks(integers(*query_start_loc), integers(*first_positions))


def test_fewer_slots_than_tokens_are_refused():
    mapping = make_mapping(make_table(7), make_table(9))
    with pytest.raises(InvalidArgumentError, match="num_slots is 1 for 2 tokens"):
        mapping.fill_decode(integers(0, 1), num_slots=1)
    with pytest.raises(InvalidArgumentError, match="positions for 3 rows"):
        mapping.fill_decode(integers(0, 1, 2))
    with pytest.raises(InvalidTypeError, match="must be a one-dimensional array of integers, not float64"):
        mapping.fill_decode(np.array([0.0]))
