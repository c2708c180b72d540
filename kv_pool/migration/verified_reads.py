"""`PeerCalls`: the calls of a migration; `VerifiedReads`, `RateLimit`: how a pull reads the blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold
from kv_pool.errors import InvalidArgumentError, MigrationError, PeerUnavailableError, TransferFailedError
from kv_pool.ids import BlockId, NodeName
from kv_pool.migration.messages import (
    AskChecksums,
    Checksums,
    Message,
    NodeDescription,
    OfferedBlock,
    Reply,
    as_reply,
)
from kv_pool.migration.migration import Migration
from kv_pool.migration.peers import PeerLinks
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.transfer_backend import BlockReader
from kv_pool.storage.checksums import checksum_blocks
from kv_pool.threads import Workers

TRIES = 3
"""Maximum number of attempts for a read of blocks or an idempotent request."""
_PAUSE_S = 0.02
_BATCH_S = 0.1
_BATCH_BYTES = 32 * 1024 * 1024
_BATCH_BLOCKS = 1024


class RateLimit:
    """A rate limit that schedules reads: each read may start once the rate covers it and all earlier ones.

    In a series of reads, the bytes read never exceed the rate times the time since the first request. Gaps of
    up to a tenth of a second between reads are credited; a longer gap starts a new series without credit.
    Thread-safe.

    Args:
        bytes_per_s: 0 for no limit.
        clock: monotonic time in seconds.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        if not bytes_per_s >= 0:
            raise InvalidArgumentError(
                f"a rate limit of {bytes_per_s} bytes per second; it must be 0 (no limit) or more"
            )
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_at = float("-inf")  # the time when the rate covers all scheduled bytes

    def take(self, num_bytes: int) -> float:
        """Schedule a read of `num_bytes`. Return the seconds to wait before it may start.

        Later callers queue behind it, so schedule only the next read.
        """
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            start = now if now - self._paid_at > _BATCH_S else self._paid_at
            self._paid_at = start + num_bytes / self.bytes_per_s
            return max(0.0, self._paid_at - now)

    def count_batch_bytes(self, most: int) -> int:
        """Return the batch size in bytes: a tenth of a second at this rate, at most `most`.

        Small batches keep the rate even and let a reader stop between them.
        """
        return min(most, max(1, int(self.bytes_per_s * _BATCH_S))) if self.bytes_per_s else most


@dataclass(frozen=True)
class PullSettings:
    """What pulls, pushes and the housekeeping of a node share.

    Attributes:
        name: of the node.
        links: the connections to other nodes.
        lease_s: time limit of one read, and how long `wait` waits for a move in doubt.
        call_s: time limit of a call to another node.
        clock: monotonic time in seconds, the clock of the site's leases.
        limit: shared by all migrations to this node.
        askers: threads for calls to other nodes.
        on_change: called without any lock, with a migration that has entered a phase or finished a batch.
        unsettled: holds on blocks in quarantine, each with a reader that may still write to them. Guarded by
            the site's lock.
    """

    name: NodeName
    site: PoolSite
    links: PeerLinks
    lease_s: float
    call_s: float
    clock: Callable[[], float]
    limit: RateLimit
    askers: Workers
    on_change: Callable[[Migration], object]
    unsettled: list[tuple[Hold, BlockReader]]


