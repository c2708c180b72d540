"""The progress bar: on stderr, for people only, gone when the work is done."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def make_progress_bar(doing: str, how_far: ProgressColumn) -> Progress:
    """A bar with the text of the field `live`; silent where stderr is no terminal."""
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
