"""`Prefetcher`: reads blocks from disk ahead of need, in a thread, into memory of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_pool.errors import OutOfThreadsError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.threads import start_thread
from kv_pool.tiers.block_rows import ByteRows
from kv_pool.tiers.disk_tier import DiskTier

_logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 1024 * 1024


@dataclass
class Errand:
    """Some blocks that are to be read, or were.

    Attributes:
        owner: for whom.
        keys, slots: of the blocks in the disk tier when they were asked for.
        is_void: nobody wants them any more.
        found: the keys that were read, once they were.
        rows: their bytes, (len(found), block_bytes).
        failed: the keys that could not be read.
    """

    owner: str
    keys: list[BlockHashWithGroupId]
    slots: list[int]
    is_void: bool = False
    found: list[BlockHashWithGroupId] = field(default_factory=list)
    rows: ByteRows | None = None
    failed: list[BlockHashWithGroupId] = field(default_factory=list)


class Prefetcher:
    """A thread with a list of errands, started with the first one.

    Args:
        tier: what is read. The thread only reads its files, and looks at nothing else of it.
        max_blocks: so many blocks are waiting, being read, or read and not taken yet, at most.

    Attributes:
        num_errors: errands of which nothing came.

    All methods return at once, but `wait` and `close`.
    """

    def __init__(self, tier: DiskTier, max_blocks: int) -> None:
        self._tier = tier
        self._max_blocks = max_blocks
        self._batch = max(1, _BATCH_BYTES // tier.layout.block_bytes)
        # Taken as such: an exception in `Condition.__enter__` would leave the lock taken.
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)
        self._waiting: deque[Errand] = deque()
        self._running: Errand | None = None
        self._done: list[Errand] = []
        self._num_blocks = 0
        self.num_errors = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def count_asked(self, owner: str) -> int:
        """How many blocks are waiting, being read, or read for this owner."""
        with self._mutex:
            return sum(len(errand.keys) for errand in self._list_errands() if errand.owner == owner)

    def ask(self, owner: str, blocks: Sequence[tuple[BlockHashWithGroupId, int]]) -> None:
        """Read these blocks, (key, slot) each, unless they are being read; no more than there is room for."""
        with self._mutex:
            asked = {key for errand in self._list_errands() for key in errand.keys}
            new = [block for block in blocks if block[0] not in asked]
            new = new[: max(0, self._max_blocks - self._num_blocks)]
            errands = []
            for start in range(0, len(new), self._batch):
                keys, slots = zip(*new[start : start + self._batch], strict=True)
                errands.append(Errand(owner, list(keys), list(slots)))
            num_new = len(new)
            self._waiting += errands  # no call in between
            self._num_blocks += num_new
            if not self._waiting:
                return
            if self._thread is None:
                try:
                    self._thread = start_thread("kv_pool prefetch", self._run)
                except OutOfThreadsError as error:
                    # Reading ahead is a favour: the blocks are read when they are needed.
                    _logger.warning("%d blocks are not read ahead: %s", len(new), error)
                    self.num_errors += 1
                    self._waiting.clear()
                    self._num_blocks -= len(new)
            self._lock.notify_all()

    def cancel(self, owner: str | None = None) -> None:
        """Nothing is read any more for this owner, or for anybody; what was read for it is dropped."""
        with self._mutex:
            for errand in self._list_errands():
                errand.is_void = errand.is_void or owner in (None, errand.owner)
            num_left = sum(len(errand.keys) for errand in self._list_errands() if not errand.is_void)
            waiting = deque(errand for errand in self._waiting if not errand.is_void)
            done = [errand for errand in self._done if not errand.is_void]
            if self._running is not None and self._running.is_void:
                num_left += len(self._running.keys)
            self._waiting = waiting  # no call in between
            self._done = done
            self._num_blocks = num_left

    def take_done(self) -> list[Errand]:
        """What was read since the last call; oldest first. Its memory is the caller's."""
        if not self._done:  # without the lock: a step is not held up for it
            return []
        with self._mutex:
            done = self._done
            num_blocks = sum(len(errand.keys) for errand in done)
            self._done = []  # no call in between
            self._num_blocks -= num_blocks
            return done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is waiting or being read; False if it took longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and self._running is None, timeout_s)

    def close(self) -> None:
        """Stop reading, and wait for the thread: for one errand at most."""
        self.cancel()
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _list_errands(self) -> list[Errand]:
        running = [] if self._running is None else [self._running]
        return [*self._done, *running, *self._waiting]

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                errand = self._running = self._waiting.popleft()
            try:
                errand.found, errand.rows, errand.failed = self._tier.read_apart(errand.keys, errand.slots)
            except Exception:  # memory that is short, say: whoever needs the blocks reads them then
                _logger.exception("reading %d blocks ahead failed", len(errand.keys))
                self.num_errors += 1
            with self._lock:
                self._running = None
                if errand.is_void:
                    self._num_blocks -= len(errand.keys)
                else:
                    self._done.append(errand)
                self._lock.notify_all()
