"""Swap the ids of blocks after their bytes have been moved; check whether blocks can be moved."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from mypy_extensions import i32

from kv_pool.core.arguments import as_int, as_list, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_state import PoolState
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId, BlockId


def check_pairs(pool: PoolState, pairs: list[tuple[BlockId, BlockId]]) -> None:
    """Raise for ids that `swap_block_ids` refuses."""
    ids = list(chain.from_iterable(pairs))
    if len(set(ids)) < len(ids):
        raise InvalidBlockError("swap_block_ids() takes distinct ids, each listed once")
    if ids:
        check_places(pool, ids)


def check_places(pool: PoolState, ids: list[BlockId]) -> None:
    """Check C3 of `contiguous/invariants.py`. Raises InvalidBlockError."""
    if min(ids) < 1 or max(ids) >= len(pool.blocks):
        wrong = min(ids) if min(ids) < 1 else max(ids)
        raise InvalidBlockError(
            f"C3: block {wrong} cannot move: it is the null block, or outside 1..{len(pool.blocks) - 1}"
        )
    pool.holds.check_movable(set(ids))


def check_sources(pool: PoolState, ids: list[BlockId]) -> None:
    """Check C2 of `contiguous/invariants.py` for blocks that move. Raises InvalidBlockError."""
    for block_id in ids:
        block = pool.blocks[block_id]
        if block.ref_cnt == 0 and block.key is None:
            raise InvalidBlockError(f"C2: block {block_id} is neither in use nor cached: nothing to move")


def find_targets(pool: PoolState, ids: list[BlockId]) -> list[KVCacheBlock]:
    """Return the blocks that moves overwrite. Raises InvalidBlockError: C2, one of them is in use."""
    targets = [pool.blocks[block_id] for block_id in ids]
    for block in targets:
        if block.ref_cnt != 0:
            raise InvalidBlockError(f"C2: block {block.block_id} is in use and cannot be overwritten")
    return targets


def swap_ids(pool: PoolState, pairs: list[tuple[BlockId, BlockId]]) -> None:
    """Swap the ids of each pair, which are distinct and those of blocks that may move."""
    if pool.metrics_collector is not None:
        pool.metrics_collector.on_ids_swapped(pairs)
    was_changing = pool.is_changing
    pool.is_changing = True
    old = pool.blocks
    new = list(old)
    any_cached = False
    any_keyed_by_id = len(pool.cached_block_hashes_by_block) > 0
    for first_id, second_id in pairs:
        first = old[first_id]
        second = old[second_id]
        new[first_id] = second
        new[second_id] = first
        if first.key is not None or second.key is not None:
            any_cached = True
            if first._next_cached_id < 0 or second._next_cached_id < 0:
                any_keyed_by_id = True
    if any_keyed_by_id and any_cached:
        new_ids = dict(pairs)
        new_ids.update([(second_id, first_id) for first_id, second_id in pairs])
        rekey(pool, [old[block_id] for block_id in new_ids], new_ids)
    for first_id, second_id in pairs:
        new[first_id].block_id = first_id
        new[second_id].block_id = second_id
    if any_cached:
        update_successors(old)
    pool.blocks = tuple(new)
    pool.epoch += 1
    for part in pool.parts:
        part.note_swapped(pairs)
    pool.is_changing = was_changing


def rekey(pool: PoolState, moved: list[KVCacheBlock], new_ids: dict[BlockId, BlockId]) -> None:
    """Key by their new ids what is keyed by block id: secondary keys, and entries of several blocks.

    The order stays, because a lookup returns the oldest block. The blocks still have their old ids.
    """
    secondary = pool.cached_block_hashes_by_block
    entries = pool.cached_block_hash_to_block._cache
    changed: dict[BlockHashWithGroupId, dict[BlockId, KVCacheBlock]] = {}
    for block in moved:
        if block.key is None or (block._next_cached_id >= 0 and not secondary):
            continue
        keys: list[Any] = [block.key]
        keys.extend(secondary.get(block.block_id, ()))
        for key in keys:
            copies = entries.get(key)
            if isinstance(copies, dict) and key not in changed:
                changed[key] = {new_ids.get(copy.block_id, copy.block_id): copy for copy in copies.values()}
    for key, copies in changed.items():
        entries[key] = copies
    if secondary:
        pool.cached_block_hashes_by_block = {
            new_ids.get(block_id, block_id): keys for block_id, keys in secondary.items()
        }


def update_successors(old: tuple[KVCacheBlock, ...]) -> None:
    """Update each `_next_cached_id` whose block has another id now.

    Args:
        old: the blocks, indexed by their old ids.
    """
    num_blocks: i32 = len(old)
    for block in old:
        next_id = block._next_cached_id
        if 0 < next_id < num_blocks:
            block._next_cached_id = old[next_id].block_id


def as_pairs(pairs: Sequence[tuple[BlockId, BlockId]]) -> list[tuple[BlockId, BlockId]]:
    """Return pairs of ids as a list of pairs of ints.

    Raises:
        InvalidTypeError: an element is not a pair of integers.
    """
    checked: list[Any] = []
    for position, pair in enumerate(as_list("pairs", pairs)):
        name = f"pairs[{position}]"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            refuse_type(name, pair, "a pair of int")
        checked.append((as_int(name, pair[0]), as_int(name, pair[1])))
    return checked
