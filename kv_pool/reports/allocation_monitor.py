"""`AllocationMonitor`: a history of a pool's allocation state."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from kv_pool.core.arguments import as_count
from kv_pool.core.deadlines import read_clock
from kv_pool.reports.statistics import PoolStatistics


class HasStatistics(Protocol):
    """An object with pool statistics, such as `GPUKVPool`, `ControlledManager` or `KVCacheAllocator`."""

    def get_statistics(self) -> PoolStatistics:
        """Return the current counts and shares."""


class AllocationState(msgspec.Struct, frozen=True, kw_only=True):
    """The allocation state of a pool at one moment.

    Attributes:
        timestamp: seconds of the monitor's clock.
        active_sequences: None if the pool does not count them.
        fragmentation_rate: share of the free blocks that cannot serve a run, 0 to 1.
        utilization: share of the blocks that is in use, 0 to 1.
    """

    timestamp: float
    free_blocks: int
    used_blocks: int
    active_sequences: int | None
    fragmentation_rate: float
    utilization: float


class AllocationMonitor:
    """A monitor that records the state of a pool on request and keeps the most recent states.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> from kv_pool.reports.allocation_monitor import AllocationMonitor
        >>> pool = GPUKVPool(100, 16)
        >>> monitor = AllocationMonitor(pool)
        >>> _ = pool.allocate(BlockAllocationRequest(num_blocks=25, sequence_id=1))
        >>> _ = monitor.log_allocation_state()
        >>> monitor.history[-1].used_blocks, monitor.history[-1].active_sequences
        (25, 1)

    Args:
        max_states: number of states to keep; the oldest are dropped.
        clock: returns the time in seconds, for timestamps.

    Attributes:
        history: the states, oldest first.
    """

    def __init__(
        self, pool: HasStatistics, max_states: int = 10_000, *, clock: Callable[[], float] = read_clock
    ) -> None:
        self.pool = pool
        self.history: deque[AllocationState] = deque(maxlen=as_count("max_states", max_states, 1))
        self._clock = clock

    def log_allocation_state(self) -> AllocationState:
        """Append the current state to `history` and return it. Cost: one `get_statistics()` call."""
        now = self._clock()
        statistics = self.pool.get_statistics()
        state = AllocationState(
            timestamp=now,
            free_blocks=statistics.free_blocks,
            used_blocks=statistics.used_blocks,
            active_sequences=statistics.num_sequences,
            fragmentation_rate=statistics.fragmentation_rate,
            utilization=statistics.utilization,
        )
        self.history.append(state)
        return state

    def calculate_fragmentation(self) -> float:
        """Return the pool's fragmentation rate of this moment, 0 to 1, see `PoolStatistics`."""
        return self.pool.get_statistics().fragmentation_rate
