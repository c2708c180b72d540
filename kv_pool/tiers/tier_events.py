"""`TierEvents`: the events of tiers, in order with the pool's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kv_pool.core.block_keys import get_block_hash, get_group_id, group_suffix
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import hashes_of, make_external_hash, make_stored
from kv_pool.events.stream_state import slice_positions
from kv_pool.ids import BlockHash, BlockHashWithGroupId, ExternalBlockHash, GroupId

EventKey = tuple[ExternalBlockHash, GroupId]
"""A hash in the form that events use, and its KV cache group."""


def name_key(pool: BlockPoolCore, key: BlockHashWithGroupId) -> EventKey:
    """Return a key in the form that events use."""
    return make_external_hash(pool, get_block_hash(key)), get_group_id(key)


class Label(NamedTuple):
    """The event data of a block: its position in the store event of all blocks cached with it.

    Attributes:
        span: the store event.
        position: the block's index in the event.
        depth: number of tokens before the block in its sequence; parents have fewer.
    """

    span: BlockStored
    position: int
    depth: int


class TierEvents:
    """Appends events of tiers to the pool's queue, so that all events stay in order.

    A block's event data (parent, tokens and so on) is recorded when the block is cached or arrives. A block
    that was never on the device, such as one found in a reopened folder, is published with its hash only: no
    tokens, and a `block_size` of 0.

    Among blocks stored together, those with fewer preceding tokens are published first.

    Attributes:
        labels: the event data, which the tiers' owner drops when a block is neither cached nor stored.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self._pool = pool
        self.labels: dict[BlockHashWithGroupId, Label] = {}

    def note_cached(
        self,
        request: CacheableRequest,
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        """Record the event data of newly cached blocks, for events when they enter a tier."""
        pool = self._pool
        parent: BlockHash | None = None
        if num_cached_blocks:
            (parent,) = hashes_of(pool, request, num_cached_blocks - 1, num_cached_blocks, block_size)
        start = num_cached_blocks * block_size
        spanned: list[BlockHash | None] = list(hashes)
        span: Any = make_stored(pool, request, spanned, parent, start, block_size, group_id, BlockStored)
        suffix = group_suffix(group_id)
        for position, block_hash in enumerate(hashes):
            key = BlockHashWithGroupId(block_hash + suffix)
            self.labels[key] = Label(span, position, start + position * block_size)

    def note_arrived(self, key: BlockHashWithGroupId, event: BlockStored, depth: int) -> None:
        """Record the event data of a received block from an event about it alone.

        `depth` is the number of tokens before the block in its sequence.
        """
        self.labels[key] = Label(event, 0, depth)

    def announce_stored(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Publish that a tier of this medium has gained these keys."""
        bare: list[EventKey] = []
        spans: dict[int, list[Label]] = {}
        for key in keys:
            label = self.labels.get(key)
            if label is None:
                bare.append(name_key(self._pool, key))
            else:
                spans.setdefault(id(label.span), []).append(label)
        stored: list[tuple[int, BlockStored]] = []
        for labels in spans.values():
            labels.sort(key=lambda label: label.position)
            depth_of = {label.span.block_hashes[label.position]: label.depth for label in labels}
            for part in slice_positions(labels[0].span, [label.position for label in labels]):
                event = msgspec.structs.replace(part, medium=medium)
                stored.append((depth_of[part.block_hashes[0]], event))
        stored.sort(key=lambda pair: pair[0])
        events: list[Any] = [event for _, event in stored]
        events += [
            BlockStored([name], None, [], 0, None, medium, None, group_idx=group_id)
            for name, group_id in bare
        ]
        self._pool.kv_event_queue.extend(events)

    def announce_removed(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Publish that a tier of this medium has lost these keys."""
        by_group: dict[GroupId, list[ExternalBlockHash]] = {}
        for key in keys:
            name, group_id = name_key(self._pool, key)
            by_group.setdefault(group_id, []).append(name)
        events: list[Any] = [BlockRemoved(hashes, medium, group_id) for group_id, hashes in by_group.items()]
        self._pool.kv_event_queue.extend(events)
