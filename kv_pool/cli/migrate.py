"""`kv-pool migrate`: a sequence of a running pool goes to another node."""

import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn

from kv_pool.cli.console import print_error, print_json
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.migration_lines import describe_bytes, describe_outcome
from kv_pool.cli.progress import make_progress_bar
from kv_pool.cli.signals import EndedBySignal
from kv_pool.control.client import ControlClient
from kv_pool.error_names import ERRORS_BY_NAME
from kv_pool.errors import MigrationCancelledError, MigrationError
from kv_pool.migration.status import MigrationPhase, MigrationStatus
from kv_pool.replay.capacity import parse_rate

_SECONDS_BETWEEN_LOOKS = 0.05


def migrate(
    sequence_id: Annotated[
        str,
        typer.Option(
            metavar="ID|newest",
            help="Which sequence, or request; see kv-pool sequences. The newest has the highest id, or was "
            "admitted last.",
        ),
    ],
    target_node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where to; see kv-pool peers. Default: the cheapest to reach of those with room.",
        ),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="The sequence stays here, too.")] = False,
    max_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bytes a second at most, such as 100MB/s.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How the bytes are read: tcp. Default: the first that works of the node's."
        ),
    ] = None,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Move a sequence, with its bytes, from a running pool to another node; Ctrl-C gives it up."""
    number = parse_sequence_id(sequence_id)
    rate = 0.0 if max_rate is None else parse_rate(max_rate)
    with ControlClient(socket, node=node, not_node=target_node) as client:
        status = client.migrate(
            number, target_node, is_move=not copy, max_bytes_per_s=rate, backend=backend or ""
        )
        try:
            status = _follow(client, status)
        except EndedBySignal:
            client.cancel_migration(status.migration_id)
            try:
                _show(_follow(client, status), json)
            except MigrationError as error:
                print_error(error)
            raise
    _show(status, json)


def parse_sequence_id(text: str) -> int | str | None:
    """Return a sequence's number or a request's id; None for `newest`."""
    if text == "newest":
        return None
    return int(text) if text.isascii() and text.isdigit() else text


def _follow(client: ControlClient, status: MigrationStatus) -> MigrationStatus:
    """Show how far it is until it has ended."""
    with make_progress_bar(
        escape(escape_text(f"{status.subject} to {status.peer}")), MofNCompleteColumn()
    ) as bar:
        task = bar.add_task("", total=None, live="")
        while not status.phase.is_ended:
            # The node has no way to tell us; a look costs it some microseconds.
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            status = client.get_migration(status.migration_id)
            bar.update(
                task,
                total=status.num_blocks or None,
                completed=status.num_done_blocks,
                live=f"{status.phase.value}, {describe_bytes(status.bytes_per_s)}/s",
            )
    return status


def _show(status: MigrationStatus, json: bool) -> None:
    """Print what came of the migration. Raises MigrationError where it was not done."""
    if json:
        print_json(status)
    elif status.phase is not MigrationPhase.FAILED:
        print(describe_outcome(status))
    if status.phase is not MigrationPhase.DONE:
        _raise(status)


def _raise(status: MigrationStatus) -> None:
    """Raise the error as which the migration failed."""
    if status.phase is MigrationPhase.CANCELLED:
        raise MigrationCancelledError(f"{status.subject} stays: {status.error_message or 'cancelled'}")
    kind = ERRORS_BY_NAME.get(status.error, MigrationError)
    raise kind(f"{status.subject} stays; node {status.peer} did not take it: {status.error_message}")
