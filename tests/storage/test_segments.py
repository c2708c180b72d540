import pytest

from kv_pool import InvalidArgumentError
from kv_pool.storage import Segment, SegmentTable
from kv_pool.storage.segments import split_alike


def make_table(*rows, num_blocks=4):
    return SegmentTable.from_segments([Segment(*row, owner=None) for row in rows], num_blocks)


def rows(table):
    return [row[:3] for row in table.to_segments()]


def test_adjacent_rows_are_joined():
    table = make_table((0, 96, 32), (32, 96, 32), (64, 96, 32))
    assert rows(table) == [(0, 96, 96)]
    assert table.block_bytes == 96


def test_rows_with_a_gap_are_not_joined():
    assert rows(make_table((0, 96, 32), (64, 96, 32))) == [(0, 96, 32), (64, 96, 32)]


def test_a_joined_span_does_not_exceed_its_stride():
    assert len(make_table((0, 32, 32), (32, 32, 32), num_blocks=1)) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([(0, 16, 32)], "spans of 32 bytes every 16 bytes"),
        ([(0, 64, 32), (16, 64, 32)], "segment 0 overlaps the next"),
        ([(0, 64, 32), (48, 64, 32)], "segment 1 overlaps the next"),
        ([(0, 64, 32), (128, 32, 16)], "with different strides"),
        ([(0, 64, 32), (0, 64, 32)], "segment 0 overlaps the next"),
        ([(0, 64, 0)], "a segment has 0 bytes"),
        ([], "4 blocks in 0 segments"),
    ],
)
def test_blocks_that_share_a_byte_are_refused(given, said):
    with pytest.raises(InvalidArgumentError, match=said):
        make_table(*given)


def test_disjoint_extents_may_have_any_strides():
    assert len(make_table((0, 64, 32), (224, 32, 16))) == 2


def test_alignment_divides_bases_strides_and_spans():
    assert make_table((64, 96, 32)).alignment == 16
    assert make_table((64, 96, 24)).alignment == 8
    assert make_table((68, 96, 32)).alignment == 4
    assert make_table((64, 98, 32)).alignment == 2
    assert make_table((64, 96, 31)).alignment == 1


def test_overlaid_groups_are_listed_once_with_the_widest_span():
    small = make_table((0, 64, 16), (1000, 64, 64))
    wide = make_table((0, 64, 48))
    assert rows(SegmentTable.overlay([small, wide])) == [(0, 64, 48), (1000, 64, 64)]


def test_groups_of_unequal_size_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"differ in number of blocks: \[3, 4\]"):
        SegmentTable.overlay([make_table((0, 64, 16)), make_table((0, 64, 16), num_blocks=3)])


def test_tables_are_cut_at_the_span_ends_of_both():
    layers = make_table((0, 30, 30), (1000, 30, 30), (2000, 30, 30))
    other = make_table((5000, 100, 40), (6000, 100, 50))
    cut_layers, cut_other = split_alike(layers, other)
    assert rows(cut_layers) == [(0, 30, 30), (1000, 30, 10), (1010, 30, 20), (2000, 30, 30)]
    assert rows(cut_other) == [(5000, 100, 30), (5030, 100, 10), (6000, 100, 20), (6020, 100, 30)]


def test_a_table_with_itself_is_not_cut():
    table = make_table((0, 64, 16), (16 + 8, 64, 16))
    assert split_alike(table, table) == (table, table)


def test_blocks_of_unequal_size_cannot_be_cut_alike():
    with pytest.raises(InvalidArgumentError, match="has 30 bytes, one of the target 31"):
        split_alike(make_table((0, 64, 30)), make_table((0, 64, 31)))
