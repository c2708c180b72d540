"""`BlockSwapper`: move requests' blocks between the manager's pool and a pool in host memory; `SwapPlan`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from itertools import zip_longest
from typing import Any

from kv_pool.core.arguments import as_count
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.caching import cache_full
from kv_pool.core.extra_keys import check_announceable
from kv_pool.core.freeing import free_listed
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.taking import take, touch_listed
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId, BlockId, BlockMove, GroupId, RequestId
from kv_pool.manager.admission import AllocStatus, list_lasting_pins, plan_step
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable, Step
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.tiers.open_plans import OpenPlans, PlanState, TwoPhasePlan, list_tail_first


class SwapDirection(Enum):
    """The direction of a swap. OUT: device to host. IN: host to device."""

    OUT = "out"
    IN = "in"


class SwapPlan(TwoPhasePlan):
    """The copies of a swap, and the change of tables that a commit makes. From `BlockSwapper`.

                    commit                       open                   abort
        OUT   request is swapped out   device blocks -> host   request holds its device blocks again
        IN    request holds blocks     host blocks -> device   request is swapped out, as before

    While a plan is open the manager does not know the request: freeing, forking or caching it there raises
    InvalidArgumentError, and so does allocating for it if it has computed tokens. The plan references its
    sources and targets and holds them in place, so they are neither reused nor moved to other ids.

        plan = swapper.swap_out(request)
        if plan is not None:
            plan.apply(lambda moves: device_storage.copy_to(host_storage, moves))

    Attributes:
        request_id: the request that owns the blocks.
        direction: OUT or IN.
        moves: `source` is a block id of the pool that is copied from, `target` one of the other pool; sources
            are distinct, and so are targets. May be empty.
        num_shared_blocks: blocks that are already on the other side and need no move.
        num_computed_tokens: tokens whose KV the request has after a commit.
        state: open, committed or aborted.

    Args:
        tables: the source side's tables, which the plan detaches when it is opened.
    """

    def __init__(
        self,
        swapper: BlockSwapper,
        direction: SwapDirection,
        request: SchedulableRequest,
        tables: list[BlockTable],
    ) -> None:
        purpose = f"swap request {request.request_id!r} {direction.value}"
        super().__init__(request, request.num_computed_tokens, swapper._plans, purpose)
        self.direction = direction
        self.moves: list[BlockMove] = []
        self._groups = swapper._groups
        self._swapper = swapper
        # The managers of the two sides; the rules of each for taking and freeing apply there.
        self._source, self._target = swapper.manager, swapper._host
        if direction is SwapDirection.IN:
            self._source, self._target = self._target, self._source
        self._tables = tables
        # For each table entry, the target side's block with the same prefix; its null block if the entry
        # needs none; None for a block to take and to copy into.
        self._found = [self._match(group, table) for group, table in zip(self._groups, tables, strict=True)]
        self._shared = [
            block for row in self._found for block in row if block is not None and not block.is_null
        ]
        self.num_shared_blocks = len(self._shared)
        self._num_missing = sum(row.count(None) for row in self._found)
        self._sources = [table.blocks for table in tables]
        # For each group, the blocks that replace the sources; the null block for an entry without a block.
        self._targets: list[list[KVCacheBlock]] = []

    def commit(self) -> None:
        """Complete the swap after the copies are done: the request moves to the other side.

        On a GPU, call it when the copies have finished, or if work that reuses the sources is queued behind
        them. Full blocks can now be hit on the target side, and on the source side until they are reused.
        Raises:
            PlanClosedError: the plan is already committed or aborted.
            InvalidBlockError: a block that the target side had turned out to be invalid. Abort the plan.
            InvalidArgumentError, InvalidTypeError: the request was given blocks in the meantime, or lacks
                data for an event. In all cases nothing has changed.
        """
        self._check_open()
        self._check_valid()
        self._check_absent(self._target)
        if self._target.block_pool.enable_kv_cache_events:
            check_announceable(self._request)
        self._plans.begin(self, PlanState.COMMITTED)
        self._cache_copies()
        self._attach(PlanState.COMMITTED)
        for group_id, blocks in enumerate(self._sources):
            for listener in self._source.listeners:
                listener.note_leaving(self.request_id, GroupId(group_id), 0, blocks)
        self._settle(self._target)
        self._plans.end(self, PlanState.COMMITTED)

    def abort(self) -> None:
        """Cancel the swap: the sources are as before, and the targets are freed.

        No copy may be in flight any more; it would write into blocks that other requests get.
        Raises:
            PlanClosedError: the plan is already committed or aborted.
            InvalidArgumentError: the request was given blocks in the meantime. In both cases nothing has
                changed.
        """
        self._check_open()
        self._check_absent(self._source)
        self._plans.begin(self, PlanState.ABORTED)
        self._attach(PlanState.ABORTED)
        self._settle(self._source)
        self._plans.end(self, PlanState.ABORTED)

    def apply(self, copy: Callable[[list[BlockMove]], object]) -> None:
        """Call `copy` with the moves, if any, and commit.

        If `copy` raises an `Exception`, or a block of the target side turned out to be invalid before, abort
        and re-raise. The plan is still open after another exception, such as KeyboardInterrupt, and after one
        that leaves a pool interrupted.
        """
        self._check_open()
        try:
            self._check_valid()
            if self.moves:
                copy(self.moves)
        except Exception:
            if self.state is PlanState.OPEN and self._plans.is_whole():
                self.abort()
            raise
        self.commit()

    def _check_valid(self) -> None:
        """Invalid blocks of the source side are not cached on the target side; reports name their request."""
        if self._is_invalid():
            raise InvalidBlockError(
                f"blocks that the plan shares for request {self.request_id!r} were reported as invalid; "
                "abort it and make a new one"
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.request_id!r}, {self.direction.value}, {self.state.value}, "
            f"{len(self.moves)} moves, {self.num_shared_blocks} shared)"
        )

    def open(self) -> None:
        """Take the targets and detach the tables. The target side has enough blocks."""
        self._plans.begin(self, PlanState.ABORTED)
        pool = self._target.block_pool
        self._watch(self._shared)
        # Touch the found blocks first: until then they may be among the blocks that are taken.
        touch_listed(pool, self._shared)
        taken = iter(take(pool, self._num_missing))
        self._targets = [[next(taken) if block is None else block for block in row] for row in self._found]
        self.moves = [
            BlockMove(before.block_id, after.block_id)
            for row, targets, found in zip(self._sources, self._targets, self._found, strict=True)
            for before, after, there in zip(row, targets, found, strict=True)
            if there is None
        ]
        self._hold(self._source, list_tail_first(self._sources))
        self._hold(self._target, list_tail_first(self._targets))
        self._source.pop_tables(self.request_id)
        pool.flush_evicted()
        self._plans.end(self, PlanState.OPEN)

    def list_blocks(self, side: KVCacheManager) -> list[KVCacheBlock]:
        """Return the blocks of one side that the plan holds at their ids, in the order of reuse."""
        return list_tail_first(self._sources if side is self._source else self._targets)

    def _attach(self, state: PlanState) -> None:
        """Put the tables where they belong in this state, COMMITTED or ABORTED, unless they are there."""
        side = self._source
        if state is PlanState.COMMITTED:
            side = self._target
            self._change_tables()
        if not side.holds_blocks(self.request_id):
            side.put_tables(self.request_id, self._tables)
        swapper = self._swapper
        if side is swapper._host:
            swapper._swapped_out[self.request_id] = self.num_computed_tokens
        else:
            swapper._swapped_out.pop(self.request_id, None)
            swapper._host.forget_tables(self.request_id)

    def repair(self, state: PlanState) -> None:
        self._attach(state)
        super().repair(state)

    def _change_tables(self) -> None:
        """Replace the tables' blocks by those of the target side. Can be repeated."""
        origins = self._source.block_pool.origins
        for group, table, found, sources, row in zip(
            self._groups, self._tables, self._found, self._sources, self._targets, strict=True
        ):
            for position, (there, before, after) in enumerate(zip(found, sources, row, strict=True)):
                if there is None:
                    self._target.block_pool.origins.note_copy(after, before)
                    if before.key is None:
                        start = position * group.block_size
                        origins.note_continued(before, start, self._request.block_hashes)
            num_skipped = self._count_skipped(group, table)
            num_full = self.num_computed_tokens // group.block_size
            table.add_past(0, sources)
            table.blocks = row
            table.num_null_blocks = num_skipped
            table.num_hits = len(row)
            table.num_cached_blocks = min(table.num_cached_blocks, num_full)
            table.num_edits += 1

    def _cache_copies(self) -> None:
        """Cache copies of cached blocks under the same keys: one event for each gapless part."""
        pool = self._target.block_pool
        if not pool.enable_caching:
            return
        for group, table, found, row in zip(
            self._groups, self._tables, self._found, self._targets, strict=True
        ):
            first = 0
            for position, there in enumerate([*found, pool.null_block]):
                if there is None and self._find_key(group, table, position):
                    continue
                if first < position:
                    cache_full(
                        pool, self._request, row, first, position, group.block_size, group.group_id, None
                    )
                first = position + 1

    def _match(self, group: BlockGroup, table: BlockTable) -> list[KVCacheBlock | None]:
        """Look up every block of a table on the target side: see `_found`. Changes nothing. O(blocks)."""
        pool = self._target.block_pool
        row: list[KVCacheBlock | None] = [pool.null_block] * len(table.blocks)
        for position in range(self._count_skipped(group, table), len(table.blocks)):
            if not table.blocks[position].is_null:
                key = self._find_key(group, table, position)
                row[position] = None if key is None else pool.cached_block_hash_to_block.get_one_block(key)
        return row

    def _find_key(self, group: BlockGroup, table: BlockTable, position: int) -> BlockHashWithGroupId | None:
        """Return the key under which this block is cached; None if it is not, or not computed in full.

        A block that carries another key than the request's own, or none (it was evicted as invalid), is not a
        prefix of any request: its content moves with the request and cannot be hit.
        """
        block = table.blocks[position]
        if block.is_null or block.block_hash is None or not group.is_cacheable:
            return None
        if (position + 1) * group.block_size > self.num_computed_tokens:
            return None
        hashes, place = self._request.block_hashes, (position + 1) * group.stride - 1
        if place >= len(hashes):
            return None
        key = make_block_hash_with_group_id(hashes[place], group.group_id)
        return key if block.block_hash == key else None

    def _count_skipped(self, group: BlockGroup, table: BlockTable) -> int:
        """Count the leading entries that no later token needs; they become null blocks on the other side."""
        if not group.forgets:
            return table.num_null_blocks
        num_skipped = group.count_skipped_tokens(self.num_computed_tokens) // group.block_size
        return max(table.num_null_blocks, min(num_skipped, len(table.blocks)))


