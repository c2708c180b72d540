"""`OpenPlans`: plans from opening to commit or abort, robust against interrupts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Generic, TypeVar

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import BlockHolds, Hold
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import RequestId
from kv_pool.manager.requests.request import SchedulableRequest


class PlanState(Enum):
    """The state of a plan: OPEN, then once COMMITTED or ABORTED."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class TwoPhasePlan(ABC):
    """A two-phase transfer of a request's blocks. `OpenPlans` opens and closes it.

    Attributes:
        request_id: the request that owns the blocks.
        num_computed_tokens: tokens whose KV the request has after a commit.
        state: open, committed or aborted.
        outcome: the state that `finish` leads to: ABORTED, unless a commit was decided.
    """

    def __init__(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        self.request_id = request.request_id
        self.num_computed_tokens = num_computed_tokens
        self.state = PlanState.OPEN
        self.outcome = PlanState.ABORTED
        self._request = request
        # While the plan is open, holds own the references that it has taken; listed with their `BlockHolds`.
        self._held: list[tuple[BlockHolds, list[Hold]]] = []

    @property
    def is_decided(self) -> bool:
        """True if the plan is closed, or the next call will commit it."""
        return self.state is not PlanState.OPEN or self.outcome is PlanState.COMMITTED

    @abstractmethod
    def open(self) -> bool:
        """Take what the plan needs; return False if it does not fit. Records blocks as it takes them."""

    def finish(self) -> None:
        """Carry out the outcome. Call it again after an exception interrupted it."""
        for book, holds in self._held:
            for hold in holds:
                if not hold.is_released:
                    book.hand_over(hold, [])
        if self.outcome is PlanState.COMMITTED:
            self._commit()
        else:
            self._abort()

    def _hold(self, pool: BlockPoolCore, blocks: list[KVCacheBlock], reason: str) -> None:
        """Pass the plan's references to these blocks to a hold; `finish` takes them back."""
        holds: list[Hold] = []
        self._held.append((pool.holds, holds))
        pool.holds.adopt([block for block in blocks if not block.is_null], reason, holds)

    @abstractmethod
    def _commit(self) -> None:
        """Put every block and table on the target side, unless it is there already."""

    @abstractmethod
    def _abort(self) -> None:
        """Release what the plan has taken, unless it is released already."""


P = TypeVar("P", bound=TwoPhasePlan)


class OpenPlans(Generic[P]):
    """Opens and closes plans. An interrupted call is undone or completed, at the latest by the next call.

    Attributes:
        by_request: the open plans, oldest first.
    """

    def __init__(self) -> None:
        self.by_request: dict[RequestId, P] = {}
        self._unfinished: P | None = None

    def open(self, plan: P) -> bool:
        """Open and list a plan; return False, with nothing changed, if it does not fit."""
        self._unfinished = plan
        try:
            if plan.open():  # no call from here on
                self.by_request[plan.request_id] = plan
                self._unfinished = None
                return True
            self.recover()
        except BaseException:
            self.recover()
            raise
        return False

    def close(self, plan: P, outcome: PlanState) -> None:
        """Commit or abort an open plan. An interrupt cannot prevent that it is closed."""
        plan.outcome = outcome
        self._unfinished = plan  # no call before this line: the decision is recorded
        try:
            self.recover()
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:
        """Close the plan whose opening or closing was interrupted. Safe to call again if interrupted."""
        plan = self._unfinished
        if plan is None:
            return
        plan.finish()
        plan.state = plan.outcome  # no call from here on
        if plan.request_id in self.by_request and self.by_request[plan.request_id] is plan:
            del self.by_request[plan.request_id]
        self._unfinished = None
