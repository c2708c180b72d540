"""`EventFilter`: replaces the events of a batch by the events to send."""

from collections.abc import Iterable
from typing import Any, Final

from msgspec import Raw
from msgspec.structs import astuple, replace

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored, KVCacheEvent
from kv_pool.events.foreign_events import adopt
from kv_pool.events.place_blocks import PlaceBlocks
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.stored_spans import slice_positions, split_repeats, without_holes
from kv_pool.events.tails import announce_with_tails

LEAST_PACKED_BYTES: Final = 256
"""Shorter token arrays are encoded twice: that is faster than copying the event."""


class EventFilter:
    """The implementation of `StreamState.apply`; takes the arguments of `StreamState`.

    Consecutive removals from one place are collected, applied together and sent as one event.
    """

    def __init__(self, resident: ResidentBlocks, exact: bool, dense: bool, coalesce_removals: bool) -> None:
        self.resident = resident
        self.exact = exact
        self.dense = dense
        self.coalesce_removals = coalesce_removals
        self._packs_tokens = False
        self._sent: list[KVCacheEvent] = []
        # Consecutive removals: the first event, the number of events merged into it, its place; hashes not
        # applied yet, and hashes applied but not sent yet.
        self._first: Any = None
        self._num_joined = 0
        self._place: Any = None
        self._blocks: PlaceBlocks | None = None
        self._hashes: list[Any] = []
        self._gone: list[Any] = []

    def apply(self, events: list[Any], packs_tokens: bool) -> list[KVCacheEvent]:
        """Record events returned by `adopt_all`; return the events to send instead."""
        sent: list[KVCacheEvent] = []
        self._sent = sent
        self._packs_tokens = packs_tokens
        self._first = None  # a call that raised may have left state behind
        self._blocks = None
        self._hashes = []
        self._gone = []
        # Reading a local name is faster than reading a module's, for each event.
        stored: Any = BlockStored
        removed: Any = BlockRemoved
        for event in events:
            kind = type(event)
            if kind is stored:
                self._store(event)
            elif kind is removed or isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._end_removals()
                self.resident.clear()
                sent.append(event)
            elif not isinstance(event, BlockReported):
                self._store(event)
            elif not self.exact:
                self._send_stores([event])
        self._end_removals()
        self._sent = []
        return sent

    def _store(self, event: Any) -> None:
        if self._hashes:
            self._apply_removals()
        fields: tuple[Any, ...] = astuple(event)
        hashes: list[Any] = fields[0]
        parts = [event]
        if hashes:
            blocks, first_copies = self.resident.store(fields)
            if self.exact:
                if first_copies is not None and not first_copies:
                    return
                if blocks.has_tails and self.resident.keeps_token_ids:
                    fresh = hashes
                    if first_copies is not None:
                        fresh = [hashes[position] for position in first_copies]
                    announced = announce_with_tails(blocks, fresh)
                    if announced:
                        self._end_removals()
                        self._sent.extend(announced)
                        return
                if (
                    first_copies is None
                    and len(fields[2]) == len(hashes) * fields[3]
                    and hashes[0] != fields[1]
                ):
                    # The path of most stores: they have their tokens, and are sent unchanged.
                    self._end_removals()
                    packed = blocks.packed
                    if self._packs_tokens and packed is not None and len(packed) >= LEAST_PACKED_BYTES:
                        event = replace(event, token_ids=Raw(packed))
                    self._sent.append(event)
                    return
                if first_copies is not None:
                    parts = slice_positions(event, first_copies)
        elif self.exact:
            return
        self._send_stores(parts)

    def _send_stores(self, events: list[Any]) -> None:
        self._end_removals()
        for event in events:
            if not self.dense:
                self._sent.append(event)
            elif event.block_hashes:
                self._sent.extend(split_repeats(without_holes(event)))

    def _remove(self, event: Any) -> None:
        fields: tuple[Any, ...] = astuple(event)
        place = fields[1:5]
        if self._first is not None and self.coalesce_removals and place == self._place:
            self._num_joined += 1
        else:
            self._end_removals()
            self._first = event
            self._num_joined = 0
            self._place = place
            self._blocks = self.resident.get_or_add_place(place)
        self._hashes.extend(fields[0])

    def _apply_removals(self) -> None:
        """Apply the removals collected so far; send nothing yet."""
        hashes = self._hashes
        self._hashes = []
        if self._blocks is not None and hashes:
            gone = self._blocks.remove(hashes)
            if not self.exact:
                gone = hashes
            if self._gone:
                self._gone.extend(gone)
            else:
                self._gone = gone

    def _end_removals(self) -> None:
        """Send the consecutive removals as one event; a single unchanged removal is sent as it is."""
        first = self._first
        if first is None:
            return
        self._apply_removals()
        gone = self._gone
        if gone:
            if not self._num_joined and gone == first.block_hashes:
                self._sent.append(first)
            else:
                for hashes in split_at_repeats(gone):
                    self._sent.append(
                        BlockRemoved(hashes, first.medium, first.group_idx, first.locality, first.ownership)
                    )
        self._first = None
        self._blocks = None
        self._gone = []


def split_at_repeats(hashes: list[Any]) -> list[list[Any]]:
    """Split hashes into parts without duplicates, keeping their order; as few parts as possible."""
    if len(set(hashes)) == len(hashes):
        return [hashes]
    parts: list[list[Any]] = []
    seen: set[Any] = set()
    for block_hash in hashes:
        if not parts or block_hash in seen:
            parts.append([])
            seen.clear()
        parts[-1].append(block_hash)
        seen.add(block_hash)
    return parts


def list_others(events: Iterable[Any]) -> list[Any]:
    """Return the events that are not removals."""
    removed: Any = BlockRemoved
    return [event for event in events if type(event) is not removed]


def adopt_all(events: list[Any]) -> list[Any]:
    """Convert the events of other packages to kv_pool's classes.

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
