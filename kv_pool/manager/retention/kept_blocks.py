"""`KeptBlocks`: free blocks that are kept, in batches, those that are worth least first."""

from collections import OrderedDict
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.retention.claim import EXPIRED, NEVER, PINNED, Claim, list_live
from kv_pool.manager.retention.deadlines import Deadlines, Ending
from kv_pool.manager.retention.retention_ids import RetentionIds


class Batch(Ending):
    """Kept blocks that became free one after the other with the same claims: they rise and fall together.

    Attributes:
        blocks: least recently freed first; those that are not kept in this batch any more stay listed. Block
            `i` has number `number + i` in the order of becoming free; no other batch has one in between.
        first: before this one, none is kept any more.
        claims: those in force; empty when time is up.
        number: of its first block.
        num_kept: how many are still kept: those with its `retention_id`.
        changes_at: when the next of its claims is over.
    """

    __slots__ = ("blocks", "claims", "first", "freed_at", "num_kept", "number", "retention_id", "strength")

    def __init__(
        self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float, number: int
    ) -> None:
        super().__init__(NEVER)
        self.blocks: list[KVCacheBlock] = blocks
        self.first: int = 0
        self.claims: tuple[Claim, ...] = claims
        self.freed_at: float = freed_at
        self.number: int = number
        self.num_kept: int = 0
        self.retention_id: int = 0
        self.strength: int = EXPIRED


class KeptBlocks:
    """The batches by strength. Of references, claims remembered and pins allowed it knows nothing.

    Attributes:
        num_blocks: all that are kept.
        num_pinned: those of them that are pinned.
        buckets: strength to batches, least recently freed first but for those in `unsorted`; EXPIRED: by
            expiry.
    """

    def __init__(self, ids: RetentionIds, deadlines: Deadlines) -> None:
        self._ids: RetentionIds = ids
        self._things: list[Any] = ids.things
        self._deadlines: Deadlines = deadlines
        self.num_blocks: int = 0
        self.num_pinned: int = 0
        self.buckets: dict[int, OrderedDict[Batch, None]] = {}
        self.unsorted: set[int] = set()

    def find_batch(self, block: KVCacheBlock) -> Batch | None:
        """The batch in which the block is kept."""
        thing = self._things[block._retention_id] if block._retention_id > 0 else None
        return thing if isinstance(thing, Batch) else None

    def add(self, batch: Batch) -> None:
        """Keep the blocks of a new batch, of which nothing is known."""
        retention_id = self._ids.add(batch)
        batch.retention_id = retention_id
        for block in batch.blocks:
            block._retention_id = retention_id
        num_blocks = len(batch.blocks)
        batch.num_kept = num_blocks
        self.num_blocks += num_blocks
        self._put_into_bucket(batch)

    def drop(self, block: KVCacheBlock, batch: Batch) -> None:
        """The block is kept no longer; nothing is known of it."""
        block._retention_id = 0
        self.drop_count(batch, 1)

    def drop_count(self, batch: Batch, num_blocks: int) -> None:
        """So many blocks of the batch do not have its number any more."""
        batch.num_kept -= num_blocks
        self.num_blocks -= num_blocks
        if batch.strength == PINNED:
            self.num_pinned -= num_blocks
        if batch.num_kept == 0:
            self._take_from_bucket(batch)
            self._forget(batch)

    def take_victims(self, num_blocks: int, end: int, victims: list[KVCacheBlock]) -> None:
        """Append up to `num_blocks` blocks of a strength below `end` to `victims`; they are kept no longer.

        The first to be reused comes first. A block is appended in the same step in which it leaves its batch.
        """
        if num_blocks <= 0:
            return
        num_wanted = len(victims) + num_blocks
        for strength in sorted(self.buckets):
            if strength >= end:
                break
            if strength in self.unsorted:
                self.unsorted.discard(strength)
                in_order = sorted(self.buckets[strength], key=get_number)
                self.buckets[strength] = OrderedDict((batch, None) for batch in in_order)
            bucket = self.buckets[strength]
            while bucket:
                batch = next(iter(bucket))
                num_before = len(victims)
                retention_id = batch.retention_id
                index = batch.first
                num_left = min(batch.num_kept, num_wanted - num_before)
                if num_left == 0:
                    return
                blocks = batch.blocks
                while num_left > 0:
                    block = blocks[index]
                    index += 1
                    if block._retention_id == retention_id:
                        block._retention_id = 0
                        victims.append(block)
                        num_left -= 1
                batch.first = index
                self.drop_count(batch, len(victims) - num_before)

    def end_claims(self, batch: Batch) -> None:
        """At `changes_at` some of its claims are over; it goes to where those that are left put it."""
        self._take_from_bucket(batch)
        batch.claims = list_live(batch.claims, batch.freed_at, batch.changes_at)
        if batch.strength == PINNED:
            self.num_pinned -= batch.num_kept
        self._put_into_bucket(batch)

    def rebuild(self, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Derive buckets, counts and deadlines from the numbers of all blocks of the pool.

        The deadlines have been cleared.
        """
        counts: dict[Batch, int] = {}
        for bucket in list(self.buckets.values()):
            for batch in list(bucket):  # in the order of expiry, where they have expired
                counts[batch] = 0
        for block in blocks:
            kept_in = self.find_batch(block)
            if kept_in is not None:
                counts[kept_in] = counts.get(kept_in, 0) + 1
        self.buckets = {}
        self.unsorted = set()
        self.num_pinned = 0
        for batch, num_kept in counts.items():
            batch.num_kept = num_kept
            batch.changes_at = NEVER
            if num_kept:
                self._put_into_bucket(batch)
        self.num_blocks = sum(counts.values())

    def _put_into_bucket(self, batch: Batch) -> None:
        """By the claims it has, which are all in force, or none."""
        strength = EXPIRED
        changes_at = NEVER
        for claim in batch.claims:
            strength = max(strength, claim.strength)
            changes_at = min(changes_at, claim.find_end(batch.freed_at))
        batch.strength = strength
        batch.changes_at = changes_at
        if strength == PINNED:
            self.num_pinned += batch.num_kept
        bucket = self.buckets.get(strength)
        if bucket is None:
            bucket = OrderedDict()
            self.buckets[strength] = bucket
        elif strength != EXPIRED and next(reversed(bucket)).number > batch.number:
            self.unsorted.add(strength)
        bucket[batch] = None
        self._deadlines.push(batch, batch.number)

    def _take_from_bucket(self, batch: Batch) -> None:
        bucket = self.buckets[batch.strength]
        del bucket[batch]
        if not bucket:
            del self.buckets[batch.strength]
            self.unsorted.discard(batch.strength)

    def _forget(self, batch: Batch) -> None:
        batch.changes_at = NEVER
        batch.blocks = []
        self._ids.remove(batch.retention_id)


def get_number(batch: Batch) -> int:
    """The place of its first block in the order of becoming free."""
    return batch.number
