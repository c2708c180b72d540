"""`TcpBackend`: blocks over TCP, with the standard library only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from kv_pool.errors import InvalidArgumentError, MigrationError, PeerUnavailableError, StaleTransferError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.channel import Channel, SendBlocks
from kv_pool.migration.transfer_backend import BlockReader, BulkBackend, BulkReader
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.storage.segments import IntArray, SegmentTable, make_block_ids, split_alike

if TYPE_CHECKING:
    from kv_pool.migration.remote_calls import Bulk

# The source checks the lease between two pieces, about every ten milliseconds. Smaller pieces cost
# throughput: no bytes are copied during the check.
PIECE_BYTES = 32 * 1024 * 1024

_CONNECT_S = 10.0
_SEND_S = 30.0  # a reader that accepts no bytes for this time has stopped; its lease expires

# Below this span size, passing each span to the kernel costs more than a copy of the block to a buffer.
_SPAN_BYTES = 8 * 1024
_MAX_ROWS = 65_536


class TcpBackend(BulkBackend):
    """The reference backend, and the fallback if no faster one is available.

    The source sends the blocks of a read in pieces of 32 MiB from the storage's memory, and checks before and
    after each piece that they are leased (M6); the reader receives them into its storage's memory. The bytes
    are neither encrypted nor authenticated; a migration compares checksums, which it gets over an encrypted
    connection.

    Args:
        connect_s: time limit for connecting to a peer.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, storage: BlockStorage, connect_s: float = _CONNECT_S) -> None:
        super().__init__(storage)
        self._connect_s = connect_s
        self._is_closed = False

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(list_rows(self.storage))

    def open(self, peer_name: NodeName, description: bytes) -> BlockReader:
        try:
            window = self._make_window(description)
        except MigrationError as error:
            raise PeerUnavailableError(f"{peer_name}: {error}") from error
        return TcpReader(self.connect(peer_name, self._connect_s), self.storage, window, peer_name)

    def make_sender(self, description: bytes) -> SendBlocks:
        return partial(self._send_blocks, self._make_window(description))

    def close(self) -> None:
        self._is_closed = True

    def _make_window(self, description: bytes) -> BlockWindow:
        """Return a window for a peer with this description."""
        try:
            theirs = msgspec.msgpack.decode(description, type=list[int])
        except UNDECODABLE as error:
            raise MigrationError(f"cannot decode the description of its blocks: {error}") from error
        return BlockWindow(self.storage, choose_rows(list_rows(self.storage), theirs))

    def _send_blocks(
        self, window: BlockWindow, channel: Channel, transfer_id: TransferId, block_ids: Sequence[BlockId]
    ) -> None:
        num_blocks = self.storage.num_blocks
        ids = make_block_ids(block_ids, num_blocks)
        if len(ids) > num_blocks:
            raise MigrationError(f"{len(ids)} blocks were requested; the storage has {num_blocks}")
        size = count_piece_blocks(self.storage)
        for start in range(0, len(ids), size):
            some = ids[start : start + size]
            named = some.tolist()
            self._check_leased(transfer_id, named)
            channel.send(window.read_out(some), time.monotonic() + _SEND_S)
            # The second check confirms that the lease did not end while the bytes were sent.
            self._check_leased(transfer_id, named)

    def _check_leased(self, transfer_id: TransferId, block_ids: list[BlockId]) -> None:
        if self._is_closed:
            raise StaleTransferError("the node is closing and no longer serves blocks")
        self.check_leased(transfer_id, block_ids)


class TcpReader(BulkReader):
    """A reader made by `TcpBackend.open`."""

    def __init__(self, bulk: Bulk, storage: BlockStorage, window: BlockWindow, peer_name: NodeName) -> None:
        super().__init__(bulk, storage, peer_name)
        self._window = window

    def receive(self, channel: Channel, targets: IntArray, deadline: float) -> None:
        size = count_piece_blocks(self.storage)
        for start in range(0, len(targets), size):
            some = targets[start : start + size]
            channel.receive(self._window.list_views(some), deadline)
            self._window.write_in(some)


def count_piece_blocks(storage: BlockStorage) -> int:
    """Return the maximum number of blocks of a piece; the same on both sides."""
    return max(1, PIECE_BYTES // storage.block_bytes)


# ---- the order of block bytes on a connection, independent of the memory layouts on its two sides ----


def list_rows(storage: BlockStorage) -> list[int]:
    """Return the spans, in bytes, into which this side's memory splits a block."""
    if storage.device != "cpu":
        return [storage.block_bytes]
    rows: list[int] = storage.segments.spans.tolist()
    return rows


def choose_rows(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the rows, in bytes, into which both sides split their blocks. Symmetric in its arguments.

    A piece of blocks is sent row by row, and each row block by block, so that each side can merge contiguous
    memory. If the rows would be many and small, blocks are sent whole, one after another.

    Raises:
        InvalidArgumentError: there are no rows, or the block sizes differ.
    """
    if not 0 < len(theirs) <= _MAX_ROWS or min(theirs) < 1 or sum(theirs) != sum(ours):
        raise InvalidArgumentError(
            f"the peer's blocks have {sum(theirs)} bytes in {len(theirs)} rows, the local ones {sum(ours)} "
            f"bytes in {len(ours)} rows"
        )
    cuts = np.union1d(np.cumsum(ours), np.cumsum(theirs))
    if len(cuts) * _SPAN_BYTES > cuts[-1]:
        return [sum(ours)]
    rows: list[int] = np.diff(cuts, prepend=0).tolist()
    return rows


class BlockWindow:
    """A window on blocks of one storage as memory views that a socket reads or writes, one piece at a time.

    Host memory that can be split into these rows is used in place. Other memory, such as a GPU's, is copied
    through a buffer.

    Args:
        rows: from `choose_rows`.
    """

    def __init__(self, storage: BlockStorage, rows: Sequence[int]) -> None:
        self._storage = storage
        self._buffer: BlockStorage | None = None
        table = storage.segments
        if storage.device != "cpu" or len(table) > len(rows):
            size = count_piece_blocks(storage)
            self._buffer = make_host_buffer(storage.block_bytes, size, storage.block_format)
            table = self._buffer.segments
        sizes = np.array(rows, np.int64)
        split = SegmentTable(1, np.zeros_like(sizes), sizes, sizes, (None,) * len(rows))  # without memory
        self._spans = split_alike(table, split)[0]

    def read_out(self, block_ids: IntArray) -> list[memoryview]:
        """Return views of the bytes of these blocks, in wire order."""
        if self._buffer is not None:
            places = np.arange(len(block_ids), dtype=np.int64)
            self._storage.copy_to(self._buffer, np.stack([block_ids, places], axis=1))
        return self.list_views(block_ids)

    def list_views(self, block_ids: IntArray) -> list[memoryview]:
        """Return views to receive the bytes of these blocks into, in wire order; then call `write_in`."""
        return self._spans.list_views(block_ids if self._buffer is None else np.arange(len(block_ids)))

    def write_in(self, block_ids: IntArray) -> None:
        """Complete a receive: the views of `list_views` are full; on return the blocks have them."""
        if self._buffer is not None:
            places = np.arange(len(block_ids), dtype=np.int64)
            self._buffer.copy_to(self._storage, np.stack([places, block_ids], axis=1))
