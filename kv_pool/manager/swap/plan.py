"""`SwapPlan`: blocks of one request on their way between device and host, until commit or abort.

                commit                       open                   abort
    OUT   request is swapped out   device blocks -> host   request holds its device blocks again
    IN    request holds blocks     host blocks -> device   request is swapped out, as before
    HIT   request holds blocks     host blocks -> device   request has no blocks: look up again

While a plan is open the manager does not know the request: freeing, forking or caching it there raises
InvalidArgumentError, and so does allocating for it once tokens were computed. The plan references its sources
and targets and holds them in place, so they are neither reused nor moved to other ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import check_announceable
from kv_pool.core.holds import Hold
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, PlanClosedError
from kv_pool.ids import BlockMove
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_table import BlockTable
from kv_pool.manager.request import SchedulableRequest
from kv_pool.manager.swap.match import Match, count_skipped_blocks, find_key
from kv_pool.manager.swap.sides import SwapSide, list_tail_first

if TYPE_CHECKING:
    from kv_pool.manager.kv_cache_manager import KVCacheManager


class SwapDirection(Enum):
    """OUT: device to host. IN: back. HIT: a prefix from the host for a request that has no blocks yet."""

    OUT = "out"
    IN = "in"
    HIT = "hit"


class PlanState(Enum):
    """OPEN -> COMMITTED or ABORTED, once."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class SwapPlan(ABC):
    """Copies to make, and what becomes true when they are made. From `BlockSwapper`.

        plan = swapper.swap_out(request)
        if plan is not None:
            plan.apply(lambda moves: device_storage.copy_to(host_storage, moves))

    Attributes:
        request_id: whose blocks they are.
        direction: where they go.
        moves: `source` is a block id of the pool they come from, `target` one of the other pool; sources are
            distinct, and so are targets. May be empty.
        num_shared_blocks: blocks that are on the other side already and need no move.
        num_computed_tokens: tokens whose KV the request has after a commit.
        state: open, committed or aborted.
    """

    direction: ClassVar[SwapDirection]

    def __init__(
        self,
        request: SchedulableRequest,
        num_computed_tokens: int,
        pairs: Sequence[tuple[KVCacheBlock, KVCacheBlock]],
        num_shared_blocks: int,
        on_close: Callable[[SwapPlan], None],
    ) -> None:
        self.request_id = request.request_id
        self.num_computed_tokens = num_computed_tokens
        self.moves = [BlockMove(source.block_id, target.block_id) for source, target in pairs]
        self.num_shared_blocks = num_shared_blocks
        self.state = PlanState.OPEN
        self._request = request
        self._pairs = pairs
        self._on_close = on_close
        way = self.direction._value_  # what `value` calls two functions for
        self._reason = f"in an open plan to swap request {self.request_id!r} {way}"
        self._holds: list[Hold] = []

    def commit(self) -> None:
        """The copies are done: the request is where the plan wanted it.

        On a GPU call it when the copies have finished, or when whatever reuses the sources is queued behind
        them. Full blocks are findable on the target side now, and still on the source side until reused.
        Raises:
            PlanClosedError: committed or aborted before.
            InvalidArgumentError, InvalidTypeError: the request was given blocks in the meantime, or lacks
                what an event needs.
            InvalidBlockError: a block of the prefix that was hit has lost its hash since, as wrong ones do:
                abort, and look up again. In all cases nothing has changed.
        """
        self._check_open()
        self._commit()
        self._close(PlanState.COMMITTED)

    def abort(self) -> None:
        """The copies failed, or will not be made: the sources are as before, the targets free.

        No copy may be under way any more, or it would write into blocks that others get.
        Raises:
            PlanClosedError: committed or aborted before.
            InvalidArgumentError: the request was given blocks in the meantime. In both cases nothing has
                changed.
        """
        self._check_open()
        self._abort()
        self._close(PlanState.ABORTED)

    def apply(self, copy: Callable[[list[BlockMove]], object]) -> None:
        """Call `copy` with the moves, if there are any, and commit; if it raises, abort and raise that."""
        self._check_open()
        try:
            if self.moves:
                copy(self.moves)
        except BaseException:
            self.abort()
            raise
        self.commit()

    @abstractmethod
    def list_blocks(self, side: SwapSide) -> list[KVCacheBlock]:
        """The blocks of this side that the plan holds a reference to, each as often as it does."""

    @abstractmethod
    def _commit(self) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...

    def _hold_blocks(self, side: SwapSide, blocks: list[KVCacheBlock]) -> None:
        """Keep the blocks of one side at their ids, which `moves` names, until the plan is closed."""
        self._holds.append(side.pool.hold(blocks, self._reason))

    def _close(self, state: PlanState) -> None:
        for hold in self._holds:
            hold.release()
        self.state = state
        self._on_close(self)

    def _check_open(self) -> None:
        if self.state is not PlanState.OPEN:
            raise PlanClosedError(
                f"the plan to swap request {self.request_id!r} {self.direction.value} was "
                f"{self.state.value} before; make a new one"
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.request_id!r}, {self.direction.value}, {self.state.value}, "
            f"{len(self.moves)} moves, {self.num_shared_blocks} shared)"
        )


