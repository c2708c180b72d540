"""The calls before blocks are reused: to the watchers of `unpin_blocks`, then to the lower tiers."""

from collections.abc import Callable, Iterable

from kv_pool.core.arguments import as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours, raise_typed
from kv_pool.core.pool_state import PoolState, ReuseWatcher
from kv_pool.errors import InvalidBlockError, InvalidTypeError


def unpin_listed(
    pool: PoolState, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
) -> None:
    """Implement `BlockPool.unpin_blocks`."""
    if not callable(on_reuse):
        raise InvalidTypeError(f"on_reuse is a {type(on_reuse).__name__}; expected a callable")
    listed: list[KVCacheBlock] = list(as_list("blocks", blocks))
    check_unpinnable(pool, listed)
    was_changing = pool.is_changing
    pool.is_changing = True
    watcher = ReuseWatcher(on_reuse, pool.holds.clock())
    freed: list[KVCacheBlock] = []
    for block in listed:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            freed.append(block)
        pool.reuse_watchers[block.block_id] = watcher
    pool.free_block_queue.append_n(freed)
    for part in pool.parts:
        part.note_freed(listed, True)
    pool.is_changing = was_changing


def check_unpinnable(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Raise unless each of these blocks has as many references as it is listed."""
    references: dict[KVCacheBlock, int] = {}
    try:
        for block in listed:
            check_ours(block, pool.block_owner, "unpin_blocks()")
            left = references.get(block, block.ref_cnt)
            if block.is_null or left < 1:
                raise InvalidBlockError(
                    f"block {block.block_id} is {'the null block' if block.is_null else 'free'}; "
                    "unpin_blocks() takes blocks that are in use"
                )
            references[block] = left - 1
    except Exception as error:
        raise_typed(error, listed, "unpin_blocks()")


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
        part.note_unlinked(listed)
    pool.is_changing = False
    is_told = False
    try:
        notify_watchers(pool, listed)
        is_told = True
    finally:
        pool.is_changing = True
        queue.prepend_n(listed)
        for part in pool.parts:
            if is_told:
                part.note_relinked(listed)
            else:
                part.rebuild_from(pool)
        pool.is_changing = was_changing


def notify_watchers(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these blocks, in order, and remove the watchers."""
    for block in blocks:
        watcher = pool.reuse_watchers.get(block.block_id)
        if watcher is not None:
            del pool.reuse_watchers[block.block_id]
            watcher.on_reuse(block)
