"""`SwapPlan`: one request's blocks on their way between device and host, until commit or abort.

                commit                       open                   abort
    OUT   request is swapped out   device blocks -> host   request holds its device blocks again
    IN    request holds blocks     host blocks -> device   request is swapped out, as before

While a plan is open the manager does not know the request: freeing, forking or caching it there raises
InvalidArgumentError, and so does allocating for it if it has computed tokens. The plan references its sources
and targets and holds them in place, so they are neither reused nor moved to other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.caching import cache_full
from kv_pool.core.extra_keys import check_announceable
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.taking import take, touch_listed
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId, BlockMove, GroupId, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.freeing import release_hold
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.tiers.open_plans import OpenPlans, PlanState, TwoPhasePlan, list_tail_first


class SwapDirection(Enum):
    """The direction of a swap. OUT: device to host. IN: host to device."""

    OUT = "out"
    IN = "in"


class SwapPlan(TwoPhasePlan):
    """The copies of a swap, and the change of tables that a commit makes. From `BlockSwapper`.

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
        device, host: the managers of the two sides; the rules of each for taking and freeing apply there.
        tables: the source side's tables, which the plan detaches.
        match: the blocks that the target side already has.
        swapped_out: the computed tokens of the requests on the host.
    """

    def __init__(
        self,
        direction: SwapDirection,
        request: SchedulableRequest,
        device: KVCacheManager,
        host: KVCacheManager,
        tables: list[BlockTable],
        match: Match,
        swapped_out: dict[RequestId, int],
        plans: OpenPlans[SwapPlan],
    ) -> None:
        purpose = f"swap request {request.request_id!r} {direction.value}"
        super().__init__(request, request.num_computed_tokens, plans, purpose)
        self.direction = direction
        self.moves: list[BlockMove] = []
        self.num_shared_blocks = len(match.shared)
        self._groups = device._groups
        self._host = host
        self._source, self._target = (device, host) if direction is SwapDirection.OUT else (host, device)
        self._swapped_out = swapped_out
        self._tables = tables
        self._match = match
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
        self._attach()
        for group_id, blocks in enumerate(self._sources):
            for listener in self._source.listeners:
                listener.note_leaving(self.request_id, GroupId(group_id), 0, blocks)
        self._end_holds(self._source, self._target)
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
        self._attach()
        self._end_holds(self._target, self._source)
        self._plans.end(self, PlanState.ABORTED)

    def apply(self, copy: Callable[[list[BlockMove]], object]) -> None:
        """Call `copy` with the moves, if any, and commit.

        If `copy` raises an `Exception`, or a block of the target side turned out to be invalid before, abort
        and re-raise. After another exception, such as KeyboardInterrupt, the plan is still open.
        """
        self._check_open()
        try:
            self._check_valid()
            if self.moves:
                copy(self.moves)
        except Exception:
            if self.state is PlanState.OPEN:
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
        source_hold = self._open_hold(self._source.block_pool)
        target_hold = self._open_hold(pool)
        self._watch(self._match.shared)
        # Touch the found blocks first: until then they may be among the blocks that are taken.
        touch_listed(pool, self._match.shared)
        taken = iter(take(pool, self._match.num_new))
        self._targets = [
            [next(taken) if block is None else block for block in row] for row in self._match.rows
        ]
        self.moves = [
            BlockMove(before.block_id, after.block_id)
            for row, targets, found in zip(self._sources, self._targets, self._match.rows, strict=True)
            for before, after, there in zip(row, targets, found, strict=True)
            if there is None
        ]
        # A hold drops its references last block first.
        self._source.block_pool.holds.take_over(source_hold, list_tail_first(self._sources)[::-1])
        pool.holds.take_over(target_hold, list_tail_first(self._targets)[::-1])
        self._source.pop_tables(self.request_id)
        self._plans.end(self, PlanState.OPEN)
        pool.flush_evicted()

    def list_blocks(self, side: KVCacheManager) -> list[KVCacheBlock]:
        """Return the blocks of one side that the plan holds at their ids, in the order of reuse."""
        return list_tail_first(self._sources if side is self._source else self._targets)

    def _attach(self) -> None:
        side = self._source
        if self.outcome is PlanState.COMMITTED:
            side = self._target
            self._change_tables()
        if not side.holds_blocks(self.request_id):
            side.put_tables(self.request_id, self._tables)
        if side is self._host:
            self._swapped_out[self.request_id] = self.num_computed_tokens
        else:
            self._swapped_out.pop(self.request_id, None)
            self._host.forget_tables(self.request_id)

    def _end_holds(self, leaving: KVCacheManager, staying: KVCacheManager) -> None:
        """Drop the references to the blocks of one side; the tables own those of the other side now."""
        holds = dict(self._holds)
        staying.block_pool.holds.hand_over(holds[staying.block_pool.holds])
        release_hold(leaving, holds[leaving.block_pool.holds])

    def _change_tables(self) -> None:
        """Replace the tables' blocks by those of the target side. Can be repeated."""
        origins = self._source.block_pool.origins
        for group, table, found, sources, row in zip(
            self._groups, self._tables, self._match.rows, self._sources, self._targets, strict=True
        ):
            for position, (there, before, after) in enumerate(zip(found, sources, row, strict=True)):
                if there is None:
                    self._target.block_pool.origins.note_copy(after, before)
                    if before.key is None:
                        start = position * group.block_size
                        origins.note_continued(before, start, self._request.block_hashes)
            num_skipped = count_skipped_blocks(group, table, self.num_computed_tokens)
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
            self._groups, self._tables, self._match.rows, self._targets, strict=True
        ):
            first = 0
            for position, there in enumerate([*found, pool.null_block]):
                if there is None and find_key(
                    self._request, group, table, position, self.num_computed_tokens
                ):
                    continue
                if first < position:
                    cache_full(
                        pool, self._request, row, first, position, group.block_size, group.group_id, None
                    )
                first = position + 1


