"""`HostBlocks`: what a manager asks of a pool in host memory that has copies of its blocks. Not compiled."""

from collections.abc import Container
from typing import Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore


class HostBlocks(Protocol):
    """A pool in host memory with copies of a manager's blocks, such as that of a `BlockSwapper`."""

    @property
    def host_pool(self) -> BlockPoolCore: ...

    def is_idle(self) -> bool:
        """Return True if no request has blocks there."""

    def note_invalid(self, blocks: Container[KVCacheBlock]) -> None:
        """Refuse to commit open plans that share these blocks, of either pool, whose content is invalid."""

    def reset_host(self) -> None:
        """Evict every prefix there, after the device's pool was reset."""

    def repair_host(self) -> None:
        """Make the pool there whole, after the manager's own was repaired."""
