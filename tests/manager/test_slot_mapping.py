"""Slots of a step by example; test_batch_block_table_random.py compares them with a slow loop."""

import numpy as np
import pytest
from manager.table_makers import make_table

from kv_pool import InvalidArgumentError, InvalidTypeError
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.slot_mapping import PAD_SLOT_ID, SlotMapping


def make_mapping(*tables, max_num_tokens=12, **options):
    batch = BatchBlockTable(4, 3, 4)
    for name, table in zip("abcd", tables, strict=False):
        batch.add_request(name, table)
    batch.update()
    return SlotMapping(batch, max_num_tokens, **options)


def integers(*values):
    return np.array(values, np.int32)


def test_slots_after_the_last_token_are_padding():
    mapping = make_mapping(make_table(7, 2), make_table(9))
    assert mapping.fill_decode(integers(5, 0), num_slots=4).tolist() == [9, 36, -1, -1]
    assert mapping.fill_chunks(integers(0, 2), integers(0), num_slots=3).tolist() == [28, 29, PAD_SLOT_ID]
    assert mapping.fill_chunks(integers(0), integers(), num_slots=2).tolist() == [-1, -1]
    assert mapping.fill_decode(integers()).tolist() == []


def test_a_given_array_is_written_in_place():
    array = np.zeros(12, np.int64)
    mapping = make_mapping(make_table(7), array=array)
    assert mapping.fill_decode(integers(1)).base is array
    assert array[0] == 29
    with pytest.raises(InvalidArgumentError, match="int32"):
        make_mapping(array=np.zeros(12, np.int32))
    with pytest.raises(InvalidArgumentError, match="max_num_tokens is 0"):
        make_mapping(max_num_tokens=0)


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


def test_a_row_without_tokens_may_have_any_first_position():
    mapping = make_mapping(make_table(7), make_table(9))
    assert mapping.fill_chunks(integers(0, 0, 1), integers(99, 3)).tolist() == [39]
    assert mapping.fill_chunks(integers(0, 0, 1), integers(-9, 3)).tolist() == [39]


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
