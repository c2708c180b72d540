"""`StreamState`: filters a pool's events for readers, tracks resident blocks, takes snapshots. Compiled."""

from collections.abc import Iterator, Sequence
from itertools import chain
from threading import Lock
from typing import Any, Final, cast

from msgspec import Raw
from msgspec.structs import astuple, replace
from mypy_extensions import mypyc_attr

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored, KVCacheEvent
from kv_pool.errors import InvalidTypeError
from kv_pool.events.chains import announce_with_tails, iter_chunks
from kv_pool.events.place_blocks import Place, PlaceBlocks
from kv_pool.events.spans import BlockKind, find_ranges
from kv_pool.ids import ExternalBlockHash
from kv_pool.threads import YieldTimer

NOTHING_APPLIED: Final = -1

LEAST_PACKED_BYTES: Final = 256
"""Shorter token arrays are encoded twice: that is faster than copying the event."""

NUM_FORGOTTEN_AT_ONCE: Final = 1024
"""Number of dict entries that one call of `drop_some` frees, in 0.1 ms."""

_OWN_CLASSES: Final[dict[str, Any]] = {
    own.__name__: own for own in (BlockStored, BlockReported, BlockRemoved, AllBlocksCleared)
}


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamState:
    """A filter for the events of pools and connectors that tracks the resident blocks.

    A store is sent only for the first copy of a hash, and a removal only for its last. Pools announce each
    copy, and in full report mode also hits. Removals of hashes that were never stored are sent: a reader may
    know them.

    A store is sent with the tokens of all its blocks, or with none: a span with holes is sent without tokens,
    since the event does not say where the holes are. Pools with `dense_events` create no such spans. No hash
    occurs twice in a store or is its own parent, and no store is empty. Consecutive removals from one place
    are merged into one event. Input events are never modified.

        >>> from kv_pool.core.kv_events import BlockRemoved, BlockStored
        >>> state = StreamState()
        >>> stored = BlockStored([7], None, [1, 2], block_size=2, lora_id=None, medium="GPU", lora_name=None)
        >>> len(state.apply([stored])), len(state.apply([stored]))
        (1, 0)
        >>> len(state.apply([BlockRemoved([7], "GPU")])), len(state.apply([BlockRemoved([7], "GPU")]))
        (0, 1)

    Args:
        keeps_token_ids: include token ids in snapshots; without them most of the memory is saved.

    A parent is sent as the pool names it, even if it was evicted or skipped in a window: its child is then an
    orphan, which some readers drop or hide. When a state that keeps token ids sends the parent, it announces
    the blocks after it again: removed, then stored, up to 1024 per event.

    One thread calls `apply`; any other thread may take snapshots at the same time.
    """

    def __init__(self, keeps_token_ids: bool = True) -> None:
        self.resident = ResidentBlocks(keeps_token_ids)
        self.last_sequence = NOTHING_APPLIED
        self._is_behind = False  # batches were skipped since the last one
        self._lock = Lock()  # guards resident, last_sequence; held for a batch or a piece of a copy
        self._snapshot_lock = Lock()  # one snapshot at a time

    def apply(
        self, events: Sequence[KVCacheEvent], sequence: int | None = None, *, packs_tokens: bool = False
    ) -> list[KVCacheEvent]:
        """Apply a batch of events; return the events to send instead.

        Args:
            events: oldest first; events of an engine's own classes, and of subclasses, are converted.
            sequence: the number of the batch; None for the next one. Send the batch even if no event is left:
                later snapshots include its number.
            packs_tokens: allow the token ids of returned stores to be a `msgspec.Raw`, which an encoder only
                copies: tokens are then encoded once, for snapshots and for sending.
        Raises:
            InvalidTypeError: an object that is not one of the three events. Nothing has changed.
        Cost: O(hashes), tenths of a microsecond each; waits for at most one piece of a snapshot's copy.
        """
        ours = adopt_all(events if type(events) is list else list(events))
        with self._lock:
            sent = self.resident.apply(ours, packs_tokens)
            if self._is_behind:
                sent.insert(0, AllBlocksCleared())
                self._is_behind = False
            self.last_sequence = self.last_sequence + 1 if sequence is None else sequence
            if not self._snapshot_lock.locked():  # a snapshot may not have copied the cleared blocks yet
                self.resident.drop_some()
        return sent

    def skip(self, sequence: int) -> None:
        """Forget all blocks, since the batches up to this number are lost; also one that was applied.

        The next batch to send starts with `AllBlocksCleared`, and so do snapshots until then: readers know
        too few blocks for a while, but never wrong ones.
        """
        with self._lock:
            self.resident.clear()
            self._is_behind = True
            self.last_sequence = sequence

    def iter_snapshot(
        self, yield_timer: YieldTimer | None = None
    ) -> tuple[int, Iterator[list[KVCacheEvent]]]:
        """Return all resident blocks as events for a new reader.

        Returns:
            The number of the last batch included (-1 for none): the reader continues with the next one.
            And the events, in lists of at most 256 blocks: `AllBlocksCleared`; then every hash once,
            parents before children, one event per chain; finally the orphans, with their original parents.

        Yields the GIL by `yield_timer`: by default every 0.4 ms, including the caller's work on a list, but
        for some ms when a dict of a large state grows. Next to a thread that never waits, each yield takes
        another 5 ms (`sys.setswitchinterval`).
        """
        yield_timer = YieldTimer() if yield_timer is None else yield_timer
        with self._snapshot_lock:
            with self._lock:
                sequence = self.last_sequence
                copies = [(blocks, blocks.begin_copy()) for blocks in self.resident.places.values()]
            try:
                for blocks, copy in copies:
                    for shard in blocks.shards:
                        with self._lock:
                            for span in shard.values():
                                copy.add(span)
                        yield_timer.yield_if_due()
            finally:
                with self._lock:
                    for blocks, _ in copies:
                        blocks.copy = None
        cleared: list[KVCacheEvent] = [AllBlocksCleared()]
        runs = [(blocks.place, copy.runs) for blocks, copy in copies]
        return sequence, chain([cleared], iter_chunks(runs, yield_timer))

    def take_snapshot(self) -> tuple[int, list[KVCacheEvent]]:
        """Return `iter_snapshot` with all events in one list."""
        sequence, chunks = self.iter_snapshot()
        return sequence, [event for chunk in chunks for event in chunk]


