"""`ControlledPool`: a pool with its sequences, as operators see it: its reports and its compaction."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kv_pool.contiguous.fragmentation import get_fragmentation_rate
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.latency import LatencyWindow
from kv_pool.reports.layout import PoolLayout, list_free_runs, read_states, read_tables
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics, read_statistics

Pool = TypeVar("Pool", bound=BlockPoolCore)


class ControlledPool(ABC, Generic[Pool]):
    """A pool that `ControlServer` and its commands, `Defragmenter` and `AllocationMonitor` work with.

    Each call takes the lock, so that it is atomic. A pool that does not support an operation raises
    ControlError with the reason and the way out.

    Attributes:
        block_pool: the blocks and their holds; use it with `lock` held.
        lock: reentrant; held by every call that changes the pool.
        block_size: tokens per block.
        run_length: length in blocks of the runs that `get_fragmentation_rate` counts.
        device_id: id of the pool's device.
        num_moved_blocks: number of id changes of blocks so far, temporary moves included.
        latencies: the durations of "take", "free" and "lookup" calls; {} if they are not timed.
    """

    block_pool: Pool
    lock: AbstractContextManager[object]
    block_size: int
    run_length: int
    device_id: int = 0
    num_moved_blocks: int = 0
    latencies: Mapping[str, LatencyWindow] = MappingProxyType({})

    @abstractmethod
    def _list_rows(self) -> Mapping[Any, Collection[Collection[KVCacheBlock]]]:
        """Return the blocks of each sequence or request, one row per group. Called with the lock held."""

    @abstractmethod
    def _report_sequence(self, sequence_id: Any, num_blocks: int, num_immovable: int) -> SequenceReport:
        """Return the report of a sequence with this many blocks. Called with the lock held."""

    def count_more(self) -> dict[str, Any]:
        """Return the counts of `PoolStatistics` that only this pool knows. Called with the lock held."""
        return {}

    @abstractmethod
    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Compact the pool and return how many blocks changed their id. See `GPUKVPool.defragment`."""

    def get_statistics(self) -> PoolStatistics:
        """Return counts, shares and times: use of the pool, fragmentation, latency of its calls.

        The pool is locked meanwhile. O(number of blocks), a few nanoseconds each.
        """
        with self.lock:
            more = self.count_more()
            timed = {"take": "allocation", "free": "freeing"}
            more |= {timed[call]: one.summarize() for call, one in self.latencies.items() if call in timed}
            known = read_statistics(self.block_pool, block_size=self.block_size, run_length=self.run_length)
            return msgspec.structs.replace(known, moved_blocks=self.num_moved_blocks, **more)

    def get_layout(self) -> PoolLayout:
        """Return a snapshot of each block's state and each sequence's runs. O(number of blocks)."""
        with self.lock:
            pool, states = self.block_pool, read_states(self.block_pool)
            joins, holders = read_tables(len(states), list(chain.from_iterable(self._list_rows().values())))
            return PoolLayout(
                self.block_size, self.run_length, pool.epoch, self.device_id, states, joins, holders
            )

    def describe_sequences(self) -> SequenceList:
        """Return a report on each sequence that holds blocks, the least recent first. O(held blocks)."""
        with self.lock:
            immovable_ids = set(self.block_pool.holds.list_immovable_ids())
            reports = []
            for sequence_id, rows in self._list_rows().items():
                ids = [block.block_id for row in rows for block in row if not block.is_null]
                num_immovable = sum(block_id in immovable_ids for block_id in ids)
                reports.append(self._report_sequence(sequence_id, len(ids), num_immovable))
            return SequenceList(reports)

    def get_fragmentation_rate(self) -> float:
        """Return the share of possible free runs that is lost to fragmentation, 0 to 1. O(number of blocks).

        The free blocks could form a certain number of runs of `run_length` if they were contiguous; the rate
        is the share of these that they do not form. With fewer free blocks than `run_length`, the largest
        power of two that fits takes its place. An unfragmented pool has rate 0, however full it is. For
        another run length k, U(k), see `RunBlockPool.get_unusable_share`.
        """
        with self.lock:
            return get_fragmentation_rate(list_free_runs(read_states(self.block_pool)), self.run_length)


class Manager(Protocol):
    """A `KVCacheManager`, as far as reports read it."""

    block_pool: BlockPoolCore
    block_size: int
    watermark_blocks: int
    retention: Any

    def list_request_ids(self) -> Sequence[Any]:
        """Return the ids of the requests that hold blocks."""


def count_use(manager: Manager) -> dict[str, Any]:
    """Return the counts of `PoolStatistics` that a manager knows."""
    retention = manager.retention
    return {
        "pinned_blocks": 0 if retention is None else retention.num_pins,
        "reserved_blocks": manager.watermark_blocks,
        "num_sequences": len(manager.list_request_ids()),
    }
