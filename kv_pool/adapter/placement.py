"""`Placement`: which blocks a request gets, and what is moved so that they lie together."""

from collections.abc import Callable, Collection, Sequence

from kv_pool.contiguous import compaction, plan
from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_index import EMPTY
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockMove
from kv_pool.protocol import Contiguity

_MAX_SCAN = 65_536
"""How many ids one request looks at; the next one goes on from there."""

CopyBlocks = Callable[[Sequence[BlockMove]], object]


class Placement:
    """Takes blocks from a pool that has enough of them free. Held and watched blocks are never moved.

    Args:
        copy: copies the bytes of blocks; raises where it could not.
        on_moved: told of every relocation before any of its old ids can be taken; None for nobody, and then
            nothing moves to make a run.
    """

    def __init__(
        self, pool: RunBlockPool, copy: CopyBlocks, on_moved: Callable[[Relocation], object] | None
    ) -> None:
        self._pool = pool
        self._copy = copy
        self._on_moved = on_moved
        self._start = 0

    @property
    def may_move(self) -> bool:
        return self._on_moved is not None

    def take_any(self, num_blocks: int, after: KVCacheBlock | None, onto: list[KVCacheBlock]) -> None:
        """Take blocks wherever they are, by preference the ids next after `after`'s.

        Args:
            onto: gets the blocks in the step in which they are taken.
        Raises:
            OutOfBlocksError: fewer are free. Nothing has changed.
        """
        pool = self._pool
        if after is None:
            pool.take_onto(onto, num_blocks)
        else:
            pool.take_onto_after(onto, after, num_blocks)

    def take_run(
        self,
        num_blocks: int,
        after: KVCacheBlock | None,
        contiguous: Contiguity,
        onto: list[KVCacheBlock],
    ) -> bool:
        """Take consecutive ids, by preference next after `after`'s; False, with nothing changed, for none.

        Where a run is only preferred, one that holds cached blocks of high priority counts as none; where it
        is required, one without them comes first.

        Args:
            onto: gets the blocks in the step in which they are taken.
        """
        pool = self._pool
        ages = pool.run_index.ages
        empty = bytes([EMPTY]) * num_blocks
        first = -1
        if after is not None and ages.startswith(empty, after.block_id + 1):
            first = after.block_id + 1
        elif num_blocks <= pool.free_block_queue.num_free_blocks:
            # Where nothing is evicted for it the lowest will do: found at once, and large runs are kept.
            first = ages.find(empty, self._start, self._start + _MAX_SCAN)
        if first >= 0:
            pool.take_listed_onto(onto, list(pool.blocks[first : first + num_blocks]))
            return True
        self._start = self._start + _MAX_SCAN - num_blocks if self._start + _MAX_SCAN < len(ages) else 0
        return self._holds_content() and pool.take_run_onto(onto, num_blocks, contiguous == "prefer")

    def _holds_content(self) -> bool:
        """May a free block be cached, or watched, so that a run of empty ones is not all there is?"""
        pool = self._pool
        return (
            len(pool.cached_block_hash_to_block) > 0
            or len(pool.reuse_watchers) > 0
            or (len(pool.blocks) > _MAX_SCAN)
        )

    def make_run(
        self, num_blocks: int, max_moves: int | None, contiguous: Contiguity, onto: list[KVCacheBlock]
    ) -> bool:
        """Move blocks out of the way of a run and take it; False, with nothing changed, if it takes more.

        Where a run is only preferred, no cached block of high priority is lost: it moves like one in use.

        Raises:
            CopyFailedError, or whatever else the copy raises: no block has moved.
        """
        pool = self._pool
        if self._on_moved is None:
            return False
        clearance = plan.plan_clear_run(pool, num_blocks, spares_kept=contiguous == "prefer")
        if clearance is None or (max_moves is not None and len(clearance.moves) > max_moves):
            return False
        compaction.apply_moves(pool, clearance.moves, self._copy, on_moved=self._on_moved)
        first = clearance.first_block_id
        run = list(pool.blocks[first : first + num_blocks])
        pool.take_listed_onto(onto, run)
        return True

    def may_clear(self, num_blocks: int) -> bool:
        """Could a run be made if enough were free: may blocks move, and do those that may not leave room?"""
        may_lie = bytearray([1]) * len(self._pool.blocks)
        may_lie[0] = 0
        for block_id in self._pool.holds.list_fixed_ids():
            may_lie[block_id] = 0
        return self.may_move and bytes([1]) * num_blocks in may_lie

    def has_run(self, num_blocks: int, freed_ids: Collection[int] = ()) -> bool:
        """Would there be a run if these blocks were free as well? O(number of blocks)."""
        is_free = bytearray(self._pool.run_index.ages.translate(bytes([0]) + bytes([1]) * 255))
        for block_id in freed_ids:
            is_free[block_id] = 1
        return bytes([1]) * num_blocks in is_free

    def pack(self, max_moves: int | None, max_evictions: int) -> int:
        """Bring the blocks in use to the lowest ids; how many blocks changed their id."""
        relocations = compaction.pack(
            self._pool,
            self._copy,
            max_moves=max_moves,
            max_evictions=max_evictions,
            on_moved=self._on_moved,
        )
        return sum(len(relocation.moves) for relocation in relocations)

    def gather(self, max_moves: int | None, max_evictions: int, run_length: int, goal: float) -> int:
        """Bring free blocks together until the fragmentation rate is `goal`; how many blocks were moved."""
        relocation = compaction.gather(
            self._pool,
            self._copy,
            run_length=run_length,
            goal=goal,
            max_moves=max_moves,
            max_evictions=max_evictions,
            on_moved=self._on_moved,
        )
        return len(relocation.moves)

    def shrink(self, num_blocks: int) -> None:
        """Cut off the highest ids after moving what is in use out of them."""
        compaction.shrink(self._pool, num_blocks, self._copy, on_moved=self._on_moved)
