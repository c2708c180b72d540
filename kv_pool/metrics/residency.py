"""`KVCacheMetricsCollector`: block lifetimes and reuse gaps, sampled at very low cost."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId

_MAX_ACCESSES_KEPT = 4


@dataclass(frozen=True)
class KVCacheEvictionEvent:
    """The lifetime of one sampled block.

    Attributes:
        lifetime_seconds: from allocation to eviction.
        idle_seconds: from the last access (or the allocation) to eviction.
        reuse_gaps_seconds: between consecutive accesses, oldest first, at most the last 3.
    """

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


def _read_clock() -> int:
    """Return the monotonic clock, in nanoseconds. Looks it up at each call, because vLLM's tests patch it."""
    return time.monotonic_ns()


class BlockMetricsState:
    """The state of one sampled block, in nanoseconds of `clock_ns`. An allocation is not an access."""

    def __init__(self, clock_ns: Callable[[], int] = _read_clock) -> None:
        self._clock_ns = clock_ns
        now_ns = clock_ns()
        self.birth_time_ns = now_ns
        self.last_access_ns = now_ns
        self.access_history: deque[int] = deque(maxlen=_MAX_ACCESSES_KEPT)

    def record_access(self) -> None:
        now_ns = self._clock_ns()
        self.last_access_ns = now_ns
        self.access_history.append(now_ns)

    def get_lifetime_seconds(self) -> float:
        return (self._clock_ns() - self.birth_time_ns) / 1e9

    def get_idle_time_seconds(self) -> float:
        return (self._clock_ns() - self.last_access_ns) / 1e9

    def get_reuse_gaps_seconds(self) -> list[float]:
        times = list(self.access_history)
        return [(late - early) / 1e9 for early, late in pairwise(times)]


class KVCacheMetricsCollector:
    """A collector that tracks a random sample of blocks from allocation to eviction.

        collector = KVCacheMetricsCollector(sample_rate=0.05)
        pool = BlockPool(1000, True, 16, metrics_collector=collector)
        ...
        for sample in collector.drain_events(): print(sample.lifetime_seconds)

    Args:
        sample_rate: share of allocations to sample, above 0 up to 1.
        sample_type: class of the samples, if the engine has its own; called with the fields of
            `KVCacheEvictionEvent` in their order.
        clock_ns: returns the time in nanoseconds.
    Raises:
        InvalidArgumentError: `sample_rate` is out of range.

    Implements `BlockObserver`. Contract: vLLM 0.33 `KVCacheMetricsCollector`.
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        sample_type: Any = KVCacheEvictionEvent,
        *,
        clock_ns: Callable[[], int] = _read_clock,
    ) -> None:
        if not 0 < sample_rate <= 1:
            raise InvalidArgumentError(
                f"sample_rate is {sample_rate}; it is a share of the blocks, above 0 up to 1"
            )
        self.sample_rate = sample_rate
        self.block_metrics: dict[BlockId, BlockMetricsState] = {}
        self._sample_type = sample_type
        self._clock_ns = clock_ns
        self._events: list[KVCacheEvictionEvent] = []

    def should_sample_block(self) -> bool:
        return random.random() < self.sample_rate

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """Start to track the block, with probability `sample_rate`."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState(self._clock_ns)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """Record an access to a tracked block."""
        state = self.block_metrics.get(block.block_id)
        if state is not None:
            state.record_access()

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Stop tracking the block and record its sample."""
        state = self.block_metrics.pop(block.block_id, None)
        if state is not None:
            self._events.append(
                self._sample_type(
                    state.get_lifetime_seconds(),
                    state.get_idle_time_seconds(),
                    tuple(state.get_reuse_gaps_seconds()),
                )
            )

    def on_ids_swapped(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Continue to track blocks whose ids were swapped."""
        for pair in pairs:
            states = [self.block_metrics.pop(block_id, None) for block_id in pair]
            for block_id, state in zip(reversed(pair), states, strict=True):
                if state is not None:
                    self.block_metrics[block_id] = state

    def reset(self) -> None:
        """Stop tracking all blocks, and drop the samples that were not drained."""
        self.block_metrics.clear()
        self._events.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """Return the samples since the last call, oldest first."""
        events = self._events
        self._events = []
        return events
