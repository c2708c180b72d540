"""`ControlledPool`: a pool with its sequences, as operators see it: its reports and its compaction."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from kv_pool.contiguous.fragmentation import get_fragmentation_rate
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import BlockHolds, Hold, PlaceHold
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.latency import LatencyWindow
from kv_pool.reports.layout import PoolLayout, list_free_runs, read_states, read_tables
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics, read_statistics
from kv_pool.threads import REST_S

Pool = TypeVar("Pool", bound=BlockPoolCore)
Rows = Sequence[Collection[KVCacheBlock]]
"""The blocks of a sequence or request, one row per KV cache group."""

SLICE_NS = 500_000
"""Time after which a long report releases the lock of a pool for a moment."""

_Found = TypeVar("_Found")


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
        model_name, engine: labels of a reading whose `PoolSources` have none.
    """

    block_pool: Pool
    lock: AbstractContextManager[object]
    block_size: int
    run_length: int
    device_id: int = 0
    num_moved_blocks: int = 0
    latencies: Mapping[str, LatencyWindow] = MappingProxyType({})
    model_name: str = ""
    engine: str = "0"

    @abstractmethod
    def _list_ids(self) -> list[Any]:
        """Return the ids of the sequences or requests that have blocks. Called with the lock held."""

    @abstractmethod
    def _get_rows(self, sequence_id: Any) -> Rows | None:
        """Return the blocks of a sequence; None if it has ended. Called with the lock held."""

    @abstractmethod
    def report_sequence(self, sequence_id: Any, num_blocks: int, num_immovable: int) -> SequenceReport:
        """Return the report of a sequence with these `count_held` blocks. Called with the lock held."""

    def count_use(self) -> dict[str, Any]:
        """Return the `PoolStatistics` that the block pool does not count. Called with the lock held."""
        return {"run_length": self.run_length, "moved_blocks": self.num_moved_blocks}

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
            timed = {"take": "allocation", "free": "freeing"}
            more = self.count_use()
            more |= {timed[call]: one.summarize() for call, one in self.latencies.items() if call in timed}
            return read_statistics(self.block_pool, block_size=self.block_size, **more)

    def get_layout(self) -> PoolLayout:
        """Return a snapshot of each block's state and each sequence's runs. O(number of blocks)."""
        with self.lock:
            pool, states = self.block_pool, read_states(self.block_pool)
            tables = [row for one in self._list_ids() for row in self._get_rows(one) or []]
            joins, holders = read_tables(len(states), tables)
            return PoolLayout(
                self.block_size, self.run_length, pool.epoch, self.device_id, states, joins, holders
            )

    def describe_sequences(self) -> SequenceList:
        """Return a report on each sequence that holds blocks, the least recent first. O(held blocks)."""
        with self.lock:
            immovable = list_immovable(self.block_pool.holds, self.lock)
            ids = self._list_ids()
            counts = {one: self.count_held(self._get_rows(one) or [], immovable) for one in ids}
            return SequenceList([self.report_sequence(one, *count) for one, count in counts.items()])

    def count_held(self, rows: Rows, immovable: set[KVCacheBlock]) -> tuple[int, int]:
        """Return the number of blocks in these rows without null blocks, and of those that must not be moved.

        Args:
            immovable: the blocks of the pool that must not be moved.
        Cost: some nanoseconds per block, some tens if any is immovable. Copies of rows need no lock.
        """
        null_block = self.block_pool.null_block
        num_nulls = sum(row.count(null_block) for row in rows if isinstance(row, list))
        num_immovable = sum(len(immovable.intersection(row)) for row in rows) if immovable else 0
        return sum(map(len, rows)) - num_nulls, num_immovable

    def read_sequences(
        self, read: Callable[[Any, Rows], _Found], sequence_ids: Iterable[Any] | None = None
    ) -> list[_Found]:
        """Return what `read` returns for the id and the rows of each sequence.

        The lock is released after each half millisecond, so the results may be of different moments.

        Args:
            read: called with the lock held; must not change the pool.
            sequence_ids: the sequences; None for all. Those that have ended are left out.
        """
        with self.lock:
            left = deque(self._list_ids() if sequence_ids is None else sequence_ids)
        found = []
        while left:
            with self.lock:
                until_ns = time.perf_counter_ns() + SLICE_NS
                while left and time.perf_counter_ns() < until_ns:
                    sequence_id = left.popleft()
                    rows = self._get_rows(sequence_id)
                    if rows is not None:
                        found.append(read(sequence_id, rows))
            time.sleep(REST_S)
        return found

    def get_fragmentation_rate(self) -> float:
        """Return the share of possible free runs that is lost to fragmentation, 0 to 1. O(number of blocks).

        The free blocks could form a certain number of runs of `run_length` if they were contiguous; the rate
        is the share of these that they do not form. With fewer free blocks than `run_length`, the largest
        power of two that fits takes its place. An unfragmented pool has rate 0, however full it is. For
        another run length k, U(k), see `RunBlockPool.get_unusable_share`.
        """
        with self.lock:
            return get_fragmentation_rate(list_free_runs(read_states(self.block_pool)), self.run_length)


def list_immovable(holds: BlockHolds, lock: AbstractContextManager[object]) -> set[KVCacheBlock]:
    """Return the blocks that must not be moved. The lock is held for a copy of one hold's list at a time."""
    with lock:
        found: list[PlaceHold | Hold] = [*holds.list_place_holds(), *holds.list_holds()]
    immovable: set[KVCacheBlock] = set()
    for hold in found:
        if isinstance(hold, PlaceHold) or not hold.is_movable:
            with lock:
                held = list(hold.get_blocks()) if isinstance(hold, PlaceHold) else hold.blocks
            immovable.update(held)
    return immovable


class Manager(Protocol):
    """A `KVCacheManager`, as far as reports read it."""

    block_pool: BlockPoolCore
    block_size: int
    watermark_blocks: int
    looked_up_tokens: int
    hit_tokens: int
    retention: Any

    def list_request_ids(self) -> Sequence[Any]:
        """Return the ids of the requests that hold blocks."""


def count_use(manager: Manager) -> dict[str, Any]:
    """Return the counts of `PoolStatistics` that a manager keeps, beside those of its block pool."""
    retention = manager.retention
    return {
        "pinned_blocks": 0 if retention is None else retention.num_pins,
        "reserved_blocks": manager.watermark_blocks,
        "num_sequences": len(manager.list_request_ids()),
        "looked_up_blocks": manager.looked_up_tokens // manager.block_size,
        "hit_blocks": manager.hit_tokens // manager.block_size,
    }
