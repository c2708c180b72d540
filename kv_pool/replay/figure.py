"""Parts that all pictures of the replay share: the check before, the axes of hit rates, the file."""

import warnings
from pathlib import Path
from typing import Any

from kv_pool.errors import KVPoolError, TraceError, describe_install
from kv_pool.replay.report import Provenance
from kv_pool.replay.trace_writer import find_obstacle


def check_can_draw(path: str, error: type[KVPoolError] = TraceError) -> None:
    """Raise an error if no picture can be drawn to `path`. Call it before a long replay."""
    obstacle = _find_obstacle(path)
    if obstacle is not None:
        raise error(f"{path}: cannot write the picture: {obstacle}")


def _find_obstacle(path: str) -> str | None:
    """Return why a picture cannot be drawn to `path` (format, folder or matplotlib), or None."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return f"drawing needs matplotlib: {describe_install('lab')}"
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        return f"its name must end in one of .{', .'.join(sorted(formats))}"
    return find_obstacle(path)


def open_pyplot(path: str) -> Any:
    """Return matplotlib's pyplot, which draws without a display.

    Raises:
        TraceError: matplotlib is not installed, or `path` cannot be written.
    """
    check_can_draw(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def format_capacity_axes(axes: Any, capacity: str, rate: str, title: str) -> None:
    """Give axes a logarithmic scale of capacities and a percent scale of hit rates from 0, with names."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

    axes.set_xscale("log")
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


def save_figure(figure: Any, path: str) -> None:
    """Write a figure to an image file, and close it.

    Raises:
        TraceError: the file cannot be written.
    """
    from matplotlib import pyplot

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the font may lack characters of a name
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot write the picture: {error}") from error
    finally:
        pyplot.close(figure)
