"""Events published after loading a dump: one clear, then one store per cached key, with tokens if known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import make_external_hash
from kv_pool.events.stored_spans import slice_positions
from kv_pool.ids import BlockHashWithGroupId, ExternalBlockHash, GroupId

EventKey = tuple[ExternalBlockHash, GroupId]
"""A hash in the form that events use, and its KV cache group."""

_DECODER = msgspec.msgpack.Decoder(list[AllBlocksCleared | BlockStored])


def decode_events(payload: bytes) -> list[BlockStored]:
    """Return the stores of a record. Raises msgspec's errors, which are ValueErrors, if it is invalid."""
    return [event for event in _DECODER.decode(payload) if isinstance(event, BlockStored)]


def make_events(
    pool: BlockPoolCore, keys: Iterable[BlockHashWithGroupId], snapshot: Sequence[BlockStored]
) -> list[KVCacheEvent]:
    """Return one clear, followed by one store for each occurrence of a key in `keys`.

    Args:
        pool: determines the form of the hashes, the medium and the event classes.
        keys: the keys of the pool's cached blocks.
        snapshot: earlier stores of these blocks, parents before children. Entries for other keys, or for
            blocks outside this pool's memory, are ignored.

    A key that the snapshot lacks is stored by its hash only, without tokens, parent and adapter.
    """
    counts: dict[EventKey, int] = {}
    for key in keys:
        event_key = name_key(pool, key)
        counts[event_key] = counts.get(event_key, 0) + 1
    stores: list[BlockStored] = []
    again: list[BlockStored] = []
    for event in snapshot:
        if not _is_of(pool, event):
            continue
        group_id = GroupId(event.group_idx or 0)
        positions = []
        for position, block_hash in enumerate(event.block_hashes):
            count = counts.pop((block_hash, group_id), 0)
            if count:
                positions.append(position)
            for _ in range(count - 1):
                again += slice_positions(event, [position])
        if positions:
            stores += slice_positions(event, positions)
    for (block_hash, group_id), count in counts.items():
        bare = BlockStored(
            [block_hash], None, [], pool.hash_block_size, None, pool.medium, None, group_idx=group_id
        )
        again += [bare] * count
    make_stored: Callable[..., Any] = pool.stored_type
    return [pool.cleared_type(), *(_convert(event, make_stored) for event in stores + again)]


def split_events(pool: BlockPoolCore, snapshot: Sequence[BlockStored]) -> dict[EventKey, BlockStored]:
    """Return, for each block of the pool in the snapshot, an event about this block only."""
    return {
        (event.block_hashes[position], GroupId(event.group_idx or 0)): part
        for event in snapshot
        if _is_of(pool, event)
        for position in range(len(event.block_hashes))
        for part in slice_positions(event, [position])
    }


def name_key(pool: BlockPoolCore, key: BlockHashWithGroupId) -> EventKey:
    """Return a key in the form that events use."""
    return make_external_hash(pool, get_block_hash(key)), get_group_id(key)


def _is_of(pool: BlockPoolCore, event: BlockStored) -> bool:
    """Return True if the event is about blocks in the pool's own memory."""
    return (event.medium, event.locality, event.ownership) == (pool.medium, None, None)


def _convert(event: BlockStored, make_stored: Callable[..., Any]) -> Any:
    """Convert an event to the engine's event class, copying the fields that all such classes have."""
    if make_stored is BlockStored:
        return event
    made = make_stored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        lora_name=event.lora_name,
        extra_keys=event.extra_keys,
        group_idx=event.group_idx,
    )
    for name in ("kv_cache_spec_kind", "kv_cache_spec_sliding_window"):
        if getattr(event, name) is not None:
            setattr(made, name, getattr(event, name))
    return made
