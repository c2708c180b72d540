"""The numbered truths about what a manager's companions keep, each executable; beside `core/invariants.py`.

    R1  b is kept  =>  b.ref_cnt == 1, b is not in the free queue, and it carries the hash that was claimed
    R2  b has claims and that hash, and is not kept  =>  b.ref_cnt > 0
    R3  every kept block is listed once in its batch, not before `first`; a batch counts its kept blocks
    R4  a batch is in the bucket of its strength: the strongest of its claims, EXPIRED without any
    R5  |kept| == num_kept + num_pinned;  a block is in the set of pinned ones  <=>  a claim on it is a pin
    R6  num_pins <= max_pinned_blocks
    R7  in a bucket that counts as sorted the batches' numbers rise; those of one batch's blocks always do
    R8  what ends, batch or session, has an entry among the deadlines, and that is not before the clock's time
    R9  no more sessions than max_sessions

    L1  b.ref_cnt >= number of leases that hold b
    L2  a lent block is not kept
    L3  a block that is being written has one lease and no hash
    L4  leases per block are what a count over all leases says
    L5  every active lease has its deadline among the deadlines
    L6  a listed lease is active or quarantined; one to read is never quarantined

They hold whenever no method is running; R8 after any method that looked at the clock. Never compiled.
"""

from kv_pool.errors import CorruptedPoolError
from kv_pool.manager.leases import BlockLeases, LeaseKind, LeaseState
from kv_pool.manager.retention import EXPIRED, NEVER, PINNED, BlockRetention, is_pin


def check_retention(retention: BlockRetention) -> None:
    """R1 to R9. O(kept blocks, blocks with claims, sessions). Raises CorruptedPoolError."""
    num_kept = retention.num_kept  # looks at the clock
    for block, batch in retention._kept.items():
        cover = retention._covers.get(block)
        if cover is None or cover.key is None or cover.key is not block.block_hash:
            raise CorruptedPoolError(f"R1: block {block.block_id} is kept for content that it has not")
        if block.ref_cnt != 1 or block.next_free_block is not None:
            raise CorruptedPoolError(f"R1: block {block.block_id} is kept with ref_cnt {block.ref_cnt}")
        if batch.blocks[batch.first :].count(block) != 1:
            raise CorruptedPoolError(f"R3: block {block.block_id} is not listed once in its batch")
    for block, cover in retention._covers.items():
        if cover.key is block.block_hash and block not in retention._kept and block.ref_cnt < 1:
            raise CorruptedPoolError(f"R2: block {block.block_id} is free, has claims and is not kept")
        if not cover.claims:
            raise CorruptedPoolError(f"R2: block {block.block_id} is remembered without claims")
    _check_buckets(retention)
    num_pinned = sum(batch.strength == PINNED for batch in retention._kept.values())
    if len(retention._kept) != num_kept + retention.num_pinned or num_pinned != retention.num_pinned:
        raise CorruptedPoolError(
            f"R5: {len(retention._kept)} kept, {num_pinned} of them pinned; counted {num_kept} and "
            f"{retention.num_pinned}"
        )
    for block, cover in retention._covers.items():
        kept_in = retention._kept.get(block)
        if is_pin(cover.claims if kept_in is None else kept_in.claims) != (block in retention._pinned):
            raise CorruptedPoolError(f"R5: block {block.block_id} is pinned, or it is counted as pinned")
    if not retention._pinned <= retention._covers.keys():
        raise CorruptedPoolError("R5: a block without claims is counted as pinned")
    num_promised = sum(len(promised) for promised in retention._promised_pins.values())
    if num_promised != retention._num_promised_pins:
        raise CorruptedPoolError(f"R6: {num_promised} promised pins, counted {retention._num_promised_pins}")
    if retention.num_pins > retention.max_pinned_blocks:
        raise CorruptedPoolError(f"R6: {retention.num_pins} pins of {retention.max_pinned_blocks}")
    _check_deadlines(retention)
    if len(retention._sessions) > retention.max_sessions:
        raise CorruptedPoolError(f"R9: {len(retention._sessions)} sessions of {retention.max_sessions}")


