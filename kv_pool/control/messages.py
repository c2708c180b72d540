"""The requests and replies of the control socket: JSON over HTTP.

| request | arguments | result |
|---|---|---|
| `GET /v1/stats` | | `PoolStatistics` |
| `POST /v1/defrag` | `max_moves`, `max_evictions` | `DefragReport` |
| `GET /v1/layout` | | `PoolLayout` |
| `GET /v1/sequences` | | `SequenceList` |
| `GET /v1/holds` | `block_id` | `HoldList` |
| `POST /v1/migrate` | as `MigrateCommand` | `MigrationStatus` |
| `GET /v1/migrations` | `migration_id` | `MigrationList` |
| `POST /v1/cancel` | `migration_id` | `MigrationStatus` |
| `GET /v1/peers` | | `PeerList` |
| `GET /v1/tiers` | | `TierList` |
| `GET /v1/reading` | | `PoolReading` |
| `GET /v1/view` | `num_cells`, `num_sequences`, `num_prefixes` | `PoolView` |
| `GET /v1/history` | | `PoolHistory` |
| `GET /v1/watch` | | a stream of server-sent events, see `Watch` |

The arguments of GET are in the query, those of POST in the body, a JSON object. An error has a status of 400
or more and the body `{"error": "InvalidArgumentError", "message": ...}`, with the name of an error of
`kv_pool.errors`.
"""

from http import HTTPStatus
from typing import Annotated, ClassVar, TypeVar
from urllib.parse import urlencode

import msgspec

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import ControlError, InvalidArgumentError, describe_known
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.ids import BlockId, NodeName, RequestId, SequenceId
from kv_pool.migration.messages import MigrationStatus
from kv_pool.reports.tiers import TierList as TierList

MAX_COMMAND_BYTES = 4096

_Result = TypeVar("_Result")


class Command(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A command, named by its class.

    Attributes:
        method: GET for a command that only reads, POST for one that changes the pool or its node.
        place: where it is carried out. At the "pool" one at a time, under the guard of the server; "readings"
            one at a time without it; at the "node", beside others, those that may wait for other nodes.
    """

    method: ClassVar[str] = "GET"
    place: ClassVar[str] = "pool"


class StatsCommand(Command, frozen=True):
    """A request for `PoolStatistics`."""


class DefragCommand(Command, frozen=True):
    """A request to compact the pool; see `GPUKVPool.defragment`."""

    method: ClassVar[str] = "POST"
    max_moves: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_evictions: Annotated[int, msgspec.Meta(ge=0)] = 0


class LayoutCommand(Command, frozen=True):
    """A request for `PoolLayout`."""


class SequencesCommand(Command, frozen=True):
    """A request for the sequences that have blocks."""


class HoldsCommand(Command, frozen=True):
    """A request for the holds on all blocks, or on one block."""

    block_id: Annotated[BlockId, msgspec.Meta(ge=0)] | None = None


class MigrateCommand(Command, frozen=True):
    """A request to start a migration; see `LiveNode.migrate`. `MigrationsCommand` returns its progress."""

    method: ClassVar[str] = "POST"
    place: ClassVar[str] = "node"
    target: NodeName | None = None
    sequence_id: SequenceId | RequestId | None = None
    is_move: bool = True
    max_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    backend: str = ""


class MigrationsCommand(Command, frozen=True):
    """A request for the node's migrations, or for one of them."""

    place: ClassVar[str] = "node"
    migration_id: str | None = None


class CancelCommand(Command, frozen=True):
    """A request to cancel a migration, unless it is too late."""

    method: ClassVar[str] = "POST"
    place: ClassVar[str] = "node"
    migration_id: str


class PeersCommand(Command, frozen=True):
    """A request for the nodes that the node knows; it asks each of them for its free blocks."""

    place: ClassVar[str] = "node"


class TiersCommand(Command, frozen=True):
    """A request for the statistics of the pool's tiers."""


class ReadingCommand(Command, frozen=True):
    """A request for `PoolReading`."""

    place: ClassVar[str] = "readings"


class ViewCommand(Command, frozen=True):
    """A request for `PoolView`; see `read_view`."""

    place: ClassVar[str] = "readings"
    num_cells: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 256
    num_sequences: Annotated[int, msgspec.Meta(ge=0)] = 20
    num_prefixes: Annotated[int, msgspec.Meta(ge=0)] = 10


class HistoryCommand(Command, frozen=True):
    """A request for the pool's use and rates in the last minutes."""

    place: ClassVar[str] = "readings"


COMMANDS = {kind.__name__.removesuffix("Command").lower(): kind for kind in Command.__subclasses__()}
"""The commands by name, which ends the path of their requests."""

PATH = "/v1/"


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


class _Error(msgspec.Struct):
    error: str
    message: str


def encode_command(command: Command) -> tuple[str, bytes | None]:
    """Return the target and the body of a command's request; without a body for GET.

    Raises:
        InvalidArgumentError: JSON or a query cannot represent a text of the command.
    """
    path = PATH + type(command).__name__.removesuffix("Command").lower()
    try:
        if command.method == "POST":
            return path, msgspec.json.encode(command)
        arguments = msgspec.to_builtins(command)
        return (f"{path}?{urlencode(arguments)}" if arguments else path), None
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"this command cannot be sent: {error}") from error


