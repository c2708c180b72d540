"""Check plans of block moves, and split them into rounds of independent copies."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockId, BlockMove
from kv_pool.storage.segments import IntArray

Moves = Sequence[BlockMove] | Sequence[tuple[int, int]] | npt.NDArray[np.integer]


def parse_moves(
    moves: Moves, num_sources: int, num_targets: int, same_blocks: bool, scratch_ids: range = range(0)
) -> tuple[IntArray, IntArray]:
    """Check a plan, and return its source and target ids, each (num_moves,), int64, in the plan's order.

    Args:
        moves: `BlockMove`s or pairs, or a (num_moves, 2) integer array of them.
        num_sources, num_targets: number of blocks of the two storages.
        same_blocks: both are the same storage, so a move from a block to itself is an error.
        scratch_ids: additional valid ids, for sources and targets.
    Raises:
        InvalidTypeError: `moves` are not pairs of integers.
        InvalidBlockError: an id is out of range.
        InvalidArgumentError: two moves have the same target, or a block is moved to itself.

    Callers check before they copy anything. Cost: O(n log n).
    """
    plan = _read_pairs(moves)
    sources = np.ascontiguousarray(plan[:, 0], np.int64)
    targets = np.ascontiguousarray(plan[:, 1], np.int64)
    for name, ids, num_blocks in (("source", sources, num_sources), ("target", targets, num_targets)):
        outside = ((ids < 0) | (ids >= num_blocks)) & ((ids < scratch_ids.start) | (ids >= scratch_ids.stop))
        if outside.any():
            first = int(np.argmax(outside))
            raise InvalidBlockError(
                f"move {first} has block {ids[first]} as its {name}; block ids are 0 to {num_blocks - 1}. "
                "Nothing was copied"
            )
    by_id = np.sort(targets)
    twice = by_id[1:][by_id[1:] == by_id[:-1]]
    if len(twice):
        raise InvalidArgumentError(f"block {twice[0]} is the target of two moves. Nothing was copied")
    if same_blocks and (sources == targets).any():
        itself = sources[sources == targets]
        raise InvalidArgumentError(f"block {itself[0]} is moved to itself. Nothing was copied")
    return sources, targets


def split_rounds(
    sources: IntArray, targets: IntArray, scratch_ids: Sequence[BlockId]
) -> list[tuple[IntArray, IntArray]]:
    """Split a plan within one storage into rounds that, run in order, equal applying all moves at once.

        plan      1 -> 2   2 -> 1   5 -> 6   6 -> 7                            s, t  scratch blocks
        rounds    6 -> 7   then   5 -> 6   then   1 -> s   2 -> t   then   s -> 2   t -> 1

    Within a round, no block is the target of one move and part of another, so its moves run in any order.

    Args:
        sources, targets: as returned by `parse_moves`.
        scratch_ids: scratch blocks, for the content of cycles. With more blocks in cycles than scratch
            blocks, they are reused.
    Raises:
        InvalidArgumentError: the plan has a cycle, and uses all scratch blocks itself.
    Cost: O(n log n) in NumPy for each round.
    """
    if not np.isin(sources, targets).any():
        return [(sources, targets)]
    free_ids = np.setdiff1d(np.asarray(scratch_ids, np.int64), np.concatenate([sources, targets]))
    rounds: list[tuple[IntArray, IntArray]] = []
    while len(targets):
        is_read = np.isin(targets, sources)
        if not is_read.all():
            rounds.append((sources[~is_read], targets[~is_read]))
            sources, targets = sources[is_read], targets[is_read]
            continue
        # Only cycles are left, which read each block once. Save blocks before they are overwritten.
        if not len(free_ids):
            raise InvalidArgumentError(
                f"block {targets[0]} is part of a cycle of moves, and no scratch block is left. "
                "Nothing was copied"
            )
        saved, scratch = sources[: len(free_ids)], free_ids[: len(sources)]
        rounds.append((saved, scratch))
        sources = np.concatenate([scratch, sources[len(saved) :]])
    return rounds


def _read_pairs(moves: Moves) -> npt.NDArray[np.integer]:
    """Return the plan as (num_moves, 2) integers. Raise InvalidTypeError for other types."""
    if isinstance(moves, np.ndarray):
        plan = moves
    else:
        # Flatten first: NumPy converts a flat list of numbers five times faster than a list of pairs.
        try:
            lengths = set(map(len, moves))
            flat = np.array(list(chain.from_iterable(moves)) or np.empty(0, np.int64))
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"a plan is a list of BlockMove(source, target): {error}") from error
        if lengths - {2}:
            raise InvalidTypeError(
                f"a move has a source and a target; some moves have {sorted(lengths - {2})} elements"
            )
        plan = flat.reshape(-1, 2)
    if plan.ndim != 2 or plan.shape[1] != 2 or plan.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"a plan is a list of BlockMove(source, target); got shape {plan.shape} of {plan.dtype}"
        )
    return plan
