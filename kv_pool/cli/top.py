"""`kv-pool top`: watch a running pool, a `/metrics` or an event stream, as a screen, as text or as JSON."""

import os
import re
import select
import sys
import termios
import time
import tty
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from kv_pool.cli.console import print_json
from kv_pool.cli.running_pool import RunningPool
from kv_pool.cli.setting_options import takes
from kv_pool.cli.top_screen import KEYS, Choices, draw, make_screen
from kv_pool.cli.top_sources import TIMEOUT_S, MirroredStream, Watched, look_at_metrics, look_at_pool
from kv_pool.control.client import ControlClient
from kv_pool.control.network_port import read_token
from kv_pool.control.socket_path import get_default_path, list_nodes
from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.option import setting

_NUM_LINES = 40
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]")
"""The characters that a terminal sends for a key such as an arrow."""


@takes("socket node url token_file events replay interval once json")
def top(
    pool: RunningPool,
    url: str | None = setting("Read this /metrics of kv_pool, vLLM or SGLang instead.", default=None),
    token_file: str | None = setting("File with the bearer token for --url.", default=None, metavar="FILE"),
    events: str | None = setting("Follow the event stream of this PUB socket instead.", default=None),
    replay: str | None = setting("Its replay endpoint: begin with the blocks cached by now.", default=None),
    interval: float | None = setting(
        "Seconds from one look to the next. Default: 0.25, for --url 1.", default=None, min=0.05
    ),
    once: bool = setting("Print the state once, and end.", default=False),
) -> None:
    """Watch a running pool: memory, hits, evictions, sequences, prefixes, migrations; until q or Ctrl-C."""
    if sum(one is not None for one in (pool.socket or pool.node, url, events)) > 1:
        raise InvalidArgumentError("pass one of --socket, --node, --url and --events")
    with ExitStack() as stack:
        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise InvalidArgumentError(f"--url is {url!r}; it is such as http://localhost:8000/metrics")
            token = None if token_file is None else read_token(Path(token_file))
            watched = [Watched(url, partial(look_at_metrics, url, token))]
        elif events is not None:
            from kv_pool.events.subscriber import KVEventSubscriber

            subscriber = stack.enter_context(KVEventSubscriber(events, replay))
            watched = [Watched(events, MirroredStream(subscriber, events).look)]
        else:
            clients = [stack.enter_context(client) for client in _connect(pool)]
            watched = [Watched(client.path.name, partial(look_at_pool, client)) for client in clients]
        _watch(watched, interval or (0.25 if url is None else 1), pool.json, once)


def _connect(pool: RunningPool) -> list[ControlClient]:
    """Connect to the socket that the options name, or to those of all pools that this user serves."""
    found = []
    if not (pool.socket or pool.node):
        for path in (get_default_path(), *map(get_default_path, list_nodes())):
            with suppress(ControlError):
                found.append(ControlClient(path, timeout_s=TIMEOUT_S))
    return found or [pool.connect(timeout_s=TIMEOUT_S)]


def _watch(watched: list[Watched], interval_s: float, is_json: bool, is_once: bool) -> None:
    """Show the frames of a source in place, and obey keys, until `q`; or print them if that is asked for."""
    console, choices = Console(highlight=False), Choices()
    is_screen = console.is_terminal and not is_once and not is_json
    live = Live(console=console, screen=True, auto_refresh=False)
    keys = KEYS + "  tab next pool" * (len(watched) > 1)
    terminals: list[int] = []
    shown, due_s = None, 0.0
    with ExitStack() as stack:
        if is_screen:
            if sys.stdin.isatty():
                terminals.append(terminal := sys.stdin.fileno())
                stack.callback(termios.tcsetattr, terminal, termios.TCSADRAIN, termios.tcgetattr(terminal))
                tty.setcbreak(terminal)  # each key is readable at once
            stack.enter_context(live)
        while True:
            chosen = watched[choices.number % len(watched)]
            if chosen is not shown or time.monotonic() >= due_s:
                if chosen is not shown or not choices.is_paused:
                    frame = chosen.look(console.width * max(1, min(8, console.height // 8)))
                if shown is None and frame.trouble:
                    raise ControlError(frame.trouble)
                shown, due_s = chosen, time.monotonic() + interval_s
            if is_screen:
                live.update(make_screen(draw(frame, choices, *console.size, keys)), refresh=True)
            elif is_json:
                print_json(frame)
            else:
                lines = draw(frame, choices, console.width, _NUM_LINES)
                print("\n".join("".join(text for text, _ in line) for line in lines))
            sys.stdout.flush()
            if is_once:
                return
            for terminal in select.select(terminals, [], [], max(0.0, due_s - time.monotonic()))[0]:
                typed = os.read(terminal, 100).decode(errors="ignore")
                if not typed:
                    terminals.clear()
                if not all(map(choices.obey, _SEQUENCE.sub("", typed))):
                    return
