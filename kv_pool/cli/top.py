"""`kv-pool top`: watch a running pool, a `/metrics` or an event stream, as a screen, as text or as JSON."""

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from kv_pool.cli.console import print_json
from kv_pool.cli.running_pool import RunningPool
from kv_pool.cli.setting_options import takes
from kv_pool.cli.top_screen import KEYS, Choices, draw, make_screen
from kv_pool.cli.top_sources import EventSource, Frame, History, MetricsSource, PoolSource, Source
from kv_pool.control.socket_path import find_path, get_default_path, list_nodes
from kv_pool.errors import InvalidArgumentError, KVPoolError
from kv_pool.ids import NodeName
from kv_pool.option import setting

_NUM_CELLS, _NUM_LINES = 320, 40
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]")
"""What a terminal sends for an arrow and the like."""


@takes("socket node url token_file events replay interval once json")
def top(
    pool: RunningPool,
    url: str | None = setting(
        "Read this /metrics of kv_pool, vLLM or SGLang instead, such as http://localhost:8000/metrics.",
        default=None,
    ),
    token_file: str | None = setting("File with the bearer token for --url.", default=None, metavar="FILE"),
    events: str | None = setting(
        "Read this event stream instead, of kv_pool, vLLM or SGLang: a PUB socket such as "
        "tcp://127.0.0.1:5557.",
        default=None,
        metavar="ENDPOINT",
    ),
    replay: str | None = setting(
        "Replay endpoint of --events, for the blocks that were cached earlier.",
        default=None,
        metavar="ENDPOINT",
    ),
    interval: float | None = setting(
        "Seconds from one look to the next. Default: 0.25, for --url 1.", default=None, min=0.05
    ),
    once: bool = setting("Print the state once, and end.", default=False),
) -> None:
    """Watch a running pool: memory, hits, evictions, sequences, prefixes, migrations; until q or Ctrl-C."""
    sources: Sequence[Source]
    interval = interval or (0.25 if url is None else 1.0)
    if sum(one is not None for one in (pool.socket or pool.node, url, events)) > 1:
        raise InvalidArgumentError("pass one of --socket, --node, --url and --events")
    if url is not None:
        sources = [MetricsSource(url, token_file)]
    elif events is not None:
        sources = [EventSource(events, replay)]
    else:
        sources = [PoolSource(path) for path in _list_paths(pool)]
    with ExitStack() as stack:
        for source in sources:
            stack.callback(source.close)
        console = Console(highlight=False)
        if console.is_terminal and not once and not pool.json:
            _show(sources, interval, console)
            return
        history = History()
        frame = sources[0].look(_NUM_CELLS)  # if it does not answer, the error ends the command
        while True:
            history.add(frame)
            if pool.json:
                print_json(frame)
            else:
                lines = draw(frame, Choices(), console.width, _NUM_LINES)
                print("\n".join("".join(text for text, _ in line) for line in lines))
            sys.stdout.flush()
            if once:
                return
            time.sleep(interval)
            frame = _look(sources[0], _NUM_CELLS)


def _list_paths(pool: RunningPool) -> list[Path]:
    """Return the socket that the options name, or those of all pools that this user serves."""
    named = pool.socket or pool.node
    paths = [] if named else [get_default_path(), *map(get_default_path, list_nodes())]
    found = [path for path in paths if path.exists()]
    return found or [find_path(pool.socket, None if pool.node is None else NodeName(pool.node))]


def _look(source: Source, num_cells: int) -> Frame:
    """Return the state of a source; if it does not answer, a frame that says so."""
    try:
        return source.look(num_cells)
    except KVPoolError as error:
        return Frame(source=source.name, trouble=str(error))


def _show(sources: Sequence[Source], interval: float, console: Console) -> None:
    """Show the frames of a source in place, and obey keys, until `q`."""
    keys = KEYS + "  tab next pool" * (len(sources) > 1)
    choices = Choices()
    histories = [History() for _ in sources]
    frame = sources[0].look(_NUM_CELLS)
    with _reading_keys() as terminal, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            number = choices.number % len(sources)
            width, height = console.size
            if not choices.is_paused or sources[number].name != frame.source:
                found = _look(sources[number], width * max(1, min(8, height // 8)))
                histories[number].add(found)
                if found.trouble and found.source == frame.source:
                    found = msgspec.structs.replace(frame, trouble=found.trouble)
                frame = found
            due = time.monotonic() + interval
            while True:
                live.update(make_screen(draw(frame, choices, *console.size, keys)), refresh=True)
                if not select.select(terminal, [], [], max(0.0, due - time.monotonic()))[0]:
                    break
                typed = os.read(terminal[0], 100).decode(errors="ignore")
                if not typed:
                    terminal.clear()
                if not all(map(choices.obey, _SEQUENCE.sub("", typed))):
                    return


@contextmanager
def _reading_keys() -> Iterator[list[int]]:
    """Yield the terminal, on which each key is readable at once; [] if the input is no terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield [terminal]
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
