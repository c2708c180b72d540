"""`kv-pool serve`: a pool under a live replay, to be asked from a second terminal."""

import select
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Annotated

import typer
from rich.console import Console

from kv_pool.cli import options
from kv_pool.cli.publishing import describe_publisher, open_publisher
from kv_pool.cli.signals import defer_signals
from kv_pool.control.live_node import LiveNode
from kv_pool.control.live_replay import LiveReplay
from kv_pool.control.serve_settings import ServeSettings, check_is_node, read_settings
from kv_pool.control.server import ControlServer
from kv_pool.replay.trace import BUNDLED_TRACES
from kv_pool.threads import submit

_SECONDS_BETWEEN_LOOKS = 0.5
_DEFAULTS = ServeSettings()
_DEFRAG = "Compaction"
_NODES = "Nodes"
_TIERS = "Tiers"


def serve(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help=f"A trace file, or one of: {', '.join(BUNDLED_TRACES)}. Default: {_DEFAULTS.trace}.",
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help=f"Capacity in blocks. Default: {_DEFAULTS.blocks}.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help=f"Tokens per block. Default: {_DEFAULTS.block_size}.")
    ] = None,
    run_length: Annotated[
        int | None,
        typer.Option(help=f"Fragmentation is about runs of so many blocks. Default: {_DEFAULTS.run_length}."),
    ] = None,
    defrag_threshold: Annotated[
        float | None,
        typer.Option(
            help="Compact above this fragmentation rate; 1 for never. "
            f"Default: {_DEFAULTS.defrag_threshold}.",
            rich_help_panel=_DEFRAG,
        ),
    ] = None,
    defrag_interval: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds between two looks at the rate. Default: {_DEFAULTS.defrag_interval}.",
            rich_help_panel=_DEFRAG,
        ),
    ] = None,
    defrag_moves: Annotated[
        int | None,
        typer.Option(
            help=f"Blocks moved per step of the engine. Default: {_DEFAULTS.defrag_moves}.",
            rich_help_panel=_DEFRAG,
        ),
    ] = None,
    max_evictions: Annotated[
        int | None,
        typer.Option(
            help="Cached blocks that such a step may lose, where too few free ones are empty. "
            f"Default: {_DEFAULTS.max_evictions}.",
            rich_help_panel=_DEFRAG,
        ),
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help=f"Requests come so much faster. Default: {_DEFAULTS.speedup}.")
    ] = None,
    trace_block_size: options.TraceBlockSize = None,
    timestamp_unit: Annotated[str | None, typer.Option(help="Of the trace: ms or s. Default: ms.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds. Default: until Ctrl-C.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Make the pool a node of this name: sequences can move from it and to it.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where other nodes reach it; port 0 for a free one. Default: 127.0.0.1:0.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=HOST:PORT", help="Another node; may be repeated.", rich_help_panel=_NODES),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file with other nodes ([[peers]]) and what it costs to reach them ([links.rack]).",
            rich_help_panel=_NODES,
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|HOST:PORT",
            help="The node that tells who else is there. Default: this one, for others.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    secret_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What all nodes know, 16 bytes or more. Default: a file of this user's, made when it is "
            "needed, which does for nodes of one machine.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    block_bytes: Annotated[
        int | None,
        typer.Option(
            help="Of each block of a node, or of a pool with tiers; the bytes are made up. "
            f"Default: {_DEFAULTS.block_bytes}.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    max_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="What the node reads in a second at most, such as 100MB/s. Default: no limit.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    host_tier: Annotated[
        int | None,
        typer.Option(
            metavar="BLOCKS",
            help="Keep so many blocks in host memory when the pool takes theirs anew.",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    disk_tier: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep blocks here when memory has no room for them; they outlive a restart.",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    disk_tier_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="BLOCKS", help="How many. Default: ten times the pool's.", rich_help_panel=_TIERS
        ),
    ] = None,
    publish: options.Publish = None,
    publish_replay: options.PublishReplay = None,
    publish_config: options.PublishConfig = None,
    socket: Annotated[str | None, typer.Option(help="The control socket. Default: this user's own.")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="A TOML file with these options, block_size = 16 and so on; the command line wins."
        ),
    ] = None,
) -> None:
    """Run a pool under a trace in real time; ask it with kv-pool stats, defrag and layout meanwhile.

    With --name the pool is a node, and sequences move between it and others: kv-pool migrate.
    """
    # All options, by the names that they have in a file.
    given = {option: value for option, value in locals().items() if option != "config"}
    settings = read_settings(config, given)
    check_is_node(settings)
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
        server = stack.enter_context(ControlServer(replay.pool, settings.socket, node=node, tiers=tiers))
        where = "" if node is None else f" --node {node.migrator.name}"
        where = where if settings.socket is None else f" --socket {server.path}"
        events = "" if publisher is None else f", or: {describe_publisher(publisher)}"
        first_line = (
            f"a pool of {settings.blocks:,} blocks of {settings.block_size} tokens is served at "
            f"{server.path}; in a second terminal: kv-pool stats{where}{events}"
        )
        print(first_line, flush=True)
        if node is not None:
            print(f"{describe_node(node)}", flush=True)
        _run(replay, settings.duration, asked_to_end)


def describe_node(node: LiveNode) -> str:
    """Where a node is, and how another one gets to know it."""
    name, address = node.migrator.name, node.migrator.address
    another = "b" if name == "a" else "a"
    return (
        f"node {name} listens at {address}; for another one: kv-pool serve --name {another} "
        f"--registry {address}"
    )


def _run(replay: LiveReplay, duration: float | None, asked_to_end: int) -> None:
    """Let it run until its time is over or the pipe can be read; show how it does. Raises what ended it."""
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
    hit_rate = statistics.hit_blocks / (statistics.looked_up_blocks or 1)
    return (
        f"{progress.seconds:.0f} s: {statistics.utilization:.0%} in use, {hit_rate:.1%} hits, "
        f"{statistics.fragmentation_rate:.1%} fragmented, {progress.requests_per_s:.1f} requests/s, "
        f"{progress.num_running} running, {progress.num_waiting} waiting"
    )
