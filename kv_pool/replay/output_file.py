"""Checks that a result file can be written, before the work that produces the result."""

import os
from pathlib import Path

from kv_pool.errors import TraceError, describe_install


def check_can_write(path: str) -> None:
    """Raise TraceError if a report cannot be written to `path`. Nothing is created."""
    obstacle = find_obstacle(path)
    if obstacle is not None:
        raise TraceError(f"{path}: cannot write the report: {obstacle}")


def find_obstacle(path: str) -> str | None:
    """Return why the file `path` cannot be written now, or None. A full disk is found only when writing."""
    try:
        if os.path.isdir(path):
            return "it is a folder"
        if os.path.exists(path):
            return None if os.access(path, os.W_OK) else "writing it is not permitted"
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            return f"there is no folder {folder}"
        os.lstat(folder / (Path(path).name or "."))
    except FileNotFoundError:
        return None if os.access(folder, os.W_OK | os.X_OK) else f"writing to {folder} is not permitted"
    except (OSError, ValueError) as error:  # the name is too long, or contains a null byte
        return getattr(error, "strerror", None) or str(error)
    return "it is a broken symbolic link"


def find_drawing_obstacle(path: str) -> str | None:
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