class PeerCalls:
    """The calls of one migration to the other node. Another thread may stop the migration.

    Args:
        peer: the name of the other node.
    """

    def __init__(self, settings: PullSettings, peer: NodeName) -> None:
        self._settings = settings
        self._peer = peer
        # Done once it is decided: with the reason to stop, or without one if it is too late to stop.
        self._decided: Future[None] = Future()
        self._woken = threading.Event()

    def stop(self, reason: MigrationError) -> bool:
        """Make `check_wanted` raise `reason` from now on. Return False if it is too late to stop."""
        with suppress(InvalidStateError):
            self._decided.set_exception(reason)
            self._woken.set()
        return self._decided.exception() is not None

    def check_wanted(self) -> None:
        """Raise the reason for which the migration was stopped, if any."""
        if self._decided.done():
            self._decided.result()

    def refuse_stop(self) -> None:
        """Refuse `stop` from now on."""
        with suppress(InvalidStateError):
            self._decided.set_result(None)

    def commit(self) -> None:
        """Refuse `stop` from now on; raise the reason if the migration was already stopped."""
        self.refuse_stop()
        self.check_wanted()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds` or until the migration is stopped."""
        self._woken.wait(seconds)

    def call(self, message: Message, kind: type[Reply]) -> Reply:
        """Send a message once. Raises MigrationError if the reply has another type."""
        reply = self._settings.links.call(self._peer, message, self._settings.call_s)
        return as_reply(reply, kind, f"node {self._peer!r}")

    def repeat(self, message: Message, kind: type[Reply]) -> Reply:
        """Send an idempotent message, and repeat it up to `TRIES` times in all until there is an answer."""
        for num_left in reversed(range(TRIES)):
            try:
                return self.call(message, kind)
            except PeerUnavailableError:
                self.check_wanted()
                if not num_left:
                    raise
                # Time for a restarting node, or for a broken connection to be replaced.
                self.wait(_PAUSE_S)
        raise AssertionError("the loop above returns or raises")


class VerifiedReads:
    """The reads of one pull. The constructor connects to the source.

    Args:
        migration: reads are counted in its status.
        limit: of this migration; `settings.limit` also applies.
        backend: the only backend to read with; "" for the first that works.

    Attributes:
        reader: the connection; None between two connections and after `return_reader`.
    """

    def __init__(
        self,
        settings: PullSettings,
        calls: PeerCalls,
        source: NodeDescription,
        migration: Migration,
        limit: RateLimit,
        backend: str,
    ) -> None:
        self._settings = settings
        self._storage = settings.site.storage
        self._calls = calls
        self._source = source
        self._migration = migration
        self._limit = limit
        self._offered: list[OfferedBlock] = []
        self._blocks: list[KVCacheBlock] = []
        self._backend = backend
        self.reader: BlockReader | None = settings.links.take_reader(source, backend)

    def read(self, offered: list[OfferedBlock], blocks: list[KVCacheBlock], positions: Sequence[int]) -> None:
        """Read these positions of the offer into the blocks. Blocks with wrong bytes are read again.

        Raises:
            TransferFailedError: a block did not match its checksum in `TRIES` reads, or the bytes did not
                arrive.
            The reason for which the pull was stopped.
        """
        self._offered, self._blocks = offered, blocks
        for _ in range(TRIES):
            positions = self._read_once(positions)
            if not positions:
                return
        raise TransferFailedError(
            f"{len(positions)} blocks of node {self._source.name!r} did not match their checksums in {TRIES} "
            "reads. Check whether another process writes to them, and check the network"
        )

    def return_reader(self) -> None:
        """Return the reader for use by the next pull."""
        if self.reader is not None:
            self._settings.links.return_reader(self._source, self.reader)
            self.reader = None

    def close(self) -> None:
        """Close the reader. Its `is_settled` tells whether it may still write."""
        if self.reader is not None:
            self.reader.close()

    def _read_once(self, positions: Sequence[int]) -> list[int]:
        """Read these blocks; verify each batch while the next one is read.

        Returns:
            Positions of blocks that do not match their checksums.
        """
        askers = self._settings.askers
        wrong: list[int] = []
        verifying: Future[list[int]] | None = None
        for batch in self._make_batches(positions):
            asked = askers.submit(partial(self._ask_checksums, batch))
            self._read_batch(batch)
            if verifying is not None:
                wrong += verifying.result()
            verifying = askers.submit(partial(self._verify, batch, asked))
            self._settings.on_change(self._migration)
        if verifying is not None:
            wrong += verifying.result()
        return wrong

    def _make_batches(self, positions: Sequence[int]) -> Iterator[list[int]]:
        """Yield positions ordered by block id at the source, so that contiguous blocks form one piece."""
        limits = (self._settings.limit, self._limit)
        most_bytes = min(limit.count_batch_bytes(_BATCH_BYTES) for limit in limits)
        size = min(_BATCH_BLOCKS, max(1, most_bytes // self._storage.block_bytes))
        order = sorted(positions, key=lambda position: self._offered[position].block_id)
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _list_local_ids(self, batch: list[int]) -> list[BlockId]:
        return [self._blocks[position].block_id for position in batch]

    def _read_batch(self, batch: list[int]) -> None:
        """Read a batch. After a failure retry over a new connection, unless the old one may still write."""
        num_bytes = len(batch) * self._storage.block_bytes
        remote_ids = [self._offered[position].block_id for position in batch]
        local_ids = self._list_local_ids(batch)
        wait_s = max(self._settings.limit.take(num_bytes), self._limit.take(num_bytes))
        if wait_s:
            self._calls.wait(wait_s)
        for num_left in reversed(range(TRIES)):
            self._calls.check_wanted()
            if self.reader is None:
                self.reader = self._settings.links.take_reader(self._source, self._backend)
            deadline = time.monotonic() + self._settings.lease_s
            try:
                count = self.reader.read(self._migration.transfer_id, remote_ids, local_ids, deadline)
            except TransferFailedError:
                self.reader.close()
                if not num_left or not self.reader.is_settled():
                    raise
                self.reader = None
                continue
            self._migration.status.num_bytes += count.num_bytes
            self._migration.status.num_descriptors += count.num_descriptors
            return

    def _ask_checksums(self, batch: list[int]) -> npt.NDArray[np.uint64]:
        reply = self._calls.repeat(AskChecksums(self._migration.transfer_id, batch), Checksums)
        if len(reply.values) != 8 * len(batch):
            raise TransferFailedError(
                f"node {self._source.name!r} sent {len(reply.values)} bytes of checksums for "
                f"{len(batch)} blocks; expected 8 bytes per block"
            )
        return np.frombuffer(reply.values, ">u8").astype(np.uint64)

    def _verify(self, batch: list[int], asked: Future[npt.NDArray[np.uint64]]) -> list[int]:
        expected = asked.result()
        found = checksum_blocks(self._storage, self._list_local_ids(batch))
        wrong = np.flatnonzero(found != expected).tolist()
        self._migration.status.num_done_blocks += len(batch) - len(wrong)
        return [batch[index] for index in wrong]
