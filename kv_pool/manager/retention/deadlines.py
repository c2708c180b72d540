"""`Deadlines`: what is over at which time, the next first."""

from heapq import heapify, heappop, heappush
from typing import Final

from kv_pool.manager.retention.claim import NEVER

FEW: Final = 64


class Ending:
    """Something that ends or changes.

    Attributes:
        changes_at: when; NEVER also for what is over or gone. Only an entry of this very time counts.
    """

    __slots__ = ("changes_at",)

    def __init__(self, changes_at: float) -> None:
        self.changes_at: float = changes_at


class Deadlines:
    """A heap of times; entries that have become wrong are passed over, and thrown out when they are many."""

    def __init__(self) -> None:
        # (time, number, a count, what ends)
        self.entries: list[tuple[float, int, int, Ending]] = []
        self._num_pushed: int = 0
        self._num_allowed: int = FEW

    def push(self, ending: Ending, number: int) -> None:
        """Note when it changes, if ever. Of what changes at the same time the lowest number comes first."""
        time = ending.changes_at
        if time == NEVER:
            return
        entries = self.entries
        if len(entries) > self._num_allowed:
            entries[:] = [entry for entry in entries if entry[3].changes_at == entry[0]]
            heapify(entries)
            self._num_allowed = max(FEW, 2 * len(entries))
        self._num_pushed += 1
        heappush(entries, (time, number, self._num_pushed, ending))

    def pop_due(self, now: float) -> Ending | None:
        """The next thing that changes by now; its `changes_at` is when. None: nothing is due."""
        entries = self.entries
        while entries and entries[0][0] <= now:
            time, _, _, ending = heappop(entries)
            if ending.changes_at == time:
                return ending
        return None

    def clear(self) -> None:
        """Nothing will be over."""
        self.entries.clear()
