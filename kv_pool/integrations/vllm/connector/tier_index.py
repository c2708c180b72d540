"""`TierIndex`: what the workers' tiers hold, in the scheduler's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from kv_pool.core.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.integrations.vllm.connector.orders import StoreOrder
from kv_pool.tiers.tier import Tier, TierStack, TierStep


class TierIndex(TierStack):
    """The keys of the host tier and the disk tier, the stores that are planned, and what makes room for them.

    All workers execute the same orders in the same order, so one index describes the tiers of all ranks.

        planned store   -- all ranks have finished -->   host   -- evicted -->   disk   -- evicted --> dropped

    A key whose store is planned has its place in the host tier, but is not found before the store has
    finished. A key that is evicted from host memory is found on disk at once: workers look in both tiers.

    Args:
        host_blocks, disk_blocks: capacity of each rank's tiers; 0 disk blocks for no disk tier.
    """

    def __init__(self, host_blocks: int, disk_blocks: int) -> None:
        tiers = [Tier(host_blocks, MEDIUM_CPU)]
        if disk_blocks:
            tiers.append(Tier(disk_blocks, MEDIUM_STORAGE))
        super().__init__(tiers)
        self._arriving: dict[BlockHashWithGroupId, int] = {}
        self._last_order_id = 0

    # ---- looking ---------------------------------------------------------------------------------

    @property
    def host(self) -> Tier:
        """The keys of the host tier."""
        return self.tiers[0]

    @property
    def disk(self) -> Tier | None:
        """The keys of the disk tier; None if there is none."""
        return self.tiers[1] if len(self.tiers) > 1 else None

    @property
    def num_arriving(self) -> int:
        """Number of blocks whose store is planned and not finished."""
        return len(self._arriving)

    def find_missing(self, keys: Sequence[BlockHashWithGroupId]) -> list[int]:
        """Return the positions in `keys` of those that are neither in host memory nor on their way there."""
        host, arriving = self.host.index, self._arriving
        return [place for place, key in enumerate(keys) if key not in host and key not in arriving]

    def knows(self, key: BlockHashWithGroupId) -> bool:
        """Return True if a tier has the key, or a store of it is planned."""
        return key in self._arriving or key in self

    # ---- storing ---------------------------------------------------------------------------------

    def plan_store(
        self, blocks: Mapping[BlockHashWithGroupId, BlockId], max_blocks: int
    ) -> StoreOrder | None:
        """Reserve places for blocks and return the order; None if there is no place for any of them.

        Args:
            blocks: blocks by key, that `find_missing` has found. If there are too few places, because the
                rest is held or arriving, the last blocks are left out.
            max_blocks: the maximum number of blocks of the order.
        """
        num_wanted = min(len(blocks), max_blocks)
        num_places = self.host.capacity - len(self.host) - len(self._arriving)
        steps: list[TierStep] = []
        for step in self.plan_room(0, num_wanted - num_places):
            self.apply(step)
            steps.append(step)
            if step.level == 0:
                num_places += len(step.evicted)
        taken = dict(islice(blocks.items(), min(num_wanted, max(0, num_places))))
        if not taken:
            return None
        self._last_order_id += 1
        order = StoreOrder(self._last_order_id, taken, steps)
        self._arriving.update(dict.fromkeys(taken, order.order_id))
        return order

    def finish_store(self, order: StoreOrder, is_valid: bool) -> list[BlockHashWithGroupId]:
        """Make the blocks of a finished store findable. Return their keys, without those forgotten since.

        Args:
            is_valid: False if the blocks may have been reused while they were read. Their keys are then
                dropped; the caller has to order their removal.
        """
        keys = [key for key in order.blocks if self._arriving.get(key) == order.order_id]
        for key in keys:
            del self._arriving[key]
        if not is_valid:
            return []
        self.apply(TierStep(0, keys))
        return keys

    # ---- removing --------------------------------------------------------------------------------

    def remove(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove keys; planned stores of them will not be found. The caller has to order their removal."""
        for key in keys:
            self._arriving.pop(key, None)
        super().remove(keys)

    def clear(self) -> None:
        """Remove all keys, those of planned stores included."""
        self._arriving.clear()
        for tier in self.tiers:
            self.announce_removed(tier, tier.list_keys())
        super().clear()

    def add_reopened(self, keys: Sequence[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Add keys that the workers found on disk, the least recently used first.

        Returns:
            The keys that do not fit; the caller has to order their removal.
        """
        if self.disk is None:
            return list(keys)
        new = [key for key in keys if key not in self.disk]
        num_places = self.disk.capacity - len(self.disk)
        first = max(0, len(new) - num_places)
        self.apply(TierStep(1, new[first:]))
        return new[:first]
