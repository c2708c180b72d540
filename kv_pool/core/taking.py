"""Add references to blocks: take free blocks, which evicts their content, or touch cached ones.

Before free blocks are taken, the watchers of `unpin_blocks` are called, then the lower tiers.
"""

from itertools import islice
from typing import Any, Final, NoReturn

from mypy_extensions import i32, i64

from kv_pool.core.arguments import check_ours, raise_typed
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import evict, evict_all
from kv_pool.core.pool_part import BlockObserver, PoolPart
from kv_pool.core.pool_state import PoolState, check_whole
from kv_pool.errors import CorruptedPoolError, InvalidArgumentError, InvalidBlockError, OutOfBlocksError

MAX_REFERENCES: Final = 2**31 - 1
"""The maximum number of references to one block; the count has 32 bits."""


# ---- checks, which change nothing ------------------------------------------------------------------


def refuse_count(pool: PoolState, num_blocks: int) -> NoReturn:
    """Raise for a number of blocks that is negative, or more than are free."""
    if num_blocks < 0:
        raise InvalidArgumentError(f"asked for {num_blocks} blocks; the count is 0 or more")
    raise OutOfBlocksError(
        f"Cannot get {num_blocks} free blocks from the pool: asked for {num_blocks} blocks, "
        f"{pool.free_block_queue.num_free_blocks} are free of {pool.num_gpu_blocks - 1}. Free a request, or "
        "ask for fewer."
    )