def _check_buckets(retention: BlockRetention) -> None:
    """R3, R4, R7."""
    num_kept = 0
    for strength, bucket in retention._buckets.items():
        last_number = 0
        for batch in bucket:
            kept = [block for block in batch.blocks if retention._kept.get(block) is batch]
            if len(kept) != batch.num_kept or not kept:
                raise CorruptedPoolError(f"R3: a batch counts {batch.num_kept} blocks and has {len(kept)}")
            num_kept += len(kept)
            strongest = max((claim.strength for claim in batch.claims), default=EXPIRED)
            if not strongest == strength == batch.strength:
                raise CorruptedPoolError(f"R4: a batch of {strongest} is in the bucket of {strength}")
            numbers = [retention._covers[block].number for block in kept]
            if numbers != sorted(numbers):
                raise CorruptedPoolError(f"R7: a batch has its blocks in the order {numbers}")
            if strength == EXPIRED or strength in retention._unsorted:
                continue
            if numbers[0] < last_number:
                raise CorruptedPoolError(
                    f"R7: the bucket of {strength} has {numbers[0]} behind {last_number}"
                )
            last_number = numbers[-1]
    if num_kept != len(retention._kept):
        raise CorruptedPoolError(f"R3: {len(retention._kept)} blocks are kept, {num_kept} are in buckets")


def _check_deadlines(retention: BlockRetention) -> None:
    """R8."""
    entries = {(time, id(thing)) for time, _, _, thing in retention._deadlines}
    now = retention._clock()
    for session in retention._sessions.values():
        if session.claim.until <= now or (session.claim.until, id(session)) not in entries:
            raise CorruptedPoolError(f"R8: nothing ends session {session.session_id!r}")
    for bucket in retention._buckets.values():
        for batch in bucket:
            ends = [claim.find_end(batch.freed_at) for claim in batch.claims]
            if min(ends, default=NEVER) != batch.changes_at or batch.changes_at <= now:
                raise CorruptedPoolError(f"R8: claims that end at {ends} change at {batch.changes_at}")
            if batch.changes_at < NEVER and (batch.changes_at, id(batch)) not in entries:
                raise CorruptedPoolError("R8: nothing ends a batch's claims")


def check_leases(leases: BlockLeases) -> None:
    """L1 to L6. O(lent blocks). Raises CorruptedPoolError."""
    counts: dict[int, int] = {}
    entries = set(leases._deadlines)
    for lease in leases.list_leases():
        is_quarantined = lease.state is LeaseState.QUARANTINED
        if lease.state is not LeaseState.ACTIVE and not (is_quarantined and lease.kind is LeaseKind.WRITE):
            raise CorruptedPoolError(f"L6: {lease!r} is listed")
        if not is_quarantined and (lease.deadline, lease.lease_id) not in entries:
            raise CorruptedPoolError(f"L5: nothing ends {lease!r}")
        for block in lease.blocks:
            counts[id(block)] = counts.get(id(block), 0) + 1
            is_written = lease.kind is LeaseKind.WRITE
            if (leases._written.get(block) is lease) != is_written:
                raise CorruptedPoolError(f"L3: block {block.block_id} of {lease!r}: is it written?")
            if is_written and (leases._num_leases[block] != 1 or block.block_hash is not None):
                raise CorruptedPoolError(
                    f"L3: block {block.block_id} is read, or cached, and {lease!r} writes it"
                )
            if leases._retention is not None and leases._retention.holds(block):
                raise CorruptedPoolError(f"L2: block {block.block_id} of {lease!r} is kept")
    if counts != {id(block): count for block, count in leases._num_leases.items()}:
        raise CorruptedPoolError("L4: blocks are lent more or less often than leases say")
    for block, count in leases._num_leases.items():
        if block.ref_cnt < count:
            raise CorruptedPoolError(
                f"L1: block {block.block_id} has {count} leases and {block.ref_cnt} references"
            )
    if not leases._written.keys() <= leases._num_leases.keys():
        raise CorruptedPoolError("L3: a block is written that is not lent")
