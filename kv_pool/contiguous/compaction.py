"""Moving blocks to other ids: bytes by a callable that is passed in, identities here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kv_pool.contiguous import plan
from kv_pool.contiguous.block_copying import BlockCopying, CopyBlocks
from kv_pool.contiguous.fragmentation import find_run_length
from kv_pool.contiguous.move_check import check_moves
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import as_int, check_number
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockMove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_ROUNDS = 64

NULL_BLOCK_SLOT = (0,)
"""The scratch slot of copies without one of their own: no request has its tokens in the null block. Attention
masks what it reads there, and finds finite numbers, those of another block."""


@dataclass(frozen=True)
class Relocation:
    """What moved, for whoever keeps block ids.

    Attributes:
        epoch: the pool's `epoch` from here on.
        moves: (old id, new id) of each block that moved, in any order. Two blocks that changed places are two
            moves: apply all of them at once. The other old ids are free now.
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
    scratch_ids: Sequence[int] = NULL_BLOCK_SLOT,
) -> Relocation:
    """Copy the bytes of each source over its target's, then let the two blocks exchange their ids.

    Block objects stay what they are, but for `block_id`: tables of objects, references, hashes and the order
    of eviction are untouched, no event is sent, and the same prefixes are found. What is cached in a target
    is evicted first, since the copy overwrites it; unless there is a reverse move, from the target to the
    source. Such two blocks exchange their bytes, too, through a scratch slot: three copies.

    Args:
        copy: called with all moves but the exchanges, then with the copies of exchanges, see `BlockCopying`.
        on_moved: called with what moved, if anything: also where a signal handler raises just after the ids
            have changed.
        scratch_ids: ids that `copy` takes as sources and targets as well, and that hold nothing between two
            calls: as many exchanges are copied at a time. `BlockStorage.scratch_ids` are those of a storage;
            by default the null block's slot.
    Returns:
        What moved. Remap every table of ids before any block is taken from the pool. An old id may be taken
        at once; whoever writes there queues that behind the copy.
    Raises:
        InvalidArgumentError: C1: an id twice among sources and targets, or exchanges without `scratch_ids`.
        InvalidBlockError: C2, C3: a source without content, a target that is in use, the null
            block, a held or unknown one. In both cases nothing has changed, and nothing was copied.
        Whatever `copy` raises, or a signal handler: blocks in use have their bytes. Without exchanges no id
            has changed, and targets that were cached are evicted. Otherwise what was moved by then has its
            new ids, and the cached blocks of exchanges that were not complete are evicted.
    Cost: O(number of blocks), some nanoseconds each, and O(len(moves)), besides the copy.
    """
    checked = check_moves(pool, moves)
    if not moves:
        return Relocation(pool.epoch, [], pool.num_gpu_blocks)
    if checked.exchanges and not scratch_ids:
        raise InvalidArgumentError(
            f"{len(checked.exchanges)} exchanges need a scratch slot; name one in scratch_ids"
        )
    if checked.overwritten:
        pool.evict_blocks(checked.overwritten)
    made = _Relocating(pool, moves, BlockCopying(pool, checked, copy, scratch_ids), on_moved)
    try:
        made.copying.run()
        made.change_ids()
    except BaseException:
        try:
            made.settle()
        except BaseException:
            made.settle()
            raise
        raise
    return made.relocation


class _Relocating:
    """Moves that are being applied: what has been copied gets its new ids, whatever interrupts it."""

    def __init__(
        self,
        pool: RunBlockPool,
        moves: Sequence[BlockMove],
        copying: BlockCopying,
        on_moved: Callable[[Relocation], object] | None,
    ) -> None:
        self.pool = pool
        self.copying = copying
        self.relocation = Relocation(pool.epoch + 1, list(moves), pool.num_gpu_blocks)
        self._epoch = pool.epoch
        self._on_moved = on_moved
        self._is_noted = False

    def change_ids(self) -> None:
        """Exchange the ids of the blocks whose bytes are copied, and tell of it."""
        if self.copying.done and self.pool.epoch == self._epoch:
            self.pool.swap_block_ids(self.copying.done)
        if self.pool.epoch != self._epoch and not self._is_noted:
            self._is_noted = True
            if self._on_moved is not None:
                self._on_moved(self.relocation)

    def settle(self) -> None:
        """After an interrupt or a failure: as `change_ids`, of what is done; may be called again."""
        self.pool.rebuild_index()  # ends an exchange of ids that was interrupted
        if self.copying.endangered:
            self.pool.evict_blocks([block.block_id for block in self.copying.endangered])
            self.copying.endangered = []
        if not self._is_noted:
            moved = set(chain.from_iterable(self.copying.done))
            moves = [move for move in self.relocation.moves if move[0] in moved]
            self.relocation = Relocation(self.relocation.epoch, moves, self.relocation.num_blocks)
        self.change_ids()


def pack(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    max_moves: int | None = None,
    max_evictions: int = 0,
    on_moved: Callable[[Relocation], object] | None = None,
    scratch_ids: Sequence[int] = NULL_BLOCK_SLOT,
) -> list[Relocation]:
    """Bring the blocks in use to the lowest ids, in as many rounds as `plan_pack` needs.

    Args:
        max_moves: of all rounds together; the next call goes on from there.
        max_evictions: of cached blocks, where too little is empty; only the first round overwrites any.
            Further ones change places with blocks in use.
        on_moved: called after each round: remap tables there.
        scratch_ids: see `apply_moves`; with none blocks do not change places, and in a full cache nothing
            moves.
    Raises:
        Whatever `copy` raises: the rounds before have happened.
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
    scratch_ids: Sequence[int] = NULL_BLOCK_SLOT,
) -> Relocation:
    """Bring free blocks together in runs of `run_length` until the fragmentation rate is `goal` or below.

    Fewer moves than `pack`, and tables of long runs keep them; see `plan.plan_gather` for the arguments.
    Args:
        on_moved: called if anything moved: remap tables there.
        scratch_ids: see `pack`.
    Raises:
        Whatever `copy` raises: see `apply_moves`.
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


def compact(
    pool: RunBlockPool,
    copy: CopyBlocks,
    *,
    run_length: int = DEFAULT_RUN_LENGTH,
    goal: float | None = None,
    max_moves: int | None = None,
    max_evictions: int = 0,
    on_moved: Callable[[Relocation], object] | None = None,
    scratch_ids: Sequence[int] = NULL_BLOCK_SLOT,
) -> int:
    """`gather` to a goal, or `pack` without one. Nothing is evicted by default, in a full cache either.

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
        rounds = pack(
            pool,
            copy,
            max_moves=max_moves,
            max_evictions=max_evictions,
            on_moved=on_moved,
            scratch_ids=scratch_ids,
        )
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
        scratch_ids=scratch_ids,
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
