"""`TierStore`: what tiers below a pool consist of: what is pending, stores, and what an interrupt left."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import CopyFailedError, TierError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.prefetcher import Prefetcher
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tier_events import TierEvents

_logger = logging.getLogger(__name__)


class TierStore:
    """The part of `TieredCache` that moves blocks down from tier to tier, and forgets them."""

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
        # Of each group, learned from what is cached; only full blocks are stored.
        self._block_size_of: dict[bytes, int] = {}
        self._has_partial = False
        # Blocks that were taken and still have their old bytes, and since when there are any.
        self._pending: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        self._pending_since = 0.0
        self._pending_places = block_pool.holds.keep_places(
            "still to be stored in a colder tier", self._find_pending
        )
        # To be written through: cached, written by the step to come; and written since.
        self._unwritten: dict[BlockHashWithGroupId, tuple[KVCacheBlock, int]] = {}
        self._written: dict[BlockHashWithGroupId, tuple[KVCacheBlock, int]] = {}
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
        # What an interrupted call leaves for `_recover`: keys that a tier is about to get or to lose, and
        # events do not tell of yet; keys of wrong content; whether everything is to go.
        self._changing: tuple[Tier, Sequence[BlockHashWithGroupId], bool] | None = None
        self._wrong: list[BlockHashWithGroupId] = []
        self._is_resetting = False

    def _find_pending(self) -> dict[KVCacheBlock, float]:
        return dict.fromkeys(self._pending.values(), self._pending_since)

    def _recover(self) -> None:
        """Complete what an exception interrupted; may itself be interrupted and called again."""
        if self._changing is not None:
            self._tell_change()
        if self._wrong:
            try:
                self._forget_wrong()
            except TierError as error:
                self._note_unforgotten(error)
        if self._is_resetting:
            self._clear()

    def _tell_change(self) -> None:
        """Let events tell what a tier has got or lost of the keys that were about to come or go."""
        if self._changing is None:
            return
        tier, keys, is_arriving = self._changing
        if self._events is not None:
            if is_arriving:
                stored = [key for key in keys if key in tier]
                if stored:
                    self._events.announce_stored(tier.medium, stored)
            else:
                removed = [key for key in keys if key not in tier]
                if removed:
                    self._events.announce_removed(tier.medium, removed)
        self._changing = None  # no call since the events are out

    def _forget_wrong(self) -> None:
        """Forget the content of `_wrong` everywhere. Raises TierError, after all of it was tried."""
        listed = self._wrong
        if self._prefetcher is not None and listed:
            self._prefetcher.cancel()
        for queue in (self._pending, self._unwritten, self._written):
            for key in listed:
                queue.pop(key, None)
        failure: TierError | None = None
        for tier in self.tiers:
            self._changing = tier, [key for key in dict.fromkeys(listed) if key in tier], False
            try:
                tier.forget(listed)
            except TierError as error:
                failure = failure or error
            self._tell_change()
        self._wrong = []
        if failure is not None:
            raise failure

    def _clear(self) -> None:
        """Forget everything, without events."""
        self._changing = None
        self._wrong = []
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
        self._is_resetting = False

    def _forget_labels(self) -> None:
        """Let events know nothing more of blocks that are nowhere, once there are too many of these."""
        if self._events is not None and self._events.is_crowded():
            on_device = self.block_pool.cached_block_hash_to_block.entries
            self._events.keep_only(chain(on_device, self._pending, *map(Tier.list_keys, self.tiers)))

    def _is_full(self, block: KVCacheBlock) -> bool:
        """Is the block's key that of all its tokens?"""
        block_size = self._block_size_of.get(block.block_hash[-4:])
        num_tokens = block.block_hash_num_tokens
        return block_size is not None and num_tokens is not None and num_tokens % block_size == 0

    def _note_unforgotten(self, error: TierError) -> None:
        """A hook does not raise: the pool is in the midst of something. `flush` does."""
        _logger.error("%s", error)
        self._unforgotten = self._unforgotten or error

    def _copy_out(self, copies: Sequence[tuple[BlockHashWithGroupId, int]]) -> None:
        """Store blocks of the device under these keys; copies are (key, block id)."""
        if copies:
            keys, block_ids = zip(*copies, strict=True)
            self._store_warmest(keys, self.storage, block_ids)

    def _store_warmest(
        self,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None,
        block_ids: Sequence[int],
    ) -> None:
        """Let the warmest tier have these blocks; see `_store`."""
        if self._changing is not None or self._wrong or self._is_resetting:
            self._recover()
        try:
            self._store(0, keys, storage, block_ids)
        except BaseException:
            self._recover()
            raise

    def _store(
        self,
        level: int,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None,
        block_ids: Sequence[int],
    ) -> None:
        """Let a tier have these blocks, as the ones used last; what has to make room goes to the next tier.

        Args:
            storage, block_ids: where their bytes are; nothing without bytes.
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
                self._changing = tier, some, True
                tier.put(some, storage, [id_of[key] for key in some] if id_of else ())
            except CopyFailedError as error:
                _logger.warning("%d blocks were not stored: %s", len(some), error)
                self.num_dropped += len(some)
            self._tell_change()

    def _make_room(self, level: int, num_blocks: int) -> int:
        """Let a tier give up so many blocks, which the next tier gets; how many it gave up."""
        tier = self.tiers[level]
        outgoing = tier.list_next_out(num_blocks)
        if level + 1 < len(self.tiers):
            if self.storage is None:
                self._store(level + 1, outgoing, None, ())
            else:
                missing = self.tiers[level + 1].touch(outgoing)
                step = tier.batch_blocks or len(missing) or 1
                for start in range(0, len(missing), step):
                    some = missing[start : start + step]
                    self._changing = tier, some, False
                    read = tier.read(some)
                    self._tell_change()
                    self._store(level + 1, read.keys, read.storage, read.block_ids)
        self._changing = tier, outgoing, False
        tier.remove(outgoing)
        self._tell_change()
        return len(outgoing)
