"""`AccessOrder`: the order in which an LRU policy evicts sequences, kept from access to access."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from heapq import heappop, heappush

from kv_pool.adapter.holder import Holder
from kv_pool.adapter.pins import Pins
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import SequenceId

_NUM_PRIORITIES = 3


class AccessOrder:
    """The sequences by priority, least recently accessed first. Use it only with the pool's lock held.

        queues      one for each priority: all sequences, except
        aside       those that had a pinned block when they were next; they stay there until it is unpinned
        returned    those that came back from there, by the time of their last access

    So a search finds the next sequence at once, however many there are and however many are pinned.

    Attributes:
        has_excluded: False, as in a `RankedOrder` that has left out no sequence.
    """

    has_excluded = False

    def __init__(self, pins: Pins, list_holders: Callable[[KVCacheBlock], list[Holder]]) -> None:
        self._pins = pins
        self._list_holders = list_holders
        self._queues: list[OrderedDict[SequenceId, Holder]] = [OrderedDict() for _ in range(_NUM_PRIORITIES)]
        self._aside: dict[SequenceId, Holder] = {}
        self._returned: list[list[tuple[float, int, Holder]]] = [[] for _ in range(_NUM_PRIORITIES)]
        self._num_returned = 0

    def note_access(self, holder: Holder) -> None:
        """Move a sequence to the end of the queue of its priority. O(1)."""
        queue = self._queues[holder.priority]
        if holder.queue is queue:
            queue.move_to_end(holder.sequence_id)
            return
        self.remove(holder)
        queue[holder.sequence_id] = holder
        holder.queue = queue

    def note_change(self, holder: Holder) -> None:
        """Record that a sequence has other blocks, which does not change this order."""

    def remove(self, holder: Holder) -> None:
        """Remove a sequence that holds no blocks any more. No-op if it is not there."""
        if holder.queue is not None:
            holder.queue.pop(holder.sequence_id, None)
            holder.queue = None
        elif self._aside.get(holder.sequence_id) is holder:
            del self._aside[holder.sequence_id]
        holder.ticket = 0

    def rebuild(self, holders: Iterable[Holder]) -> None:
        """Start again after an interrupt, with these sequences, least recently accessed first."""
        self._aside.clear()
        for priority in range(_NUM_PRIORITIES):
            self._queues[priority].clear()
            self._returned[priority].clear()
        for holder in holders:
            holder.ticket = 0
            holder.queue = self._queues[holder.priority]
            holder.queue[holder.sequence_id] = holder

    def iterate(self, priority: int) -> Generator[Holder, None, None]:
        """Yield the sequences of at most this priority without pinned blocks, in the order of eviction.

        Lower priority first; within one, the least recently accessed first. Nothing may change meanwhile.
        Cost: O(1) for each, and once for each that has pinned blocks since they were pinned.
        """
        self._return_unpinned()
        pins = self._pins
        for number in range(priority + 1):
            pinned: list[Holder] = []
            passed: list[tuple[float, int, Holder]] = []
            try:
                for holder in self._merge(number, passed):
                    if pins.is_any_pinned(holder.blocks):
                        pinned.append(holder)
                    else:
                        yield holder
            finally:
                for entry in passed:
                    heappush(self._returned[number], entry)
                for holder in pinned:
                    self.remove(holder)
                    self._aside[holder.sequence_id] = holder

    def _merge(self, number: int, passed: list[tuple[float, int, Holder]]) -> Iterator[Holder]:
        """Yield the sequences of a priority. Entries of `_returned` that are passed are moved to `passed`."""
        returned = self._returned[number]
        for holder in self._queues[number].values():
            while returned and returned[0][0] <= holder.last_access_time:
                entry = heappop(returned)
                if entry[2].ticket == entry[1]:
                    passed.append(entry)
                    yield entry[2]
            yield holder
        while returned:
            entry = heappop(returned)
            if entry[2].ticket == entry[1]:
                passed.append(entry)
                yield entry[2]

    def _return_unpinned(self) -> None:
        """Let the sequences of blocks that were unpinned take their places again."""
        unpinned = self._pins.unpinned
        while unpinned:
            block, _ = unpinned.popitem()
            for holder in self._list_holders(block):
                if self._aside.get(holder.sequence_id) is holder:
                    del self._aside[holder.sequence_id]
                    self._num_returned += 1
                    holder.ticket = self._num_returned
                    entry = (holder.last_access_time, self._num_returned, holder)
                    heappush(self._returned[holder.priority], entry)
