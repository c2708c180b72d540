"""`VerifiedReads`: the bytes of a pull's blocks, read in batches and compared with the source's checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import TransferFailedError
from kv_pool.migration.messages import AskChecksums, Checksums, NodeDescription
from kv_pool.migration.pull_settings import PullSettings
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.site import OfferedBlock
from kv_pool.migration.source_calls import TRIES, SourceCalls
from kv_pool.migration.status import MigrationRecord
from kv_pool.migration.transfer_backend import BlockReader
from kv_pool.storage.checksums import checksum_blocks

_BATCH_BYTES = 32 * 1024 * 1024
_BATCH_BLOCKS = 1024


@dataclass
class _Batch:
    """Blocks that are read at once: positions in the offer, ids at both sides."""

    positions: list[int]
    remote_ids: list[int]
    local_ids: list[int]


class VerifiedReads:
    """The reads of one pull. Connects to the source when it is made.

    Args:
        record: of the migration; what is read is counted there.
        limit: of this migration; that of all is in the settings.

    Attributes:
        reader: the connection; None before another one is made, and after `leave`.
    """

    def __init__(
        self,
        settings: PullSettings,
        calls: SourceCalls,
        source: NodeDescription,
        record: MigrationRecord,
        limit: RateLimit,
    ) -> None:
        self._settings = settings
        self._storage = settings.site.storage
        self._calls = calls
        self._source = source
        self._record = record
        self._limit = limit
        self._offered: list[OfferedBlock] = []
        self._blocks: list[KVCacheBlock] = []
        self.reader: BlockReader | None = calls.peer.take_reader(source)

    def read(self, offered: list[OfferedBlock], blocks: list[KVCacheBlock], positions: Sequence[int]) -> None:
        """Read these positions of the offer into the blocks; wrong bytes are read again, a few times.

        Raises:
            TransferFailedError: they were never what their checksums say, or do not arrive.
            What the pull was stopped with.
        """
        self._offered, self._blocks = offered, blocks
        for _ in range(TRIES):
            positions = self._read_once(positions)
            if not positions:
                return
        raise TransferFailedError(
            f"{len(positions)} blocks of node {self._source.name!r} were read {TRIES} times, and were "
            "never what their checksums say. Does another process write to them, or is the network broken?"
        )

    def leave(self) -> None:
        """Nothing more is read: the connection may be used by the next pull."""
        if self.reader is not None:
            self._calls.peer.leave_reader(self._source, self.reader)
            self.reader = None

    def close(self) -> None:
        """Hang up; `is_settled` tells whether something may yet be written."""
        if self.reader is not None:
            self.reader.close()

    def is_settled(self) -> bool:
        """Is nothing written into the blocks any more?"""
        return self.reader is None or self.reader.is_settled()

    def _read_once(self, positions: Sequence[int]) -> list[int]:
        """Read these blocks, each batch verified while the next one is read.

        Returns:
            Positions whose bytes are not those of their checksums.
        """
        parallel = self._settings.parallel
        wrong: list[int] = []
        verifying: Future[list[int]] | None = None
        for batch in self._make_batches(positions):
            asked = parallel.submit(partial(self._ask_checksums, batch))
            self._read_batch(batch)
            if verifying is not None:
                wrong += verifying.result()
            verifying = parallel.submit(partial(self._verify, batch, asked))
            self._settings.on_change(self._record)
        if verifying is not None:
            wrong += verifying.result()
        return wrong

    def _make_batches(self, positions: Sequence[int]) -> Iterator[_Batch]:
        """In the order of the ids at the source, so that neighbours are one piece."""
        offered, blocks = self._offered, self._blocks
        limits = (self._settings.limit, self._limit)
        most_bytes = min(limit.count_batch_bytes(_BATCH_BYTES) for limit in limits)
        size = min(_BATCH_BLOCKS, max(1, most_bytes // self._storage.block_bytes))
        order = sorted(positions, key=lambda position: offered[position].block_id)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            yield _Batch(
                some,
                [offered[position].block_id for position in some],
                [blocks[position].block_id for position in some],
            )

    def _read_batch(self, batch: _Batch) -> None:
        """Read it; over another connection where one has failed, unless that one may still write."""
        num_bytes = len(batch.positions) * self._storage.block_bytes
        wait_s = max(self._settings.limit.take(num_bytes), self._limit.take(num_bytes))
        if wait_s:
            self._calls.wait(wait_s)
        for num_left in reversed(range(TRIES)):
            self._calls.check_wanted()
            if self.reader is None:
                self.reader = self._calls.peer.take_reader(self._source)
            deadline = self._settings.deadline_clock() + self._settings.lease_s
            try:
                count = self.reader.read(
                    self._record.transfer_id, batch.remote_ids, batch.local_ids, deadline
                )
            except TransferFailedError:
                self.reader.close()
                if not num_left or not self.reader.is_settled():
                    raise
                self.reader = None
                continue
            self._record.status.num_bytes += count.num_bytes
            self._record.status.num_descriptors += count.num_descriptors
            return

    def _ask_checksums(self, batch: _Batch) -> npt.NDArray[np.uint64]:
        reply = self._calls.repeat(AskChecksums(self._record.transfer_id, batch.positions), Checksums)
        if len(reply.values) != 8 * len(batch.positions):
            raise TransferFailedError(
                f"node {self._source.name!r} has sent {len(reply.values)} bytes of checksums for "
                f"{len(batch.positions)} blocks; each has 8"
            )
        return np.frombuffer(reply.values, ">u8").astype(np.uint64)

    def _verify(self, batch: _Batch, asked: Future[npt.NDArray[np.uint64]]) -> list[int]:
        expected = asked.result()
        found = checksum_blocks(self._storage, batch.local_ids)
        wrong = np.flatnonzero(found != expected).tolist()
        self._record.status.num_done_blocks += len(batch.positions) - len(wrong)
        return [batch.positions[index] for index in wrong]
