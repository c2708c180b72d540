"""`HoldList`: the holds on a pool's blocks, with age and remaining time."""

from collections.abc import Sequence

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import HoldReport, HoldState, report_place
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockId

_SHOWN_IDS = 8


class HoldSummary(msgspec.Struct, frozen=True):
    """One hold.

    Attributes:
        reason: completes "the blocks are ...".
        num_blocks: number of blocks of the hold; 1 in a report about one block.
        block_ids: the ids of up to 8 of them.
        age_s: seconds since the hold was opened; for a hold without references, since its first block; for
            pinned blocks, since they became free.
        remaining_s: seconds until the deadline, negative if it has passed; None without a deadline.
        is_movable: compaction may change the ids of the blocks.
        is_quarantined: a transfer to the blocks has failed or is overdue, but may still write to them.
        has_references: True if the hold keeps the blocks in use. False if they only keep their ids, for a
            reuse watcher or a pending read by a lower tier; they may be free.
    """

    reason: str
    num_blocks: int
    block_ids: list[BlockId]
    age_s: float
    remaining_s: float | None
    is_movable: bool
    is_quarantined: bool
    has_references: bool


class HoldList(msgspec.Struct, frozen=True):
    """The holds of a pool or of one block, oldest first; holds without references come last."""

    holds: list[HoldSummary]


def list_holds(pool: BlockPoolCore) -> HoldList:
    """Return the open holds of a pool that have blocks. O(held blocks)."""
    book = pool.holds
    now = book.clock()
    summaries = []
    for hold in book.list_holds():
        if hold.has_blocks:
            summaries += [_summarize(report, blocks, now) for report, blocks in hold.list_reports()]
    for places in book.list_place_holds():
        since_of = places.get_blocks()
        if since_of:
            summaries.append(_summarize(report_place(places, min(since_of.values())), list(since_of), now))
    return HoldList(summaries)


def explain_block(pool: BlockPoolCore, block_id: BlockId) -> HoldList:
    """Return the holds of one block. O(holds).

    Raises:
        InvalidBlockError: the id is not one of the pool's, or is that of the null block.
    """
    if not 0 < block_id < pool.num_gpu_blocks:
        raise InvalidBlockError(f"block {block_id} is not one of 1 to {pool.num_gpu_blocks - 1}")
    now = pool.holds.clock()
    block = pool.blocks[block_id]
    return HoldList([_summarize(report, [block], now) for report in pool.explain_holds(block_id)])


def _summarize(report: HoldReport, blocks: Sequence[KVCacheBlock], now: float) -> HoldSummary:
    return HoldSummary(
        report.reason,
        len(blocks),
        [block.block_id for block in blocks[:_SHOWN_IDS]],
        now - report.since,
        None if report.until is None else report.until - now,
        report.is_movable,
        report.state is HoldState.QUARANTINED,
        report.has_references,
    )
