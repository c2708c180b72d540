"""From blocks to the cells and the legend of a memory map."""

import random

import pytest
from control.made_layout import make_sixteen, write_layout

from kv_pool import InvalidArgumentError
from kv_pool.control.layout_drawing import SIGNS, CellKind, make_map


def draw(drawn, max_cells=100, **options):
    return "".join(SIGNS[kind] for kind in make_map(write_layout(drawn, **options), max_cells).kinds)


@pytest.mark.parametrize(
    ("drawn", "cells"),
    [
        ("0 .... # ... # *.*. # **", "0____#...%=_=_#::"),
        ("0 ..... # .", "0_____#."),
        ("0 #-# #-# # . #", "0##%%#.%"),
        ("0 #-P-# P-#", "0#P#P%"),
    ],
    ids=["free runs and stretches", "a longer run", "shades of runs", "a pinned block is in its run"],
)
def test_a_cell_shows_its_block(drawn, cells):
    assert draw(drawn) == cells


@pytest.mark.parametrize(("num_blocks", "blocks_per_cell"), [(7, 1), (8, 2), (15, 2), (16, 4), (31, 4)])
def test_cells_have_as_few_blocks_as_possible(num_blocks, blocks_per_cell):
    shown = make_map(write_layout("0" + "." * num_blocks), 8)
    assert shown.blocks_per_cell == blocks_per_cell
    assert len(shown.kinds) <= 8


@pytest.mark.parametrize(
    ("drawn", "shown"),
    [("0#.#", "#"), ("0#..", "."), ("0##*", "#"), ("0*..", "."), ("0**.", ":"), ("0...", ".")],
)
def test_cell_shows_the_kind_of_most_of_its_blocks(drawn, shown):
    assert draw(drawn, max_cells=1).replace("%", "#") == shown


def test_one_pinned_block_among_a_million_is_visible():
    drawn = bytearray(b"." * 1_000_000)
    drawn[777_777] = ord("P")
    shown = make_map(write_layout("0" + drawn.decode()), 16_384)
    assert shown.blocks_per_cell == 64
    assert shown.kinds.tolist().count(CellKind.IMMOVABLE) == 1
    assert shown.kinds[777_778 // 64] == CellKind.IMMOVABLE


def test_neighbouring_runs_of_several_cells_differ_in_shade():
    assert draw("0#-#-# -#-#-#-# # #-#-#", max_cells=3) == "##%"


def test_max_cells_below_1_is_refused():
    with pytest.raises(InvalidArgumentError, match="max_cells is 0; a memory map has at least 1 cell"):
        make_map(write_layout("0."), 0)


def test_the_legend_counts_blocks():
    layout = make_sixteen().get_layout()
    expected = [
        ("in use", 7, "43.8%"),
        ("in use, held in place", 1, "6.2%"),
        ("cached, in free runs of 3 or more", 2, "12.5%"),
        ("cached, in shorter free stretches", 1, "6.2%"),
        ("empty, in free runs of 3 or more", 3, "18.8%"),
        ("empty, in shorter free stretches", 2, "12.5%"),
        ("the null block, id 0", 1, ""),
        ("shared by several sequences", 2, "12.5%"),
    ]
    legend = [(line.words, line.num_blocks, line.percent) for line in make_map(layout, 100).legend]
    assert legend == expected
    legend = [(line.words, line.num_blocks, line.percent) for line in make_map(layout, 5).legend]
    assert legend == [line for line in expected if line[0] != "the null block, id 0"]


def test_tiny_share_is_not_shown_as_zero():
    legend = make_map(write_layout("0P" + "." * 9_999), 20_000).legend
    assert [line.percent for line in legend] == ["< 0.1%", "100.0%", ""]


def test_a_map_describes_the_pool():
    layout = write_layout("0 #-#-# #-# ... # ....", run_length=4, device_id=2)
    shown = make_map(layout, 100)
    assert shown.title == "13 blocks of 16 tokens on device 2"
    assert shown.use == "46.2% in use, 53.8% free, fragmentation 0.0% (runs of 4)"
    assert shown.runs == "runs of sequences: 3, 2.0 blocks long on average"
    assert shown.cell == "one cell = one block"
    assert make_map(layout, 5).cell.startswith("one cell = 4 blocks: ")
    assert make_map(write_layout("0.."), 5).runs == "no runs of sequences"


@pytest.mark.parametrize("seed", range(30))
def test_kinds_and_counts_match_a_slow_scan(seed):
    dice = random.Random(seed)
    drawn = "0" + "".join(dice.choice("..**##P") * dice.randint(1, 6) for _ in range(20))
    run_length = dice.randint(1, 8)
    expected = []
    for block_id, character in enumerate(drawn):
        first = end = block_id
        while drawn[first - 1] in ".*":
            first -= 1
        while end < len(drawn) and drawn[end] in ".*":
            end += 1
        is_long = end - first >= run_length
        expected.append({".": "._"[is_long], "*": ":="[is_long]}.get(character, character))
    shown = make_map(write_layout(drawn, run_length), 1000)
    kinds = "".join(SIGNS[kind] for kind in shown.kinds).replace("%", "#")
    assert kinds == "".join(expected)
    counted = {SIGNS[line.kinds[0]]: line.num_blocks for line in shown.legend if line.kinds}
    assert counted == {letter: kinds.count(letter) for letter in set(kinds)}