class TablePlan(SwapPlan):
    """A request's tables change sides.

    Args:
        tables: with the source side's blocks, taken out of that side's books.
        targets: for each group the blocks that take their places, the null block where nothing is kept.
        match: which of these were there already.
    """

    def __init__(
        self,
        request: SchedulableRequest,
        num_computed_tokens: int,
        groups: Sequence[BlockGroup],
        source: SwapSide,
        target: SwapSide,
        tables: list[BlockTable],
        targets: list[list[KVCacheBlock]],
        match: Match,
        on_close: Callable[[SwapPlan], None],
    ) -> None:
        pairs = [
            (before, after)
            for table, row, found in zip(tables, targets, match.found, strict=True)
            for before, after, there in zip(table.blocks, row, found, strict=True)
            if there is None and not after.is_null
        ]
        super().__init__(request, num_computed_tokens, pairs, match.num_shared, on_close)
        self._groups = groups
        self._source = source
        self._target = target
        self._tables = tables
        self._targets = targets
        self._hold_blocks(source, [block for table in tables for block in table.blocks])
        self._hold_blocks(target, [block for row in targets for block in row])

    def list_blocks(self, side: SwapSide) -> list[KVCacheBlock]:
        held: list[KVCacheBlock] = []
        if side is self._source:
            held += list_tail_first([table.blocks for table in self._tables])
        if side is self._target:
            held += list_tail_first(self._targets)
        return held

    def _commit(self) -> None:
        self._check_absent(self._target)
        if self._target.pool.enable_kv_cache_events:
            check_announceable(self._request)
        for group, table, row in zip(self._groups, self._tables, self._targets, strict=True):
            self._cache(group, table, row)
        sources = [table.blocks for table in self._tables]
        for group, table, row in zip(self._groups, self._tables, self._targets, strict=True):
            num_skipped = count_skipped_blocks(group, table, self.num_computed_tokens)
            num_full = self.num_computed_tokens // group.block_size
            table.blocks = row
            table.num_null_blocks = num_skipped
            table.num_cached_blocks = min(table.num_cached_blocks, num_full)
            table.num_edits += 1
        self._target.put_tables(self.request_id, self._tables)
        self._source.free_request(self.request_id, sources)

    def _abort(self) -> None:
        self._check_absent(self._source)
        self._target.free_blocks(self.list_blocks(self._target))
        self._source.put_tables(self.request_id, self._tables)

    def _check_absent(self, side: SwapSide) -> None:
        if side.holds(self.request_id):
            raise InvalidArgumentError(
                f"request {self.request_id!r} was given blocks while it was being swapped "
                f"{self.direction.value}; free them first"
            )

    def _cache(self, group: BlockGroup, table: BlockTable, row: list[KVCacheBlock]) -> None:
        """Let copies of cached blocks be found under the same keys: one event for each gapless part."""
        pool = self._target.pool
        if not pool.enable_caching:
            return
        first = 0
        for position in range(len(row) + 1):
            if position < len(row) and self._is_uncached_copy(group, table, row, position):
                continue
            if first < position:
                pool.cache_full_blocks(self._request, row, first, position, group.block_size, group.group_id)
            first = position + 1

    def _is_uncached_copy(
        self, group: BlockGroup, table: BlockTable, row: list[KVCacheBlock], position: int
    ) -> bool:
        block = row[position]
        if block.is_null or block.block_hash is not None:
            return False
        return find_key(self._request, group, table, position, self.num_computed_tokens) is not None


class SwapOutPlan(TablePlan):
    """From the device to the host."""

    direction = SwapDirection.OUT


class SwapInPlan(TablePlan):
    """From the host to the device."""

    direction = SwapDirection.IN


class HostHitPlan(SwapPlan):
    """A prefix that the host has, into blocks that the manager has allocated for it.

    Args:
        tables: the request's, taken out of the manager's books.
        sources: blocks of the host pool, referenced for this plan.
    """

    direction = SwapDirection.HIT

    def __init__(
        self,
        request: SchedulableRequest,
        num_computed_tokens: int,
        manager: KVCacheManager,
        device: SwapSide,
        host: SwapSide,
        tables: list[BlockTable],
        pairs: Sequence[tuple[KVCacheBlock, KVCacheBlock]],
        on_close: Callable[[SwapPlan], None],
    ) -> None:
        super().__init__(request, num_computed_tokens, pairs, 0, on_close)
        self._manager = manager
        self._device = device
        self._host = host
        self._tables = tables
        # By what blocks of the device's prefix, and of the host, were hit: one that is found wrong loses it.
        self._hits = [
            (block, block.block_hash)
            for block in (
                *(block for table in tables for block in table.blocks),
                *(pair[0] for pair in pairs),
            )
            if block.block_hash is not None
        ]
        self._hold_blocks(device, [block for table in tables for block in table.blocks])
        self._hold_blocks(host, [source for source, _ in pairs])

    def list_blocks(self, side: SwapSide) -> list[KVCacheBlock]:
        held: list[KVCacheBlock] = []
        if side is self._device:
            held += list_tail_first([table.blocks for table in self._tables])
        if side is self._host:
            held += [source for source, _ in reversed(self._pairs)]
        return held

    def _commit(self) -> None:
        if any(block.block_hash != key for block, key in self._hits):
            raise InvalidBlockError(
                f"a block that request {self.request_id!r} was to begin with has been found wrong meanwhile; "
                "abort the plan and look up again"
            )
        if self._device.pool.enable_kv_cache_events:
            check_announceable(self._request)
        self._manager.put_tables(self.request_id, self._tables)
        self._manager.cache_blocks(self._request, self.num_computed_tokens)
        self._host.free_blocks(self.list_blocks(self._host))

    def _abort(self) -> None:
        self._device.free_blocks(self.list_blocks(self._device))
        self._host.free_blocks(self.list_blocks(self._host))
