"""`Deadlines`: a queue of timers, earliest first; `read_clock`: the default clock of a pool."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Final

from mypy_extensions import mypyc_attr

NEVER: Final = float("inf")
_FEW: Final = 64

read_clock: Final[Callable[[], float]] = monotonic
"""The system's monotonic clock, in seconds."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TimedItem:
    """An object with a timer.

    Attributes:
        changes_at: the time at which it ends or changes; NEVER for none, or after it has ended. A heap
            entry with any other time is outdated.
    """

    __slots__ = ("changes_at",)

    def __init__(self, changes_at: float) -> None:
        self.changes_at: float = changes_at


class Deadlines:
    """A heap of timers. Outdated entries are skipped; they are removed when there are many."""

    def __init__(self) -> None:
        # (time, push number, object)
        self.entries: list[tuple[float, int, TimedItem]] = []
        self._num_pushed: int = 0
        self._num_allowed: int = _FEW

    def push_at(self, item: TimedItem, time: float) -> None:
        """Add a timer, unless at NEVER, that takes effect once the caller sets `item.changes_at` to `time`.

        Until then, the previous timer stays in effect. Equal times expire in push order.
        """
        if time == NEVER:
            return
        entries = self.entries
        if len(entries) > self._num_allowed:
            entries[:] = [entry for entry in entries if entry[2].changes_at == entry[0]]
            heapify(entries)
            self._num_allowed = max(_FEW, 2 * len(entries))
        self._num_pushed += 1
        heappush(entries, (time, self._num_pushed, item))

    def find_due(self, now: float) -> TimedItem | None:
        """Return the object with the earliest timer at or before `now`, or None.

        The same object is returned until the caller changes its `changes_at`.
        """
        entries = self.entries
        while entries and entries[0][0] <= now:
            item = entries[0][2]
            if item.changes_at == entries[0][0]:
                return item
            heappop(entries)
        return None
