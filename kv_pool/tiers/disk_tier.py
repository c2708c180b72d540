"""`DiskTier`: blocks in a folder on disk, kept over restarts; `Prefetcher`: reads them in the background."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kv_pool.core.kv_events import MEDIUM_STORAGE
from kv_pool.errors import InvalidArgumentError, OutOfThreadsError, TierError
from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId, SlotId
from kv_pool.loggers import get_logger
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.threads import Workers
from kv_pool.tiers.disk_files import VERSION, Description, SlotFiles, SlotHeader, check_key
from kv_pool.tiers.formats.block_format import BlockFormat
from kv_pool.tiers.host_tier import RAW, ByteRows, RowBuffer, as_block_ids, skip_raw, view_rows
from kv_pool.tiers.tier import Tier, TierRead

_logger = get_logger(__name__)


class Reopened(NamedTuple):
    """The blocks that a `DiskTier` found when it opened its folder.

    Attributes:
        num_blocks: number of blocks that can be hit again.
        num_dropped: number of blocks dropped because they were damaged or truncated. Blocks beyond a reduced
            capacity are not counted.
    """

    num_blocks: int
    num_dropped: int


class DiskTier(Tier):
    """A tier that stores blocks in a folder: two files and a description; see `SlotFiles`.

    Args:
        folder: created if missing. One tier at a time can have it open.
        capacity: maximum number of blocks; may differ from the previous run.
        layout: the meaning of bytes and hashes. Give the hasher a fixed seed: hashes with a random seed are
            useless after a restart.
        block_format: how blocks are encoded; None stores raw bytes.
        verifies: when the folder is opened, read every block once and drop the damaged ones. If False, drop
            only blocks that are truncated or have an invalid header. Every read verifies its block anyway.
        medium: the medium of its blocks in events and statistics.

    Attributes:
        layout: the meaning of bytes and hashes.
        reopened: the blocks that were found in the folder.

    Raises:
        TierError: the folder cannot be used: no permission, in use, not a tier's folder, or writable by other
            users, itself or its files; see `SlotFiles`.
        LayoutMismatchError: its blocks have another layout or meaning. The folder is unchanged.

    A block that cannot be written is counted and not stored; a block that cannot be read is counted and
    removed. A written block survives the end of the process at once, and a crash of the machine once the
    operating system has written it to the disk. Blocks that `forget` and `clear` remove stay removed from the
    moment the call returns, even after a power failure, including blocks that had been removed before.
    """

    has_bytes = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity: int,
        layout: BlockLayout,
        block_format: BlockFormat | None = None,
        *,
        verifies: bool = True,
        medium: str = MEDIUM_STORAGE,
    ) -> None:
        super().__init__(capacity, medium)
        self.layout = layout
        if layout.block_bytes < 1:
            raise InvalidArgumentError("the layout has blocks of 0 bytes; use a Tier for those")
        self._format = skip_raw(block_format)
        self._encoded_bytes = layout.block_bytes if self._format is None else self._format.encoded_bytes
        self._counts.block_bytes = self._encoded_bytes
        self._buffer = RowBuffer(layout.block_bytes, layout.block_format)
        self._encoded = RowBuffer(self._encoded_bytes, "encoded")
        self.batch_blocks = self._buffer.num_blocks
        self._use = 0
        self._touched: set[BlockHashWithGroupId] = set()
        self._has_warned = False
        # Slots whose header on disk could not be wiped, with the header's key: a restart would find them.
        self._unwiped: dict[SlotId, BlockHashWithGroupId] = {}
        name = RAW if self._format is None else self._format.name
        self._is_open = True
        try:
            self._files = SlotFiles(Path(folder), Description(VERSION, layout, name, self._encoded_bytes))
            with ExitStack() as closing:
                closing.callback(self._files.close)
                self.reopened = self._reopen(verifies)
                closing.pop_all()
        except TierError:
            raise
        except OSError as error:
            raise TierError(f"{folder} cannot be used as a tier: {error}") from error

    # ---- writing and reading ---------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None = None,
        block_ids: Sequence[BlockId] = (),
    ) -> list[BlockHashWithGroupId]:
        if storage is None or len(block_ids) != len(keys):
            raise InvalidArgumentError(f"{len(block_ids)} blocks for {len(keys)} keys")
        for key in keys:
            check_key(key)
        if not keys:
            return []
        there = view_rows(storage)
        rows: Iterable[ByteRows]
        if self._format is None and there is not None:
            rows = [there[block_id] for block_id in block_ids]
        else:
            gathered = self._buffer.gather(storage, block_ids)
            rows = gathered if self._format is None else self._format.encode(gathered)
        stored: list[BlockHashWithGroupId] = []
        slots = self._list_next_slots(len(keys))
        try:
            for key, row in zip(keys, rows, strict=True):
                slot = slots[len(stored)]
                self._use += 1
                parent, num_tokens = self.parents.get(key, (None, 0))
                header = SlotHeader(key, self._use, parent=parent, num_tokens=num_tokens)
                try:
                    self._files.write(slot, header, row)
                except OSError as error:
                    self._unwiped[slot] = key
                    self._counts.num_write_errors += 1
                    self._warn("written", error)
                else:
                    self._unwiped.pop(slot, None)
                    stored.append(key)
        finally:  # what is written has its slot, even after an interruption
            super().put(stored)
        return stored

    def read(self, keys: Sequence[BlockHashWithGroupId]) -> TierRead:
        slots = [self._slot_of[key] for key in keys]
        rows = (self._buffer if self._format is None else self._encoded).rows
        found, failed = self._read_rows(keys, slots, rows)
        if self._format is not None:
            self._buffer.rows[: len(found)] = self._format.decode(rows[: len(found)])
        self._counts.num_read += len(found)
        self._drop_unreadable(failed)
        return TierRead(found, self._buffer.storage, as_block_ids(range(len(found))), failed)

    def load(
        self, keys: Sequence[BlockHashWithGroupId], storage: BlockStorage | None, block_ids: Sequence[BlockId]
    ) -> list[BlockHashWithGroupId]:
        rows = None if storage is None or self._format is not None else view_rows(storage)
        if rows is None:
            return super().load(keys, storage, block_ids)
        # Read from the file directly into the target blocks, without a buffer in between.
        failed = [
            key
            for key, block_id in zip(keys, block_ids, strict=True)
            if not self._read_row(key, self._slot_of[key], rows[block_id])
        ]
        self._counts.num_read += len(keys) - len(failed)
        self._drop_unreadable(failed)
        return failed

    def read_apart(self, keys: Sequence[BlockHashWithGroupId], slots: Sequence[SlotId]) -> TierRead:
        """Read blocks into newly allocated memory. Safe to call from any thread while the tier is in use.

        Args:
            slots: the slots where the blocks were; a block may have left its slot since.
        Returns:
            The blocks that were read and verified, in the same order, and the remaining keys; valid for good.
            Changes neither the tier nor its counts.
        """
        rows = np.empty((len(keys), self._encoded_bytes), np.uint8)
        found, failed = self._read_rows(keys, slots, rows)
        rows = rows[: len(found)]
        if self._format is not None:
            rows = self._format.decode(rows)
        storage = BlockStorage.wrap_state([rows], block_format=self.layout.block_format) if found else None
        return TierRead(found, storage, as_block_ids(range(len(found))), failed)

    def _read_rows(
        self, keys: Sequence[BlockHashWithGroupId], slots: Sequence[SlotId], rows: ByteRows
    ) -> tuple[list[BlockHashWithGroupId], list[BlockHashWithGroupId]]:
        """Read encoded blocks into the first rows. Return the keys that were read, and those that failed."""
        found: list[BlockHashWithGroupId] = []
        failed: list[BlockHashWithGroupId] = []
        for key, slot in zip(keys, slots, strict=True):
            (found if self._read_row(key, slot, rows[len(found)]) else failed).append(key)
        return found, failed

    def _read_row(self, key: BlockHashWithGroupId, slot: SlotId, into: ByteRows) -> bool:
        """Read an encoded block. Return False if it is missing or damaged."""
        try:
            header = self._files.read(slot, into)
        except OSError as error:
            self._warn("read", error)
            return False
        return header is not None and header.key == key

    def _drop_unreadable(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove blocks that could not be read, and count them."""
        self._counts.num_read_errors += len(keys)
        self.remove(keys)

    # ---- forgetting ------------------------------------------------------------------------------

    def touch(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        listed = list(keys)
        self._touched.update(key for key in listed if key in self)
        return super().touch(listed)

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Remove blocks with wrong content for good, even across a power failure.

        Raises:
            TierError: the removal could not be written to the disk. The blocks are no longer found, but may
                be found again after the folder is reopened. The next `forget`, and `close`, retry.
        """
        listed = list(keys)
        removed = self.remove(listed)
        failure = self._wipe_again()
        num_left = len(set(listed).intersection(self._unwiped.values()))
        try:
            self._files.sync()
        except OSError as error:
            failure = failure or error
            num_left = len(listed)
        if failure is not None and num_left:
            raise self._make_error(f"{num_left} of {len(listed)} blocks", failure) from failure
        return removed

    def clear(self) -> None:
        """Remove all blocks for good.

        Raises:
            TierError: as in `forget`.
        """
        self._unwiped.update((slot, key) for key, slot in self._slot_of.items())
        super().clear()
        self._touched.clear()
        try:
            self._files.wipe_all()
        except OSError as error:
            raise self._make_error("its blocks", error) from error
        self._unwiped.clear()

    def close(self) -> None:
        """Write the order of last use to the disk and unlock the folder. No-op on a second call."""
        if self._is_open:
            self._is_open = False
            self._wipe_again()
            try:
                self._write_order()
            except OSError as error:
                self._warn("put in order", error)
            self._files.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _empty_slot(self, slot: SlotId, key: BlockHashWithGroupId) -> None:
        super()._empty_slot(slot, key)
        self._touched.discard(key)
        self._wipe_first(slot, key)

    def _wipe_first(self, slot: SlotId, key: BlockHashWithGroupId) -> None:
        """Wipe the header of a slot that has this key; count and log a failure."""
        error = self._wipe(slot, key)
        if error is not None:
            self._counts.num_write_errors += 1
            self._warn("wiped", error)

    def _wipe(self, slot: SlotId, key: BlockHashWithGroupId) -> OSError | None:
        """Wipe the header of a slot that has this key; on failure the slot is in `_unwiped`."""
        try:
            self._files.wipe(slot)
        except OSError as error:
            self._unwiped[slot] = key
            return error
        self._unwiped.pop(slot, None)
        return None

    def _wipe_again(self) -> OSError | None:
        """Retry the headers that could not be wiped before. Return the first error, or None."""
        errors = [self._wipe(slot, key) for slot, key in list(self._unwiped.items())]
        return next(filter(None, errors), None)

    def _make_error(self, what: str, error: OSError) -> TierError:
        return TierError(
            f"{what} in {self._files.path} could not be wiped and may be found after a restart: "
            f"{error.strerror}. Remove the folder before it is opened again, or call forget() again"
        )

    def _warn(self, what: str, error: OSError) -> None:
        """Log the first disk failure. Later ones are only counted."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("a block in %s could not be %s: %s", self._files.path, what, error)

    def _write_order(self) -> None:
        """Renumber the blocks that were used since they were written, in the order of their last use."""
        for key, slot in self._slot_of.items():
            if key in self._touched:
                header = self._files.read_header(slot)
                if header is not None:
                    self._use += 1
                    self._files.write_header(slot, header._replace(use=self._use))

    def _reopen(self, verifies: bool) -> Reopened:
        """Restore the index from the folder's headers."""
        headers, num_dropped = self._files.list_headers(self.capacity)
        newest: dict[BlockHashWithGroupId, tuple[SlotId, SlotHeader]] = {}
        for slot, header in sorted(headers, key=lambda found: found[1].use):
            self._use = max(self._use, header.use)
            if verifies and not self._read_row(header.key, slot, self._encoded.rows[0]):
                num_dropped += 1
                self._wipe_first(slot, header.key)
                continue
            if header.key in newest:
                self._wipe_first(newest.pop(header.key)[0], header.key)
            newest[header.key] = (slot, header)
        for key, (slot, header) in newest.items():
            self._slot_of[key] = slot
            if header.parent is not None:
                self.parents[key] = header.parent, header.num_tokens
        taken = set(self._slot_of.values())
        self._num_slots = max(taken, default=-1) + 1
        self._free_slots = [SlotId(slot) for slot in range(self._num_slots - 1, -1, -1) if slot not in taken]
        return Reopened(len(newest), num_dropped)


@dataclass(eq=False)
class _Batch:
    """Blocks that are read for a request, with their slots at the time of the call."""

    owner: RequestId
    keys: list[BlockHashWithGroupId]
    slots: list[SlotId]
    reading: Future[TierRead]


class Prefetcher:
    """Reads batches of blocks of a disk tier in a background thread.

    Args:
        tier: the tier to read; None to read nothing. The thread only reads its files.
        max_blocks: maximum number of blocks that are waiting, being read, or read and not yet taken, beside
            a batch that was cancelled while it was read.

    Only `wait` and `close` block; all other methods return at once.
    """

    def __init__(self, tier: DiskTier | None, max_blocks: int) -> None:
        self._tier = tier
        self._max_blocks = max_blocks
        self._thread = Workers("kv_pool prefetch", 1)
        self._batches: deque[_Batch] = deque()  # oldest first, until they are taken or cancelled

    def ask(self, owner: RequestId, keys: Iterable[BlockHashWithGroupId]) -> int:
        """Queue blocks for reading. Skips blocks already queued, not on disk, or beyond `max_blocks`.

        Returns:
            The number of blocks that are waiting, being read, or read for this owner.
        """
        tier = self._tier
        if tier is None:
            return 0
        asked = {key for batch in self._batches for key in batch.keys}
        slot_of = tier._slot_of
        new = [key for key in keys if key in slot_of and key not in asked]
        new = new[: max(0, self._max_blocks - len(asked))]
        for start in range(0, len(new), tier.batch_blocks):
            some = new[start : start + tier.batch_blocks]
            slots = [slot_of[key] for key in some]
            try:
                reading = self._thread.submit(partial(tier.read_apart, some, slots))
            except OutOfThreadsError as error:
                # Prefetching is optional: the blocks are read when they are needed.
                _logger.warning("%d blocks were not prefetched: %s", len(new) - start, error)
                break
            self._batches.append(_Batch(owner, some, slots, reading))
        return sum(len(batch.keys) for batch in self._batches if batch.owner == owner)

    def cancel(self, owner: RequestId | None = None) -> None:
        """Cancel the reads of this owner, by default of all owners, and drop what was read for it."""
        cancelled = [batch for batch in self._batches if owner in (None, batch.owner)]
        for batch in cancelled:
            self._batches.remove(batch)  # first: an interruption must not leave a cancelled one here
            batch.reading.cancel()

    def take_done(self) -> Iterator[tuple[DiskTier, TierRead]]:
        """Yield what was read from the tier since the last call, oldest first; valid for good.

        Blocks that have left their slot by then are left out; the others are counted as read. A block that
        could not be read is removed from the tier and counted.
        """
        tier = self._tier
        while tier is not None and self._batches and self._batches[0].reading.done():
            batch = self._batches.popleft()
            error = batch.reading.exception()
            if error is None:
                read = batch.reading.result()
                slots = zip(batch.keys, batch.slots, strict=True)
                there = {key for key, slot in slots if tier._slot_of.get(key) == slot}
                failed = [key for key in read.failed if key in there]
                tier._drop_unreadable(failed)
                pairs = zip(read.keys, read.block_ids, strict=True)
                good = {key: block_id for key, block_id in pairs if key in there}
                tier._counts.num_read += len(good)
                yield tier, TierRead(list(good), read.storage, list(good.values()), failed)
            else:  # such as MemoryError: the blocks are read when they are needed
                _logger.warning("%d blocks were not prefetched: %r", len(batch.keys), error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued blocks have been read. Return False after `timeout_s` seconds."""
        return self._thread.wait(timeout_s)

    def close(self) -> None:
        """Stop the thread and wait for it, at most until the current batch has been read."""
        self._max_blocks = 0
        self.cancel()
        self._thread.stop()
        self._thread.join()
