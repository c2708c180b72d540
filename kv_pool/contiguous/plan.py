"""Which blocks to move so that free ids come together; `compaction.apply_moves` moves them.

Plans change nothing of the pool. Bytes that colder tiers wait for are stored first, since until then the pool
holds their blocks at their ids.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kv_pool.contiguous.ages import EMPTY, IN_USE, KEPT
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.errors import InvalidArgumentError, OutOfBlocksError
from kv_pool.ids import BlockMove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IN_USE_COST = 4
_CACHED_COST = 1
_KEPT_COST = 2
"""Relative costs of moving a block out of a window, or of losing it; no request waits for a cached block. A
block of a higher band costs both of the last two."""


# As BlockMove._make, at half the cost, which is half of the plan's.
_make_move: Callable[[tuple[int, int]], BlockMove] = partial(tuple.__new__, BlockMove)


class RunClearance(NamedTuple):
    """After `moves` the blocks `[first_block_id, first_block_id + n)` are free; some may still be cached."""

    first_block_id: int
    moves: list[BlockMove]


class _Map:
    """The state of each id, as boolean arrays over the block ids. Ids of held blocks are `fixed` only.

    `kept` are those of the cached ones that the eviction order puts above the default band.
    """

    def __init__(self, pool: RunBlockPool) -> None:
        import numpy as np

        if pool.run_index.is_stale:
            pool.rebuild_index()
        pool.store_pending()
        ages = np.frombuffer(pool.run_index.ages, dtype=np.uint8).copy()
        fixed = np.zeros(len(ages), dtype=bool)
        fixed[pool.holds.list_fixed_ids()] = True
        fixed[0] = True
        self.fixed: NDArray[np.bool_] = fixed
        self.movable: NDArray[np.bool_] = (ages == IN_USE) & ~fixed
        self.free: NDArray[np.bool_] = (ages != IN_USE) & ~fixed
        self.cached: NDArray[np.bool_] = (ages > EMPTY) & ~fixed
        self.empty: NDArray[np.bool_] = (ages == EMPTY) & ~fixed
        self.kept: NDArray[np.bool_] = (ages == KEPT) & ~fixed

    def ids(self, where: "NDArray[np.bool_]", first: int = 0, end: int | None = None) -> list[int]:
        """The ids in `[first, end)` where it holds, ascending."""
        import numpy as np

        found: list[int] = (np.flatnonzero(where[first:end]) + first).tolist()
        return found


def plan_pack(
    pool: RunBlockPool,
    *,
    max_moves: int | None = None,
    max_evictions: int = 0,
    exchanges: bool = True,
) -> list[BlockMove]:
    """One round of moves that brings the blocks in use to the lowest ids, with nothing evicted.

        before   U . c U . | U c U .        U in use   c cached and free   . empty
        moves    the U right of the bar go into the empty slots left of it, the c there into those right of it
        after    U U . U U | . c c U        and so on, until no U is right of the bar

        before   U c c U | c U c U c        a full cache: nothing is empty
        moves    each U right of the bar and a c left of it change places
        after    U U U U | c c c c c

    Args:
        max_moves: plan no more than this many; the highest ids go first. An exchange is two moves.
        max_evictions: cached blocks that may be overwritten, those next in eviction order, where too little
            is empty; none of a band above the default one. This takes fewer copies than an exchange.
        exchanges: plan exchanges; without them and with a full cache nothing can move.
    Returns:
        The moves, for `apply_moves`; [] when the pool is packed, or nothing can move. Where cached blocks are
        in the way it may take several rounds: plan again after each.

    Where nothing is cached, or nothing is empty, one round is enough, and is the least number of moves.
    Cost: O(number of blocks), in NumPy.
    """
    import numpy as np

    blocks = _Map(pool)
    _overwrite(pool, blocks, max_evictions)
    # The bar: below it there are just as many places that are not fixed as there are blocks in use.
    num_in_use = int(np.count_nonzero(blocks.movable))
    bar = int(np.flatnonzero(~blocks.fixed)[num_in_use - 1]) + 1 if num_in_use else 0
    sources = (np.flatnonzero(blocks.movable[bar:]) + bar)[::-1]
    targets = np.flatnonzero(blocks.empty[:bar])
    in_the_way = np.flatnonzero(blocks.cached[:bar])
    shelters = (np.flatnonzero(blocks.empty[bar:]) + bar)[::-1]
    num_moves = pool.num_gpu_blocks if max_moves is None else max_moves
    num_direct = min(len(sources), len(targets), num_moves)
    num_in_the_way = min(len(sources) - num_direct, len(in_the_way), len(shelters), num_moves - num_direct)
    # Each kind by ascending id: what lies side by side goes side by side wherever the room does.
    moves = _pair(
        np.concatenate((sources[:num_direct][::-1], in_the_way[:num_in_the_way])).tolist(),
        np.concatenate((targets[:num_direct], shelters[:num_in_the_way][::-1])).tolist(),
    )
    if exchanges:
        # The next round moves as many directly as blocks make room in this one.
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
    """Gather what is free into runs of `run_length`, with fewer moves than a pack takes.

        before   U . . .  U U . U  U U U .  U U . U      windows of 4 ids
        after    . . . .  U U . U  U U U U  U U . U      the emptiest made way into the fullest

    The windows are those at multiples of `run_length`. Those with least in use are cleared, as many as bring
    the unusable share of the free blocks down to `goal`; what was there goes into the empty slots of those
    with most in use, or changes places with what is cached there. Tables stay as whole as they are elsewhere.

    Args:
        goal: `fragmentation.get_unusable_share` to come down to, 0 to 1.
        max_moves: plan no more than this many; planning again goes on where this one ends. An exchange is
            two moves.
        max_evictions: cached blocks that may be overwritten where too little is empty: of those in the full
            windows the ones used longest ago, as far as ages tell; none of a band above the default one. This
            takes fewer copies than an exchange.
        exchanges: plan exchanges; without them and with a full cache nothing can move.
    Returns:
        The moves, for `apply_moves`; [] when the goal is reached, or nothing can move. Windows of the null
        block and of held ones are never cleared: with few windows, or many holds, the goal may be out of
        reach.
    Raises:
        InvalidArgumentError: `run_length` is below 1.
    Cost: O(number of blocks), in NumPy.
    """
    import numpy as np

    if run_length < 1:
        raise InvalidArgumentError(f"run_length is {run_length}; a run has at least 1 block")
    if pool.get_unusable_share(run_length) <= goal:
        return []
    blocks = _Map(pool)
    num_windows = -(-len(blocks.free) // run_length)

    def cut(where: "NDArray[np.bool_]", beyond: bool) -> "NDArray[np.bool_]":
        """(num_windows, run_length); `beyond`: what holds past the last block."""
        padded = np.full(num_windows * run_length, beyond)
        padded[: len(where)] = where
        return padded.reshape(num_windows, run_length)

    movable = cut(blocks.movable, False)
    num_used = movable.sum(axis=1)
    is_fixed: NDArray[np.bool_] = np.any(cut(blocks.fixed, True), axis=1)
    num_free = int(blocks.free.sum())
    num_wanted = min(math.ceil((1 - goal) * num_free / run_length), num_free // run_length)
    num_wanted -= int(np.count_nonzero((num_used == 0) & ~is_fixed))
    if num_wanted <= 0:
        return []
    emptiest_first = np.argsort(num_used, kind="stable")
    clearable = emptiest_first[(num_used[emptiest_first] > 0) & ~is_fixed[emptiest_first]]
    sources = clearable[:num_wanted]
    is_kept = (num_used > 0) | is_fixed
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
        cached_ids = ids_in(kept, cut(blocks.cached & ~blocks.kept, False))
        pool.store_pending()
        ages = np.frombuffer(pool.run_index.ages, dtype=np.uint8)[cached_ids]
        oldest = cached_ids[np.argsort(ages, kind="stable")][:max_evictions]
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


def plan_clear_run(pool: RunBlockPool, num_blocks: int, *, spares_kept: bool = False) -> RunClearance | None:
    """Where to make a run of `num_blocks` free blocks, and what to move for it.

    Of all windows without held blocks the one with least in use, and of those least cached. Blocks in use
    move out; cached ones too while there are empty slots elsewhere, those of higher bands first, and are
    evicted when the run is taken otherwise. Where too little is empty, blocks in use go over what is next in
    eviction order.

    Args:
        spares_kept: blocks of a band above the default one are moved like those in use, never lost.

    Returns:
        None where no window can be cleared: too few free blocks outside, or held ones everywhere.
    Raises:
        InvalidArgumentError: `num_blocks` is below 1.
    Cost: O(number of blocks), in NumPy.
    """
    import numpy as np

    if num_blocks < 1:
        raise InvalidArgumentError(f"num_blocks is {num_blocks}; a run has at least 1 block")
    blocks = _Map(pool)
    if num_blocks > len(blocks.free):
        return None
    if spares_kept:
        blocks.movable |= blocks.kept
        blocks.free &= ~blocks.kept
        blocks.cached &= ~blocks.kept
        blocks.kept[:] = False

    def count(where: "NDArray[np.bool_]") -> "NDArray[np.int64]":
        """How many there are in each window, by its first id."""
        sums = np.concatenate(([0], np.cumsum(where)))
        windows: NDArray[np.int64] = sums[num_blocks:] - sums[:-num_blocks]
        return windows

    num_used = count(blocks.movable)
    num_room = int(blocks.free.sum()) - count(blocks.free)
    cost = num_used * _IN_USE_COST + count(blocks.cached) * _CACHED_COST + count(blocks.kept) * _KEPT_COST
    possible = (count(blocks.fixed) == 0) & (num_used <= num_room)
    if not possible.any():
        return None
    cost[~possible] = cost.max() + 1
    first = int(np.argmin(cost))
    end = first + num_blocks
    outside = blocks.empty.copy()
    outside[first:end] = False
    targets = blocks.ids(outside)
    sources = blocks.ids(blocks.movable, first, end)
    if len(sources) > len(targets):
        targets += [block_id for block_id in _list_evictable(pool, blocks) if not first <= block_id < end][
            : len(sources) - len(targets)
        ]
        if len(sources) > len(targets):
            return None
    else:
        others = blocks.ids(blocks.kept, first, end) + blocks.ids(blocks.cached & ~blocks.kept, first, end)
        sources += others[: len(targets) - len(sources)]
    return RunClearance(first, _pair(sources, targets))


def plan_drain(pool: RunBlockPool, num_blocks: int) -> list[BlockMove]:
    """What to move so that the `num_blocks` highest ids can be cut off, see `RunBlockPool.shrink`.

    Blocks in use go into empty slots below, or over what is next in eviction order there; cached ones into
    the empty slots that are left, last used first. The others are lost with the slots.

    Raises:
        InvalidArgumentError: `num_blocks` is negative, or the null block would go.
        InvalidBlockError: a block up there is held.
        OutOfBlocksError: more blocks are in use up there than are free below.
    Cost: O(number of blocks).
    """
    if not 0 <= num_blocks < pool.num_gpu_blocks:
        raise InvalidArgumentError(f"{num_blocks} of {pool.num_gpu_blocks} blocks cannot be drained")
    blocks = _Map(pool)
    bar = pool.num_gpu_blocks - num_blocks
    pool.holds.check_movable(range(bar, pool.num_gpu_blocks), "cannot be drained")
    sources = blocks.ids(blocks.movable, bar)
    targets = blocks.ids(blocks.empty, 0, bar)
    if len(sources) > len(targets):
        evictable = [block_id for block_id in _list_evictable(pool, blocks) if block_id < bar]
        targets += evictable[: len(sources) - len(targets)]
        if len(sources) > len(targets):
            raise OutOfBlocksError(
                f"{len(sources)} blocks are in use among the highest {num_blocks}, "
                f"{len(targets)} are free below. Free a request, or drain fewer."
            )
    cached = blocks.cached[bar:]
    if cached.any():
        youngest_first = [
            block.block_id
            for block in reversed(pool.free_block_queue.get_all_free_blocks())
            if block.block_id >= bar and blocks.cached[block.block_id]
        ]
        sources += youngest_first[: len(targets) - len(sources)]
    return _pair(sources, targets)


def _pair(sources: list[int], targets: list[int]) -> list[BlockMove]:
    """Each source to the target beside it; the longer list's rest is left out."""
    return list(map(_make_move, zip(sources, targets, strict=False)))


def _pair_both_ways(sources: list[int], targets: list[int]) -> list[BlockMove]:
    """As `_pair`, each pair as the two moves of an exchange."""
    exchanged: list[BlockMove] = []
    for source, target in zip(sources, targets, strict=False):
        exchanged += (_make_move((source, target)), _make_move((target, source)))
    return exchanged


def _list_evictable(pool: RunBlockPool, blocks: _Map) -> Iterable[int]:
    """Cached free ids whose content may be lost, in eviction order."""
    for block in pool.free_block_queue.iter_blocks_after(None):
        if blocks.cached[block.block_id]:
            yield block.block_id


def _overwrite(pool: RunBlockPool, blocks: _Map, num_blocks: int) -> None:
    """Count the next `num_blocks` cached blocks in eviction order as empty, but none of a higher band."""
    evictable = (block_id for block_id in _list_evictable(pool, blocks) if not blocks.kept[block_id])
    for block_id in islice(evictable, num_blocks):
        blocks.empty[block_id] = True
        blocks.cached[block_id] = False
