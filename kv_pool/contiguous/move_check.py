"""`check_moves`: checks a plan of moves before it is applied."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId, BlockMove


class CheckedMoves(NamedTuple):
    """A plan that passed the checks.

    Attributes:
        one_way: moves to blocks whose content may be overwritten.
        exchanges: the move to the free, cached block of each exchange; the reverse move is left out.
        overwritten: targets of `one_way` that are cached and will be evicted.
    """

    one_way: list[BlockMove]
    exchanges: list[BlockMove]
    overwritten: list[BlockId]


def check_moves(pool: BlockPoolCore, moves: Sequence[BlockMove]) -> CheckedMoves:
    """Check C1, C2 and C3 of `contiguous/invariants.py`.

    Raises:
        InvalidArgumentError: C1. InvalidBlockError: C2 or C3. Nothing has changed.
    """
    blocks = pool.blocks
    ids: list[BlockId] = list(chain.from_iterable(moves))
    checked = CheckedMoves([], [], [])
    if not ids:
        return checked
    chosen = set(ids)
    if len(chosen) == len(ids):
        checked.one_way.extend(moves)
    else:
        _split(moves, checked)
    if min(ids) < 1 or max(ids) >= len(blocks):
        wrong = min(ids) if min(ids) < 1 else max(ids)
        raise InvalidBlockError(
            f"C3: block {wrong} cannot move: it is the null block, or outside 1..{len(blocks) - 1}"
        )
    pool.holds.check_movable(chosen)
    for source, target in checked.one_way:
        _check_content(blocks[source])
        block = blocks[target]
        if block.ref_cnt != 0:
            raise InvalidBlockError(f"C2: block {target} is in use and cannot be overwritten")
        if block.key is not None:
            checked.overwritten.append(target)
    for position, (source, target) in enumerate(checked.exchanges):
        _check_content(blocks[source])
        _check_content(blocks[target])
        if blocks[target].ref_cnt != 0:
            if blocks[source].ref_cnt != 0:
                raise InvalidBlockError(
                    f"C2: blocks {source} and {target} are both in use; one must be free to exchange them"
                )
            checked.exchanges[position] = BlockMove(target, source)
    return checked


def _check_content(block: KVCacheBlock) -> None:
    if block.ref_cnt == 0 and block.key is None:
        raise InvalidBlockError(f"C2: block {block.block_id} is neither in use nor cached: nothing to move")


def _split(moves: Sequence[BlockMove], checked: CheckedMoves) -> None:
    """Separate exchanges from one-way moves; keep the first move of each exchange. Raise for C1."""
    planned: set[tuple[BlockId, BlockId]] = set(moves)
    seen: set[BlockId] = set()
    halves: set[tuple[BlockId, BlockId]] = set()  # exchanges whose reverse move has not come yet
    for source, target in moves:
        if (target, source) in halves:
            halves.remove((target, source))
            continue
        for block_id in (source, target):
            if block_id in seen:
                raise InvalidArgumentError(
                    f"C1: block {block_id} is in two moves; each id may be the source or target of one move, "
                    "unless two moves exchange two blocks"
                )
            seen.add(block_id)
        if (target, source) in planned:
            halves.add((source, target))
            checked.exchanges.append(BlockMove(source, target))
        else:
            checked.one_way.append(BlockMove(source, target))
