"""`CopyLink`: the timing of serial copies between two memories, in virtual time."""


class CopyLink:
    """A connection between two memories, with one rate for both directions together.

    Args:
        bytes_per_s: the rate in bytes per second.

    Attributes:
        free_ms: completion time (ms) of all copies requested so far.
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
