"""The progress bar: on stderr, only on a terminal, removed at the end."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

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


_Item = TypeVar("_Item")


def count_requests(doing: str, requests: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and show their number in a bar without an end."""
    with make_progress_bar(doing, TextColumn("")) as bar:
        task = bar.add_task("count", total=None, live="")
        for number, request in enumerate(requests, 1):
            if number % 100 == 0:
                bar.update(task, live=f"{number:,} requests")
            yield request
