"""`kv-pool migration-status`: show the migrations of a running node, once or continuously."""

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
"""In order of importance: a narrow terminal shows only the first ones."""


def migration_status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option(help="Show only this many of the latest.", min=1)] = 20,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Show the running migrations of a node, and the last ones that ended."""
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
    """Return a table of the last `limit` migrations, oldest first, with as many columns as fit."""

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
    """Return a line for each of the last `limit` migrations that failed or is in doubt."""
    return [
        f"{escape_text(str(status.subject))}, {status.phase.value}: {escape_text(status.error_message)}"
        for status in found.migrations[-limit:]
        if status.error
    ]


def describe_row(status: MigrationStatus) -> list[str]:
    """Return the cells of a migration's row."""
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
