"""Looking at something again and again, until a signal ends the command."""

import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kv_pool.cli.console import print_table

SECONDS_BETWEEN_LOOKS = 0.5
"""Slow enough to be read; a look costs the pool some microseconds."""


def watch(
    look: Callable[[], Table | Text], console: Console, sleep: Callable[[float], object] = time.sleep
) -> NoReturn:
    """Show what `look` returns, in place on a terminal; elsewhere print it each time."""
    if console.is_terminal:
        with Live(look(), console=console, auto_refresh=False) as live:
            while True:
                sleep(SECONDS_BETWEEN_LOOKS)
                live.update(look(), refresh=True)
    while True:
        shown = look()
        if isinstance(shown, Table):
            print_table(shown, console)
        else:
            console.print(shown, soft_wrap=True)
        console.file.flush()
        sleep(SECONDS_BETWEEN_LOOKS)
