"""`Prefetcher`: reads blocks from disk in a background thread, before they are needed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_pool.errors import OutOfThreadsError
from kv_pool.ids import BlockHashWithGroupId, RequestId, SlotId
from kv_pool.threads import start_thread
from kv_pool.tiers.block_rows import ByteRows
from kv_pool.tiers.disk_tier import DiskTier

_logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 1024 * 1024


@dataclass
class PrefetchBatch:
    """A batch of blocks to read, and its result.

    Attributes:
        owner: the request that the blocks are read for.
        keys, slots: the blocks' keys, and their slots in the disk tier at the time of the call.
        is_void: the batch has been cancelled.
        found: the keys that were read.
        rows: their bytes, (len(found), block_bytes) uint8.
        failed: the keys that could not be read.
    """

    owner: RequestId
    keys: list[BlockHashWithGroupId]
    slots: list[SlotId]
    is_void: bool = False
    found: list[BlockHashWithGroupId] = field(default_factory=list)
    rows: ByteRows | None = None
    failed: list[BlockHashWithGroupId] = field(default_factory=list)


class Prefetcher:
    """A background thread that reads batches of blocks; started with the first batch.

    Args:
        tier: the tier to read. The thread only reads its files.
        max_blocks: maximum number of blocks that are waiting, being read, or read and not yet taken.

    Attributes:
        num_errors: number of batches that failed.

    Only `wait` and `close` block; all other methods return at once.
    """

    def __init__(self, tier: DiskTier, max_blocks: int) -> None:
        self._tier = tier
        self._max_blocks = max_blocks
        self._batch = max(1, _BATCH_BYTES // tier.layout.block_bytes)
        # Locked directly: an exception in `Condition.__enter__` would leave the lock held.
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)
        self._waiting: deque[PrefetchBatch] = deque()
        self._running: PrefetchBatch | None = None
        self._done: list[PrefetchBatch] = []
        self._num_blocks = 0
        self.num_errors = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def count_asked(self, owner: RequestId) -> int:
        """Return how many blocks are waiting, being read, or read for this owner."""
        with self._mutex:
            return sum(len(batch.keys) for batch in self._list_batches() if batch.owner == owner)

    def ask(self, owner: RequestId, blocks: Sequence[tuple[BlockHashWithGroupId, SlotId]]) -> None:
        """Queue blocks, (key, slot) each, for reading. Skips blocks already queued or beyond `max_blocks`."""
        with self._mutex:
            asked = {key for batch in self._list_batches() for key in batch.keys}
            new = [block for block in blocks if block[0] not in asked]
            new = new[: max(0, self._max_blocks - self._num_blocks)]
            batches = []
            for start in range(0, len(new), self._batch):
                keys, slots = zip(*new[start : start + self._batch], strict=True)
                batches.append(PrefetchBatch(owner, list(keys), list(slots)))
            num_new = len(new)
            self._waiting += batches  # no call in between
            self._num_blocks += num_new
            if not self._waiting:
                return
            if self._thread is None:
                try:
                    self._thread = start_thread("kv_pool prefetch", self._run)
                except OutOfThreadsError as error:
                    # Prefetching is optional: the blocks are read when they are needed.
                    _logger.warning("%d blocks were not prefetched: %s", len(new), error)
                    self.num_errors += 1
                    self._waiting.clear()
                    self._num_blocks -= len(new)
            self._lock.notify_all()

    def cancel(self, owner: RequestId | None = None) -> None:
        """Cancel the reads of this owner, by default of all owners, and drop what was read for it."""
        with self._mutex:
            for batch in self._list_batches():
                batch.is_void = batch.is_void or owner in (None, batch.owner)
            num_left = sum(len(batch.keys) for batch in self._list_batches() if not batch.is_void)
            waiting = deque(batch for batch in self._waiting if not batch.is_void)
            done = [batch for batch in self._done if not batch.is_void]
            if self._running is not None and self._running.is_void:
                num_left += len(self._running.keys)
            self._waiting = waiting  # no call in between
            self._done = done
            self._num_blocks = num_left

    def take_done(self) -> list[PrefetchBatch]:
        """Return the batches read since the last call, oldest first. The caller owns their memory."""
        if not self._done:  # checked without the lock, so that a step does not wait
            return []
        with self._mutex:
            done = self._done
            num_blocks = sum(len(batch.keys) for batch in done)
            self._done = []  # no call in between
            self._num_blocks -= num_blocks
            return done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued blocks have been read. Return False after `timeout_s` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and self._running is None, timeout_s)

    def close(self) -> None:
        """Stop the thread and wait for it, at most until the current batch has been read."""
        self.cancel()
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _list_batches(self) -> list[PrefetchBatch]:
        running = [] if self._running is None else [self._running]
        return [*self._done, *running, *self._waiting]

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                batch = self._running = self._waiting.popleft()
            try:
                batch.found, batch.rows, batch.failed = self._tier.read_apart(batch.keys, batch.slots)
            except Exception:  # such as MemoryError; the blocks are read when they are needed
                _logger.exception("prefetching %d blocks failed", len(batch.keys))
                self.num_errors += 1
            with self._lock:
                self._running = None
                if batch.is_void:
                    self._num_blocks -= len(batch.keys)
                else:
                    self._done.append(batch)
                self._lock.notify_all()
