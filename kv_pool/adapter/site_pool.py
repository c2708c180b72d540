"""`SitePool`: what migration reads and changes of a `GPUKVPool`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from kv_pool.adapter.holdings import Holdings
from kv_pool.adapter.placement import Placement
from kv_pool.contiguous.run_pool import RunBlockPool

if TYPE_CHECKING:  # imported by those who have a storage
    from kv_pool.storage.block_storage import BlockStorage


class SitePool(Protocol):
    """A pool that a migration site is made of, and that migrates to others; see `GPUKVPool`."""

    block_pool: RunBlockPool
    block_size: int
    device_id: int
    holdings: Holdings
    placement: Placement
    storage: BlockStorage | None
    total_blocks: int

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held during each call; reentrant."""

    def count_available(self, priority: int) -> int:
        """Return how many blocks a request of this priority could have."""

    def get_time(self) -> float:
        """Return the seconds of the pool's clock."""
