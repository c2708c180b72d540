"""`check_can_draw`: whether a picture can be drawn, asked before a long computation; `save_figure`."""

import warnings
from pathlib import Path
from typing import Any

from kv_pool.errors import KVPoolError, TraceError, describe_install
from kv_pool.regular_files import find_obstacle


def check_can_draw(path: str, error: type[KVPoolError] = TraceError) -> None:
    """Raise an error if no picture can be drawn to `path`. Call it before a long replay."""
    obstacle = _find_obstacle(path)
    if obstacle is not None:
        raise error(f"{path}: cannot write the picture: {obstacle}")


def save_figure(figure: Any, path: str, error: type[KVPoolError] = TraceError, **options: Any) -> None:
    """Write a matplotlib figure to an image file. Raises an error if that is not possible.

    Args:
        options: of `Figure.savefig`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the font may lack characters of a name
            figure.savefig(path, **options)
    except (OSError, ValueError) as problem:
        raise error(f"{path}: cannot write the picture: {problem}") from problem


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
