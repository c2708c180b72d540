"""The messages between nodes, and the subjects, offered blocks and statuses in them.

| request | sent to | reply |
|---|---|---|
| `DescribeNode` | any node | `NodeDescription` |
| `PrepareTransfer` | the source | `Offer`: blocks under a lease (M1) |
| `AskChecksums` | the source | `Checksums` |
| `RenewLease` | the source | `Acknowledged`: the lease ends `Offer.lease_s` later |
| `AcknowledgeTransfer` | the source | `Acknowledged` (M4); idempotent |
| `CancelTransfer` | the source | `Cancelled`; idempotent |
| `PullSubject` | the target | `Acknowledged`: `AskPull` returns its status; sent by the source of a push |
| `AskPull` | the target | `PullOutcome`: status and result |
| `AnnounceNode` | a registry | `NodeList` |
| `OpenBulk` | a source | `BulkOpened`: admission to the port for bytes of blocks |
| `ReadBlocks` | a source | `Acknowledged`, after the bytes were sent over the connection with the ticket |

An error of the called node is returned as `CallFailed` and raised at the caller with its original type.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, Union

import msgspec

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import InvalidArgumentError, KVPoolError, MigrationError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.ids import BlockId, NodeName, RequestId, SequenceId, TransferId
from kv_pool.storage.block_layout import BlockLayout


class MigrationPhase(StrEnum):
    """The phase of a migration.

        target   WAITING -> PREPARING -> READING -> INSERTING -> ACKNOWLEDGING -> DONE
                    |           |           |           |              |     \\-> IN_DOUBT -> DONE or FAILED
                    +-----------+-----------+-----------+              +-> FAILED
                    |-> FAILED, or CANCELLED by a caller
        source   WAITING -> READING -> DONE, FAILED or CANCELLED       a pull is READING at once

    IN_DOUBT is a move whose blocks have arrived and whose source has not confirmed that it released them, or
    whose target's pool was interrupted and has to be repaired.
    """

    WAITING = "waiting"
    PREPARING = "preparing"
    READING = "reading"
    INSERTING = "inserting"
    ACKNOWLEDGING = "acknowledging"
    IN_DOUBT = "in doubt"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_ended(self) -> bool:
        """True in a final phase: DONE, FAILED or CANCELLED."""
        return self in (MigrationPhase.DONE, MigrationPhase.FAILED, MigrationPhase.CANCELLED)


class MigrationStatus(msgspec.Struct):
    """The status of one migration, as seen by one of its two nodes. JSON-serializable.

    The node updates its own instance; callers get copies.

    Attributes:
        migration_id: 32 hex digits, the same at both nodes.
        direction: `in` at the target, `out` at the source.
        peer: the other node's name.
        subject: a description for people.
        started: Unix time in seconds, by this node's clock.
        num_blocks: of the offer; 0 before the offer.
        num_present_blocks: of `num_blocks`, those whose content the target already had; they are not read.
        num_done_blocks: blocks that the target has: read and verified, or present before.
        num_bytes, num_descriptors: bytes read so far, repeated reads included, and the number of pieces.
        elapsed_s: from `started` until now or the end, waiting included.
        error, error_message: class name and message of the error that it failed with or is in doubt for.
    """

    migration_id: str
    direction: str
    peer: NodeName
    subject: str
    is_move: bool
    phase: MigrationPhase
    started: float
    num_blocks: int = 0
    num_present_blocks: int = 0
    num_done_blocks: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    bytes_per_s: float = 0.0
    elapsed_s: float = 0.0
    error: str = ""
    error_message: str = ""


class BlocksSubject(msgspec.Struct, frozen=True, tag="blocks", forbid_unknown_fields=True):
    """Blocks by id, in use or cached.

    Attributes:
        block_ids: distinct.
        generations: `KVCacheBlock.generation` of each block when it was named; a block that was reused since
            then is refused. () to accept all blocks as they are.
    """

    block_ids: tuple[BlockId, ...]
    generations: tuple[int, ...] = ()


class SequenceSubject(msgspec.Struct, frozen=True, tag="sequence", forbid_unknown_fields=True):
    """All blocks of a sequence or request, in token order, including a partial last block."""

    sequence_id: SequenceId | RequestId


class PrefixSubject(msgspec.Struct, frozen=True, tag="prefix", forbid_unknown_fields=True):
    """The longest cached prefix of these hashes, in use or free. Copied, never moved.

    Attributes:
        block_hashes: of `hash_block_size` tokens each, first block first.
    """

    block_hashes: tuple[bytes, ...]


Subject = BlocksSubject | SequenceSubject | PrefixSubject


def describe_subject(subject: Subject) -> str:
    """Describe a subject in words, for messages and lists."""
    match subject:
        case BlocksSubject():
            return f"{len(subject.block_ids)} blocks"
        case SequenceSubject():
            return f"sequence {subject.sequence_id}"
        case _:
            return f"a prefix of {len(subject.block_hashes)} blocks"


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of an offer.

    Attributes:
        block_id, generation: at the source.
        keys: its cache keys there, hashes with their groups; () if the block is not cached.
        num_tokens: tokens from the start of the sequence that the first key covers; None if unknown.
        parent: the hash of the preceding block, for events; None for the first block or if unknown.
        token_ids: of this block; () if the source does not know them.
    """

    block_id: BlockId
    generation: int
    keys: tuple[bytes, ...] = ()
    num_tokens: int | None = None
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base class of all messages; encoded as a map with the class name under `type`."""


class NodeLocation(msgspec.Struct, frozen=True):
    """The place of a node, from large to small; "" if unknown. Equal names are the same place."""

    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""


class DescribeNode(Message, frozen=True):
    """A request for the description of a node."""


class NodeDescription(Message, frozen=True):
    """A node, its pool and its backends.

    Attributes:
        incarnation: unique for each start of the node.
        backends: backend name -> `TransferBackend.describe()`, in the node's order of preference.
        address: host:port; "" if the node does not listen.
        sequence_kind: `Sequences.kind` of its pool; "" if unknown.
    """

    name: NodeName
    incarnation: str = msgspec.field(name="epoch")
    layout: BlockLayout
    num_free_blocks: int
    num_blocks: int
    backends: dict[str, bytes]
    location: NodeLocation
    address: str = ""
    sequence_kind: str = ""


class PrepareTransfer(Message, frozen=True):
    """A request for a lease on the blocks of a subject (M1).

    Attributes:
        transfer_id: 16 random bytes, chosen by the target; a repeated request gets the same offer.
        is_move: the source releases the subject when the transfer is acknowledged.
        layout: of the target; the source refuses a layout that differs from its own.
        target: the target's name.
    """

    transfer_id: TransferId
    subject: Subject
    is_move: bool
    layout: BlockLayout
    target: NodeName


class Offer(Message, frozen=True):
    """The leased blocks of a transfer; the lease ends `lease_s` seconds after this reply unless renewed.

    Attributes:
        incarnation: of the source, beginning with its name; the acknowledgement repeats it.
    """

    transfer_id: TransferId
    incarnation: str = msgspec.field(name="epoch")
    lease_s: float
    blocks: list[OfferedBlock]
    state: bytes = b""


class AskChecksums(Message, frozen=True):
    """A request for the checksums of the blocks at these positions of an offer."""

    transfer_id: TransferId
    positions: list[int]


class Checksums(Message, frozen=True):
    """The xxh3_64 of each block's bytes, 8 bytes per block, big-endian, concatenated."""

    values: bytes


