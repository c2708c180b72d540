"""`OpenPlans`: plans from when they are opened until commit or abort, whatever interrupts these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Generic, TypeVar

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import BlockHolds, Hold
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.manager.requests.request import SchedulableRequest


class PlanState(Enum):
    """OPEN -> COMMITTED or ABORTED, once."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class TwoPhasePlan(ABC):
    """A request's blocks on their way. `OpenPlans` opens and closes it.

    Attributes:
        request_id: whose blocks they are.
        num_computed_tokens: tokens whose KV the request has after a commit.
        state: open, committed or aborted.
        outcome: what `finish` makes of it: ABORTED, unless a commit was decided.
    """

    def __init__(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        self.request_id = request.request_id
        self.num_computed_tokens = num_computed_tokens
        self.state = PlanState.OPEN
        self.outcome = PlanState.ABORTED
        self._request = request
        # While the plan is open, holds have the references that it has taken; with the books they are in.
        self._held: list[tuple[BlockHolds, list[Hold]]] = []

    @property
    def is_decided(self) -> bool:
        """Whether the plan is closed, or is going to be committed at the next call."""
        return self.state is not PlanState.OPEN or self.outcome is PlanState.COMMITTED

    @abstractmethod
    def open(self) -> bool:
        """Take what the plan needs; False if there is no room. What was taken is noted in the same step."""

    def finish(self) -> None:
        """Carry out the outcome. May be called again, where an exception interrupted it."""
        for book, holds in self._held:
            for hold in holds:
                if not hold.is_released:
                    book.hand_over(hold, [])
        if self.outcome is PlanState.COMMITTED:
            self._commit()
        else:
            self._abort()

    def _hold(self, pool: BlockPoolCore, blocks: list[KVCacheBlock], reason: str) -> None:
        """Pass the plan's references to these blocks on to a hold, which `finish` takes them back from."""
        holds: list[Hold] = []
        self._held.append((pool.holds, holds))
        pool.holds.adopt([block for block in blocks if not block.is_null], reason, holds)

    @abstractmethod
    def _commit(self) -> None:
        """Put everything where the plan wanted it, as far as it is not there."""

    @abstractmethod
    def _abort(self) -> None:
        """Give back what the plan has taken, as far as it has not."""


P = TypeVar("P", bound=TwoPhasePlan)


class OpenPlans(Generic[P]):
    """Opens and closes plans. What an exception interrupts is undone or completed, at the next call at last.

    Attributes:
        by_request: the open plans, oldest first.
    """

    def __init__(self) -> None:
        self.by_request: dict[str, P] = {}
        self._unfinished: P | None = None

    def open(self, plan: P) -> bool:
        """Let the plan take what it needs, and list it; False, with nothing changed, if there is no room."""
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
        """Commit or abort an open plan. An interrupt does not keep it from being closed."""
        plan.outcome = outcome
        self._unfinished = plan  # no call before: what is decided is noted
        try:
            self.recover()
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:
        """Close the plan whose opening or closing was interrupted; may itself be interrupted."""
        plan = self._unfinished
        if plan is None:
            return
        plan.finish()
        plan.state = plan.outcome  # no call from here on
        if plan.request_id in self.by_request and self.by_request[plan.request_id] is plan:
            del self.by_request[plan.request_id]
        self._unfinished = None
