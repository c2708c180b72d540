"""`RateLimit`: so many bytes per second, for one migration or for all of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kv_pool.errors import InvalidArgumentError

_BATCH_S = 0.1


class RateLimit:
    """A schedule in which each read starts when it and those before it are paid for.

    Within a series of reads, never more bytes are read than the rate allows for the time since its first one
    was asked for. The time that a read itself takes is given back where it is a tenth of a second or less; a
    longer pause saves up nothing.

    Args:
        bytes_per_s: 0 for no limit.
        clock: the time in seconds, never falling.

    Safe for several threads.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        if not bytes_per_s >= 0:
            raise InvalidArgumentError(f"{bytes_per_s} bytes per second; a limit is 0 (for none) or more")
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_at = float("-inf")  # when all bytes that were taken are paid for

    def take(self, num_bytes: int) -> float:
        """Count these bytes. Returns the seconds to wait before they may be read; 0.0 for none.

        The next caller waits behind them, so take what is read next, and no more.
        """
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            start = now if now - self._paid_at > _BATCH_S else self._paid_at
            self._paid_at = start + num_bytes / self.bytes_per_s
            return max(0.0, self._paid_at - now)

    def count_batch_bytes(self, most: int) -> int:
        """How much to read at once so that the rate is even, and a reader can stop between: a tenth of a
        second's, `most` at most."""
        return min(most, max(1, int(self.bytes_per_s * _BATCH_S))) if self.bytes_per_s else most
