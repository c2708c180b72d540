"""`TierIndex`: what the workers' tiers hold, in the scheduler's process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kv_pool.core.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.integrations.vllm.connector.orders import KeyedBlock, StoreOrder
from kv_pool.tiers.tier import Tier


class TierIndex:
    """The keys of the host tier and the disk tier, and the decision what each of them evicts.

    All workers execute the same orders in the same order, so one index describes the tiers of all ranks.

        planned store   -- all ranks have finished -->   host   -- evicted -->   disk   -- evicted --> dropped

    A key whose store is planned has its place in the host tier, but is not found before the store has
    finished. A key that is evicted from host memory is found on disk at once: workers look in both tiers.

    Args:
        host_blocks, disk_blocks: capacity of each rank's tiers; 0 disk blocks for no disk tier.

    Attributes:
        host, disk: the tiers' keys.
    """

    def __init__(self, host_blocks: int, disk_blocks: int) -> None:
        self.host = Tier(host_blocks, MEDIUM_CPU)
        self.disk = Tier(disk_blocks, MEDIUM_STORAGE) if disk_blocks else None
        self._held: dict[BlockHashWithGroupId, int] = {}
        self._arriving: dict[BlockHashWithGroupId, int] = {}
        self._last_order_id = 0
        self._share_holds()

    # ---- looking ---------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self.host or (self.disk is not None and key in self.disk)

    @property
    def num_arriving(self) -> int:
        """Number of blocks whose store is planned and not finished."""
        return len(self._arriving)

    def list_indexes(self) -> list[Mapping[BlockHashWithGroupId, object]]:
        """Return mappings whose keys are in a tier, for many look-ups. Valid until a change."""
        return [self.host.index] if self.disk is None else [self.host.index, self.disk.index]

    def find_missing(self, keys: Sequence[BlockHashWithGroupId]) -> list[int]:
        """Return the positions in `keys` of those that are neither in host memory nor on their way there."""
        host, arriving = self.host.index, self._arriving
        return [place for place, key in enumerate(keys) if key not in host and key not in arriving]

    # ---- storing ---------------------------------------------------------------------------------

    def plan_store(self, blocks: Sequence[KeyedBlock], max_blocks: int) -> StoreOrder | None:
        """Reserve places for blocks and return the order; None if there is no place for any of them.

        Args:
            blocks: blocks with distinct keys, that `find_missing` has found. If there are too few places,
                because the rest is held or arriving, the last blocks are left out.
            max_blocks: the maximum number of blocks of the order.
        """
        num_wanted = min(len(blocks), max_blocks)
        num_places = self.host.capacity - len(self.host) - len(self._arriving)
        evicted = self.host.list_next_evicted(num_wanted - num_places)
        taken = list(blocks[: min(num_wanted, max(0, num_places) + len(evicted))])
        if not taken:
            return None
        self._last_order_id += 1
        order = StoreOrder(self._last_order_id, taken, evicted)
        if self.disk is not None and evicted:
            missing = self.disk.touch(evicted)
            num_over = len(self.disk) + len(missing) - self.disk.capacity
            order.disk_evicted = self.disk.list_next_evicted(num_over)
            self.disk.remove(order.disk_evicted)
            num_free = self.disk.capacity - len(self.disk)
            order.demoted = missing[max(0, len(missing) - num_free) :]
            self.disk.put(order.demoted)
        self.host.remove(evicted)
        self._arriving.update(dict.fromkeys((key for key, _ in taken), order.order_id))
        return order

    def finish_store(self, order: StoreOrder, is_valid: bool) -> list[BlockHashWithGroupId]:
        """Make the blocks of a finished store findable. Return their keys, without those forgotten since.

        Args:
            is_valid: False if the blocks may have been reused while they were read. Their keys are then
                dropped; the caller has to order their removal.
        """
        keys = [key for key, _ in order.blocks if self._arriving.get(key) == order.order_id]
        for key in keys:
            del self._arriving[key]
        if not is_valid:
            return []
        self.host.put(keys)
        return keys

    # ---- using -----------------------------------------------------------------------------------

    def touch(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Mark these keys as used now, in this order."""
        listed = list(keys)
        self.host.touch(listed)
        if self.disk is not None:
            self.disk.touch(listed)

    def hold(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Exempt these keys from eviction until `release`. Holds are counted per key."""
        self.host.hold(keys)

    def release(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Undo one `hold` of each of these keys."""
        self.host.release(keys)

    # ---- removing --------------------------------------------------------------------------------

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Remove keys; planned stores of them will not be found. The caller has to order their removal."""
        listed = list(keys)
        for key in listed:
            self._arriving.pop(key, None)
        self.host.remove(listed)
        if self.disk is not None:
            self.disk.remove(listed)

    def clear(self) -> None:
        """Remove all keys, those of planned stores included."""
        self._arriving.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def drop_disk(self) -> list[BlockHashWithGroupId]:
        """Continue without a disk tier. Return the keys that were on disk."""
        keys = [] if self.disk is None else self.disk.list_keys()
        self.disk = None
        return keys

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
        self.disk.put(new[first:])
        return new[:first]

    def _share_holds(self) -> None:
        self.host.share_holds(self._held)
        if self.disk is not None:
            self.disk.share_holds(self._held)
