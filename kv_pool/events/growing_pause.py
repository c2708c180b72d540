"""`GrowingPause`: exponential back-off for repeated attempts."""


class GrowingPause:
    """A back-off timer: each pause is twice as long as the last one, up to `max_s` seconds.

    Attributes:
        due_s: time of the next attempt; None if none is planned.
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self.due_s: float | None = None
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def plan(self, now_s: float) -> None:
        """Begin the next pause."""
        self.due_s = now_s + self._next_s
        self._next_s = min(2 * self._next_s, self._max_s)

    def is_due(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s

    def shorten(self) -> None:
        """Reset the next pause to the length of the first one."""
        self._next_s = self._first_s

    def end(self) -> None:
        """Cancel the planned attempt and reset the length of the next pause."""
        self.due_s = None
        self.shorten()
