"""Swap the ids of blocks after their bytes have been moved."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import i32

from kv_pool.core.arguments import as_int, as_list, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_state import NOTHING, SWAPPING_IDS, IdSwap, PoolState, finish
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId, BlockId


def swap_ids(pool: PoolState, pairs: list[tuple[BlockId, BlockId]]) -> None:
    """Implement `BlockPool.swap_block_ids`."""
    if pool._unfinished != NOTHING:
        pool._recover()
    if pool.holds.list_immovable_ids():
        pool.holds.check_movable({block_id for pair in pairs for block_id in pair})
    old = pool.blocks
    num_blocks = len(old)
    new = list(old)
    any_cached = False
    any_keyed_by_id = len(pool.cached_block_hashes_by_block) > 0
    is_wrong = False
    for first_id, second_id in pairs:
        # If the block at an id has changed, the id was listed before.
        if not (0 < first_id < num_blocks and 0 < second_id < num_blocks) or first_id == second_id:
            is_wrong = True
            break
        first = old[first_id]
        second = old[second_id]
        if new[first_id] is not first or new[second_id] is not second:
            is_wrong = True
            break
        new[first_id] = second
        new[second_id] = first
        if first.key is not None or second.key is not None:
            any_cached = True
            if first._next_cached_id < 0 or second._next_cached_id < 0:
                any_keyed_by_id = True
    if is_wrong:
        raise InvalidBlockError(
            f"swap_block_ids() takes distinct ids of 1..{num_blocks - 1}, each listed once"
        )
    # Compute everything but the successors before anything changes; `_recover` then applies it.
    swap = IdSwap(tuple(new), list(pairs), any_cached)
    new_ids: dict[BlockId, BlockId] = {}
    if any_keyed_by_id:
        new_ids.update(pairs)
        new_ids.update([(second_id, first_id) for first_id, second_id in pairs])
        if any_cached:
            moved = [old[block_id] for block_id in new_ids]
            swap.secondary, swap.copies = plan_rekeying(pool, moved, new_ids)
    pool._unfinished_swap = swap
    pool._unfinished = SWAPPING_IDS
    finish(pool)


def put_ids(pool: PoolState) -> None:
    """Apply the prepared id swap. Idempotent: after an interrupt it runs again."""
    swap = pool._unfinished_swap
    assert swap is not None
    entries = pool.cached_block_hash_to_block._cache
    for first_id, second_id in swap.pairs:
        swap.blocks[first_id].block_id = first_id
        swap.blocks[second_id].block_id = second_id
    for key, copies in swap.copies:
        entries[key] = copies
    if swap.any_cached:
        if swap.successors is None:
            swap.successors = find_moved_successors(pool.blocks)
        for index in range(0, len(swap.successors), 2):
            swap.successors[index]._next_cached_id = swap.successors[index + 1].block_id
    if swap.secondary is not None:
        pool.cached_block_hashes_by_block = swap.secondary
    pool.blocks = swap.blocks
    pool.epoch += 1
    pool._unfinished = NOTHING
    pool._unfinished_swap = None


def plan_rekeying(
    pool: PoolState, moved: list[KVCacheBlock], new_ids: dict[BlockId, BlockId]
) -> tuple[
    dict[BlockId, dict[BlockHashWithGroupId, None]] | None,
    list[tuple[BlockHashWithGroupId, dict[BlockId, KVCacheBlock]]],
]:
    """Return the state that is keyed by block id, rekeyed to the new ids. Changes nothing.

    Returns:
        Secondary keys by block id, or None if there are none; and the prefix map's entries that are dicts
        keyed by block id. Their order is preserved, because a lookup returns the oldest block.
    """
    secondary: dict[BlockId, dict[BlockHashWithGroupId, None]] | None = None
    if pool.cached_block_hashes_by_block:
        secondary = {
            new_ids.get(block_id, block_id): keys
            for block_id, keys in pool.cached_block_hashes_by_block.items()
        }
    entries = pool.cached_block_hash_to_block._cache
    changed: dict[BlockHashWithGroupId, dict[BlockId, KVCacheBlock]] = {}
    for block in moved:
        if block.key is None or (block._next_cached_id >= 0 and secondary is None):
            continue
        keys: list[Any] = [block.key]
        if secondary is not None:
            keys.extend(pool.cached_block_hashes_by_block.get(block.block_id, ()))
        for key in keys:
            copies = entries.get(key)
            if isinstance(copies, dict) and key not in changed:
                changed[key] = {new_ids.get(copy.block_id, copy.block_id): copy for copy in copies.values()}
    return secondary, list(changed.items())


def find_moved_successors(old: tuple[KVCacheBlock, ...]) -> list[KVCacheBlock]:
    """Return each block whose `_next_cached_id` is outdated, followed by its successor, as one flat list.

    Args:
        old: the blocks, indexed by their old ids.
    """
    num_blocks: i32 = len(old)
    found: list[KVCacheBlock] = []  # flat, because a tuple per pair would cost more than the search
    for block in old:
        next_id = block._next_cached_id
        if 0 < next_id < num_blocks:
            successor = old[next_id]
            if successor.block_id != next_id:
                found.append(block)
                found.append(successor)
    return found


def as_pairs(pairs: Sequence[tuple[BlockId, BlockId]]) -> list[tuple[BlockId, BlockId]]:
    """Return pairs of ids as a list of pairs of ints; such a list is returned as it is.

    Raises:
        InvalidTypeError: an element is not a pair of integers.
    """
    listed = as_list("pairs", pairs)
    checked: list[Any] = listed
    for position, pair in enumerate(listed):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            refuse_type(f"pairs[{position}]", pair, "a pair of int")
        if isinstance(pair, tuple) and isinstance(pair[0], int) and isinstance(pair[1], int):
            continue
        if checked is listed:
            checked = listed.copy()
        checked[position] = (
            as_int(f"pairs[{position}]", pair[0]),
            as_int(f"pairs[{position}]", pair[1]),
        )
    return checked
