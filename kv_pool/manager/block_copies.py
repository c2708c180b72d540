"""`BlockCopies`: copies for the engine to make before it writes, because a shared block was replaced.

Also those of blocks that a hit shares in part, and of cached states that are about to change.
"""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.freeing import free_listed
from kv_pool.core.holds import Hold
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockMove, GroupId, RequestId


class BlockCopies:
    """The pending copies. Their sources are held until the engine fetches the list.

    Until then no source can be allocated, so no block is both source and target. For states, and for hits
    that end within a block, the targets are held, too: they may be cached, and their request may be freed.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self._pool: BlockPoolCore = pool
        self._source_of: dict[KVCacheBlock, KVCacheBlock] = {}
        self._group_of: dict[KVCacheBlock, GroupId] = {}  # of the targets that are held
        self._holds: list[Hold] = []  # the hold on the sources, while there are any

    def __len__(self) -> int:
        return len(self._source_of)

    def find_source(self, block: KVCacheBlock) -> KVCacheBlock:
        """Return the block whose content this block will have: its copy's source, or the block itself."""
        return self._source_of.get(block, block)

    def add(self, source: KVCacheBlock, target: KVCacheBlock, cached_group: GroupId | None = None) -> None:
        """Add a copy from `source` to `target`.

        Args:
            source: a block that `find_source` returned.
            cached_group: the group of a target that may be cached, so that the copy stays pending if its
                request is freed; None if only the request reads the target.
        """
        self._pool.origins.note_copy(target, source)
        book = self._pool.holds
        if not self._holds:
            self._holds.append(book.open([], "to be copied before the next step writes", is_movable=True))
        hold = self._holds[0]
        needed = [source] if cached_group is None else [source, target]
        book.take_references(hold, [block for block in needed if not hold.contains(block)])
        if cached_group is not None:
            self._group_of[target] = cached_group
        self._source_of[target] = source  # no call in between

    def is_source(self, block: KVCacheBlock) -> bool:
        """Return True if the pending copies hold this block; one of its references is then the hold's.

        The engine makes copies before the step writes, so the last request with a source may write to it.
        """
        return len(self._holds) > 0 and self._holds[0].contains(block)

    def check_made(self, request_id: RequestId, blocks: list[KVCacheBlock]) -> None:
        """Raise InvalidArgumentError if the content of one of these blocks is not copied yet."""
        if any(block in self._source_of for block in blocks):
            raise InvalidArgumentError(
                f"request {request_id!r} has blocks whose content is not copied yet; apply "
                "take_block_copies() first"
            )

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        """Drop the copies into blocks of this list that have no other holder."""
        dropped = [block for block in blocks if block.ref_cnt == 1 and block in self._source_of]
        for block in dropped:
            del self._source_of[block]
        if dropped:
            hold = self._holds[0]
            needed = self._list_needed()
            self._pool.holds.drop_references(hold, [block for block in hold.blocks if block not in needed])

    def list_moves(self) -> list[BlockMove]:
        """Return the pending copies; those of states come last, by group. Changes nothing.

        Raises:
            PoolInterruptedError: a call of the pool was interrupted.
        """
        self._pool.holds.check_whole()
        targets = sorted(self._source_of, key=lambda target: self._group_of.get(target, -1))
        return [BlockMove(self._source_of[target].block_id, target.block_id) for target in targets]

    def take(self, keeps_blocks: bool) -> tuple[list[BlockMove], list[KVCacheBlock]]:
        """Return the pending copies as `list_moves` does, and their held blocks in the order to free them.

        Args:
            keeps_blocks: whether the caller frees the blocks, after the copies; otherwise they are free now,
                and the next allocation may reuse them.
        """
        if not self._holds:
            return [], []
        moves = self.list_moves()
        order: dict[KVCacheBlock, None] = {}
        for move in moves:
            source = self._pool.blocks[move.source]
            target = self._pool.blocks[move.target]
            order[source] = None
            if target in self._group_of:
                for block in (source, target):  # each block at its last use
                    order.pop(block, None)
                    order[block] = None
        self._pool.is_changing = True
        self._pool.holds.hand_over(self._holds.pop())
        self._source_of = {}
        self._group_of = {}
        blocks = list(order)
        if not keeps_blocks:
            free_listed(self._pool, blocks)
        self._pool.is_changing = False
        return moves, blocks

    def repair(self) -> None:
        """Let the hold contain the blocks of the pending copies, before references are counted again."""
        for hold in self._holds:
            hold.forget(self._list_needed())

    def _list_needed(self) -> dict[KVCacheBlock, None]:
        return dict.fromkeys([*self._source_of.values(), *self._group_of])
