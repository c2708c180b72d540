"""`ControlledPool`: the protocol of a pool that a control socket can serve."""

from contextlib import AbstractContextManager
from typing import Protocol

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.layout import PoolLayout
from kv_pool.reports.sequences import SequenceList
from kv_pool.reports.statistics import PoolStatistics


class ControlledPool(Protocol):
    """A `GPUKVPool`, a `ControlledManager`, or the pool of a running vLLM engine.

    Each call is atomic. A pool that does not support an operation raises ControlError with the reason and the
    way out.
    """

    @property
    def block_pool(self) -> BlockPoolCore:
        """The blocks and their holds; read with `lock` held."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The reentrant lock held by every call that changes the pool."""

    @property
    def run_length(self) -> int:
        """Length in blocks of the runs that `get_fragmentation_rate` counts."""

    def get_statistics(self) -> PoolStatistics:
        """Return counts, shares and latencies."""

    def get_layout(self) -> PoolLayout:
        """Return the state of each block."""

    def describe_sequences(self) -> SequenceList:
        """Return the sequences, or requests, that have blocks."""

    def get_fragmentation_rate(self) -> float:
        """Return the share of the possible runs of `run_length` that scattering makes impossible, 0 to 1."""

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Compact the pool and return how many blocks changed their id. See `GPUKVPool.defragment`."""
