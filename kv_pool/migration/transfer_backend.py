"""`TransferBackend`: reads blocks of another node's storage into this one's; what every backend promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kv_pool.storage.block_storage import BlockStorage


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

    @abstractmethod
    def close(self) -> None:
        """End the connection, so that whatever can be stopped is. `is_settled` may be asked afterwards."""


class TransferBackend(ABC):
    """One way to get at the blocks of another node, for one storage of ours.

    Bytes of a block go in the order of `block_format`, so the two storages may lay them out differently; that
    the formats are equal was checked before.

    Attributes:
        name: by which both sides know it, such as `tcp`.
    """

    name: ClassVar[str]

    def __init__(self, storage: BlockStorage) -> None:
        self.storage = storage

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
