"""A copy of all resident blocks as of one batch, taken in pieces while later batches are applied.

pieces copied one by one          a  b  c  d ...            each under the lock, for microseconds
changes recorded meanwhile        |<------------>|          then applied to the copy
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from kv_pool.events.block_spans import BlockSpan, ResidentBlock, copy_span, list_blocks
from kv_pool.events.place_blocks import Change, Place
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.sharded_dict import ShardedDict
from kv_pool.events.yield_timer import YieldTimer

STEPS_PER_LOOK_AT_THE_CLOCK = 32

Copies = dict[Place, ShardedDict[ResidentBlock]]


def copy_places(
    resident: ResidentBlocks, lock: AbstractContextManager[object], yield_timer: YieldTimer
) -> Copies:
    """Return a copy taken piece by piece, each under the lock; pieces are from different times.

    The thread that changes `resident` must hold the lock, and record changes from before this call on.
    """
    copies: Copies = {}
    with lock:
        places = list(resident.places.items())
    for place, blocks in places:
        copy = copies[place] = ShardedDict()
        for shard in blocks.shards:
            with lock:
                spans = [copy_span(span, span.serial) for span in shard.values()]
            yield_timer.yield_if_due()
            for span in spans:
                add_blocks(copy, span, yield_timer)
    return copies


def add_blocks(copy: ShardedDict[ResidentBlock], span: BlockSpan, yield_timer: YieldTimer) -> None:
    """Add the resident blocks of a span."""
    for number, (block_hash, block) in enumerate(list_blocks(span)):
        copy.shard(block_hash)[block_hash] = block
        if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
            yield_timer.yield_if_due()


def redo(copies: Copies, changes: Iterable[Change | None], yield_timer: YieldTimer) -> None:
    """Apply recorded changes to the copy. Applying a change that a piece already includes is harmless."""
    for change in changes:
        if change is None:
            for blocks in copies.values():
                for shard in blocks.shards:
                    shard.clear()
                    yield_timer.yield_if_due()
        elif change.added is not None:
            add_blocks(copies.setdefault(change.place, ShardedDict()), change.added, yield_timer)
        elif change.removed is not None and change.place in copies:
            blocks = copies[change.place]
            for number, block_hash in enumerate(change.removed):
                blocks.shard(block_hash).pop(block_hash, None)
                if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
                    yield_timer.yield_if_due()
