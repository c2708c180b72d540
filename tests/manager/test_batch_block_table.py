"""The padded array of a batch's block tables, by example; see also the random test."""

import doctest

import numpy as np
import pytest
from manager.table_makers import append, make_table

from kv_pool import InvalidArgumentError
from kv_pool.manager import batch_block_table
from kv_pool.manager.batch_block_table import BatchBlockTable


def make_batch(*tables, num_rows=4, num_columns=5, **options):
    batch = BatchBlockTable(num_rows, num_columns, 4, **options)
    for name, table in zip("abcd", tables, strict=False):
        batch.add_request(name, table)
    batch.update()
    return batch


def rows(batch):
    """Return the rows in use as text, one line each."""
    return [" ".join(map(str, row)) for row in batch.get_rows().tolist()]


def test_appending_leaves_existing_entries_unchanged():
    table = make_table(3, 4)
    batch = make_batch(table)
    batch.block_ids[0, 0] = 99  # an entry that is not written again keeps its value
    append(table, 5)
    batch.update()
    assert rows(batch) == ["99 4 5 0 0"]


def test_a_table_longer_than_a_row_is_refused_before_writing():
    first, second = make_table(1), make_table(2)
    batch = make_batch(first, second)
    append(first, 3)
    append(second, 4, 5, 6, 7, 8)
    for call in (batch.update, batch.rewrite):
        with pytest.raises(InvalidArgumentError, match="'b' has 6 blocks, but a row has room for 5"):
            call()
        assert rows(batch) == ["1 0 0 0 0", "2 0 0 0 0"]
    del second.blocks[5:]
    assert batch.update() == [0, 1]


def test_invalid_calls_change_nothing():
    batch = make_batch(make_table(1), make_table(2), num_rows=2)
    with pytest.raises(InvalidArgumentError, match="'a' has row 0 already"):
        batch.add_request("a", make_table(3))
    with pytest.raises(InvalidArgumentError, match="all 2 rows are taken"):
        batch.add_request("c", make_table(3))
    for call in (batch.remove_request, batch.get_row_number):
        with pytest.raises(InvalidArgumentError, match="'c' has no row"):
            call("c")
    assert rows(batch) == ["1 0 0 0 0", "2 0 0 0 0"]


def test_a_given_array_is_written_in_place():
    array = np.full((4, 5), -7, np.int64)
    batch = make_batch(make_table(2**31 - 1), dtype=np.int64, array=array)
    assert batch.block_ids is array
    assert array[0].tolist() == [2**31 - 1, 0, 0, 0, 0]
    assert not array[1:].any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"array": np.zeros((4, 6), np.int32)}, "shape"),
        ({"array": np.zeros((4, 5), np.int64)}, "int64"),
        ({"array": np.zeros((5, 4), np.int32).T}, "contiguous"),
        ({"dtype": np.int16}, "int32 or int64"),
        ({"num_rows": 0}, "max_num_requests is 0"),
        ({"num_columns": 0}, "max_num_blocks_per_request is 0"),
    ],
)
def test_an_unsuitable_array_is_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make_batch(**options)


def test_the_examples_of_the_docstrings_run():
    assert doctest.testmod(batch_block_table).attempted == 8
