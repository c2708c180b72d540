"""`kv-pool migration-status`: the migrations of a running node, now or as they go on."""

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kv_pool.cli import watching
from kv_pool.cli.console import fit_table, print_json, print_table
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.cli.migration_lines import describe_bytes
from kv_pool.control.client import ControlClient
from kv_pool.control.node_reports import MigrationList
from kv_pool.migration.status import MigrationStatus

_TITLES = ("what", "phase", "how", "blocks", "bytes", "rate", "time")
"""Those that matter most come first."""


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
        if watch:
            watching.watch(lambda: draw(client.list_migrations(), limit, console), console)
        found = client.list_migrations()
    if json:
        print_json(found)
    else:
        print_table(draw(found, limit, console), console)
        for line in list_errors(found, limit):
            print(line)


def draw(found: MigrationList, limit: int, fitting: Console | None = None) -> Table:
    """The last `limit` of them, oldest first; without their last columns where these do not fit."""

    def lay_out(num_columns: int) -> Table:
        return _lay_out(found, limit, num_columns)

    return lay_out(len(_TITLES)) if fitting is None else fit_table(lay_out, len(_TITLES), fitting)


def _lay_out(found: MigrationList, limit: int, num_columns: int) -> Table:
    num_migrations = len(found.migrations)
    table = Table(
        title=make_cell(f"node {found.name}: {num_migrations} migration{'s' * (num_migrations != 1)}"),
        title_justify="left",
        box=box.SIMPLE,
        show_edge=False,
        padding=0,
    )
    for title in _TITLES[:num_columns]:
        is_number = title in ("blocks", "bytes", "rate", "time")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    for status in found.migrations[-limit:]:
        table.add_row(*map(make_cell, describe_row(status)[:num_columns]))
    return table


def list_errors(found: MigrationList, limit: int) -> list[str]:
    """A line for each of the last `limit` that has failed, or is in doubt."""
    return [
        f"{escape_text(str(status.subject))}, {status.phase.value}: {escape_text(status.error_message)}"
        for status in found.migrations[-limit:]
        if status.error
    ]


def describe_row(status: MigrationStatus) -> list[str]:
    """A migration as the cells of a row."""
    verb = "move" if status.is_move else "copy"
    to = "to" if status.direction == "out" else "from"
    return [
        status.subject,
        status.phase.value,
        f"{verb} {to} {status.peer}",
        f"{status.num_done_blocks}/{status.num_blocks}",
        describe_bytes(status.num_bytes),
        f"{describe_bytes(status.bytes_per_s)}/s",
        f"{status.elapsed_s:.2f} s",
    ]
