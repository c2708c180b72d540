"""The numbered invariants of the event stream and their checks. They hold between two batches.

    E1  the resident keys == the keys in the pools' prefix maps, as events name them
    E2  a key's num_copies == the number of blocks that carry it
    E3  a reader of all sent events knows the resident keys and, for each, the fields of its first copy's
        event; so does a reader of a snapshot and all events sent after it
    E4  a store's parent is None, or known to the reader by then, or not stored later in the list
    E5  no hash occurs twice in an event, or is its own parent
    E6  a store has hashes; it has the tokens of all its blocks, or none
    E7  a stored hash was unknown; a removed hash was known, or was never stored

E4 applies to a snapshot, or to the events of one call of a pool: between two calls a parent may be evicted
and cached again, and is then stored later. Each check raises CorruptedPoolError with the number of the first
failed invariant, and changes nothing. The checks are for tests and for changes to `StreamState`.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.core.stored_events import make_external_hash
from kv_pool.errors import CorruptedPoolError
from kv_pool.events.place_blocks import Place
from kv_pool.events.stream_state import StreamState, is_dense
from kv_pool.ids import ExternalBlockHash

Key = tuple[Place, ExternalBlockHash]


def find_place(event: BlockStored | BlockRemoved) -> Place:
    """Return the place of an event's blocks."""
    return Place(event.medium, event.group_idx, event.locality, event.ownership)


class Reader:
    """A simple reference reader of events.

    Attributes:
        known: key -> parent and other event fields, for each key that was stored and not removed.
    """

    def __init__(self) -> None:
        self.known: dict[Key, tuple[Any, ...]] = {}

    def read(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for position, block_hash in enumerate(event.block_hashes):
                    self.known[find_place(event), block_hash] = describe_block(event, position)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.known.pop((find_place(event), block_hash), None)
            else:
                self.known.clear()


def describe_block(event: BlockStored, position: int) -> tuple[Any, ...]:
    """Return the fields of one block of an event."""
    size = event.block_size
    return (
        event.block_hashes[position - 1] if position else event.parent_block_hash,
        event.token_ids[position * size : (position + 1) * size] if is_dense(event) else [],
        size,
        (event.lora_id, event.lora_name),
        event.extra_keys and event.extra_keys[position],
        (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
        event.lookahead_token_ids and event.lookahead_token_ids[position],
    )


def check_resident(state: StreamState, *pools: BlockPool) -> None:
    """Check E1 and E2. O(keys). All events of the pools must have gone through `state.apply`."""
    carried: Counter[Key] = Counter()
    for pool in pools:
        for key, entry in pool.cached_block_hash_to_block.entries.items():
            place = Place(pool.medium, get_group_id(key), None, None)
            external_hash = make_external_hash(pool, get_block_hash(key))
            carried[place, external_hash] += 1 if isinstance(entry, KVCacheBlock) else len(entry)
    resident = {(place, block_hash): num_copies for place, block_hash, num_copies in state.resident}
    for wrong in carried.keys() ^ resident.keys():
        where = "cached, but not resident" if wrong in carried else "resident, but not cached"
        raise CorruptedPoolError(f"E1: {wrong} is {where}")
    for counted, num_copies in resident.items():
        if num_copies != carried[counted]:
            raise CorruptedPoolError(
                f"E2: {counted} has {num_copies} copies, but {carried[counted]} blocks carry it"
            )


def check_knowledge(state: StreamState, *readers: Reader) -> None:
    """Check E3. O(keys). For a state that keeps token ids; `readers[0]` has read all sent events."""
    resident = {(place, block_hash) for place, block_hash, _ in state.resident}
    for reader in readers:
        for wrong in resident ^ reader.known.keys():
            raise CorruptedPoolError(
                f"E3: {wrong} is {'not known' if wrong in resident else 'known, but not resident'}"
            )
        for key, sent in readers[0].known.items():
            if reader.known[key] != sent:
                raise CorruptedPoolError(f"E3: {key} is known as {reader.known[key]}, but sent as {sent}")


def check_events(events: list[KVCacheEvent], reader: Reader) -> None:
    """Check E4 to E7. `reader` has read all events sent before these."""
    now = Reader()
    now.known = dict(reader.known)
    named_too_early: set[Key] = set()
    for event in events:
        if isinstance(event, BlockStored):
            check_store(event, now)
            place = find_place(event)
            for block_hash in event.block_hashes:
                if (place, block_hash) in named_too_early:
                    raise CorruptedPoolError(f"E4: {block_hash!r} is stored after its child")
            parent = event.parent_block_hash
            if parent is not None and (place, parent) not in now.known:
                named_too_early.add((place, parent))
        elif isinstance(event, BlockRemoved):
            check_distinct(event)
            for block_hash in event.block_hashes:
                key = (find_place(event), block_hash)
                if key not in now.known and key in reader.known:
                    raise CorruptedPoolError(f"E7: {key} is removed twice")
        now.read([event])


def check_store(event: BlockStored, reader: Reader) -> None:
    """Check E5, E6 and E7 for one store."""
    check_distinct(event)
    if not (event.block_hashes and (is_dense(event) or not event.token_ids)):
        raise CorruptedPoolError(
            f"E6: {len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {event.block_size}"
        )
    for block_hash in event.block_hashes:
        if (find_place(event), block_hash) in reader.known:
            raise CorruptedPoolError(f"E7: {block_hash!r} is stored again")


def check_distinct(event: BlockStored | BlockRemoved) -> None:
    """Check E5."""
    hashes = event.block_hashes
    if len(set(hashes)) != len(hashes):
        raise CorruptedPoolError(f"E5: a hash occurs twice in {hashes}")
    if isinstance(event, BlockStored) and hashes and hashes[0] == event.parent_block_hash:
        raise CorruptedPoolError(f"E5: {hashes[0]!r} is its own parent")