def check_takeable(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Raise unless these are distinct free blocks of the pool."""
    owner = pool.block_owner
    try:
        for block in listed:
            if block.owner is not owner or block.is_null or block.next_free_block is None:
                raise_not_takeable(block, owner)
        if len(set(listed)) < len(listed):
            raise_not_takeable(next(block for block in listed if listed.count(block) > 1), owner)
    except Exception as error:
        raise_typed(error, listed, "take_blocks()")


def raise_not_takeable(block: KVCacheBlock, owner: Any) -> NoReturn:
    """Raise the error for a block that `take_blocks` rejects."""
    if block.owner is not owner or block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; "
            "take_blocks() takes free blocks of the pool"
        )
    raise InvalidBlockError(
        f"block {block.block_id} is in use, or listed twice; take_blocks() takes free blocks"
    )


def check_unusual(pool: PoolState, block: KVCacheBlock) -> None:
    """Raise unless `touch` accepts a bare block, one of another pool, or one with many references.

    Bare blocks are accepted if they are null, in use or in the pool's queue: O(free blocks) for the last.
    """
    check_ours(block, pool.block_owner, "touch()")
    is_free = block.ref_cnt == 0 and not block.is_null
    if is_free and all(one is not block for one in pool.free_block_queue.iter_blocks_after(None)):
        raise_not_queued(block)
    if block.ref_cnt == MAX_REFERENCES:
        raise InvalidBlockError(
            f"block {block.block_id} has {block.ref_cnt} references; the maximum is {MAX_REFERENCES}"
        )


def raise_not_queued(block: KVCacheBlock) -> NoReturn:
    """Raise the error for a block with ref_cnt 0 that is not in the free queue."""
    raise InvalidBlockError(
        f"block {block.block_id} has ref_cnt 0 but is not in this pool's queue: {block!r}"
    )


# ---- changes ---------------------------------------------------------------------------------------


def take(pool: PoolState, num_blocks: int, after: KVCacheBlock | None = None) -> list[KVCacheBlock]:
    """Take blocks as `get_new_blocks` does, as part of a larger call. At least as many are free.

    Args:
        after: a pool that prefers runs takes the ids after that of this block if it can.
    """
    # A function, as all parts of calls are: compiled, a method of a `BlockPool` is called as Python calls it.
    if num_blocks > pool.free_block_queue.num_free_blocks:
        refuse_count(pool, num_blocks)  # a watcher has taken what an earlier check has counted
    index = pool.free_index
    if index is not None:
        chosen = index.take(pool, after, num_blocks)
        if chosen is not None:
            return chosen
    was_changing = pool.is_changing
    pool.is_changing = True
    for part in pool.parts:
        part.order_victims(num_blocks)
    pool.is_changing = was_changing
    if pool.reuse_watchers or pool.lower_tiers is not None:
        first = islice(pool.free_block_queue.iter_blocks_after(None), num_blocks)
        notify_before(pool, list(first))  # a watcher may take blocks, but not these: they stay at the front
    pool.is_changing = True
    taken = pool.free_block_queue.popleft_n(num_blocks)
    mark_taken(pool, taken, None)
    pool.is_changing = was_changing
    return taken


def take_listed(pool: PoolState, listed: list[KVCacheBlock], informed: PoolPart | None = None) -> None:
    """Take these distinct free blocks, wherever they are in the queue.

    Args:
        informed: a part that has chosen the blocks, and noted already that they are taken.
    """
    was_changing = pool.is_changing
    if pool.reuse_watchers or pool.lower_tiers is not None:
        notify_before(pool, listed)
    pool.is_changing = True
    pool.free_block_queue.remove_n(listed)
    mark_taken(pool, listed, informed)
    pool.is_changing = was_changing


def mark_taken(pool: PoolState, taken: list[KVCacheBlock], informed: PoolPart | None) -> None:
    """Give blocks that have left the queue their first reference, evict their content, and inform the parts.

    Args:
        informed: see `take_listed`.
    """
    any_cached = len(pool.cached_block_hashes_by_block) > 0
    num_references: i32 = 1 if pool.metrics_collector is None else 0  # an observer sees each block get it
    for block in taken:
        if block.ref_cnt != 0:
            raise CorruptedPoolError(
                f"block {block.block_id} was in the free queue with ref_cnt {block.ref_cnt}; only touch() "
                "may reference a free block. Call repair()"
            )
        block.ref_cnt = num_references
        block.generation += 1
        if block.key is not None:
            any_cached = True
    if pool.metrics_collector is not None:
        evict_observed(pool, taken, pool.metrics_collector)
    elif any_cached and pool.enable_caching:
        evict_all(pool, taken)
    for part in pool.parts:
        if part is not informed:
            part.note_taken(taken)


def evict_observed(pool: PoolState, taken: list[KVCacheBlock], observer: BlockObserver) -> None:
    """Evict and reference blocks one by one, in the order of calls that the observer expects."""
    for block in taken:
        if pool.enable_caching:
            observer.on_block_evicted(block)
            evict(pool, block)
        block.ref_cnt = 1
        observer.on_block_allocated(block)


def touch_listed(pool: PoolState, listed: list[KVCacheBlock], is_access: bool = True) -> None:
    """Implement `BlockPool.touch`.

    Args:
        is_access: False for a hold, which does not read the prefix: it is no hit.
    """
    was_changing = pool.is_changing
    pool.is_changing = True
    num_free = count_up(pool, listed, was_changing)
    if num_free > 0:
        pool.free_block_queue.remove_n(listed)
    for part in pool.parts:
        part.note_touched(listed, num_free, is_access)
    pool.is_changing = was_changing
    if is_access and pool.metrics_collector is not None:
        for block in listed:
            if not block.is_null:
                pool.metrics_collector.on_block_accessed(block)


def count_up(pool: PoolState, listed: list[KVCacheBlock], was_changing: bool) -> i64:
    """Add one reference to each block, and return how many were free; null blocks do not count.

    Raises:
        As `touch`. Nothing has changed.
    """
    owner = pool.block_owner
    num_done: i64 = 0
    num_free: i64 = 0
    try:
        for block in listed:
            references = block.ref_cnt
            if block.owner is not owner or references == MAX_REFERENCES:
                check_unusual(pool, block)
            if not block.is_null:
                if references == 0:
                    if block.next_free_block is None:
                        raise_not_queued(block)
                    num_free += 1
                block.ref_cnt = references + 1
            num_done += 1
    except Exception as error:
        for block in listed[:num_done]:
            if not block.is_null:
                block.ref_cnt -= 1
        pool.is_changing = was_changing
        raise_typed(error, listed, "touch()")
    return num_free


# ---- calls before a change -----------------------------------------------------------------------


def notify_before(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Notify the reuse watchers, then the lower tiers, that these free blocks are about to be taken."""
    if pool.reuse_watchers:
        notify_watchers_off_queue(pool, listed)
    if pool.lower_tiers is not None and pool.enable_caching:
        cached = [block for block in listed if block.key is not None]
        if cached:
            pool.lower_tiers.on_blocks_reused(cached)


def notify_watchers_off_queue(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these free blocks, in order.

    During the calls the blocks are not in the queue, so that a watcher may use the pool. Afterwards they are
    at its front, even if a watcher raises.
    """
    was_changing = pool.is_changing
    pool.is_changing = True
    queue = pool.free_block_queue
    queue.remove_n(listed)
    for part in pool.parts:
        part.note_taken(listed)
    pool.is_changing = False
    is_told = False
    try:
        notify_watchers(pool, listed)
        is_told = True
    finally:
        was_interrupted = pool.is_changing  # a call of a watcher
        pool.is_changing = True
        queue.prepend_n(listed)
        for part in pool.parts:
            if is_told:
                part.note_relinked(listed)
            else:
                part.rebuild_from(pool)
        pool.is_changing = was_changing or was_interrupted


def notify_watchers(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these blocks, in order, and remove the watchers.

    Raises:
        PoolInterruptedError: a watcher's call of the pool was interrupted, and the watcher caught that.
    """
    for block in blocks:
        watcher = pool.reuse_watchers.get(block.block_id)
        if watcher is not None:
            del pool.reuse_watchers[block.block_id]
            watcher.on_reuse(block)
            check_whole(pool)