class RenewLease(Message, frozen=True):
    """A request to renew the lease of a transfer; the target is still reading."""

    transfer_id: TransferId


class AcknowledgeTransfer(Message, frozen=True):
    """The target has verified and inserted all blocks.

    Attributes:
        new_ids: the blocks' ids at the target, in the order of the offer.
    """

    transfer_id: TransferId
    incarnation: str = msgspec.field(name="epoch")
    new_ids: list[BlockId]


class Acknowledged(Message, frozen=True):
    """The request was carried out.

    After `AcknowledgeTransfer`, the source has ended the lease and, for a move, released the subject (M4). If
    the lease had expired, it keeps its blocks and replies with `StaleTransferError` instead.
    """


class CancelTransfer(Message, frozen=True):
    """A request to end the lease of a transfer; the target no longer reads."""

    transfer_id: TransferId
    reason: str = ""


class Cancelled(Message, frozen=True):
    """The blocks of the transfer are not leased.

    Attributes:
        is_acknowledged: the cancellation came too late; the transfer had been acknowledged.
    """

    is_acknowledged: bool = False


class PullSubject(Message, frozen=True):
    """A request of a source that the target pull a subject.

    Attributes:
        transfer_id: 16 random bytes; repeated requests start one pull.
        source: the source's name, by which the target looks up its address.
        source_address: used if the target does not know the name.
        backend: the only backend to read with; "" for the first that works.
    """

    transfer_id: TransferId
    subject: Subject
    is_move: bool
    source: NodeName
    source_address: str = ""
    max_bytes_per_s: float = 0.0
    backend: str = ""


