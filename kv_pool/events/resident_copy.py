"""A copy of all that is resident as of one batch, taken in pieces while later batches are applied.

pieces copied one by one          a  b  c  d ...            each under the lock, microseconds
changes kept meanwhile            |<------------>|          then done again on the copy
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from kv_pool.events.block_spans import BlockSpan, ResidentBlock, copy_span, list_blocks
from kv_pool.events.pace import Pace
from kv_pool.events.place_blocks import Change, Place
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.sharded_dict import ShardedDict

STEPS_PER_LOOK_AT_THE_CLOCK = 32

Copies = dict[Place, ShardedDict[ResidentBlock]]


def copy_places(resident: ResidentBlocks, lock: AbstractContextManager[object], pace: Pace) -> Copies:
    """Return a copy that is taken piece by piece, each under the lock; pieces are of different moments.

    The thread that changes `resident` holds the lock, too, and keeps its `changes` from before this begins.
    """
    copies: Copies = {}
    with lock:
        places = list(resident.places.items())
    for place, blocks in places:
        copy = copies[place] = ShardedDict()
        for shard in blocks.shards:
            with lock:
                spans = [copy_span(span, span.serial) for span in shard.values()]
            pace.step()
            for span in spans:
                add_blocks(copy, span, pace)
    return copies


def add_blocks(copy: ShardedDict[ResidentBlock], span: BlockSpan, pace: Pace) -> None:
    """Add the resident blocks of a span."""
    for number, (block_hash, block) in enumerate(list_blocks(span)):
        copy.shard(block_hash)[block_hash] = block
        if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
            pace.step()


def redo(copies: Copies, changes: Iterable[Change | None], pace: Pace) -> None:
    """Bring the copy to the moment of the last change. Doing again what a piece has seen is no harm."""
    for change in changes:
        if change is None:
            for blocks in copies.values():
                for shard in blocks.shards:
                    shard.clear()
                    pace.step()
        elif change.added is not None:
            add_blocks(copies.setdefault(change.place, ShardedDict()), change.added, pace)
        elif change.removed is not None and change.place in copies:
            blocks = copies[change.place]
            for number, block_hash in enumerate(change.removed):
                blocks.shard(block_hash).pop(block_hash, None)
                if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
                    pace.step()
