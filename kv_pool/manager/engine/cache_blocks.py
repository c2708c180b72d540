"""`KVCacheBlocks`: blocks of one request, by group, as a scheduler of vLLM receives and passes them."""

from collections.abc import Sequence
from typing import Any, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockId, GroupId


@mypyc_attr(allow_interpreted_subclasses=False)
class KVCacheBlocks:
    """The blocks of a look-up, of an allocation, or of a whole request.

    Attributes:
        blocks: one sequence per group, head first; they may be live block tables, so do not change them.

    Contract: vLLM 0.33 `KVCacheBlocks`.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, blocks: Any) -> None:
        self.blocks: Any = blocks  # a tuple; Any, because callers also pass lists

    def __repr__(self) -> str:
        return f"KVCacheBlocks(blocks={self.blocks!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        return cast(bool, self.blocks == other.blocks)

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """Append the blocks of `other` to those of this object, group by group, in new lists."""
        return KVCacheBlocks(
            tuple([[*mine, *more] for mine, more in zip(self.blocks, other.blocks, strict=False)])
        )

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[GroupId] | None = None
    ) -> tuple[list[BlockId], ...] | None:
        """Return the ids of the blocks, one list per group.

        Args:
            allow_none: return None if all groups are empty.
            group_ids: the groups to return; default: all.
        """
        groups: Any = self.blocks
        if group_ids is not None:
            groups = [groups[group_id] for group_id in group_ids]
        if allow_none and all(len(group) == 0 for group in groups):
            return None
        return tuple([list_ids(group) for group in groups])

    def get_unhashed_block_ids(self) -> list[BlockId]:
        """Return the ids of the blocks without a hash; for a single group."""
        (group,) = self.blocks
        return [block.block_id for block in group if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[BlockId]]:
        """Return the ids of the blocks without a hash by group, without null blocks."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> "KVCacheBlocks":
        """Return an object with as many groups and no blocks."""
        return KVCacheBlocks(tuple([() for _ in self.blocks]))


def list_ids(blocks: Any) -> list[BlockId]:
    """Return the ids of the blocks of one group."""
    if isinstance(blocks, list):
        ids: list[BlockId] = []
        for block in blocks:
            if isinstance(block, KVCacheBlock):
                ids.append(block.block_id)
            else:
                ids.append(block.block_id)  # an engine's tests pass objects of their own
        return ids
    return [block.block_id for block in blocks]
