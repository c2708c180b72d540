"""Parts that all pictures of the replay share: the check before, the axes of hit rates, the file."""

import warnings
from typing import Any

from kv_pool.errors import TraceError
from kv_pool.replay.output_file import find_drawing_obstacle


def check_can_draw(path: str) -> None:
    """Raise TraceError if no picture can be drawn to `path`. Call it before a long replay."""
    obstacle = find_drawing_obstacle(path)
    if obstacle is not None:
        raise TraceError(f"{path}: cannot write the picture: {obstacle}")


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


def format_capacity_axes(axes: Any) -> None:
    """Give axes a logarithmic scale of capacities and a percent scale of hit rates, from 0."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda capacity, _: f"{capacity:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3, which="both")


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
