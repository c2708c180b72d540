"""Compaction: moves blocks to other ids. A callable copies the bytes; this module changes the ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypedDict, Unpack

from kv_pool.contiguous import plan
from kv_pool.contiguous.fragmentation import find_run_length
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import check_number
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import evict_overwritten
from kv_pool.core.id_swap import check_places, check_sources, find_targets, swap_ids
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId, BlockMove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_ROUNDS = 64

CopyBlocks = Callable[[Sequence[BlockMove]], object]
"""Copies each source's bytes to its target, or queues the copy; raises if that fails.

The moves of one call may be copied in any order: no id is the target of one and part of another. The moves of
a later call are copied after them.
"""

NULL_BLOCK_SLOT = (BlockId(0),)
"""The default scratch slot: no request stores tokens in the null block. Attention masks what it reads there,
and the copied numbers are finite, since they come from another block."""


@dataclass(frozen=True)
class Relocation:
    """A batch of moves that has changed block ids, for callers that keep block ids.

    Attributes:
        epoch: the pool's `epoch` after these moves.
        moves: (old id, new id) of each moved block, in any order. Apply all of them at once. An exchange is
            two moves; all other old ids are free now.
        num_blocks: number of blocks of the pool.
    """

    epoch: int
    moves: list[BlockMove] = field(default_factory=list)
    num_blocks: int = 0

    def make_remap(self) -> "NDArray[np.int32]":
        """Return an array of new ids by old id: `table = remap[table]` updates a table of ids.

        Shape (num_blocks,), int32; ids that did not move map to themselves. For tables on a device, use
        `remap = torch.from_numpy(relocation.make_remap()).to(device)`; the look-up is queued behind the copy.
        """
        import numpy as np

        remap = np.arange(self.num_blocks, dtype=np.int32)
        if self.moves:
            pairs = np.fromiter(chain.from_iterable(self.moves), np.int32, 2 * len(self.moves))
            remap[pairs[::2]] = pairs[1::2]
        return remap


def apply_moves(
    pool: RunBlockPool,
    moves: Sequence[BlockMove],
    copy: CopyBlocks,
    *,
    on_moved: Callable[[Relocation], object] | None = None,
    scratch_ids: Sequence[BlockId] = NULL_BLOCK_SLOT,
) -> Relocation:
    """Copy the bytes of each source to its target, then exchange the ids of the two blocks.

    Of a block object only `block_id` changes: tables of objects, references, hashes and the eviction order
    stay the same, no event is sent, and the prefix cache finds the same blocks. A cached target is evicted
    first, since the copy overwrites it, unless the plan contains the reverse move. The two moves are an
    exchange: both blocks keep their bytes, at the cost of three copies through a scratch slot. A block in use
    always has its bytes at one of its two ids, so a failure needs no copy back. A cached block may lose its
    bytes if the second or third call fails.

    Args:
        copy: called with all moves except exchanges, then with the copies of exchanges in batches.
        on_moved: called with the relocation if a block moved.
        scratch_ids: ids that `copy` accepts as sources and targets and whose content is not needed between
            calls; as many exchanges are copied at a time. For a storage pass `BlockStorage.scratch_ids`; the
            default is the null block's slot.
    Returns:
        The relocation. Update every table of ids before any block is taken from the pool. An old id may be
        taken at once; writes to it must be queued behind the copy.
    Raises:
        InvalidArgumentError: C1: an id occurs twice among sources and targets, or `scratch_ids` is empty and
            there are exchanges. Nothing has changed.
        InvalidBlockError: C2, C3: a source without content, a target in use, or a null, held or unknown
            block. Nothing has changed.
        Any exception of `copy`: blocks in use keep their bytes. Without exchanges no id has changed, and
            cached targets are evicted. With exchanges, moves completed by then have changed ids, and cached
            blocks of incomplete exchanges are evicted.
        An exception of a signal handler: repair the pool. Blocks in use keep their bytes; ids may have
            changed without a call of `on_moved`, see `RunBlockPool.epoch`.
    Cost: O(number of blocks), some nanoseconds each, and O(len(moves)), plus the copy.
    """
    pool.holds.check_whole()
    ids = list(chain.from_iterable(moves))
    if not ids:
        return Relocation(pool.epoch, [], pool.num_gpu_blocks)
    if len(set(ids)) < len(ids):
        return _apply_exchanges(pool, moves, copy, on_moved, scratch_ids)
    return _move(pool, list(moves), copy, on_moved)


def _move(
    pool: RunBlockPool,
    moves: list[BlockMove],
    copy: CopyBlocks,
    on_moved: Callable[[Relocation], object] | None,
) -> Relocation:
    """Move blocks to the ids of free ones, which are evicted, as in `apply_moves`; no id is in two moves."""
    check_places(pool, list(chain.from_iterable(moves)))
    check_sources(pool, [source for source, _ in moves])
    _begin_moves(pool, find_targets(pool, [target for _, target in moves]))
    try:
        copy(list(moves))
    except Exception:
        pool.is_changing = False  # no block has moved
        raise
    pool.copied += moves
    return _change_ids(pool, moves, on_moved)


def _begin_moves(pool: RunBlockPool, overwritten: list[KVCacheBlock]) -> None:
    """Begin the change: evict the blocks that are overwritten.

    The caller adds to `pool.copied` the moves whose bytes have arrived: after an interrupt, `repair` gives
    these blocks the ids of their bytes.
    """
    pool.is_changing = True
    pool.copied = []
    pool.copied_at = pool.epoch
    evict_overwritten(pool, overwritten)


def _change_ids(
    pool: RunBlockPool, moves: list[BlockMove], on_moved: Callable[[Relocation], object] | None
) -> Relocation:
    """Swap the ids of blocks whose bytes have arrived, which ends the change; then call `on_moved`."""
    if pool.copied:
        swap_ids(pool, pool.copied)
    pool.copied = []
    pool.is_changing = False
    relocation = Relocation(pool.epoch, moves, pool.num_gpu_blocks)
    if moves and on_moved is not None:
        on_moved(relocation)
    return relocation


# ---- runs for requests -----------------------------------------------------------------------------


def take_run(
    pool: RunBlockPool,
    num_blocks: int,
    copy: CopyBlocks,
    on_moved: Callable[[Relocation], object],
) -> list[KVCacheBlock] | None:
    """Take a run like `get_new_run`; if there is none, move blocks to clear one.

    Args:
        on_moved: called if a block moved, before the run is taken, to update tables.
    Returns:
        The run; None, with nothing changed, if no run can be cleared because of held blocks.
    Raises:
        OutOfBlocksError, InvalidArgumentError: as `get_new_run`. Nothing has changed.
        Any exception of `copy`: see `apply_moves`.
    """
    run = pool.get_new_run(num_blocks)
    if run is None:
        run = clear_run(pool, num_blocks, copy, on_moved)
        if run is not None:
            pool.take_blocks(run)
    return run


def clear_run(
    pool: RunBlockPool,
    num_blocks: int,
    copy: CopyBlocks,
    on_moved: Callable[[Relocation], object],
    *,
    avoids_retained: bool = False,
    max_moves: int | None = None,
) -> list[KVCacheBlock] | None:
    """Move blocks out of a run, see `plan.plan_clear_run`.

    Returns:
        The run's blocks, all free now; None, with nothing changed, if no run can be cleared.
    Raises:
        Any exception of `copy`: see `apply_moves`.
    """
    pool.holds.check_whole()
    clearance = plan.plan_clear_run(pool, num_blocks, avoids_retained=avoids_retained, max_moves=max_moves)
    if clearance is None:
        return None
    if clearance.moves:
        _move(pool, clearance.moves, copy, on_moved)
    first = clearance.first_block_id
    return list(pool.blocks[first : first + num_blocks])


# ---- defragmentation, with exchanges ---------------------------------------------------------------


def pack(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    max_moves: int | None = None,
    max_evictions: int = 0,
    on_moved: Callable[[Relocation], object] | None = None,
    scratch_ids: Sequence[BlockId] = NULL_BLOCK_SLOT,
) -> list[Relocation]:
    """Move the blocks in use to the lowest ids, in as many rounds as `plan_pack` needs.

    Args:
        max_moves: limit for all rounds together; the next call continues from there.
        max_evictions: how many cached blocks may be overwritten where empty blocks are missing; only in the
            first round. Other cached blocks are exchanged with blocks in use.
        on_moved: called after each round, to update tables.
        scratch_ids: see `apply_moves`; if empty, there are no exchanges, and in a full cache nothing moves.
    Raises:
        Any exception of `copy`: earlier rounds are complete.
    """
    relocations: list[Relocation] = []
    for _ in range(_MAX_ROUNDS):
        moves = plan.plan_pack(
            pool, max_moves=max_moves, max_evictions=max_evictions, exchanges=len(scratch_ids) > 0
        )
        if not moves:
            break
        max_evictions = 0
        if max_moves is not None:
            max_moves -= len(moves)
        relocations.append(apply_moves(pool, moves, copy, on_moved=on_moved, scratch_ids=scratch_ids))
    return relocations


def gather(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    run_length: int = DEFAULT_RUN_LENGTH,
    goal: float = 0.0,
    max_moves: int | None = None,
    max_evictions: int = 0,
    on_moved: Callable[[Relocation], object] | None = None,
    scratch_ids: Sequence[BlockId] = NULL_BLOCK_SLOT,
) -> Relocation:
    """Gather free blocks into runs of `run_length` until the fragmentation rate is at most `goal`.

    Takes fewer moves than `pack`, and tables keep their long runs; see `plan.plan_gather` for the arguments.

    Args:
        on_moved: called if a block moved, to update tables.
        scratch_ids: see `pack`.
    Raises:
        Any exception of `copy`: see `apply_moves`.
    """
    moves = plan.plan_gather(
        pool,
        run_length,
        goal=goal,
        max_moves=max_moves,
        max_evictions=max_evictions,
        exchanges=len(scratch_ids) > 0,
    )
    return apply_moves(pool, moves, copy, on_moved=on_moved, scratch_ids=scratch_ids)


class MoveOptions(TypedDict, total=False):
    """The options that `compact` passes to `gather` or `pack`."""

    max_moves: int | None
    max_evictions: int
    on_moved: Callable[[Relocation], object] | None
    scratch_ids: Sequence[BlockId]


def compact(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    run_length: int = DEFAULT_RUN_LENGTH,
    goal: float | None = None,
    **options: Unpack[MoveOptions],
) -> int:
    """Call `gather` with a goal, `pack` without one. By default nothing is evicted, even in a full cache.

    With fewer free blocks than `run_length`, it gathers runs of the length that the fragmentation rate uses.

    Returns:
        How many blocks changed their id.
    Raises:
        As `gather` and `pack`. Rounds before a failure are complete.
    """
    if goal is None:
        return sum(len(relocation.moves) for relocation in pack(pool, copy, **options))
    check_number("goal", goal)
    if not 0 <= goal <= 1:
        raise InvalidArgumentError(f"goal is {goal}; it is a fragmentation rate, 0 to 1")
    run_length = find_run_length(pool.get_num_free_blocks(), run_length)
    return len(gather(pool, copy, run_length=run_length, goal=goal, **options).moves)


def shrink(
    pool: RunBlockPool,
    num_blocks: int,
    copy: CopyBlocks,
    *,
    on_moved: Callable[[Relocation], object] | None = None,
) -> Relocation:
    """Move blocks out of the `num_blocks` highest ids, and remove these ids from the pool.

    Raises:
        As `plan_drain` and `apply_moves`. The pool keeps its size.
    """
    moves = plan.plan_drain(pool, num_blocks)
    relocation = apply_moves(pool, moves, copy, on_moved=on_moved)
    pool.remove_last_blocks(num_blocks)
    return relocation


# ---- exchanges -------------------------------------------------------------------------------------


def _apply_exchanges(
    pool: RunBlockPool,
    moves: Sequence[BlockMove],
    copy: CopyBlocks,
    on_moved: Callable[[Relocation], object] | None,
    scratch_ids: Sequence[BlockId],
) -> Relocation:
    """Implement `apply_moves` for moves in which ids occur twice."""
    one_way, exchanges = _split(moves)
    check_places(pool, list(chain.from_iterable(moves)))
    check_sources(pool, [source for source, _ in moves])
    overwritten = find_targets(pool, [target for _, target in one_way])
    exchanges = [_orient(pool, exchange) for exchange in exchanges]
    if not scratch_ids:
        raise InvalidArgumentError(f"{len(exchanges)} exchanges need a scratch slot; pass one in scratch_ids")
    _begin_moves(pool, overwritten)
    try:
        if one_way:
            copy(one_way)
            pool.copied += one_way
        _copy_exchanges(pool, exchanges, copy, scratch_ids)
    except Exception:
        moved = set(chain.from_iterable(pool.copied))
        _change_ids(pool, [move for move in moves if move[0] in moved], on_moved)
        raise
    return _change_ids(pool, list(moves), on_moved)


def _split(moves: Sequence[BlockMove]) -> tuple[list[BlockMove], list[BlockMove]]:
    """Return the moves without a reverse move, and the first move of each exchange. Raise for C1."""
    one_way: list[BlockMove] = []
    exchanges: list[BlockMove] = []
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
            exchanges.append(BlockMove(source, target))
        else:
            one_way.append(BlockMove(source, target))
    return one_way, exchanges


def _orient(pool: RunBlockPool, exchange: BlockMove) -> BlockMove:
    """Return the move to the free, cached block of an exchange. Raise for C2."""
    source, target = exchange
    if pool.blocks[target].ref_cnt == 0:
        return exchange
    if pool.blocks[source].ref_cnt != 0:
        raise InvalidBlockError(
            f"C2: blocks {source} and {target} are both in use; one must be free to exchange them"
        )
    return BlockMove(target, source)


def _copy_exchanges(
    pool: RunBlockPool, exchanges: list[BlockMove], copy: CopyBlocks, scratch_ids: Sequence[BlockId]
) -> None:
    """Copy the bytes of exchanges, as many at a time as there are scratch slots.

        slot              scratch   target   source
        before            -         cached   used
        1st call of copy  cached    cached   used
        2nd call          cached    used     used            the target has arrived: `pool.copied`
        3rd call          cached    used     cached

    Raises:
        Any exception of `copy`. Cached blocks that have lost their bytes are evicted.
    """
    for start in range(0, len(exchanges), len(scratch_ids)):
        batch = exchanges[start : start + len(scratch_ids)]
        slots = list(zip(batch, scratch_ids, strict=False))
        endangered = [pool.blocks[target] for _, target in batch]
        copy([BlockMove(target, slot) for (_, target), slot in slots])
        try:
            copy(batch)
            pool.copied += batch
            copy([BlockMove(slot, source) for (source, _), slot in slots])
        except Exception:
            evict_overwritten(pool, endangered)
            raise
