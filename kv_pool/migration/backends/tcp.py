"""`TcpBackend`: blocks over a TCP connection, with nothing but the standard library."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

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
from kv_pool.migration.backends.wire_rows import BlockWindow, choose_rows, list_rows
from kv_pool.migration.call_failures import describe_failure, raise_failure
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import CallFailed
from kv_pool.migration.remote_calls import RemoteCalls
from kv_pool.migration.transfer_backend import BlockReader, ReadCount, TransferBackend
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import IntArray
from kv_pool.storage.spans import find_runs, make_block_ids

# Between two pieces the source looks whether the blocks are still lent, every ten milliseconds or so. With
# smaller ones that costs: while one end looks and the other gets ready, no bytes are copied.
PIECE_BYTES = 32 * 1024 * 1024

_CONNECT_S = 10.0
_SEND_S = 30.0  # a reader that takes no bytes for so long has stopped; its lease ends on its own
_IDLE_S = 600.0


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a reader: the spans of its blocks, in bytes."""

    spans: list[int]


class ReadRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Send these blocks: `runs` is first id and count of each run, one after the other."""

    transfer_id: bytes
    runs: list[int]


class PieceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many blocks follow, as raw bytes. None: this read is over, done if nothing has failed."""

    num_blocks: int
    failed: CallFailed | None = None


class TcpBackend(TransferBackend):
    """The reference, and what is there where nothing faster is.

    A reader asks for runs of blocks over a connection to the node's own port. The source sends them in
    pieces of 32 MiB, straight from where they lie, and before and after each piece makes sure that they are
    lent (M6); the reader puts them straight where they belong. Bytes are neither encrypted nor signed; a
    migration compares checksums, which it gets over a signed connection.

        reader   Rows      ReadRuns                                     ReadRuns ...
        source                       PieceHeader bytes PieceHeader bytes ... PieceHeader(0)

    Args:
        connect_s: how long connecting to a peer may take.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, storage: BlockStorage, connect_s: float = _CONNECT_S) -> None:
        super().__init__(storage)
        self._connect_s = connect_s
        self._is_closed = False

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(Rows(list_rows(self.storage)))

    def open(self, peer_name: str, description: bytes) -> BlockReader:
        try:
            theirs = _decode(description, Rows).spans
        except MigrationError as error:
            raise PeerUnavailableError(f"{peer_name}: {error}") from error
        calls = RemoteCalls(self.find_address(peer_name), self.secret, self.node_name)
        channel = calls.connect_bulk(self.name, self._connect_s)
        try:
            ours = list_rows(self.storage)
            window = BlockWindow(self.storage, choose_rows(ours, theirs), count_piece_blocks(self.storage))
            channel.send(msgspec.msgpack.encode(Rows(ours)), time.monotonic() + self._connect_s)
        except BaseException:
            channel.close()
            raise
        return TcpReader(channel, self.storage, window, peer_name)

    def get_bulk_handler(self) -> Callable[[Channel, str], None] | None:
        return self.serve

    def serve(self, channel: Channel, caller: str) -> None:
        """Serve one reader until it hangs up, or says nothing for ten minutes.

        Raises:
            PeerUnavailableError: it has gone.
            KVPoolError: it sends what no reader of ours does.
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
            self._check_lent(asked.transfer_id, named)
            header = msgspec.msgpack.encode(PieceHeader(len(some)))
            channel.send(header, time.monotonic() + _SEND_S, raw=window.read_out(some))
            # Only now is it known that what went out was theirs: the lease may have ended meanwhile.
            self._check_lent(asked.transfer_id, named)

    def _check_lent(self, transfer_id: bytes, block_ids: list[int]) -> None:
        if self._is_closed:
            raise StaleTransferError("the node is closing and lends nothing any more")
        self.find_lent(transfer_id, block_ids)


class TcpReader(BlockReader):
    """Made by `TcpBackend.open`. It writes the blocks itself, so when `read` has returned nobody writes."""

    def __init__(self, channel: Channel, storage: BlockStorage, window: BlockWindow, peer_name: str) -> None:
        self._channel = channel
        self._storage = storage
        self._window = window
        self._peer_name = peer_name

    def read(
        self, transfer_id: bytes, remote_ids: Sequence[int], local_ids: Sequence[int], deadline: float
    ) -> ReadCount:
        targets = make_block_ids(local_ids, self._storage.num_blocks)
        sources = np.asarray(remote_ids, np.int64)
        starts, lengths = find_runs(sources, targets)
        runs: list[int] = np.stack([sources[starts], lengths], axis=1).reshape(-1).tolist()
        try:
            self._channel.send(msgspec.msgpack.encode(ReadRuns(transfer_id, runs)), deadline)
            self._receive_blocks(targets, deadline)
        except StaleTransferError:
            raise  # between two pieces, so the next read may follow
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
                    f"it sends {header.num_blocks} blocks after {num_done} of {len(targets)}, {most} at most"
                )
            some = targets[num_done : num_done + header.num_blocks]
            self._channel.receive_raw(self._window.get_room(some), deadline)
            self._window.write_in(some)
            num_done += len(some)


def count_piece_blocks(storage: BlockStorage) -> int:
    """How many blocks a piece has at most; the same at both ends."""
    return max(1, PIECE_BYTES // storage.block_bytes)


def _expand_runs(runs: list[int], num_blocks: int) -> IntArray:
    """The ids of these runs. Raises MigrationError for what no reader would ask for."""
    if len(runs) % 2 or min(runs[1::2], default=1) < 1 or sum(runs[1::2]) > num_blocks:
        raise MigrationError(
            f"{len(runs) // 2} runs of {sum(runs[1::2])} blocks were asked for, of {num_blocks}"
        )
    firsts, counts = make_block_ids(runs[::2], num_blocks), np.array(runs[1::2], np.int64)
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
        raise MigrationError(f"what should be {kind.__name__} is something else: {error}") from error
