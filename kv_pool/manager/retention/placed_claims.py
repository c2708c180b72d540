"""`PlacedClaims`: claims on blocks; each free block is in the band of its strongest claim."""

from collections.abc import Callable
from typing import Final

from mypy_extensions import i32, i64

from kv_pool.contiguous.free_ages import note_moved
from kv_pool.contiguous.run_pool_core import RunPoolCore
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Deadlines
from kv_pool.core.eviction_order import (
    DEFAULT_BAND,
    EXPIRED_BAND,
    BandPolicy,
    EvictionOrder,
    NumberedBlocks,
)
from kv_pool.core.holds import Hold, HoldSpan
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.manager.retention.claim import EXPIRED, NO_CLAIMS, PINNED, Claim, is_pin, list_live
from kv_pool.manager.retention.claim_records import AddedClaims, ClaimRecords, Record
from kv_pool.manager.retention.directive import DEFAULT_PRIORITY
from kv_pool.manager.retention.pins import PinLedger

_NO_ID: Final = -(2**31)

Change = tuple[list[KVCacheBlock], list[tuple[Claim, ...]], bool]
"""Blocks, the claims to set on each of them, and whether durations count from now."""


class PlacedClaims(BandPolicy):
    """The claims on a pool's blocks, and the places of the free blocks, which follow from them.

    Attributes:
        records: the claims.
        deadlines: when claims on free blocks end.
        pins: blocks with a pin among their claims.
        held: the hold on free pinned blocks: it keeps them out of the free queue. Compaction may move them.
        is_marked: True from an interrupted call until `recover` completes it.
    """

    def __init__(self, block_pool: BlockPoolCore, clock: Callable[[], float], max_pinned_blocks: int) -> None:
        self.reads_numbers = True
        self._pool: BlockPoolCore = block_pool
        self._order: EvictionOrder = block_pool.eviction_order
        self._run_pool: RunPoolCore | None = block_pool if isinstance(block_pool, RunPoolCore) else None
        self._clock: Callable[[], float] = clock
        self.records: ClaimRecords = ClaimRecords()
        self.deadlines: Deadlines = Deadlines()
        self.pins: PinLedger = PinLedger(max_pinned_blocks)
        self.held: Hold = block_pool.holds.open([], "pinned by a directive", True)
        self.held.list_spans = self.list_spans
        self.is_marked: bool = False
        self._is_moving: bool = False  # blocks become free whose bands are set elsewhere
        self._change: Change | None = None

    def place(self, freed: list[KVCacheBlock]) -> None:
        """Move those of these blocks that are free to the bands of their claims, in the given order."""
        if self.records.num_blocks == 0 or self._is_moving:
            return
        try:
            self._place(freed)
        except BaseException:
            self.recover()
            raise

    def place_numbered(self, freed: NumberedBlocks) -> None:
        """Place the blocks as `place` does."""
        if self._is_moving:
            return
        try:
            for blocks in freed.stretches:
                if blocks[0].retention_id > 0:
                    self._place_stretch(blocks)
                else:
                    self._drop_stretch(blocks)
            if freed.without_content:
                self._drop_stretch(freed.without_content)
        except BaseException:
            self.recover()
            raise

    def note_reset(self) -> None:
        """Remove all claims: no block has content any more."""
        self.records.drop_all(self._pool.blocks)
        self.deadlines.replace([])
        self.pins.blocks.clear()

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks that the pool no longer has."""
        for block in blocks:
            self._drop(block)

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
        held = [block for block in blocks if self.held.contains(block)]
        if held:
            self.held.remove(held)

    def change(self, blocks: list[KVCacheBlock], new_claims: list[tuple[Claim, ...]], restarts: bool) -> None:
        """Replace the claims on cached blocks, which are distinct and listed head first.

        Args:
            restarts: whether durations of free blocks count from now; otherwise those in force continue.
        A free block keeps its place if its band stays the same; else it moves to the back of its new band.
        """
        self._change = blocks, new_claims, restarts
        try:
            self._make_change(blocks, new_claims, restarts)
            self._change = None
        except BaseException:
            self.recover()
            raise

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
                self.pins.note(block, self.records.get_claims(block))

    def _claim_in_use(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...]) -> None:
        """Replace the claims on blocks in use; an empty `claims` removes them."""
        if not blocks:
            return
        if not claims:
            self._drop_stretch(blocks)
            return
        record = self.records.share(claims)
        if self.pins.blocks or record.strength == PINNED:
            for block in blocks:
                self.pins.note(block, claims)
        self.records.put_all(blocks, record)

    def check_pins(self, num_new: int, num_replaced: int) -> None:
        """Raise PinLimitError if `num_new` pins in place of `num_replaced` would exceed the limit."""
        pins = self.pins
        if pins.exceeds(num_new, num_replaced):
            # Blocks may have been evicted without a call of this retention; check that only now.
            for block in list(pins.blocks):
                if not is_pin(self.records.get_claims(block)):
                    self.note_removed([block])
        if pins.exceeds(num_new, num_replaced):
            raise pins.refuse(num_new, num_replaced)

    def forget(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Remove the claims on blocks that have lost their content; return those of them that are free."""
        freed: list[KVCacheBlock] = []
        for block in blocks:
            if block.retention_id != 0 and block.key is None:
                self._drop(block)
                freed.append(block)
        self._release([block for block in freed if self.held.contains(block)])
        return [block for block in freed if block.next_free_block is not None]

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
        for block in void:
            self._drop(block)
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
        self._pool.merge_bands()

    def recover(self) -> None:
        """Complete an interrupted call. Safe to call again if interrupted.

        Counts, deadlines and places are derived from the claims on the blocks. O(blocks of the pool).
        """
        self.is_marked = True
        pool = self._pool
        pool.touch([])  # completes an interrupted call of the pool
        if self._run_pool is not None:
            self._run_pool.rebuild_index()
        self._is_moving = True
        pool.holds.settle()  # completes an interrupted release of pinned blocks
        self._is_moving = False
        self.records.rebuild(pool.blocks)
        pinned: set[KVCacheBlock] = set()
        for block in pool.blocks:
            claims = self.records.get_claims(block)
            if not claims and block.retention_id != 0:
                self.records.drop(block)
            elif is_pin(claims):
                pinned.add(block)
        self.pins.blocks = pinned
        others = [entry[2] for entry in self.deadlines.entries if not isinstance(entry[2], Record)]
        records = self.records.list_records()
        for record in records:
            record.changes_at = record.find_next_end()
        self.deadlines.replace([*dict.fromkeys(others), *records])
        self._release([block for block in self.held.blocks if block not in pinned])
        by_strength: dict[int, list[KVCacheBlock]] = {}
        for block in pool.free_block_queue.get_all_free_blocks():
            known = self.records.find(block)
            if known is not None:
                by_strength.setdefault(known.strength, []).append(block)
        for strength, blocks in by_strength.items():
            self._put_in_place(blocks, strength)
        change = self._change
        if change is not None:
            self._make_change(change[0], change[1], change[2])
            self._change = None
        self.is_marked = False

    def _place(self, freed: list[KVCacheBlock]) -> None:
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
                self._drop(block)
        if first >= 0:
            self._place_stretch(freed[first:])

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
            self.records.drop_stretch(blocks)
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
                if self._run_pool is not None:
                    note_moved(self._run_pool.run_index, blocks, band)
            else:
                self._move(blocks, band)
            return
        for block in blocks:
            self.pins.note(block, self.records.get_claims(block))
        self.held.add(blocks)

    def _move(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Move blocks as `BlockPool.move_to_band` does, without its type checks."""
        self._order.move(blocks, band)
        if self._run_pool is not None:
            note_moved(self._run_pool.run_index, blocks, band)

    def _release(self, blocks: list[KVCacheBlock]) -> None:
        """End the pins of free blocks, which moves them to the back of the default band."""
        self._is_moving = True
        self.held.remove(blocks)
        self._is_moving = False

    def _drop(self, block: KVCacheBlock) -> None:
        """Remove the claims on a block, void or not."""
        self.pins.drop(block)
        self.records.drop(block)

    def _drop_stretch(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks; faster than `_drop` if consecutive blocks have equal claims."""
        if self.pins.blocks:
            for block in blocks:
                self.pins.drop(block)
        self.records.drop_stretch(blocks)

    def _make_change(
        self, blocks: list[KVCacheBlock], new_claims: list[tuple[Claim, ...]], restarts: bool
    ) -> None:
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

    def _change_free(
        self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float, old_strength: int
    ) -> None:
        """Replace the claims on free blocks; blocks left without claims stay, or move to the default band."""
        live = list_live(claims, freed_at, self._clock())
        self._claim_free(blocks, live, freed_at, old_strength)
        if not live and old_strength != EXPIRED:
            self._move(blocks, DEFAULT_BAND)


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
