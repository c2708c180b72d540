"""`EventFilter`: replaces the events of a batch by the events to send."""

from typing import Any, Final

from msgspec import Raw
from msgspec.structs import astuple, replace

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored, KVCacheEvent
from kv_pool.errors import InvalidTypeError
from kv_pool.events.chains import is_alike, make_event
from kv_pool.events.place_blocks import PlaceBlocks
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.stored_spans import find_distinct, slice_positions, split_repeats, without_holes

LEAST_PACKED_BYTES: Final = 256
"""Shorter token arrays are encoded twice: that is faster than copying the event."""

MAX_TAIL_BLOCKS = 1024
"""Maximum number of blocks announced again per store; further blocks are not announced again."""

OWN_CLASSES: Final = (BlockStored, BlockRemoved, AllBlocksCleared)
_BY_NAME: Final[dict[str, Any]] = {own.__name__: own for own in (*OWN_CLASSES, BlockReported)}


class EventFilter:
    """The implementation of `StreamState.apply`; takes the arguments of `StreamState`."""

    def __init__(self, resident: ResidentBlocks, exact: bool, dense: bool, coalesce_removals: bool) -> None:
        self.resident = resident
        self.exact = exact
        self.dense = dense
        self.coalesce_removals = coalesce_removals
        self._packs_tokens = False
        self._sent: list[KVCacheEvent] = []
        self._pending: PendingRemovals | None = None

    def apply(self, events: list[Any], packs_tokens: bool) -> list[KVCacheEvent]:
        """Record events returned by `adopt_all`; return the events to send instead."""
        sent: list[KVCacheEvent] = []
        self._sent = sent
        self._packs_tokens = packs_tokens
        self._pending = None  # a call that raised may have left some behind
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
        if self._pending is not None:
            self._pending.apply()
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
        pending = self._pending
        if pending is None or not self.coalesce_removals or place != pending.place:
            self._end_removals()
            pending = PendingRemovals(event, place, self.resident.get_or_add_place(place), self.exact)
            self._pending = pending
        pending.hashes.extend(fields[0])

    def _end_removals(self) -> None:
        """Send the pending removals."""
        pending = self._pending
        if pending is not None:
            self._pending = None
            pending.apply()
            self._sent.extend(pending.list_events())


class PendingRemovals:
    """Consecutive removals from one place, which are applied together and sent as one event.

    Stores that are not sent may come in between; the removals before them are applied first.

    Attributes:
        first, place: the first event, and the fields of its place.
        hashes: those that are not applied yet.
        gone: those that are applied; of an exact state only those that are not resident any more.
    """

    def __init__(self, first: Any, place: Any, blocks: PlaceBlocks, exact: bool) -> None:
        self.first = first
        self.place = place
        self.hashes: list[Any] = []
        self.gone: list[Any] = []
        self._blocks = blocks
        self._exact = exact

    def apply(self) -> None:
        """Remove `hashes` from the blocks."""
        hashes = self.hashes
        if hashes:
            self.hashes = []
            gone = self._blocks.remove(hashes)
            self.gone.extend(gone if self._exact else hashes)

    def list_events(self) -> list[KVCacheEvent]:
        """Return the events to send for `gone`; the first event itself if it says the same."""
        gone = self.gone
        if not gone:
            return []
        if gone == self.first.block_hashes:
            return [self.first]
        return [BlockRemoved(gone[first:end], *self.place) for first, end in find_distinct(gone)]


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


def adopt(event: object) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """Return the event as a kv_pool event; the same object if it is one already. Its lists are shared.

    Raises:
        InvalidTypeError: its class has none of the known names, or it lacks a field.
    """
    if isinstance(event, OWN_CLASSES):
        return event
    own = _BY_NAME.get(type(event).__name__)
    if own is None:
        raise InvalidTypeError(
            f"a {type(event).__name__} cannot be sent; readers know BlockStored, BlockRemoved and "
            "AllBlocksCleared"
        )
    fields = {name: getattr(event, name) for name in own.__struct_fields__ if hasattr(event, name)}
    try:
        adopted: BlockStored | BlockRemoved | AllBlocksCleared = own(**fields)
    except TypeError as error:
        raise InvalidTypeError(f"a {type(event).__name__} cannot be sent: {error}") from error
    return adopted


def announce_with_tails(blocks: PlaceBlocks, fresh: list[Any]) -> list[KVCacheEvent]:
    """Return one removal of the blocks after `fresh`, then stores of both; [] if no blocks follow.

        announced so far        a b c d stored, b removed      some readers cannot reach c and d any more
        b is stored again       c d removed, b c d stored      all readers reach all blocks

    Dynamo's indexer hides the blocks after a removed block; storing it again does not restore them.

    Args:
        blocks: the blocks of one place.
        fresh: hashes that have just become resident, parents first, and are not announced yet.

    Cost: O(blocks announced).
    """
    place = blocks.place
    are_fresh = set(fresh)
    shown: set[Any] = set()
    again: list[Any] = []
    stores: list[KVCacheEvent] = []
    pending = fresh[::-1]
    while pending:
        following = pending.pop()
        run: list[Any] = []
        run_blocks: list[Any] = []
        while following is not None and following not in shown:
            if following not in are_fresh:
                if len(again) == MAX_TAIL_BLOCKS:
                    break
                again.append(following)
            block = blocks.find_block(following)
            shown.add(following)
            run.append(following)
            run_blocks.append(block)
            following = None
            for child in blocks.list_children(block):
                if following is None and is_alike(block, blocks.find_block(child)):
                    following = child
                else:
                    pending.append(child)
        if run:
            stores.append(make_event(place, run, run_blocks))
    if not again:
        return []
    return [BlockRemoved(again, place.medium, place.group_idx, place.locality, place.ownership), *stores]
