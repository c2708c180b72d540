"""`TierIndex`: what the workers' tiers hold, in the scheduler's process; the messages between the halves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kv_pool.core.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId
from kv_pool.tiers.tier import Tier, TierStack, TierStep


@dataclass
class StoreOrder:
    """Copy blocks of the GPU pool to host memory; before, make room there.

    Attributes:
        order_id: grows by 1 with each order.
        blocks: the blocks to copy, by the keys of their content.
        steps: what makes room for them: evictions from both tiers, and copies from host memory to disk.
    """

    order_id: int
    blocks: dict[BlockHashWithGroupId, BlockId]
    steps: list[TierStep] = field(default_factory=list)

    def list_demoted(self) -> list[BlockHashWithGroupId]:
        """Return the keys that are copied from host memory to disk."""
        return [key for step in self.steps for key in step.stored]


@dataclass
class LoadOrder:
    """Copy blocks from the tiers into blocks of the GPU pool.

    Attributes:
        request_id: the request that waits for them; it has one load at a time.
        blocks: the target blocks, by the keys of their content.
    """

    request_id: RequestId
    blocks: dict[BlockHashWithGroupId, BlockId]


@dataclass
class StepOrders:
    """All orders of a step. Removals come first, then the stores in order; loads overtake waiting stores.

    Attributes:
        clears: remove everything from all tiers.
        forgotten: keys to remove from all tiers.
        stores, loads: the copies.
    """

    clears: bool = False
    forgotten: list[BlockHashWithGroupId] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)


@dataclass
class WorkerReport:
    """The results of a worker since its last report; reports of several ranks are merged.

    Attributes:
        stored: order id -> number of ranks that have finished the store.
        lost: keys that a rank's tiers do not have, or could not read or write.
        reopened: keys that were on the disk of every rank at the start, the least recently used first; None
            after the first report.
        partly_reopened: keys that were on the disk of some ranks only.
        has_lost_disk: a rank has closed its disk tier, because removals could not be written.
    """

    stored: dict[int, int] = field(default_factory=dict)
    lost: set[BlockHashWithGroupId] = field(default_factory=set)
    reopened: list[BlockHashWithGroupId] | None = None
    partly_reopened: set[BlockHashWithGroupId] = field(default_factory=set)
    has_lost_disk: bool = False

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Return one report for both ranks."""
        stored = dict(Counter(self.stored) + Counter(other.stored))
        reopened = self.reopened
        partly = self.partly_reopened | other.partly_reopened
        if self.reopened is not None or other.reopened is not None:
            here, there = set(self.reopened or ()), set(other.reopened or ())
            reopened = [key for key in self.reopened or () if key in there]
            partly |= here ^ there
        has_lost_disk = self.has_lost_disk or other.has_lost_disk
        return WorkerReport(stored, self.lost | other.lost, reopened, partly, has_lost_disk)


class TierIndex(TierStack):
    """The keys of the host tier and the disk tier, the stores that are planned, and what makes room for them.

    All workers execute the same orders in the same order, so one index describes the tiers of all ranks.

        planned store   -- all ranks have finished -->   host   -- evicted -->   disk   -- evicted --> dropped

    A key whose store is planned has its place in the host tier, but is not found before the store has
    finished. A key that is evicted from host memory is found on disk at once: workers look in both tiers.

    Args:
        host_blocks, disk_blocks: capacity of each rank's tiers; 0 disk blocks for no disk tier.
        block_bytes: size of a block in them.
    """

    def __init__(self, host_blocks: int, disk_blocks: int, block_bytes: int = 0) -> None:
        tiers = [Tier(host_blocks, MEDIUM_CPU, block_bytes)]
        if disk_blocks:
            tiers.append(Tier(disk_blocks, MEDIUM_STORAGE, block_bytes))
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
