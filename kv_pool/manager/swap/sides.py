"""`DeviceSide` and `HostSide`: the two places of a swapped request's tables, with the same methods."""

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


class DeviceSide:
    """The manager and its pool, for parts of larger calls.

    The manager's rules for taking and freeing apply, retention included.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.pool: BlockPoolCore = manager.block_pool
        self._manager = manager

    def count_free_blocks(self) -> int:
        """Return the number of blocks that could be taken now."""
        if self._manager.retention is not None:
            self._manager.retention.expire()
        return self._manager.get_num_free_blocks()

    def holds(self, request_id: RequestId) -> bool:
        """Return True if the request has tables on this side."""
        return self._manager.holds_blocks(request_id)

    def touch(self, blocks: list[KVCacheBlock]) -> None:
        """Add one reference to each block."""
        touch_listed(self.pool, blocks)
        if self._manager.retention is not None:
            self._manager.retention.note_taken(blocks)

    def note_leaving(self, request_id: RequestId, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        """Note that a request leaves this side and drops its references: whole tables, one per group."""
        retention = self._manager.retention
        if retention is not None and retention.is_active:
            for group_id, blocks in enumerate(blocks_by_group):
                retention.label_table(request_id, GroupId(group_id), 0, blocks)

    def release(self, hold: Hold) -> None:
        """End a hold and drop its references."""
        if len(self._manager.copies):
            self._manager.copies.drop(hold.blocks)
        self.pool.holds.end(hold, HoldState.RELEASED)

    def pop_tables(self, request_id: RequestId) -> None:
        """Remove the request's tables from this side; their references are the caller's now."""
        self._manager.pop_tables(request_id)

    def put_tables(self, request_id: RequestId, tables: list[BlockTable], num_computed_tokens: int) -> None:
        """Attach these tables, references included, to a request that has none on this side."""
        self._manager.put_tables(request_id, tables)


class SwappedOut(NamedTuple):
    """A request on the host.

    Attributes:
        tables: one per group, with blocks of the host pool.
        num_computed_tokens: the request's count when it was swapped out.
    """

    tables: list[BlockTable]
    num_computed_tokens: int


class HostSide:
    """The pool in host memory, and the requests that are swapped out. Its methods are those of `DeviceSide`.

    Attributes:
        requests: the swapped-out requests, in the order in which they were swapped out.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self.pool = pool
        self.requests: dict[RequestId, SwappedOut] = {}

    def count_free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self.requests

    def touch(self, blocks: list[KVCacheBlock]) -> None:
        touch_listed(self.pool, blocks)

    def note_leaving(self, request_id: RequestId, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        pass

    def release(self, hold: Hold) -> None:
        self.pool.holds.end(hold, HoldState.RELEASED)

    def pop_tables(self, request_id: RequestId) -> None:
        del self.requests[request_id]

    def put_tables(self, request_id: RequestId, tables: list[BlockTable], num_computed_tokens: int) -> None:
        self.requests[request_id] = SwappedOut(tables, num_computed_tokens)


SwapSide = DeviceSide | HostSide


def list_tail_first(blocks_by_group: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return the blocks in the order of reuse: group by group, last block first, without null blocks."""
    return [block for blocks in blocks_by_group for block in reversed(blocks) if not block.is_null]
