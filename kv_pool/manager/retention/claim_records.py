"""`ClaimRecords`: which claims are on which blocks, a number on each block."""

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Ending
from kv_pool.manager.retention.claim import EXPIRED, NO_CLAIMS, PINNED, Claim, add_claim


class Record(Ending):
    """The claims on any number of blocks.

    Attributes:
        claims: never empty.
        strength: of the strongest.
        is_lasting: no claim ends before the blocks lose their content.
        is_shared: one record for all blocks with these claims. Otherwise the record is about blocks that
            became free together.
        freed_at: when these became free.
        blocks: these blocks, in that order; those with another number by now are listed still.
        num_blocks: blocks with its number, or with that of the opposite sign, whose claims are void.
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
        """From now on the record is about these blocks alone, which became free together at that time."""
        self.blocks = blocks
        self.freed_at = freed_at
        self.is_shared = False
        self.changes_at = self.find_next_end()

    def find_next_end(self) -> float:
        """Return when the next of the claims ends; NEVER for a shared record."""
        next_end = NEVER
        if not self.is_shared:
            for claim in self.claims:
                next_end = min(next_end, claim.find_end(self.freed_at))
        return next_end


class ClaimRecords:
    """Numbers from 1 on, each for a record, reused when no block has the number any more.

    A block has its number in `retention_id`, where a reference would make it part of a cycle, and an entry
    in a dict would cost what a look at four bytes does not. 0: no claims. Below 0: the claims were on what
    the block held before it got another hash.

    Attributes:
        num_blocks: blocks with a number, void or not.
        num_made: records that have been made; says whether it is still the same record.
    """

    def __init__(self) -> None:
        self._records: list[Record | None] = [None]
        self._unused: list[int] = []
        self._shared: dict[tuple[Claim, ...], Record] = {}
        self.num_blocks: int = 0

    def list_records(self) -> list[Record]:
        """The records that blocks refer to."""
        return [record for record in self._records if record is not None]

    def find(self, block: KVCacheBlock) -> Record | None:
        """Return the record that the block's number stands for, void or not."""
        retention_id = block.retention_id
        return self._records[-retention_id if retention_id < 0 else retention_id]

    def get_claims(self, block: KVCacheBlock) -> tuple[Claim, ...]:
        """Return the claims on what the block holds; for a free block those in force."""
        if block.retention_id <= 0 or block.key is None:
            return NO_CLAIMS
        record = self._records[block.retention_id]
        return NO_CLAIMS if record is None else record.claims

    def share(self, claims: tuple[Claim, ...]) -> Record:
        """Return the one record for blocks with these claims, at least one. Blocks are put under it next."""
        record = self._shared.get(claims)
        if record is None:
            record = Record(claims)
            self._add(record)
            self._shared[claims] = record
        return record

    def make(self, claims: tuple[Claim, ...], blocks: list[KVCacheBlock], freed_at: float) -> Record:
        """Put blocks that became free together, at that time, under a record of their own."""
        record = Record(claims)
        record.be_about(blocks, freed_at)
        self._add(record)
        self.put_all(blocks, record)
        return record

    def take_over(self, record: Record, blocks: list[KVCacheBlock], freed_at: float) -> bool:
        """As `make`, with the shared record that the blocks have; False if it is not shared.

        Claims of this record end, so that no other free block has it. Blocks in use keep its number, and get
        a record of their own when they become free.
        """
        if not record.is_shared:
            return False
        del self._shared[record.claims]
        record.be_about(blocks, freed_at)
        return True

    def put(self, block: KVCacheBlock, record: Record) -> None:
        """Replace the claims on a block."""
        new_id = record.retention_id
        if block.retention_id == new_id:
            return
        old = self.find(block)
        block.retention_id = new_id
        record.num_blocks += 1
        if old is None:
            self.num_blocks += 1
        else:
            self._drop_count(old, 1)

    def put_all(self, blocks: list[KVCacheBlock], record: Record) -> None:
        """Replace the claims on blocks, which come in stretches with equal ones."""
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
                    self.count_put(record, old, num_put)
                last_id = old_id
                old = self.find(block)
                num_put = 0
            block.retention_id = new_id
            num_put += 1
        if num_put > 0:
            self.count_put(record, old, num_put)

    def count_put(self, record: Record, old: Record | None, num_blocks: i64) -> None:
        """Count blocks that have got this record, and had the old one, or none."""
        record.num_blocks += num_blocks
        if old is None:
            self.num_blocks += num_blocks
        else:
            self._drop_count(old, num_blocks)

    def drop(self, block: KVCacheBlock) -> None:
        """Remove the claims from a block, void or not."""
        record = self.find(block)
        if record is not None:
            block.retention_id = 0
            self.num_blocks -= 1
            self._drop_count(record, 1)

    def drop_stretch(self, blocks: list[KVCacheBlock]) -> None:
        """Remove the claims from blocks, which come in stretches with equal ones."""
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
        if self.num_blocks:
            for block in blocks:
                block.retention_id = 0
        for record in self.list_records():
            record.changes_at = NEVER
        self._records = [None]
        self._unused = []
        self._shared = {}
        self.num_blocks = 0

    def rebuild(self, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Derive counts and unused numbers from the numbers of all blocks of the pool."""
        counts = [0] * len(self._records)
        for block in blocks:
            retention_id: int = block.retention_id
            counts[-retention_id if retention_id < 0 else retention_id] += 1
        counts[0] = 0
        unused: list[int] = []
        shared: dict[tuple[Claim, ...], Record] = {}
        for retention_id in range(1, len(counts)):
            record = self._records[retention_id]
            if counts[retention_id] == 0 or record is None:
                if record is not None:
                    record.changes_at = NEVER
                self._records[retention_id] = None
                unused.append(retention_id)
            else:
                record.num_blocks = counts[retention_id]
                if record.is_shared:
                    shared[record.claims] = record
        self._unused = unused
        self._shared = shared
        self.num_blocks = sum(counts)

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
    """Claims that are added to those of blocks in use, which come in stretches with equal ones.

    Kept out of the loop over the blocks, which is faster the less it has at hand.

    Attributes:
        any_pins: a block has got a pin, or a record with one.
    """

    def __init__(self, records: ClaimRecords, claims: tuple[Claim, ...], now: float) -> None:
        self._records: ClaimRecords = records
        self._claims: tuple[Claim, ...] = claims
        self._now: float = now
        self._old: Record | None = None
        self._record: Record | None = None
        self.any_pins: bool = False

    def begin(self, block: KVCacheBlock) -> i32:
        """Return the number that this block and those behind it with its number are to get."""
        records = self._records
        self._old = records.find(block)
        claims_before = records.get_claims(block)
        claims = claims_before
        for old in claims_before:
            if old.until <= self._now:
                claims = tuple([claim for claim in claims_before if claim.until > self._now])
                break
        for claim in self._claims:
            if not claim.is_session:
                claims = add_claim(claims, claim)
            else:
                claims = (*claims, claim) if claims else claim.alone
        if claims is claims_before:
            self._record = None
            return block.retention_id
        record = records.share(claims)
        self._record = record
        self.any_pins = self.any_pins or record.strength == PINNED
        return record.retention_id

    def end(self, num_put: i64) -> None:
        """Count the blocks of a stretch that have got the number."""
        if self._record is not None:
            self._records.count_put(self._record, self._old, num_put)
            self._record = None
