"""`LiveTiers`: the lower tiers of a live replay."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.control.messages import TierList
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId, RequestId
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

_DISK_BLOCKS_PER_BLOCK = 10


class LiveTiers:
    """The lower tiers of a pool, as named in the settings. Call its methods with the pool's lock held.

    Args:
        storage: the bytes of the pool's blocks.
        settings: `host_tier`, `disk_tier`, or both are set.
        enable_events: whether the pool's events include the blocks that tiers store and remove.

    Raises:
        TierError, LayoutMismatchError: the folder cannot be used, or contains blocks of another layout.
    """

    def __init__(
        self,
        pool: GPUKVPool | ControlledManager,
        storage: BlockStorage | None,
        settings: ServeSettings,
        *,
        enable_events: bool,
    ) -> None:
        if storage is None:
            raise InvalidArgumentError("tiers store the bytes of blocks, and this pool has no storage")
        self._lock: AbstractContextManager[object] = pool.lock
        tiers: list[Tier] = []
        if settings.host_tier:
            tiers.append(HostTier(settings.host_tier, storage))
        if settings.disk_tier is not None:
            capacity = settings.disk_tier_blocks or _DISK_BLOCKS_PER_BLOCK * settings.blocks
            layout = BlockLayout.describe(storage, settings.block_size)
            tiers.append(DiskTier(settings.disk_tier, capacity, layout))
        self.cache = TieredCache(pool.block_pool, storage, tiers, enable_events=enable_events)
        self._hits = dict.fromkeys([MEDIUM_GPU, *(tier.medium for tier in tiers)], 0)

    def find(self, block_hashes: Sequence[BlockHash]) -> list[BlockHashWithGroupId]:
        """Return the keys of the longest prefix of these hashes that tiers contain. Changes nothing."""
        keys = []
        for block_hash in block_hashes:
            key = make_block_hash_with_group_id(block_hash, GroupId(0))
            if self.cache.find_tier(key) is None:
                break
            keys.append(key)
        return keys

    def onboard(self, keys: Sequence[BlockHashWithGroupId], block_ids: Sequence[BlockId]) -> int:
        """Onboard blocks into blocks of the pool.

        Returns:
            The number of blocks onboarded before the first failure; those after it are to be recomputed.
        """
        levels = [self.cache.find_tier(key) for key in keys]
        failed = set(self.cache.load(keys, block_ids))
        num_good = next((at for at, key in enumerate(keys) if key in failed), len(keys))
        for level in levels[:num_good]:
            self._hits[self.cache.tiers[level or 0].medium] += 1
        return num_good

    def note_hits(self, num_blocks: int) -> None:
        """Count `num_blocks` hits of a request in the pool itself."""
        self._hits[MEDIUM_GPU] += num_blocks

    def prefetch(self, owner: RequestId, block_hashes: Sequence[BlockHash]) -> None:
        """Start to read from disk the blocks that a waiting request will need."""
        self.cache.prefetch(owner, self.find(block_hashes))

    def get_report(self) -> TierList:
        """Return the contents of each tier, and the hits by medium. Takes the lock itself."""
        with self._lock:
            return TierList(dict(self._hits), self.cache.get_statistics(), self.cache.num_dropped)

    def close(self) -> None:
        """Flush pending blocks and close the tiers; blocks on disk stay there. Takes the lock itself."""
        with self._lock:
            self.cache.flush()
            self.cache.close()
