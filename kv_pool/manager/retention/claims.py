"""`Claim`: a reason to keep a block; `PlacedClaims`: those on a pool's blocks, and the bands that follow."""

from collections.abc import Callable, Iterable
from typing import Final

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Deadlines, TimedItem
from kv_pool.core.eviction_order import (
    DEFAULT_BAND,
    EMPTY_BAND,
    EXPIRED_BAND,
    BandPolicy,
    EvictionOrder,
)
from kv_pool.core.holds import Hold, HoldSpan
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.manager.retention.directive import DEFAULT_PRIORITY

PINNED: Final = 101
EXPIRED: Final = -1


class Claim:
    """A reason to keep a block: a directive without its range, or a session, which has a deadline.

    Attributes:
        strength: the priority, or PINNED.
        duration_s: seconds after the block becomes free; NEVER for a session.
        until: a session's deadline; NEVER for a directive.
    """

    __slots__ = ("alone", "duration_s", "strength", "until")

    def __init__(self, strength: int, duration_s: float, until: float = NEVER) -> None:
        self.strength: int = strength
        self.duration_s: float = duration_s
        self.until: float = until
        # The claims of a block that has this one only; always the same tuple, so it is compared by identity.
        self.alone: tuple[Claim, ...] = (self,)

    def find_end(self, freed_at: float) -> float:
        """Return the end of the claim for a block that became free at `freed_at`. Not in force at the end."""
        return min(self.until, freed_at + self.duration_s)

    @property
    def is_session(self) -> bool:
        """Whether it is a session's."""
        return self.until != NEVER


NO_CLAIMS: Final[tuple[Claim, ...]] = ()

NOTHING: Final = Claim(EXPIRED, 0.0)
"""The claim of a directive without effect; any other outranks it."""


