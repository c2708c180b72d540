"""Repeated output of a command, until a signal ends it."""

import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kv_pool.cli.console import print_table

SECONDS_BETWEEN_LOOKS = 0.5
"""Slow enough to read. Each refresh costs the pool some microseconds."""


def watch(
    look: Callable[[], Table | Text], console: Console, sleep: Callable[[float], object] = time.sleep
) -> NoReturn:
    """Show what `look` returns, repeatedly: in place on a terminal, else one print after the other."""
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
