"""`Restarts`: a node's tiers are closed, or lost, and reopened; the disk keeps exactly its blocks."""

import shutil

from lives.contents import BLOCK_SIZE

from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tiered_cache import TieredCache

NUM_HOST_BLOCKS = (2, 4, 8)
NUM_DISK_BLOCKS = 16


class Restarts:
    """The tiers of a `Node`.

    Attributes:
        num_restarts: restarts after a lost process; each has its own folder.
    """

    num_restarts = 0

    def open_tiers(self):
        """Open the tiers over the folder."""
        storage = self.device.storage
        tiers = [HostTier(self.rng.choice(NUM_HOST_BLOCKS), storage, medium="HOST")]
        if self.folder is not None:
            tiers.append(
                DiskTier(self.name_folder(), NUM_DISK_BLOCKS, BlockLayout.describe(storage, BLOCK_SIZE))
            )
        write = self.rng.choice(("back", "through"))
        self.cache = TieredCache(self.pool, storage, tiers, write, enable_events=True, max_prefetch_blocks=0)

    def name_folder(self):
        return self.folder / f"{self.name} {self.num_restarts}"

    def restart_tiers(self):
        """Reopen the tiers. No-op while tiers hold keys for open plans."""
        if self.cache._held:
            return "held"
        if self.world.chance(0.7):
            self.cache.flush()
        disk = self.cache.tiers[1]
        keys = set(disk.list_keys())
        is_lost = self.world.chance(0.4)
        # A process that dies after an interrupted write or removal leaves the header; close() wipes it.
        interrupted = set(disk._unwiped.values()) - keys if is_lost else set()
        if is_lost:  # only blocks written by now remain
            before = self.name_folder()
            self.num_restarts += 1
            shutil.copytree(before, self.name_folder())
        self.cache.close()
        self.open_tiers()
        found = set(self.cache.tiers[1].list_keys())
        came_back = found - keys - interrupted
        assert keys <= found, f"{len(keys - found)} blocks were lost"
        assert not came_back, f"{len(came_back)} removed blocks came back"
        assert not self.cache.tiers[1].reopened.num_dropped
        self.world.tally["lost" if is_lost else "closed", bool(found)] += 1
        return "lost" if is_lost else "closed"
