"""`StreamState`: filters a pool's events for readers, tracks resident blocks, and takes snapshots."""

from collections.abc import Iterator, Sequence
from itertools import chain
from threading import Lock

from mypy_extensions import mypyc_attr

from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.errors import InvalidArgumentError
from kv_pool.events.chains import iter_chunks
from kv_pool.events.event_filter import EventFilter, adopt_all
from kv_pool.events.place_blocks import Change
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.resident_copy import copy_places, redo
from kv_pool.events.yield_timer import YieldTimer

NOTHING_APPLIED = -1
MAX_BLOCKS_PER_CHUNK = 256


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamState:
    """A filter for the events of pools and connectors that tracks the resident blocks.

        >>> from kv_pool.core.kv_events import BlockRemoved, BlockStored
        >>> state = StreamState()
        >>> stored = BlockStored([7], None, [1, 2], block_size=2, lora_id=None, medium="GPU", lora_name=None)
        >>> len(state.apply([stored])), len(state.apply([stored]))
        (1, 0)
        >>> len(state.apply([BlockRemoved([7], "GPU")])), len(state.apply([BlockRemoved([7], "GPU")]))
        (0, 1)

    Args:
        exact: send a store only for the first copy of a hash, and a removal only for its last. Pools announce
            each copy, and in full report mode also hits. Removals of hashes that were never stored are still
            sent: a reader may know them.
        dense: send stores with the tokens of all their blocks, or with none: a span with holes is sent
            without tokens, since the event does not say where the holes are. Pools with `dense_events` create
            no such spans. Also, no hash occurs twice in a store or is its own parent, and no store is empty.
        coalesce_removals: merge consecutive removals from one place into one event.
        keeps_token_ids: include token ids in snapshots; without them most of the memory is saved.

    If all of these are False, `apply` returns its input unchanged. Input events are never modified.

    A parent is sent as the pool names it, even if it was evicted or skipped in a window: its child is then an
    orphan, which some readers drop or hide. When an exact state that keeps token ids sends the parent, it
    announces the blocks after it again: removed, then stored, up to 1024 per event.

    One thread calls `apply`; any other thread may take snapshots at the same time.
    """

    def __init__(
        self,
        exact: bool = True,
        dense: bool = True,
        coalesce_removals: bool = True,
        keeps_token_ids: bool = True,
    ) -> None:
        self.exact = exact
        self.dense = dense
        self.coalesce_removals = coalesce_removals
        self.resident = ResidentBlocks(keeps_token_ids)
        self._filter = EventFilter(self.resident, exact, dense, coalesce_removals)
        self.last_sequence = NOTHING_APPLIED
        self._lock = Lock()  # guards resident, last_sequence; held for a batch or a piece of a copy
        self._snapshot_lock = Lock()  # one snapshot at a time

    def apply(
        self, events: Sequence[KVCacheEvent], sequence: int | None = None, *, packs_tokens: bool = False
    ) -> list[KVCacheEvent]:
        """Apply a batch of events; return the events to send instead.

        Args:
            events: oldest first; events of an engine's own classes are converted.
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
            sent = self._filter.apply(ours, packs_tokens)
            self.last_sequence = self.last_sequence + 1 if sequence is None else sequence
            self.resident.drop_some()
        return sent

    def iter_snapshot(
        self, max_blocks: int = MAX_BLOCKS_PER_CHUNK, yield_timer: YieldTimer | None = None
    ) -> tuple[int, Iterator[list[KVCacheEvent]]]:
        """Return all resident blocks as events for a new reader.

        Returns:
            The number of the last batch included (-1 for none): the reader continues with the next one.
            And the events, in lists of at most `max_blocks` blocks: `AllBlocksCleared`; then every hash once,
            parents before children, one event per chain; finally the orphans, with their original parents.

        Yields the GIL by `yield_timer`: by default every 0.4 ms, including the caller's work on a list. Next
        to a thread that never waits, each yield takes another 5 ms (`sys.setswitchinterval`). The copy takes
        about 100 bytes per block until all lists are consumed.
        """
        if max_blocks < 1:
            raise InvalidArgumentError(f"max_blocks is {max_blocks}; it must be at least 1")
        yield_timer = YieldTimer() if yield_timer is None else yield_timer
        resident = self.resident
        changes: list[Change | None] = []
        with self._snapshot_lock:
            with self._lock:
                resident.watch(changes)
            try:
                copies = copy_places(resident, self._lock, yield_timer)
            finally:
                with self._lock:
                    resident.watch(None)
                    sequence = self.last_sequence
        redo(copies, changes, yield_timer)
        cleared: list[KVCacheEvent] = [AllBlocksCleared()]
        return sequence, chain([cleared], iter_chunks(copies, max_blocks, yield_timer))

    def take_snapshot(self) -> tuple[int, list[KVCacheEvent]]:
        """Return `iter_snapshot` with all events in one list."""
        sequence, chunks = self.iter_snapshot()
        return sequence, [event for chunk in chunks for event in chunk]
