"""`DeviceSide` and `HostSide`: where a swapped request's blocks and tables can be, under one set of names."""

from collections.abc import Sequence
from typing import Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.kv_cache_manager import KVCacheManager


class SwapSide(Protocol):
    """One of the two pools, with the requests whose tables name its blocks.

    References and tables move together with the lists that are passed: what a method takes is on the list in
    the same step, and what it gives back is off it. After an interrupt the method can be called again.
    """

    @property
    def pool(self) -> BlockPoolCore:
        """The pool that has the blocks of this side."""

    def count_free_blocks(self) -> int:
        """How many blocks `take_blocks` could hand out now."""

    def is_free(self, block: KVCacheBlock) -> bool:
        """Would touching the block leave one free block less?"""

    def holds(self, request_id: str) -> bool:
        """Has the request tables on this side?"""

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        """Append free blocks, the next to be reused first. Raises OutOfBlocksError with nothing changed."""

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        """Add one reference to each block, and append the blocks to `onto`."""

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        """Drop one reference of each block, the first to be reused first."""

    def free_request(self, request_id: str, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        """Drop the references of a request that leaves this side: whole tables, by group."""

    def pop_tables_onto(self, request_id: str, tables: list[BlockTable]) -> None:
        """Append the request's tables to `tables`, references included; it has none on this side then."""

    def put_tables_out_of(self, request_id: str, tables: list[BlockTable], num_computed_tokens: int) -> None:
        """Let the request, which has no tables on this side, have these, references included."""


class DeviceSide:
    """The manager and its pool. Blocks are taken and freed by the manager's rules, retention included."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def pool(self) -> BlockPoolCore:
        return self._manager.block_pool

    def count_free_blocks(self) -> int:
        return self._manager.get_num_free_blocks()

    def is_free(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt == 0

    def holds(self, request_id: str) -> bool:
        return self._manager.holds_blocks(request_id)

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        self._manager.take_onto(blocks, num_blocks)

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        self.pool.touch_onto(blocks, onto)
        if self._manager.retention is not None:
            self._manager.retention.note_taken(blocks)

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        self._manager.free_out_of(blocks)

    def free_request(self, request_id: str, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        retention = self._manager.retention
        if retention is not None and retention.is_active:
            for group_id, blocks in enumerate(blocks_by_group):
                retention.label_table(request_id, group_id, 0, blocks)
        self.free_out_of(join_tail_first(blocks_by_group))

    def pop_tables_onto(self, request_id: str, tables: list[BlockTable]) -> None:
        self._manager.pop_tables_onto(request_id, tables)

    def put_tables_out_of(self, request_id: str, tables: list[BlockTable], num_computed_tokens: int) -> None:
        self._manager.put_tables_out_of(request_id, tables)


class HostSide:
    """The pool in host memory, and the tables of the requests that are swapped out.

    Attributes:
        tables: by request, one table for each group; its blocks are the host pool's.
        num_computed_tokens: of the same requests.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self._pool = pool
        self.tables: dict[str, list[BlockTable]] = {}
        self.num_computed_tokens: dict[str, int] = {}

    @property
    def pool(self) -> BlockPoolCore:
        return self._pool

    def count_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def is_free(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt == 0

    def holds(self, request_id: str) -> bool:
        return request_id in self.tables

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        self._pool.take_onto(blocks, num_blocks)

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        self._pool.touch_onto(blocks, onto)

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        self._pool.free_out_of(blocks)

    def free_request(self, request_id: str, blocks_by_group: list[list[KVCacheBlock]]) -> None:
        self.free_out_of(join_tail_first(blocks_by_group))

    def pop_tables_onto(self, request_id: str, tables: list[BlockTable]) -> None:
        tables += self.tables[request_id]  # no call from here on
        del self.tables[request_id]
        del self.num_computed_tokens[request_id]

    def put_tables_out_of(self, request_id: str, tables: list[BlockTable], num_computed_tokens: int) -> None:
        put = tables.copy()  # no call from here on
        self.tables[request_id] = put
        self.num_computed_tokens[request_id] = num_computed_tokens
        del tables[:]


def join_tail_first(blocks_by_group: list[list[KVCacheBlock]]) -> list[KVCacheBlock]:
    """As `list_tail_first`; `blocks_by_group` has this list, and no other, afterwards, in the same step."""
    joined = list_tail_first(blocks_by_group)
    blocks_by_group[:] = [joined]
    return joined


def list_tail_first(blocks_by_group: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """The blocks in the order in which they are to be reused: group by group, each from its last on.

    Null blocks are left out.
    """
    return [block for blocks in blocks_by_group for block in reversed(blocks) if not block.is_null]
