"""`OpenPlans`: the plans of a swapper or an onboarder, from opening to commit or abort."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

from kv_pool.core.arguments import get_request_id, refuse_interrupted
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold, HoldState
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, PlanClosedError
from kv_pool.ids import RequestId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest


class PlanState(Enum):
    """The state of a plan: OPEN, then once COMMITTED or ABORTED."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class TwoPhasePlan:
    """A two-phase transfer of a request's blocks. While it is open, holds own the references to them.

    Args:
        num_computed_tokens: tokens whose KV the request has after a commit.
        purpose: completes "the plan to ...".
    """

    def __init__(
        self, request: SchedulableRequest, num_computed_tokens: int, plans: OpenPlans[Any], purpose: str
    ) -> None:
        self.request_id = request.request_id
        self.num_computed_tokens = num_computed_tokens
        self.state = PlanState.ABORTED  # until it is open
        self._request = request
        self._plans = plans
        self._purpose = purpose
        self._holds: dict[KVCacheManager, Hold] = {}  # by side
        self._watched: list[tuple[KVCacheBlock, int]] = []

    def _hold(self, manager: KVCacheManager, blocks: Sequence[KVCacheBlock]) -> None:
        """Let a hold own the references to these blocks of one side, the first to be reused first."""
        # A hold drops its references last block first.
        reason = f"in an open plan to {self._purpose}"
        self._holds[manager] = manager.block_pool.holds.adopt(list(reversed(blocks)), reason)

    def _settle(self, side: KVCacheManager | None) -> None:
        """End the holds: one side's tables get its references; all others are dropped, with their copies."""
        for manager, hold in self._holds.items():
            if manager is side:
                manager.block_pool.holds.hand_over(hold)
            else:
                manager.copies.drop(hold.blocks)
                manager.block_pool.holds.end(hold, HoldState.RELEASED)

    def _check_open(self) -> None:
        self._plans.check_whole()
        if self.state is not PlanState.OPEN:
            raise PlanClosedError(
                f"the plan to {self._purpose} is already {self.state.value}; make a new one"
            )

    def _check_absent(self, manager: KVCacheManager) -> None:
        """Raise InvalidArgumentError if the request was given blocks while the plan was open."""
        if manager.holds_blocks(self.request_id):
            raise InvalidArgumentError(
                f"request {self.request_id!r} was given blocks during a plan to {self._purpose}; free "
                "them first"
            )

    def _watch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let `_is_invalid` notice if content of one of these blocks turns out to be wrong from now on."""
        self._watched = [(block, block.generation) for block in blocks]

    def _is_invalid(self) -> bool:
        """Return True if the content of a watched block was reported as invalid, or evicted."""
        return any(block.generation != generation for block, generation in self._watched)

    def repair(self, state: PlanState) -> None:
        """Close the plan, of which a call was interrupted. References are counted again afterwards.

        A subclass puts the tables where they belong in this state, COMMITTED or ABORTED, too.
        """
        self.state = state
        for manager, hold in self._holds.items():
            if not hold.is_released:
                hold.forget()
                manager.block_pool.holds.end(hold, HoldState.RELEASED)


P = TypeVar("P", bound=TwoPhasePlan)


class OpenPlans(Generic[P]):
    """The open plans of a swapper or an onboarder. A repair closes the one that was interrupted.

    Args:
        pools: the pools whose blocks the plans have; the manager's first.

    Attributes:
        by_request: the open plans, oldest first.
        running: the plan that a running call opens or closes, and the state in which a repair leaves it; None
            between calls.
    """

    def __init__(self, *pools: BlockPoolCore) -> None:
        self.by_request: dict[RequestId, P] = {}
        self.running: tuple[P, PlanState] | None = None
        self._pools = pools
        pools[0].holds.add_party(weakref.ref(self))

    def is_whole(self) -> bool:
        """Return False if a call of a plan or of one of the pools runs, or was interrupted."""
        return self.running is None and not any(pool.is_changing for pool in self._pools)

    def check_whole(self) -> None:
        """Raise PoolInterruptedError unless `is_whole`."""
        if not self.is_whole():
            refuse_interrupted()

    def check_none_open(self, request: SchedulableRequest) -> RequestId:
        """Return the request's id. Raise as `check_whole`, or InvalidArgumentError if it has an open plan."""
        self.check_whole()
        request_id = get_request_id("request", request)
        plan = self.by_request.get(request_id)
        if plan is not None:
            raise InvalidArgumentError(
                f"request {request_id!r} already has an open plan, {plan!r}; commit or abort it first"
            )
        return request_id

    def begin(self, plan: P, leads_to: PlanState) -> None:
        """Begin a change of the plan and its pools, which `end` completes, or a repair with this state."""
        for pool in self._pools:
            pool.is_changing = True
        self.running = plan, leads_to

    def end(self, plan: P, state: PlanState) -> None:
        """End the change: the plan is now open, and the caller's, or closed."""
        if state is PlanState.OPEN:
            self.by_request[plan.request_id] = plan
        elif plan.request_id in self.by_request:
            del self.by_request[plan.request_id]
        plan.state = state
        self.running = None  # no call since the plan is listed, or not, as its new state says
        for pool in self._pools:
            pool.is_changing = False

    def begin_repair(self) -> None:
        """Close the plan of which a call was interrupted. Called by a repair of the pool."""
        if self.running is not None:
            plan, state = self.running
            plan.repair(state)
            if plan.request_id in self.by_request:  # no call from here on
                del self.by_request[plan.request_id]
            self.running = None


def list_tail_first(blocks_by_group: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return the blocks in the order of reuse: group by group, last block first, without null blocks."""
    return [block for blocks in blocks_by_group for block in reversed(blocks) if not block.is_null]