class AskPull(Message, frozen=True):
    """A request for the status of a pull; with `cancel`, cancel it first if it is not too late."""

    transfer_id: TransferId
    cancel: bool = False


class PullOutcome(Message, frozen=True):
    """The status of a pull.

    Attributes:
        new_ids: the blocks' ids at the target once the pull is done; [] before.
    """

    status: MigrationStatus
    new_ids: list[BlockId] = []


class AnnounceNode(Message, frozen=True):
    """An announcement that a node is alive for `ttl_s` seconds; 0 removes the node."""

    name: NodeName
    incarnation: str = msgspec.field(name="epoch")
    address: str
    location: NodeLocation
    ttl_s: float


class KnownNode(msgspec.Struct, frozen=True):
    """A node in a registry or a list of peers."""

    name: NodeName
    address: str
    location: NodeLocation = NodeLocation()


class NodeList(Message, frozen=True):
    """The nodes that a registry knows, itself included."""

    nodes: list[KnownNode]


class OpenBulk(Message, frozen=True):
    """A request for a connection to the backend of this name, for bytes of blocks.

    Attributes:
        description: of the reader's backend, `TransferBackend.describe()`.
    """

    backend: str
    description: bytes


class BulkOpened(Message, frozen=True):
    """The admission of one connection to the node's port for bytes of blocks, within a few seconds.

    Attributes:
        port: at the host that the request was sent to.
        ticket: 16 random bytes, all that the reader ever sends over the connection.
    """

    port: int
    ticket: bytes


class ReadBlocks(Message, frozen=True):
    """A request for the bytes of leased blocks, over the connection with this ticket.

    Attributes:
        block_ids: at the source, at most as many as its storage has.
    """

    ticket: bytes
    transfer_id: TransferId
    block_ids: list[BlockId]


class CallFailed(Message, frozen=True):
    """The request failed; `error` is the name of a class of `kv_pool.errors`."""

    error: str
    message: str


Reply = TypeVar("Reply", bound=Message)

_KINDS = tuple(Message.__subclasses__())
_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Union[_KINDS])  # noqa: UP007


def encode_message(message: Message) -> bytes:
    """Return the bytes that `decode_message` reads.

    Raises:
        InvalidArgumentError: a field cannot be encoded, such as text with a lone surrogate.
    """
    try:
        return _encoder.encode(message)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"cannot encode {type(message).__name__}: {error}") from error


def decode_message(data: bytes) -> Message:
    """Return an instance of one of the classes of this module.

    Raises:
        MigrationError: the message type is unknown, or a field has the wrong type.
    """
    try:
        message = _decoder.decode(data)
    except UNDECODABLE as error:
        raise MigrationError(f"cannot decode a message of {len(data)} bytes: {error}") from error
    assert isinstance(message, Message)
    return message


Answer = Callable[[Message, NodeName], Message]
"""Returns the reply to a message from the named node, or raises. Must be thread-safe."""


def call_local(answer: Answer, message: Message, caller: NodeName) -> Message:
    """Call a node of this process and return its reply. Raises the errors of `RemoteCalls.call`."""
    try:
        return check_reply(answer(message, caller), "a node of this process")
    except KVPoolError:
        raise
    except Exception as error:  # the context of what is raised, as another node has it in its log
        return check_reply(describe_failure(error), "a node of this process")


def describe_failure(error: Exception) -> CallFailed:
    """Return the reply for an error. Errors of other libraries become a MigrationError."""
    name = find_error_name(error)
    if name is None:
        return CallFailed("MigrationError", f"{type(error).__name__}: {error}")
    return CallFailed(name, str(error))


def check_reply(reply: Message, peer: str) -> Message:
    """Return a reply; raise the error of a `CallFailed`."""
    if isinstance(reply, CallFailed):
        raise_failure(reply, peer)
    return reply


def as_reply(reply: Message, kind: type[Reply], peer: str) -> Reply:
    """Return a reply of this type. Raises MigrationError for another one."""
    if not isinstance(reply, kind):
        raise MigrationError(f"{peer} answered with {type(reply).__name__}; expected {kind.__name__}")
    return reply


def raise_failure(failed: CallFailed, peer: str) -> NoReturn:
    """Raise the error that a reply names; MigrationError if this version of kv_pool does not have it."""
    kind = ERRORS_BY_NAME.get(failed.error)
    if kind is None:
        raise MigrationError(f"{peer}: {failed.error}: {failed.message}")
    raise kind(failed.message)
