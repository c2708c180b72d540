"""`TransferBackend`: the contract of backends, which copy blocks of another node's storage to this node's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kv_pool.errors import PeerUnavailableError, StaleTransferError
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.channel import Channel
from kv_pool.storage.block_storage import BlockStorage

CheckLeased = Callable[[TransferId, Sequence[BlockId]], object]
"""Raises StaleTransferError unless the transfer of this id leases all these blocks, as they were offered."""

ConnectBulk = Callable[[NodeName, str, float], Channel]
"""Opens a connection to the backend of this name at a node, within some seconds: `PeerLinks.connect_bulk`."""


@dataclass(frozen=True)
class ReadCount:
    """The counts of one read: bytes of blocks, and contiguous pieces requested."""

    num_bytes: int
    num_descriptors: int


class BlockReader(ABC):
    """A reader of one peer's blocks over its own connection. Used by one thread at a time."""

    @abstractmethod
    def read(
        self,
        transfer_id: TransferId,
        remote_ids: Sequence[BlockId],
        local_ids: Sequence[BlockId],
        deadline: float,
    ) -> ReadCount:
        """Copy the peer's block `remote_ids[i]` to local block `local_ids[i]`, for every i; done on return.

        Args:
            transfer_id: the transfer that leases the peer's blocks. A peer that serves the bytes itself
                refuses blocks that this transfer does not lease.
            remote_ids, local_ids: of equal length, each without duplicates. Runs that are contiguous on both
                sides count as one piece.
            deadline: a `time.monotonic()` time.
        Raises:
            TransferFailedError: not all bytes arrived by the deadline, or the connection broke. The content
                of the local blocks is undefined; if the error's `is_settled` is False, they may still be
                written until `is_settled()` returns True.
            StaleTransferError: the transfer does not lease these blocks. Nothing more is written.
        """

    @abstractmethod
    def is_settled(self) -> bool:
        """Return True once failed reads of this reader can no longer write to local blocks."""

    def is_usable(self) -> bool:
        """Return False if the reader was closed, or its connection is known to be closed."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close the connection and stop reads if possible. `is_settled` can be called afterwards."""


class TransferBackend(ABC):
    """A transport for blocks between one local storage and the storages of other nodes.

    The bytes of a block are sent in the order of `block_format`, so the two storages may have different
    memory layouts. The caller has checked that the formats are equal.

    Attributes:
        name: the same on both sides, such as `tcp`.
        check_leased, connect_bulk: see `attach`.
    """

    name: ClassVar[str]

    def __init__(self, storage: BlockStorage) -> None:
        self.storage = storage
        self.check_leased: CheckLeased = _refuse_transfer
        self.connect_bulk: ConnectBulk = _refuse_peer

    def attach(self, check_leased: CheckLeased, connect_bulk: ConnectBulk) -> None:
        """Attach the backend to its node. Called once, before all other methods.

        Args:
            check_leased: a backend that serves bytes calls it before and after each piece. Thread-safe.
            connect_bulk: for backends that serve readers over the node's own port.
        """
        self.check_leased = check_leased
        self.connect_bulk = connect_bulk

    def get_bulk_handler(self) -> Callable[[Channel, NodeName], None] | None:
        """Return the function that serves readers over the node's own port; None if they do not use it."""
        return None

    @abstractmethod
    def describe(self) -> bytes:
        """Return the data that a peer's `open` needs to read from this storage, sent in `NodeDescription`."""

    @abstractmethod
    def open(self, peer_name: NodeName, description: bytes) -> BlockReader:
        """Connect to a peer.

        Args:
            description: the result of `describe` of the peer's backend of the same name.
        Raises:
            PeerUnavailableError: the peer cannot be reached by this backend.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop serving reads and free all resources. The caller closes the readers before."""


def _refuse_transfer(transfer_id: TransferId, block_ids: Sequence[BlockId]) -> None:
    raise StaleTransferError("this backend is not attached to a node; see TransferBackend.attach")


def _refuse_peer(peer_name: NodeName, backend: str, timeout_s: float) -> Channel:
    raise PeerUnavailableError(
        f"cannot connect to {peer_name!r}: this backend is not attached to a node; see TransferBackend.attach"
    )
