"""What nodes say to each other: requests of a target to a source, and of anybody to a node.

| request | asked of | reply |
|---|---|---|
| `DescribeNode` | anybody | `NodeDescription` |
| `PrepareTransfer` | the source | `Offer`: blocks, lent until the lease ends (M1) |
| `AskChecksums` | the source | `Checksums` |
| `RenewLease` | the source | `LeaseRenewed` |
| `AcknowledgeTransfer` | the source | `Acknowledged` (M4); may be repeated |
| `CancelTransfer` | the source | `Cancelled`; may be repeated |
| `PullSubject` | the target | `PullStarted`: the source asks to be pulled from |
| `AskPull` | the target | `PullOutcome`, so far |
| `AnnounceNode` | a registry | `NodeList` |
| `ListNodes` | a registry | `NodeList` |

What goes wrong at the other side comes back as `CallFailed` and is raised here as what it was.
"""

import msgspec

from kv_pool.migration.site import OfferedBlock
from kv_pool.migration.status import MigrationStatus
from kv_pool.migration.subjects import Subject
from kv_pool.storage.block_layout import BlockLayout


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all of them; on the wire a map with the class's name under `type`."""


class NodeLocation(msgspec.Struct, frozen=True):
    """Where a node is, from the large to the small; "" for not known. Equal names are the same place."""

    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""


class DescribeNode(Message, frozen=True):
    """Who are you?"""


class NodeDescription(Message, frozen=True):
    """A node, its pool and the ways to read from it.

    Attributes:
        epoch: random, new each time that the node starts.
        backends: by name what a reader needs; in the node's order of preference.
        address: where it listens, host:port; "" for nowhere.
    """

    name: str
    epoch: str
    layout: BlockLayout
    num_free_blocks: int
    num_blocks: int
    backends: dict[str, bytes]
    location: NodeLocation
    address: str = ""


class PrepareTransfer(Message, frozen=True):
    """Lend me these blocks (M1).

    Attributes:
        transfer_id: 16 random bytes, the target's choice; a repeated request gets the same offer.
        is_move: the source gives up its own when the transfer is acknowledged.
        layout: the target's; another one than the source's is refused.
        target: the target's name.
    """

    transfer_id: bytes
    subject: Subject
    is_move: bool
    layout: BlockLayout
    target: str


class Offer(Message, frozen=True):
    """The blocks, lent for `lease_s` seconds from now on.

    Attributes:
        epoch: the source's, beginning with its name; an acknowledgement names it.
    """

    transfer_id: bytes
    epoch: str
    lease_s: float
    blocks: list[OfferedBlock]
    state: bytes = b""


class AskChecksums(Message, frozen=True):
    """Checksums of these blocks of an offer, by their positions in it."""

    transfer_id: bytes
    positions: list[int]


class Checksums(Message, frozen=True):
    """One a block, 8 bytes each, xxh3_64 of the block's bytes, big-endian, one after the other."""

    values: bytes


class RenewLease(Message, frozen=True):
    """I am still reading."""

    transfer_id: bytes


class LeaseRenewed(Message, frozen=True):
    """Seconds from now."""

    lease_s: float


class AcknowledgeTransfer(Message, frozen=True):
    """The blocks are here, verified, and can be hit.

    Attributes:
        new_ids: their ids at the target, in the order of the offer.
    """

    transfer_id: bytes
    epoch: str
    new_ids: list[int]


class Acknowledged(Message, frozen=True):
    """The source has unpinned the blocks, and for a move given them up (M4).

    A `StaleTransferError` instead: the lease ended before, and the source keeps what it has.
    """


class CancelTransfer(Message, frozen=True):
    """I shall not read any more: take the blocks back."""

    transfer_id: bytes
    reason: str = ""


class Cancelled(Message, frozen=True):
    """They are back; or were, or were never lent.

    Attributes:
        is_acknowledged: it is too late: the transfer was acknowledged before.
    """

    is_acknowledged: bool = False


class PullSubject(Message, frozen=True):
    """Pull this from me.

    Attributes:
        pull_id: 16 random bytes; repeated requests start one pull.
        source: my name, by which you find my address; `source_address` where you may not know it.
        backend: read by this one of mine and no other; "" for the first that works.
    """

    pull_id: bytes
    subject: Subject
    is_move: bool
    source: str
    source_address: str = ""
    max_bytes_per_s: float = 0.0
    backend: str = ""


class PullStarted(Message, frozen=True):
    """It is under way; ask for it with `AskPull`."""

    migration_id: str


class AskPull(Message, frozen=True):
    """How far is the pull? With `cancel` it is given up, if it is not too late."""

    pull_id: bytes
    cancel: bool = False


class PullOutcome(Message, frozen=True):
    """A pull, so far.

    Attributes:
        new_ids: of one that is done.
    """

    status: MigrationStatus
    new_ids: list[int] = []


class AnnounceNode(Message, frozen=True):
    """I am here: for `ttl_s` seconds, unless I say so again."""

    name: str
    epoch: str
    address: str
    location: NodeLocation
    ttl_s: float


class ListNodes(Message, frozen=True):
    """Whom do you know?"""


class KnownNode(msgspec.Struct, frozen=True):
    """A node of a registry."""

    name: str
    address: str
    location: NodeLocation = NodeLocation()


class NodeList(Message, frozen=True):
    """The nodes that a registry knows, itself included."""

    nodes: list[KnownNode]


class CallFailed(Message, frozen=True):
    """What was asked could not be done; `error` is the name of one of `kv_pool.errors`."""

    error: str
    message: str
