"""`kv-pool migration-status`: the migrations of a running node, now or as they go on."""

import time
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kv_pool.cli.console import print_json
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.migration_lines import describe_bytes
from kv_pool.control.client import ControlClient
from kv_pool.control.node_reports import MigrationList
from kv_pool.migration.status import MigrationStatus

_SECONDS_BETWEEN_LOOKS = 0.5


def migration_status(
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing it, until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option(help="Only the last so many.", min=1)] = 20,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Show the migrations of a running node: those under way, and the last that have ended."""
    console = Console()
    with ControlClient(socket, node=node) as client:
        found = client.list_migrations()
        if json:
            print_json(found)
        elif not watch:
            console.print(draw(found, limit))
            for line in list_errors(found, limit):
                print(line)
        else:
            with Live(draw(found, limit), console=console, auto_refresh=False) as live:
                while True:
                    # Slow enough to be read; a look costs the node some microseconds.
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
                    live.update(draw(client.list_migrations(), limit), refresh=True)


def draw(found: MigrationList, limit: int) -> Table:
    """The last `limit` of them, oldest first."""
    table = Table(
        title=f"node {found.name}: {len(found.migrations)} migration{'s' * (len(found.migrations) != 1)}",
        title_justify="left",
        box=box.SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for title in ("what", "how", "phase", "blocks", "bytes", "rate", "time"):
        is_number = title in ("blocks", "bytes", "rate", "time")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    for status in found.migrations[-limit:]:
        table.add_row(*describe_row(status))
    return table


def list_errors(found: MigrationList, limit: int) -> list[str]:
    """A line for each of the last `limit` that has failed, or is in doubt."""
    return [
        f"{status.subject}, {status.phase.value}: {status.error_message}"
        for status in found.migrations[-limit:]
        if status.error
    ]


def describe_row(status: MigrationStatus) -> list[str]:
    """A migration as the cells of a row."""
    verb = "move" if status.is_move else "copy"
    to = "to" if status.direction == "out" else "from"
    return [
        status.subject,
        f"{verb} {to} {status.peer}",
        status.phase.value,
        f"{status.num_done_blocks}/{status.num_blocks}",
        describe_bytes(status.num_bytes),
        f"{describe_bytes(status.bytes_per_s)}/s",
        f"{status.elapsed_s:.2f} s",
    ]
