"""Migrations in words: sizes, rates, one line each."""

from kv_pool.cli.foreign_text import escape_text
from kv_pool.migration.status import MigrationPhase, MigrationStatus


def describe_outcome(status: MigrationStatus) -> str:
    """What came of a migration that has ended, or how far it is; the error of a failed one is not in it."""
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


def describe_bytes(num_bytes: float) -> str:
    """With a unit, so that there are few digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
