"""`InProcessBackend`: direct copies between pools of the same process."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kv_pool.errors import CopyFailedError, PeerUnavailableError, TransferFailedError
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.transfer_backend import BlockReader, ReadCount, TransferBackend
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import count_pieces, make_block_ids, split_alike

_PIECE_BYTES = 64 * 1024 * 1024

_here: weakref.WeakValueDictionary[bytes, InProcessBackend] = weakref.WeakValueDictionary()
"""The open backends of this process, by their random token."""


class InProcessBackend(TransferBackend):
    """A backend for pools of the same process: one copy from storage to storage, also between devices.

    A running copy cannot be stopped: the deadline is checked between pieces of 64 MiB.
    """

    name: ClassVar[str] = "in_process"

    def __init__(self, storage: BlockStorage) -> None:
        super().__init__(storage)
        self._token = secrets.token_bytes(16)
        _here[self._token] = self

    def describe(self) -> bytes:
        # A forked process has the same tokens, but different memory.
        return os.getpid().to_bytes(8) + self._token

    def open(self, peer_name: NodeName, description: bytes) -> BlockReader:
        peer = _here.get(description[8:])
        if peer is None or peer.describe() != description:
            raise PeerUnavailableError(
                f"{peer_name} is not in this process, or is closed; use tcp or nixl for other processes"
            )
        return InProcessReader(self, peer, peer_name)

    def is_served(self) -> bool:
        """Return True until the backend is closed."""
        return self._token in _here

    def close(self) -> None:
        _here.pop(self._token, None)


class InProcessReader(BlockReader):
    """A reader made by `InProcessBackend.open`."""

    def __init__(self, backend: InProcessBackend, peer: InProcessBackend, peer_name: NodeName) -> None:
        self._backend = backend
        self._peer = peer
        self._peer_name = peer_name
        self._is_open = True

    def read(
        self,
        transfer_id: TransferId,
        remote_ids: Sequence[BlockId],
        local_ids: Sequence[BlockId],
        deadline: float,
    ) -> ReadCount:
        source, target = self._peer.storage, self._backend.storage
        sources = make_block_ids(remote_ids, source.num_blocks)
        targets = make_block_ids(local_ids, target.num_blocks)
        step = max(1, _PIECE_BYTES // source.block_bytes)
        for start in range(0, len(sources), step):
            some = slice(start, start + step)
            if not self.is_usable():
                raise TransferFailedError(f"{self._peer_name} is closed")
            if time.monotonic() >= deadline:
                raise TransferFailedError(f"{self._peer_name}: deadline passed after {start} blocks")
            self._peer.check_leased(transfer_id, remote_ids[some])
            try:
                source.copy_to(target, np.stack([sources[some], targets[some]], axis=1))
            except CopyFailedError as error:
                raise TransferFailedError(f"{self._peer_name}: {error}") from error
            target.synchronize()
            self._peer.check_leased(transfer_id, remote_ids[some])
        return ReadCount(
            len(sources) * source.block_bytes,
            count_pieces(*split_alike(source.segments, target.segments), sources, targets),
        )

    def is_settled(self) -> bool:
        return True

    def is_usable(self) -> bool:
        return self._is_open and self._peer.is_served()

    def close(self) -> None:
        self._is_open = False
