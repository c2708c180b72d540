"""`WorkerTiers`: executes the orders of the scheduler half on the tiers of one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kv_pool.errors import CopyFailedError, TierError
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.integrations.vllm.connector.orders import KeyedBlock, LoadOrder, StoreOrder
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import Tier

_logger = logging.getLogger("vllm.kv_pool")


class WorkerTiers:
    """The host tier and the disk tier of one rank, and the storage of its GPU blocks.

    Args:
        storage: the bytes of the GPU blocks.
        host: the tier that stores copy to.
        disk: the tier below, or None.

    Attributes:
        has_lost_disk: the disk tier was closed, because a removal could not be written to it.

    Not thread-safe. Whatever cannot be copied is reported as lost and raises no error.
    """

    def __init__(self, storage: BlockStorage, host: HostTier, disk: DiskTier | None) -> None:
        self.storage = storage
        self.host = host
        self.disk = disk
        self.has_lost_disk = False

    def clear(self) -> None:
        """Remove all blocks for good. A disk tier that cannot be cleared is closed and not used again."""
        self.host.clear()
        if self.disk is not None:
            try:
                self.disk.clear()
            except TierError as error:
                _logger.error("kv_pool continues without its disk tier: %s", error)
                self.disk.close()
                self.disk = None
                self.has_lost_disk = True

    def remove(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove keys from both tiers."""
        for tier in self._list_tiers():
            tier.remove(keys)

    def store(self, order: StoreOrder) -> list[BlockHashWithGroupId]:
        """Execute a store. Return the keys that are in no tier as a result of a failure."""
        lost: list[BlockHashWithGroupId] = []
        if self.disk is not None:
            self.disk.remove(order.disk_evicted)
            lost += self._demote(self.disk, order.demoted)
        self.host.remove(order.host_evicted)
        keys = [key for key, _ in order.blocks]
        return lost + self._put(self.host, keys, self.storage, [block_id for _, block_id in order.blocks])

    def load(self, order: LoadOrder) -> list[KeyedBlock]:
        """Execute a load. Return the blocks that could not be loaded; their content is undefined."""
        left = list(order.blocks)
        for tier in self._list_tiers():
            here = [block for block in left if block[0] in tier]
            if not here:
                continue
            try:
                failed = set(tier.load([key for key, _ in here], self.storage, [where for _, where in here]))
            except CopyFailedError as error:
                _logger.warning("kv_pool could not load %d blocks: %s", len(here), error)
                return left
            loaded = {key for key, _ in here}.difference(failed)
            left = [block for block in left if block[0] not in loaded]
        return left

    def close(self) -> None:
        """Close both tiers. Blocks on disk can be found again."""
        for tier in self._list_tiers():
            tier.close()

    def _list_tiers(self) -> list[Tier]:
        return [self.host] if self.disk is None else [self.host, self.disk]

    def _demote(self, disk: DiskTier, keys: Sequence[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Copy blocks from host memory to disk. Return the keys that are not on disk."""
        known = [key for key in keys if key in self.host]
        lost = [key for key in keys if key not in self.host and key not in disk]
        for start in range(0, len(known), disk.batch_blocks):
            read = self.host.read(known[start : start + disk.batch_blocks])
            assert read.storage is not None
            lost += self._put(disk, read.keys, read.storage, read.block_ids)
        return lost

    def _put(
        self,
        tier: Tier,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage,
        block_ids: Sequence[BlockId],
    ) -> list[BlockHashWithGroupId]:
        """Store blocks in a tier. Return the keys that the tier does not have or has lost."""
        id_of = dict(zip(keys, block_ids, strict=True))
        new = tier.touch(keys)
        # The index leaves enough room. A tier that is fuller than it says evicts by itself.
        lost = tier.list_next_evicted(len(tier) + len(new) - tier.capacity)
        tier.remove(lost)
        step = tier.batch_blocks or len(new) or 1
        for start in range(0, len(new), step):
            some = new[start : start + step]
            try:
                stored = set(tier.put(some, storage, [id_of[key] for key in some]))
            except CopyFailedError as error:
                _logger.warning("kv_pool could not store %d blocks: %s", len(some), error)
                stored = set()
            lost += [key for key in some if key not in stored]
        return lost
