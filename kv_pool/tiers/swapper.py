"""`BlockSwapper`: move requests' blocks between the manager's pool and a pool in host memory."""

from __future__ import annotations

import weakref

from kv_pool.core.arguments import as_count
from kv_pool.core.freeing import free_listed
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, GroupId, RequestId
from kv_pool.manager.admission import AllocStatus, list_lasting_pins, plan_step
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.step import Step
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.tiers.open_plans import OpenPlans, list_tail_first
from kv_pool.tiers.swap_plan import Match, SwapDirection, SwapPlan, match_tables


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

    def list_device_ids_in_flight(self) -> list[BlockId]:
        """Return the ids of the device blocks of open plans, which hold them in place (`BlockPool.holds`)."""
        return [block.block_id for plan in self.list_open_plans() for block in plan.list_blocks(self.manager)]

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
        return self._judge(SwapDirection.OUT, request, self._check_swap_out(request))[0]

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
        tables = self._check_swap_in(request)
        num_more = self._count_more_blocks(request, tables, num_new_tokens, num_lookahead_tokens)
        return self._judge(SwapDirection.IN, request, tables, num_more)[0]

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
        return self._plan(SwapDirection.OUT, request, self._check_swap_out(request))

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
        tables = self._check_swap_in(request)
        num_more = self._count_more_blocks(request, tables, num_new_tokens, num_lookahead_tokens)
        return self._plan(SwapDirection.IN, request, tables, num_more)

    # ---- dropping --------------------------------------------------------------------------------

    def drop(self, request: SchedulableRequest) -> None:
        """Free the host blocks of a swapped-out request that will not come back.

        They can be hit on the host until they are reused, each group's tail first.
        Raises:
            InvalidArgumentError: the request is not swapped out, or a plan for it is open: close the plan,
                then free the request on the side where it is. Nothing has changed.
        """
        request_id = request.request_id
        tables = self._tables_of(request_id)
        self._plans.check_whole()
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
        events: list[KVCacheEvent] = []
        for num_later in range(max(map(len, sides)), 0, -1):
            for parts in sides:
                if num_later <= len(parts):
                    events += parts[-num_later]
        return events

    # ---- internals -------------------------------------------------------------------------------

    def _plan(
        self,
        direction: SwapDirection,
        request: SchedulableRequest,
        tables: list[BlockTable],
        num_more: int = 0,
    ) -> SwapPlan | None:
        """Open a plan, or return None; the arguments are those of `_judge`."""
        status, match = self._judge(direction, request, tables, num_more)
        if status is not AllocStatus.OK:
            return None
        plan = SwapPlan(
            direction, request, self.manager, self._host, tables, match, self._swapped_out, self._plans
        )
        plan.open()
        return plan

    def _judge(
        self,
        direction: SwapDirection,
        request: SchedulableRequest,
        tables: list[BlockTable],
        num_more: int = 0,
    ) -> tuple[AllocStatus, Match]:
        """Match the tables with the other side, and return whether its free blocks suffice.

        Args:
            num_more: blocks that must be free on the device after a swap in.
        """
        side = self._host if direction is SwapDirection.OUT else self.manager
        match = match_tables(request, self._groups, tables, side.block_pool)
        num_usable = side.block_pool.num_gpu_blocks - 1
        num_to_leave = 0
        if side is self.manager:
            num_usable -= len(list_lasting_pins(self.manager, None, match.shared))
            # The watermark, as for any request without blocks, applies while other requests hold blocks.
            num_to_leave = self.manager.watermark_blocks if self.manager.list_request_ids() else 0
        if match.num_new + len(match.shared) + num_more > num_usable:
            return AllocStatus.NEVER, match
        if side.retention is not None:
            side.retention.expire()
        num_free = sum(block.ref_cnt == 0 for block in match.shared)  # sharing them takes them, too
        if match.num_new + num_free + num_more > side.get_num_free_blocks() - num_to_leave:
            return AllocStatus.LATER, match
        return AllocStatus.OK, match

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
        return plan_step(self.manager, step, is_alone=True)

    def _check_swap_out(self, request: SchedulableRequest) -> list[BlockTable]:
        self._plans.check_whole()
        request_id = request.request_id
        plan = self._plans.by_request.get(request_id)
        if plan is not None:
            raise InvalidArgumentError(f"a plan is open for request {request_id!r}: {plan!r}; close it first")
        if self._host.holds_blocks(request_id):
            raise InvalidArgumentError(f"request {request_id!r} is swapped out; swap it in, or drop it")
        tables = [self.manager.get_table(request_id, group.group_id) for group in self._groups]
        for table in tables:
            self.manager.copies.check_made(request_id, table.blocks)
        return tables

    def _check_swap_in(self, request: SchedulableRequest) -> list[BlockTable]:
        self._plans.check_whole()
        tables = self._tables_of(request.request_id)
        if self.manager.holds_blocks(request.request_id):
            raise InvalidArgumentError(
                f"request {request.request_id!r} is swapped out but has device blocks, too; free these first"
            )
        num_computed = self._swapped_out[request.request_id]
        if request.num_computed_tokens != num_computed:
            num_valid = tables[0].num_valid_tokens
            if not (num_valid < num_computed and 0 <= request.num_computed_tokens <= num_valid):
                raise InvalidArgumentError(
                    f"request {request.request_id!r} has num_computed_tokens {request.num_computed_tokens}; "
                    f"it was swapped out with {num_computed}, and must keep that count, unless a report of "
                    "invalid blocks decreases it"
                )
        return tables

    def _tables_of(self, request_id: RequestId) -> list[BlockTable]:
        tables = self._host._tables.get(request_id)
        if tables is None:
            plan = self._plans.by_request.get(request_id)
            raise InvalidArgumentError(
                f"request {request_id!r} is not swapped out"
                + ("; it never was, came back, or was dropped" if plan is None else f": {plan!r} is open")
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
