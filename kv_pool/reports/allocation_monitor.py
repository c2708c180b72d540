"""`AllocationMonitor`: the last states of a pool, and its rates over 1, 5 and 15 minutes."""

from collections import defaultdict, deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

import msgspec

from kv_pool.core.arguments import as_count
from kv_pool.core.deadlines import read_clock
from kv_pool.reports.controlled_pool import ControlledPool
from kv_pool.reports.pool_reading import PoolSources, read_pool

WINDOWS_S = (60, 300, 900)


class AllocationState(msgspec.Struct, frozen=True, kw_only=True):
    """The allocation state of a pool at one moment.

    Attributes:
        timestamp: seconds of the monitor's clock.
        active_sequences: None if the pool does not count them.
        fragmentation_rate: share of the free blocks that cannot serve a run, 0 to 1; None if only a scan of
            the pool would tell.
        utilization: share of the blocks that is in use, 0 to 1.
        scenario: what ran at that moment, as the caller named it.
        counters: events since the start of the pool, by name.
    """

    timestamp: float
    free_blocks: int
    used_blocks: int
    active_sequences: int | None
    fragmentation_rate: float | None
    utilization: float
    scenario: str = ""
    counters: dict[str, int] = {}


class HistoryWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the states of the last seconds.

    Attributes:
        window_s: the length of the window.
        covered_s: from the first to the last state in it; shorter after a start.
        utilization, peak_utilization: mean and largest share of the blocks in use, 0 to 1.
        rates: by name, how much a counter grew per second. Empty if there is only one state.
    """

    window_s: int
    covered_s: float
    utilization: float
    peak_utilization: float
    rates: dict[str, float]


class PoolHistory(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the states of a pool.

    Attributes:
        states: those kept, oldest first, and at the end that of this moment.
        windows: the shortest first.
        scenarios: the mean share of the blocks in use, 0 to 1, by scenario.
    """

    states: list[AllocationState]
    windows: list[HistoryWindow]
    scenarios: dict[str, float]


class AllocationMonitor:
    """A monitor that records the state of a pool on request and keeps the most recent states.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> from kv_pool.reports.allocation_monitor import AllocationMonitor
        >>> pool = GPUKVPool(100, 16)
        >>> monitor = AllocationMonitor(pool)
        >>> _ = pool.allocate(BlockAllocationRequest(num_blocks=25, sequence_id=1))
        >>> _ = monitor.log_allocation_state("one sequence")
        >>> monitor.history[-1].used_blocks, monitor.history[-1].active_sequences
        (25, 1)
        >>> monitor.summarize().scenarios
        {'one sequence': 0.25}

    Args:
        pool: a `ControlledPool` such as `GPUKVPool`, or a `KVCacheAllocator`.
        max_states: number of states to keep; the oldest are dropped.
        clock: returns the time in seconds, for timestamps.

    Attributes:
        history: the states, oldest first.
    """

    def __init__(
        self, pool: Any, max_states: int = 10_000, *, clock: Callable[[], float] = read_clock
    ) -> None:
        self.pool = pool
        self.history: deque[AllocationState] = deque(maxlen=as_count("max_states", max_states, 1))
        self._clock = clock

    def log_allocation_state(self, scenario: str = "") -> AllocationState:
        """Append the current state to `history` and return it. Cost: one `get_statistics()` call at most."""
        state = self.read_state(scenario)
        if state.fragmentation_rate is None:
            state = msgspec.structs.replace(state, fragmentation_rate=self.calculate_fragmentation())
        self.history.append(state)
        return state

    def calculate_fragmentation(self) -> float:
        """Return the pool's fragmentation rate of this moment, 0 to 1, see `PoolStatistics`."""
        return float(self.pool.get_statistics().fragmentation_rate)

    def summarize(self) -> PoolHistory:
        """Return what the states in `history` and the current one say about `WINDOWS_S`. O(states)."""
        states = [*self.history, self.read_state()]  # copied: another thread may append to it
        shares = defaultdict(list)
        for state in states[:-1]:
            shares[state.scenario].append(state.utilization)
        return PoolHistory(
            states=states,
            windows=[_summarize(states, window_s) for window_s in WINDOWS_S],
            scenarios={scenario: fmean(found) for scenario, found in shares.items()},
        )

    def read_state(self, scenario: str = "") -> AllocationState:
        """Return the current state, without a fragmentation rate that needs a scan. Cost: `read_pool`."""
        pool = self.pool if isinstance(self.pool, ControlledPool) else self.pool.manager
        reading = read_pool(PoolSources(pool=pool), clock=self._clock)
        counters = {
            "allocations": reading.calls.get("take"),
            "looked_up_tokens": reading.looked_up_tokens,
            "hit_tokens": reading.hit_tokens,
            "evictions": sum(reading.evictions.values()),
            "moved_blocks": reading.moved_blocks,
            "evicted_sequences": reading.evicted_sequences,
        }
        return AllocationState(
            timestamp=reading.time_s,
            free_blocks=reading.free_blocks,
            used_blocks=reading.used_blocks,
            active_sequences=reading.num_sequences,
            fragmentation_rate=reading.fragmentation_rate,
            utilization=reading.usage,
            scenario=scenario,
            counters={name: count for name, count in counters.items() if count is not None},
        )


def _summarize(states: list[AllocationState], window_s: int) -> HistoryWindow:
    last = states[-1]
    found = [state for state in states if state.timestamp >= last.timestamp - window_s]
    first, shares = found[0], [state.utilization for state in found]
    covered_s = last.timestamp - first.timestamp
    grown = {name: count - first.counters.get(name, count) for name, count in last.counters.items()}
    return HistoryWindow(
        window_s=window_s,
        covered_s=covered_s,
        utilization=fmean(shares),
        peak_utilization=max(shares),
        rates={name: count / covered_s for name, count in grown.items()} if covered_s > 0 else {},
    )
