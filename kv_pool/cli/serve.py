"""`kv-pool serve`: run a pool under a live replay, for commands from a second terminal."""

import select
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

from rich.console import Console

from kv_pool.cli.publishing import describe_publisher, open_publisher
from kv_pool.cli.setting_options import takes_given
from kv_pool.cli.signals import defer_signals
from kv_pool.control.live_node import LiveNode
from kv_pool.control.serve_settings import ServeSettings, check_panels, read_settings
from kv_pool.control.server import ControlServer
from kv_pool.lab.live.live_replay import LiveReplay
from kv_pool.option import setting
from kv_pool.threads import submit

_SECONDS_BETWEEN_LOOKS = 0.5


@takes_given(ServeSettings)
def serve(
    given: dict[str, object],
    config: str | None = setting(
        "A TOML file with these options, such as block_size = 16. The command line overrides it.",
        default=None,
    ),
) -> None:
    """Replay a trace through a pool in real time, and serve the pool to kv-pool stats, defrag and so on.

    With --name the pool is a node: kv-pool migrate moves sequences between nodes.
    """
    settings = read_settings(config, given)
    check_panels(settings)
    port = settings.network_port
    with (
        open_publisher(settings.publish, settings.publish_replay, settings.publish_config) as publisher,
        ExitStack() as stack,
    ):
        replay = LiveReplay(settings, publisher=publisher)
        tiers = None
        if replay.tiers is not None:
            stack.callback(replay.tiers.close)
            tiers = replay.tiers.get_report
        asked_to_end = stack.enter_context(defer_signals())
        node = None
        if settings.name is not None:
            node = stack.enter_context(LiveNode(replay.pool, settings, owner=replay))
        server = ControlServer(
            replay.pool,
            settings.socket,
            node=node,
            tiers=tiers,
            publisher=publisher,
            port=port,
            web=settings.web,
        )
        stack.enter_context(server)
        where = "" if node is None else f" --node {node.migrator.name}"
        where = where if settings.socket is None else f" --socket {server.path}"
        events = "" if publisher is None else f", or: {describe_publisher(publisher)}"
        print(
            f"a pool of {settings.blocks:,} blocks of {settings.block_size} tokens is served at "
            f"{server.path}; in a second terminal: kv-pool stats{where}{events}",
            flush=True,
        )
        if server.url is not None:
            print(f"its {'page' if settings.web else 'port'} is at {server.url}", flush=True)
        if node is not None:
            print(describe_node(node), flush=True)
        _run(replay, settings.duration, asked_to_end)


def describe_node(node: LiveNode) -> str:
    """Return one line with the address of a node and a command that starts another one."""
    name, address = node.migrator.name, node.migrator.address
    another = "b" if name == "a" else "a"
    return (
        f"node {name} listens at {address}; for another one: kv-pool serve --name {another} "
        f"--registry {address}"
    )


def _run(replay: LiveReplay, duration: float | None, asked_to_end: int) -> None:
    """Run the replay until `duration` has passed or `asked_to_end` is readable, and show its progress.

    Raises what `LiveReplay.run` raises.
    """
    stop = Event()
    console = Console(stderr=True)
    with ThreadPoolExecutor(1) as executor, console.status("", refresh_per_second=4) as status:
        done = submit(executor, "kv_pool replay", replay.run, stop)
        try:
            while not done.done() and (duration is None or replay.get_progress().seconds < duration):
                if select.select([asked_to_end], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
                    break
                if sys.stderr.isatty():
                    status.update(_describe(replay))
        finally:
            stop.set()
        done.result()


def _describe(replay: LiveReplay) -> str:
    progress = replay.get_progress()
    statistics = replay.pool.get_statistics()
    hits = ""
    if statistics.looked_up_blocks:
        hits = f"{(statistics.hit_blocks or 0) / statistics.looked_up_blocks:.1%} hits, "
    return (
        f"{progress.seconds:.0f} s: {statistics.utilization:.0%} in use, {hits}"
        f"{statistics.fragmentation_rate:.1%} fragmented, {progress.requests_per_s:.1f} requests/s, "
        f"{progress.num_running} running, {progress.num_waiting} waiting"
    )
