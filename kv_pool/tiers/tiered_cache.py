"""`TieredCache`: blocks that a pool takes anew live on in colder tiers, and can be read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_group_id
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, TierError
from kv_pool.ids import BlockHash, BlockHashWithGroupId
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.block_rows import wrap_rows
from kv_pool.tiers.tier import Tier, TierStatistics, hold_onto, release_out_of
from kv_pool.tiers.tier_store import TierStore

WRITES = ("back", "through")


class TieredCache(TierStore):
    """The tiers below a pool, warmest first.

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

        device pool -- block is taken anew --> tiers[0] -- no room --> tiers[1] -- no room --> dropped

    A block that is read back stays where it was read, so that it needs no copy when the device gives it up
    again. A block can be in several tiers.

    Args:
        block_pool: its `colder_tiers` is set to this.
        storage: the bytes of its blocks; None for a pool without, and tiers that have none either.
        tiers: warmest first.
        write: `back` stores a block when the pool takes it anew; `through` also as soon as it is cached and
            written, so that nothing is left to copy then. A block is written when it is cached if its
            request's `num_computed_tokens` covers it, and else after the next step.
        max_prefetch_blocks: blocks that are read ahead at a time, at most; 0 for no reading ahead.
        enable_events: what tiers gain and lose is told among the pool's events, which have to be on.

    **What has to be called.** `flush()` once per step, after its slots were allocated and before the step
    writes: until then the blocks that were taken still hold their old bytes, and this is where they are
    copied out, and the pool's holds keep them at their ids. `store_pending()` before anything else overwrites
    blocks that it has taken; swappers and migrations do that themselves. Without bytes both do nothing.

    What is stored are full blocks, by the key under which requests look for them. Partial blocks
    (`cache_partial_block`) are not, nor keys beyond a block's first: whoever hits those has the full block's
    tokens computed, or stored, before long.

    Content that is wrong does not come back: what `KVCacheManager.evict_blocks` and `report_invalid_blocks`
    name is forgotten in all tiers, and a reset of the prefix cache clears them. Who calls
    `BlockPool.evict_blocks` for content that is wrong calls `forget`, too.

    Not safe for several threads: the scheduler's calls it. A `flush` or `store_pending` that is interrupted
    by a signal handler's exception drops the blocks that it has not stored, and counts them.

    Attributes:
        num_dropped: blocks that the pool took anew and no tier got: there was no room that nobody holds, or
            they could not be read from the device.
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
        if not tiers:
            raise InvalidArgumentError("there are no tiers; name at least one")
        if write not in WRITES:
            raise InvalidArgumentError(f"write is {write!r}; it is one of {', '.join(WRITES)}")
        for tier in tiers:
            if tier.has_bytes is (storage is None):
                raise InvalidArgumentError(
                    f"the tier for {tier.medium} has {'' if tier.has_bytes else 'no '}bytes, the pool's "
                    f"blocks have {'none' if storage is None else 'some'}; a Tier is for those without, a "
                    "HostTier or DiskTier for others"
                )
        if enable_events and not block_pool.enable_kv_cache_events:
            raise InvalidArgumentError("events of tiers come among the pool's, and the pool has none")
        if block_pool.colder_tiers is not None:
            raise InvalidArgumentError("the pool has colder tiers already")
        super().__init__(
            block_pool, storage, tuple(tiers), write == "through", enable_events, max_prefetch_blocks
        )
        block_pool.colder_tiers = self
        if self._events is not None:
            for tier in tiers:
                self._events.announce_stored(tier.medium, tier.list_keys())

    # ---- looking ---------------------------------------------------------------------------------

    def find_tier(self, key: BlockHashWithGroupId) -> int | None:
        """The warmest tier that has the block, as its place among `tiers`; None for none. Only looks."""
        if key in self._pending:
            return 0
        for level, tier in enumerate(self.tiers):
            if key in tier:
                return level
        return None

    def __contains__(self, key: object) -> bool:
        if key in self._pending:
            return True
        for tier in self.tiers:  # noqa: SIM110 (each block of each prompt comes by here, and a loop is faster)
            if key in tier:
                return True
        return False

    def list_indexes(self) -> list[Mapping[BlockHashWithGroupId, object]]:
        """Where to look up many keys: one in these is in a tier, or will be. Until something changes."""
        if self._wrong or self._is_resetting:
            self._recover()
        indexes = [tier.index for tier in self.tiers]
        return [self._pending, *indexes] if self._pending else indexes

    def has_all(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Are these all in a tier, or will be?"""
        indexes = self.list_indexes()
        if len(indexes) == 1:
            return all(map(indexes[0].__contains__, keys))
        return all(any(key in index for index in indexes) for key in keys)

    def list_pending(self) -> list[BlockHashWithGroupId]:
        """Blocks that were taken anew since the last copy, and are still to be copied out."""
        return list(self._pending)

    def get_statistics(self) -> list[TierStatistics]:
        """Of each tier, warmest first."""
        return [tier.get_statistics() for tier in self.tiers]

    # ---- what the pool tells ---------------------------------------------------------------------

    def on_blocks_cached(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: int,
    ) -> None:
        """See `ColderTiers`."""
        self.note_block_size(group_id, block_size)
        if self._events is not None:
            self._events.note_cached(request, hashes, num_cached_blocks, block_size, group_id)
            self._forget_labels()
        if self.writes_through and self.storage is not None:
            num_written = getattr(request, "num_computed_tokens", 0) // block_size
            for position, block in enumerate(blocks, start=num_cached_blocks):
                if not block.is_null:
                    queue = self._written if position < num_written else self._unwritten
                    queue[block.block_hash] = (block, block.generation)
        elif self.writes_through:
            self._store_warmest([block.block_hash for block in blocks if not block.is_null], None, ())

    def on_block_arrived(self, block: KVCacheBlock, block_size: int | None, told: BlockStored | None) -> None:
        """See `ColderTiers`."""
        key = block.block_hash
        if block_size is not None:
            self.note_block_size(get_group_id(key), block_size)
        if self._events is not None and told is not None:
            self._events.note_arrived(key, told, max(0, (block.block_hash_num_tokens or 0) - told.block_size))
            self._forget_labels()
        if not self.writes_through or (self._has_partial and not self._is_full(block)):
            return
        if self.storage is None:
            self._store_warmest([key], None, ())
        else:
            self._written[key] = (block, block.generation)

    def on_blocks_reused(self, blocks: Sequence[KVCacheBlock]) -> None:
        """See `ColderTiers`."""
        if self._has_partial:
            blocks = [block for block in blocks if self._is_full(block)]
        if self.storage is None:
            self._store_warmest([block.block_hash for block in blocks], None, ())
            return
        for block in blocks:
            key = block.block_hash
            if self.writes_through:
                if key in self._written and self._written[key][0] is block:
                    del self._written[key]  # it is copied out with what is pending
                if key in self._unwritten and self._unwritten[key][0] is block:
                    del self._unwritten[key]
                    continue  # taken back before the step that was to write it
            if not self._pending:
                self._pending_since = self.block_pool.holds.clock()
            self._pending.pop(key, None)  # of two copies the one used last says when it was used
            self._pending[key] = block

    def on_content_invalidated(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """See `ColderTiers`. What a disk does not take is raised by the next `flush`."""
        try:
            self.forget(keys)
        except TierError as error:
            self._note_unforgotten(error)

    def on_cache_reset(self) -> None:
        """See `ColderTiers`. What a disk does not take is raised by the next `flush`."""
        self._is_resetting = True
        try:
            self._clear()
        except BaseException:
            self._recover()
            raise

    def note_block_size(self, group_id: int, block_size: int) -> None:
        """A group's blocks hold so many tokens. Learned from what is cached, and told by `TierReadBack`.

        Keys that cover another number of tokens are those of partial blocks, which are not stored.
        """
        suffix = group_id.to_bytes(4, "big")
        if self._block_size_of.get(suffix) != block_size:
            self._block_size_of[suffix] = block_size
            self._has_partial = block_size != self.block_pool.hash_block_size or self._has_partial

    # ---- storing ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Copy out what the step to come will overwrite, and write through what the last one has written.

        Once per step: after its slots were allocated, before it writes. A block that cannot be stored is
        counted, and can not be hit later; nothing is raised for it.

        Raises:
            TierError: wrong content, or what was stored before a reset, may come back after a restart, since
                a disk did not take that it was forgotten. Raised once, after all of the above is done.
        """
        self._recover()
        self.store_pending()
        self._take_prefetched()
        if self.writes_through:
            written, self._written, self._unwritten = self._written, self._unwritten, {}
            self._copy_out(
                [
                    (key, block.block_id)
                    for key, (block, generation) in written.items()
                    if block.generation == generation and block.block_hash == key
                ]
            )
        if self._unforgotten is not None:
            error, self._unforgotten = self._unforgotten, None
            raise error

    def store_pending(self) -> None:
        """Copy out the blocks that were taken anew and hold their old bytes still.

        Call it before blocks are overwritten other than by a step. It can be called at any time.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        try:
            self._copy_out([(key, block.block_id) for key, block in pending.items()])
        except BaseException:
            # Not tried again: by then the blocks may have been written.
            self.num_dropped += sum(key not in self for key in pending)
            raise

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Content under these keys is wrong: it is not found in any tier, now and after a restart.

        Raises:
            TierError: a disk does not take it. No tier finds the content now, but it may be found after a
                restart; see `DiskTier.forget`.
        """
        self._recover()
        listed = list(keys)
        self._wrong = listed
        try:
            self._forget_wrong()
        except TierError:
            raise
        except BaseException:
            self._recover()
            raise

    def close(self) -> None:
        """Leave the pool alone, and close the tiers. What is pending is not stored: `flush` before."""
        if self.block_pool.colder_tiers is self:
            self.block_pool.colder_tiers = None
        self.block_pool.holds.end_places(self._pending_places)
        if self._prefetcher is not None:
            self._prefetcher.close()
        for tier in self.tiers:
            if self._events is not None:
                self._events.announce_removed(tier.medium, tier.list_keys())
            tier.close()

    # ---- reading back ----------------------------------------------------------------------------

    def prefetch(self, owner: str, keys: Sequence[BlockHashWithGroupId]) -> int:
        """Let blocks that are on disk alone be read into the warmest tier, by a thread.

        Args:
            owner: for whom; names it in `cancel_prefetch`.
        Returns:
            How many are being read for it now. No more than `max_prefetch_blocks` in all, and no more than
            half of the warmest tier; the rest has to be asked for again.
        They are in the warmest tier after some later `flush`. Without bytes they are there at once.
        """
        warmest, colder = self.tiers[0], self.tiers[1:]
        if self.storage is None:
            moving = [key for key in keys if key not in warmest and any(key in tier for tier in colder)]
            moving = moving[: self._max_prefetch_blocks]
            self._store_warmest(moving, None, ())
            return len(moving)
        if self._prefetcher is None or self._disk is None:
            return 0
        on_disk = [
            (key, self._disk.get_slot(key)) for key in keys if key in self._disk and self.find_tier(key) != 0
        ]
        self._prefetcher.ask(owner, on_disk)
        return self._prefetcher.count_asked(owner)

    def cancel_prefetch(self, owner: str) -> None:
        """Nothing more is read ahead for this owner; nothing happens if nothing is."""
        if self._prefetcher is not None:
            self._prefetcher.cancel(owner)

    def wait_for_prefetch(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was asked for has been read, for the next `flush`; False if it took longer."""
        return self._prefetcher is None or self._prefetcher.wait(timeout_s)

    def _take_prefetched(self) -> None:
        """Let the warmest tier have what was read ahead and is still what it was."""
        if self._prefetcher is None or self._disk is None or self.storage is None:
            return
        for errand in self._prefetcher.take_done():
            disk = self._disk
            slot_of = dict(zip(errand.keys, errand.slots, strict=True))
            there = [key for key in errand.keys if key in disk and disk.get_slot(key) == slot_of[key]]
            unreadable = [key for key in errand.failed if key in there]
            self._changing = disk, unreadable, False
            disk.drop_unreadable(unreadable)
            self._tell_change()
            good = set(there)
            rows = {key: row for row, key in enumerate(errand.found) if key in good}
            if rows and errand.rows is not None:
                disk.count_read(len(rows))
                read = wrap_rows(errand.rows, self.storage.block_format)
                self._store_warmest(list(rows), read, list(rows.values()))

    def hold(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Let no tier give these up to make room, until `release`; they count as used now."""
        self.hold_onto(keys, [])

    def hold_onto(self, keys: Sequence[BlockHashWithGroupId], onto: list[BlockHashWithGroupId]) -> None:
        """As `hold`; what is held is appended to `onto` in the same step, see `BlockPool.take_onto`."""
        for tier in self.tiers:
            tier.touch(keys)
        hold_onto(self._held, keys, onto)

    def release(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Undo one `hold`."""
        self.release_out_of(list(keys))

    def release_out_of(self, keys: list[BlockHashWithGroupId]) -> None:
        """As `release`; `keys` is empty afterwards, in the same step."""
        release_out_of(self._held, keys)

    def load(
        self, keys: Sequence[BlockHashWithGroupId], block_ids: Sequence[int]
    ) -> list[BlockHashWithGroupId]:
        """Read blocks into blocks of the pool, each from the warmest tier that has it.

        Args:
            keys: distinct.
            block_ids: of the pool's storage, one for each; their old bytes are copied out before.
        Returns:
            Keys that no tier has, or could read: their blocks may hold anything.
        Raises:
            CopyFailedError: the device did not take them.
        """
        self._recover()
        self.store_pending()
        target_of = dict(zip(keys, block_ids, strict=True))
        left = list(keys)
        for tier in self.tiers:
            index = tier.index
            here = [key for key in left if key in index]
            if here:
                self._changing = tier, here, False
                try:
                    failed = tier.load(here, self.storage, [target_of[key] for key in here])
                finally:
                    self._tell_change()
                loaded = set(here).difference(failed)
                left = [key for key in left if key not in loaded]
        return left
