"""`TierEvents`: what tiers gain and lose, as events among those of the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hash
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import hashes_of, make_stored
from kv_pool.events.stored_spans import take_positions
from kv_pool.ids import BlockHash, BlockHashWithGroupId, ExternalBlockHash


class Label(NamedTuple):
    """What events say of a block: its place in an event about all that were cached with it.

    Attributes:
        span: the event, of all these blocks.
        position: of the block among them.
        depth: tokens before it in its sequence; parents have fewer.
    """

    span: BlockStored
    position: int
    depth: int


class TierEvents:
    """Writes events of tiers into the pool's queue, so that they come in the order in which things happened.

    What is told of a block is remembered from when it was cached, or arrived: its parent, its tokens and the
    rest. Of a block that was never on the device, such as one that a folder had already, only the hash is
    told, with no tokens and a `block_size` of 0.

    Of blocks that are stored together those with fewer tokens before them come first.
    """

    def __init__(self, pool: BlockPoolCore, num_tier_blocks: int) -> None:
        self._pool = pool
        self._labels: dict[BlockHashWithGroupId, Label] = {}
        # Labels of blocks that are nowhere any more go when there are so many.
        self._num_to_sweep_at = 2 * (pool.num_gpu_blocks + num_tier_blocks)

    def note_cached(
        self,
        request: CacheableRequest,
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: int,
    ) -> None:
        """Remember what will be told of blocks that are cached now, should they go to a tier."""
        pool = self._pool
        parent: BlockHash | None = None
        if num_cached_blocks:
            (parent,) = hashes_of(pool, request, num_cached_blocks - 1, num_cached_blocks, block_size)
        start = num_cached_blocks * block_size
        spanned: list[BlockHash | None] = list(hashes)
        span: Any = make_stored(pool, request, spanned, parent, start, block_size, group_id, BlockStored)
        suffix = group_id.to_bytes(4, "big")
        for position, block_hash in enumerate(hashes):
            key = BlockHashWithGroupId(block_hash + suffix)
            self._labels[key] = Label(span, position, start + position * block_size)

    def note_arrived(self, key: BlockHashWithGroupId, told: BlockStored, depth: int) -> None:
        """Remember what an event about this block alone said of it; `depth` tokens are before it."""
        self._labels[key] = Label(told, 0, depth)

    def announce_stored(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """These keys are in a tier of this medium now, and were not before."""
        bare: dict[int, list[ExternalBlockHash]] = {}
        spans: dict[int, list[Label]] = {}
        for key in keys:
            label = self._labels.get(key)
            if label is None:
                bare.setdefault(get_group_id(key), []).append(self._name(key))
            else:
                spans.setdefault(id(label.span), []).append(label)
        stored: list[tuple[int, BlockStored]] = []
        for labels in spans.values():
            labels.sort(key=lambda label: label.position)
            depth_of = {label.span.block_hashes[label.position]: label.depth for label in labels}
            for part in take_positions(labels[0].span, [label.position for label in labels]):
                told = msgspec.structs.replace(part, medium=medium)
                stored.append((depth_of[part.block_hashes[0]], told))
        stored.sort(key=lambda pair: pair[0])
        events: list[Any] = [event for _, event in stored]
        for group_id, hashes in bare.items():
            events += [
                BlockStored([name], None, [], 0, None, medium, None, group_idx=group_id) for name in hashes
            ]
        queue: list[Any] = self._pool.kv_event_queue
        queue += events  # all or nothing, and nothing is called afterwards

    def announce_removed(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """These keys are not in a tier of this medium any more."""
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for key in keys:
            by_group.setdefault(get_group_id(key), []).append(self._name(key))
        events: list[Any] = [BlockRemoved(hashes, medium, group_id) for group_id, hashes in by_group.items()]
        queue: list[Any] = self._pool.kv_event_queue
        queue += events  # all or nothing, and nothing is called afterwards

    def is_crowded(self) -> bool:
        """Are there so many labels that half of them at least are of blocks that are nowhere?"""
        return len(self._labels) > self._num_to_sweep_at

    def keep_only(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Forget all labels but these. O(labels); pays for itself when called for `is_crowded`."""
        labels = self._labels
        self._labels = {key: labels[key] for key in keys if key in labels}

    def clear(self) -> None:
        """Nothing is anywhere."""
        self._labels.clear()

    def _name(self, key: BlockHashWithGroupId) -> ExternalBlockHash:
        block_hash = get_block_hash(key)
        return make_external_block_hash(block_hash) if self._pool.use_int_block_hashes else block_hash
