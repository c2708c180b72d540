"""`StreamState`: between a pool and those who read of it; makes what they read true, and can tell it anew."""

from collections.abc import Iterator, Sequence
from itertools import chain
from threading import Lock

from mypy_extensions import mypyc_attr

from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.errors import InvalidArgumentError
from kv_pool.events.chains import iter_chunks
from kv_pool.events.event_filter import EventFilter, adopt_all
from kv_pool.events.pace import Pace
from kv_pool.events.place_blocks import Change
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.resident_copy import copy_places, redo

NOTHING_APPLIED = -1
MAX_BLOCKS_PER_CHUNK = 256


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamState:
    """Takes the events of pools and connectors, says which to send, and keeps what a reader should know.

        >>> from kv_pool.core.kv_events import BlockRemoved, BlockStored
        >>> state = StreamState()
        >>> stored = BlockStored([7], None, [1, 2], block_size=2, lora_id=None, medium="GPU", lora_name=None)
        >>> len(state.apply([stored])), len(state.apply([stored]))
        (1, 0)
        >>> len(state.apply([BlockRemoved([7], "GPU")])), len(state.apply([BlockRemoved([7], "GPU")]))
        (0, 1)

    Args:
        exact: a hash is announced with its first copy and removed with its last. Pools tell of each copy, and
            announce hits again in full report mode: this drops what is no news. Removals of hashes that
            were never stored are sent all the same: someone may know of them.
        dense: a store has the tokens of its blocks, or none: a span with holes is sent without its tokens,
            since where the holes are is not in the event. Pools with `dense_events` make none of these. No
            hash is twice in a store, or its own parent, and no store is without hashes.
        coalesce_removals: removals in a row from one place become one event.
        keeps_token_ids: snapshots have token ids; without, they are empty, and most of the memory is saved.

    With all of these off `apply` returns what it is given. Nothing that was given is changed.

    A parent is sent as the pool names it, though it may have been evicted, or skipped in a window: its child
    is an orphan, which some readers drop or hide. When an exact state that keeps token ids sends the parent,
    it sends the blocks behind it again: removed, then stored, up to 1024 for each event.

    Threads: one calls `apply`, any other takes snapshots meanwhile.
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
        self._lock = Lock()  # resident and last_sequence; held for one batch, or one piece of a copy
        self._snapshot_lock = Lock()  # one snapshot at a time

    def apply(
        self, events: Sequence[KVCacheEvent], sequence: int | None = None, *, packs_tokens: bool = False
    ) -> list[KVCacheEvent]:
        """Note a batch of events, and say which to send instead of them.

        Args:
            events: oldest first; an engine's own classes become ours.
            sequence: the batch's number; None for the one after the last. Send the batch even if nothing is
                left of it: a snapshot from now on says that it has it.
            packs_tokens: the token ids of a store may come as a `msgspec.Raw`, which an encoder copies: they
                are encoded once, for snapshots and for sending.
        Raises:
            InvalidTypeError: something that is none of the three events, whosever class it is of. Nothing
                has changed.
        Cost: O(hashes), tenths of a microsecond each; at most one piece of a snapshot's copy is waited for.
        """
        ours = adopt_all(events if type(events) is list else list(events))
        with self._lock:
            sent = self._filter.apply(ours, packs_tokens)
            self.last_sequence = self.last_sequence + 1 if sequence is None else sequence
            self.resident.drop_some()
        return sent

    def iter_snapshot(
        self, max_blocks: int = MAX_BLOCKS_PER_CHUNK, pace: Pace | None = None
    ) -> tuple[int, Iterator[list[KVCacheEvent]]]:
        """All that is resident, as events for a reader that knows nothing.

        Returns:
            The number of the last batch that is in it (-1 for none): the reader goes on with the next one.
            And the events, in lists of at most `max_blocks` blocks: `AllBlocksCleared`; then every hash once,
            parents before children, chains as one event; at last the orphans, with the parents they had.

        No other thread is held up for longer than `pace` says: by default 0.4 ms at a time, in which the
        caller's work on a list counts. Beside a thread that never waits, each of these takes another 5 ms
        (`sys.setswitchinterval`). Until all lists are taken they need some 100 bytes of memory a block.
        """
        if max_blocks < 1:
            raise InvalidArgumentError(f"max_blocks is {max_blocks}; a list has at least 1 block")
        pace = Pace() if pace is None else pace
        resident = self.resident
        changes: list[Change | None] = []
        with self._snapshot_lock:
            with self._lock:
                resident.watch(changes)
            try:
                copies = copy_places(resident, self._lock, pace)
            finally:
                with self._lock:
                    resident.watch(None)
                    sequence = self.last_sequence
        redo(copies, changes, pace)
        cleared: list[KVCacheEvent] = [AllBlocksCleared()]
        return sequence, chain([cleared], iter_chunks(copies, max_blocks, pace))

    def take_snapshot(self) -> tuple[int, list[KVCacheEvent]]:
        """`iter_snapshot`, all events in one list."""
        sequence, chunks = self.iter_snapshot()
        return sequence, [event for chunk in chunks for event in chunk]
