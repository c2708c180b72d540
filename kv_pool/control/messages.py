"""The messages of the control socket: one JSON object per line, a command and then its reply.

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

A reply is `{"result": ...}`, or `{"error": "InvalidArgumentError", "message": ...}` with the name of an error
of `kv_pool.errors`. A connection carries any number of commands, one after another.
"""

from typing import Annotated, TypeVar, get_args

import msgspec

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.ids import BlockId, NodeName, RequestId, SequenceId
from kv_pool.migration.messages import MigrationStatus
from kv_pool.tiers.tier import TierStatistics

MAX_COMMAND_BYTES = 4096

_Result = TypeVar("_Result")


class _Command(
    msgspec.Struct,
    frozen=True,
    tag_field="command",
    tag=lambda name: name.removesuffix("Command").lower(),
    forbid_unknown_fields=True,
):
    """A command, named by its class."""


class StatsCommand(_Command, frozen=True):
    """A request for `PoolStatistics`."""


class DefragCommand(_Command, frozen=True):
    """A request to compact the pool; see `GPUKVPool.defragment`."""

    max_moves: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_evictions: Annotated[int, msgspec.Meta(ge=0)] = 0


class LayoutCommand(_Command, frozen=True):
    """A request for `PoolLayout`."""


class SequencesCommand(_Command, frozen=True):
    """A request for the sequences that have blocks."""


class HoldsCommand(_Command, frozen=True):
    """A request for the holds on all blocks, or on one block."""

    block_id: Annotated[BlockId, msgspec.Meta(ge=0)] | None = None


class MigrateCommand(_Command, frozen=True):
    """A request to start a migration; see `LiveNode.migrate`. `MigrationsCommand` returns its progress."""

    target: NodeName | None = None
    sequence_id: SequenceId | RequestId | None = None
    is_move: bool = True
    max_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    backend: str = ""


class MigrationsCommand(_Command, frozen=True):
    """A request for the node's migrations, or for one of them."""

    migration_id: str | None = None


class CancelCommand(_Command, frozen=True):
    """A request to cancel a migration, unless it is too late."""

    migration_id: str


class PeersCommand(_Command, frozen=True):
    """A request for the nodes that the node knows; it asks each of them for its free blocks."""


class TiersCommand(_Command, frozen=True):
    """A request for the statistics of the pool's tiers."""


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
COMMAND_NAMES = tuple(str(one.__struct_config__.tag) for one in get_args(Command))


class DefragReport(msgspec.Struct, frozen=True):
    """The result of a compaction.

    Attributes:
        moved_blocks: number of blocks whose id changed.
        time_ms: duration, including the wait for the lock of the pool.
        fragmentation_rate_before, fragmentation_rate_after: `PoolStatistics.fragmentation_rate` before and
            after. Between the two, other threads may have allocated and released blocks.
    """

    moved_blocks: int
    time_ms: float
    fragmentation_rate_before: float
    fragmentation_rate_after: float
    run_length: int


class PeerReport(msgspec.Struct, frozen=True):
    """Another node and its latest answer.

    Attributes:
        nearness: the smallest location that both nodes share.
        round_trip_ms: from request to answer; 0 without an answer.
        error: why there is no answer; "" if there is one.
    """

    name: NodeName
    address: str
    nearness: str = ""
    num_free_blocks: int = 0
    num_blocks: int = 0
    round_trip_ms: float = 0.0
    error: str = ""


class PeerList(msgspec.Struct, frozen=True):
    """A node and the nodes that it knows."""

    name: NodeName
    address: str
    peers: list[PeerReport]


class MigrationList(msgspec.Struct, frozen=True):
    """The running migrations of a node and the last ones that ended, oldest first."""

    name: NodeName
    migrations: list[MigrationStatus]


class TierList(msgspec.Struct, frozen=True):
    """The tiers of a pool, fastest first, and the media in which prefixes of requests were hit.

    Attributes:
        hit_blocks: hit blocks by medium; GPU is the pool itself.
        num_dropped: evicted blocks that were offloaded to no tier.
    """

    hit_blocks: dict[str, int]
    tiers: list[TierStatistics]
    num_dropped: int = 0


class _Name(msgspec.Struct):
    command: str


class _Reply(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"")
    error: str | None = None
    message: str = ""


def encode_command(command: Command) -> bytes:
    """Return a command as one line. Raises InvalidArgumentError for text that JSON cannot represent."""
    try:
        return msgspec.json.encode(command) + b"\n"
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"this command cannot be sent: {error}") from error


def decode_command(line: bytes) -> Command:
    """Return the command in a line. Raises ControlError for any other line, with the valid form."""
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


def encode_result(result: msgspec.Struct) -> bytes:
    """Return the reply to a command that succeeded, as one line.

    Raises:
        InvalidArgumentError: JSON cannot represent the result, such as a name with a lone surrogate.
    """
    try:
        return msgspec.json.encode({"result": result}) + b"\n"
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"the reply cannot be sent: {error}") from error


def encode_error(error: Exception) -> bytes:
    """Return the reply to a command that raised `error`, as one line. Foreign errors become ControlError."""
    name, message = find_error_name(error), str(error)
    if name is None:
        name, message = ControlError.__name__, f"the pool raised {type(error).__name__}: {message}"
    sendable = message.encode(errors="backslashreplace").decode()
    return msgspec.json.encode({"error": name, "message": sendable}) + b"\n"


def decode_reply(line: bytes, result_type: type[_Result]) -> _Result:
    """Return the result in a reply.

    Raises:
        KVPoolError: the error that the reply reports.
        ControlError: the line is not a reply.
    """
    try:
        reply = msgspec.json.decode(line, type=_Reply)
        if reply.error is None:
            return msgspec.json.decode(reply.result, type=result_type)
    except UNDECODABLE as error:
        raise ControlError(
            f"the reply is not one of this version of kv_pool: {error}. Does the server run another version?"
        ) from error
    raise ERRORS_BY_NAME.get(reply.error, ControlError)(reply.message)
