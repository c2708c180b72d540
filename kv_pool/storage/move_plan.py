"""Plans of block moves, checked before a byte is touched."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockMove
from kv_pool.storage.segments import IntArray

Moves = Sequence[BlockMove] | Sequence[tuple[int, int]] | npt.NDArray[np.integer]


def check_moves(
    moves: Moves, num_sources: int, num_targets: int, same_blocks: bool
) -> tuple[IntArray, IntArray]:
    """The plan's source and target ids, each (num_moves,), int64, in the plan's order.

    Args:
        moves: `BlockMove`s or pairs, or a (num_moves, 2) integer array of them.
        num_sources, num_targets: blocks of the two storages.
        same_blocks: both are one storage, so that a block must not be both read and written.
    Raises:
        InvalidTypeError: not pairs of integers.
        InvalidBlockError: an id that is not of its storage.
        InvalidArgumentError: two moves have one target, or a block is the target of one and part of another.

    Nothing is copied before this has passed. Cost: O(n log n).
    """
    plan = _read_pairs(moves)
    sources = np.ascontiguousarray(plan[:, 0], np.int64)
    targets = np.ascontiguousarray(plan[:, 1], np.int64)
    for name, ids, num_blocks in (("source", sources, num_sources), ("target", targets, num_targets)):
        outside = (ids < 0) | (ids >= num_blocks)
        if outside.any():
            first = int(np.argmax(outside))
            raise InvalidBlockError(
                f"move {first} has block {ids[first]} as its {name}; there are blocks 0 to {num_blocks - 1}. "
                "Nothing was copied"
            )
    by_id = np.sort(targets)
    twice = by_id[1:][by_id[1:] == by_id[:-1]]
    if len(twice):
        raise InvalidArgumentError(f"block {twice[0]} is the target of two moves. Nothing was copied")
    if same_blocks:
        found = by_id[np.searchsorted(by_id, sources).clip(max=len(by_id) - 1)] if len(by_id) else by_id
        both = sources[found == sources]
        if len(both):
            raise InvalidArgumentError(
                f"block {both[0]} is the target of one move and the source of another (or the same one); "
                "moves run in any order, so split the plan in two. Nothing was copied"
            )
    return sources, targets


def _read_pairs(moves: Moves) -> npt.NDArray[np.integer]:
    """The plan as (num_moves, 2) integers. Raises InvalidTypeError."""
    if isinstance(moves, np.ndarray):
        plan = moves
    else:
        # Flattened first: NumPy takes a flat list of numbers five times faster than a list of pairs.
        try:
            lengths = set(map(len, moves))
            flat = np.array(list(chain.from_iterable(moves)) or np.empty(0, np.int64))
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"a plan is a list of BlockMove(source, target): {error}") from error
        if lengths - {2}:
            raise InvalidTypeError(
                f"a move has a source and a target; some have {sorted(lengths - {2})} parts"
            )
        plan = flat.reshape(-1, 2)
    if plan.ndim != 2 or plan.shape[1] != 2 or plan.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"a plan is a list of BlockMove(source, target); got shape {plan.shape} of {plan.dtype}"
        )
    return plan
