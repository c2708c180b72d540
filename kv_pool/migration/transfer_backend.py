"""`TransferBackend`: the contract of backends, which copy blocks of another node's storage to this node's.

`BulkBackend` and `BulkReader` are the base classes of backends that send bytes over the node's own port.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kv_pool.errors import (
    CopyFailedError,
    MigrationError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.channel import Channel, SendBlocks
from kv_pool.migration.messages import Acknowledged, OpenBulk, ReadBlocks, as_reply
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import IntArray, find_runs, make_block_ids

if TYPE_CHECKING:
    from kv_pool.migration.remote_calls import Bulk

_REASON_S = 1.0

CheckLeased = Callable[[TransferId, Sequence[BlockId]], object]
"""Raises StaleTransferError unless the transfer of this id leases all these blocks, as they were offered."""


ConnectBulk = Callable[[NodeName, OpenBulk, float], "Bulk"]
"""Opens a connection to a backend of a node, within some seconds: `PeerLinks.connect_bulk`."""


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
                of the local blocks is undefined, and they may still be written until `is_settled()`
                returns True.
            StaleTransferError: the transfer does not lease these blocks. Nothing more is written; `is_usable`
                tells whether the reader can be used again.
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
            connect_bulk: for backends that read over the other node's port, see `BulkBackend`.
        """
        self.check_leased = check_leased
        self.connect_bulk = connect_bulk

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


class BulkBackend(TransferBackend):
    """A backend whose bytes are sent over the source node's own port for them.

    Each read is an encrypted call that a thread of the source answers: its sender sends the bytes over the
    reader's connection, which carries nothing else.
    """

    @abstractmethod
    def make_sender(self, description: bytes) -> SendBlocks:
        """Return a function that sends blocks over the connection of one reader, which may keep state.

        It calls `check_leased` before and after each piece of a read. If it raises, the connection is closed
        and the reader raises the same error.

        Args:
            description: the result of `describe` of the reader's backend.
        Raises:
            MigrationError: no blocks can be sent to this reader.
        """

    def connect(self, peer_name: NodeName, timeout_s: float) -> Bulk:
        """Connect to the backend of this name at a peer. Raises the errors of `PeerLinks.connect_bulk`."""
        return self.connect_bulk(peer_name, OpenBulk(self.name, self.describe()), timeout_s)


class BulkReader(BlockReader):
    """A reader of a `BulkBackend`. Only `read` writes to blocks, so it is always settled.

    A read that fails closes the connection, unless a local id is wrong.
    """

    def __init__(self, bulk: Bulk, storage: BlockStorage, peer_name: NodeName) -> None:
        self._bulk = bulk
        self.storage = storage
        self._peer_name = peer_name

    @abstractmethod
    def receive(self, channel: Channel, targets: IntArray, deadline: float) -> None:
        """Receive all bytes that the source's backend sends for one read into these local blocks.

        Raises the errors of `Channel.receive`.
        """

    def read(
        self,
        transfer_id: TransferId,
        remote_ids: Sequence[BlockId],
        local_ids: Sequence[BlockId],
        deadline: float,
    ) -> ReadCount:
        targets = make_block_ids(local_ids, self.storage.num_blocks)
        starts, _ = find_runs(np.asarray(remote_ids, np.int64), targets)
        try:
            self._read(ReadBlocks(self._bulk.ticket, transfer_id, list(remote_ids)), targets, deadline)
        except BaseException as error:
            self.close()  # also after an interrupt: the rest of these bytes must not reach the next read
            is_stale = isinstance(error, StaleTransferError)
            if is_stale or not isinstance(error, MigrationError | CopyFailedError):
                raise
            raise TransferFailedError(
                f"reading {len(targets)} blocks of {self._peer_name}: {error}"
            ) from error
        return ReadCount(len(targets) * self.storage.block_bytes, len(starts))

    def _read(self, message: ReadBlocks, targets: IntArray, deadline: float) -> None:
        if not self.is_usable():
            raise PeerUnavailableError("the connection is closed")
        channel = self._bulk.channel
        finish = self._bulk.calls.begin(message, channel, deadline)
        # A call that ends before any byte arrives has usually failed: the source may not even know of it.
        reply = finish(deadline) if channel.is_quiet() else None
        try:
            self.receive(channel, targets, deadline)
        except PeerUnavailableError:
            # A source that fails shuts the connection down, and its reply has the reason.
            if reply is None:
                finish(min(deadline, time.monotonic() + _REASON_S))
            raise
        as_reply(reply or finish(deadline), Acknowledged, self._peer_name)

    def is_settled(self) -> bool:
        return True

    def is_usable(self) -> bool:
        return self._bulk.channel.is_quiet() and not self._bulk.calls.is_closed

    def close(self) -> None:
        self._bulk.channel.close()


def _refuse_transfer(transfer_id: TransferId, block_ids: Sequence[BlockId]) -> None:
    raise StaleTransferError("this backend is not attached to a node; see TransferBackend.attach")


def _refuse_peer(peer_name: NodeName, message: OpenBulk, timeout_s: float) -> Bulk:
    raise PeerUnavailableError(
        f"cannot connect to {peer_name!r}: this backend is not attached to a node; see TransferBackend.attach"
    )
