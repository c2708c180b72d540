"""`Retention`: cached blocks of high priority are evicted after those of low priority."""

from collections.abc import Iterator
from contextlib import contextmanager

from kv_pool.contiguous.run_index import IN_USE
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.protocol import NORMAL, URGENT


class Retention:
    """Which free, cached blocks were freed by a sequence of high priority, and how to get at the others.

    The free queue knows no priorities. Before blocks are taken from its front, those that are worth more than
    others behind them go to its back: each as often as the queue turns over.
    """

    def __init__(self, pool: RunBlockPool) -> None:
        self._pool = pool
        self._priorities: dict[KVCacheBlock, int] = {}
        self._counts = [0] * (URGENT + 1)
        self._moving: list[KVCacheBlock] = []  # with a reference of ours

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def note_freed(self, blocks: list[KVCacheBlock], priority: int) -> None:
        """These blocks were given back by a sequence of that priority."""
        if self._priorities:
            self.note_taken(blocks)
        if priority != NORMAL:
            for block in blocks:
                if block.ref_cnt == 0 and block.block_hash is not None:
                    self._priorities[block] = priority
                    self._counts[priority] += 1

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        """These blocks are in use, or nobody can hit them any more."""
        if self._priorities:
            for block in blocks:
                priority = self._priorities.pop(block, None)
                if priority is not None:
                    self._counts[priority] -= 1

    def holds_any(self, blocks: list[KVCacheBlock]) -> bool:
        return any(block in self._priorities for block in blocks)

    @contextmanager
    def shown_as_in_use(self) -> Iterator[None]:
        """Meanwhile whoever looks for a run, or plans one, takes these blocks for some in use.

        Only looking is allowed meanwhile. O(blocks that are worth more).
        """
        ages = self._pool.run_index.ages
        kept = [
            (block.block_id, ages[block.block_id])
            for block in self._priorities
            if block.ref_cnt == 0 and block.block_hash is not None
        ]
        try:
            for block_id, _ in kept:
                ages[block_id] = IN_USE
            yield
        finally:
            for block_id, age in kept:
                ages[block_id] = age

    def list_ids(self) -> list[int]:
        """Ids of the cached blocks that are worth more than others, in no order."""
        return [block.block_id for block in self._priorities]

    def forget_from(self, block_id: int) -> None:
        """The blocks with this id or a higher one are no more."""
        self.note_taken([block for block in self._priorities if block.block_id >= block_id])

    def clear_front(self, num_blocks: int) -> None:
        """Let the next `num_blocks` in the free queue be those of least priority, of equal ones the next.

        O(num_blocks + blocks in front of them that are worth more).
        """
        queue = self._pool.free_block_queue
        quotas = []
        num_left = num_blocks
        for priority, count in enumerate(self._counts):
            num_free = queue.num_free_blocks - len(self._priorities) if priority == NORMAL else count
            quotas.append(max(0, min(num_left, num_free)))
            num_left -= quotas[-1]
        num_left = sum(quotas)
        worth_more: list[KVCacheBlock] = []
        for block in queue.iter_blocks_after(None):
            if num_left == 0:
                break
            priority = self._priorities.get(block, NORMAL)
            if quotas[priority]:
                quotas[priority] -= 1
                num_left -= 1
            else:
                worth_more.append(block)
        if num_left:
            # Blocks were taken or evicted behind our back, and counted here all the same.
            self.note_taken(
                [block for block in self._priorities if block.ref_cnt or block.block_hash is None]
            )
        if worth_more:
            # By the pool's own calls, so that whatever is derived from the queue follows.
            self._pool.touch_onto(worth_more, self._moving)
            self._pool.free_out_of(self._moving)

    def recover(self) -> None:
        """Complete an interrupted call: blocks on their way to the back of the queue, and counts."""
        self._pool.free_out_of(self._moving)
        self.note_taken([block for block in self._priorities if block.ref_cnt or block.block_hash is None])
        self._counts = [
            sum(one == priority for one in self._priorities.values()) for priority in range(URGENT + 1)
        ]
