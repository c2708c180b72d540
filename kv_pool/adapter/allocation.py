"""`Allocation`: takes the blocks of a request in the cheapest way that serves it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NoReturn

from kv_pool.adapter.holdings import as_new_id
from kv_pool.adapter.victims import Victims
from kv_pool.contiguous import compaction, plan
from kv_pool.contiguous.ages import EMPTY
from kv_pool.contiguous.block_copying import CopyBlocks
from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.arguments import as_count, as_int, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.taking import take, take_listed
from kv_pool.errors import InvalidArgumentError, PoolExhaustedError
from kv_pool.ids import BlockId
from kv_pool.protocol import NORMAL, BlockAllocationRequest

_NO_COMPACTION = "no compaction (ids change in a call of allocate only with on_moved=)"
_NO_EVICTION = "no eviction (eviction_policy is None)"
_MAX_SCAN = 65_536
"""Maximum number of ids that one request scans; the next request continues from there."""


class Allocation:
    """Takes blocks for one request at a time. Use it only with the pool's lock held.

        enough are free    the ids after the sequence -> a run -> a run cleared by moves -> any blocks
        too few are free   evict sequences, in the policy's order; then as above
        neither            PoolExhaustedError

    A request that requires a run gets no other blocks: the pool moves blocks in use out of the way, and where
    moves are not enough or not allowed, evicts sequences until there is a run.

    Args:
        count_available: returns how many blocks a request of this priority can take, the reserve deducted.
        copy: copies the bytes of blocks; raises if that fails.
        on_moved: called with each relocation before any of its old ids can be taken; None: move no blocks.
    """

    def __init__(
        self,
        pool: RunBlockPool,
        victims: Victims,
        count_available: Callable[[int], int],
        copy: CopyBlocks,
        on_moved: Callable[[Relocation], object] | None,
    ) -> None:
        self._pool = pool
        self._victims = victims
        self._count_available = count_available
        self._copy = copy
        self._on_moved = on_moved
        self._start = 0

    def take(
        self, request: BlockAllocationRequest, after: KVCacheBlock | None, tried: Sequence[str] = ()
    ) -> list[KVCacheBlock]:
        """Take the blocks of a request. `is_changing` of the pool is then set: the caller enters the blocks.

        Args:
            after: the last block of the request's sequence; ids directly after it are preferred.
            tried: what the caller has already tried, for the error message.
        Raises:
            PoolExhaustedError, CopyFailedError: no block was taken. Evicted sequences stay evicted.
        """
        num_blocks = request.num_blocks
        contiguous = request.contiguous
        wants_run = num_blocks > 1 and contiguous != "no"
        if wants_run and contiguous == "require":
            return self._take_required(request, after, list(tried))
        if wants_run and contiguous != "prefer":
            raise InvalidArgumentError(f"contiguous is {contiguous!r}; it is require, prefer or no")
        if num_blocks > self._count_available(request.priority):
            self._make_room(request, list(tried))
        pool = self._pool
        if wants_run and pool.policy_host is None:
            run = self._take_run(num_blocks, after, True)
            if run is None:
                max_moves = num_blocks if request.max_moves is None else request.max_moves
                run = self._make_run(num_blocks, max_moves, True)
            if run is not None:
                return run
        pool.is_changing = True
        return take(pool, num_blocks, after)

    # ---- runs ------------------------------------------------------------------------------------

    def _take_required(
        self, request: BlockAllocationRequest, after: KVCacheBlock | None, attempts: list[str]
    ) -> list[KVCacheBlock]:
        """Take a run: a free one, else one cleared by moves, else one cleared by evicting sequences."""
        num_blocks = request.num_blocks
        is_enough = num_blocks <= self._count_available(request.priority)
        if not is_enough and request.max_moves is None and self._may_clear(num_blocks):
            self._make_room(request, attempts)
            is_enough = True
        if is_enough:
            # Use a run that contains cached blocks of high priority only if there is no other.
            for avoids_retained in (True, False) if self._pool.eviction_order.has_retained else (False,):
                run = self._take_run(num_blocks, after, avoids_retained)
                if run is None:
                    run = self._make_run(num_blocks, request.max_moves, avoids_retained)
                if run is not None:
                    return run
            attempts.append(_NO_COMPACTION if self._on_moved is None else "compaction")
        self._evict_for_run(request, attempts)
        run = self._take_run(num_blocks, after, False)
        if run is None:
            self._refuse(request, attempts)  # one search does not scan all of a large pool
        return run

    def _take_run(
        self, num_blocks: int, after: KVCacheBlock | None, avoids_retained: bool
    ) -> list[KVCacheBlock] | None:
        """Take consecutive ids, preferably directly after `after`; return None, nothing changed, if none.

        Args:
            avoids_retained: do not take runs that contain cached blocks of high priority.
        """
        pool = self._pool
        ages = pool.run_index.ages
        empty = bytes([EMPTY]) * num_blocks
        first = -1
        if after is not None and ages.startswith(empty, after.block_id + 1):
            first = after.block_id + 1
        elif pool.run_index.placement != "oldest":
            return self._take_any_run(num_blocks, avoids_retained)
        elif num_blocks <= pool.free_block_queue.num_free_blocks:
            # A run that evicts nothing may be the lowest one: it is found at once, and large runs stay whole.
            first = ages.find(empty, self._start, self._start + _MAX_SCAN)
        if first >= 0:
            return self._take_at(first, num_blocks)
        self._start = self._start + _MAX_SCAN - num_blocks if self._start + _MAX_SCAN < len(ages) else 0
        return self._take_any_run(num_blocks, avoids_retained) if self._holds_content() else None

    def _take_any_run(self, num_blocks: int, avoids_retained: bool) -> list[KVCacheBlock] | None:
        pool = self._pool
        if num_blocks > pool.free_block_queue.num_free_blocks:
            return None
        pool.is_changing = True
        run = pool.run_index.take_run(pool, num_blocks, avoids_retained)
        pool.is_changing = run is not None
        return run

    def _take_at(self, first: int, num_blocks: int) -> list[KVCacheBlock]:
        run = list(self._pool.blocks[first : first + num_blocks])
        self._pool.is_changing = True
        take_listed(self._pool, run)
        return run

    def _holds_content(self) -> bool:
        """Return whether free blocks may be cached or watched, so that a run need not be of empty blocks."""
        pool = self._pool
        return (
            len(pool.cached_block_hash_to_block) > 0
            or len(pool.reuse_watchers) > 0
            or (len(pool.blocks) > _MAX_SCAN)
        )

    def _make_run(
        self, num_blocks: int, max_moves: int | None, avoids_retained: bool
    ) -> list[KVCacheBlock] | None:
        """Move blocks out of a run and take it; return None, nothing changed, if that exceeds `max_moves`.

        Args:
            avoids_retained: evict no cached block of high priority; move it like a block in use.
        """
        pool = self._pool
        if self._on_moved is None:
            return None
        clearance = plan.plan_clear_run(
            pool, num_blocks, avoids_retained=avoids_retained, max_moves=max_moves
        )
        if clearance is None:
            return None
        compaction.apply_moves(pool, clearance.moves, self._copy, on_moved=self._on_moved)
        return self._take_at(clearance.first_block_id, num_blocks)

    def _may_clear(self, num_blocks: int) -> bool:
        """Return whether moves could clear a run if enough blocks were free.

        Moves must be allowed, and blocks that cannot move must leave `num_blocks` consecutive ids.
        """
        may_lie = bytearray([1]) * len(self._pool.blocks)
        may_lie[0] = 0
        for block_id in self._pool.holds.list_immovable_ids():
            may_lie[block_id] = 0
        return self._on_moved is not None and bytes([1]) * num_blocks in may_lie

    def _has_run(self, num_blocks: int, freed_ids: Collection[BlockId]) -> bool:
        """Return whether there would be a run if `freed_ids` were also free. O(number of blocks)."""
        is_free = bytearray(self._pool.run_index.ages.translate(bytes([0]) + bytes([1]) * 255))
        for block_id in freed_ids:
            is_free[block_id] = 1
        return bytes([1]) * num_blocks in is_free

    # ---- under pressure --------------------------------------------------------------------------

    def _make_room(self, request: BlockAllocationRequest, attempts: list[str]) -> None:
        """Evict sequences until enough blocks are free; otherwise refuse with nothing changed."""
        num_missing = request.num_blocks - self._count_available(request.priority)
        if self._may_evict(request, attempts):
            victims = self._victims.choose(request.priority, request.sequence_id, num_missing)
            if victims is not None:
                self._victims.evict(victims, request.sequence_id)
                return
            attempts.append("eviction (too few blocks may be evicted)")
        self._refuse(request, attempts)

    def _evict_for_run(self, request: BlockAllocationRequest, attempts: list[str]) -> None:
        """Evict the fewest sequences, in the policy's order, that leave a run; otherwise refuse."""
        num_blocks = request.num_blocks
        if self._may_evict(request, attempts):
            victims = self._victims.choose(
                request.priority,
                request.sequence_id,
                num_blocks - self._count_available(request.priority),
                lambda freed_ids: self._has_run(num_blocks, freed_ids),
            )
            if victims is not None:
                self._victims.evict(victims, request.sequence_id)
                return
            attempts.append("eviction (no run even if all candidates are evicted)")
        self._refuse(request, attempts)

    def _may_evict(self, request: BlockAllocationRequest, attempts: list[str]) -> bool:
        if request.num_blocks >= len(self._pool.blocks):
            return False
        if not self._victims.has_policy:
            attempts.append(_NO_EVICTION)
        return self._victims.has_policy

    def _refuse(self, request: BlockAllocationRequest, attempts: Sequence[str]) -> NoReturn:
        num_free = self._pool.get_num_free_blocks()
        num_reserved = num_free - self._count_available(NORMAL)
        kept = f", {num_reserved} of them reserved" if num_reserved and request.priority == NORMAL else ""
        run = "a run of " if request.contiguous == "require" else ""
        raise PoolExhaustedError(
            f"asked for {run}{request.num_blocks} blocks for sequence {request.sequence_id}, {num_free} are "
            f"free of {len(self._pool.blocks) - 1}{kept}. Tried: "
            f"{', '.join(attempts) or 'nothing else'}. Free or evict a sequence, or ask for fewer."
        )


