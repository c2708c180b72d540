"""`Holder`: a sequence, its blocks, and its place in the order of evictions."""

from __future__ import annotations

from collections import OrderedDict

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import SequenceId


class Holder:
    """A sequence and the distinct blocks that it holds, in the order of its tokens.

    Attributes:
        pins: the pins that were made in the sequence's name, by block; None before the first.
        queue, ticket, info: its place in an `AccessOrder` or a `RankedOrder`, and what a policy sees of it.
    """

    __slots__ = (
        "blocks",
        "info",
        "last_access_time",
        "pins",
        "priority",
        "queue",
        "sequence_id",
        "ticket",
    )

    def __init__(self, sequence_id: SequenceId, priority: int, now: float) -> None:
        self.sequence_id = sequence_id
        self.priority = priority
        self.last_access_time = now
        self.blocks: dict[KVCacheBlock, None] = {}
        self.pins: dict[KVCacheBlock, int] | None = None
        self.queue: OrderedDict[SequenceId, Holder] | None = None
        self.ticket = 0
        self.info: object = None
