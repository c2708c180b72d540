"""What readers of the events are told after a pool was loaded: all that is there, with tokens where known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hash
from kv_pool.core.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.events.stored_spans import take_positions
from kv_pool.ids import BlockHashWithGroupId, ExternalBlockHash

ToldKey = tuple[ExternalBlockHash, int]
"""A hash as events have it, and its group."""

_DECODER = msgspec.msgpack.Decoder(list[AllBlocksCleared | BlockStored])


def encode_events(events: Sequence[KVCacheEvent]) -> bytes:
    """A part of a snapshot as a record."""
    return msgspec.msgpack.encode(events)


def decode_events(payload: bytes) -> list[BlockStored]:
    """The stores of a record. Raises msgspec's errors, which are ValueErrors, where it is none."""
    return [event for event in _DECODER.decode(payload) if isinstance(event, BlockStored)]


def make_events(
    pool: BlockPoolCore, keys: Iterable[BlockHashWithGroupId], snapshot: Sequence[BlockStored]
) -> list[KVCacheEvent]:
    """A clear, and stores that say of each of these keys, once for each time it is listed, that it is there.

    Args:
        pool: whose hashes, medium and classes of events are used.
        snapshot: what was told of the blocks before, parents before children. Of what is not among the keys,
            or was somewhere else, nothing is said.

    What the snapshot does not know is stored without tokens, parent and adapter: its hash alone.
    """
    counts: dict[ToldKey, int] = {}
    for key in keys:
        told = name_key(pool, key)
        counts[told] = counts.get(told, 0) + 1
    stores: list[BlockStored] = []
    again: list[BlockStored] = []
    for event in snapshot:
        if not _is_of(pool, event):
            continue
        group_id = event.group_idx or 0
        positions = []
        for position, block_hash in enumerate(event.block_hashes):
            count = counts.pop((block_hash, group_id), 0)
            if count:
                positions.append(position)
            for _ in range(count - 1):
                again += take_positions(event, [position])
        if positions:
            stores += take_positions(event, positions)
    for (block_hash, group_id), count in counts.items():
        bare = BlockStored(
            [block_hash], None, [], pool.hash_block_size, None, pool.medium, None, group_idx=group_id
        )
        again += [bare] * count
    make_stored: Callable[..., Any] = pool.stored_type
    return [pool.cleared_type(), *(_convert(event, make_stored) for event in stores + again)]


def split_events(pool: BlockPoolCore, snapshot: Sequence[BlockStored]) -> dict[ToldKey, BlockStored]:
    """What the snapshot says of each block of the pool, as an event about this block alone."""
    return {
        (event.block_hashes[position], event.group_idx or 0): part
        for event in snapshot
        if _is_of(pool, event)
        for position in range(len(event.block_hashes))
        for part in take_positions(event, [position])
    }


def name_key(pool: BlockPoolCore, key: BlockHashWithGroupId) -> ToldKey:
    """A key as events have it."""
    block_hash = get_block_hash(key)
    return make_external_block_hash(block_hash) if pool.use_int_block_hashes else block_hash, get_group_id(
        key
    )


def _is_of(pool: BlockPoolCore, event: BlockStored) -> bool:
    """Is it about blocks in the pool's own memory?"""
    return (event.medium, event.locality, event.ownership) == (pool.medium, None, None)


def _convert(event: BlockStored, make_stored: Callable[..., Any]) -> Any:
    """The event as the class that the pool's engine has for it, with the fields that any of these has."""
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
