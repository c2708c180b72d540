"""`TierStore`: the state of a pool's lower tiers, and stores between them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import CopyFailedError, TierError
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.prefetcher import Prefetcher
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tier_events import TierEvents

_logger = logging.getLogger(__name__)


class TierStore:
    """The base class of `TieredCache`: moves blocks to lower tiers and removes them.

    A call that changes tiers sets the pool's `is_changing` meanwhile, so that the pool refuses further calls
    if it is interrupted; the repair of the pool clears all tiers.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        storage: BlockStorage | None,
        tiers: tuple[Tier, ...],
        writes_through: bool,
        enable_events: bool,
        max_prefetch_blocks: int,
    ) -> None:
        self.block_pool = block_pool
        self.storage = storage
        self.tiers = tiers
        self.writes_through = writes_through
        # Block size of each group, learned from cached blocks; only full blocks are stored.
        self._block_size_of: dict[bytes, int] = {}
        self._has_partial = False
        # Reused blocks that still have their old bytes, and the time since which there are any.
        self._pending: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        self._pending_since = 0.0
        self._pending_places = block_pool.holds.open_place_hold(
            "not yet offloaded to a lower tier", self._find_pending
        )
        # To be written through: blocks that the next step writes, and blocks already written.
        self._unwritten: dict[BlockHashWithGroupId, tuple[KVCacheBlock, int]] = {}
        self._written: dict[BlockHashWithGroupId, tuple[KVCacheBlock, int]] = {}
        # Shared with the tiers: see `LowerTiers.list_parents`.
        self._parents: dict[BlockHashWithGroupId, tuple[bytes | None, int]] = {}
        self._num_parents_to_sweep_at = 2 * sum(tier.capacity for tier in tiers) + block_pool.num_gpu_blocks
        self._events = TierEvents(block_pool, sum(tier.capacity for tier in tiers)) if enable_events else None
        self._disk = next((tier for tier in tiers[1:] if isinstance(tier, DiskTier)), None)
        self._max_prefetch_blocks = max(1, min(max_prefetch_blocks, tiers[0].capacity // 2))
        self._prefetcher = (
            Prefetcher(self._disk, self._max_prefetch_blocks)
            if self._disk is not None and max_prefetch_blocks
            else None
        )
        self.num_dropped = 0
        self._unforgotten: TierError | None = None
        self._held: dict[BlockHashWithGroupId, int] = {}
        for tier in tiers:
            tier.share_holds(self._held)
            tier.share_parents(self._parents)

    def _find_pending(self) -> dict[KVCacheBlock, float]:
        return dict.fromkeys(self._pending.values(), self._pending_since)

    def _begin(self) -> None:
        """Begin to change tiers, unless an earlier call was interrupted."""
        self.block_pool.holds.check_whole()
        self.block_pool.is_changing = True

    def _announce_stored(self, tier: Tier, keys: Sequence[BlockHashWithGroupId]) -> None:
        if self._events is not None and keys:
            self._events.announce_stored(tier.medium, keys)

    def _announce_removed(self, tier: Tier, keys: Sequence[BlockHashWithGroupId]) -> None:
        if self._events is not None and keys:
            self._events.announce_removed(tier.medium, keys)

    def _forget(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove these keys from every tier and queue. Raises TierError after trying all tiers."""
        was_changing = self.block_pool.is_changing
        self.block_pool.is_changing = True
        if self._prefetcher is not None and keys:
            self._prefetcher.cancel()
        for queue in (self._pending, self._unwritten, self._written):
            for key in keys:
                queue.pop(key, None)
        failure: TierError | None = None
        for tier in self.tiers:
            removed = [key for key in dict.fromkeys(keys) if key in tier]
            try:
                tier.forget(keys)
            except TierError as error:
                failure = failure or error
            self._announce_removed(tier, removed)
        self.block_pool.is_changing = was_changing
        if failure is not None:
            raise failure

    def _clear(self) -> None:
        """Remove everything, without events."""
        self._pending.clear()
        self._unwritten.clear()
        self._written.clear()
        if self._prefetcher is not None:
            self._prefetcher.cancel()
        if self._events is not None:
            self._events.clear()
        for tier in self.tiers:
            try:
                tier.clear()
            except TierError as error:
                self._note_unforgotten(error)

    def _forget_labels(self) -> None:
        """Drop the event data of blocks that are neither cached nor stored, once there is too much of it."""
        if self._events is not None and self._events.is_crowded():
            on_device = self.block_pool.cached_block_hash_to_block.entries
            self._events.keep_only(chain(on_device, self._pending, *map(Tier.list_keys, self.tiers)))

    def _note_parents(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Record what `list_parents` returns for these cached blocks; forget blocks that are in no tier."""
        parents = self._parents
        for block in blocks:
            parents[block.key] = block.parent, block.num_key_tokens
        if len(parents) > self._num_parents_to_sweep_at:
            kept = {
                *self._pending,
                *chain(*map(Tier.list_keys, self.tiers)),
                *(block.key for block in blocks),
            }
            for key in [key for key in parents if key not in kept]:
                del parents[key]

    def _is_full(self, block: KVCacheBlock) -> bool:
        """Return True if the block's key covers all its tokens."""
        block_size = self._block_size_of.get(block.block_hash[-4:])
        num_tokens = block.block_hash_num_tokens
        return block_size is not None and num_tokens is not None and num_tokens % block_size == 0

    def _note_unforgotten(self, error: TierError) -> None:
        """Log the error and keep it for `flush` to raise; a hook must not raise inside a pool operation."""
        _logger.error("%s", error)
        self._unforgotten = self._unforgotten or error

    def _copy_out(self, copies: Sequence[tuple[BlockHashWithGroupId, BlockId]]) -> None:
        """Offload device blocks, given as (key, block id), to the top tier."""
        if copies:
            keys, block_ids = zip(*copies, strict=True)
            self._store_in_top_tier(keys, self.storage, block_ids)

    def _store_in_top_tier(
        self,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None,
        block_ids: Sequence[BlockId],
    ) -> None:
        """Store these blocks in the top tier; see `_store`."""
        was_changing = self.block_pool.is_changing
        self.block_pool.is_changing = True
        self._store(0, keys, storage, block_ids)
        self.block_pool.is_changing = was_changing

    def _store(
        self,
        level: int,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None,
        block_ids: Sequence[BlockId],
    ) -> None:
        """Store these blocks in a tier as most recently used; evicted blocks move to the next tier.

        Args:
            level: index of the tier.
            storage, block_ids: the source of the bytes; None and empty without bytes.
        """
        tier = self.tiers[level]
        new = tier.touch(keys)
        if not new:
            return
        id_of = dict(zip(keys, block_ids, strict=True)) if storage is not None else {}
        step = min(tier.batch_blocks or tier.capacity, tier.capacity)
        for start in range(0, len(new), step):
            some = new[start : start + step]
            num_missing = len(tier) + len(some) - tier.capacity
            if num_missing > 0:
                num_missing -= self._make_room(level, num_missing)
                if num_missing > 0:  # the rest is held
                    self.num_dropped += num_missing
                    del some[len(some) - num_missing :]
            try:
                stored = tier.put(some, storage, [id_of[key] for key in some] if id_of else ())
            except CopyFailedError as error:
                _logger.warning("%d blocks were not offloaded: %s", len(some), error)
                self.num_dropped += len(some)
            else:
                self._announce_stored(tier, stored)

    def _make_room(self, level: int, num_blocks: int) -> int:
        """Evict up to `num_blocks` blocks of a tier to the next tier. Return how many were evicted."""
        tier = self.tiers[level]
        outgoing = tier.list_next_evicted(num_blocks)
        if level + 1 < len(self.tiers):
            if self.storage is None:
                self._store(level + 1, outgoing, None, ())
            else:
                missing = self.tiers[level + 1].touch(outgoing)
                step = tier.batch_blocks or len(missing) or 1
                for start in range(0, len(missing), step):
                    some = missing[start : start + step]
                    read = tier.read(some)
                    self._announce_removed(tier, read.failed)
                    self._store(level + 1, read.keys, read.storage, read.block_ids)
        self._announce_removed(tier, tier.remove(outgoing))
        return len(outgoing)
