"""Slots of a step by example; test_batch_block_table_random.py compares them with a slow loop."""

import numpy as np
import pytest
from manager.table_makers import make_table

from kv_pool import InvalidArgumentError, InvalidTypeError
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.slot_mapping import SlotMapping


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
