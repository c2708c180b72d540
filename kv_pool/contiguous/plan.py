"""Plans of moves that make free ids consecutive; `compaction.apply_moves` applies them.

Planning does not change the pool, except that it first flushes pending write-backs to lower tiers, since they
hold their blocks in place.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

from kv_pool.contiguous.run_index import ANY_AGE, EMPTY, IN_USE, RETAINED
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.arguments import as_count
from kv_pool.errors import InvalidArgumentError, OutOfBlocksError
from kv_pool.ids import BlockId, BlockMove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IN_USE_COST = 4
_CACHED_COST = 1
_RETAINED_COST = 2
"""Relative costs of moving a block out of a window, or of evicting it; a cached block costs less because no
running request needs it. A cached block of a higher band costs the sum of the last two."""


# Like BlockMove._make at half its cost, which is half of the planning time.
_make_move: Callable[[tuple[BlockId, BlockId]], BlockMove] = partial(tuple.__new__, BlockMove)


class RunClearance(NamedTuple):
    """Moves that free the blocks `[first_block_id, first_block_id + n)`; some may still be cached."""

    first_block_id: BlockId
    moves: list[BlockMove]


class _Map:
    """The state of each id, as boolean arrays over the block ids. Held blocks are only in `immovable`.

    A free block is `cached` or `empty`; `retained` marks cached blocks of bands above the default one.
    """

    def __init__(self, pool: RunBlockPool) -> None:
        import numpy as np

        pool.flush_evicted()
        self.ages: NDArray[np.uint8] = np.frombuffer(pool.run_index.ages, dtype=np.uint8).copy()
        ages = self.ages
        immovable = np.zeros(len(ages), dtype=bool)
        immovable[pool.holds.list_immovable_ids()] = True
        immovable[0] = True
        self.immovable: NDArray[np.bool_] = immovable
        self.movable: NDArray[np.bool_] = (ages == IN_USE) & ~immovable
        self.cached: NDArray[np.bool_] = (ages > EMPTY) & ~immovable
        self.empty: NDArray[np.bool_] = (ages == EMPTY) & ~immovable
        self.retained: NDArray[np.bool_] = (ages == RETAINED) & ~immovable

    def ids(self, where: "NDArray[np.bool_]", first: int = 0, end: int | None = None) -> list[BlockId]:
        """Return the ids in `[first, end)` where `where` is True, ascending."""
        import numpy as np

        return cast("list[BlockId]", (np.flatnonzero(where[first:end]) + first).tolist())


def _check_limits(max_moves: int | None, max_evictions: int) -> None:
    if max_moves is not None:
        as_count("max_moves", max_moves)
    as_count("max_evictions", max_evictions)


def plan_pack(
    pool: RunBlockPool,
    *,
    max_moves: int | None = None,
    max_evictions: int = 0,
    exchanges: bool = True,
) -> list[BlockMove]:
    """Plan one round of moves that packs the blocks in use at the lowest ids without evicting any.

        before   U . c U . | U c U .        U in use   c cached and free   . empty
        moves    U from the right of the bar to empty slots on the left; c from the left to empty ones right
        after    U U . U U | . c c U        and so on, until no U is right of the bar

        before   U c c U | c U c U c        a full cache: no slot is empty
        moves    exchange each U right of the bar with a c left of it
        after    U U U U | c c c c c

    Args:
        max_moves: limit of planned moves; the highest ids move first. An exchange is two moves.
        max_evictions: how many cached blocks, next in eviction order, may be overwritten where empty slots
            are missing; never blocks of a band above the default one. This takes fewer copies than exchanges.
        exchanges: plan exchanges; without them nothing can move in a full cache.
    Returns:
        The moves, for `apply_moves`; [] if the pool is packed or nothing can move. Where cached blocks are in
        the way, several rounds may be needed: plan again after each.

    If no block is cached, or no slot is empty, one round suffices, with the fewest possible moves.
    Cost: O(number of blocks), in NumPy.
    """
    import numpy as np

    _check_limits(max_moves, max_evictions)
    blocks = _Map(pool)
    overwritten = _find_next_evicted(pool, blocks.cached & ~blocks.retained, max_evictions)
    blocks.empty |= overwritten
    blocks.cached &= ~overwritten
    # Below the bar there are exactly as many slots that are not immovable as there are blocks in use.
    num_in_use = int(np.count_nonzero(blocks.movable))
    bar = int(np.flatnonzero(~blocks.immovable)[num_in_use - 1]) + 1 if num_in_use else 0
    sources = (np.flatnonzero(blocks.movable[bar:]) + bar)[::-1]
    targets = np.flatnonzero(blocks.empty[:bar])
    in_the_way = np.flatnonzero(blocks.cached[:bar])
    shelters = (np.flatnonzero(blocks.empty[bar:]) + bar)[::-1]
    num_moves = pool.num_gpu_blocks if max_moves is None else max_moves
    num_direct = min(len(sources), len(targets), num_moves)
    num_in_the_way = min(len(sources) - num_direct, len(in_the_way), len(shelters), num_moves - num_direct)
    # Each kind by ascending id, so that neighbours stay neighbours where possible.
    moves = _pair(
        np.concatenate((sources[:num_direct][::-1], in_the_way[:num_in_the_way])).tolist(),
        np.concatenate((targets[:num_direct], shelters[:num_in_the_way][::-1])).tolist(),
    )
    if exchanges:
        # The next round can move one block directly for each slot vacated in this round.
        num_exchanges = min(
            len(sources) - num_direct - num_in_the_way,
            len(in_the_way) - num_in_the_way,
            (num_moves - len(moves)) // 2,
        )
        moves += _pair_both_ways(
            sources[num_direct : num_direct + num_exchanges][::-1].tolist(),
            in_the_way[num_in_the_way : num_in_the_way + num_exchanges].tolist(),
        )
    return moves


def plan_gather(
    pool: RunBlockPool,
    run_length: int,
    *,
    goal: float = 0.0,
    max_moves: int | None = None,
    max_evictions: int = 0,
    exchanges: bool = True,
) -> list[BlockMove]:
    """Plan moves that gather free blocks into runs of `run_length`, fewer moves than `plan_pack`.

        before   U . . .  U U . U  U U U .  U U . U      windows of 4 ids
        after    . . . .  U U . U  U U U U  U U . U      the emptiest window is cleared into the fullest

    Windows start at multiples of `run_length`. The plan clears the windows with the fewest blocks in use, as
    many as needed to bring the unusable share of the free blocks down to `goal`. Their blocks move to empty
    slots of the windows with the most blocks in use, or are exchanged with cached blocks there. All other
    blocks stay, so most tables keep their runs.

    Args:
        goal: the `fragmentation.get_unusable_share` to reach, 0 to 1.
        max_moves: limit of planned moves; the next plan continues from there. An exchange is two moves.
        max_evictions: how many cached blocks may be overwritten where empty slots are missing: in the full
            windows, the least recently used by age; never blocks of a band above the default one. This takes
            fewer copies than exchanges.
        exchanges: plan exchanges; without them nothing can move in a full cache.
    Returns:
        The moves, for `apply_moves`; [] if the goal is reached or nothing can move. Windows with the null
        block or a held block are never cleared, so with few windows or many holds the goal may be out of
        reach.
    Raises:
        InvalidArgumentError: `run_length` is below 1.
    Cost: O(number of blocks), in NumPy.
    """
    import numpy as np

    _check_limits(max_moves, max_evictions)
    run_length = as_count("run_length", run_length, 1)
    if pool.get_unusable_share(run_length) <= goal:
        return []
    blocks = _Map(pool)
    num_windows = -(-pool.num_gpu_blocks // run_length)

    def cut(where: "NDArray[np.bool_]", beyond: bool) -> "NDArray[np.bool_]":
        """Reshape to (num_windows, run_length); `beyond` fills the slots past the last block."""
        padded = np.full(num_windows * run_length, beyond)
        padded[: len(where)] = where
        return padded.reshape(num_windows, run_length)

    movable = cut(blocks.movable, False)
    num_used = movable.sum(axis=1)
    is_immovable: NDArray[np.bool_] = np.any(cut(blocks.immovable, True), axis=1)
    num_free = int((blocks.cached | blocks.empty).sum())
    num_wanted = min(math.ceil((1 - goal) * num_free / run_length), num_free // run_length)
    num_wanted -= int(np.count_nonzero((num_used == 0) & ~is_immovable))
    if num_wanted <= 0:
        return []
    emptiest_first = np.argsort(num_used, kind="stable")
    clearable = emptiest_first[(num_used[emptiest_first] > 0) & ~is_immovable[emptiest_first]]
    sources = clearable[:num_wanted]
    is_kept = (num_used > 0) | is_immovable
    is_kept[sources] = False
    kept = emptiest_first[::-1][is_kept[emptiest_first[::-1]]]

    def ids_in(windows: "NDArray[np.int64]", where: "NDArray[np.bool_]") -> "NDArray[np.int64]":
        rows, columns = np.nonzero(where[windows])
        found: NDArray[np.int64] = windows[rows] * run_length + columns
        return found

    num_moves = pool.num_gpu_blocks if max_moves is None else max_moves
    source_ids = ids_in(sources, movable)[:num_moves]
    target_ids = ids_in(kept, cut(blocks.empty, False))
    if len(target_ids) < len(source_ids) and max_evictions > 0:
        cached_ids = ids_in(kept, cut(blocks.cached & ~blocks.retained, False))
        oldest = cached_ids[np.argsort(blocks.ages[cached_ids], kind="stable")][:max_evictions]
        target_ids = np.concatenate((target_ids, oldest))
    moves = _pair(source_ids.tolist(), target_ids.tolist())
    if exchanges and len(moves) < len(source_ids):
        cached_ids = ids_in(kept, cut(blocks.cached, False))
        partners = cached_ids[~np.isin(cached_ids, target_ids)]
        num_exchanges = (num_moves - len(moves)) // 2
        moves += _pair_both_ways(
            source_ids[len(moves) :][:num_exchanges].tolist(), partners[:num_exchanges].tolist()
        )
    return moves


def plan_clear_run(
    pool: RunBlockPool, num_blocks: int, *, avoids_retained: bool = False, max_moves: int | None = None
) -> RunClearance | None:
    """Plan where to clear a run of `num_blocks` free blocks, and which blocks to move for it.

        before   c4 U  c1 U  | c3 c2 U          c1 is next in eviction order, then c2
        moves    U and c4 of the window [1, 2] overwrite c1 and c2
        after    .  .  c4 U  | c3 U  U          taking the run evicts no other block

    Chooses the window without held blocks that is cheapest to clear: blocks in use cost most, then cached
    blocks of higher bands. In a full cache, taking `num_blocks` evicts as many cached blocks, less the empty
    ones: only those next in eviction order, wherever they are. Blocks in use and other cached blocks move out
    of the window, to empty slots and over the blocks to evict. Exchanges would copy more and save nothing,
    since taking the run evicts the blocks that they bring into the window.

    Args:
        avoids_retained: move blocks of a band above the default one like blocks in use; never evict them.
        max_moves: limit of planned moves. Cached blocks left in the window are evicted when the run is taken,
            as few as possible of higher bands.

    Returns:
        None if no window can be cleared: too few free blocks are outside, each window has more than
        `max_moves` blocks in use, or each has a held block.
    Raises:
        InvalidArgumentError: `num_blocks` is below 1.
    Cost: O(number of blocks), in NumPy.
    """
    import numpy as np

    _check_limits(max_moves, 0)
    num_blocks = as_count("num_blocks", num_blocks, 1)
    blocks = _Map(pool)
    if num_blocks > pool.num_gpu_blocks:
        return None
    if avoids_retained:
        blocks.movable |= blocks.retained
        blocks.cached &= ~blocks.retained
        blocks.retained[:] = False

    count = partial(_count_windows, num_blocks=num_blocks)
    # What taking the run evicts once empty blocks are used up.
    next_evicted = _find_next_evicted(pool, blocks.cached, num_blocks - int(blocks.empty.sum()))
    staying = blocks.cached & ~next_evicted
    num_used = count(blocks.movable)
    free = blocks.cached | blocks.empty
    num_room = int(free.sum()) - count(free)
    cost = num_used * _IN_USE_COST
    cost += count(staying) * _CACHED_COST + count(staying & blocks.retained) * _RETAINED_COST
    possible = (count(blocks.immovable) == 0) & (num_used <= num_room)
    if max_moves is not None:
        possible &= num_used <= max_moves
    if not possible.any():
        return None
    cost[~possible] = cost.max() + 1
    first = int(np.argmin(cost))
    end = first + num_blocks
    sources = blocks.ids(blocks.movable, first, end)
    sources += blocks.ids(staying & blocks.retained, first, end)
    sources += blocks.ids(staying & ~blocks.retained, first, end)
    blocks.empty[first:end] = next_evicted[first:end] = False
    targets = blocks.ids(blocks.empty) + blocks.ids(next_evicted)
    return RunClearance(BlockId(first), _pair(sources[:max_moves], targets))


def make_run_check(
    pool: RunBlockPool, num_blocks: int, max_moves: int | None
) -> Callable[[list[BlockId]], bool]:
    """Return a function that tells whether there would be a run if further blocks were free as well.

    It takes the ids of these blocks, and remembers them for the next call. There would be a run if one is
    free then, or if `plan_clear_run` can clear one with `max_moves`. O(number of blocks).
    """
    import numpy as np

    run = ANY_AGE[1:2] * num_blocks
    limit = num_blocks if max_moves is None else max_moves
    pool.flush_evicted()
    free = np.frombuffer(pool.run_index.ages, dtype=np.uint8) != IN_USE
    movable = np.ones(pool.num_gpu_blocks, dtype=bool)
    movable[[0, *pool.holds.list_immovable_ids()]] = False
    if run not in movable.tobytes():
        limit = 0

    def has_run(freed_ids: list[BlockId]) -> bool:
        free[freed_ids] = True
        # Blocks move to free ids that may be overwritten: as many as they leave, wherever the run is.
        may_clear = limit > 0 and np.count_nonzero(free & movable) >= num_blocks
        if (may_clear and limit >= num_blocks) or run in free.tobytes():
            return True
        if not may_clear:
            return False
        is_place = _count_windows(movable, num_blocks) == num_blocks
        return bool((is_place & (_count_windows(free, num_blocks) >= num_blocks - limit)).any())

    return has_run


def plan_drain(pool: RunBlockPool, num_blocks: int) -> list[BlockMove]:
    """Plan moves that empty the `num_blocks` highest ids before `compaction.shrink` removes them.

    A full cache evicts `num_blocks` cached blocks, less the empty ones: those next in eviction order,
    wherever they are. Blocks in use and other cached blocks of the range move below it, to empty slots and
    over the blocks to evict. Exchanges would save nothing, since the blocks that they bring into the range
    are removed.

    Raises:
        InvalidArgumentError: `num_blocks` is negative, or the null block would be removed.
        InvalidBlockError: a block of the range is held.
        OutOfBlocksError: more blocks are in use in the range than are free below it.
    Cost: O(number of blocks).
    """
    if not 0 <= num_blocks < pool.num_gpu_blocks:
        raise InvalidArgumentError(f"{num_blocks} of {pool.num_gpu_blocks} blocks cannot be drained")
    blocks = _Map(pool)
    bar = pool.num_gpu_blocks - num_blocks
    drained = cast("Sequence[BlockId]", range(bar, pool.num_gpu_blocks))
    pool.holds.check_movable(drained, "cannot be drained")
    num_in_use = len(blocks.ids(blocks.movable, bar))
    num_room = len(blocks.ids(blocks.cached | blocks.empty, 0, bar))
    if num_in_use > num_room:
        raise OutOfBlocksError(
            f"{num_in_use} blocks are in use among the highest {num_blocks}, "
            f"{num_room} are free below. Free a request, or drain fewer."
        )
    next_evicted = _find_next_evicted(pool, blocks.cached, num_blocks - int(blocks.empty.sum()))
    sources = blocks.ids(blocks.movable | (blocks.cached & ~next_evicted), bar)
    return _pair(sources, blocks.ids(blocks.empty | next_evicted, 0, bar))


def _count_windows(where: "NDArray[np.bool_]", num_blocks: int) -> "NDArray[np.int64]":
    """Return the count of True in each window of `num_blocks` ids, by its first id."""
    import numpy as np

    sums = np.concatenate(([0], np.cumsum(where)))
    windows: NDArray[np.int64] = sums[num_blocks:] - sums[:-num_blocks]
    return windows


def _pair(sources: list[BlockId], targets: list[BlockId]) -> list[BlockMove]:
    """Pair each source with the target at its position; ignore the rest of the longer list."""
    return list(map(_make_move, zip(sources, targets, strict=False)))


def _pair_both_ways(sources: list[BlockId], targets: list[BlockId]) -> list[BlockMove]:
    """Like `_pair`, but with the two moves of an exchange for each pair."""
    exchanged: list[BlockMove] = []
    for source, target in zip(sources, targets, strict=False):
        exchanged += (_make_move((source, target)), _make_move((target, source)))
    return exchanged


def _find_next_evicted(
    pool: RunBlockPool, where: "NDArray[np.bool_]", num_blocks: int
) -> "NDArray[np.bool_]":
    """Return a mask of the first `num_blocks` ids in eviction order for which `where` is True."""
    import numpy as np

    queue = pool.free_block_queue.iter_blocks_after(None)
    evictable = (block.block_id for block in queue if where[block.block_id])
    found = np.zeros(len(where), dtype=bool)
    found[list(islice(evictable, max(0, num_blocks)))] = True
    return found
