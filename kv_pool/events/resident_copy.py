"""A copy of all resident blocks as of one batch, taken in pieces while later batches are applied.

pieces copied one by one          a  b  c  d ...            each under the lock, for microseconds
changes recorded meanwhile        |<------------>|          then applied to the copy
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar

from kv_pool.events.block_spans import BlockSpan, ResidentBlock, copy_span
from kv_pool.events.place_blocks import Change, Place
from kv_pool.events.resident_blocks import ResidentBlocks
from kv_pool.events.yield_timer import YieldTimer
from kv_pool.ids import ExternalBlockHash

STEPS_PER_LOOK_AT_THE_CLOCK = 32

NUM_SHARDS: Final = 256
"""Number of pieces of a copy."""

Value = TypeVar("Value")


class ShardedDict(Generic[Value]):
    """A map from block hashes to values, spread over `NUM_SHARDS` dicts.

    Copying, growing or dropping a dict is a single call that blocks all other threads: for milliseconds with
    100,000 entries, for microseconds with a 256th of them.
    """

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[ExternalBlockHash, Value]] = [{} for _ in range(NUM_SHARDS)]

    def shard(self, block_hash: ExternalBlockHash) -> dict[ExternalBlockHash, Value]:
        """Return the dict that this hash belongs to."""
        return self.shards[find_shard(block_hash)]


def find_shard(block_hash: ExternalBlockHash) -> int:
    """Return the index of the shard that this hash belongs to."""
    return hash(block_hash) % NUM_SHARDS


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
                spans = [(span, copy_span(span)) for span in shard.values()]
            yield_timer.yield_if_due()
            for span, copied in spans:
                add_blocks(copy, copied, yield_timer, blocks.held.values, span)
    return copies


def add_blocks(
    copy: ShardedDict[ResidentBlock],
    span: BlockSpan,
    yield_timer: YieldTimer,
    resident: dict[Any, Any] | None = None,
    original: BlockSpan | None = None,
) -> None:
    """Add the blocks of a copied span; with `resident`, those whose span is `original` there."""
    for position, block_hash in enumerate(span.hashes):
        if resident is None or resident.get(block_hash) is original:
            copy.shard(block_hash)[block_hash] = ResidentBlock(span, position)
        if position % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
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
