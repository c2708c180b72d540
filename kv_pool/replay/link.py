"""`Link`: copies between two memories, one after the other, in virtual time."""


class Link:
    """A connection between two memories, with one rate for both directions together.

    Args:
        bytes_per_s: that rate.

    Attributes:
        free_ms: when all copies requested so far are done.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.free_ms = 0.0
        self._bytes_per_ms = bytes_per_s / 1000

    def copy(self, num_bytes: int, now_ms: float) -> float:
        """Return the completion time (ms) of this copy, queued behind earlier ones; `now_ms` for 0 bytes."""
        if not num_bytes:
            return now_ms
        self.free_ms = max(now_ms, self.free_ms) + num_bytes / self._bytes_per_ms
        return self.free_ms
