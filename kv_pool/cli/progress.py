"""The progress bar: on stderr, only on a terminal, removed at the end."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def make_progress_bar(doing: str, how_far: ProgressColumn) -> Progress:
    """Return a bar that shows the text of the field `live`; silent if stderr is not a terminal."""
    return Progress(
        TextColumn(doing),
        BarColumn(),
        how_far,
        TextColumn("{task.fields[live]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