def decode_command(name: str, arguments: bytes | dict[str, str]) -> Command:
    """Return the command of a request.

    Args:
        name: a name of `COMMANDS`.
        arguments: the body of a POST, or the query of a GET.
    Raises:
        InvalidArgumentError: an argument is unknown, missing or invalid.
    """
    kind = COMMANDS[name]
    try:
        if isinstance(arguments, bytes):
            return msgspec.json.decode(arguments or b"{}", type=kind)
        return msgspec.convert(arguments, kind, strict=False)
    except UNDECODABLE as error:
        known = describe_known("", kind.__struct_fields__) if kind.__struct_fields__ else "it takes none"
        raise InvalidArgumentError(f"the arguments of {name} are not valid: {error}; {known}") from error


def encode_result(result: msgspec.Struct) -> bytes:
    """Return the answer to a command that succeeded.

    Raises:
        InvalidArgumentError: JSON cannot represent the result, such as a name with a lone surrogate.
    """
    try:
        return msgspec.json.encode(result)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"the reply cannot be sent: {error}") from error


def encode_error(error: Exception) -> tuple[int, bytes]:
    """Return the status and the answer to a command that raised `error`.

    An error of another library becomes a ControlError.
    """
    name, message, status = find_error_name(error), str(error), HTTPStatus.CONFLICT
    if name is None:
        name, message = ControlError.__name__, f"the pool raised {type(error).__name__}: {message}"
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    elif isinstance(error, InvalidArgumentError):
        status = HTTPStatus.BAD_REQUEST
    sendable = message.encode(errors="backslashreplace").decode()
    return status, msgspec.json.encode(_Error(name, sendable))


def decode_answer(status: int, body: bytes, result_type: type[_Result]) -> _Result:
    """Return the result in an answer.

    Raises:
        KVPoolError: the error that the answer reports.
        ControlError: the answer is not one of this version.
    """
    try:
        if status == HTTPStatus.OK:
            return msgspec.json.decode(body, type=result_type)
        reported = msgspec.json.decode(body, type=_Error)
    except UNDECODABLE as error:
        raise make_version_error(error) from error
    raise ERRORS_BY_NAME.get(reported.error, ControlError)(reported.message)


def make_version_error(error: Exception) -> ControlError:
    """Return the error for an answer that cannot be decoded."""
    return ControlError(
        f"the reply is not one of this version of kv_pool: {str(error).strip()}. Does the server run another "
        "version?"
    )
