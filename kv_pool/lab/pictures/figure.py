"""Parts that all pictures of the replay share: the check before, the file, the axes of hit rates."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kv_pool.drawing import check_can_draw
from kv_pool.errors import TraceError
from kv_pool.lab.report import Provenance


@contextmanager
def new_figure(
    path: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.2, 4.4)
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a matplotlib figure and its axes, row by row. At the end, write it to an image file and close it.

    Args:
        size: width and height in inches.
    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    check_can_draw(path)
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        yield figure, list(grid.flat)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the font may lack characters of a name
                figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: cannot write the picture: {error}") from error
    finally:
        pyplot.close(figure)


def choose_unit(block_bytes: float, block_size: int) -> tuple[float, str]:
    """Return the size of a block on an axis of capacities, and the unit: GiB if its bytes are known."""
    return (block_bytes / 2**30, "GiB") if block_bytes else (1.0, f"blocks of {block_size} tokens")


def format_capacity_axes(
    axes: Any, capacity: str, rate: str, title: str, ticks: Sequence[float] = (1.0,)
) -> None:
    """Give axes a logarithmic scale of capacities and a percent scale of hit rates from 0, with names.

    Args:
        ticks: capacities with numbers, as multiples of powers of 10.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda capacity, _: f"{capacity:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel(capacity)
    axes.set_ylabel(rate)
    axes.set_title(title, fontsize=10, parse_math=False)


def show_names_as_written(legend: Any) -> None:
    """Keep matplotlib from reading the names of a legend as mathematics; they may contain dollar signs."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def name_trace(provenance: Provenance | None) -> str:
    """Return the file name of a report's trace for a title; empty if it is not known."""
    return "" if provenance is None else make_printable(Path(provenance.trace).name)


def make_printable(text: str) -> str:
    """Replace control characters, which XML pictures cannot contain; names come from files."""
    return "".join(one if one.isprintable() else "?" for one in text)
