"""The memory map in a terminal and as a file: signs, colours, texts."""

import io
import re
import sys
from xml.etree import ElementTree

import pytest
from control.made_layout import make_sixteen, write_layout
from matplotlib import image
from rich.console import Console

from kv_pool import DrawingError, InvalidArgumentError
from kv_pool.control.layout_drawing import COLOURS, SIGNS, draw_layout, print_layout

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
