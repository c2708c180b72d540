"""`Prefetcher`: reads blocks from disk in a background thread, before they are needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kv_pool.errors import OutOfThreadsError
from kv_pool.ids import BlockHashWithGroupId, RequestId, SlotId
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import BUFFER_BYTES, ByteRows
from kv_pool.tiers.order_thread import OrderThread

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PrefetchBatch:
    """A batch of blocks to read, and its result.

    Attributes:
        owner: the request that the blocks are read for.
        keys, slots: the blocks' keys, and their slots in the disk tier at the time of the call.
        is_void: the batch has been cancelled.
        is_done: the batch has been read; set last, by the thread.
        found: the keys that were read.
        rows: their bytes, (len(found), block_bytes) uint8.
        failed: the keys that could not be read.
    """

    owner: RequestId
    keys: list[BlockHashWithGroupId]
    slots: list[SlotId]
    is_void: bool = False
    is_done: bool = False
    found: list[BlockHashWithGroupId] = field(default_factory=list)
    rows: ByteRows | None = None
    failed: list[BlockHashWithGroupId] = field(default_factory=list)


class Prefetcher:
    """Reads batches of blocks in a background thread, which is started with the first batch.

    Args:
        tier: the tier to read. The thread only reads its files.
        max_blocks: maximum number of blocks that are waiting, being read, or read and not yet taken, beside
            a batch that was cancelled while it was read.

    Only `wait` and `close` block; all other methods return at once.
    """

    def __init__(self, tier: DiskTier, max_blocks: int) -> None:
        self.tier = tier
        self._max_blocks = max_blocks
        self._batch = max(1, BUFFER_BYTES // tier.layout.block_bytes)
        self._thread = OrderThread("kv_pool prefetch")
        self._batches: list[PrefetchBatch] = []  # oldest first, until they are taken or cancelled

    def count_asked(self, owner: RequestId) -> int:
        """Return how many blocks are waiting, being read, or read for this owner."""
        return sum(len(batch.keys) for batch in self._batches if batch.owner == owner)

    def ask(self, owner: RequestId, blocks: Sequence[tuple[BlockHashWithGroupId, SlotId]]) -> None:
        """Queue blocks, (key, slot) each, for reading. Skips blocks already queued or beyond `max_blocks`."""
        asked = {key for batch in self._batches for key in batch.keys}
        new = [block for block in blocks if block[0] not in asked]
        new = new[: max(0, self._max_blocks - len(asked))]
        if not new:
            return
        try:
            self._thread.start()
        except OutOfThreadsError as error:
            # Prefetching is optional: the blocks are read when they are needed.
            _logger.warning("%d blocks were not prefetched: %s", len(new), error)
            return
        batches = []
        for start in range(0, len(new), self._batch):
            keys, slots = zip(*new[start : start + self._batch], strict=True)
            batches.append(PrefetchBatch(owner, list(keys), list(slots)))
        self._thread.add([partial(self._read, batch) for batch in batches])
        self._batches += batches

    def cancel(self, owner: RequestId | None = None) -> None:
        """Cancel the reads of this owner, by default of all owners, and drop what was read for it."""
        for batch in self._batches:
            batch.is_void = batch.is_void or owner in (None, batch.owner)
        self._batches = [batch for batch in self._batches if not batch.is_void]

    def take_done(self) -> list[PrefetchBatch]:
        """Return the batches read since the last call, oldest first. The caller owns their memory."""
        done = [batch for batch in self._batches if batch.is_done]
        if done:
            self._batches = [batch for batch in self._batches if batch not in done]
        return done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued blocks have been read. Return False after `timeout_s` seconds."""
        return self._thread.wait(timeout_s)

    def close(self) -> None:
        """Stop the thread and wait for it, at most until the current batch has been read."""
        self.cancel()
        self._thread.close()

    def _read(self, batch: PrefetchBatch) -> None:
        try:
            if not batch.is_void:
                batch.found, batch.rows, batch.failed = self.tier.read_apart(batch.keys, batch.slots)
        finally:  # after an error, such as MemoryError, the blocks are read when they are needed
            batch.is_done = True
