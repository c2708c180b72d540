"""`StepOrders` and `WorkerReport`: the messages between the scheduler half and the worker half."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId
from kv_pool.tiers.tier import TierStep


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
