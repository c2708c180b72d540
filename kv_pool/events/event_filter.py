"""`EventFilter`: which events are sent instead of those of a batch."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import astuple

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored, KVCacheEvent
from kv_pool.events.foreign_events import adopt
from kv_pool.events.resident_blocks import BLOCK_SIZE, HASHES, PARENT, TOKEN_IDS, PlaceBlocks, ResidentBlocks
from kv_pool.events.stored_spans import split_repeats, take_positions, without_holes
from kv_pool.events.tails import announce_with_tails


class EventFilter:
    """Does the work of `StreamState.apply`, whose arguments it has."""

    def __init__(self, resident: ResidentBlocks, exact: bool, dense: bool, coalesce_removals: bool) -> None:
        self.resident = resident
        self.exact = exact
        self.dense = dense
        self.coalesce_removals = coalesce_removals
        self._read_fields: Any = astuple
        self._joins_known = exact and coalesce_removals
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
        # A local name is read faster than one of the module, for each event.
        stored: Any = BlockStored
        removed: Any = BlockRemoved
        for event in events:
            kind = type(event)
            if kind is stored:
                self._store(event, False)
            elif kind is removed or isinstance(event, BlockRemoved):
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
        fields: tuple[Any, ...] = astuple(event)
        hashes: list[Any] = fields[HASHES]
        parts = [event]
        if is_report:
            if self.exact:
                return
        else:
            blocks = self.resident.find_stored(fields)
            first_copies = self.resident.store(blocks, fields)
            if self.exact:
                if not first_copies:
                    return
                if self.resident.has_tails and self.resident.keeps_token_ids:
                    announced = announce_with_tails(blocks, [hashes[position] for position in first_copies])
                    if announced:
                        self._end_removals()
                        self._sent.extend(announced)
                        return
                if (
                    len(first_copies) == len(hashes)
                    and len(fields[TOKEN_IDS]) == len(hashes) * fields[BLOCK_SIZE]
                    and hashes[0] != fields[PARENT]
                ):
                    # Nothing changes in most events. A hash that is twice in one has a second copy.
                    self._end_removals()
                    self._sent.append(event)
                    return
                parts = take_positions(event, first_copies)
        self._end_removals()
        for part in parts:
            if not self.dense:
                self._sent.append(part)
            elif part.block_hashes:
                self._sent.extend(split_repeats(without_holes(part)))

    def _remove(self, event: Any) -> None:
        resident = self.resident
        fields: tuple[Any, ...] = self._read_fields(event)
        blocks = resident.find_blocks(fields[1], fields[2], fields[3], fields[4])
        hashes: list[Any] = fields[HASHES]
        if self._joins_known and len(hashes) == 1 and blocks is self._blocks and self._seen is None:
            # Most removals of a pool. None of the lists below is needed.
            block_hash = hashes[0]
            num_copies = resident.remove(blocks, block_hash)
            if num_copies == 1:
                self._hashes.append(block_hash)
                self._is_whole = False
            if num_copies:
                return
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


def list_others(events: Iterable[Any]) -> list[Any]:
    """Return the events that are not removals."""
    removed: Any = BlockRemoved
    return [event for event in events if type(event) is not removed]


def adopt_all(events: list[Any]) -> list[Any]:
    """Return the events as ours, an engine's own classes included.

    Raises:
        InvalidTypeError: as `adopt`.
    """
    stored: Any = BlockStored
    removed: Any = BlockRemoved
    for event in events:
        kind = type(event)
        if kind is not removed and kind is not stored:
            return [adopt(one) for one in events]
    return events
