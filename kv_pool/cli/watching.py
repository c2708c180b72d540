"""Looking at something again and again, until a signal ends the command."""

import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

SECONDS_BETWEEN_LOOKS = 0.5
"""Slow enough to be read; a look costs the pool some microseconds."""


def watch(look: Callable[[], RenderableType], console: Console) -> NoReturn:
    """Show what `look` returns, in place on a terminal; elsewhere print it each time."""
    if console.is_terminal:
        with Live(look(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                live.update(look(), refresh=True)
    while True:
        console.print(look(), soft_wrap=True)
        console.file.flush()
        time.sleep(SECONDS_BETWEEN_LOOKS)
