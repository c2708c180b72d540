"""`PlacedClaims`: claims on blocks; a free block is in the band of its strongest claim. `PinLedger`: pins."""

from collections.abc import Callable
from typing import Final

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Deadlines
from kv_pool.core.eviction_order import (
    DEFAULT_BAND,
    EMPTY_BAND,
    EXPIRED_BAND,
    BandPolicy,
    EvictionOrder,
)
from kv_pool.core.holds import Hold, HoldSpan
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import PinLimitError
from kv_pool.manager.retention.claim import EXPIRED, NO_CLAIMS, PINNED, Claim, is_pin, list_live
from kv_pool.manager.retention.claim_records import AddedClaims, ClaimRecords, Record
from kv_pool.manager.retention.directive import DEFAULT_PRIORITY

_NO_ID: Final = -(2**31)


class PinLedger:
    """The pins that count against a limit.

    Attributes:
        blocks: the pinned blocks, free or in use.
        num_promised: the number of blocks that the directives of requests may still pin.
    """

    def __init__(self, max_pinned_blocks: int) -> None:
        self.max_pinned_blocks: int = max_pinned_blocks
        self.blocks: set[KVCacheBlock] = set()
        self.num_promised: int = 0

    def note(self, block: KVCacheBlock, is_pinned: bool) -> None:
        """Record whether a block is pinned."""
        if is_pinned:
            self.blocks.add(block)
        elif self.blocks:
            self.blocks.discard(block)

    def drop(self, block: KVCacheBlock) -> None:
        """Record that the block is not pinned."""
        if self.blocks:
            self.blocks.discard(block)

    def count(self) -> int:
        """Return the number of pinned and promised blocks."""
        return len(self.blocks) + self.num_promised

    def exceeds(self, num_new: int, num_replaced: int) -> bool:
        """Return True if the pin limit would be exceeded."""
        return self.count() - num_replaced + num_new > self.max_pinned_blocks

    def refuse(self, num_new: int, num_replaced: int) -> PinLimitError:
        """Return the error for exceeding the pin limit."""
        return PinLimitError(
            f"{num_new} blocks would be pinned, and {self.count() - num_replaced} others are or may become "
            f"pinned; the limit is {self.max_pinned_blocks}. Pin less, remove pins with change_directives(), "
            "or raise max_pinned_blocks."
        )


