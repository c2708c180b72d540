"""`Unfinished`: what a call of a retention has still to do, for when an exception interrupts it."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.retention.claim import Claim

Place = tuple[int, float, KVCacheBlock, tuple[Claim, ...]]
"""A block in the order of becoming free: its number there, freed at, the block, claims in force."""


class Unfinished:
    """References that a call has taken over and not yet passed on, and changes that it is about to make.

    Empty between two calls. A reference enters a list in the same step in which it leaves its last place.

    Attributes:
        is_marked: a call was interrupted, and `BlockRetention.recover` has not completed it.
        is_recovering: `recover` is at work.
        leaving: references to give back to the pool.
        victims: blocks that have left their batches to be reused; the retention has their only reference.
        loose: blocks with a reference of the retention that no batch counts yet, or no more.
        stretches: blocks to keep, and their claims, as they become free.
        places: blocks to put into batches.
        covers: claims to remember on blocks in use.
        change: blocks that get other claims, these claims, and whether durations count from now.
    """

    __slots__ = (
        "change",
        "covers",
        "is_marked",
        "is_recovering",
        "leaving",
        "loose",
        "places",
        "stretches",
        "victims",
    )

    def __init__(self) -> None:
        self.is_marked: bool = False
        self.is_recovering: bool = False
        self.leaving: list[KVCacheBlock] = []
        self.victims: list[KVCacheBlock] = []
        self.loose: list[KVCacheBlock] = []
        self.stretches: list[tuple[list[KVCacheBlock], tuple[Claim, ...]]] = []
        self.places: list[Place] = []
        self.covers: list[tuple[KVCacheBlock, tuple[Claim, ...]]] = []
        self.change: tuple[list[KVCacheBlock], list[tuple[Claim, ...]], bool] | None = None
