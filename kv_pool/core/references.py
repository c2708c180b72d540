"""`BlockReferences`: allocate free blocks, and add references to blocks."""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import i64, mypyc_attr

from kv_pool.core.arguments import as_int, as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours, raise_not_queued, raise_typed
from kv_pool.core.caching import BlockCaching
from kv_pool.core.free_queue import BAND_END, FreeKVCacheBlockQueue
from kv_pool.core.freeing import free_all
from kv_pool.core.pool_state import CLEARING_LINKS, NOTHING, UNDO_TAKING_FIRST, UNDO_TOUCHING, PoolState
from kv_pool.core.taking import evict_taken, notify_watchers_of_next, take_listed
from kv_pool.errors import (
    CachePolicyError,
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    OutOfBlocksError,
)

MAX_REFERENCES: Final = 2**31 - 1
"""The maximum number of references to one block; the count has 32 bits."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockReferences(BlockCaching):
    """The part of `BlockPool` that allocates free blocks and touches cached blocks."""

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate the `num_blocks` free blocks that are next in eviction order.

        Returns:
            Distinct blocks in that order, each with ref_cnt 1 and no hash. Their KV slots still hold the
            last owner's bytes. `num_blocks` counts blocks, not tokens; 0 gives [].
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            Any exception of a reuse watcher; all blocks are back in the queue.
            CorruptedPoolError: a free block has references, or fewer blocks are linked than the queue
                counts. Nothing has changed.

        An allocated block that was cached is evicted: one `BlockRemoved` each. Touch prefix hits before
        calling this, or the hits themselves may be reused.
        Cost: O(num_blocks), whatever the size of the pool.
        Contract: vLLM 0.33 `BlockPool.get_new_blocks`.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        return BlockReferences.take_onto(self, None, num_blocks)

    def take_onto(self, onto: list[KVCacheBlock] | None, num_blocks: int) -> list[KVCacheBlock]:
        """Run `get_new_blocks`, and append the blocks to `onto` in the same step.

        If the caller is interrupted, `onto` contains exactly the references that it has to release.
        """
        if self._unfinished != NOTHING:
            self._recover()
        queue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise OutOfBlocksError(
                f"Cannot get {num_blocks} free blocks from the pool: asked for {num_blocks} blocks, "
                f"{queue.num_free_blocks} are free of {self.num_gpu_blocks - 1}. "
                "Free a request, or ask for fewer."
            )
        if num_blocks < 0:
            raise InvalidArgumentError(f"asked for {num_blocks} blocks; the count is 0 or more")
        host = self._policy_host
        if host is not None:
            host.order_victims(num_blocks)
        if self.reuse_watchers:
            notify_watchers_of_next(self, num_blocks)
            if host is not None:
                host.order_victims(num_blocks)  # a watcher may have taken blocks
        taken: list[KVCacheBlock] = []
        if num_blocks == 0:
            return taken
        num_free = queue.num_free_blocks
        head = queue.fake_free_list_head
        front = head  # the taken blocks follow it: the head, or the last band marker passed
        ends: list[tuple[int, KVCacheBlock]] | None = None  # see `PoolState._unfinished_ends`
        block = head.next_free_block
        any_cached = len(self.cached_block_hashes_by_block) > 0
        is_cut = False
        try:
            for _ in range(num_blocks):
                if block is None or block.ref_cnt != 0:
                    while block is not None and block.ref_cnt == BAND_END:
                        if ends is None:
                            ends = []
                        ends.append((len(taken), block))
                        front.next_free_block = block
                        block.prev_free_block = front
                        front = block
                        block = block.next_free_block
                    if block is None or block.ref_cnt != 0:
                        raise CorruptedPoolError(describe_bad_queue(queue, len(taken), block))
                taken.append(block)
                after = block.next_free_block
                if after is None:  # this is the tail
                    raise CorruptedPoolError(describe_bad_queue(queue, len(taken) - 1, block))
                # No call from here to the end of the iteration, so that `block` and `taken` stay consistent.
                block.prev_free_block = None
                block.next_free_block = None
                block.ref_cnt = 1
                block.generation += 1
                if block.key is not None:
                    any_cached = True
                block = after
            assert block is not None
            front.next_free_block = block
            block.prev_free_block = front
            queue.num_free_blocks = num_free - num_blocks
            is_cut = True
            if any_cached or self.metrics_collector is not None:
                evict_taken(self, taken, any_cached)
            if onto is not None:
                onto += taken
        except BaseException:
            if is_cut:
                self._unfinished_total = queue.num_free_blocks + num_blocks
            else:
                if taken and taken[-1] is block:
                    del taken[-1]  # appended but not yet unlinked
                following = block
                if following is None:
                    following = queue.fake_free_list_tail
                front.next_free_block = following
                following.prev_free_block = front
                self._unfinished_total = num_free
            if ends is not None:
                self._unfinished_ends = ends
            self._unfinished_blocks = taken
            self._unfinished_count = -1
            self._unfinished = UNDO_TAKING_FIRST
            self._recover()
            raise
        return taken

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Allocate these free blocks, wherever they are in the queue.

        As after `get_new_blocks`, each has ref_cnt 1 and no hash. Cached ones are evicted, in the given
        order.

        Raises:
            InvalidBlockError: a block is null, in use, listed twice, or of another pool. Nothing has changed.
            InvalidTypeError: an element is not a block. Nothing has changed.
            Any exception of a reuse watcher; the blocks are then at the front of the queue.
        Cost: O(len(blocks)), whatever the size of the pool.
        """
        take_listed(self, as_list("blocks", blocks), None)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block. A free block leaves the free queue and keeps its hash.

        Null blocks are skipped. A block that is listed twice gets two references.

        Raises:
            InvalidBlockError: a block is of another pool, or is a bare block with no references that is not
                in this pool's queue.
            InvalidTypeError: an element is not a block. In both cases nothing has changed.
        Cost: O(len(blocks)). Contract: vLLM 0.33 `BlockPool.touch`.
        """
        BlockReferences.touch_onto(self, as_list("blocks", blocks), None)

    def touch_onto(
        self, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None, is_access: bool = True
    ) -> None:
        """Run `touch`, and append the blocks to `onto` in the same step; see `take_onto`.

        Args:
            is_access: whether the observer is notified. False for a hold, which does not read the prefix.
        """
        if self._unfinished != NOTHING:
            self._recover()
        owner = self.block_owner
        num_taken: i64 = 0
        num_done: i64 = 0
        is_touched = False
        try:
            for block in listed:
                if block.owner is not owner:
                    check_foreign_block(self, block)
                if block.is_null:
                    num_done += 1
                    continue
                ref_cnt = block.ref_cnt
                if ref_cnt == 0:
                    before = block.prev_free_block
                    after = block.next_free_block
                    if before is None or after is None:
                        raise_not_queued(block)
                    # The block keeps its own links until all are done, so that an undo finds its position.
                    before.next_free_block = after
                    after.prev_free_block = before
                    num_taken += 1
                elif ref_cnt >= MAX_REFERENCES:
                    raise InvalidBlockError(
                        f"block {block.block_id} has {ref_cnt} references, which is the maximum"
                    )
                block.ref_cnt = ref_cnt + 1
                num_done += 1
            observer = self.metrics_collector
            if observer is not None and is_access:
                for block in listed:
                    if not block.is_null:
                        observer.on_block_accessed(block)
            if onto is not None:
                onto += listed
            is_touched = True
            if num_taken:
                self.free_block_queue.num_free_blocks -= num_taken
                for block in listed:
                    if block.next_free_block is not None:
                        block.prev_free_block = None
                        block.next_free_block = None
            if self._policy_host is not None:
                self._policy_host.note_touched(listed, is_access)
            if self._live_curve is not None and is_access:
                self._live_curve.note_touched(listed)
        except BaseException as error:
            self._unfinished_blocks = listed
            self._unfinished_count = num_done
            self._unfinished = CLEARING_LINKS if is_touched else UNDO_TOUCHING
            if isinstance(error, CachePolicyError):
                self._unfinished = NOTHING
                undo_touch(self, listed, onto)
            elif is_touched and self._policy_host is not None:
                self._policy_host.is_stale = True
            self._recover()
            raise_typed(error, listed, "touch()")


def undo_touch(pool: PoolState, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None) -> None:
    """Release the references of a complete touch. Blocks that are free again are the last to be reused."""
    if onto is not None:
        del onto[len(onto) - len(listed) :]
    if pool._policy_host is not None:
        free_all(pool, listed, False)
        pool._policy_host.recover()


def describe_bad_queue(queue: FreeKVCacheBlockQueue, num_linked: int, culprit: KVCacheBlock | None) -> str:
    """Return an error message about the element after the first `num_linked` blocks of the queue."""
    if culprit is None or culprit.ref_cnt == 0:
        return (
            f"num_free_blocks is {queue.num_free_blocks} but only {num_linked} blocks are linked: "
            "the counter is out of sync with the queue"
        )
    return (
        f"block {culprit.block_id} is in the free queue with ref_cnt {culprit.ref_cnt}; "
        "only touch() may reference a free block"
    )


def check_foreign_block(pool: PoolState, block: KVCacheBlock) -> None:
    """Raise unless `touch()` accepts this block, which is bare or of another pool.

    Accepted are null blocks, and bare blocks that are in use or in this pool's free queue.
    O(num_free_blocks) for a bare block with no references.
    """
    check_ours(block, pool.block_owner, "touch()")
    if block.owner is not None or block.ref_cnt or block.is_null:
        return
    if not any(free is block for free in pool.free_block_queue.iter_blocks_after(None)):
        raise_not_queued(block)
