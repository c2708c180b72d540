"""`AllocatedTables`: the block tables of a new request while its content is being loaded."""

from collections.abc import Callable

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.swap.sides import list_tail_first


class AllocatedTables:
    """The device blocks of a plan that loads a prefix from a lower tier.

    Args:
        request: the request that receives the blocks.
        num_computed_tokens: number of tokens whose KV is valid at the commit.
        manager: the manager that schedules the request.
        allocate: calls `manager.allocate_slots` for the request; returns None if blocks are short.

    Attributes:
        tables: empty before `open`, and after `commit` or `abort`.

    A method that an exception interrupted can be called again.
    """

    def __init__(
        self,
        request: SchedulableRequest,
        num_computed_tokens: int,
        manager: KVCacheManager,
        allocate: Callable[[], object],
    ) -> None:
        self.tables: list[BlockTable] = []
        self._request = request
        self._num_computed_tokens = num_computed_tokens
        self._manager = manager
        self._allocate = allocate
        self._first_table: BlockTable | None = None
        self._leaving: list[KVCacheBlock] = []  # references to release

    def open(self) -> bool:
        """Allocate the blocks. Return False if the pool has too few."""
        manager = self._manager
        request_id = self._request.request_id
        try:
            if self._allocate() is None:
                return False
            manager.pop_tables_onto(request_id, self.tables)
        except BaseException:
            if not self.tables and manager.holds_blocks(request_id):
                manager.pop_tables_onto(request_id, self.tables)
            raise
        self._first_table = self.tables[0]
        for table, spec in zip(self.tables, manager.groups, strict=True):
            table.num_hits = -(-self._num_computed_tokens // spec.block_size)
        return True

    def list_blocks(self) -> list[KVCacheBlock]:
        """Return the referenced blocks, the first to be reused first."""
        return list_tail_first([table.blocks for table in self.tables])

    def commit(self) -> None:
        """Pass the tables to the manager and cache the blocks that have content."""
        manager = self._manager
        request_id = self._request.request_id
        if self.tables:
            manager.put_tables_out_of(request_id, self.tables)
        if manager.holds_blocks(request_id) and manager.get_table(request_id) is self._first_table:
            manager.cache_blocks(self._request, self._num_computed_tokens)

    def abort(self) -> None:
        """Free the allocated blocks."""
        if self.tables:
            leaving = self.list_blocks()
            self._leaving = leaving  # no call in between
            self.tables = []
        self._manager.free_out_of(self._leaving)
        self._manager.forget_tables(self._request.request_id)