class PlacedClaims(BandPolicy):
    """The claims on a pool's blocks, and the places of the free blocks, which follow from them.

    Attributes:
        records: the claims.
        deadlines: when claims on free blocks end.
        pins: blocks with a pin among their claims.
        held: the hold on free pinned blocks: it keeps them out of the free queue. Compaction may move them.
    """

    def __init__(self, block_pool: BlockPoolCore, clock: Callable[[], float], max_pinned_blocks: int) -> None:
        self._pool: BlockPoolCore = block_pool
        self._order: EvictionOrder = block_pool.eviction_order
        self._clock: Callable[[], float] = clock
        self.records: ClaimRecords = ClaimRecords()
        self.deadlines: Deadlines = Deadlines()
        self.pins: PinLedger = PinLedger(max_pinned_blocks)
        self.held: Hold = block_pool.holds.open([], "pinned by a directive", True)
        self.held.list_spans = self.list_spans
        self._is_moving: bool = False  # blocks become free whose bands are set elsewhere

    def place(self, freed: list[KVCacheBlock]) -> None:
        """Move those of these blocks that are free to the bands of their claims, in the given order."""
        if self.records.num_blocks == 0 or self._is_moving:
            return
        first = -1  # start of the open stretch; -1 if none is open
        last_id: i32 = 0
        previous: KVCacheBlock | None = None
        for index, block in enumerate(freed):
            retention_id = block.retention_id
            is_claimed = retention_id > 0 and block.next_free_block is not None and block.key is not None
            if first >= 0 and not (
                is_claimed and retention_id == last_id and block.prev_free_block is previous
            ):
                self._place_stretch(freed[first:index])
                first = -1
            if is_claimed:
                if first < 0:
                    first = index
                    last_id = retention_id
                previous = block
            elif retention_id != 0 and block.next_free_block is not None:
                self._drop([block])
        if first >= 0:
            self._place_stretch(freed[first:])

    def note_reset(self) -> None:
        """Remove all claims: no block has content any more."""
        self.records.drop_all(self._pool.blocks)
        self.deadlines.replace(
            [entry[2] for entry in self.deadlines.entries if not isinstance(entry[2], Record)]
        )
        self.pins.blocks.clear()

    def begin_repair(self) -> None:
        """Forget the pinned blocks, which lose their content in a repair."""
        self._is_moving = False
        self.held.forget()

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks that the pool no longer has."""
        self._drop(blocks)

    def count_held(self) -> int:
        """Count the pinned blocks whose only reference is that of their pins. O(pinned free blocks)."""
        return sum([block.ref_cnt == 1 for block in self.held.blocks])

    def list_spans(self) -> list[HoldSpan]:
        """Return the held blocks by the start and the end of their pins, to a tenth of a second."""
        ahead = self._pool.holds.clock() - self._clock()
        spans: dict[tuple[float, float], list[KVCacheBlock]] = {}
        for block in self.held.blocks:
            record = self.records.find(block)
            since = self.held.since
            until = NEVER  # which round() leaves as it is
            if record is not None and not record.is_shared:
                since = record.freed_at + ahead
                ends = [
                    claim.find_end(record.freed_at) for claim in record.claims if claim.strength == PINNED
                ]
                until = max(ends, default=NEVER) + ahead
            spans.setdefault((round(since, 1), round(until, 1)), []).append(block)
        return [(since, until, blocks) for (since, until), blocks in spans.items()]

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        """Release pinned blocks that have just got another reference; their claims stay."""
        self._drop_held(blocks)

    def change(self, blocks: list[KVCacheBlock], new_claims: list[tuple[Claim, ...]], restarts: bool) -> None:
        """Replace the claims on cached blocks, which are distinct and listed head first.

        Args:
            restarts: whether durations of free blocks count from now; otherwise those in force continue.
        A free block keeps its place if its band stays the same; else it moves to the back of its new band.
        """
        now = self._clock()
        stretch: list[KVCacheBlock] = []
        stretch_claims: tuple[Claim, ...] = NO_CLAIMS
        stretch_strength = 0
        stretch_freed_at = 0.0
        used: list[KVCacheBlock] = []
        used_claims: tuple[Claim, ...] = NO_CLAIMS
        has_held = self.held.has_blocks
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            claims = new_claims[index]
            if block.next_free_block is None and not (
                has_held and block.ref_cnt == 1 and self.held.contains(block)
            ):
                if claims is not used_claims:
                    self._claim_in_use(used, used_claims)
                    used = []
                    used_claims = claims
                used.append(block)
                if has_held:
                    self.note_taken([block])
                continue
            record = self.records.find(block) if self.records.get_claims(block) else None
            freed_at = now if restarts or record is None or record.is_shared else record.freed_at
            strength = EXPIRED if record is None else record.strength
            if record is None and claims:
                strength = EXPIRED - 1  # its band is unknown, so it moves in any case
            if stretch and not (
                claims is stretch_claims and strength == stretch_strength and freed_at == stretch_freed_at
            ):
                self._change_free(stretch, stretch_claims, stretch_freed_at, stretch_strength)
                stretch = []
            if not stretch:
                stretch_claims = claims
                stretch_strength = strength
                stretch_freed_at = freed_at
            stretch.append(block)
        self._claim_in_use(used, used_claims)
        if stretch:
            self._change_free(stretch, stretch_claims, stretch_freed_at, stretch_strength)

    def add(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], now: float = -NEVER) -> None:
        """Add claims to the cached ones of these blocks, which are in use.

        Args:
            now: claims of sessions that have ended by then are removed from these blocks.
        """
        added = AddedClaims(self.records, claims, now)
        last_id: i32 = _NO_ID
        new_id: i32 = _NO_ID
        num_put: i64 = 0
        for block in blocks:
            if block.key is None:  # not cached, or the null block
                continue
            if block.retention_id != last_id:
                added.end(num_put)
                last_id = block.retention_id
                num_put = 0
                new_id = added.begin(block)
            if new_id != last_id:
                block.retention_id = new_id
                num_put += 1
        added.end(num_put)
        if added.any_pins or self.pins.blocks:
            for block in blocks:
                self.pins.note(block, self.records.is_pinned(block))

    def _claim_in_use(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...]) -> None:
        """Replace the claims on blocks in use; an empty `claims` removes them."""
        if not blocks:
            return
        if not claims:
            self._drop(blocks)
            return
        record = self.records.share(claims)
        if self.pins.blocks or record.strength == PINNED:
            for block in blocks:
                self.pins.note(block, record.strength == PINNED)
        self.records.put_all(blocks, record)

    def check_pins(self, num_new: int, num_replaced: int) -> None:
        """Raise PinLimitError if `num_new` pins in place of `num_replaced` would exceed the limit."""
        pins = self.pins
        if pins.exceeds(num_new, num_replaced):
            # Blocks may have been evicted without a call of this retention; check that only now.
            for block in list(pins.blocks):
                if not self.records.is_pinned(block):
                    self.note_removed([block])
        if pins.exceeds(num_new, num_replaced):
            raise pins.refuse(num_new, num_replaced)

    def forget(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks that have lost their content; free ones are reused first."""
        emptied: list[KVCacheBlock] = []
        for block in blocks:
            if block.retention_id != 0 and block.key is None:
                self._drop([block])
                emptied.append(block)
        self._release([block for block in emptied if self.held.contains(block)])
        free = [block for block in emptied if block.next_free_block is not None]
        if free:
            self._pool.place_in_band(free, EMPTY_BAND)

    def end_claims(self, record: Record) -> None:
        """End the claims that end at the record's `changes_at`, and move its free blocks accordingly."""
        left = list_live(record.claims, record.freed_at, record.changes_at)
        free: list[KVCacheBlock] = []
        used: list[KVCacheBlock] = []
        void: list[KVCacheBlock] = []
        retention_id: i32 = record.retention_id
        for block in record.blocks:
            if block.retention_id == -retention_id or (
                block.retention_id == retention_id and block.key is None
            ):
                void.append(block)
                continue
            if block.retention_id != retention_id:
                continue
            if block.next_free_block is not None or (block.ref_cnt == 1 and self.held.contains(block)):
                free.append(block)
            else:
                used.append(block)
        self._drop(void)
        if used:
            self.records.put_all(used, self.records.share(record.claims))
            if self.held.has_blocks:
                self.note_taken(used)
        if free:
            self._claim_free(free, left, record.freed_at, record.strength)
        record.changes_at = NEVER

    def drop_all(self) -> None:
        """Remove all claims; free blocks stay cached, in their order, in the default band."""
        self._release(self.held.blocks)
        self.note_reset()
        self._order.merge()
        if self._pool.free_index is not None:
            self._pool.free_index.rebuild_from(self._pool)

    def _place_stretch(self, blocks: list[KVCacheBlock]) -> None:
        """Place blocks that just became free, are consecutive in the queue, and have the same record."""
        record = self.records.find(blocks[0])
        assert record is not None
        if record.is_lasting and record.is_shared:
            self._put_in_place(blocks, record.strength, True)
            return
        now = self._clock()
        live = list_live(record.claims, now, now)
        if is_pin(record.claims) and not is_pin(live):
            for block in blocks:
                self.pins.drop(block)
        if live is record.claims and self.records.take_over(record, blocks, now):
            self.deadlines.push(record)
        else:
            self._put_claims(blocks, live, now)
        if live:
            self._put_in_place(blocks, find_strength(live), True)

    def _claim_free(
        self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float, old_strength: int
    ) -> None:
        """Replace the claims on free blocks, which are in the band of the old strength, or pinned."""
        strength = find_strength(claims)
        self._put_claims(blocks, claims, freed_at)
        if old_strength == PINNED and strength != PINNED:
            for block in blocks:
                self.pins.drop(block)
            self._release(blocks)
        if strength != old_strength:
            self._put_in_place(blocks, strength)

    def _put_claims(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float) -> None:
        """Assign free blocks to a record of these claims, which are in force; no claims: to no record."""
        if not claims:
            self.records.drop(blocks)
            return
        if all(not claim.is_session and claim.duration_s == NEVER for claim in claims):
            self.records.put_all(blocks, self.records.share(claims))
        else:
            self.deadlines.push(self.records.make(claims, blocks, freed_at))

    def _put_in_place(self, blocks: list[KVCacheBlock], strength: int, is_chain: bool = False) -> None:
        """Move free blocks to the back of a band, or hold them if they are pinned.

        Args:
            is_chain: whether the blocks are known to be consecutive in the queue.
        """
        if strength != PINNED:
            band = find_band(strength)
            if is_chain:
                self._order.move_chain(blocks[0], blocks[-1], band)
                if self._pool.free_index is not None:
                    self._pool.free_index.note_moved_to(blocks, band)
            else:
                self._pool.place_in_band(blocks, band)
            return
        for block in blocks:
            self.pins.note(block, self.records.is_pinned(block))
        self._pool.holds.take_references(self.held, [one for one in blocks if not self.held.contains(one)])

    def _release(self, blocks: list[KVCacheBlock]) -> None:
        """End the pins of free blocks, which moves them to the back of the default band."""
        self._is_moving = True
        self._drop_held(blocks)
        self._is_moving = False

    def _drop_held(self, blocks: list[KVCacheBlock]) -> None:
        """Drop the references that pins have to these blocks."""
        held = [block for block in blocks if self.held.contains(block)]
        if held:
            self._pool.holds.drop_references(self.held, held)

    def _drop(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks, void or not."""
        if self.pins.blocks:
            for block in blocks:
                self.pins.drop(block)
        self.records.drop(blocks)

    def _change_free(
        self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float, old_strength: int
    ) -> None:
        """Replace the claims on free blocks; blocks left without claims stay, or move to the default band."""
        live = list_live(claims, freed_at, self._clock())
        self._claim_free(blocks, live, freed_at, old_strength)
        if not live and old_strength != EXPIRED:
            self._pool.place_in_band(blocks, DEFAULT_BAND)


def find_band(strength: int) -> int:
    """Return the band of a priority: 34 is just below the default band, and 35 just above it."""
    if strength == EXPIRED:
        return EXPIRED_BAND
    return strength - DEFAULT_PRIORITY + (strength >= DEFAULT_PRIORITY)


def find_strength(claims: tuple[Claim, ...]) -> int:
    """Return the strength of the strongest claim, or EXPIRED."""
    strength = EXPIRED
    for claim in claims:
        strength = max(strength, claim.strength)
    return strength
