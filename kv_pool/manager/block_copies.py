"""`BlockCopies`: copies that the engine has to make before it writes, because a shared block was replaced."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold, HoldState
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockMove

_RELEASED = HoldState.RELEASED  # which Python 3.11 calls a function for, and a call can be interrupted


class BlockCopies:
    """Copies to be made. Their sources are held until the engine has fetched the list.

    Until then no source is taken by anybody, so no block is both source and target.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self._pool: BlockPoolCore = pool
        self._source_of: dict[KVCacheBlock, KVCacheBlock] = {}
        self._holds: list[Hold] = []  # the one of the sources, while there are any

    def __len__(self) -> int:
        return len(self._source_of)

    def find_source(self, block: KVCacheBlock) -> KVCacheBlock:
        """Where the content of this block is: in another one, while it is not written yet itself."""
        return self._source_of.get(block, block)

    def add(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """`target` is to hold what `source` holds.

        Args:
            source: as `find_source` says.
        All or nothing, whatever interrupts it; `recover` settles the hold.
        """
        if not self._holds:
            self._pool.holds.open(
                [], "to be copied before the next step writes", is_movable=True, onto=self._holds
            )
        self._holds[0].add([source])
        self._source_of[target] = source

    def is_source(self, block: KVCacheBlock) -> bool:
        """Whether a copy is to be made of this block: then one of its references is the hold's.

        Copies are made before the step writes, so the last request that has a source may write to it.
        """
        return len(self._holds) > 0 and self._holds[0].contains(block)

    def check_made(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """Raise InvalidArgumentError if one of these blocks of the request still lacks its content."""
        if any(block in self._source_of for block in blocks):
            raise InvalidArgumentError(
                f"request {request_id!r} has blocks whose content is still to be copied; apply "
                "take_block_copies() first"
            )

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        """Drop the copies into blocks of this list that have no other holder.

        May be repeated, where an exception interrupted it.
        """
        is_any = False
        for block in blocks:
            if block.ref_cnt == 1 and block in self._source_of:
                del self._source_of[block]
                is_any = True
        if is_any:
            self.recover()

    def take(self) -> list[BlockMove]:
        """Hand over the copies; each source may be reused by whoever allocates next."""
        if not self._holds:
            return []
        moves = [BlockMove(source.block_id, target.block_id) for target, source in self._source_of.items()]
        nothing: dict[KVCacheBlock, KVCacheBlock] = {}
        try:
            self._holds[0].release()
        finally:
            if self._holds[0].state is _RELEASED:  # an interrupt comes too late
                self._source_of = nothing
                del self._holds[:]
        return moves

    def recover(self) -> None:
        """Release what no copy needs any more, such as after an interrupted call."""
        if self._holds:
            needed = set(self._source_of.values())
            self._holds[0].remove([block for block in self._holds[0].blocks if block not in needed])
