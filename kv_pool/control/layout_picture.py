"""A pool's memory map as an image file."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_pool.control.layout_cells import (
    COLOURS,
    CellKind,
    LayoutCells,
    LegendLine,
    describe_cell,
    describe_pool,
    describe_runs,
    describe_use,
    make_cells,
    make_legend,
)
from kv_pool.errors import DrawingError
from kv_pool.replay.pictures.figure import check_can_draw
from kv_pool.reports import PoolLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CELLS = 16_385
"""16,384 blocks and the null block; in larger pools a cell stands for several blocks."""

# All positions are in pixels of the PNG, so that cells begin and end at whole pixels.
_DPI = 128
_MAX_MAP_WIDTH, _MAX_MAP_HEIGHT, _MAX_CELL = 1_216, 900, 56
_LEFT, _TOP, _BOTTOM = 92, 178, 40
_LEGEND_GAP, _LEGEND_WIDTH, _LEGEND_STEP = 44, 580, 34
_SWATCH = 20
_TEXT, _DIM = "#202124", "#5F6368"


@dataclass(frozen=True, slots=True)
class Grid:
    """The positions of a picture's cells, in pixels from its upper left corner."""

    num_cells: int
    num_columns: int
    cell_size: int

    @property
    def num_rows(self) -> int:
        return -(-self.num_cells // self.num_columns)

    @property
    def width(self) -> int:
        return self.num_columns * self.cell_size

    @property
    def height(self) -> int:
        return self.num_rows * self.cell_size

    @property
    def gap(self) -> int:
        """Pixels between cells of different runs, and between rows."""
        return 1 + self.cell_size // 12

    def find_corner(self, cell: int) -> tuple[int, int]:
        """Return the upper left corner (x, y) of a cell, the gap before it included."""
        row, column = divmod(cell, self.num_columns)
        return _LEFT + column * self.cell_size, _TOP + row * self.cell_size


def make_grid(num_cells: int) -> Grid:
    """Return a grid that is wider than high. Rows are a power of two long, so that aligned slots line up."""
    num_columns = 1
    while 5 * num_columns * num_columns < 4 * num_cells:
        num_columns *= 2
    num_rows = -(-num_cells // num_columns)
    cell_size = min(_MAX_MAP_WIDTH // num_columns, _MAX_MAP_HEIGHT // num_rows, _MAX_CELL)
    return Grid(num_cells, num_columns, cell_size)


def draw_layout(layout: PoolLayout, path: str) -> None:
    """Draw a memory map to an image file (.png, .svg, .pdf). The same layout gives the same SVG.

    Block ids go from left to right, row by row. Cells of one run have no gap between them.
    Raises:
        DrawingError: matplotlib is not installed, or the file cannot be written.
    Cost: O(number of blocks), and about a second.
    """
    check_can_draw(path, DrawingError)
    import matplotlib
    from matplotlib.figure import Figure

    cells = make_cells(layout, MAX_CELLS)
    grid = make_grid(len(cells.kinds))
    legend = make_legend(layout, cells)
    remarks = [
        describe_runs(layout),
        "no gap inside a run; neighbouring runs differ in shade",
        describe_cell(cells),
    ]
    width = _LEFT + grid.width + _LEGEND_GAP + _LEGEND_WIDTH
    height = _TOP + max(grid.height, (len(legend) + 3) * _LEGEND_STEP) + _BOTTOM
    # Text stays text, and the file records neither time nor place of drawing.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kv_pool"}):
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        _write(axes, _LEFT, 40, describe_pool(layout), fontsize=16, fontweight="bold")
        _write(axes, _LEFT, 78, describe_use(layout), fontsize=11, color=_DIM)
        _draw_shares(axes, grid, legend)
        _draw_scale(axes, grid, cells.blocks_per_cell)
        _draw_cells(axes, grid, cells)
        _draw_legend(axes, _LEFT + grid.width + _LEGEND_GAP, legend, remarks)
        try:
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
        except (OSError, ValueError) as error:
            raise DrawingError(f"{path}: cannot write the picture: {error}") from error


def _draw_shares(axes: "Axes", grid: Grid, legend: list[LegendLine]) -> None:
    """Draw one bar for the whole pool, as wide as the map."""
    from matplotlib.patches import Rectangle

    start = float(_LEFT)
    for line in legend:
        if line.kinds:
            width = line.share * grid.width
            axes.add_patch(Rectangle((start, 104), width, 16, color=COLOURS[line.kinds[0]], linewidth=0))
            start += width


def _draw_scale(axes: "Axes", grid: Grid, blocks_per_cell: int) -> None:
    """Draw the first id of each row, and the offsets of ids along it."""
    row_step = _find_step(grid.num_rows, grid.cell_size, 30)
    for row in range(0, grid.num_rows, row_step):
        first_id = row * grid.num_columns * blocks_per_cell
        y = _TOP + (row + 0.5) * grid.cell_size
        _write(axes, _LEFT - 10, y, f"{first_id:,}", ha="right", fontsize=8, color=_DIM)
    column_step = _find_step(grid.num_columns, grid.cell_size, 76)
    for column in range(0, grid.num_columns, column_step):
        x = _LEFT + column * grid.cell_size
        axes.plot([x, x], [_TOP - 12, _TOP - 4], color=_DIM, linewidth=0.8)
        label = f"+{column * blocks_per_cell:,}" if column else "block id"
        _write(axes, x, _TOP - 26, label, fontsize=8, color=_DIM)


def _draw_cells(axes: "Axes", grid: Grid, cells: LayoutCells) -> None:
    """Draw one collection per kind, one path per row. A cell that continues a run has no gap before it."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Outline

    rows, columns = np.divmod(np.arange(grid.num_cells), grid.num_columns)
    left, upper = _LEFT + columns * grid.cell_size, _TOP + rows * grid.cell_size
    right, lower = left + grid.cell_size, upper + grid.cell_size
    left, upper = np.where(cells.is_joined, left, left + grid.gap), upper + grid.gap
    corners = np.stack([left, upper, right, upper, right, lower, left, lower], axis=1).reshape(-1, 4, 2)
    for kind in np.unique(cells.kinds).tolist():
        is_kind = cells.kinds == kind
        drawn = PathCollection(
            [
                Outline.make_compound_path_from_polys(corners[is_kind & (rows == row)])
                for row in np.unique(rows[is_kind])
            ],
            facecolors=[COLOURS[CellKind(kind)]],
            linewidths=[0],
            antialiaseds=[False],
            gid=f"cells-{CellKind(kind).name.lower().replace('_', '-')}",
        )
        axes.add_collection(drawn, autolim=False)


def _draw_legend(axes: "Axes", x: int, legend: list[LegendLine], remarks: list[str]) -> None:
    from matplotlib.patches import Rectangle

    y = _TOP + _SWATCH // 2
    for line in legend:
        size = _SWATCH // max(1, len(line.kinds))
        for position, kind in enumerate(line.kinds):
            corner = (x + position * size, y - _SWATCH // 2)
            axes.add_patch(Rectangle(corner, size, _SWATCH, color=COLOURS[kind], linewidth=0))
        _write(axes, x + _SWATCH + 14, y, line.words, fontsize=9.5, color=_TEXT if line.kinds else _DIM)
        right = x + _LEGEND_WIDTH - 40
        _write(axes, right - 76, y, f"{line.num_blocks:,}", ha="right", fontsize=9.5)
        _write(axes, right, y, line.percent, ha="right", fontsize=9.5, color=_DIM)
        y += _LEGEND_STEP
    y += _LEGEND_STEP // 2
    for remark in remarks:
        _write(axes, x, y, remark, fontsize=8.5, color=_DIM)
        y += _LEGEND_STEP - 8


def _find_step(number: int, size: int, distance: int) -> int:
    """Return the smallest power of two of cells that is at least `distance` pixels wide."""
    step = 1
    while step < number and step * size < distance:
        step *= 2
    return step


def _write(axes: "Axes", x: float, y: float, text: str, **options: Any) -> None:
    axes.text(x, y, text, **{"va": "center", "color": _TEXT, **options})
