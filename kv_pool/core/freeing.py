"""Drop references to blocks: `free_blocks`, `unpin_blocks`."""

from collections.abc import Callable, Iterable
from typing import Any

from mypy_extensions import i64

from kv_pool.core.arguments import as_list, check_ours, raise_typed, refuse_interrupted
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_state import PoolState, ReuseWatcher
from kv_pool.errors import InvalidBlockError, InvalidTypeError


def free_listed(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Implement `BlockPool.free_blocks`."""
    was_changing = pool.is_changing
    pool.is_changing = True
    by_pool = free_ours(pool, listed, was_changing)
    for part in pool.parts:
        part.note_freed(listed, False)
    pool.is_changing = was_changing
    if by_pool is not None:
        for other, theirs in by_pool:
            other.free_blocks(theirs)


def free_ours(
    pool: PoolState, listed: list[KVCacheBlock], was_changing: bool
) -> list[tuple[Any, list[KVCacheBlock]]] | None:
    """Drop one reference of each block of the pool, and put those without references into the queue.

    Blocks without a key, or all with caching off, go to its front, the others to its back. The loop links two
    chains, which enter the queue when all blocks have passed the checks.

    Returns:
        The blocks of other pools with their pools, whose references do not change; None for none.
    Raises:
        As `free_blocks`. Nothing has changed.
    """
    owner = pool.block_owner
    caching = pool.enable_caching
    front_first: KVCacheBlock | None = None
    front_last: KVCacheBlock | None = None
    back_first: KVCacheBlock | None = None
    back_last: KVCacheBlock | None = None
    num_front: i64 = 0
    num_back: i64 = 0
    num_done: i64 = 0
    by_pool: list[tuple[Any, list[KVCacheBlock]]] | None = None
    try:
        for block in listed:
            if block.owner is not owner and block.owner is not None:
                if by_pool is None and not block.is_null:
                    by_pool = group_foreign(pool, listed)
            elif not block.is_null:
                left = block.ref_cnt - 1
                if left < 0 and block.owner is owner:
                    raise InvalidBlockError(
                        f"block {block.block_id} is free; free_blocks() takes blocks that are in use. "
                        "Was it freed twice?"
                    )
                block.ref_cnt = left
                if left == 0:
                    if block.key is None or not caching:
                        if front_last is None:
                            front_first = block
                        else:
                            front_last.next_free_block = block
                            block.prev_free_block = front_last
                        front_last = block
                        num_front += 1
                    else:
                        if back_last is None:
                            back_first = block
                        else:
                            back_last.next_free_block = block
                            block.prev_free_block = back_last
                        back_last = block
                        num_back += 1
            num_done += 1
        pool.free_block_queue.splice(front_first, front_last, num_front, back_first, back_last, num_back)
        return by_pool
    except Exception as error:
        for block in listed[:num_done]:
            if not block.is_null and (block.owner is owner or block.owner is None):
                if block.ref_cnt == 0:
                    block.prev_free_block = None
                    block.next_free_block = None
                block.ref_cnt += 1
        pool.is_changing = was_changing
        raise_typed(error, listed, "free_blocks(ordered_blocks)")


def group_foreign(own: PoolState, listed: list[KVCacheBlock]) -> list[tuple[Any, list[KVCacheBlock]]]:
    """Group the blocks of other pools by pool, in order of appearance. Raise if one may not be freed."""
    by_pool: dict[int, tuple[Any, list[KVCacheBlock]]] = {}
    references: dict[int, int] = {}
    for block in listed:
        if block.owner is own.block_owner or block.owner is None or block.is_null:
            continue
        pool = block.owner()
        if pool is None:
            raise InvalidBlockError(f"block {block.block_id} belongs to a pool that was deleted")
        if pool is own:
            raise InvalidBlockError(
                f"block {block.block_id} is of this pool, but its owner is not the pool's block_owner; do "
                "not assign either of them"
            )
        if pool.is_changing:
            refuse_interrupted()
        left = references.get(id(block), block.ref_cnt) - 1
        if left < 0:
            raise InvalidBlockError(
                f"block {block.block_id} of another pool is free; free_blocks() takes blocks that are in "
                "use. Was it freed twice?"
            )
        references[id(block)] = left
        by_pool.setdefault(id(pool), (pool, []))[1].append(block)
    return list(by_pool.values())


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
