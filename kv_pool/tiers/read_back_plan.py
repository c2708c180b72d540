"""`ReadBackPlan`: blocks on their way from tiers into a request's table, until commit or abort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import check_announceable
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, PlanClosedError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.swap.open_plans import OpenPlans, PlanState, TwoPhasePlan
from kv_pool.tiers.allocated_tables import AllocatedTables
from kv_pool.tiers.tier_hit import TierHit
from kv_pool.tiers.tiered_cache import TieredCache


class ReadBackPlan(TwoPhasePlan):
    """What is read, where to, and what becomes true when it is there. From `TierReadBack`.

                 commit                            abort
        OPEN --> request holds blocks, findable    request has no blocks: look up again

    While it is open the manager does not know the request, its device blocks belong to the plan and keep
    their ids, and no tier evicts what is to be read.

    Attributes:
        request_id: whose blocks they are.
        hit: what it was made for.
        num_computed_tokens: tokens whose KV the request has after a commit: set the request's to it.
        keys: of the blocks to be read.
        state: open, committed or aborted.
        is_unreadable: a block could not be read.
        is_counted: the statistics have it, as far as they should.
    """

    def __init__(
        self,
        request: SchedulableRequest,
        hit: TierHit,
        manager: KVCacheManager,
        tiered_cache: TieredCache,
        rows: Sequence[Mapping[int, BlockHashWithGroupId]],
        allocate: Callable[[], object],
        open_plans: OpenPlans[ReadBackPlan],
        on_close: Callable[[ReadBackPlan], None],
    ) -> None:
        super().__init__(request, hit.num_device_tokens + hit.num_tokens)
        self.hit = hit
        self.keys = [key for row in rows for key in row.values()]
        self.is_unreadable = False
        self.is_counted = True
        self._is_loaded = False
        self._manager = manager
        self._tiered_cache = tiered_cache
        self._rows = rows
        self._allocated = AllocatedTables(request, self.num_computed_tokens, manager, allocate)
        self._held_keys: list[BlockHashWithGroupId] = []
        self._targets: list[KVCacheBlock] = []
        self._hits: list[tuple[KVCacheBlock, BlockHashWithGroupId]] = []
        self._open_plans = open_plans
        self._on_close = on_close

    def open(self) -> bool:
        self._tiered_cache.hold_onto(self.keys, self._held_keys)
        if not self._allocated.open():
            return False
        tables = self._allocated.tables
        self._targets = [
            table.blocks[position] for table, row in zip(tables, self._rows, strict=True) for position in row
        ]
        # Blocks of the device's prefix, by what they were hit for: one that is found wrong loses its key.
        read_into = set(self._targets)
        self._hits = [
            (block, block.block_hash)
            for table in tables
            for block in table.blocks
            if block.block_hash is not None and block not in read_into
        ]
        reason = f"in an open plan to read tiers for request {self.request_id!r}"
        self._hold(self._manager.block_pool, self.list_blocks(), reason)
        self.is_counted = False
        return True

    def list_blocks(self) -> list[KVCacheBlock]:
        """The device blocks that the plan holds a reference to, those to be reused first in front."""
        return self._allocated.list_blocks()

    def apply(self) -> bool:
        """Read and commit.

        Returns:
            False if a block could not be read, or its content was found to be wrong meanwhile: the plan is
            aborted, and the next `find_prefix` finds a shorter prefix, or none.
        Raises:
            CopyFailedError: the device did not take the bytes. The plan is aborted.
            Others as in `commit`. The plan is aborted.
        """
        try:
            if self.load():
                self.commit()
                return True
        except BaseException:
            if not self.is_decided:
                self.abort()
            raise
        self.abort()
        return False

    def load(self) -> bool:
        """Read the bytes into the device blocks; False if one could not be read, or is void: abort then.

        Blocks that were taken anew for this are copied out before (`store_pending`). Done on return.
        Raises:
            PlanClosedError: committed or aborted before.
            CopyFailedError: the device did not take the bytes.
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
        """The bytes are there: the request holds its blocks, and the prefix can be hit on the device.

        Raises:
            PlanClosedError: committed or aborted before.
            InvalidBlockError: not loaded, or a block's content was found to be wrong since, on the device or
                in the tiers: abort.
            InvalidArgumentError, InvalidTypeError: the request was given blocks in the meantime, or lacks
                what an event needs. In all cases nothing has changed.
        """
        self._check_open()
        if not self._is_loaded or self._is_void():
            raise InvalidBlockError(
                f"not all blocks for request {self.request_id!r} were read, or what was read is void by now; "
                "abort the plan and call find_prefix() again"
            )
        if self._manager.block_pool.enable_kv_cache_events:
            check_announceable(self._request)
        if self._manager.holds_blocks(self.request_id):
            raise InvalidArgumentError(f"request {self.request_id!r} has blocks already; free them first")
        self._open_plans.close(self, PlanState.COMMITTED)

    def abort(self) -> None:
        """Nothing comes of it: the device blocks are free, and none of them can be hit.

        Raises:
            PlanClosedError: committed or aborted before. Nothing has changed.
        """
        self._check_open()
        self._open_plans.close(self, PlanState.ABORTED)

    def finish(self) -> None:
        super().finish()
        self._tiered_cache.release_out_of(self._held_keys)
        if not self.is_counted:
            self._on_close(self)

    def _commit(self) -> None:
        self._allocated.commit()

    def _abort(self) -> None:
        self._allocated.abort()

    def _is_void(self) -> bool:
        """Was the content of a block found to be wrong since it was hit?"""
        return not self._tiered_cache.has_all(self.keys) or any(
            block.block_hash != key for block, key in self._hits
        )

    def _check_open(self) -> None:
        self._open_plans.recover()
        if self.state is not PlanState.OPEN:
            raise PlanClosedError(
                f"the plan to read blocks for request {self.request_id!r} was {self.state.value} before; "
                "make a new one"
            )

    def __repr__(self) -> str:
        return (
            f"ReadBackPlan({self.request_id!r}, {self.state.value}, {len(self.keys)} blocks, "
            f"{self.hit.num_tokens} tokens)"
        )
