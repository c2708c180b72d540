"""`PullSettings`: the settings that all pulls of a node share; `RateLimit`: a limit in bytes per second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import NodeName
from kv_pool.manager.leases import Lease
from kv_pool.migration.migration import Migration
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.transfer_backend import BlockReader
from kv_pool.threads import Workers

_BATCH_S = 0.1


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
    """The settings that all pulls of a node share.

    Attributes:
        name: of the target.
        lease_s: duration of the write lease unless renewed, and time limit of one read.
        clock: monotonic time in seconds, the clock of the site's leases.
        deadline_clock: `time.monotonic`, the clock of the backends' deadlines.
        limit: shared by all migrations to this node.
        on_change: called without any lock, with a pull that has entered a phase or finished a
            batch.
        on_unsettled: called with a lease and a reader that may still write to its blocks.
    """

    name: NodeName
    site: PoolSite
    lease_s: float
    clock: Callable[[], float]
    deadline_clock: Callable[[], float]
    limit: RateLimit
    parallel: Workers
    on_change: Callable[[Migration], object]
    on_unsettled: Callable[[Lease, BlockReader], object]
