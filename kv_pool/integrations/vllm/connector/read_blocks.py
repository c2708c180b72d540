"""Holds on the blocks that stores read: leases with kv_pool's pool, reference counts with vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.manager.leases import BlockLeases, Lease, LeaseKind, LeaseState


class LeasedBlocks:
    """Keeps blocks of kv_pool's pool from being reused while a store reads them, by leases.

    `kv-pool sequences --holds` lists the leases.

    Args:
        lease_s: duration of a lease, in seconds.
    """

    def __init__(self, block_pool: BlockPoolCore, lease_s: float) -> None:
        self.leases = BlockLeases(block_pool)
        self._clock = block_pool.holds.clock
        self._lease_s = lease_s

    def take(self, blocks: Sequence[KVCacheBlock], holder: str) -> Lease:
        """Hold cached blocks until `release`. Return the hold.

        Args:
            blocks: distinct blocks, in the order of their block table. At the end of the hold the last one
                is freed first, as if the request had freed them.
            holder: a description of the store.
        """
        return self.leases.acquire(blocks, self._clock() + self._lease_s, holder, LeaseKind.READ)

    def release(self, hold: Lease) -> bool:
        """End a hold. Return False if it had expired, so that the blocks may have been reused."""
        if hold.state is not LeaseState.ACTIVE:
            return False
        hold.release()
        return True

    def expire(self) -> None:
        """End overdue holds. Call it in every step."""
        self.leases.expire()


class CountedBlocks:
    """The same for vLLM's pool, by references, which have no deadline."""

    def __init__(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    def take(self, blocks: Sequence[Any], holder: str) -> list[Any]:
        listed = list(blocks)
        self._block_pool.touch(listed)
        return listed

    def release(self, hold: list[Any]) -> bool:
        self._block_pool.free_blocks(reversed(hold))
        return True

    def expire(self) -> None:
        pass


ReadBlocks = LeasedBlocks | CountedBlocks


def hold_blocks_of(block_pool: Any, lease_s: float) -> ReadBlocks:
    """Return the holds that fit a pool."""
    if isinstance(block_pool, BlockPoolCore):
        return LeasedBlocks(block_pool, lease_s)
    return CountedBlocks(block_pool)
