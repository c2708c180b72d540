"""`SwapSide`: one of the two places of a swapped request's tables, the device or the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold, HoldState
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.taking import touch_listed
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.retention.block_retention import BlockRetention


class SwappedOut(NamedTuple):
    """A request on the host.

    Attributes:
        tables: one per group, with blocks of the host pool.
        num_computed_tokens: the request's count when it was swapped out.
    """

    tables: list[BlockTable]
    num_computed_tokens: int


class SwapSide:
    """A pool, and the tables that requests have there. Its methods are parts of larger calls.

    Args:
        manager: on the device, the manager of the requests, whose rules for taking and freeing apply,
            retention included; None on the host.

    Attributes:
        requests: on the host, the swapped-out requests, in the order in which they were swapped out.
    """

    def __init__(self, pool: BlockPoolCore, manager: KVCacheManager | None = None) -> None:
        self.pool = pool
        self.requests: dict[RequestId, SwappedOut] = {}
        self._manager = manager

    @property
    def _retention(self) -> BlockRetention | None:
        return None if self._manager is None else self._manager.retention

    def count_free_blocks(self) -> int:
        """Return the number of blocks that could be taken now."""
        if self._retention is not None:
            self._retention.expire()
        return self.pool.get_num_free_blocks()

    def holds(self, request_id: RequestId) -> bool:
        """Return True if the request has tables on this side."""
        return (
            request_id in self.requests if self._manager is None else self._manager.holds_blocks(request_id)
        )

    def touch(self, blocks: list[KVCacheBlock]) -> None:
        """Add one reference to each block."""
        touch_listed(self.pool, blocks)
        if self._retention is not None:
            self._retention.note_taken(blocks)

    def note_leaving(self, request_id: RequestId, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        """Note that a request leaves this side and drops its references: whole tables, one per group."""
        if self._manager is not None:
            for group_id, blocks in enumerate(blocks_by_group):
                for listener in self._manager.listeners:
                    listener.note_leaving(request_id, GroupId(group_id), 0, blocks)

    def release(self, hold: Hold) -> None:
        """End a hold and drop its references."""
        if self._manager is not None and len(self._manager.copies):
            self._manager.copies.drop(hold.blocks)
        self.pool.holds.end(hold, HoldState.RELEASED)

    def pop_tables(self, request_id: RequestId) -> None:
        """Remove the request's tables from this side; their references are the caller's now."""
        if self._manager is None:
            del self.requests[request_id]
        else:
            self._manager.pop_tables(request_id)

    def put_tables(self, request_id: RequestId, tables: list[BlockTable], num_computed_tokens: int) -> None:
        """Attach these tables, references included, to a request that has none on this side."""
        if self._manager is None:
            self.requests[request_id] = SwappedOut(tables, num_computed_tokens)
        else:
            self._manager.put_tables(request_id, tables)


def list_tail_first(blocks_by_group: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return the blocks in the order of reuse: group by group, last block first, without null blocks."""
    return [block for blocks in blocks_by_group for block in reversed(blocks) if not block.is_null]
