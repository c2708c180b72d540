"""A memory map: from blocks to cells and the legend, in a terminal and as a file."""

import io
import random
import re
import sys
from xml.etree import ElementTree

import pytest
from control.made_layout import make_sixteen, write_layout
from matplotlib import image
from rich.console import Console

from kv_pool import DrawingError, InvalidArgumentError
from kv_pool.control.layout_drawing import COLOURS, SIGNS, CellKind, draw_layout, make_map, print_layout

# ---- cells and the legend ------------------------------------------------------------------------


def draw_cells(drawn, max_cells=100, **options):
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
    assert draw_cells(drawn) == cells


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
    assert draw_cells(drawn, max_cells=1).replace("%", "#") == shown


def test_one_pinned_block_among_a_million_is_visible():
    drawn = bytearray(b"." * 1_000_000)
    drawn[777_777] = ord("P")
    shown = make_map(write_layout("0" + drawn.decode()), 16_384)
    assert shown.blocks_per_cell == 64
    assert shown.kinds.tolist().count(CellKind.IMMOVABLE) == 1
    assert shown.kinds[777_778 // 64] == CellKind.IMMOVABLE


def test_neighbouring_runs_of_several_cells_differ_in_shade():
    assert draw_cells("0#-#-# -#-#-#-# # #-#-#", max_cells=3) == "##%"


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


COLOURED = {"force_terminal": True, "color_system": "truecolor"}


def print_to_string(layout, num_columns=None, **options):
    console = Console(file=io.StringIO(), **{"width": 80, **options})
    print_layout(layout, console, num_columns)
    return console.file.getvalue()


def get_map(printed):
    """Return the lines between the title and the legend."""
    return printed.split("\n\n")[1].splitlines()


# ---- in a terminal -------------------------------------------------------------------------------


def test_without_colours_each_kind_has_a_sign():
    printed = print_to_string(make_sixteen().get_layout())
    assert [line.rstrip() for line in printed.splitlines()] == [
        "16 blocks of 4 tokens on device 0",
        "50.0% in use, 50.0% free, fragmentation 50.0% (runs of 3)",
        "",
        " 0 0###%P#==___%:#..",
        "",
        "#% in use                            7 43.8%",
        "P  in use, held in place             1  6.2%",
        "=  cached, in free runs of 3 or more 2 12.5%",
        ":  cached, in shorter free stretches 1  6.2%",
        "_  empty, in free runs of 3 or more  3 18.8%",
        ".  empty, in shorter free stretches  2 12.5%",
        "0  the null block, id 0              1",
        "   shared by several sequences       2 12.5%",
        "",
        "runs of sequences: 5, 1.6 blocks long on average",
        "one cell = one block",
    ]


def test_rows_begin_with_their_first_id():
    printed = print_to_string(make_sixteen().get_layout(), num_columns=8)
    assert get_map(printed) == [" 0 0###%P#=", " 8 =___%:#.", "16 ."]


def test_a_coloured_line_has_two_rows():
    printed = print_to_string(make_sixteen().get_layout(), num_columns=8, **COLOURED)
    first, second = get_map(printed)
    painted = re.findall(r"38;2;(\d+;\d+;\d+)(?:;48;2;(\d+;\d+;\d+))?m(▀+)", first)
    upper = [above for above, _, signs in painted for _ in signs]
    lower = [below for _, below, signs in painted for _ in signs]
    assert (upper, lower) == (paints("0###%P#="), paints("=___%:#."))
    [(above, below, signs)] = re.findall(r"38;2;(\d+;\d+;\d+)(?:;48;2;(\d+;\d+;\d+))?m(▀+)", second)
    assert ([above], below, signs) == (paints("."), "", "▀")


def paints(signs):
    colours = [COLOURS[SIGNS.index(sign)] for sign in signs]
    return [";".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5)) for colour in colours]


@pytest.mark.parametrize(
    ("options", "is_coloured"),
    [
        (COLOURED, True),
        ({**COLOURED, "color_system": "256"}, True),
        ({**COLOURED, "color_system": "standard"}, False),
        ({**COLOURED, "no_color": True}, False),
        ({"force_terminal": False, "color_system": "auto"}, False),
    ],
)
def test_colours_need_a_terminal_with_enough_of_them(options, is_coloured):
    assert ("▀" in print_to_string(write_layout("0..#"), **options)) is is_coloured


@pytest.mark.parametrize(("width", "num_columns"), [(80, 64), (134, 64), (135, 128), (400, 128), (20, 8)])
def test_rows_are_a_power_of_two_that_fits(width, num_columns):
    first, second, *_ = get_map(print_to_string(write_layout("0" + "." * 10_000), width=width))
    assert len(first) == len("10,000 ") + num_columns <= width
    blocks_per_row = int(second.split()[0].replace(",", ""))
    assert blocks_per_row % num_columns == 0


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_ten_thousand_blocks_fit_one_screen(width, height):
    layout = write_layout("0" + "#*.*P" * 2_000)
    printed = print_to_string(layout, width=width, height=height, **COLOURED)
    assert len(printed.splitlines()) <= height
    assert ("one cell = one block" in printed) is (height == 60)


def test_row_has_the_requested_width_even_if_it_does_not_fit():
    printed = print_to_string(write_layout("0" + "#" * 999), num_columns=100)
    assert get_map(printed)[:2] == ["  0 0" + "#%" * 49 + "#", "100 " + "%#" * 50]
    with pytest.raises(InvalidArgumentError):
        print_to_string(write_layout("0."), num_columns=0)


# ---- as a file -----------------------------------------------------------------------------------


def read_texts(path):
    root = ElementTree.fromstring(path.read_text())
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_has_the_colours_of_the_cells(tmp_path):
    drawn = "0" + "#-#-#-#-" * 10_000 + "#" + "P" + "*" * 200 + "." * 100
    path = tmp_path / "map.png"
    draw_layout(write_layout(drawn), str(path))
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    found = {"#{:02X}{:02X}{:02X}".format(*pixel) for pixel in pixels.tolist()}
    assert {COLOURS[SIGNS.index(sign)] for sign in "#P=_"} <= found


def test_svg_contains_the_counts_of_each_kind(tmp_path):
    path = tmp_path / "map.svg"
    draw_layout(make_sixteen().get_layout(), str(path))
    texts = read_texts(path)
    for text in (
        "16 blocks of 4 tokens on device 0",
        "50.0% in use, 50.0% free, fragmentation 50.0% (runs of 3)",
        "in use: 7 (43.8%)",
        "the null block, id 0: 1",
        "shared by several sequences: 2 (12.5%)",
        "runs of sequences: 5, 1.6 blocks long on average; neighbouring runs differ in shade",
        "one cell = one block",
        "+1",
    ):
        assert text in texts


def test_same_layout_gives_the_same_svg(tmp_path):
    paths = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for path in paths:
        draw_layout(make_sixteen().get_layout(), str(path))
    assert paths[0].read_text() == paths[1].read_text()


@pytest.mark.parametrize("name", ["nowhere/map.png", "map.xyz"])
def test_unwritable_picture_is_an_error(tmp_path, name):
    with pytest.raises(DrawingError, match=f"{name}: cannot write the picture"):
        draw_layout(write_layout("0."), str(tmp_path / name))


def test_missing_matplotlib_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DrawingError, match=r"pip install '\.\[lab\]'"):
        draw_layout(write_layout("0."), str(tmp_path / "map.png"))