def join_claims(in_order: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the directives' claims that no other of them outlives and outranks.

    Args:
        in_order: sorted by `rank_claim`.
    """
    left: list[Claim] = []
    for claim in in_order:
        if not left or claim.duration_s > left[-1].duration_s:
            left.append(claim)
    return left[0].alone if len(left) == 1 else tuple(left)


def rank_claim(claim: Claim) -> tuple[int, float]:
    """Return the sort key of a directive's claim: the strongest first, of these the longest."""
    return -claim.strength, -claim.duration_s


def add_claims(claims: tuple[Claim, ...], added: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Return these claims and those of directives, without directives' that another outlives and outranks.

    No claim in `added` outlives and outranks another.

    So a block shared by thousands of requests has at most one such claim for each strength. Returns the same
    object if nothing is added. O(n log n) for n claims.
    """
    if not claims:
        return added
    if claims == added:  # the usual case of a prefix that many requests share
        return claims
    directives = [claim for claim in claims if not claim.is_session]
    joined = join_claims(sorted([*directives, *added], key=rank_claim))
    if set(joined) == set(directives):
        return claims
    return (*[claim for claim in claims if claim.is_session], *joined)


def is_pin(claims: tuple[Claim, ...]) -> bool:
    """Return True if one of the claims is a pin."""
    return find_strength(claims) == PINNED


def list_live(claims: tuple[Claim, ...], freed_at: float, now: float) -> tuple[Claim, ...]:
    """Return the claims in force now on a block freed at `freed_at`; the same object if all are."""
    for claim in claims:
        if claim.find_end(freed_at) <= now:
            return tuple(claim for claim in claims if claim.find_end(freed_at) > now)
    return claims


def is_lasting(claims: tuple[Claim, ...]) -> bool:
    """Return True if no claim ends before the blocks lose their content."""
    for claim in claims:  # noqa: SIM110 (a loop compiles to C, a generator does not)
        if claim.find_end(0.0) != NEVER:
            return False
    return True


def find_strength(claims: tuple[Claim, ...]) -> int:
    """Return the strength of the strongest claim, or EXPIRED."""
    strength = EXPIRED
    for claim in claims:
        strength = max(strength, claim.strength)
    return strength


class Record(TimedItem):
    """The claims that a set of blocks share.

    Attributes:
        claims: never empty.
        strength: the strength of the strongest claim.
        is_lasting: True if no claim ends before the blocks lose their content.
        is_shared: True for the one record of all blocks with these claims. Otherwise the record is for blocks
            that became free together.
        freed_at: when these blocks became free.
        blocks: these blocks, in that order; blocks that now have another number are still listed.
        num_blocks: number of blocks with its number, or with its negative, which marks void claims.
        changes_at: when the next claim ends for free blocks; NEVER for a shared record.
    """

    def __init__(self, claims: tuple[Claim, ...]) -> None:
        super().__init__(NEVER)
        self.claims: tuple[Claim, ...] = claims
        self.strength: int = find_strength(claims)
        self.is_lasting: bool = is_lasting(claims)
        self.is_shared: bool = True
        self.freed_at: float = 0.0
        self.blocks: list[KVCacheBlock] = []
        self.num_blocks: int = 0
        self.retention_id: int = 0

    def be_about(self, blocks: list[KVCacheBlock], freed_at: float) -> None:
        """Make this the record of these blocks alone, which became free together at `freed_at`."""
        self.blocks = blocks
        self.freed_at = freed_at
        self.is_shared = False
        self.changes_at = self.find_next_end()

    def find_next_end(self) -> float:
        """Return when the next claim ends; NEVER for a shared record."""
        next_end = NEVER
        if not self.is_shared:
            for claim in self.claims:
                next_end = min(next_end, claim.find_end(self.freed_at))
        return next_end


def cut_by_number(blocks: list[KVCacheBlock]) -> list[list[KVCacheBlock]]:
    """Return the stretches of consecutive blocks that have the same number."""
    stretches: list[list[KVCacheBlock]] = []
    number: i32 = 0
    start: i64 = 0
    for index, block in enumerate(blocks):
        if index > 0 and block.retention_id != number:
            stretches.append(blocks[start:index])
            start = index
        number = block.retention_id
    if start > 0:
        stretches.append(blocks[start:])
    elif blocks:
        stretches.append(blocks)
    return stretches


def list_cached(blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
    """Return the blocks with content; the same list if all have it. Usually all but the last have."""
    for index, block in enumerate(blocks):
        if block.key is None:
            return blocks[:index] + [other for other in blocks[index:] if other.key is not None]
    return blocks


Change = tuple[list[KVCacheBlock], tuple[Claim, ...]]
"""Blocks, and the claims that they get."""


class PlacedClaims(BandPolicy):
    """The claims on a pool's blocks, and the places of the free blocks, which follow from them.

    Each record has a number from 1 on, which is reused when no block has it any more. A block stores its
    number in `retention_id`: a reference would make it part of a cycle, and a dict entry would be slower to
    read. 0: no claims. Below 0: the claims are void, because they were on the content that the block had
    before it got another hash.

    Attributes:
        deadlines: when claims on free blocks end.
        pinned: blocks with a pin among their claims, free or in use.
        held: the hold on free pinned blocks: it keeps them out of the free queue. Compaction may move them.
    """

    def __init__(self, block_pool: BlockPoolCore, clock: Callable[[], float]) -> None:
        self._pool: BlockPoolCore = block_pool
        self._order: EvictionOrder = block_pool.eviction_order
        self._clock: Callable[[], float] = clock
        self._records: list[Record | None] = [None]
        self._unused: list[int] = []
        self._shared: dict[tuple[Claim, ...], Record] = {}
        self.deadlines: Deadlines = Deadlines()
        self.pinned: set[KVCacheBlock] = set()
        self.held: Hold = block_pool.holds.open([], "pinned by a directive", True)
        self.held.list_spans = self.list_spans
        self._is_moving: bool = False  # blocks become free whose bands are set elsewhere

    @property
    def is_empty(self) -> bool:
        """Whether no block has a number."""
        return len(self._records) == len(self._unused) + 1

    def list_records(self) -> list[Record]:
        """Return the records that blocks refer to."""
        return [record for record in self._records if record is not None]

    def find(self, block: KVCacheBlock) -> Record | None:
        """Return the record of the block's number, void or not."""
        retention_id = block.retention_id
        return self._records[-retention_id if retention_id < 0 else retention_id]

    def get_claims(self, block: KVCacheBlock) -> tuple[Claim, ...]:
        """Return the claims on the block's content; for a free block, those in force."""
        if block.retention_id <= 0 or block.key is None:
            return NO_CLAIMS
        record = self._records[block.retention_id]
        return NO_CLAIMS if record is None else record.claims

    # ---- for the pool ------------------------------------------------------------------------------

    def place(self, freed: list[KVCacheBlock]) -> None:
        """Move those of these blocks that are free to the bands of their claims, in the given order."""
        if self.is_empty or self._is_moving:
            return
        first = -1  # start of the open stretch; -1 if none is open
        last_id: i32 = 0
        previous: KVCacheBlock | None = None
        for index, block in enumerate(freed):
            retention_id = block.retention_id
            if first >= 0:
                if retention_id == last_id and block.prev_free_block is previous and block.key is not None:
                    previous = block
                    continue
                self._place_stretch(freed[first:index])
                first = -1
            if retention_id > 0 and block.next_free_block is not None and block.key is not None:
                first = index
                last_id = retention_id
                previous = block
            elif retention_id != 0 and block.next_free_block is not None:
                self._put([block], None)
        if first >= 0:
            self._place_stretch(freed[first:])

    def note_touched(self, blocks: list[KVCacheBlock], num_free: i64, is_access: bool) -> None:
        """Release pins of these blocks, to which a request has just taken references; their claims stay."""
        if is_access and self.held.has_blocks:
            self.release(blocks)

    def note_reset(self) -> None:
        """Remove all claims: no block has content any more."""
        for block in self._pool.blocks:
            block.retention_id = 0
        self._records = [None]
        self._unused = []
        self._shared = {}
        self.deadlines.entries.clear()
        self.pinned.clear()

    def begin_repair(self) -> None:
        """Forget the pinned blocks, which lose their content in a repair."""
        self._is_moving = False
        self.held.forget()

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks that the pool no longer has."""
        self._remove_claims(blocks)

    def list_spans(self) -> list[HoldSpan]:
        """Return the held blocks by the start and the end of their pins, to a tenth of a second."""
        ahead = self._pool.holds.clock() - self._clock()
        spans: dict[tuple[float, float], list[KVCacheBlock]] = {}
        for block in self.held.blocks:
            record = self.find(block)
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

    def change(self, changes: list[Change], keeps: Callable[[Claim], bool], restarts: bool) -> None:
        """Replace claims on the cached ones of these blocks, which are distinct and listed head first.

        Args:
            changes: blocks, and the claims to add to those that they keep.
            keeps: whether a claim on a block stays.
            restarts: whether durations of free blocks count from now; otherwise those in force continue.
        A free block keeps its place if its band stays the same; else it moves to the back of its new band.
        Free blocks that lose all claims move to the back of the default band.
        """
        now = self._clock()
        stretches = [
            (stretch, added) for blocks, added in changes for stretch in cut_by_number(list_cached(blocks))
        ]
        for stretch, added in reversed(stretches):
            before = self.get_claims(stretch[0])
            left = [claim for claim in before if keeps(claim)]
            if not added and len(left) == len(before):
                continue
            claims = (*left, *added) if left else added
            old = self.find(stretch[0]) if before else None
            freed_at = now if restarts or old is None or old.is_shared else old.freed_at
            free = self._change_used(stretch[::-1], claims)
            if free:
                self._claim_free(free, list_live(claims, freed_at, now), freed_at, old, DEFAULT_BAND)

    def add(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...]) -> None:
        """Add the claims of directives to the cached ones of these blocks, which are in use."""
        for stretch in cut_by_number(list_cached(blocks)):
            before = self.get_claims(stretch[0])
            after = add_claims(before, claims)
            if after is not before:
                self._put(stretch, self._share(after))

    def drop_evicted(self) -> None:
        """Remove the claims on pinned blocks that were evicted without a call of the retention. O(pins)."""
        self._remove_claims([block for block in self.pinned if not is_pin(self.get_claims(block))])

    def forget(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on blocks that have lost their content; free ones are reused first."""
        emptied = [block for block in dict.fromkeys(blocks) if block.retention_id != 0 and block.key is None]
        self._remove_claims(emptied)
        self.release(emptied)
        free = [block for block in emptied if block.next_free_block is not None]
        if free:
            self._pool.place_in_band(free, EMPTY_BAND)

    def end_claims(self, record: Record) -> None:
        """End the claims that end at the record's `changes_at`, and move its free blocks accordingly."""
        left = list_live(record.claims, record.freed_at, record.changes_at)
        claimed: list[KVCacheBlock] = []
        void: list[KVCacheBlock] = []
        for block in record.blocks:
            if self.find(block) is record:
                is_void = block.retention_id < 0 or block.key is None
                (void if is_void else claimed).append(block)
        self._remove_claims(void)
        free = self._change_used(claimed, record.claims)
        if free:
            self._claim_free(free, left, record.freed_at, record, EXPIRED_BAND)
        record.changes_at = NEVER

    def _change_used(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...]) -> list[KVCacheBlock]:
        """Replace the claims on those of these blocks that are in use; return the others."""
        free: list[KVCacheBlock] = []
        used: list[KVCacheBlock] = []
        has_held = self.held.has_blocks
        for block in blocks:
            # A block that is held as pinned only is not in use.
            is_unused = block.next_free_block is not None or (
                has_held and block.ref_cnt == 1 and self.held.contains(block)
            )
            (free if is_unused else used).append(block)
        if used:
            self._put(used, self._share(claims) if claims else None)
            self.release(used)
        return free

    def drop_all(self) -> None:
        """Remove all claims; free blocks stay cached, in their order, in the default band."""
        self.release(self.held.blocks)
        self.note_reset()
        self._order.merge()
        for part in self._pool.parts:
            part.rebuild_from(self._pool)

    def _place_stretch(self, blocks: list[KVCacheBlock]) -> None:
        """Place blocks that just became free, are consecutive in the queue, and have the same record."""
        record = self.find(blocks[0])
        assert record is not None
        live = record.claims
        if not (record.is_lasting and record.is_shared):
            now = self._clock()
            live = list_live(record.claims, now, now)
            if live is record.claims and record.is_shared:
                # It becomes the record of these blocks, instead of a new one: its claims end, so no other
                # free block has it. Blocks in use keep its number, until they become free, too.
                del self._shared[record.claims]
                record.be_about(blocks, now)
                self.deadlines.push_at(record, record.changes_at)
            else:
                self._put_claims(blocks, live, now)
        if live:
            self._put_in_place(blocks, find_strength(live), True)

    def _claim_free(
        self,
        blocks: list[KVCacheBlock],
        claims: tuple[Claim, ...],
        freed_at: float,
        old: Record | None,
        band_without: int,
    ) -> None:
        """Replace the claims on free blocks, which are in the band of their old record, or pinned.

        Args:
            band_without: the band of blocks that lose all claims.
        """
        strength = find_strength(claims)
        self._put_claims(blocks, claims, freed_at)
        if strength != PINNED:
            self.release(blocks)
        if claims and (old is None or strength != old.strength):
            self._put_in_place(blocks, strength)
        elif not claims and old is not None:
            self._pool.place_in_band(blocks, band_without)

    def _put_claims(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float) -> None:
        """Assign free blocks to a record of these claims, which are in force; no claims: to no record."""
        if not claims:
            self._put(blocks, None)
        elif is_lasting(claims):
            self._put(blocks, self._share(claims))
        else:
            record = Record(claims)
            record.be_about(blocks, freed_at)
            self._enter(record)
            self._put(blocks, record)
            self.deadlines.push_at(record, record.changes_at)

    def _share(self, claims: tuple[Claim, ...]) -> Record:
        """Return the shared record of these claims (at least one), for blocks to be assigned to it next."""
        record = self._shared.get(claims)
        if record is None:
            record = Record(claims)
            self._enter(record)
            self._shared[claims] = record
        return record

    def _enter(self, record: Record) -> None:
        """Give a new record its number."""
        if self._unused:
            record.retention_id = self._unused.pop()
            self._records[record.retention_id] = record
        else:
            record.retention_id = len(self._records)
            self._records.append(record)

    def _remove_claims(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims on distinct blocks, void or not."""
        for stretch in cut_by_number(blocks):
            self._put(stretch, None)

    def _put(self, blocks: list[KVCacheBlock], record: Record | None) -> None:
        """Replace the claims on distinct blocks of one number, void or not, by a record's; None: by none."""
        new_id: i32 = 0 if record is None else record.retention_id
        if blocks[0].retention_id != new_id:
            old = self.find(blocks[0])
            for block in blocks:
                block.retention_id = new_id
            if record is not None:
                record.num_blocks += len(blocks)
            if old is not None:
                old.num_blocks -= len(blocks)
                if old.num_blocks == 0:
                    self._remove(old)
        if record is not None and record.strength == PINNED:
            self.pinned.update(blocks)
        elif self.pinned:
            self.pinned.difference_update(blocks)

    def _remove(self, record: Record) -> None:
        """Forget a record that no block has any more."""
        if record.is_shared:
            del self._shared[record.claims]
        record.changes_at = NEVER
        record.blocks = []
        self._records[record.retention_id] = None
        self._unused.append(record.retention_id)

    def _put_in_place(self, blocks: list[KVCacheBlock], strength: int, is_chain: bool = False) -> None:
        """Move free blocks to the back of a band, or hold them if they are pinned.

        Args:
            is_chain: whether the blocks are known to be consecutive in the queue.
        """
        if strength != PINNED:
            band = find_band(strength)
            if is_chain:
                self._order.move_chain(blocks[0], blocks[-1], band)
                for part in self._pool.parts:
                    part.note_moved_to(blocks, band)
            else:
                self._pool.place_in_band(blocks, band)
            return
        self._pool.holds.take_references(self.held, [one for one in blocks if not self.held.contains(one)])

    def release(self, blocks: list[KVCacheBlock]) -> None:
        """Drop the references that pins have to these blocks; free ones move to the default band's back."""
        if not self.held.has_blocks:
            return
        held = [block for block in blocks if self.held.contains(block)]
        if held:
            self._is_moving = True
            self._pool.holds.drop_references(self.held, held)
            self._is_moving = False


def find_band(strength: int) -> int:
    """Return the band of a priority: 34 is just below the default band, and 35 just above it."""
    if strength == EXPIRED:
        return EXPIRED_BAND
    return strength - DEFAULT_PRIORITY + (strength >= DEFAULT_PRIORITY)
