"""`kv-pool migrate` and `migration-status`: migrate a sequence of a running node, and show its migrations."""

import time
from typing import Any

from rich import box
from rich.console import Console

from kv_pool.cli.console import (
    describe_bytes,
    lay_out,
    print_error,
    print_json,
    print_report,
    refresh_forever,
    show_progress,
)
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.running_pool import WATCH, RunningPool
from kv_pool.cli.setting_options import takes
from kv_pool.cli.signals import EndedBySignal
from kv_pool.control.client import ControlClient
from kv_pool.control.messages import MigrationList
from kv_pool.error_names import ERRORS_BY_NAME
from kv_pool.errors import MigrationCancelledError, MigrationError
from kv_pool.ids import NodeName, RequestId, SequenceId
from kv_pool.lab.tables import Column, Report, ReportTable, make_table
from kv_pool.migration.messages import MigrationPhase, MigrationStatus
from kv_pool.option import setting
from kv_pool.quantities import parse_rate

_SECONDS_BETWEEN_LOOKS = 0.05

_PLAIN: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE, "show_edge": False, "padding": 0}


@takes("sequence_id target_node copy max_rate backend socket node json")
def migrate(
    pool: RunningPool,
    sequence_id: str = setting(
        "The sequence, or request; see kv-pool sequences. newest: the highest sequence id, or the request "
        "admitted last.",
        metavar="ID|newest",
    ),
    target_node: str | None = setting(
        "The target; see kv-pool peers. Default: the cheapest node with enough free blocks, the same kind of "
        "pool and the same layout of blocks.",
        default=None,
        metavar="NAME",
    ),
    copy: bool = setting("Copy: keep the sequence on this node, too.", default=False),
    max_rate: float | None = setting(
        "Maximum rate, such as 100MB/s.", default=None, metavar="RATE", parse=parse_rate
    ),
    backend: str | None = setting(
        "How the target reads the bytes, such as tcp. Default: the node's first that works.",
        default=None,
        metavar="NAME",
    ),
) -> None:
    """Move a sequence and its bytes from a running pool to another node; Ctrl-C cancels."""
    number = parse_sequence_id(sequence_id)
    target = None if target_node is None else NodeName(target_node)
    with pool.connect(not_node=target) as client:
        status = client.migrate(
            number, target, is_move=not copy, max_bytes_per_s=max_rate or 0.0, backend=backend or ""
        )
        try:
            status = _follow(client, status)
        except EndedBySignal:
            client.cancel_migration(status.migration_id)
            try:
                _show(_follow(client, status), pool.json)
            except MigrationError as error:
                print_error(error)
            raise
    _show(status, pool.json)


def parse_sequence_id(text: str) -> SequenceId | RequestId | None:
    """Return a sequence's number or a request's id; None for `newest`."""
    if text == "newest":
        return None
    return SequenceId(int(text)) if text.isascii() and text.isdigit() else RequestId(text)


def _follow(client: ControlClient, status: MigrationStatus) -> MigrationStatus:
    """Show the progress of a migration until it ends, and return its last status."""
    with show_progress(f"{status.subject} to {status.peer}") as notify:
        while not status.phase.is_ended:
            # Polling costs the node some microseconds; it cannot notify us.
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            status = client.get_migration(status.migration_id)
            notify(
                f"{status.num_done_blocks} of {status.num_blocks} blocks, {status.phase.value}, "
                f"{describe_bytes(status.bytes_per_s)}/s",
                status.num_done_blocks / status.num_blocks if status.num_blocks else None,
            )
    return status


def _show(status: MigrationStatus, json: bool) -> None:
    """Print the outcome of a migration. Raises MigrationError if it is not done."""
    if json:
        print_json(status)
    elif status.phase is not MigrationPhase.FAILED:
        print(describe_outcome(status))
    if status.phase is MigrationPhase.CANCELLED:
        raise MigrationCancelledError(f"{status.subject} stays: {status.error_message or 'cancelled'}")
    if status.phase is not MigrationPhase.DONE:
        kind = ERRORS_BY_NAME.get(status.error, MigrationError)
        raise kind(f"{status.subject} stays; node {status.peer} did not take it: {status.error_message}")


def describe_outcome(status: MigrationStatus) -> str:
    """Return one line on the outcome of a migration, or on its phase; without the error of a failed one."""
    subject, peer = escape_text(status.subject), escape_text(status.peer)
    verb = "moved" if status.is_move else "copied"
    to = "to" if status.direction == "out" else "from"
    if status.phase is not MigrationPhase.DONE:
        return f"{subject} {to} node {peer}: {status.phase.value}"
    pieces = "1 piece" if status.num_descriptors == 1 else f"{status.num_descriptors} pieces"
    present = f"; {status.num_present_blocks} of them were there already" if status.num_present_blocks else ""
    return (
        f"{subject} {verb} {to} node {peer}: {status.num_blocks} blocks, "
        f"{describe_bytes(status.num_bytes)} in {pieces}, "
        f"{status.elapsed_s * 1000:.0f} ms{present}"
    )


@takes("watch limit socket node json")
def migration_status(
    pool: RunningPool,
    watch: bool = setting(WATCH, default=False),
    limit: int = setting("Show only this many of the latest.", default=20, min=1),
) -> None:
    """Show the running migrations of a node, and the last ones that ended."""
    with pool.connect() as client:
        if watch:
            console = Console()
            refresh_forever(
                lambda: lay_out(tabulate(client.list_migrations(), limit), console, **_PLAIN), console
            )
        found = client.list_migrations()
    print_report(Report(found, [tabulate(found, limit), *list_errors(found, limit)]), pool.json, **_PLAIN)


def tabulate(found: MigrationList, limit: int) -> ReportTable:
    """Return a table of the last `limit` migrations, oldest first."""
    num_migrations = len(found.migrations)
    columns = (
        Column("what", "subject", str),
        Column("phase", "phase.value", str),
        Column("how", _describe_way, str),
        Column("blocks", lambda status: f"{status.num_done_blocks}/{status.num_blocks}", str),
        Column("bytes", "num_bytes", describe_bytes),
        Column("rate", "bytes_per_s", lambda rate: f"{describe_bytes(rate)}/s"),
        Column("time", "elapsed_s", "{:.2f} s".format),
    )
    return make_table(
        columns,
        found.migrations[-limit:],
        texts=("what", "phase", "how"),
        title=f"node {found.name}: {num_migrations} migration{'s' * (num_migrations != 1)}",
    )


def _describe_way(status: MigrationStatus) -> str:
    verb = "move" if status.is_move else "copy"
    to = "to" if status.direction == "out" else "from"
    return f"{verb} {to} {status.peer}"


def list_errors(found: MigrationList, limit: int) -> list[str]:
    """Return a line for each of the last `limit` migrations that failed or is in doubt."""
    return [
        f"{status.subject}, {status.phase.value}: {status.error_message}"
        for status in found.migrations[-limit:]
        if status.error
    ]
