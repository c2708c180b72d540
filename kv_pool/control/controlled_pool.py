"""`ControlledPool`: what a control socket asks of a pool, whichever face the pool has."""

from contextlib import AbstractContextManager
from typing import Protocol

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.layout import PoolLayout
from kv_pool.reports.sequences import SequenceList
from kv_pool.reports.statistics import PoolStatistics


class ControlledPool(Protocol):
    """A `GPUKVPool`, a `ControlledManager`, or the pool of a running vLLM engine. Each call is of one moment.

    A face that cannot do what is asked raises ControlError with the reason and the way out.
    """

    @property
    def block_pool(self) -> BlockPoolCore:
        """The blocks and their holds; read with `lock` held."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The lock that every call which changes the pool holds; reentrant."""

    @property
    def run_length(self) -> int:
        """What `get_fragmentation_rate` is about."""

    def get_statistics(self) -> PoolStatistics:
        """Counts, shares and times."""

    def get_layout(self) -> PoolLayout:
        """What each block is."""

    def describe_sequences(self) -> SequenceList:
        """The sequences, or requests, that hold blocks."""

    def get_fragmentation_rate(self) -> float:
        """Share of the possible runs of `run_length` that is lost to scattering, 0 to 1."""

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Move blocks; returns how many changed their id. See `GPUKVPool.defragment`."""
