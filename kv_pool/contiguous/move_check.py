"""`check_moves`: checks a plan of moves before it is applied."""

from collections.abc import Sequence
from itertools import chain

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId, BlockMove


def check_moves(pool: BlockPoolCore, moves: Sequence[BlockMove]) -> tuple[list[BlockMove], list[BlockMove]]:
    """Check C1, C2 and C3 of `contiguous/invariants.py`.

    Returns:
        The moves to blocks whose content may be overwritten; and of each exchange the move to a free, cached
        block, without the reverse move.
    Raises:
        InvalidArgumentError: C1. InvalidBlockError: C2 or C3. Nothing has changed.
    """
    blocks = pool.blocks
    ids = list(chain.from_iterable(moves))
    distinct = set(ids)
    one_way, pairs = _split(moves) if len(distinct) < len(ids) else (list(moves), [])
    if ids and not 0 < min(ids) <= max(ids) < len(blocks):
        wrong = next(block_id for block_id in ids if not 0 < block_id < len(blocks))
        raise InvalidBlockError(
            f"C3: block {wrong} cannot move: it is the null block, or outside 1..{len(blocks) - 1}"
        )
    pool.holds.check_movable(distinct)
    for block_id in chain([source for source, _ in one_way], chain.from_iterable(pairs)):
        block = blocks[block_id]
        if block.ref_cnt == 0 and block.key is None:
            raise InvalidBlockError(f"C2: block {block_id} is neither in use nor cached: nothing to move")
    for _, target in one_way:
        if blocks[target].ref_cnt != 0:
            raise InvalidBlockError(f"C2: block {target} is in use and cannot be overwritten")
    exchanges: list[BlockMove] = []
    for source, target in pairs:
        if blocks[target].ref_cnt != 0:
            source, target = target, source
        if blocks[target].ref_cnt != 0:
            raise InvalidBlockError(
                f"C2: blocks {target} and {source} are both in use; one must be free to exchange them"
            )
        exchanges.append(BlockMove(source, target))
    return one_way, exchanges


def _split(moves: Sequence[BlockMove]) -> tuple[list[BlockMove], list[BlockMove]]:
    """Return the one-way moves, and the first move of each exchange. Raise for C1."""
    one_way: dict[tuple[BlockId, BlockId], BlockMove] = {}
    exchanges: list[BlockMove] = []
    seen: set[BlockId] = set()
    for move in moves:
        source, target = move
        if (target, source) in one_way:
            exchanges.append(one_way.pop((target, source)))
        elif source in seen or target in seen or source == target:
            twice = source if source in seen else target
            raise InvalidArgumentError(
                f"C1: block {twice} is in two moves; each id may be the source or target of one move, "
                "unless two moves exchange two blocks"
            )
        else:
            one_way[move] = move
            seen.update(move)
    return list(one_way.values()), exchanges
