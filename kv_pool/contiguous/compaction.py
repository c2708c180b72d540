"""Moving blocks to other ids: bytes by a callable that is passed in, identities here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kv_pool.contiguous import plan
from kv_pool.contiguous.fragmentation import find_run_length
from kv_pool.contiguous.move_check import check_moves
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import as_int, check_number
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockMove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CopyBlocks = Callable[[Sequence[BlockMove]], object]
"""Copies each source's bytes over its target's, or queues that; raises where it could not."""

_MAX_ROUNDS = 64


@dataclass(frozen=True)
class Relocation:
    """What moved, for whoever keeps block ids.

    Attributes:
        epoch: the pool's `epoch` from here on.
        moves: (old id, new id) of each block that moved, in any order; the old ids are free now.
        num_blocks: of the pool.
    """

    epoch: int
    moves: list[BlockMove] = field(default_factory=list)
    num_blocks: int = 0

    def make_remap(self) -> "NDArray[np.int32]":
        """New ids by old id: `table = remap[table]` brings any table of ids up to date.

        Shape (num_blocks,), int32; ids that did not move map to themselves. On a device it is
        `remap = torch.from_numpy(relocation.make_remap()).to(device)`, and the look-up is queued behind the
        copy.
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
) -> Relocation:
    """Copy the bytes of each source over its target's, then let the two blocks exchange their ids.

    Block objects stay what they are, but for `block_id`: tables of objects, references, hashes and the order
    of eviction are untouched, no event is sent, and the same prefixes are found. What is cached in a target
    is evicted first, since the copy overwrites it.

    Args:
        copy: called once with all moves, not at all for none.
        on_moved: called with what moved, if anything: also where a signal handler raises just after the ids
            have changed.
    Returns:
        What moved. Remap every table of ids before any block is taken from the pool. An old id may be taken
        at once; whoever writes there queues that behind the copy.
    Raises:
        InvalidArgumentError: C1: an id twice among sources and targets.
        InvalidBlockError: C2, C3: a source without content, a target that is in use, the null
            block, a held or unknown one. In both cases nothing has changed, and nothing was copied.
        Whatever `copy` raises: no id has changed; targets that were cached are evicted.
    Cost: O(number of blocks), some nanoseconds each, and O(len(moves)), besides the copy.
    """
    overwritten = check_moves(pool, moves)
    if not moves:
        return Relocation(pool.epoch, [], pool.num_gpu_blocks)
    if overwritten:
        pool.evict_blocks(overwritten)
    relocation = Relocation(pool.epoch + 1, list(moves), pool.num_gpu_blocks)
    copy(moves)
    try:
        pool.swap_block_ids(moves)
    finally:
        if on_moved is not None and pool.epoch == relocation.epoch:
            on_moved(relocation)
    return relocation


def pack(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    max_moves: int | None = None,
    max_evictions: int = 0,
    on_moved: Callable[[Relocation], object] | None = None,
) -> list[Relocation]:
    """Bring the blocks in use to the lowest ids, in as many rounds as `plan_pack` needs.

    Args:
        max_moves: of all rounds together; the next call goes on from there.
        max_evictions: of cached blocks, where too little is empty; only the first round overwrites any.
        on_moved: called after each round: remap tables there.
    Raises:
        Whatever `copy` raises: the rounds before have happened.
    """
    relocations: list[Relocation] = []
    for _ in range(_MAX_ROUNDS):
        moves = plan.plan_pack(pool, max_moves=max_moves, max_evictions=max_evictions)
        if not moves:
            break
        max_evictions = 0
        if max_moves is not None:
            max_moves -= len(moves)
        relocations.append(apply_moves(pool, moves, copy, on_moved=on_moved))
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
) -> Relocation:
    """Bring free blocks together in runs of `run_length` until the fragmentation rate is `goal` or below.

    Fewer moves than `pack`, and tables of long runs keep them; see `plan.plan_gather` for the arguments.
    Args:
        on_moved: called if anything moved: remap tables there.
    Raises:
        Whatever `copy` raises: nothing has moved.
    """
    moves = plan.plan_gather(
        pool,
        run_length,
        goal=goal,
        max_moves=max_moves,
        max_evictions=max_evictions,
    )
    return apply_moves(pool, moves, copy, on_moved=on_moved)


def compact(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    run_length: int = DEFAULT_RUN_LENGTH,
    goal: float | None = None,
    max_moves: int | None = None,
    max_evictions: int = 0,
    on_moved: Callable[[Relocation], object] | None = None,
) -> int:
    """`gather` to a goal, or `pack` without one.

    With fewer free blocks than `run_length` it gathers the runs that the fragmentation rate is about then.
    Returns:
        How many blocks changed their id.
    Raises:
        As these. Rounds before a failure have happened.
    """
    max_evictions = as_int("max_evictions", max_evictions)
    if max_moves is not None:
        max_moves = as_int("max_moves", max_moves)
    if goal is None:
        rounds = pack(pool, copy, max_moves=max_moves, max_evictions=max_evictions, on_moved=on_moved)
        return sum(len(relocation.moves) for relocation in rounds)
    check_number("goal", goal)
    relocation = gather(
        pool,
        copy,
        run_length=find_run_length(pool.get_num_free_blocks(), run_length),
        goal=goal,
        max_moves=max_moves,
        max_evictions=max_evictions,
        on_moved=on_moved,
    )
    return len(relocation.moves)


def take_run(
    pool: RunBlockPool,
    num_blocks: int,
    copy: CopyBlocks,
    on_moved: Callable[[Relocation], object],
) -> list[KVCacheBlock] | None:
    """`get_new_run`, and where that finds none, room is made for one.

    Args:
        on_moved: called if anything moved, before the run is taken: remap tables there.
    Returns:
        The run, or None where held blocks leave no room for it; nothing has changed then.
    Raises:
        OutOfBlocksError, InvalidArgumentError: as `get_new_run`. Nothing has changed.
        Whatever `copy` raises: see `apply_moves`.
    """
    taken = pool.get_new_run(num_blocks)
    if taken is not None:
        return taken
    clearance = plan.plan_clear_run(pool, num_blocks)
    if clearance is None:
        return None
    apply_moves(pool, clearance.moves, copy, on_moved=on_moved)
    first = clearance.first_block_id
    run = list(pool.blocks[first : first + num_blocks])
    pool.take_blocks(run)
    return run


def shrink(
    pool: RunBlockPool,
    num_blocks: int,
    copy: CopyBlocks,
    *,
    on_moved: Callable[[Relocation], object] | None = None,
) -> Relocation:
    """Move what is in use out of the `num_blocks` highest ids, and cut them off.

    Raises:
        As `plan_drain` and `apply_moves`; the pool has its size then.
    """
    moves = plan.plan_drain(pool, num_blocks)
    relocation = apply_moves(pool, moves, copy, on_moved=on_moved)
    pool.shrink(num_blocks)
    return relocation