class ResidentBlocks:
    """The resident blocks of a pool, counted from its events: one for each block that gains or loses a hash.

    A class of its own, since calls within `StreamState`, which may be subclassed, are slower.

    Attributes:
        places: the blocks of each place.
    """

    def __init__(self, keeps_token_ids: bool) -> None:
        self.keeps_token_ids = keeps_token_ids
        self.places: dict[Place, PlaceBlocks] = {}
        self._kinds: dict[BlockKind, BlockKind] = {}
        self._forgotten: list[dict[Any, Any]] = []

    def __len__(self) -> int:
        return sum(len(blocks.held) for blocks in self.places.values())

    def __iter__(self) -> Iterator[tuple[Place, ExternalBlockHash, int]]:
        """Yield each hash with its place and the number of blocks that carry it."""
        for place, blocks in self.places.items():
            for block_hash, num_copies in blocks.held:
                yield place, block_hash, num_copies

    def apply(self, events: list[Any], packs_tokens: bool) -> list[KVCacheEvent]:
        """Record events returned by `adopt_all`; return the events to send instead."""
        sent: list[KVCacheEvent] = []
        # Consecutive removals from one place are applied together and sent as one event.
        hashes: list[Any] = []
        place: Any = None
        # Reading a local name is faster than reading a module's, for each event.
        stored: Any = BlockStored
        removed: Any = BlockRemoved
        cleared: Any = AllBlocksCleared
        for event in events:
            kind = type(event)
            if kind is removed:
                fields: tuple[Any, ...] = astuple(event)
                its_place: Any = fields[1:5]  # equal to a `Place`
                if its_place != place:
                    if hashes:
                        self._remove(place, hashes, sent)
                        hashes = []
                    place = its_place
                hashes.extend(fields[0])
                continue
            if hashes:
                self._remove(place, hashes, sent)
                hashes = []
            if kind is stored:
                self._store(event, sent, packs_tokens)
            elif kind is cleared:
                self.clear()
                sent.append(event)
        if hashes:
            self._remove(place, hashes, sent)
        return sent

    def _store(self, event: Any, sent: list[KVCacheEvent], packs_tokens: bool) -> None:
        """Add one copy of each hash of a `BlockStored`, and send what readers do not know. O(hashes)."""
        # In compiled code `astuple` takes as long as reading two fields by name, and unpacking longer.
        fields: tuple[Any, ...] = astuple(event)
        hashes: list[Any] = fields[0]
        if not hashes:
            return
        num_blocks = len(hashes)
        parent, token_ids, block_size, extra_keys = fields[1], fields[2], fields[3], fields[7]
        has_tokens = len(token_ids) == num_blocks * block_size
        if parent == hashes[0] or not has_tokens:
            event = slice_event(event, 0, num_blocks, parent)
            parent = event.parent_block_hash
        place: Any = (fields[5], fields[8], fields[11], fields[12])  # equal to a `Place`
        blocks = self._get_or_add_place(place)
        # Equal to a `BlockKind`.
        kind_key: Any = (block_size, fields[4], fields[6], fields[9], fields[10], extra_keys is not None)
        kind = self._kinds.get(kind_key)
        if kind is None:
            kind = BlockKind(*kind_key)
            self._kinds[kind] = kind
        if not self.keeps_token_ids or not has_tokens or not block_size:
            token_ids = None
        if extra_keys is not None:
            extra_keys = one_each(extra_keys, num_blocks)
        lookahead = fields[14]
        if lookahead is not None:
            lookahead = one_each(lookahead, num_blocks) if self.keeps_token_ids else None
        positions, packed, has_tails = blocks.store(hashes, parent, kind, token_ids, extra_keys, lookahead)
        if positions is not None and not positions:
            return
        if has_tails and self.keeps_token_ids:
            fresh = hashes if positions is None else [hashes[position] for position in positions]
            announced = announce_with_tails(blocks, fresh)
            if announced:
                sent.extend(announced)
                return
        if positions is not None:
            sent.extend(slice_positions(event, positions))
            return
        # The path of most stores: they have their tokens, and are sent unchanged.
        if packs_tokens and packed is not None and len(packed) >= LEAST_PACKED_BYTES:
            event = replace(event, token_ids=Raw(packed))
        sent.append(event)

    def _remove(self, place: Any, hashes: list[Any], sent: list[KVCacheEvent]) -> None:
        """Remove one copy of each hash, and send the removal of those that are not resident afterwards."""
        gone = self._get_or_add_place(place).remove(hashes)
        if gone:
            sent.append(BlockRemoved(gone, *place))

    def _get_or_add_place(self, place: Any) -> PlaceBlocks:
        """Return the blocks of a place, given as a tuple equal to a `Place`; a new place is added."""
        blocks = self.places.get(place)
        if blocks is None:
            blocks = PlaceBlocks(Place(*place))
            self.places[blocks.place] = blocks
        return blocks

    def clear(self) -> None:
        """Remove all hashes in all places. `drop_some` frees the memory in pieces."""
        for blocks in self.places.values():
            self._forgotten += [blocks.held.values, blocks.held.copies, blocks.children, *blocks.shards]
        self.places = {}
        self._kinds = {}

    def drop_some(self) -> None:
        """Free some of the memory of cleared blocks, for at most about 0.1 ms."""
        num_left = NUM_FORGOTTEN_AT_ONCE
        while self._forgotten and num_left > 0:
            last = self._forgotten[-1]
            num_taken = min(num_left, len(last))
            for _ in range(num_taken):
                last.popitem()
            if not last:
                del self._forgotten[-1]
            num_left -= num_taken + 1


