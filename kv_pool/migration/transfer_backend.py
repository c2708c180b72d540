"""`TransferBackend`: reads blocks of another node's storage into this one's; what every backend promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kv_pool.errors import PeerUnavailableError, StaleTransferError
from kv_pool.migration.channel import Channel
from kv_pool.storage.block_storage import BlockStorage

FindLent = Callable[[bytes, Sequence[int]], object]
"""Raises StaleTransferError unless the transfer of this id lends all these blocks, and has since it began."""

FindAddress = Callable[[str], str]
"""host:port of the node of this name; raises PeerUnavailableError for one that is not known."""


@dataclass(frozen=True)
class ReadCount:
    """What one read came down to: bytes of blocks, and the pieces that they were asked for in."""

    num_bytes: int
    num_descriptors: int


class BlockReader(ABC):
    """Reads blocks of one peer, over a connection of its own. Used by one thread at a time."""

    @abstractmethod
    def read(
        self,
        transfer_id: bytes,
        remote_ids: Sequence[int],
        local_ids: Sequence[int],
        deadline: float,
    ) -> ReadCount:
        """Copy the peer's block `remote_ids[i]` over our block `local_ids[i]`, for every i; done on return.

        Args:
            transfer_id: under which the peer lent these blocks. A peer that serves the bytes itself refuses
                what was not lent, or is not any more.
            remote_ids, local_ids: as many, each without a repetition. Neighbours on both sides are one piece.
            deadline: a time of `time.monotonic()`.
        Raises:
            TransferFailedError: the bytes have not all arrived by the deadline, or the peer has gone. The
                local blocks may hold anything; with `is_settled` False they may still be written, until
                `is_settled()` says otherwise.
            StaleTransferError: the peer does not lend these blocks under this id. Nothing more is written.
        """

    @abstractmethod
    def is_settled(self) -> bool:
        """Is nothing written any more by reads of this reader that have failed?"""

    def is_usable(self) -> bool:
        """May it be read with? Not if it was closed, or the peer has hung up meanwhile, as far as we know."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End the connection, so that whatever can be stopped is. `is_settled` may be asked afterwards."""


class TransferBackend(ABC):
    """One way to get at the blocks of another node, for one storage of ours.

    Bytes of a block go in the order of `block_format`, so the two storages may lay them out differently; that
    the formats are equal was checked before.

    Attributes:
        name: by which both sides know it, such as `tcp`.
        node_name, find_lent, find_address, secret: see `attach`.
    """

    name: ClassVar[str]

    def __init__(self, storage: BlockStorage) -> None:
        self.storage = storage
        self.node_name = ""
        self.find_lent: FindLent = _lend_nothing
        self.find_address: FindAddress = _know_nobody
        self.secret = b""

    def attach(
        self, node_name: str, find_lent: FindLent, find_address: FindAddress, secret: bytes = b""
    ) -> None:
        """Make it a backend of this node; called once, before anything else.

        Args:
            find_lent: asked before and after each piece of blocks is handed out, by backends that do that
                themselves. Called from any thread.
            find_address: asked by backends that connect by themselves.
            secret: the nodes'; b"" for a node that only knows others of its own process.
        """
        self.node_name = node_name
        self.find_lent = find_lent
        self.find_address = find_address
        self.secret = secret

    def get_bulk_handler(self) -> Callable[[Channel, str], None] | None:
        """What serves this backend's readers over the node's own port; None if they do not come that way."""
        return None

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer needs to read from our storage; it goes over the control connection."""

    @abstractmethod
    def open(self, peer_name: str, description: bytes) -> BlockReader:
        """Connect to a peer, described by its backend of the same name.

        Raises:
            PeerUnavailableError: it can not be reached this way.
        """

    @abstractmethod
    def close(self) -> None:
        """Serve no more reads, and free what the backend holds. Readers are closed before."""


def _lend_nothing(transfer_id: bytes, block_ids: Sequence[int]) -> None:
    raise StaleTransferError("this backend has no node yet, so it lends nothing; see TransferBackend.attach")


def _know_nobody(peer_name: str) -> str:
    raise PeerUnavailableError(f"this backend has no node yet, so {peer_name!r} is not known")
