"""`RateLimit`: so many bytes per second, for one migration or for all of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kv_pool.errors import InvalidArgumentError

_BURST_S = 0.1


class RateLimit:
    """A bucket that holds a tenth of a second's bytes, and may go into debt by what is taken at once.

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
        self._available = bytes_per_s * _BURST_S
        self._updated = clock()

    def take(self, num_bytes: int) -> float:
        """Count these bytes. Returns the seconds to wait before they may be read; 0.0 for none.

        Whoever comes next waits behind them, so take what is read next, and no more.
        """
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            gained = (now - self._updated) * self.bytes_per_s
            self._available = min(self.bytes_per_s * _BURST_S, self._available + gained)
            self._updated = now
            wait_s = max(0.0, -self._available / self.bytes_per_s)
            self._available -= num_bytes
            return wait_s

    def count_batch_bytes(self, most: int) -> int:
        """How much to read at once so that the rate is even, and a reader can stop between: a tenth of a
        second's, `most` at most."""
        return min(most, max(1, int(self.bytes_per_s * _BURST_S))) if self.bytes_per_s else most