class BlockSwapper:
    """A host pool beside the pool of a `KVCacheManager`, with the requests that are swapped out to it.

        >>> from kv_pool import BlockHasher, BlockPool, BlockSwapper, KVCacheManager, Request
        >>> manager = KVCacheManager(BlockPool(10, True, 4))
        >>> swapper = BlockSwapper(manager, BlockPool(20, True, 4, medium="CPU"))
        >>> request = Request("a", range(100, 110), BlockHasher(block_size=4))
        >>> _ = manager.allocate_slots(request, 10)
        >>> request.num_computed_tokens = 10
        >>> plan = swapper.swap_out(request)
        >>> plan.moves
        [BlockMove(source=1, target=1), BlockMove(source=2, target=2), BlockMove(source=3, target=3)]
        >>> plan.commit()                                   # after the bytes of these blocks are copied
        >>> manager.holds_blocks("a"), swapper.is_swapped_out("a")
        (False, True)
        >>> swapper.swap_in(request)                        # two of three are still on the device
        SwapPlan('a', in, open, 1 moves, 2 shared)

    Args:
        manager: the manager of the requests to swap.
        host_pool: a pool for this swapper alone, with the same `hash_block_size`, caching and hash lookahead
            as the manager's pool, and another `medium` for its events. It holds blocks of all groups.

    Call it between two steps, when each request's `num_computed_tokens` counts the tokens in its blocks, and
    after the copies of `take_block_copies` are applied; a swapped request keeps its `num_computed_tokens`.
    Not thread-safe. See `SwapPlan` for what is allowed while a plan is open.

    After a call that was interrupted, by the exception of a signal handler for example, call the manager's
    `repair()`: it repairs both pools. Swapped-out requests and open plans keep their blocks; a plan whose
    opening was interrupted is aborted, one whose commit was interrupted is committed.
    """

    def __init__(self, manager: KVCacheManager, host_pool: BlockPoolCore) -> None:
        device_pool = manager.block_pool
        for name in ("hash_block_size", "num_hash_lookahead_tokens", "enable_caching"):
            if getattr(host_pool, name) != getattr(device_pool, name):
                raise InvalidArgumentError(
                    f"the host pool has {name} {getattr(host_pool, name)}, the manager's pool "
                    f"{getattr(device_pool, name)}; to move blocks between them, both need the same"
                )
        if host_pool is device_pool:
            raise InvalidArgumentError("the host pool is the manager's own pool; it must be another one")
        self.manager = manager
        self.host_pool = host_pool
        # The host's tables are those of a manager that allocates for no request.
        self._host = KVCacheManager(host_pool, groups=manager.groups, prefix_rules=manager.prefix_rules)
        swapper = weakref.ref(self)
        manager.add_host(lambda: None if (one := swapper()) is None else one._host)
        self._groups: list[BlockGroup] = manager._groups
        self._swapped_out: dict[RequestId, int] = {}  # their computed tokens
        self._plans: OpenPlans[SwapPlan] = OpenPlans(device_pool, host_pool)

    # ---- looking ---------------------------------------------------------------------------------

    def is_swapped_out(self, request_id: RequestId) -> bool:
        """Return True if the request's blocks are on the host and no plan is open for it."""
        return self._host.holds_blocks(request_id)

    def list_swapped_out(self) -> list[RequestId]:
        """Return the swapped-out requests, in the order in which they were swapped out."""
        return self._host.list_request_ids()

    def list_open_plans(self) -> list[SwapPlan]:
        """Return the plans that are neither committed nor aborted, oldest first."""
        return list(self._plans.by_request.values())

    def get_host_block_ids(self, request_id: RequestId, group_id: GroupId = GroupId(0)) -> list[BlockId]:
        """Return the block table of a swapped-out request: ids of the host pool; 0 where there is no block.

        Raises:
            InvalidArgumentError: the request is not swapped out, or there is no such group.
        """
        self._tables_of(request_id)
        return self._host.get_block_ids(request_id, group_id)

    def can_swap_out(self, request: SchedulableRequest) -> AllocStatus:
        """Return OK if `swap_out` would return a plan now, else LATER or NEVER. Changes nothing. O(blocks).

        NEVER means that the host pool is too small for the blocks that the request has now. Raises the errors
        of `swap_out`.
        """
        return self._judge(SwapDirection.OUT, request)[1]

    def can_swap_in(
        self,
        request: SchedulableRequest,
        num_lookahead_tokens: int = 0,
        *,
        num_new_tokens: int | None = None,
    ) -> AllocStatus:
        """Return OK if `swap_in` with the same arguments would return a plan now, else LATER or NEVER.

        Changes nothing. O(blocks).

        Args:
            num_new_tokens: tokens of the request's next step, whose slots must fit, too; by default all
                tokens that are not computed.
            num_lookahead_tokens: slots after them.
        Returns:
            OK: after `swap_in`, and if no other request takes blocks, `allocate_slots(request,
            num_new_tokens, num_lookahead_tokens=...)` succeeds as well. LATER: not now, or not without going
            below the watermark, which applies while other requests hold blocks. NEVER: it needs more blocks
            than the pool has.
        Raises:
            The errors of `swap_in`.
        """
        return self._judge(SwapDirection.IN, request, num_new_tokens, num_lookahead_tokens)[1]

    # ---- plans -----------------------------------------------------------------------------------

    def swap_out(self, request: SchedulableRequest) -> SwapPlan | None:
        """Plan to copy the request's blocks to the host and to release them on the device.

        Blocks whose prefix the host already has are shared there. Blocks that left a window are not copied.
        Slots after the computed tokens move with the request.
        Returns:
            The plan; None if `can_swap_out` does not return OK, with nothing changed. While the plan is open
            it owns the request's device blocks, and the manager does not know the request.
        Raises:
            InvalidArgumentError: the request holds no device blocks, is already swapped out, or block copies
                are pending. Nothing has changed.
        A commit frees the device blocks, each group's tail to be reused first; until then they can be hit
        there. Their copies can be hit on the host.
        """
        return self._plan(SwapDirection.OUT, request)

    def swap_in(
        self,
        request: SchedulableRequest,
        num_lookahead_tokens: int = 0,
        *,
        num_new_tokens: int | None = None,
    ) -> SwapPlan | None:
        """Plan to copy the blocks of a swapped-out request back to the device.

        Blocks whose prefix the device has, still or again, are shared there; a last block that is not full is
        always copied.
        Args:
            num_lookahead_tokens, num_new_tokens: slots that must fit for the next step: see `can_swap_in`.
                They are not taken; `allocate_slots` does that.
        Returns:
            The plan; None if `can_swap_in` does not return OK, with nothing changed.
        Raises:
            InvalidArgumentError: the request is not swapped out, holds device blocks, or has another
                `num_computed_tokens` than when it was swapped out. Nothing has changed.
        A commit frees the host blocks, each group's tail to be reused first; until then they can be hit.
        """
        return self._plan(SwapDirection.IN, request, num_new_tokens, num_lookahead_tokens)

    # ---- dropping --------------------------------------------------------------------------------

    def drop(self, request: SchedulableRequest) -> None:
        """Free the host blocks of a swapped-out request that will not come back.

        They can be hit on the host until they are reused, each group's tail first.
        Raises:
            InvalidArgumentError: the request is not swapped out, or a plan for it is open: close the plan,
                then free the request on the side where it is. Nothing has changed.
        """
        request_id = self._plans.check_none_open(request)
        tables = self._tables_of(request_id)
        for listener in self.manager.listeners:
            listener.note_ended(request_id, tables)
        self.host_pool.is_changing = True
        del self._host._tables[request_id], self._swapped_out[request_id]
        self.manager.detached_tables.pop(request_id, None)  # no call in between
        free_listed(self.host_pool, list_tail_first([table.blocks for table in tables]))
        self.host_pool.is_changing = False

    def reset_prefix_cache(self) -> bool:
        """Evict every prefix on both sides. Return False, with nothing changed, if a request holds blocks."""
        return self.manager.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of both pools since the last call: the device's, then the host's, each in order.

        The events of both pools before a `reset_prefix_cache` come before all events after it: an
        `AllBlocksCleared` means that both pools are empty.
        """
        sides = [
            split_at_resets(side.take_events(), side.block_pool.cleared_type)
            for side in (self.manager, self._host)
        ]
        # Both have had the latest resets; one may have had more, of which the other's events were taken.
        rounds = list(zip_longest(*map(reversed, sides), fillvalue=[]))
        return [event for parts in reversed(rounds) for part in parts for event in part]

    # ---- internals -------------------------------------------------------------------------------

    def _plan(self, direction: SwapDirection, request: SchedulableRequest, *more: Any) -> SwapPlan | None:
        """Open a plan, or return None; the arguments are those of `_judge`."""
        plan, status = self._judge(direction, request, *more)
        if status is not AllocStatus.OK:
            return None
        plan.open()
        return plan

    def _judge(
        self,
        direction: SwapDirection,
        request: SchedulableRequest,
        num_new_tokens: int | None = None,
        num_lookahead_tokens: int = 0,
    ) -> tuple[SwapPlan, AllocStatus]:
        """Return a plan that is not open yet, and whether the free blocks of its target side suffice.

        Args:
            num_new_tokens, num_lookahead_tokens: those of the next step after a swap in, see `can_swap_in`.
        """
        is_out = direction is SwapDirection.OUT
        tables = self._check_swap_out(request) if is_out else self._check_swap_in(request)
        plan = SwapPlan(self, direction, request, tables)
        side, shared = plan._target, plan._shared
        num_new, num_to_leave, num_pinned = plan._num_missing, 0, 0
        if not is_out:
            num_new += self._count_more_blocks(request, tables, num_new_tokens, num_lookahead_tokens)
            num_pinned = len(list_lasting_pins(side, None, shared))
            # The watermark, as for any request without blocks, applies while other requests hold blocks.
            num_to_leave = side.watermark_blocks if side.list_request_ids() else 0
        if num_new + len(shared) > side.block_pool.num_gpu_blocks - 1 - num_pinned:
            return plan, AllocStatus.NEVER
        num_available = side.get_num_free_blocks() - num_to_leave  # first: expired pins free their blocks
        num_free = sum(block.ref_cnt == 0 for block in shared)  # sharing them takes them, too
        return plan, AllocStatus.LATER if num_new + num_free > num_available else AllocStatus.OK

    def _count_more_blocks(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable],
        num_new_tokens: int | None,
        num_lookahead_tokens: int,
    ) -> int:
        """Count the blocks that the next `allocate_slots` takes after a swap in."""
        if num_new_tokens is None:
            num_new_tokens = request.num_tokens - request.num_computed_tokens
        step = Step(
            request.request_id,
            tables,
            request.num_computed_tokens,
            0,
            0,
            as_count("num_new_tokens", num_new_tokens),
            as_count("num_lookahead_tokens", num_lookahead_tokens),
            self.manager.max_model_len,
        )
        step.is_alone = True
        return plan_step(self.manager, step)

    def _check_swap_out(self, request: SchedulableRequest) -> list[BlockTable]:
        request_id = self._plans.check_none_open(request)
        if self._host.holds_blocks(request_id):
            raise InvalidArgumentError(f"request {request_id!r} is swapped out; swap it in, or drop it")
        tables = [self.manager.get_table(request_id, group.group_id) for group in self._groups]
        for table in tables:
            self.manager.copies.check_made(request_id, table.blocks)
        return tables

    def _check_swap_in(self, request: SchedulableRequest) -> list[BlockTable]:
        request_id = self._plans.check_none_open(request)
        tables = self._tables_of(request_id)
        if self.manager.holds_blocks(request_id):
            raise InvalidArgumentError(
                f"request {request_id!r} is swapped out but has device blocks, too; free these first"
            )
        num_computed = self._swapped_out[request_id]
        if request.num_computed_tokens != num_computed:
            num_valid = tables[0].num_valid_tokens
            if not (num_valid < num_computed and 0 <= request.num_computed_tokens <= num_valid):
                raise InvalidArgumentError(
                    f"request {request_id!r} has num_computed_tokens {request.num_computed_tokens}; "
                    f"it was swapped out with {num_computed}, and must keep that count, unless a report of "
                    "invalid blocks decreases it"
                )
        return tables

    def _tables_of(self, request_id: RequestId) -> list[BlockTable]:
        tables = self._host._tables.get(request_id)
        if tables is None:
            raise InvalidArgumentError(
                f"request {request_id!r} is not swapped out; it never was, came back, was dropped, or has an "
                "open plan"
            )
        return tables


def split_at_resets(events: list[KVCacheEvent], cleared: type) -> list[list[KVCacheEvent]]:
    """Return the events up to each reset, and those after the last one."""
    parts: list[list[KVCacheEvent]] = [[]]
    for event in events:
        parts[-1].append(event)
        if isinstance(event, cleared):
            parts.append([])
    return parts
