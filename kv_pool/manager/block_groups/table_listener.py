"""`TableListener`: hears when requests get their tables, and when blocks leave them."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.requests.request import SchedulableRequest


@mypyc_attr(allow_interpreted_subclasses=True)
class TableListener:
    """A part of a manager that follows the life of tables, such as a retention: see `ManagerState.listeners`.

    The methods are called during a call that changes the pool. Without an override they do nothing.
    """

    def note_started(self, request: SchedulableRequest) -> None:
        """A request has just got the blocks of its prefix, and gets its first own blocks next."""

    def note_leaving(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> None:
        """A request is about to release blocks of its table.

        Args:
            first: the table index of the first block.
            blocks: head first; null blocks may be among them.
        """

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """A request has released the blocks of these tables, which still list them, and has no others."""
