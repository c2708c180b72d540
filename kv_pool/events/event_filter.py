"""`EventFilter`: which events are sent instead of those of a batch."""

from typing import Any

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored, KVCacheEvent
from kv_pool.events.foreign_events import adopt
from kv_pool.events.resident_blocks import PlaceBlocks, ResidentBlocks, is_dense
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
        # Removals in a row from one place: the first event, the place's blocks, all hashes that are gone; the
        # same as a set, from when one might come again.
        self._first: Any = None
        self._blocks: PlaceBlocks | None = None
        self._hashes: list[Any] = []
        self._seen: set[Any] | None = None
        self._is_whole = False  # the hashes are those of the first event

    def apply(self, events: list[Any]) -> list[KVCacheEvent]:
        """Note the events, which `adopt_all` has returned; return what to send instead."""
        sent: list[KVCacheEvent] = []
        self._sent = sent
        self._first = None  # something is left of a call that raised
        self._blocks = None
        for event in events:
            kind = type(event)
            if kind is BlockStored:
                self._store(event, False)
            elif kind is BlockRemoved or isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._end_removals()
                self.resident.clear()
                sent.append(event)
            else:
                self._store(event, isinstance(event, BlockReported))
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
                    announced = announce_with_tails(self.resident.find_blocks(event), fresh)
                    if announced:
                        self._end_removals()
                        self._sent.extend(announced)
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
        resident = self.resident
        blocks = resident.find_blocks(event)
        hashes: list[Any] = event.block_hashes
        gone: list[Any] = []
        is_known = True
        for block_hash in hashes:
            num_copies = resident.remove(blocks, block_hash)
            if num_copies < 2:
                gone.append(block_hash)
                is_known = is_known and num_copies == 1
        if not self.exact:
            gone, is_known = hashes, False
        elif not is_known:
            gone = list(dict.fromkeys(gone))
        if not gone:
            return
        if blocks is not self._blocks or not self._can_join(gone, is_known):
            self._end_removals()
            self._first = event
            self._blocks = blocks
            self._hashes = list(gone)
            self._seen = None
            self._is_whole = len(gone) == len(hashes)
            return
        self._hashes.extend(gone)
        self._is_whole = False

    def _can_join(self, gone: list[Any], is_known: bool) -> bool:
        """Return True if one event can remove these, too: no hash may be in it twice."""
        if not self.coalesce_removals:
            return False
        if is_known and self._seen is None:  # they were resident until now, so all differ from the others
            return True
        if self._seen is None:
            self._seen = set(self._hashes)
        if not self._seen.isdisjoint(gone):
            return False
        self._seen.update(gone)
        return True

    def _end_removals(self) -> None:
        """Send the removals in a row as one event, the first itself if it has all their hashes."""
        first = self._first
        if first is None:
            return
        if self._is_whole:
            self._sent.append(first)
        else:
            self._sent.append(
                BlockRemoved(self._hashes, first.medium, first.group_idx, first.locality, first.ownership)
            )
        self._first = None
        self._blocks = None


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
