"""`EvictionPolicy`: which sequences a full pool evicts; `RankedOrder` keeps the order of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from kv_pool.ids import SequenceId
from kv_pool.manager.sequences.holdings import AccessOrder, Holder, Holdings

Run = list[tuple[Holder, int]]
"""Ranked sequences, last first, with their tickets: an entry with an old ticket has changed since."""


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence that may be evicted.

    Attributes:
        num_blocks: blocks that it holds, including shared ones.
        last_access_time: seconds of the pool's clock.
    """

    sequence_id: SequenceId
    num_blocks: int
    priority: int
    last_access_time: float


class EvictionPolicy(Protocol):
    """The order in which sequences are evicted.

    The pool evicts as few whole sequences as suffice, and none if evicting all would not suffice. It never
    evicts one with a pinned block, of higher priority than the request that needs blocks, or the request's
    own, wherever the policy ranks it.

    The order of two sequences must follow from their `SequenceInfo`: the pool keeps it, and ranks again only
    sequences that have changed, together with some of the others. A policy that depends on more, such as the
    time, has an attribute `ranks_each_time` that is True; it ranks all sequences for each eviction.
    """

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[SequenceId]:
        """Return the ids of these sequences in the order in which to evict them.

        A sequence that is left out is not evicted, until it is ranked again: if it has changed, or if all
        others do not suffice. `sequences` is ordered by last access, least recent first. Called while the
        pool is locked.
        """


@dataclass(frozen=True)
class LRUEviction:
    """Evicts lower priority first; within a priority, the least recently accessed first."""

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[SequenceId]:
        ranked = sorted(sequences, key=lambda sequence: (sequence.priority, sequence.last_access_time))
        return [sequence.sequence_id for sequence in ranked]


class RankedOrder(AccessOrder):
    """The sequences by priority, in runs that a policy has ranked.

        queues     those that were accessed, or have other blocks, since they were ranked
        runs       for each priority, each more than twice as long as the next one

    A search ranks the changed sequences as a new run, and merges runs of similar length by ranking them
    together. The next sequence is the first of the heads of all runs. So a change costs O(log sequences) on
    average, and a search one ranking of O(log sequences) heads for each sequence that it finds.
    """

    def __init__(self, holdings: Holdings, policy: EvictionPolicy) -> None:
        super().__init__()
        self._holdings = holdings
        self._policy = policy
        self._runs: list[list[Run]] = [[] for _ in self._queues]
        self._num_tickets = 0

    def note_change(self, holder: Holder) -> None:
        self.note_access(holder)

    def rebuild(self, holders: Iterable[Holder]) -> None:
        pool = self._holdings.block_pool
        was_changing = pool.is_changing
        pool.is_changing = True
        self.has_excluded = False
        for runs in self._runs:
            runs.clear()
        super().rebuild(holders)
        pool.is_changing = was_changing

    def bring_back(self, returned: Sequence[Holder]) -> None:
        for holder in returned:
            self.note_access(holder)

    def rank(self, priority: int) -> Iterator[Holder]:
        if getattr(self._policy, "ranks_each_time", False):
            self.rebuild(self._holdings.holders.values())
        for number, changed in enumerate(self._queues):
            if changed:
                self._add_run(number, list(changed.values()))
        runs: list[Run] = []
        for number in range(priority + 1):
            for run in self._runs[number]:
                while run and run[-1][0].ticket != run[-1][1]:
                    run.pop()
                runs.append(run)
        next_of = {number: len(run) - 1 for number, run in enumerate(runs) if run}
        while next_of:
            heads = {runs[number][at][0]: number for number, at in next_of.items()}
            first = next(iter(heads))
            if len(heads) > 1:
                first = next(iter(self._rank(heads)), first)
            number = heads[first]
            run, at = runs[number], next_of[number] - 1
            while at >= 0 and run[at][0].ticket != run[at][1]:
                at -= 1
            if at >= 0:
                next_of[number] = at
            else:
                del next_of[number]
            yield first

    def _rank(self, holders: Iterable[Holder]) -> list[Holder]:
        """Return these sequences in the order of the policy, without those that it leaves out."""
        by_id = {one.sequence_id: one for one in sorted(holders, key=attrgetter("last_access_time"))}
        infos = [
            SequenceInfo(one.sequence_id, len(one.blocks), one.priority, one.last_access_time)
            for one in by_id.values()
        ]
        return [by_id[one] for one in dict.fromkeys(self._policy.rank(infos)) if one in by_id]

    def _add_run(self, number: int, changed: list[Holder]) -> None:
        """Rank changed sequences, together with the runs that are not much longer."""
        runs = self._runs[number]
        num_merged = 0
        together = changed
        while num_merged < len(runs) and len(runs[-1 - num_merged]) <= 2 * len(together):
            num_merged += 1
            older = [holder for holder, ticket in reversed(runs[-num_merged]) if holder.ticket == ticket]
            together = older + together
        ranked = self._rank(together)
        # Nothing has changed until here, where the policy may raise.
        pool = self._holdings.block_pool
        was_changing = pool.is_changing
        pool.is_changing = True
        del runs[len(runs) - num_merged :]
        self._num_tickets += 1
        for holder in together:
            self.remove(holder)
        run: Run = []
        for holder in reversed(ranked):
            holder.ticket = self._num_tickets
            run.append((holder, holder.ticket))
        self.has_excluded = self.has_excluded or len(run) < len(together)
        if run:
            runs.append(run)
        pool.is_changing = was_changing
