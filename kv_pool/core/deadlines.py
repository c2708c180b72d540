"""`Deadlines`: what ends or changes at which time, the next first."""

from heapq import heapify, heappop, heappush
from typing import Final

from mypy_extensions import mypyc_attr

NEVER: Final = float("inf")
_FEW: Final = 64


@mypyc_attr(allow_interpreted_subclasses=True)
class Ending:
    """Something that ends or changes.

    Attributes:
        changes_at: when; NEVER also for what has ended. Only an entry of exactly this time counts.
    """

    __slots__ = ("changes_at",)

    def __init__(self, changes_at: float) -> None:
        self.changes_at: float = changes_at


class Deadlines:
    """A heap of times. Outdated entries are skipped, and removed when there are many."""

    def __init__(self) -> None:
        # (time, a count, what ends)
        self.entries: list[tuple[float, int, Ending]] = []
        self._num_pushed: int = 0
        self._num_allowed: int = _FEW

    def push(self, ending: Ending) -> None:
        """Note when it changes, if ever. Of several at one time, the first that was pushed comes first."""
        self.push_at(ending, ending.changes_at)

    def push_at(self, ending: Ending, time: float) -> None:
        """Note a time that counts once it is `changes_at`; until then, what was noted before counts."""
        if time == NEVER:
            return
        entries = self.entries
        if len(entries) > self._num_allowed:
            entries[:] = [entry for entry in entries if entry[2].changes_at == entry[0]]
            heapify(entries)
            self._num_allowed = max(_FEW, 2 * len(entries))
        self._num_pushed += 1
        heappush(entries, (time, self._num_pushed, ending))

    def find_due(self, now: float) -> Ending | None:
        """Return the next thing that changes by `now`, or None; its `changes_at` is when.

        It is found again until its `changes_at` has another value.
        """
        entries = self.entries
        while entries and entries[0][0] <= now:
            ending = entries[0][2]
            if ending.changes_at == entries[0][0]:
                return ending
            heappop(entries)
        return None

    def replace(self, endings: list[Ending]) -> None:
        """Note when these change, and nothing else, in one step. Of several at a time the first is first."""
        entries = [
            (ending.changes_at, place, ending)
            for place, ending in enumerate(endings, 1)
            if ending.changes_at != NEVER
        ]
        heapify(entries)
        self._num_pushed = max(self._num_pushed, len(endings))
        self.entries = entries
