import random
import weakref

import numpy as np
import pytest
from storage.made_storage import BLOCK_AXES

from kv_pool.errors import InvalidBlockError
from kv_pool.storage import KVStorage, Segment, SegmentTable
from kv_pool.storage.segments import count_pieces, find_runs, make_block_ids, split_alike


def make_table(num_blocks, *rows):
    """Return a table of rows given as (span, stride), each in a separate array."""
    segments = []
    for span, stride in rows:
        memory = np.arange(num_blocks * stride, dtype=np.uint8)
        segments.append(Segment(memory.ctypes.data, stride, span, memory))
    return SegmentTable.from_segments(segments, num_blocks)


def ids(*block_ids):
    return np.array(block_ids, np.int64)


@pytest.mark.parametrize(
    ("lists", "runs"),
    [
        ([[]], []),
        ([[7]], [(0, 1)]),
        ([[1, 2, 3, 5, 6, 4]], [(0, 3), (3, 2), (5, 1)]),
        ([[3, 2, 1]], [(0, 1), (1, 1), (2, 1)]),
        ([[1, 2, 3, 4], [5, 6, 8, 9]], [(0, 2), (2, 2)]),
    ],
)
def test_runs_are_found_where_all_lists_increase_by_one(lists, runs):
    starts, lengths = find_runs(*(ids(*some) for some in lists))
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == runs


def test_views_go_row_by_row_and_join_adjacent_blocks():
    spans = make_table(10, (4, 4), (4, 6))
    views = spans.list_views(ids(2, 3, 4, 8))
    assert [bytes(view) for view in views] == [
        bytes(range(8, 20)),
        bytes(range(32, 36)),
        bytes(range(12, 16)),
        bytes(range(18, 22)),
        bytes(range(24, 28)),
        bytes(range(48, 52)),
    ]


def test_views_write_in_place():
    table = make_table(4, (4, 4))
    (view,) = table.list_views(ids(1, 2))
    view[:] = b"abcdefgh"
    assert table.owners[0][4:12].tobytes() == b"abcdefgh"


def test_views_keep_the_memory_alive():
    table = make_table(4, (4, 4))
    alive = weakref.ref(table.owners[0])
    views = table.list_views(ids(1))
    del table
    assert alive() is not None
    assert bytes(views[0]) == bytes([4, 5, 6, 7])
    del views
    assert alive() is None


def test_an_empty_id_list_has_no_views():
    assert make_table(4, (4, 4), (2, 2)).list_views(ids()) == []


@pytest.mark.parametrize("block_id", [-1, 4, 2**40])
def test_unknown_block_ids_are_refused(block_id):
    spans = make_table(4, (4, 4))
    with pytest.raises(InvalidBlockError, match=f"block {block_id} is not one of 0 to 3"):
        spans.list_views(ids(0, block_id))
    with pytest.raises(InvalidBlockError):
        make_block_ids([0, block_id], 4)


@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_views_of_a_block_are_its_bytes_in_order(layout):
    heads = 1 if "2" not in layout and "C" not in layout else 2
    storage = KVStorage.allocate(6, 4, 3, heads, 8, layout=layout)
    rng = np.random.default_rng(0)
    for tensor in storage.tensors:
        flat = tensor.reshape(-1).view(np.uint8)
        flat[:] = rng.integers(0, 256, len(flat), np.uint8)
    spans = storage.segments
    for block_id in range(6):
        expected = storage.read_block(block_id)
        assert b"".join(spans.list_block_views(block_id)) == expected
        assert b"".join(spans.list_views(ids(block_id))) == expected


@pytest.mark.parametrize("seed", range(5))
def test_the_piece_count_agrees_with_a_plain_walk(seed):
    rng = random.Random(seed)
    source, target = split_alike(
        make_table(20, (8, 8), (16, 24)), make_table(20, (4, rng.choice([4, 6])), (20, 20))
    )
    sources, targets = sorted(rng.sample(range(20), 12)), sorted(rng.sample(range(20), 12))
    pieces = 0
    for row in range(len(source)):
        is_dense = all(table.spans[row] == table.strides[row] for table in (source, target))
        for i in range(12):
            follows = i > 0 and sources[i] == sources[i - 1] + 1 and targets[i] == targets[i - 1] + 1
            pieces += not (is_dense and follows)
    assert count_pieces(source, target, ids(*sources), ids(*targets)) == pieces
