"""`check_moves`: check a plan of moves before it is applied."""

from collections.abc import Sequence
from itertools import chain

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockMove


def check_moves(pool: BlockPoolCore, moves: Sequence[BlockMove]) -> list[int]:
    """Check C1, C2 and C3 of `contiguous/invariants.py`.

    Returns:
        The targets that are cached and would be evicted.
    Raises:
        InvalidArgumentError: C1. InvalidBlockError: C2 or C3. Nothing has changed.
    """
    blocks = pool.blocks
    ids: list[int] = list(chain.from_iterable(moves))
    chosen = set(ids)
    if len(chosen) != len(ids):
        seen: set[int] = set()
        for block_id in ids:
            if block_id in seen:
                raise InvalidArgumentError(
                    f"C1: block {block_id} is in two moves; each id is the source or target of one"
                )
            seen.add(block_id)
    cached: list[int] = []
    if not ids:
        return cached
    if min(ids) < 1 or max(ids) >= len(blocks):
        wrong = min(ids) if min(ids) < 1 else max(ids)
        raise InvalidBlockError(
            f"C3: block {wrong} does not move: it is the null block, or outside 1..{len(blocks) - 1}"
        )
    pool.holds.check_movable(chosen)
    for source, target in moves:
        block = blocks[source]
        if block.ref_cnt == 0 and block.key is None:
            raise InvalidBlockError(f"C2: block {source} is neither in use nor cached: nothing to move")
        block = blocks[target]
        if block.ref_cnt != 0:
            raise InvalidBlockError(f"C2: block {target} is in use and cannot be overwritten")
        if block.key is not None:
            cached.append(target)
    return cached
