"""The numbered invariants of a retention, each executable; see also those of the manager and the pool.

    R1  a free block that carries a hash and claims is in the band of its strongest claim
    R2  a block's number is that of a record, negative if the claims are void;  a record counts the blocks
        with its number, and has claims
    R3  a block has a pin among its claims  <=>  it is among the pinned blocks;  a pinned block is not free
    R4  a block is held as pinned  =>  it has a pin among its claims
    R5  num_pins <= max_pinned_blocks
    R6  each record that ends has an entry among the deadlines, which is not in the past
    R7  no more sessions than max_sessions

They hold whenever no method is running, R6 after any method that read the clock. `check_retention` raises
CorruptedPoolError for the first that fails. Never compiled.
"""

from collections import Counter

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER
from kv_pool.errors import CorruptedPoolError
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.claims import Record, find_band, find_strength, is_pin


def check_retention(retention: BlockRetention) -> None:
    """Verify R1 to R7. O(blocks of the pool, sessions)."""
    now = retention._clock()  # before `expire`: what ends between the two is not expired yet
    retention.expire()
    _check_bands(retention)
    counts = _check_records(retention)
    _check_pins(retention)
    _check_deadlines(retention, list(counts), now)
    if len(retention._sessions) > retention.max_sessions:
        raise CorruptedPoolError(f"R7: {retention.num_sessions} sessions, limit {retention.max_sessions}")


def _check_bands(retention: BlockRetention) -> None:
    """Verify R1."""
    for band, blocks in retention.block_pool.eviction_order.list_bands():
        for block in blocks:
            claims = retention._placed.get_claims(block)
            if claims and find_band(find_strength(claims)) != band:
                raise CorruptedPoolError(
                    f"R1: block {block.block_id} is in band {band}, but its strongest claim has "
                    f"{find_strength(claims)}"
                )


def _check_records(retention: BlockRetention) -> Counter[Record]:
    """Verify R2. Return the number of blocks of each record."""
    counts: Counter[Record] = Counter()
    for block in retention.block_pool.blocks:
        if block.retention_id != 0:
            record = retention._placed.find(block)
            if record is None or not record.claims:
                raise CorruptedPoolError(
                    f"R2: block {block.block_id} has number {block.retention_id}, which belongs to {record!r}"
                )
            counts[record] += 1
    for record in retention._placed.list_records():
        if record.num_blocks != counts[record]:
            raise CorruptedPoolError(f"R2: a record of {counts[record]} blocks counts {record.num_blocks}")
    return counts


def _check_pins(retention: BlockRetention) -> None:
    """Verify R3, R4 and R5."""
    pinned = {block for block in retention.block_pool.blocks if is_pin(retention._placed.get_claims(block))}
    noted = {block for block in retention._placed.pinned if _is_valid(retention, block)}
    if pinned != noted:
        raise CorruptedPoolError(f"R3: {len(pinned)} blocks are pinned, but {len(noted)} are counted")
    for block in pinned:
        if block.ref_cnt == 0:
            raise CorruptedPoolError(f"R3: block {block.block_id} is pinned and free")
    for block in retention._placed.held.blocks:
        if block not in pinned and _is_valid(retention, block):
            raise CorruptedPoolError(f"R4: block {block.block_id} is held, but not pinned")
    if retention.num_pins > retention.max_pinned_blocks:
        raise CorruptedPoolError(f"R5: {retention.num_pins} pins, limit {retention.max_pinned_blocks}")


def _is_valid(retention: BlockRetention, block: KVCacheBlock) -> bool:
    """Return False for a block that lost its content in another way than by this retention."""
    return block.block_hash is not None and block.retention_id > 0


def _check_deadlines(retention: BlockRetention, records: list[Record], now: float) -> None:
    """Verify R6.

    Args:
        now: the time at which deadlines were expired, or earlier.
    """
    entries = {(entry[0], id(entry[2])) for entry in retention._deadlines.entries}
    for record in records:
        if not any(
            record is retention._placed.find(block) and retention._placed.get_claims(block)
            for block in record.blocks
        ):
            continue  # all of its claims are void
        if record.changes_at != record.find_next_end() or record.changes_at <= now:
            raise CorruptedPoolError(f"R6: claims that end at {record.find_next_end()} never end")
        if record.changes_at < NEVER and (record.changes_at, id(record)) not in entries:
            raise CorruptedPoolError("R6: no deadline ends the claims of a record")
