import random

import numpy as np
import pytest
from migration.backends.made_links import make_rows

from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.backends.tcp import BlockWindow, choose_rows

KIB = 1024


def test_rows_end_where_a_row_of_either_side_ends():
    assert choose_rows([64 * KIB, 64 * KIB], [32 * KIB, 96 * KIB]) == [32 * KIB, 32 * KIB, 64 * KIB]


def test_small_rows_are_merged_into_whole_blocks():
    assert choose_rows([4 * KIB] * 4, [16 * KIB]) == [16 * KIB]


@pytest.mark.parametrize("theirs", [[], [0, 16], [16, -1, 1], [15], [17], [1] * 70_000])
def test_rows_of_another_block_size_are_refused(theirs):
    with pytest.raises(InvalidArgumentError, match=f"in {len(theirs)} rows, the local ones"):
        choose_rows([16], theirs)


@pytest.mark.parametrize("seed", range(20))
def test_both_sides_choose_the_same_rows(seed):
    rng = random.Random(seed)

    def cut(total):
        ends = sorted({total, *(rng.randrange(1, total) for _ in range(rng.randrange(6)))})
        return np.diff(ends, prepend=0).tolist()

    total = rng.choice([100, 64 * KIB, 1024 * KIB])
    ours, theirs = cut(total), cut(total)
    rows = choose_rows(ours, theirs)
    assert rows == choose_rows(theirs, ours)
    assert sum(rows) == total
    ends = set(np.cumsum(rows).tolist())
    assert len(rows) == 1 or {*np.cumsum(ours).tolist(), *np.cumsum(theirs).tolist()} == ends


def test_host_memory_is_sent_without_a_copy():
    storage = make_rows(4, [16 * KIB, 32 * KIB], 0, "x")
    window = BlockWindow(storage, [16 * KIB, 32 * KIB])
    views = window.read_out(np.array([1, 2]))
    storage.write_block(1, b"1" * 48 * KIB)
    storage.write_block(2, b"2" * 48 * KIB)
    assert [bytes(view[:1]) for view in views] == [b"1", b"1"]
    assert b"".join(views) == (b"1" * 16 * KIB + b"2" * 16 * KIB) + (b"1" * 32 * KIB + b"2" * 32 * KIB)
