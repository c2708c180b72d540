"""What goes over the control socket: one JSON object a line, a command there, its reply back.

| command | fields | result |
|---|---|---|
| `{"command": "stats"}` | | `PoolStatistics` |
| `{"command": "defrag"}` | `max_moves`, `max_evictions` | `DefragReport` |
| `{"command": "layout"}` | | `PoolLayout` |
| `{"command": "sequences"}` | | `SequenceList` |
| `{"command": "holds"}` | `block_id` | `HoldList` |
| `{"command": "migrate"}` | as `MigrateCommand` | `MigrationStatus` |
| `{"command": "migrations"}` | `migration_id` | `MigrationList` |
| `{"command": "cancel"}` | `migration_id` | `MigrationStatus` |
| `{"command": "peers"}` | | `PeerList` |
| `{"command": "tiers"}` | | `TierList` |

A reply is `{"result": ...}`, or `{"error": "InvalidArgumentError", "message": ...}` with the name of one of
`kv_pool.errors`. Several commands may go over one connection, one after another.
"""

from typing import Annotated, TypeVar

import msgspec

from kv_pool.control.node_reports import MigrationList, PeerList, TierList
from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.migration.status import MigrationStatus
from kv_pool.reports.holds import HoldList
from kv_pool.reports.layout import PoolLayout
from kv_pool.reports.sequences import SequenceList
from kv_pool.reports.statistics import PoolStatistics

MAX_COMMAND_BYTES = 4096

_Result = TypeVar("_Result")


class StatsCommand(msgspec.Struct, frozen=True, tag_field="command", tag="stats", forbid_unknown_fields=True):
    """Asks for `PoolStatistics`."""


class DefragCommand(
    msgspec.Struct, frozen=True, tag_field="command", tag="defrag", forbid_unknown_fields=True
):
    """Has the pool compacted; see `GPUKVPool.defragment`."""

    max_moves: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_evictions: Annotated[int, msgspec.Meta(ge=0)] = 0


class LayoutCommand(
    msgspec.Struct, frozen=True, tag_field="command", tag="layout", forbid_unknown_fields=True
):
    """Asks for `PoolLayout`."""


class SequencesCommand(
    msgspec.Struct, frozen=True, tag_field="command", tag="sequences", forbid_unknown_fields=True
):
    """Asks for the sequences that hold blocks."""


class HoldsCommand(msgspec.Struct, frozen=True, tag_field="command", tag="holds", forbid_unknown_fields=True):
    """Asks which holds keep blocks, or one block, in place."""

    block_id: Annotated[int, msgspec.Meta(ge=0)] | None = None


class MigrateCommand(
    msgspec.Struct, frozen=True, tag_field="command", tag="migrate", forbid_unknown_fields=True
):
    """Has a migration begun; see `LiveNode.migrate`. Not waited for: ask with `MigrationsCommand`."""

    target: str | None = None
    sequence_id: int | str | None = None
    is_move: bool = True
    max_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    backend: str = ""


class MigrationsCommand(
    msgspec.Struct, frozen=True, tag_field="command", tag="migrations", forbid_unknown_fields=True
):
    """Asks for the node's migrations, or for one of them."""

    migration_id: str | None = None


class CancelCommand(
    msgspec.Struct, frozen=True, tag_field="command", tag="cancel", forbid_unknown_fields=True
):
    """Has a migration given up, if it is not too late."""

    migration_id: str


class PeersCommand(msgspec.Struct, frozen=True, tag_field="command", tag="peers", forbid_unknown_fields=True):
    """Asks for the nodes that the node knows; each is asked for its room."""


class TiersCommand(msgspec.Struct, frozen=True, tag_field="command", tag="tiers", forbid_unknown_fields=True):
    """Asks for the pool's tiers."""


NodeCommand = MigrateCommand | MigrationsCommand | CancelCommand | PeersCommand
Command = (
    StatsCommand
    | DefragCommand
    | LayoutCommand
    | SequencesCommand
    | HoldsCommand
    | TiersCommand
    | NodeCommand
)
COMMAND_NAMES = (
    "stats",
    "defrag",
    "layout",
    "sequences",
    "holds",
    "tiers",
    "migrate",
    "migrations",
    "cancel",
    "peers",
)


class DefragReport(msgspec.Struct, frozen=True):
    """What a compaction did.

    Attributes:
        moved_blocks: how many changed their id.
        time_ms: what it took, waiting for the pool included.
        fragmentation_rate_before, fragmentation_rate_after: `PoolStatistics.fragmentation_rate` of the
            moments before and after, in between which others may have taken and given back blocks.
    """

    moved_blocks: int
    time_ms: float
    fragmentation_rate_before: float
    fragmentation_rate_after: float
    run_length: int


Result = (
    PoolStatistics
    | DefragReport
    | PoolLayout
    | SequenceList
    | HoldList
    | MigrationStatus
    | MigrationList
    | PeerList
    | TierList
)


class _Name(msgspec.Struct):
    command: str


class _Reply(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"")
    error: str | None = None
    message: str = ""


def encode_command(command: Command) -> bytes:
    """A line, with its end. Raises InvalidArgumentError for text that has no form in JSON."""
    try:
        return msgspec.json.encode(command) + b"\n"
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"this command can not be sent: {error}") from error


def decode_command(line: bytes) -> Command:
    """The command in a line. Raises ControlError for what is none, with what would be one."""
    try:
        name = msgspec.json.decode(line, type=_Name).command
        if name not in COMMAND_NAMES:
            raise ControlError(f"unknown command {name!r}; known are {', '.join(COMMAND_NAMES)}")
        command: Command = msgspec.json.decode(line, type=Command)
        return command
    except UNDECODABLE as error:
        raise ControlError(
            f'a command is one line of JSON such as {{"command": "stats"}}: {error}'
        ) from error


def encode_result(result: Result) -> bytes:
    """The reply of a command that did what it should; a line.

    Raises:
        InvalidArgumentError: it has no form in JSON, such as a name with a lone surrogate.
    """
    try:
        return msgspec.json.encode({"result": result}) + b"\n"
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"the reply can not be sent: {error}") from error


def encode_error(error: Exception) -> bytes:
    """The reply of a command that raised this; a line. What is no error of ours goes as ControlError."""
    name, message = find_error_name(error), str(error)
    if name is None:
        name, message = ControlError.__name__, f"the pool raised {type(error).__name__}: {message}"
    sendable = message.encode(errors="backslashreplace").decode()
    return msgspec.json.encode({"error": name, "message": sendable}) + b"\n"


def decode_reply(line: bytes, result_type: type[_Result]) -> _Result:
    """The result in a reply.

    Raises:
        KVPoolError: the one that the reply tells of.
        ControlError: this is no reply.
    """
    try:
        reply = msgspec.json.decode(line, type=_Reply)
        if reply.error is None:
            return msgspec.json.decode(reply.result, type=result_type)
    except UNDECODABLE as error:
        raise ControlError(
            f"the answer is not one of this version of kv_pool: {error}. Is another version served?"
        ) from error
    raise ERRORS_BY_NAME.get(reply.error, ControlError)(reply.message)
