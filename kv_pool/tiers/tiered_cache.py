"""`TieredCache`: offloads blocks that a pool evicts to lower tiers, and loads them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kv_pool.core.arguments import as_count
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_group_id, group_suffix
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import CopyFailedError, InvalidArgumentError, TierError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId, RequestId
from kv_pool.loggers import get_logger
from kv_pool.reports.tiers import TierStatistics
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier, Prefetcher
from kv_pool.tiers.tier import NO_IDS, LeveledKeys, Tier, TierStack
from kv_pool.tiers.tier_events import TierEvents

_logger = get_logger(__name__)

WRITES = ("back", "through")


class TieredCache:
    """The lower tiers of a pool, fastest first.

        >>> from kv_pool import BlockHasher, BlockPool, Request
        >>> from kv_pool.tiers.tier import Tier
        >>> from kv_pool.tiers.tiered_cache import TieredCache
        >>> pool = BlockPool(4, True, 4)
        >>> tiers = TieredCache(pool, None, [Tier(2, "CPU"), Tier(9, "STORAGE")])
        >>> request = Request("a", range(12), BlockHasher(block_size=4))
        >>> blocks = pool.get_new_blocks(3)
        >>> pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)
        >>> pool.free_blocks(reversed(blocks))
        >>> _ = pool.get_new_blocks(3)
        >>> [len(tier) for tier in tiers.tiers]
        [2, 1]

        device pool -- block is reused --> tiers[0] -- evicted --> tiers[1] -- evicted --> dropped

    A block that is loaded also stays in its tier, so it needs no copy when the device evicts it again. A
    block can be in several tiers.

    Args:
        block_pool: the pool; its `lower_tiers` is set to this object.
        storage: the bytes of the pool's blocks; None for a pool without bytes, with tiers without bytes.
        tiers: fastest first.
        write: `back` offloads a block when the pool reuses it. `through` also offloads it as soon as it is
            cached and written, so that nothing is left to copy on reuse. A cached block counts as written if
            its request's `num_computed_tokens` covers it, else after the next step.
        max_prefetch_blocks: maximum number of blocks prefetched at a time; 0 turns prefetching off.
        enable_events: publish the stores and removals of tiers with the pool's events, which must be on.

    **Required calls.** Call `flush()` once per step, after the step's slots are allocated and before the step
    writes. Until then reused blocks still have their old bytes, and the pool holds them; `flush()` offloads
    these bytes. Call `flush_evicted()` before anything else overwrites newly allocated blocks; swappers and
    migrations do so themselves. Without bytes both are no-ops.

    Only full blocks are stored, by the key under which requests look them up. Partial blocks
    (`cache_partial_block`) and a block's additional keys are not stored.

    Blocks with wrong content do not come back: `KVCacheManager.evict_blocks` and `report_invalid_blocks`
    remove them from all tiers, and a reset of the prefix cache clears all tiers. A caller that uses
    `BlockPool.evict_blocks` on wrong content must also call `forget`.

    Not thread-safe; call it from the scheduler's thread. A call that is interrupted, by the exception of a
    signal handler for example, interrupts the pool: its next call raises PoolInterruptedError, and its repair
    clears all tiers.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        storage: BlockStorage | None,
        tiers: Sequence[Tier],
        write: str = "back",
        *,
        enable_events: bool = False,
        max_prefetch_blocks: int = 256,
    ) -> None:
        max_prefetch_blocks = as_count("max_prefetch_blocks", max_prefetch_blocks)
        if not tiers:
            raise InvalidArgumentError("tiers is empty; pass at least one tier")
        if write not in WRITES:
            raise InvalidArgumentError(f"write is {write!r}; it must be one of {', '.join(WRITES)}")
        for tier in tiers:
            if tier.has_bytes is (storage is None):
                raise InvalidArgumentError(
                    f"the {tier.medium} tier has {'' if tier.has_bytes else 'no '}bytes, the pool's blocks "
                    f"have {'none' if storage is None else 'some'}; use a Tier for blocks without bytes, a "
                    "HostTier or DiskTier for blocks with bytes"
                )
        if enable_events and not block_pool.enable_kv_cache_events:
            raise InvalidArgumentError("events of tiers need the pool's; its enable_kv_cache_events is off")
        if block_pool.lower_tiers is not None:
            raise InvalidArgumentError("the pool already has lower tiers; close() those first")
        self.block_pool = block_pool
        self.storage = storage
        self.writes_through = write == "through"
        # Block size of each group, learned from cached blocks; only full blocks are stored.
        self._block_size_of: dict[bytes, int] = {}
        self._has_partial = False
        # Reused blocks that still have their old bytes, and the time since which there are any.
        self._pending: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        self._pending_since = 0.0
        self._pending_places = block_pool.holds.open_place_hold(
            "not yet offloaded to a lower tier", self._find_pending
        )
        # To be written through: key and generation of each block, and whether it is written, or will be by
        # the step. By block, since two may have a key, of which one is never written.
        self._through: dict[KVCacheBlock, tuple[BlockHashWithGroupId, int, bool]] = {}
        self._events = TierEvents(block_pool) if enable_events else None
        # Its calls do not check that the pool is whole.
        self._stack = TierStack(tiers, self._events)
        # Shared with the tiers: see `LowerTiers.list_parents`.
        self._parents: dict[BlockHashWithGroupId, tuple[bytes | None, int]] = {}
        self._num_to_sweep_at = 2 * (block_pool.num_gpu_blocks + sum(tier.capacity for tier in tiers))
        disk = next((tier for tier in tiers[1:] if isinstance(tier, DiskTier)), None)
        self._max_prefetch_blocks = min(max_prefetch_blocks, max(1, tiers[0].capacity // 2))
        self._prefetcher = Prefetcher(disk, self._max_prefetch_blocks)
        self._unforgotten: TierError | None = None
        for tier in tiers:
            self._parents.update(tier.parents)
            tier.parents = self._parents
        block_pool.lower_tiers = self
        for tier in tiers:
            self._stack.announce_stored(tier, tier.list_keys())

    # ---- looking ---------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return self.find_tier(key) is not None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, fastest first."""
        return self._stack.tiers

    @property
    def num_dropped(self) -> int:
        """Number of blocks that were not stored, because all of a tier are held or the copy failed."""
        return self._stack.num_dropped

    def find_tier(self, key: object) -> int | None:
        """Return the index in `tiers` of the fastest tier that has the block, or None. Changes nothing.

        A pending block, not yet offloaded, counts for the fastest tier.
        """
        return 0 if key in self._pending else self._stack.find_tier(key)

    def list_indexes(self) -> list[LeveledKeys]:
        """As `TierStack.list_indexes`. A pending block, not yet offloaded, counts for the fastest tier."""
        indexes = self._stack.list_indexes()
        return [(0, self._pending), *indexes] if self._pending else indexes

    def has_all(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Return True if every key is in a tier or pending."""
        left = list(keys)
        for _, index in self.list_indexes():
            left = [key for key in left if key not in index]
        return not left

    def get_statistics(self) -> list[TierStatistics]:
        """Return the statistics of each tier, fastest first."""
        return [tier.get_statistics() for tier in self.tiers]

    # ---- notifications from the pool ------------------------------------------------------------

    def on_blocks_cached(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        """See `LowerTiers`."""
        self.note_block_size(group_id, block_size)
        if self._events is not None:
            self._events.note_cached(request, hashes, num_cached_blocks, block_size, group_id)
            self._sweep(self._events.labels)
        if self.writes_through:
            num_written = getattr(request, "num_computed_tokens", 0) // block_size
            self._write_through(blocks, num_written - num_cached_blocks)

    def on_block_arrived(
        self, block: KVCacheBlock, block_size: int | None, event: BlockStored | None
    ) -> None:
        """See `LowerTiers`."""
        key = block.block_hash
        if block_size is not None:
            self.note_block_size(get_group_id(key), block_size)
        if self._events is not None and event is not None:
            self._events.note_arrived(
                key, event, max(0, (block.block_hash_num_tokens or 0) - event.block_size)
            )
            self._sweep(self._events.labels)
        if self.writes_through and (not self._has_partial or self._is_full(block)):
            self._note_parents([block])
            self._write_through([block], 1)

    def on_blocks_reused(self, blocks: Sequence[KVCacheBlock]) -> None:
        """See `LowerTiers`."""
        if self._has_partial:
            blocks = [block for block in blocks if self._is_full(block)]
        self._note_parents(blocks)
        if self.storage is None:
            self._store([block.block_hash for block in blocks])
            return
        for block in blocks:
            key = block.block_hash
            queued = self._through.pop(block, None)
            if queued == (key, block.generation, False):
                continue  # freed and reused before the step that would have written it
            if not self._pending:
                self._pending_since = self.block_pool.holds.clock()
            self._pending.pop(key, None)  # of two copies, the most recent one sets the LRU position
            self._pending[key] = block

    def on_content_invalidated(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """See `LowerTiers`. The next `flush` raises a disk's error."""
        try:
            self._forget(keys)
        except TierError as error:
            self._note_unforgotten(error)

    def list_parents(self) -> dict[BlockHashWithGroupId, tuple[bytes | None, int]]:
        """See `LowerTiers`."""
        parents = self._parents
        return {key: parents.get(key, (None, 0)) for _, index in self.list_indexes() for key in index}

    def on_cache_reset(self) -> None:
        """See `LowerTiers`. Without events. The next `flush` raises a disk's error."""
        self._pending.clear()
        self._through.clear()
        self._prefetcher.cancel()
        if self._events is not None:
            self._events.labels.clear()
        try:
            self._stack.clear()
        except TierError as error:
            self._note_unforgotten(error)

    def note_block_size(self, group_id: GroupId, block_size: int) -> None:
        """Record a group's block size in tokens. Called on caching and by `TierOnboarder`.

        A key that covers another number of tokens belongs to a partial block, which is not stored.
        """
        suffix = group_suffix(group_id)
        if self._block_size_of.get(suffix) != block_size:
            self._block_size_of[suffix] = block_size
            self._has_partial = block_size != self.block_pool.hash_block_size or self._has_partial

    # ---- storing ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Offload blocks that the next step overwrites; write through blocks that the last step wrote.

        Call it once per step, after the step's slots are allocated and before it writes. A block that cannot
        be stored is counted and cannot be hit later; this raises no error.

        Raises:
            TierError: a removal of wrong content, or a reset, could not be written to the disk, so the
                content may come back after a restart. Raised once, after everything else is done.
        """
        self._begin()
        self.flush_evicted()
        self._take_prefetched()
        if self.writes_through:
            written: list[KVCacheBlock] = []
            unwritten: list[KVCacheBlock] = []
            for block, (key, generation, is_written) in self._through.items():
                if block.generation == generation and block.block_hash == key:
                    (written if is_written else unwritten).append(block)
            self._through = {block: (block.block_hash, block.generation, True) for block in unwritten}
            self._note_parents(written)
            ids = {block.block_hash: block.block_id for block in written}
            self._store(ids, self.storage, ids)
        self.block_pool.is_changing = False
        if self._unforgotten is not None:
            error, self._unforgotten = self._unforgotten, None
            raise error

    def flush_evicted(self) -> None:
        """Offload the reused blocks that still have their old bytes.

        Call it before blocks are overwritten outside the step loop. It can be called at any time.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        ids = {key: block.block_id for key, block in pending.items()}
        self._store(ids, self.storage, ids)

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Remove wrong content from all tiers for good. It is not found again, even after a restart.

        Raises:
            TierError: the removal could not be written to the disk. No tier finds the content now, but it
                may be found after a restart; see `DiskTier.forget`.
        """
        self.block_pool.holds.check_whole()
        self._forget(list(keys))

    def close(self) -> None:
        """Detach from the pool and close the tiers. Drops pending blocks; call `flush` before."""
        if self.block_pool.lower_tiers is self:
            self.block_pool.lower_tiers = None
        self.block_pool.holds.end_place_hold(self._pending_places)
        self._prefetcher.close()
        for tier in self.tiers:
            self._stack.announce_removed(tier, tier.list_keys())
        self._stack.close()

    # ---- loading ---------------------------------------------------------------------------------

    def prefetch(self, owner: RequestId, keys: Sequence[BlockHashWithGroupId]) -> int:
        """Read blocks that are on disk only into the top tier, in a background thread.

        Args:
            owner: the request; identifies the blocks in `cancel_prefetch`.
        Returns:
            The number of blocks that are being read for the owner. The total is limited to
            `max_prefetch_blocks` and to half of the top tier; call again later for the rest.
        A later `flush` moves the blocks to the top tier. Without bytes they are there at once.
        """
        self.block_pool.holds.check_whole()
        top, lower = self.tiers[0], self.tiers[1:]
        if self.storage is None:
            moving = [key for key in keys if key not in top and any(key in tier for tier in lower)]
            moving = moving[: self._max_prefetch_blocks]
            self._store(moving)
            return len(moving)
        return self._prefetcher.ask(owner, (key for key in keys if self.find_tier(key) != 0))

    def cancel_prefetch(self, owner: RequestId) -> None:
        """Cancel the prefetch of this owner. No-op if there is none."""
        self._prefetcher.cancel(owner)

    def wait_for_prefetch(self, timeout_s: float | None = None) -> bool:
        """Wait until all prefetched blocks are ready for the next `flush`. Return False on timeout."""
        return self._prefetcher.wait(timeout_s)

    def _take_prefetched(self) -> None:
        """Store prefetched blocks in the top tier, if they are still in their slots on disk."""
        for disk, read in self._prefetcher.take_done():
            self._stack.announce_removed(disk, read.failed)
            self._store(read.keys, read.storage, dict(zip(read.keys, read.block_ids, strict=True)))

    def load(
        self, keys: Sequence[BlockHashWithGroupId], block_ids: Sequence[BlockId]
    ) -> list[BlockHashWithGroupId]:
        """Load blocks from the tiers into device blocks, each from the fastest tier that has it.

        Args:
            keys: distinct keys.
            block_ids: the target block in the pool's storage for each key; pending bytes are offloaded first.
        Returns:
            The keys that no tier has or could read. The content of their target blocks is undefined.
        Raises:
            CopyFailedError: copying to the device failed.
        """
        if len(keys) != len(block_ids):
            raise InvalidArgumentError(f"{len(block_ids)} blocks for {len(keys)} keys")
        self._begin()
        self.flush_evicted()
        try:
            failed = self._stack.load_into(self.storage, dict(zip(keys, block_ids, strict=True)))
        except CopyFailedError:
            self.block_pool.is_changing = False
            raise
        self.block_pool.is_changing = False
        return failed

    # ---- inside ----------------------------------------------------------------------------------

    def _find_pending(self) -> dict[KVCacheBlock, float]:
        return dict.fromkeys(self._pending.values(), self._pending_since)

    def _begin(self) -> None:
        """Begin to change tiers, unless an earlier call was interrupted."""
        self.block_pool.holds.check_whole()
        self.block_pool.is_changing = True

    def _forget(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove these keys from every tier and queue. Raises TierError after trying all tiers."""
        was_changing = self.block_pool.is_changing
        self.block_pool.is_changing = True
        if keys:
            self._prefetcher.cancel()
        for key in keys:
            self._pending.pop(key, None)
        if self._through:
            gone = set(keys)
            self._through = {block: one for block, one in self._through.items() if one[0] not in gone}
        try:
            self._stack.forget(keys)
        except TierError:
            self.block_pool.is_changing = was_changing
            raise
        self.block_pool.is_changing = was_changing

    def _note_parents(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Record what `list_parents` returns for these cached blocks."""
        for block in blocks:
            self._parents[block.key] = block.parent, block.num_key_tokens
        self._sweep(self._parents)

    def _sweep(self, known: dict[BlockHashWithGroupId, Any]) -> None:
        """Drop what is known of keys that are neither cached nor stored, once it is at least half."""
        if len(known) > self._num_to_sweep_at:
            on_device = self.block_pool.cached_block_hash_to_block.entries
            indexes = [on_device, *(index for _, index in self.list_indexes())]
            for key in [key for key in known if not any(key in index for index in indexes)]:
                del known[key]

    def _write_through(self, blocks: Sequence[KVCacheBlock], num_written: int) -> None:
        """Store cached blocks without bytes; queue those with bytes for `flush`.

        Args:
            num_written: number of the first blocks whose content is there.
        """
        if self.storage is None:
            cached = [block for block in blocks if not block.is_null]
            self._note_parents(cached)
            self._store([block.block_hash for block in cached])
            return
        for number, block in enumerate(blocks):
            if not block.is_null:
                self._through[block] = (block.block_hash, block.generation, number < num_written)

    def _is_full(self, block: KVCacheBlock) -> bool:
        """Return True if the block's key covers all its tokens."""
        block_size = self._block_size_of.get(block.block_hash[-4:])
        num_tokens = block.block_hash_num_tokens
        return block_size is not None and num_tokens is not None and num_tokens % block_size == 0

    def _note_unforgotten(self, error: TierError) -> None:
        """Log the error and keep it for `flush` to raise; a hook must not raise inside a pool operation."""
        _logger.error("%s", error)
        self._unforgotten = self._unforgotten or error

    def _store(
        self,
        keys: Iterable[BlockHashWithGroupId],
        storage: BlockStorage | None = None,
        id_of: Mapping[BlockHashWithGroupId, BlockId] = NO_IDS,
    ) -> None:
        """Store blocks in the top tier as most recently used; evicted blocks move to the next tier.

        Args:
            storage, id_of: the source of the bytes; None and empty without bytes.
        """
        was_changing = self.block_pool.is_changing
        self.block_pool.is_changing = True
        for step in self._stack.plan(0, keys):
            self._stack.apply(step, storage, id_of)
        self.block_pool.is_changing = was_changing
