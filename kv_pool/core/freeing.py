"""Drop references to blocks: `free_blocks`, `unpin_blocks`."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from mypy_extensions import i32, i64

from kv_pool.core.arguments import as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours, raise_typed
from kv_pool.core.eviction_order import NumberedBlocks
from kv_pool.core.pool_state import NOTHING, UNDO_FREEING, WATCHING, PoolState, ReuseWatcher
from kv_pool.errors import InvalidBlockError, InvalidTypeError, KVPoolError

_NO_NUMBER: Final = -(2**31)


def free_all(
    pool: PoolState, listed: list[KVCacheBlock], empties: bool, numbered: NumberedBlocks | None = None
) -> None:
    """Implement `BlockPool.free_blocks`.

    Args:
        empties: clear `listed` in the same step.
        numbered: collects the freed blocks that have a `retention_id`, if given.
    """
    if pool._unfinished != NOTHING:
        pool._recover()
    owner = pool.block_owner
    caching = pool.enable_caching
    # The loop links two chains; they are spliced into the queue after all blocks have passed the checks.
    front_first: KVCacheBlock | None = None
    front_last: KVCacheBlock | None = None
    back_first: KVCacheBlock | None = None
    back_last: KVCacheBlock | None = None
    num_front: i64 = 0
    num_back: i64 = 0
    foreign: list[KVCacheBlock] | None = None
    by_pool: dict[int, tuple[Any, list[KVCacheBlock]]] | None = None
    num_done: i64 = 0
    # `retention_id` of the previous block if that went to the back of the queue.
    number: i32 = 0
    is_freed = False
    try:
        for block in listed:
            if block.is_null:
                num_done += 1
                number = _NO_NUMBER
                continue
            if block.owner is not owner and block.owner is not None:
                if foreign is None:
                    foreign = []
                foreign.append(block)
                num_done += 1
                number = _NO_NUMBER
                continue
            ref_cnt = block.ref_cnt - 1
            if ref_cnt != 0:
                if ref_cnt < 0 and block.owner is not None:
                    raise InvalidBlockError(
                        f"block {block.block_id} is free; free_blocks() takes blocks that are in use. "
                        "Was it freed twice?"
                    )
                block.ref_cnt = ref_cnt
                num_done += 1
                number = _NO_NUMBER
                continue
            block.ref_cnt = 0
            num_done += 1
            if block.key is None or not caching:
                if front_last is None:
                    front_first = block
                else:
                    front_last.next_free_block = block
                    block.prev_free_block = front_last
                front_last = block
                num_front += 1
                continue
            if block.retention_id != number:
                number = block.retention_id
                if numbered is not None:
                    numbered.begin_stretch(num_done - 1, num_back, num_front)
            if back_last is None:
                back_first = block
            else:
                back_last.next_free_block = block
                block.prev_free_block = back_last
            back_last = block
            num_back += 1
        if numbered is not None:
            numbered.cut(listed, num_back, num_front, front_first)
        if foreign is not None:
            by_pool = group_by_pool(pool, foreign)
        pool.free_block_queue.splice(front_first, front_last, num_front, back_first, back_last, num_back)
        is_freed = True
        if empties:
            listed.clear()
    except BaseException as error:
        if is_freed:
            if empties:
                listed.clear()
            raise
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = UNDO_FREEING
        pool._recover()
        raise_typed(error, listed, "free_blocks(ordered_blocks)")
    if by_pool is not None:
        for other, theirs in by_pool.values():
            other.free_blocks(theirs)


def free_and_place(pool: PoolState, listed: list[KVCacheBlock], empties: bool) -> None:
    """Run `free_all`, then let the pool's band policy move the blocks to their bands."""
    policy = pool._band_policy
    assert policy is not None
    try:
        if policy.reads_numbers:
            numbered = NumberedBlocks()
            free_all(pool, listed, empties, numbered)
            if numbered.stretches or numbered.without_content:
                policy.place_numbered(numbered)
        else:
            freed = listed.copy()
            free_all(pool, listed, empties)
            policy.place(freed)
    except BaseException as error:
        host = pool._policy_host
        if host is not None:
            host.is_stale = True  # before any call, which may be interrupted
        if not isinstance(error, KVPoolError):
            policy.recover()
        raise


def unpin_and_place(
    pool: PoolState, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
) -> None:
    """Run `unpin_all`, then let the pool's band policy move the blocks to their bands."""
    policy = pool._band_policy
    listed = list(as_list("blocks", blocks))
    assert policy is not None
    try:
        unpin_all(pool, listed, on_reuse)
        policy.place_unpinned(listed)
    except BaseException as error:
        host = pool._policy_host
        if host is not None:
            host.is_stale = True  # before any call, which may be interrupted
        if not isinstance(error, KVPoolError):
            policy.recover()
        raise


def unpin_all(
    pool: PoolState, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
) -> None:
    """Implement `BlockPool.unpin_blocks`."""
    if not callable(on_reuse):
        raise InvalidTypeError(f"on_reuse is a {type(on_reuse).__name__}; expected a callable")
    if pool._unfinished != NOTHING:
        pool._recover()
    owner = pool.block_owner
    queue = pool.free_block_queue
    listed: list[KVCacheBlock] = list(as_list("blocks", blocks))
    watcher = ReuseWatcher(on_reuse, pool.holds.clock())
    first: KVCacheBlock | None = None
    last: KVCacheBlock | None = None
    num_freed: i64 = 0
    num_done: i64 = 0
    is_freed = False
    try:
        for block in listed:
            check_ours(block, owner, "unpin_blocks()")
            if block.is_null or block.ref_cnt < 1:
                raise InvalidBlockError(
                    f"block {block.block_id} is {'the null block' if block.is_null else 'free'}; "
                    "unpin_blocks() takes blocks that are in use"
                )
            block.ref_cnt -= 1
            num_done += 1
            if block.ref_cnt == 0:
                if last is None:
                    first = block
                else:
                    last.next_free_block = block
                    block.prev_free_block = last
                last = block
                num_freed += 1
        queue.splice(None, None, 0, first, last, num_freed)
        is_freed = True
        watchers = pool.reuse_watchers
        for block in listed:
            watchers[block.block_id] = watcher
    except BaseException as error:
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished_watcher = watcher
        pool._unfinished = WATCHING if is_freed else UNDO_FREEING
        pool._recover()
        raise_typed(error, listed, "unpin_blocks()")


def group_by_pool(own: PoolState, blocks: list[KVCacheBlock]) -> dict[int, tuple[Any, list[KVCacheBlock]]]:
    """Group blocks of other pools by pool, in order of appearance. Raise if one may not be freed."""
    by_pool: dict[int, tuple[Any, list[KVCacheBlock]]] = {}
    references: dict[int, int] = {}
    for block in blocks:
        pool = block.owner()
        if pool is None:
            raise InvalidBlockError(f"block {block.block_id} belongs to a pool that was deleted")
        if pool is own:
            raise InvalidBlockError(
                f"block {block.block_id} is of this pool, but its owner is not the pool's block_owner; do "
                "not assign either of them"
            )
        left = references.get(id(block), block.ref_cnt) - 1
        if left < 0:
            raise InvalidBlockError(
                f"block {block.block_id} of another pool is free; free_blocks() takes blocks that are in "
                "use. Was it freed twice?"
            )
        references[id(block)] = left
        by_pool.setdefault(id(pool), (pool, []))[1].append(block)
    return by_pool
