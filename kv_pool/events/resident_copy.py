"""A copy of all that is resident as of one batch, taken in pieces while later batches are applied.

pieces copied one by one          a  b  c  d ...            each under the lock, microseconds
changes kept meanwhile            |<------------>|          then done again on the copy
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from kv_pool.events.pace import Pace
from kv_pool.events.resident_blocks import Change, Place, ResidentBlock, ResidentBlocks
from kv_pool.events.sharded_dict import NUM_SHARDS, ShardedDict

STEPS_PER_LOOK_AT_THE_CLOCK = 32

Copies = dict[Place, ShardedDict[ResidentBlock]]


def copy_places(resident: ResidentBlocks, lock: AbstractContextManager[object], pace: Pace) -> Copies:
    """A copy that is taken piece by piece, each under the lock; pieces are of different moments.

    Whoever changes `resident` holds the lock, too, and keeps its `changes` from before this begins.
    """
    copies: Copies = {}
    with lock:
        places = list(resident.places.items())
    for place, blocks in places:
        copy = copies[place] = ShardedDict()
        for number in range(NUM_SHARDS):
            with lock:
                copy.shards[number] = blocks.shards[number].copy()
            pace.step()
    return copies


def redo(copies: Copies, changes: Iterable[Change | None], pace: Pace) -> None:
    """Bring the copy to the moment of the last change. Doing again what a piece has seen is no harm."""
    for number, change in enumerate(changes):
        if change is None:
            for blocks in copies.values():
                for shard in blocks.shards:
                    shard.clear()
                    pace.step()
            continue
        place, block_hash, block = change
        if block is not None:
            copies.setdefault(place, ShardedDict()).shard(block_hash)[block_hash] = block
        elif place in copies:
            copies[place].shard(block_hash).pop(block_hash, None)
        if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
            pace.step()