# ---- what the other side has ------------------------------------------------------------------------------


class Match(NamedTuple):
    """A request's tables, matched against the cached blocks of the other side.

    Attributes:
        rows: for each group and table entry, the block on the other side with the same prefix; the null block
            if the entry needs none; None for a block to take and to copy into.
        shared: the blocks found.
        num_new: blocks to take.
    """

    rows: list[list[KVCacheBlock | None]]
    shared: list[KVCacheBlock]
    num_new: int


def find_key(
    request: SchedulableRequest, group: BlockGroup, table: BlockTable, position: int, num_computed_tokens: int
) -> BlockHashWithGroupId | None:
    """Return the key under which this block is cached; None if it is not cached, or not computed in full.

    A block that carries another key than the request's own, or none (it was evicted as invalid), is not a
    prefix of any request: its content moves with the request and cannot be hit.
    """
    block = table.blocks[position]
    if block.is_null or block.block_hash is None or not group.is_cacheable:
        return None
    if (position + 1) * group.block_size > num_computed_tokens:
        return None
    place = (position + 1) * group.stride - 1
    if place >= len(request.block_hashes):
        return None
    key = make_block_hash_with_group_id(request.block_hashes[place], group.group_id)
    return key if block.block_hash == key else None


def match_tables(
    request: SchedulableRequest,
    groups: Sequence[BlockGroup],
    tables: Sequence[BlockTable],
    target: BlockPoolCore,
) -> Match:
    """Look up every block of the tables in the target pool. Changes nothing. O(blocks)."""
    num_computed_tokens = request.num_computed_tokens
    rows: list[list[KVCacheBlock | None]] = []
    shared: list[KVCacheBlock] = []
    num_new = 0
    for group, table in zip(groups, tables, strict=True):
        first = count_skipped_blocks(group, table, num_computed_tokens)
        row: list[KVCacheBlock | None] = [target.null_block] * len(table.blocks)
        for position in range(first, len(table.blocks)):
            if table.blocks[position].is_null:
                continue
            block = None
            key = find_key(request, group, table, position, num_computed_tokens)
            if key is not None:
                block = target.cached_block_hash_to_block.get_one_block(key)
            row[position] = block
            if block is None:
                num_new += 1
            else:
                shared.append(block)
        rows.append(row)
    return Match(rows, shared, num_new)


def count_skipped_blocks(group: BlockGroup, table: BlockTable, num_computed_tokens: int) -> int:
    """Count the leading entries that no later token needs; they become null blocks on the other side."""
    if not group.forgets:
        return table.num_null_blocks
    num_skipped = group.count_skipped_tokens(num_computed_tokens) // group.block_size
    return max(table.num_null_blocks, min(num_skipped, len(table.blocks)))