def check_priority(priority: int) -> None:
    """Raise InvalidArgumentError unless `priority` is 0, 1 or 2."""
    as_int("priority", priority)
    if priority not in (0, 1, 2):
        raise InvalidArgumentError(f"priority is {priority!r}; it is 0 (normal), 1 (high) or 2 (urgent)")


def as_request(request: BlockAllocationRequest) -> BlockAllocationRequest:
    """Return the request with ids and counts as ints. Raise for a request that no pool can serve."""
    check_type("request", request, BlockAllocationRequest)
    if (
        type(request.num_blocks) is int
        and type(request.sequence_id) is int
        and request.num_blocks >= 1
        and request.sequence_id >= 0
        and request.priority in (0, 1, 2)
        and (request.max_moves is None or (type(request.max_moves) is int and request.max_moves >= 0))
    ):
        return request
    num_blocks = as_int("num_blocks", request.num_blocks)
    sequence_id = as_new_id("sequence_id", request.sequence_id)
    if num_blocks < 1:
        raise InvalidArgumentError(f"num_blocks is {num_blocks}; ask for at least 1 block")
    check_priority(request.priority)
    max_moves = None if request.max_moves is None else as_count("max_moves", request.max_moves)
    return replace(request, num_blocks=num_blocks, sequence_id=sequence_id, max_moves=max_moves)
