"""`TcpBackend`: blocks over TCP, with the standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import ClassVar, TypeVar, cast

import msgspec
import numpy as np

from kv_pool.errors import (
    CopyFailedError,
    InvalidBlockError,
    MigrationError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.backends.wire_rows import BlockWindow, choose_rows, list_rows
from kv_pool.migration.calls import describe_failure, raise_failure
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import CallFailed
from kv_pool.migration.transfer_backend import BlockReader, ReadCount, TransferBackend
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import IntArray
from kv_pool.storage.spans import find_runs, make_block_ids

# The source checks the lease between two pieces, about every ten milliseconds. Smaller pieces cost
# throughput: no bytes are copied during the check.
PIECE_BYTES = 32 * 1024 * 1024

_CONNECT_S = 10.0
_SEND_S = 30.0  # a reader that accepts no bytes for this time has stopped; its lease expires
_IDLE_S = 600.0


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a reader: the spans of its blocks, in bytes."""

    spans: list[int]


class ReadRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for blocks: `runs` has the first id and the count of each run, alternating."""

    transfer_id: TransferId
    runs: list[int]


class PieceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of `num_blocks` blocks that follow as raw bytes; 0 ends the read, in success or failure."""

    num_blocks: int
    failed: CallFailed | None = None


class TcpBackend(TransferBackend):
    """The reference backend, and the fallback if no faster one is available.

    A reader requests runs of blocks over a connection to the node's own port. The source sends them in pieces
    of 32 MiB from the storage's memory, and checks before and after each piece that they are leased (M6); the
    reader receives them into its storage's memory. The bytes are neither encrypted nor authenticated; a
    migration compares checksums, which it gets over an encrypted connection.

        reader   Rows      ReadRuns                                     ReadRuns ...
        source                       PieceHeader bytes PieceHeader bytes ... PieceHeader(0)

    Args:
        connect_s: time limit for connecting to a peer.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, storage: BlockStorage, connect_s: float = _CONNECT_S) -> None:
        super().__init__(storage)
        self._connect_s = connect_s
        self._is_closed = False

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(Rows(list_rows(self.storage)))

    def open(self, peer_name: NodeName, description: bytes) -> BlockReader:
        try:
            theirs = _decode(description, Rows).spans
        except MigrationError as error:
            raise PeerUnavailableError(f"{peer_name}: {error}") from error
        from kv_pool.migration.remote_calls import RemoteCalls

        with closing(RemoteCalls(self.find_address(peer_name), self.secret, self.node_name)) as calls:
            channel = calls.connect_bulk(self.name, self._connect_s)
        with ExitStack() as on_failure:
            on_failure.callback(channel.close)
            ours = list_rows(self.storage)
            window = BlockWindow(self.storage, choose_rows(ours, theirs), count_piece_blocks(self.storage))
            channel.send(msgspec.msgpack.encode(Rows(ours)), time.monotonic() + self._connect_s)
            on_failure.pop_all()
        return TcpReader(channel, self.storage, window, peer_name)

    def get_bulk_handler(self) -> Callable[[Channel, NodeName], None] | None:
        return self.serve

    def serve(self, channel: Channel, caller: NodeName) -> None:
        """Serve one reader until it closes the connection or is idle for ten minutes.

        Raises:
            PeerUnavailableError: the connection is broken.
            KVPoolError: the reader violates the protocol.
        """
        theirs = _decode(channel.receive(time.monotonic() + _SEND_S), Rows).spans
        rows = choose_rows(list_rows(self.storage), theirs)
        window = BlockWindow(self.storage, rows, count_piece_blocks(self.storage))
        while channel.wait_for_more(_IDLE_S):
            asked = _decode(channel.receive(time.monotonic() + _SEND_S), ReadRuns)
            try:
                self._send_blocks(channel, window, asked)
                over = PieceHeader(0)
            except (StaleTransferError, InvalidBlockError) as error:
                over = PieceHeader(0, describe_failure(error))
            channel.send(msgspec.msgpack.encode(over), time.monotonic() + _SEND_S)

    def close(self) -> None:
        self._is_closed = True

    def _send_blocks(self, channel: Channel, window: BlockWindow, asked: ReadRuns) -> None:
        ids = _expand_runs(asked.runs, self.storage.num_blocks)
        for some in _split(ids, count_piece_blocks(self.storage)):
            named = some.tolist()
            self._check_leased(asked.transfer_id, named)
            header = msgspec.msgpack.encode(PieceHeader(len(some)))
            channel.send(header, time.monotonic() + _SEND_S, raw=window.read_out(some))
            # The second check confirms that the lease did not end while the bytes were sent.
            self._check_leased(asked.transfer_id, named)

    def _check_leased(self, transfer_id: TransferId, block_ids: list[BlockId]) -> None:
        if self._is_closed:
            raise StaleTransferError("the node is closing and no longer serves blocks")
        self.check_leased(transfer_id, block_ids)


class TcpReader(BlockReader):
    """A reader made by `TcpBackend.open`. Only `read` writes to blocks, so the reader is always settled."""

    def __init__(
        self, channel: Channel, storage: BlockStorage, window: BlockWindow, peer_name: NodeName
    ) -> None:
        self._channel = channel
        self._storage = storage
        self._window = window
        self._peer_name = peer_name

    def read(
        self,
        transfer_id: TransferId,
        remote_ids: Sequence[BlockId],
        local_ids: Sequence[BlockId],
        deadline: float,
    ) -> ReadCount:
        targets = make_block_ids(local_ids, self._storage.num_blocks)
        sources = np.asarray(remote_ids, np.int64)
        starts, lengths = find_runs(sources, targets)
        runs: list[int] = np.stack([sources[starts], lengths], axis=1).reshape(-1).tolist()
        try:
            self._channel.send(msgspec.msgpack.encode(ReadRuns(transfer_id, runs)), deadline)
            self._receive_blocks(targets, deadline)
        except StaleTransferError:
            raise  # the connection is between two pieces, so it can be reused
        except (MigrationError, CopyFailedError) as error:
            self._channel.close()
            raise TransferFailedError(
                f"reading {len(targets)} blocks of {self._peer_name}: {error}"
            ) from error
        return ReadCount(len(targets) * self._storage.block_bytes, len(starts))

    def is_settled(self) -> bool:
        return True

    def is_usable(self) -> bool:
        return self._channel.is_quiet()

    def close(self) -> None:
        self._channel.close()

    def _receive_blocks(self, targets: IntArray, deadline: float) -> None:
        most = count_piece_blocks(self._storage)
        num_done = 0
        while True:
            header = _decode(self._channel.receive(deadline), PieceHeader)
            if header.failed is not None:
                raise_failure(header.failed, self._peer_name)
            if header.num_blocks == 0 and num_done == len(targets):
                return
            if not 0 < header.num_blocks <= min(most, len(targets) - num_done):
                raise MigrationError(
                    f"the source sent a piece of {header.num_blocks} blocks after {num_done} of "
                    f"{len(targets)}; a piece has at most {most}"
                )
            some = targets[num_done : num_done + header.num_blocks]
            self._channel.receive_raw(self._window.list_target_views(some), deadline)
            self._window.write_in(some)
            num_done += len(some)


def count_piece_blocks(storage: BlockStorage) -> int:
    """Return the maximum number of blocks of a piece; the same on both sides."""
    return max(1, PIECE_BYTES // storage.block_bytes)


def _expand_runs(runs: list[int], num_blocks: int) -> IntArray:
    """Return the block ids of these runs. Raises MigrationError if the runs are malformed."""
    if len(runs) % 2 or min(runs[1::2], default=1) < 1 or sum(runs[1::2]) > num_blocks:
        raise MigrationError(
            f"malformed request for {len(runs) // 2} runs of {sum(runs[1::2])} blocks; the storage has "
            f"{num_blocks}"
        )
    firsts = make_block_ids(cast("list[BlockId]", runs[::2]), num_blocks)
    counts = np.array(runs[1::2], np.int64)
    places_in_runs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return make_block_ids(np.repeat(firsts, counts) + places_in_runs, num_blocks)


def _split(ids: IntArray, size: int) -> Iterator[IntArray]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _decode(data: bytes, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise MigrationError(f"cannot decode a {kind.__name__} message: {error}") from error
