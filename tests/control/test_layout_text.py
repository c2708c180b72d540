"""The memory map in a terminal: printed signs and colours."""

import io

import pytest
from control.made_layout import make_sixteen, write_layout
from rich.color import Color
from rich.console import Console

from kv_pool import InvalidArgumentError
from kv_pool.control.layout_cells import COLOURS, CellKind
from kv_pool.control.layout_text import Look, choose_look, make_text, print_layout


def print_to_string(layout, num_columns=None, encoding="utf-8", **options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding, newline="\n")
    print_layout(layout, Console(file=stream, **{"width": 80, **options}), num_columns)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def get_map(printed):
    """Return the lines between the title and the legend."""
    return printed.split("\n\n")[1].splitlines()


def test_without_colours_each_kind_has_a_sign():
    assert print_to_string(make_sixteen().get_layout()) == (
        "16 blocks of 4 tokens on device 0\n"
        "50.0% in use, 50.0% free, fragmentation 50.0% (runs of 3)\n"
        "\n"
        " 0 0███▓P█==___▓:█..\n"
        "\n"
        "█▓ in use                                         7    43.8%\n"
        "P  in use, held in place                          1     6.2%\n"
        "=  cached, in free runs of 3 or more              2    12.5%\n"
        ":  cached, in shorter free stretches              1     6.2%\n"
        "_  empty, in free runs of 3 or more               3    18.8%\n"
        ".  empty, in shorter free stretches               2    12.5%\n"
        "0  the null block, id 0                           1\n"
        "   shared by several sequences                    2    12.5%\n"
        "\n"
        "runs of sequences: 5, 1.6 blocks long on average\n"
        "one cell = one block\n"
    )


def test_rows_begin_with_their_first_id():
    printed = print_to_string(make_sixteen().get_layout(), num_columns=8)
    assert get_map(printed) == [" 0 0███▓P█=", " 8 =___▓:█.", "16 ."]


def test_signs_are_ascii_on_an_ascii_console():
    printed = print_to_string(make_sixteen().get_layout(), num_columns=8, encoding="ascii")
    assert get_map(printed) == [" 0 0###%P#=", " 8 =___%:#.", "16 ."]
    assert "\n#% in use " in printed


def test_painted_line_has_two_rows():
    text = make_text(make_sixteen().get_layout(), Look.PAINTED, num_columns=8, num_lines=10)
    assert get_map(text.plain) == [" 0 ▀▀▀▀▀▀▀▀", "16 ▀"]
    first = text.plain.index("▀")
    upper = [style_at(text, first + column).color for column in range(8)]
    lower = [style_at(text, first + column).bgcolor for column in range(8)]
    assert upper == paints("0###%P#=")
    assert lower == paints("=___%:#.")
    last = text.plain.rindex("▀")
    assert (style_at(text, last).color, style_at(text, last).bgcolor) == (*paints("."), None)


def style_at(text, position):
    [style] = [span.style for span in text.spans if span.start <= position < span.end]
    return style


def paints(signs):
    return [Color.parse(COLOURS[CellKind("0._:=#%P".index(sign))]) for sign in signs]


@pytest.mark.parametrize(
    ("options", "look"),
    [
        ({"force_terminal": True, "color_system": "truecolor"}, Look.PAINTED),
        ({"force_terminal": True, "color_system": "256"}, Look.PAINTED),
        ({"force_terminal": True, "color_system": "standard"}, Look.SIGNS),
        ({"force_terminal": True, "color_system": "truecolor", "no_color": True}, Look.SIGNS),
        ({"force_terminal": False, "color_system": "auto"}, Look.SIGNS),
    ],
)
def test_colours_need_a_terminal_with_enough_of_them(options, look):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    assert choose_look(Console(file=stream, **options)) is look


@pytest.mark.parametrize(("width", "num_columns"), [(80, 64), (134, 64), (135, 128), (400, 128), (20, 8)])
def test_rows_are_a_power_of_two_that_fits(width, num_columns):
    printed = print_to_string(write_layout("0" + "." * 10_000), width=width)
    first, second, *_ = get_map(printed)
    assert len(first) == len("10,000 ") + num_columns <= width
    assert second.strip().startswith(f"{num_columns * blocks_per_cell(printed):,} ")


def blocks_per_cell(printed):
    return int(printed.split("one cell = ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_ten_thousand_blocks_fit_one_screen(width, height):
    layout = write_layout("0" + "#*.*P" * 2_000)
    printed = print_to_string(
        layout, width=width, height=height, force_terminal=True, color_system="truecolor"
    )
    assert len(printed.splitlines()) <= height
    assert "▀" in printed


def test_a_large_screen_shows_each_of_ten_thousand_blocks():
    layout = write_layout("0" + "." * 10_000)
    printed = print_to_string(layout, width=200, height=60, force_terminal=True, color_system="truecolor")
    assert "one cell = one block" in printed


def test_row_has_the_requested_width_even_if_it_does_not_fit():
    printed = print_to_string(write_layout("0" + "#" * 999), num_columns=100)
    assert get_map(printed)[:2] == ["  0 0" + "█▓" * 49 + "█", "100 " + "▓█" * 50]


def test_num_columns_below_1_is_refused():
    with pytest.raises(InvalidArgumentError):
        print_to_string(write_layout("0."), num_columns=0)
