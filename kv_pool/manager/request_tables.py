"""`RequestTables`: block tables, which swappers and migrations detach, fill and attach again."""

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, as_list_of, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestTables(ManagerState):
    """The part of `KVCacheManager` that swappers and migrations use: whole tables and their blocks."""

    def holds_blocks(self, request_id: RequestId) -> bool:
        """Return True if the request has a block table."""
        if not isinstance(request_id, str):
            refuse_type("request_id", request_id, "str")
        return request_id in self._tables

    def list_request_ids(self) -> list[RequestId]:
        """Return the ids of the requests that hold blocks, in the order in which they got them."""
        return list(self._tables)

    def get_table(self, request_id: RequestId, group_id: GroupId = GroupId(0)) -> BlockTable:
        """Return the request's live block table, which only the manager may change.

        Raises:
            InvalidArgumentError: the request has no blocks, or there is no such group.
        """
        if not isinstance(request_id, str):
            refuse_type("request_id", request_id, "str")
        if not isinstance(group_id, int):
            group_id = as_int("group_id", group_id)
        tables = find_tables(self, request_id)
        if not 0 <= group_id < len(tables):
            raise InvalidArgumentError(f"there is no group {group_id}; there are {len(tables)}")
        return tables[group_id]

    def get_block_ids(self, request_id: RequestId, group_id: GroupId = GroupId(0)) -> list[BlockId]:
        """Return the request's block ids in token order; 0 for an entry without a block.

        Raises:
            InvalidArgumentError: the request has no blocks, or there is no such group.
        """
        return self.get_table(request_id, group_id).list_ids()

    def pop_tables(self, request_id: RequestId) -> list[BlockTable]:
        """Detach the request's tables, one per group, and return them. The caller now owns the references.

        Put them back, or free their blocks and call `forget_tables`.
        Copies into some of the blocks may be pending; call `copies.check_made` before reading their bytes.

        Raises:
            InvalidArgumentError: the request has no blocks.
        """
        check_type("request_id", request_id, str)
        tables = find_tables(self, request_id)
        self.detached_tables[request_id] = tables
        del self._tables[request_id]
        return tables.copy()

    def forget_tables(self, request_id: RequestId) -> None:
        """Forget the detached tables of a request, whose blocks are freed. No-op if there are none."""
        check_type("request_id", request_id, str)
        self.detached_tables.pop(request_id, None)

    def put_tables(self, request_id: RequestId, tables: list[BlockTable]) -> None:
        """Attach tables with referenced blocks to a request without tables: the inverse of `pop_tables`.

        Raises:
            InvalidArgumentError: the request has blocks, or the number of tables differs from that of groups.
        """
        check_type("request_id", request_id, str)
        put = as_list_of("tables", tables, BlockTable).copy()
        if request_id in self._tables:
            raise InvalidArgumentError(f"request {request_id!r} has blocks already")
        if len(put) != len(self._groups):
            raise InvalidArgumentError(f"{len(put)} tables for {len(self._groups)} groups")
        self._has_forks = self._has_forks or any(table.is_forked for table in put)
        self.detached_tables.pop(request_id, None)
        self._tables[request_id] = put

    def take_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for tables that are not attached yet; blocks that a retention keeps may be among them.

        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if self.retention is not None:
            self.retention.expire()
        return self.block_pool.get_new_blocks(num_blocks)

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are in no table. The first block is reused first.

        Raises:
            InvalidBlockError: a block is free, or of another pool. Nothing has changed.
        """
        check_type("blocks", blocks, list)
        for block in as_list_of("blocks", blocks, KVCacheBlock):
            check_ours(block, self.block_pool.block_owner, "KVCacheManager.free_blocks()")
        if len(self.copies):
            self.copies.drop(blocks)
        self.block_pool.free_blocks(blocks)


def find_tables(state: ManagerState, request_id: RequestId) -> list[BlockTable]:
    """Return the request's tables. Raise InvalidArgumentError if it has none."""
    tables = state._tables.get(request_id)
    if tables is None:
        raise InvalidArgumentError(
            f"request {request_id!r} has no blocks: "
            f"{state.detached_requests.get(request_id, 'never allocated, or freed already')}"
        )
    return tables
