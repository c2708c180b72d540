"""`OnboardPlan`: a two-phase load of blocks from lower tiers into a request's block table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import check_announceable
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.freeing import release_hold
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.tiers.open_plans import OpenPlans, PlanState, TwoPhasePlan, list_tail_first
from kv_pool.tiers.tier_prefixes import TierHit
from kv_pool.tiers.tiered_cache import TieredCache


class OnboardPlan(TwoPhasePlan):
    """A plan to load blocks from lower tiers for a request, made by `TierOnboarder.plan_onboard`.

                 commit                              abort
        OPEN --> request has blocks, prefix cached   request has no blocks; call find_prefix again

    While the plan is open, the manager does not know the request, the plan owns and holds the device blocks,
    and no tier evicts the blocks to be read.

    Attributes:
        request_id: the request.
        hit: the hit that the plan loads.
        num_computed_tokens: number of tokens with valid KV after the commit; the caller sets the request's
            `num_computed_tokens` to it.
        keys: the keys of the blocks to be read.
        state: open, committed or aborted.
        is_unreadable: True if a block could not be read.
    """

    def __init__(
        self,
        request: SchedulableRequest,
        hit: TierHit,
        manager: KVCacheManager,
        tiered_cache: TieredCache,
        rows: Sequence[Mapping[int, BlockHashWithGroupId]],
        allocate: Callable[[], object],
        plans: OpenPlans[OnboardPlan],
        on_close: Callable[[OnboardPlan], None],
    ) -> None:
        purpose = f"load blocks for request {request.request_id!r}"
        super().__init__(request, hit.num_device_tokens + hit.num_tokens, plans, purpose)
        self.hit = hit
        self.keys = [key for row in rows for key in row.values()]
        self.is_unreadable = False
        self._is_loaded = False
        self._manager = manager
        self._tiered_cache = tiered_cache
        self._rows = rows
        self._allocate = allocate
        self._tables: list[BlockTable] = []
        self._targets: list[KVCacheBlock] = []
        self._on_close = on_close

    def open(self) -> bool:
        """Hold the keys and take the device blocks; return False if the pool has too few."""
        pool = self._manager.block_pool
        self._plans.begin(self, PlanState.ABORTED)
        self._tiered_cache.hold(self.keys)
        pool.is_changing = False  # for a whole call; until `end` a repair releases the keys
        try:
            is_allocated = self._allocate() is not None
        except Exception:
            if not pool.is_changing:
                self._give_back()
            raise
        if not is_allocated:
            self._give_back()
            return False
        pool.is_changing = True
        hold = self._open_hold(pool)
        tables = self._manager.pop_tables(self.request_id)
        for table, spec in zip(tables, self._manager.groups, strict=True):
            table.num_hits = -(-self.num_computed_tokens // spec.block_size)
        self._tables = tables
        self._targets = [
            table.blocks[position] for table, row in zip(tables, self._rows, strict=True) for position in row
        ]
        for block in self._targets:
            if not block.is_null:
                pool.origins.note_copy(block, None)
        self._watch([block for table in tables for block in table.blocks])
        pool.holds.take_over(hold, self.list_blocks()[::-1])  # it drops its references last block first
        self._plans.end(self, PlanState.OPEN)
        return True

    def list_blocks(self) -> list[KVCacheBlock]:
        """Return the device blocks that the plan holds, the first to be reused first."""
        return list_tail_first([table.blocks for table in self._tables])

    def apply(self) -> bool:
        """Load the blocks and commit; abort on failure.

        Returns:
            False if a block could not be read, or its content was invalidated. The plan is aborted, and the
            next `find_prefix` returns a shorter prefix or none.
        Raises:
            CopyFailedError: copying to the device failed. The plan is aborted.
            Others as in `commit`. The plan is aborted.
        """
        try:
            if self.load():
                self.commit()
                return True
        except Exception:
            if self.state is PlanState.OPEN:
                self.abort()
            raise
        self.abort()
        return False

    def load(self) -> bool:
        """Read the bytes into the device blocks. The copies are complete on return.

        First offloads the old content of the newly allocated blocks (`flush_evicted`).

        Returns:
            False if a block could not be read, or was invalidated; the caller then aborts the plan.
        Raises:
            PlanClosedError: the plan is already committed or aborted.
            CopyFailedError: copying to the device failed.
        """
        self._check_open()
        wanted = {
            key: block.block_id
            for key, block in zip(self.keys, self._targets, strict=True)
            if not block.is_null
        }
        failed = self._tiered_cache.load(list(wanted), list(wanted.values()))
        self.is_unreadable = bool(failed)
        self._is_loaded = not failed and not self._is_void()
        return self._is_loaded

    def commit(self) -> None:
        """Assign the loaded blocks to the request and cache its prefix on the device.

        Raises:
            PlanClosedError: the plan is already committed or aborted.
            InvalidBlockError: the blocks are not loaded, or the content of one was invalidated since, on the
                device or in a tier. Abort the plan.
            InvalidArgumentError, InvalidTypeError: the request has got blocks in the meantime, or lacks
                fields that events need. In all cases nothing has changed.
        """
        self._check_open()
        if not self._is_loaded or self._is_void():
            raise InvalidBlockError(
                f"the blocks for request {self.request_id!r} are not all loaded, or were invalidated since; "
                "abort the plan and call find_prefix() again"
            )
        if self._manager.block_pool.enable_kv_cache_events:
            check_announceable(self._request)
        self._check_absent(self._manager)
        self._plans.begin(self, PlanState.COMMITTED)
        self._attach()
        for book, hold in self._holds:
            book.hand_over(hold)
        self._manager.block_pool.is_changing = False  # for a whole call, before tiers may evict the keys
        self._manager.cache_blocks(self._request, self.num_computed_tokens)
        self._tiered_cache.release(self.keys)
        self._plans.end(self, PlanState.COMMITTED)
        self._on_close(self)

    def abort(self) -> None:
        """Free the plan's device blocks. None of the loaded content can be hit.

        Raises:
            PlanClosedError: the plan is already committed or aborted. Nothing has changed.
        """
        self._check_open()
        self._give_back()
        self._on_close(self)

    def _give_back(self) -> None:
        """Abort: drop the references and release the keys."""
        self._plans.begin(self, PlanState.ABORTED)
        self._attach()
        for _, hold in self._holds:
            release_hold(self._manager, hold)
        self._tiered_cache.release(self.keys)
        self._plans.end(self, PlanState.ABORTED)

    def _attach(self) -> None:
        if self.outcome is PlanState.ABORTED:
            self._manager.forget_tables(self.request_id)
        elif not self._manager.holds_blocks(self.request_id):
            self._manager.put_tables(self.request_id, self._tables)

    def repair(self) -> None:
        super().repair()
        others = [plan for plan in self._plans.by_request.values() if plan is not self]
        self._tiered_cache.hold_only([key for plan in others for key in plan.keys])

    def _is_void(self) -> bool:
        """Return True if the content of a block was invalidated since the hit."""
        return self._is_invalid() or not self._tiered_cache.has_all(self.keys)

    def __repr__(self) -> str:
        return (
            f"OnboardPlan({self.request_id!r}, {self.state.value}, {len(self.keys)} blocks, "
            f"{self.hit.num_tokens} tokens)"
        )
