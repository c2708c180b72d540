"""The memory map as a file: the pixels of a picture, and the texts of an SVG."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from control.made_layout import make_sixteen, write_layout
from matplotlib import image

from kv_pool import DrawingError
from kv_pool.control.layout_cells import COLOURS, CellKind
from kv_pool.control.layout_picture import MAX_CELLS, draw_layout, make_grid

WHITE = "#FFFFFF"


def draw_pixels(layout, tmp_path):
    """Return a function (x, y) -> colour, as `COLOURS` writes it."""
    path = tmp_path / "map.png"
    draw_layout(layout, str(path))
    pixels = np.round(image.imread(path)[:, :, :3] * 255).astype(int)
    return lambda x, y: "#{:02X}{:02X}{:02X}".format(*pixels[y, x])


def read_texts(path):
    root = ElementTree.fromstring(path.read_text())
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def read_groups(path):
    root = ElementTree.fromstring(path.read_text())
    names = [node.get("id", "") for node in root.iter("{http://www.w3.org/2000/svg}g")]
    return sorted(name for name in names if name.startswith("cells-"))


def test_each_block_has_the_colour_of_its_kind(tmp_path):
    layout = make_sixteen().get_layout()
    colour_at = draw_pixels(layout, tmp_path)
    grid = make_grid(17)
    for cell, letter in enumerate("0###%P#==___%:#.."):
        x, y = grid.find_corner(cell)
        middle = grid.cell_size // 2
        kind = CellKind("0._:=#%P".index(letter))
        assert colour_at(x + middle, y + middle) == COLOURS[kind], f"block {cell}"
        assert colour_at(x + grid.cell_size - 1, y + grid.cell_size - 1) == COLOURS[kind], f"block {cell}"


def test_gaps_separate_runs_and_not_blocks_of_a_run(tmp_path):
    colour_at = draw_pixels(write_layout("0 #-# #-P-# . # .... # # #", run_length=4), tmp_path)
    grid = make_grid(15)
    gaps = []
    for cell in range(15):
        x, y = grid.find_corner(cell)
        assert colour_at(x + grid.cell_size // 2, y) == WHITE, "rows have a gap between them"
        gaps.append(colour_at(x, y + grid.cell_size // 2) == WHITE)
    assert "".join("| "[not gap] for gap in gaps) == "|| |  |||   |||"


def test_one_pinned_block_among_a_million_is_drawn(tmp_path):
    drawn = bytearray(b"#" * 1_000_000)
    drawn[777_776] = ord("P")
    colour_at = draw_pixels(write_layout("0" + drawn.decode()), tmp_path)
    cell = 777_777 // 64
    grid = make_grid(-(-1_000_001 // 64))
    x, y = grid.find_corner(cell)
    middle = grid.cell_size // 2
    assert colour_at(x + middle, y + middle) == COLOURS[CellKind.IMMOVABLE]
    assert colour_at(x + middle - grid.cell_size, y + middle) != COLOURS[CellKind.IMMOVABLE]


def test_svg_contains_the_counts_of_each_kind(tmp_path):
    path = tmp_path / "map.svg"
    draw_layout(make_sixteen().get_layout(), str(path))
    texts = read_texts(path)
    assert texts[:2] == [
        "16 blocks of 4 tokens on device 0",
        "50.0% in use, 50.0% free, fragmentation 50.0% (runs of 3)",
    ]
    start = texts.index("in use")
    assert texts[start:-3] == [
        *("in use", "7", "43.8%"),
        *("in use, held in place", "1", "6.2%"),
        *("cached, in free runs of 3 or more", "2", "12.5%"),
        *("cached, in shorter free stretches", "1", "6.2%"),
        *("empty, in free runs of 3 or more", "3", "18.8%"),
        *("empty, in shorter free stretches", "2", "12.5%"),
        *("the null block, id 0", "1"),
        *("shared by several sequences", "2", "12.5%"),
    ]
    assert texts[-3:] == [
        "runs of sequences: 5, 1.6 blocks long on average",
        "no gap inside a run; neighbouring runs differ in shade",
        "one cell = one block",
    ]


def test_cells_of_an_svg_are_grouped_by_kind(tmp_path):
    path = tmp_path / "map.svg"
    draw_layout(write_layout("0 #-# # P *... #"), str(path))
    assert read_groups(path) == [
        "cells-cached-run",
        "cells-empty-run",
        "cells-immovable",
        "cells-in-use",
        "cells-in-use-next",
        "cells-null",
    ]


def test_same_layout_gives_the_same_svg(tmp_path):
    paths = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for path in paths:
        draw_layout(make_sixteen().get_layout(), str(path))
    assert paths[0].read_text() == paths[1].read_text()


@pytest.mark.parametrize(("num_blocks", "remark"), [(16_384, "one block"), (16_385, "2 blocks")])
def test_a_cell_is_one_block_if_the_picture_is_large_enough(tmp_path, num_blocks, remark):
    assert num_blocks + 1 <= MAX_CELLS or remark != "one block"
    path = tmp_path / "map.svg"
    draw_layout(write_layout("0" + "#" * num_blocks), str(path))
    assert read_texts(path)[-1].startswith(f"one cell = {remark}")


@pytest.mark.parametrize("num_cells", [2, 3, 17, 100, 1_001, 4_097, 10_001, MAX_CELLS])
def test_rows_are_a_power_of_two_and_the_map_is_wide(num_cells):
    grid = make_grid(num_cells)
    assert grid.num_columns.bit_count() == 1
    assert grid.num_rows <= grid.num_columns + 1
    assert grid.num_rows * grid.num_columns >= num_cells
    assert grid.cell_size >= 6
    assert grid.gap < grid.cell_size


@pytest.mark.parametrize("name", ["nowhere/map.png", "map.xyz"])
def test_unwritable_picture_is_an_error(tmp_path, name):
    with pytest.raises(DrawingError, match=f"{name}: cannot write the picture"):
        draw_layout(write_layout("0."), str(tmp_path / name))


def test_missing_matplotlib_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DrawingError, match=r"pip install '\.\[lab\]'"):
        draw_layout(write_layout("0."), str(tmp_path / "map.png"))
