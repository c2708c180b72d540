"""`ZeroedBlocks`: the new blocks that a worker overwrites with zeros before a step writes to them."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockId, GroupId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.step import Step


@mypyc_attr(allow_interpreted_subclasses=False)
class ZeroedBlocks:
    """Lists the ids of blocks that were taken since the last `take`.

    Args:
        group_ids: the groups whose blocks are listed.
    """

    def __init__(self, group_ids: Sequence[GroupId]) -> None:
        self.group_ids: list[GroupId] = list(group_ids)
        self._ids: dict[GroupId, list[BlockId]] = {group_id: [] for group_id in group_ids}

    def note(
        self,
        tables: list[BlockTable],
        step: Step,
        added: tuple[Sequence[KVCacheBlock], ...],
        without_external: Sequence[GroupId],
    ) -> None:
        """List the blocks that a step added.

        Args:
            without_external: groups whose external tokens arrive in their blocks: only the blocks after these
                are listed.
        """
        for group_id in self.group_ids:
            ids = self._ids[group_id]
            plan = step.plans[group_id]
            if plan.num_external and group_id not in without_external:
                first = max(plan.num_nulls, len(step.prefix_blocks[group_id]))
                for block in tables[group_id].blocks[first : first + plan.num_external]:
                    ids.append(block.block_id)
            for block in added[group_id]:
                ids.append(block.block_id)

    def note_from(self, tables: list[BlockTable], block_sizes: list[int], start_token: int) -> None:
        """List the blocks of a request from `start_token` on, a block's start.

        Args:
            block_sizes: tokens per block of each group.
        """
        for group_id in self.group_ids:
            first = start_token // block_sizes[group_id]
            self._ids[group_id] += [block.block_id for block in tables[group_id].blocks[first:]]

    def take(self) -> list[BlockId]:
        """Return the listed ids, by group, and forget them."""
        taken: list[BlockId] = []
        for group_id in self.group_ids:
            taken += self._ids[group_id]
            self._ids[group_id] = []
        return taken
