"""`EventFilter`: which events are sent instead of those of a batch."""

from typing import Any

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored, KVCacheEvent
from kv_pool.events.foreign_events import adopt
from kv_pool.events.resident_blocks import ResidentBlocks, find_place, is_dense
from kv_pool.events.stored_spans import split_repeats, take_positions, without_holes
from kv_pool.events.tails import announce_with_tails


class EventFilter:
    """Does the work of `StreamState.apply`, whose arguments it has."""

    def __init__(self, resident: ResidentBlocks, exact: bool, dense: bool, coalesce_removals: bool) -> None:
        self.resident = resident
        self.exact = exact
        self.dense = dense
        self.coalesce_removals = coalesce_removals
        self._sent: list[KVCacheEvent] = []
        # Removals in a row from one place: the first event; all their hashes, and those as a set.
        self._first: Any = None
        self._is_whole = False  # these are the hashes of the first event, and no others
        self._hashes: list[Any] = []
        self._seen: set[Any] = set()

    def apply(self, events: list[Any]) -> list[KVCacheEvent]:
        """Note the events, which `adopt_all` has returned; return what to send instead."""
        self._sent = sent = []
        for event in events:
            kind = type(event)
            if kind is BlockRemoved:
                self._remove(event)
            elif kind is AllBlocksCleared:
                self._end_removals()
                self.resident.clear()
                sent.append(event)
            else:
                self._store(event, kind is BlockReported)
        self._end_removals()
        self._sent = []
        return sent

    def _store(self, event: Any, is_report: bool) -> None:
        parts = [event]
        if is_report:
            if self.exact:
                return
        else:
            first_copies = self.resident.store(event)
            if self.exact:
                if not first_copies:
                    return
                if self.resident.has_tails and self.resident.keeps_token_ids:
                    fresh = [event.block_hashes[position] for position in first_copies]
                    self._end_removals()
                    self._sent.extend(announce_with_tails(self.resident, find_place(event), fresh))
                    return
                parts = take_positions(event, first_copies)
        self._end_removals()
        sent = self._sent
        for part in parts:
            hashes = part.block_hashes
            if not self.dense:
                sent.append(part)
            elif self.exact and is_dense(part) and hashes[0] != part.parent_block_hash:
                sent.append(part)  # a hash that comes again is a second copy, and not among these
            elif hashes:
                sent.extend(split_repeats(without_holes(part)))

    def _remove(self, event: Any) -> None:
        gone: list[Any] = self.resident.remove(event)
        if not self.exact:
            gone = event.block_hashes
        elif not gone:
            return
        first = self._first
        if first is not None:
            if (
                self.coalesce_removals
                and event.medium == first.medium
                and event.group_idx == first.group_idx
                and event.locality == first.locality
                and event.ownership == first.ownership
                and self._seen.isdisjoint(gone)
            ):
                self._hashes.extend(gone)
                self._seen.update(gone)
                self._is_whole = False
                return
            self._end_removals()
        self._first = event
        self._is_whole = len(gone) == len(event.block_hashes)
        self._hashes = list(gone)
        self._seen = set(gone)

    def _end_removals(self) -> None:
        """Send the removals in a row as one event, the first itself if it has all their hashes."""
        first = self._first
        if first is None:
            return
        self._first = None
        if self._is_whole:
            self._sent.append(first)
        else:
            self._sent.append(
                BlockRemoved(self._hashes, first.medium, first.group_idx, first.locality, first.ownership)
            )


def adopt_all(events: list[Any]) -> list[Any]:
    """Return the events as ours, an engine's own classes included.

    Raises:
        InvalidTypeError: as `adopt`.
    """
    for event in events:
        kind = type(event)
        if kind is not BlockRemoved and kind is not BlockStored:
            return [adopt(one) for one in events]
    return events
