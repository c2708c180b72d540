"""`ClaimRecords`: the claims on blocks, stored as a number on each block."""

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, TimedItem
from kv_pool.manager.retention.claim import EXPIRED, NO_CLAIMS, PINNED, Claim, add_claims


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

    __slots__ = (
        "blocks",
        "claims",
        "freed_at",
        "is_lasting",
        "is_shared",
        "num_blocks",
        "retention_id",
        "strength",
    )

    def __init__(self, claims: tuple[Claim, ...]) -> None:
        strength = EXPIRED
        is_lasting = True
        for claim in claims:
            strength = max(strength, claim.strength)
            is_lasting = is_lasting and not claim.is_session and claim.duration_s == NEVER
        super().__init__(NEVER)
        self.claims: tuple[Claim, ...] = claims
        self.strength: int = strength
        self.is_lasting: bool = is_lasting
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


class ClaimRecords:
    """Numbers from 1 on, one for each record; a number is reused when no block has it any more.

    A block stores its number in `retention_id`: a reference would make it part of a cycle, and a dict entry
    would be slower to read. 0: no claims. Below 0: the claims are void, because they were on the
    content that the block had before it got another hash.

    Attributes:
        num_blocks: number of blocks with a number, void or not.
    """

    def __init__(self) -> None:
        self._records: list[Record | None] = [None]
        self._unused: list[int] = []
        self._shared: dict[tuple[Claim, ...], Record] = {}
        self.num_blocks: int = 0

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

    def is_pinned(self, block: KVCacheBlock) -> bool:
        """Return `is_pin` of the claims on the block; O(1)."""
        if block.retention_id <= 0 or block.key is None:
            return False
        record = self._records[block.retention_id]
        return record is not None and record.strength == PINNED

    def share(self, claims: tuple[Claim, ...]) -> Record:
        """Return the shared record of these claims (at least one), for blocks to be assigned to it next."""
        record = self._shared.get(claims)
        if record is None:
            record = Record(claims)
            self._add(record)
            self._shared[claims] = record
        return record

    def make(self, claims: tuple[Claim, ...], blocks: list[KVCacheBlock], freed_at: float) -> Record:
        """Assign blocks that became free together at `freed_at` to a new record of their own."""
        record = Record(claims)
        record.be_about(blocks, freed_at)
        self._add(record)
        self.put_all(blocks, record)
        return record

    def take_over(self, record: Record, blocks: list[KVCacheBlock], freed_at: float) -> bool:
        """Make the blocks' shared record their own, instead of a new one; False if it is not shared.

        Claims of this record end, so no other free block has it. Blocks in use keep its number and get a
        record of their own when they become free.
        """
        if not record.is_shared:
            return False
        del self._shared[record.claims]
        record.be_about(blocks, freed_at)
        return True

    def put_all(self, blocks: list[KVCacheBlock], record: Record) -> None:
        """Replace the claims on blocks; fast if consecutive blocks have equal claims."""
        new_id: i32 = record.retention_id
        last_id: i32 = 0
        old: Record | None = None
        num_put: i64 = 0
        for block in blocks:
            old_id = block.retention_id
            if old_id == new_id:
                continue
            if old_id != last_id:
                if num_put > 0:
                    self.note_put(record, old, num_put)
                last_id = old_id
                old = self.find(block)
                num_put = 0
            block.retention_id = new_id
            num_put += 1
        if num_put > 0:
            self.note_put(record, old, num_put)

    def note_put(self, record: Record, old: Record | None, num_blocks: i64) -> None:
        """Count blocks that moved to this record from the old one, or from none."""
        record.num_blocks += num_blocks
        if old is None:
            self.num_blocks += num_blocks
        else:
            self._drop_count(old, num_blocks)

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims from blocks, void or not; fast if consecutive blocks have equal claims."""
        last_id: i32 = 0
        old: Record | None = None
        num_dropped: i64 = 0
        for block in blocks:
            old_id = block.retention_id
            if old_id == 0:
                continue
            if old_id != last_id:
                if old is not None:
                    self._drop_count(old, num_dropped)
                    self.num_blocks -= num_dropped
                last_id = old_id
                old = self.find(block)
                num_dropped = 0
            num_dropped += 1
            block.retention_id = 0
        if old is not None:
            self._drop_count(old, num_dropped)
            self.num_blocks -= num_dropped

    def drop_all(self, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Remove all claims. `blocks` must be all blocks of the pool."""
        for block in blocks:
            block.retention_id = 0
        for record in self.list_records():
            record.changes_at = NEVER
        self._records = [None]
        self._unused = []
        self._shared = {}
        self.num_blocks = 0

    def _add(self, record: Record) -> None:
        if self._unused:
            record.retention_id = self._unused.pop()
            self._records[record.retention_id] = record
        else:
            record.retention_id = len(self._records)
            self._records.append(record)

    def _drop_count(self, record: Record, num_blocks: i64) -> None:
        record.num_blocks -= num_blocks
        if record.num_blocks == 0:
            if record.is_shared:
                del self._shared[record.claims]
            record.changes_at = NEVER
            record.blocks = []
            self._records[record.retention_id] = None
            self._unused.append(record.retention_id)


class AddedClaims:
    """A session's claim, or directives' claims, to add to blocks in use.

    Fast if consecutive blocks have equal claims. Separate from the loop over the blocks, to keep that loop
    short and fast.

    Attributes:
        any_pins: True if a block got a pin, or a record with one.
    """

    def __init__(self, records: ClaimRecords, claims: tuple[Claim, ...], now: float) -> None:
        self._records: ClaimRecords = records
        self._claims: tuple[Claim, ...] = claims
        self._now: float = now
        self._old: Record | None = None
        self._record: Record | None = None
        self.any_pins: bool = False

    def begin(self, block: KVCacheBlock) -> i32:
        """Return the new number for this block and the following blocks with its number."""
        records = self._records
        self._old = records.find(block)
        claims_before = records.get_claims(block)
        claims = claims_before
        for old in claims_before:
            if old.until <= self._now:
                claims = tuple([claim for claim in claims_before if claim.until > self._now])
                break
        first = self._claims[0]
        if first.is_session:
            claims = (*claims, first) if claims else first.alone
        else:
            claims = add_claims(claims, self._claims)
        if claims is claims_before:
            self._record = None
            return block.retention_id
        record = records.share(claims)
        self._record = record
        self.any_pins = self.any_pins or record.strength == PINNED
        return record.retention_id

    def end(self, num_put: i64) -> None:
        """Count the blocks of a stretch that have got the new number."""
        if self._record is not None:
            self._records.note_put(self._record, self._old, num_put)
            self._record = None