def is_dense(event: BlockStored) -> bool:
    """Return True if the event has exactly the tokens of its blocks."""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


def slice_event(event: BlockStored, first: int, end: int, parent: ExternalBlockHash | None) -> BlockStored:
    """Return an event for blocks `[first, end)`, after `parent`; without tokens if the event is not dense.

    A block does not follow itself: a `parent` that is its first hash is left out.
    """
    size = event.block_size
    hashes = event.block_hashes[first:end]
    return replace(
        event,
        block_hashes=hashes,
        parent_block_hash=None if parent == hashes[0] else parent,
        token_ids=event.token_ids[first * size : end * size] if is_dense(event) else [],
        extra_keys=event.extra_keys and event.extra_keys[first:end],
        lookahead_token_ids=event.lookahead_token_ids and event.lookahead_token_ids[first:end],
    )


def slice_positions(event: BlockStored, positions: list[int]) -> list[BlockStored]:
    """Return one event per run of consecutive positions; `positions` are ascending.

    The event itself if all its positions are given. The parent of a part is the preceding block of the event,
    even if that block is in no part.
    """
    hashes = event.block_hashes
    if len(positions) == len(hashes):
        return [event]
    return [
        slice_event(event, first, end, hashes[first - 1] if first else event.parent_block_hash)
        for first, end in find_ranges(positions, len(positions))
    ]


def one_each(entries: list[Any] | None, num_hashes: int) -> tuple[Any, ...] | None:
    """Return the entries as a tuple; None if not one per hash, or if all are None."""
    if entries and len(entries) == num_hashes and entries.count(None) < num_hashes:
        return tuple(entries)
    return None


def adopt_all(events: list[Any]) -> list[Any]:
    """Convert the events of other classes to kv_pool's, so that each has exactly one of four classes.

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
        InvalidTypeError: neither its class nor a base has one of the known names, or it lacks a field.
    """
    kind: Any = type(event)
    for base in kind.__mro__:
        own = _OWN_CLASSES.get(base.__name__)
        if own is None:
            continue
        if own is kind:
            return cast(BlockStored | BlockRemoved | AllBlocksCleared, event)
        fields = {name: getattr(event, name) for name in own.__struct_fields__ if hasattr(event, name)}
        try:
            adopted: BlockStored | BlockRemoved | AllBlocksCleared = own(**fields)
        except TypeError as error:
            raise InvalidTypeError(f"a {kind.__name__} cannot be sent: {error}") from error
        return adopted
    raise InvalidTypeError(
        f"a {kind.__name__} cannot be sent; readers know BlockStored, BlockRemoved and AllBlocksCleared"
    )
