"""`RankedOrder`: the order in which a policy evicts sequences, kept and updated as sequences change."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from kv_pool.adapter.holder import Holder
from kv_pool.adapter.pins import Pins
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import SequenceId

_NUM_PRIORITIES = 3

Rank = Callable[[Sequence[Holder]], list[Holder]]
"""Returns the sequences in the order of a policy, without those that it leaves out."""
Run = list[tuple[Holder, int]]
"""Ranked sequences, last first, with their tickets: an entry with an old ticket has changed since."""


class RankedOrder:
    """The sequences by priority, in runs that a policy has ranked. Use it only with the pool's lock held.

        changed    accessed, or with other blocks, since they were ranked
        runs       for each priority, each more than twice as long as the next one

    A search ranks the changed sequences as a new run, and merges runs of similar length by ranking them
    together. The next sequence is the first of the heads of all runs. So a change costs O(log sequences) on
    average, and a search one ranking of O(log sequences) heads for each sequence that it finds.

    Attributes:
        has_excluded: whether the policy has left out a sequence, which another ranking may include.
    """

    def __init__(
        self,
        pins: Pins,
        list_holders: Callable[[KVCacheBlock], list[Holder]],
        holders: Mapping[SequenceId, Holder],
        rank: Rank,
        ranks_each_time: bool,
    ) -> None:
        self._pins = pins
        self._list_holders = list_holders
        self._holders = holders
        self._rank = rank
        self._ranks_each_time = ranks_each_time
        self._changed: dict[SequenceId, Holder] = {}
        self._aside: dict[SequenceId, Holder] = {}  # they had a pinned block when they were next
        self._runs: list[list[Run]] = [[] for _ in range(_NUM_PRIORITIES)]
        self._num_tickets = 0
        self.has_excluded = False

    def note_access(self, holder: Holder) -> None:
        """Record that a sequence was accessed. O(1)."""
        holder.ticket = 0
        holder.info = None
        self._changed.pop(holder.sequence_id, None)  # the order of changes is that of the last accesses
        self._changed[holder.sequence_id] = holder
        self._aside.pop(holder.sequence_id, None)

    def note_change(self, holder: Holder) -> None:
        """Record that a sequence has other blocks. O(1)."""
        self.note_access(holder)

    def remove(self, holder: Holder) -> None:
        """Remove a sequence that holds no blocks any more. No-op if it is not there."""
        holder.ticket = 0
        for places in (self._changed, self._aside):
            if places.get(holder.sequence_id) is holder:
                del places[holder.sequence_id]

    def rebuild(self, holders: Iterable[Holder]) -> None:
        """Start again with these sequences, least recently accessed first."""
        self._aside.clear()
        self._changed.clear()
        self.has_excluded = False
        for runs in self._runs:
            runs.clear()
        for holder in list(holders):
            self.note_access(holder)

    def iterate(self, priority: int) -> Generator[Holder, None, None]:
        """Yield the sequences of at most this priority without pinned blocks, in the policy's order.

        Nothing may change meanwhile.
        """
        self._settle()
        pins = self._pins
        runs: list[Run] = []
        for number in range(priority + 1):
            for run in self._runs[number]:
                while run and run[-1][0].ticket != run[-1][1]:
                    run.pop()
                runs.append(run)
        next_of = {number: len(run) - 1 for number, run in enumerate(runs) if run}
        pinned: list[Holder] = []
        try:
            while next_of:
                heads = {runs[number][at][0]: number for number, at in next_of.items()}
                first = next(iter(heads))
                if len(heads) > 1:
                    by_access = sorted(heads, key=_get_access_time)
                    first = next(iter(self._rank(by_access)), first)
                number = heads[first]
                run, at = runs[number], next_of[number] - 1
                while at >= 0 and run[at][0].ticket != run[at][1]:
                    at -= 1
                if at >= 0:
                    next_of[number] = at
                else:
                    del next_of[number]
                if pins.is_any_pinned(first.blocks):
                    pinned.append(first)
                else:
                    yield first
        finally:
            for holder in pinned:
                holder.ticket = 0
                self._aside[holder.sequence_id] = holder

    def _settle(self) -> None:
        """Rank the sequences that have changed."""
        unpinned = self._pins.unpinned
        while unpinned:
            block, _ = unpinned.popitem()
            for holder in self._list_holders(block):
                if self._aside.get(holder.sequence_id) is holder:
                    self.note_access(holder)
        if self._ranks_each_time:
            self.rebuild(self._holders.values())
        if not self._changed:
            return
        for number in range(_NUM_PRIORITIES):
            changed = [holder for holder in self._changed.values() if holder.priority == number]
            if changed:
                self._add_run(number, changed)
        self._changed = {}  # a dict that was large stays slow to iterate

    def _add_run(self, number: int, changed: list[Holder]) -> None:
        """Rank changed sequences, together with the runs that are not much longer."""
        runs = self._runs[number]
        num_merged = 0
        together = changed
        while num_merged < len(runs) and len(runs[-1 - num_merged]) <= 2 * len(together):
            num_merged += 1
            older = [holder for holder, ticket in reversed(runs[-num_merged]) if holder.ticket == ticket]
            together = older + together
        ranked = self._rank(sorted(together, key=_get_access_time))
        # Nothing has changed until here, where the policy may raise.
        del runs[len(runs) - num_merged :]
        self._num_tickets += 1
        for holder in together:
            holder.ticket = 0
        run: Run = []
        for holder in reversed(ranked):
            holder.ticket = self._num_tickets
            run.append((holder, holder.ticket))
        self.has_excluded = self.has_excluded or len(run) < len(together)
        if run:
            runs.append(run)
        for holder in changed:
            del self._changed[holder.sequence_id]


def _get_access_time(holder: Holder) -> float:
    return holder.last_access_time
