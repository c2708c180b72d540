"""Descriptions of migrations: outcomes, sizes, rates."""

from kv_pool.cli.foreign_text import escape_text
from kv_pool.migration.status import MigrationPhase, MigrationStatus


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


def describe_bytes(num_bytes: float) -> str:
    """Return a size with a decimal unit, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
