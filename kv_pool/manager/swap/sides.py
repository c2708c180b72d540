"""`DeviceSide` and `HostSide`: the two places of a swapped request's tables, with one interface."""

from collections.abc import Sequence
from typing import Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.kv_cache_manager import KVCacheManager


class SwapSide(Protocol):
    """One of the two pools, with the requests whose tables name its blocks.

    References and tables move together with the lists that are passed: a method adds what it takes to the
    list, and removes what it releases, atomically. After an interrupt, call the method again.
    """

    @property
    def pool(self) -> BlockPoolCore:
        """The pool that owns the blocks of this side."""

    def count_free_blocks(self) -> int:
        """Return the number of blocks that `take_blocks` could take now."""

    def is_free(self, block: KVCacheBlock) -> bool:
        """Return True if touching the block would reduce the free blocks by one."""

    def holds(self, request_id: RequestId) -> bool:
        """Return True if the request has tables on this side."""

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        """Append free blocks, the next to be reused first. Raises OutOfBlocksError with nothing changed."""

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        """Add one reference to each block and append the blocks to `onto`."""

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        """Drop one reference of each block. The first block is reused first."""

    def free_request(self, request_id: RequestId, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        """Drop the references of a request that leaves this side: whole tables, one per group."""

    def pop_tables_onto(self, request_id: RequestId, tables: list[BlockTable]) -> None:
        """Append the request's tables, references included, to `tables`, and remove them from this side."""

    def put_tables_out_of(
        self, request_id: RequestId, tables: list[BlockTable], num_computed_tokens: int
    ) -> None:
        """Attach these tables, references included, to a request that has none on this side."""


class DeviceSide:
    """The manager and its pool. The manager's rules for taking and freeing apply, retention included."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def pool(self) -> BlockPoolCore:
        return self._manager.block_pool

    def count_free_blocks(self) -> int:
        return self._manager.get_num_free_blocks()

    def is_free(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt == 0

    def holds(self, request_id: RequestId) -> bool:
        return self._manager.holds_blocks(request_id)

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        self._manager.take_onto(blocks, num_blocks)

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        self.pool.touch_onto(blocks, onto)
        if self._manager.retention is not None:
            self._manager.retention.note_taken(blocks)

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        self._manager.free_out_of(blocks)

    def free_request(self, request_id: RequestId, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        retention = self._manager.retention
        if retention is not None and retention.is_active:
            for group_id, blocks in enumerate(blocks_by_group):
                retention.label_table(request_id, GroupId(group_id), 0, blocks)
        self.free_out_of(join_tail_first(blocks_by_group))

    def pop_tables_onto(self, request_id: RequestId, tables: list[BlockTable]) -> None:
        self._manager.pop_tables_onto(request_id, tables)

    def put_tables_out_of(
        self, request_id: RequestId, tables: list[BlockTable], num_computed_tokens: int
    ) -> None:
        self._manager.put_tables_out_of(request_id, tables)


class HostSide:
    """The pool in host memory, and the tables of the requests that are swapped out.

    Attributes:
        tables: for each request, one table per group, with blocks of the host pool.
        num_computed_tokens: the count of each of these requests.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self._pool = pool
        self.tables: dict[RequestId, list[BlockTable]] = {}
        self.num_computed_tokens: dict[RequestId, int] = {}

    @property
    def pool(self) -> BlockPoolCore:
        return self._pool

    def count_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def is_free(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt == 0

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self.tables

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        self._pool.take_onto(blocks, num_blocks)

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        self._pool.touch_onto(blocks, onto)

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        self._pool.free_out_of(blocks)

    def free_request(self, request_id: RequestId, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        self.free_out_of(join_tail_first(blocks_by_group))

    def pop_tables_onto(self, request_id: RequestId, tables: list[BlockTable]) -> None:
        tables += self.tables[request_id]  # no call from here on
        del self.tables[request_id]
        del self.num_computed_tokens[request_id]

    def put_tables_out_of(
        self, request_id: RequestId, tables: list[BlockTable], num_computed_tokens: int
    ) -> None:
        put = tables.copy()  # no call from here on
        self.tables[request_id] = put
        self.num_computed_tokens[request_id] = num_computed_tokens
        del tables[:]


def join_tail_first(blocks_by_group: list[list[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return `list_tail_first`, and make it the only list in `blocks_by_group`, atomically."""
    joined = list_tail_first(blocks_by_group)
    blocks_by_group[:] = [joined]
    return joined


def list_tail_first(blocks_by_group: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return the blocks in the order of reuse: group by group, last block first, without null blocks."""
    return [block for blocks in blocks_by_group for block in reversed(blocks) if not block.is_null]
