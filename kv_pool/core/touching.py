"""Adding references: `touch`."""

from typing import Final

from mypy_extensions import i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours, raise_not_queued, raise_typed
from kv_pool.core.pool_state import CLEARING_LINKS, NOTHING, UNDO_TOUCHING, PoolState
from kv_pool.errors import InvalidBlockError

MAX_REFERENCES: Final = 2**31 - 1
"""The most references that one block can have; the count has 32 bits."""


def touch_all(pool: PoolState, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None) -> None:
    """See `BlockPool.touch`; appends the blocks to `onto` as well."""
    if pool._unfinished != NOTHING:
        pool._recover()
    owner = pool.block_owner
    num_taken: i64 = 0
    num_done: i64 = 0
    is_touched = False
    try:
        for block in listed:
            if block.owner is not owner:
                check_stranger(pool, block)
            if block.is_null:
                num_done += 1
                continue
            ref_cnt = block.ref_cnt
            if ref_cnt == 0:
                before = block.prev_free_block
                after = block.next_free_block
                if before is None or after is None:
                    raise_not_queued(block)
                # The block keeps its own links until all went well: they say where it belongs.
                before.next_free_block = after
                after.prev_free_block = before
                num_taken += 1
            elif ref_cnt >= MAX_REFERENCES:
                raise InvalidBlockError(
                    f"block {block.block_id} has {ref_cnt} references, the most that can be counted"
                )
            block.ref_cnt = ref_cnt + 1
            num_done += 1
        observer = pool.metrics_collector
        if observer is not None:
            for block in listed:
                if not block.is_null:
                    observer.on_block_accessed(block)
        if onto is not None:
            onto += listed
        is_touched = True
        if num_taken:
            pool.free_block_queue.num_free_blocks -= num_taken
            for block in listed:
                if block.next_free_block is not None:
                    block.prev_free_block = None
                    block.next_free_block = None
    except BaseException as error:
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = CLEARING_LINKS if is_touched else UNDO_TOUCHING
        pool._recover()
        raise_typed(error, listed, "touch()")


def check_stranger(pool: PoolState, block: KVCacheBlock) -> None:
    """Raise unless `touch()` may have this block of no pool or of another: null, in use, or free here.

    O(num_free_blocks) for a bare block that is free.
    """
    check_ours(block, pool.block_owner, "touch()")
    if block.owner is not None or block.ref_cnt or block.is_null:
        return
    if not any(free is block for free in pool.free_block_queue.iter_blocks_after(None)):
        raise_not_queued(block)
