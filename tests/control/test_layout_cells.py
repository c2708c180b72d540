"""From blocks to cells: kinds, joined cells, legend counts."""

import random

import pytest
from control.made_layout import make_sixteen, write_layout

from kv_pool import InvalidArgumentError
from kv_pool.control.layout_cells import (
    CellKind,
    describe_cell,
    describe_pool,
    describe_runs,
    describe_use,
    make_cells,
    make_legend,
)

LETTERS = "0._:=#%P"
"""In the order of `CellKind`."""


def draw(cells):
    return "".join(
        ("-" if is_joined else "") + LETTERS[kind]
        for kind, is_joined in zip(cells.kinds, cells.is_joined, strict=True)
    )


def list_legend(layout, max_cells=20_000):
    return make_legend(layout, make_cells(layout, max_cells))


def draw_cells(drawn, max_cells=100, **options):
    return draw(make_cells(write_layout(drawn, **options), max_cells))


def test_free_runs_differ_from_shorter_stretches():
    assert draw_cells("0 .... # ... # *.*. # **", run_length=4) == "0_-_-_-_#...%=-_-=-_#::"


def test_free_run_may_be_longer_than_the_run_length():
    assert draw_cells("0 ..... # .", run_length=3) == "0_-_-_-_-_#."


def test_neighbouring_runs_of_sequences_differ_in_shade():
    assert draw_cells("0 #-# #-# # . #") == "0#-#%-%#.%"


def test_a_pinned_block_belongs_to_its_run():
    assert draw_cells("0 #-P-# P-#") == "0#-P-#P-%"


def test_large_pool_has_several_blocks_per_cell():
    cells = make_cells(write_layout("0" + "." * 16), 8)
    assert cells.blocks_per_cell == 4
    assert draw(cells) == "_-_-_-_-_"


@pytest.mark.parametrize(("num_blocks", "blocks_per_cell"), [(7, 1), (8, 2), (15, 2), (16, 4), (31, 4)])
def test_cells_have_as_few_blocks_as_possible(num_blocks, blocks_per_cell):
    cells = make_cells(write_layout("0" + "." * num_blocks), 8)
    assert cells.blocks_per_cell == blocks_per_cell
    assert len(cells.kinds) <= 8


@pytest.mark.parametrize(
    ("drawn", "shown"),
    [
        ("0#.#", "#"),
        ("0#..", "."),
        ("0##*", "#"),
        ("0#*.", ":"),
        ("0*..", "."),
        ("0**.", ":"),
        ("0...", "."),
    ],
)
def test_cell_shows_the_kind_of_most_of_its_blocks(drawn, shown):
    assert draw_cells(drawn, max_cells=1) == shown


def test_one_pinned_block_among_a_million_is_visible():
    drawn = bytearray(b"." * 1_000_000)
    drawn[777_777] = ord("P")
    cells = make_cells(write_layout("0" + drawn.decode()), 16_384)
    assert cells.blocks_per_cell == 64
    assert cells.kinds.tolist().count(CellKind.IMMOVABLE) == 1
    assert cells.kinds[777_778 // 64] == CellKind.IMMOVABLE


def test_cells_are_joined_if_the_blocks_at_their_border_are():
    assert draw_cells("0#-#-# -#-#-#-# # #-#-#", max_cells=3) == "#-#%"
    assert draw_cells("0### #-#-#-# #...", max_cells=3) == "#%."


def test_cells_are_not_joined_by_blocks_they_do_not_show():
    assert draw_cells("0..#-#...", max_cells=2) == ".."


def test_free_cell_is_a_run_if_most_of_its_free_blocks_are():
    assert draw_cells("0.#. #... ....", max_cells=3, run_length=4) == "._-_"


def test_max_cells_below_1_is_refused():
    with pytest.raises(InvalidArgumentError, match="max_cells is 0; a memory map has at least 1 cell"):
        make_cells(write_layout("0."), 0)


def test_the_legend_counts_blocks():
    legend = list_legend(make_sixteen().get_layout())
    assert [(line.words, line.num_blocks, line.percent) for line in legend] == [
        ("in use", 7, "43.8%"),
        ("in use, held in place", 1, "6.2%"),
        ("cached, in free runs of 3 or more", 2, "12.5%"),
        ("cached, in shorter free stretches", 1, "6.2%"),
        ("empty, in free runs of 3 or more", 3, "18.8%"),
        ("empty, in shorter free stretches", 2, "12.5%"),
        ("the null block, id 0", 1, ""),
        ("shared by several sequences", 2, "12.5%"),
    ]


def test_legend_of_larger_cells_counts_blocks_without_null_block():
    layout = make_sixteen().get_layout()
    of_blocks = [line for line in list_legend(layout) if line.kinds != (CellKind.NULL,)]
    assert list_legend(layout, max_cells=5) == of_blocks


def test_legend_leaves_out_absent_kinds():
    legend = list_legend(write_layout("0...."))
    assert [line.words for line in legend] == ["empty, in free runs of 4 or more", "the null block, id 0"]


def test_tiny_share_is_not_shown_as_zero():
    legend = list_legend(write_layout("0P" + "." * 9_999))
    assert [line.percent for line in legend] == ["< 0.1%", "100.0%", ""]


def test_layout_is_described_in_words():
    layout = write_layout("0 #-#-# #-# ... # ....", run_length=4, device_id=2)
    assert describe_pool(layout) == "13 blocks of 16 tokens on device 2"
    assert describe_use(layout) == "46.2% in use, 53.8% free, fragmentation 0.0% (runs of 4)"
    assert describe_runs(layout) == "runs of sequences: 3, 2.0 blocks long on average"
    assert describe_runs(write_layout("0..")) == "no runs of sequences"
    assert describe_cell(make_cells(layout, 100)) == "one cell = one block"
    assert describe_cell(make_cells(layout, 5)).startswith("one cell = 4 blocks: ")


@pytest.mark.parametrize("seed", range(30))
def test_kinds_and_counts_match_a_slow_scan(seed):
    dice = random.Random(seed)
    drawn = "0" + "".join(dice.choice("..**##P") * dice.randint(1, 6) for _ in range(20))
    run_length = dice.randint(1, 8)
    layout = write_layout(drawn, run_length)
    expected = []
    for block_id, character in enumerate(drawn):
        first = end = block_id
        while drawn[first - 1] in ".*":
            first -= 1
        while end < len(drawn) and drawn[end] in ".*":
            end += 1
        is_long = end - first >= run_length
        expected.append({".": "._"[is_long], "*": ":="[is_long]}.get(character, character))
    cells = make_cells(layout, 1000)
    kinds = "".join(LETTERS[kind] for kind in cells.kinds).replace("%", "#")
    assert kinds == "".join(expected)
    counted = {LETTERS[line.kinds[0]]: line.num_blocks for line in list_legend(layout) if line.kinds}
    assert counted == {letter: kinds.count(letter) for letter in set(kinds)}
