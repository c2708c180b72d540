"""`HoldList`: which holds keep which blocks of a pool, since when and until when."""

import msgspec

from kv_pool.core.holds import HoldState
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidBlockError

_SHOWN_IDS = 8


class HoldSummary(msgspec.Struct, frozen=True):
    """One hold.

    Attributes:
        reason: completes "the blocks are ...".
        num_blocks: of the hold; 1 where one block was asked about.
        block_ids: the first of them.
        age_s: seconds since the hold was opened; None for reuse watchers.
        remaining_s: seconds until the deadline, negative if it has passed; None without a deadline.
        is_movable: compaction may give the blocks other ids meanwhile.
        is_quarantined: the deadline has passed, and a late writer may still use the blocks.
    """

    reason: str
    num_blocks: int
    block_ids: list[int]
    age_s: float | None
    remaining_s: float | None
    is_movable: bool
    is_quarantined: bool


class HoldList(msgspec.Struct, frozen=True):
    """The holds of a pool, or of one block, oldest first.

    Attributes:
        num_watched: blocks whose reuse somebody waits for; of one block, they are among `holds`.
    """

    holds: list[HoldSummary]
    num_watched: int = 0


def list_holds(pool: BlockPoolCore) -> HoldList:
    """Return the open holds of a pool that have blocks. O(held blocks)."""
    book = pool.holds
    now = book.clock()
    summaries = []
    num_watched = len(book.list_fixed_ids())
    for hold in book.list_holds():
        blocks = hold.blocks
        if not blocks:
            continue
        if not hold.is_movable:
            num_watched -= len(blocks)
        summaries.append(
            HoldSummary(
                hold.reason,
                len(blocks),
                [block.block_id for block in blocks[:_SHOWN_IDS]],
                now - hold.since,
                None if hold.until is None else hold.until - now,
                hold.is_movable,
                hold.state is HoldState.QUARANTINED,
            )
        )
    return HoldList(summaries, num_watched)


def explain_block(pool: BlockPoolCore, block_id: int) -> HoldList:
    """Return the holds of one block, its reuse watcher included. O(holds).

    Raises:
        InvalidBlockError: the pool has no such block.
    """
    if not 0 < block_id < pool.num_gpu_blocks:
        raise InvalidBlockError(f"block {block_id} is not one of 1 to {pool.num_gpu_blocks - 1}")
    now = pool.holds.clock()
    return HoldList(
        [
            HoldSummary(
                report.reason,
                1,
                [block_id],
                None if report.since is None else now - report.since,
                None if report.until is None else report.until - now,
                report.is_movable,
                report.state is HoldState.QUARANTINED,
            )
            for report in pool.explain_holds(block_id)
        ]
    )
