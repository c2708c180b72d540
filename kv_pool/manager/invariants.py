"""The numbered truths about a manager and its companions, each executable; beside `core/invariants.py`.

Tables and copies
    T1  an entry of a table is the null block, or a block of this pool that is in use
    T2  b.ref_cnt == |entries that are b| + |pending copies that read b| + |other holders of b|
    T3  a table has entries for at least all computed tokens; an encoder-only one has none
    T4  what the next token attends to has blocks;  windows: the first num_null_blocks entries are null and
        no other is
    T5  num_cached_blocks <= |entries|;  a block at position i that carries a hash carries that of the
        request's first (i + 1) * block_size tokens, in this group
    T6  a pending copy's target is in a table, and no source is a target
    T7  who has tables is a request that somebody knows of
    T8  what a step is about to write is no null block, has one writer, and is findable only as what will be
        there;  who else has it in a table found it so, and begins after it; of a state nobody else has it

Retention
    R1  b is kept  =>  b.ref_cnt == 1, b is not in the free queue, and it carries a hash
    R2  claims on b are remembered and not void, and it carries a hash  =>  b.ref_cnt > 0
    R3  every kept block is listed once in its batch, not before `first`; a batch counts its kept blocks
    R4  a batch is in the bucket of its strength: the strongest of its claims, EXPIRED without any
    R5  |kept| == num_kept + num_pinned;  a block is in the set of pinned ones  <=>  a claim on it is a pin
    R6  num_pins <= max_pinned_blocks
    R7  in a bucket that counts as sorted the numbers of blocks rise, from batch to batch as within one
    R8  what ends, batch or session, has an entry among the deadlines, and that is not before the clock's time
    R9  no more sessions than max_sessions
    R10 a number on a block is that of a batch, or (negative: void) of a cover;  |blocks with its number| is
        what a cover counts;  sets of claims and covers are one to one, and none is empty

Leases
    L1  b.ref_cnt >= number of leases that hold b
    L2  a lent block is not kept
    L3  a block that is being written has one lease and no hash
    L4  leases per block are what a count over all leases says
    L5  every active lease has its deadline among the deadlines
    L6  a listed lease is active or quarantined; one to read is never quarantined

T1 to T7 hold between two steps, when each request's `num_computed_tokens` counts all that was written; T8
between the last `allocate_slots` of a step and the step; R and L whenever no method is running, R8 after
any that looked at the clock. `check_manager(manager, requests)` and the others raise CorruptedPoolError that
names the first one that fails. Never compiled: for tests, and for whoever changes the manager.
"""

from collections import Counter
from collections.abc import Iterable

from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import CorruptedPoolError
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.leases import BlockLeases, LeaseKind, LeaseState
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.claim import EXPIRED, NEVER, PINNED, is_pin
from kv_pool.manager.retention.covers import Cover
from kv_pool.manager.retention.kept_blocks import Batch

# ---- tables --------------------------------------------------------------------------------------


def check_manager(
    manager: KVCacheManager,
    requests: Iterable[SchedulableRequest],
    held_elsewhere: Iterable[KVCacheBlock] = (),
) -> None:
    """Verify T1 to T7 and the pool's own invariants. O(number of blocks + entries of all tables).

    Args:
        requests: at least all that hold blocks, between two steps.
        held_elsewhere: blocks on which somebody besides this manager's tables and copies has a reference,
            once for each.
    Raises:
        CorruptedPoolError: names the first that fails. Nothing is changed.
    """
    pool = manager.block_pool
    if isinstance(pool, RunBlockPool):
        run_invariants.check(pool)
    elif isinstance(pool, BlockPool):
        invariants.check(pool)
    by_id = {request.request_id: request for request in requests}
    for request_id in manager.list_request_ids():
        if request_id not in by_id:
            raise CorruptedPoolError(f"T7: request {request_id!r} has blocks and nobody knows of it")
    check_references(manager, held_elsewhere)
    for request_id in manager.list_request_ids():
        for group_id, spec in enumerate(manager.groups):
            table = manager.get_table(request_id, group_id)
            where = f"request {request_id!r}, group {group_id}"
            check_coverage(table, spec, by_id[request_id].num_computed_tokens, where)
            check_hashes(manager, table, group_id, by_id[request_id], where)


def check_references(manager: KVCacheManager, held_elsewhere: Iterable[KVCacheBlock] = ()) -> None:
    """T1, T2, T6. O(number of blocks + entries of all tables)."""
    pool = manager.block_pool
    num_holders: Counter[int] = Counter()
    for request_id in manager.list_request_ids():
        for group_id in range(len(manager.groups)):
            for position, block in enumerate(manager.get_table(request_id, group_id).blocks):
                where = f"request {request_id!r}, group {group_id}, entry {position}"
                if not 0 <= block.block_id < len(pool.blocks) or pool.blocks[block.block_id] is not block:
                    raise CorruptedPoolError(f"T1: {where} is block {block.block_id}, not one of this pool's")
                if block.is_null:
                    continue
                if block.ref_cnt < 1:
                    raise CorruptedPoolError(f"T1: {where} is block {block.block_id}, which is free")
                num_holders[block.block_id] += 1
    in_tables = set(num_holders)
    copies = manager.copies._source_of
    for target, source in copies.items():
        if target.block_id not in in_tables:
            raise CorruptedPoolError(f"T6: block {target.block_id} is to be copied to, and in no table")
        if source in copies:
            raise CorruptedPoolError(f"T6: block {source.block_id} is to be copied from and to")
        num_holders[source.block_id] += 1
    num_holders.update(block.block_id for block in held_elsewhere)
    for block in pool.blocks:
        if not block.is_null and block.ref_cnt != num_holders[block.block_id]:
            raise CorruptedPoolError(
                f"T2: block {block.block_id} has ref_cnt {block.ref_cnt} and "
                f"{num_holders[block.block_id]} holders"
            )


def check_coverage(table: BlockTable, spec: KVCacheSpec, num_computed: int, where: str) -> None:
    """T3, T4. O(entries)."""
    blocks = table.blocks
    if isinstance(spec, EncoderOnlyAttentionSpec):
        if blocks:
            raise CorruptedPoolError(f"T3: {where} has {len(blocks)} blocks, and keeps nothing")
        return
    num_entries = -(-num_computed // spec.block_size) if spec.is_cacheable else 0
    if len(blocks) < num_entries:
        raise CorruptedPoolError(
            f"T3: {where} has {len(blocks)} blocks of {spec.block_size} for {num_computed} computed tokens"
        )
    first = count_unread_tokens(spec, num_computed) // spec.block_size
    for position in range(first, num_entries):
        if blocks[position].is_null:
            raise CorruptedPoolError(
                f"T4: {where} is null at entry {position}, and token {num_computed} attends to that"
            )
    num_null = table.num_null_blocks
    for position, block in enumerate(blocks):
        if position < num_null and not block.is_null:
            raise CorruptedPoolError(
                f"T4: {where} says {num_null} entries are null, and entry {position} is block "
                f"{block.block_id}"
            )
        if position >= num_null and block.is_null and not isinstance(spec, MambaSpec):
            raise CorruptedPoolError(
                f"T4: {where} says {num_null} entries are null, and so is entry {position}"
            )


def count_unread_tokens(spec: KVCacheSpec, num_computed: int) -> int:
    """Tokens from the head that no token after the computed ones attends to. By the definitions alone."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, num_computed - (spec.sliding_window - 1))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return num_computed - num_computed % spec.attention_chunk_size
    if isinstance(spec, MambaSpec):
        return max(0, num_computed - 1)
    return 0


def check_hashes(
    manager: KVCacheManager, table: BlockTable, group_id: int, request: SchedulableRequest, where: str
) -> None:
    """T5. O(entries)."""
    spec = manager.groups[group_id]
    if table.num_cached_blocks > len(table.blocks):
        raise CorruptedPoolError(
            f"T5: {where} says {table.num_cached_blocks} of its {len(table.blocks)} entries are cached"
        )
    hashes = request.block_hashes
    num_hashes = spec.block_size // manager.block_pool.hash_block_size
    for position, block in enumerate(table.blocks):
        if block.block_hash is None:
            continue
        index = (position + 1) * num_hashes - 1
        if (
            not spec.is_cacheable
            or index >= len(hashes)
            or block.block_hash != make_block_hash_with_group_id(hashes[index], group_id)
        ):
            raise CorruptedPoolError(
                f"T5: {where}, entry {position}, is block {block.block_id} with the hash of something else"
            )


# ---- steps ---------------------------------------------------------------------------------------


def check_writes(manager: KVCacheManager, scheduled: Iterable[tuple[SchedulableRequest, int]]) -> None:
    """Verify T8. O(entries of all tables).

    Args:
        scheduled: all requests with blocks, each with how many tokens after `num_computed_tokens` the step
            writes of it; 0 for one that is not in the step.
    Raises:
        CorruptedPoolError: a block has two writers or would be written under somebody's eyes.
    """
    scheduled = list(scheduled)
    holders: dict[int, list[tuple[str, int, int]]] = {}
    for request_id in manager.list_request_ids():
        for group_id in range(len(manager.groups)):
            for position, block in enumerate(manager.get_table(request_id, group_id).blocks):
                holders.setdefault(block.block_id, []).append((request_id, group_id, position))
    first_token = {request.request_id: request.num_computed_tokens for request, _ in scheduled}
    for request, num_tokens in scheduled:
        num_computed = request.num_computed_tokens
        num_known = min(num_computed + num_tokens, request.num_tokens)
        for group_id, spec in enumerate(manager.groups):
            if not spec.is_cacheable or not num_tokens:
                continue
            is_state = isinstance(spec, MambaSpec)
            last = (num_computed + num_tokens - 1) // spec.block_size
            first = last if is_state else num_computed // spec.block_size
            blocks = manager.get_table(request.request_id, group_id).blocks
            for position in range(first, last + 1):
                where = f"request {request.request_id!r}, group {group_id}, entry {position}"
                if position >= len(blocks) or blocks[position].is_null:
                    raise CorruptedPoolError(f"T8: {where} is about to be written, and has no block")
                block = blocks[position]
                end = (position + 1) * spec.block_size
                if block.block_hash is not None and end > num_known:
                    raise CorruptedPoolError(
                        f"T8: {where} is about to be written, and its block {block.block_id} is findable as "
                        "something else"
                    )
                is_readable = block.block_hash is not None and not is_state
                for other in holders[block.block_id]:
                    if other == (request.request_id, group_id, position):
                        continue
                    if (
                        not is_readable
                        or first_token.get(other[0], 0) < end
                        or other[1:] != (group_id, position)
                    ):
                        raise CorruptedPoolError(
                            f"T8: {where} is about to be written, and request {other[0]!r}, group "
                            f"{other[1]}, entry {other[2]} is the same block {block.block_id}"
                        )


# ---- retention and leases ------------------------------------------------------------------------


def check_retention(retention: BlockRetention) -> None:
    """R1 to R10. O(blocks of the pool, sessions). Raises CorruptedPoolError."""
    num_kept = retention.num_kept  # looks at the clock
    kept: dict[KVCacheBlock, Batch] = {}
    covers: dict[KVCacheBlock, Cover] = {}
    for block in retention.block_pool.blocks:
        if block._retention_id == 0:
            continue
        thing = retention._ids.find(block)
        if isinstance(thing, Batch) and block._retention_id > 0:
            kept[block] = thing
        elif isinstance(thing, Cover):
            covers[block] = thing
        else:
            raise CorruptedPoolError(
                f"R10: block {block.block_id} has number {block._retention_id}, which is {thing!r}'s"
            )
    for block, batch in kept.items():
        if block.ref_cnt != 1 or block.next_free_block is not None or block.block_hash is None:
            raise CorruptedPoolError(f"R1: {block!r} is kept")
        if batch.blocks[batch.first :].count(block) != 1:
            raise CorruptedPoolError(f"R3: block {block.block_id} is not listed once in its batch")
    for block, cover in covers.items():
        if block._retention_id > 0 and block.block_hash is not None and block.ref_cnt < 1:
            raise CorruptedPoolError(f"R2: block {block.block_id} has remembered claims and is free")
        if not cover.claims:
            raise CorruptedPoolError(f"R2: block {block.block_id} is remembered without claims")
    _check_covers(retention, Counter(covers.values()))
    _check_buckets(retention, kept)
    num_pinned = sum(batch.strength == PINNED for batch in kept.values())
    if len(kept) != num_kept + retention.num_pinned or num_pinned != retention.num_pinned:
        raise CorruptedPoolError(
            f"R5: {len(kept)} kept, {num_pinned} of them pinned; counted {num_kept} and "
            f"{retention.num_pinned}"
        )
    pins = retention._pins
    pinned = {block for block, batch in kept.items() if is_pin(batch.claims)}
    pinned |= {block for block, cover in covers.items() if is_pin(cover.claims)}
    if pinned != pins.blocks:
        raise CorruptedPoolError(f"R5: {len(pinned)} blocks are pinned, {len(pins.blocks)} counted")
    num_promised = sum(len(promised) for promised in pins.promised.values())
    if num_promised != pins.num_promised:
        raise CorruptedPoolError(f"R6: {num_promised} promised pins, counted {pins.num_promised}")
    if retention.num_pins > retention.max_pinned_blocks:
        raise CorruptedPoolError(f"R6: {retention.num_pins} pins of {retention.max_pinned_blocks}")
    _check_deadlines(retention)
    if len(retention._sessions.by_id) > retention.max_sessions:
        raise CorruptedPoolError(f"R9: {retention.num_sessions} sessions of {retention.max_sessions}")


def _check_covers(retention: BlockRetention, counted: Counter[Cover]) -> None:
    """R10."""
    known = retention._covers
    if set(counted) != set(known.by_claims.values()) or known.num_blocks != counted.total():
        raise CorruptedPoolError(f"R10: {counted.total()} blocks are covered, {known.num_blocks} counted")
    for cover, num_blocks in counted.items():
        if cover.num_blocks != num_blocks or known.by_claims[cover.claims] is not cover:
            raise CorruptedPoolError(f"R10: a cover of {num_blocks} blocks counts {cover.num_blocks}")


def _check_buckets(retention: BlockRetention, kept: dict[KVCacheBlock, Batch]) -> None:
    """R3, R4, R7."""
    num_kept = 0
    for strength, bucket in retention._kept.buckets.items():
        last_number = 0
        for batch in bucket:
            theirs = [block for block in batch.blocks if kept.get(block) is batch]
            if len(theirs) != batch.num_kept or not theirs:
                raise CorruptedPoolError(f"R3: a batch counts {batch.num_kept} blocks and has {len(theirs)}")
            num_kept += len(theirs)
            strongest = max((claim.strength for claim in batch.claims), default=EXPIRED)
            if not strongest == strength == batch.strength:
                raise CorruptedPoolError(f"R4: a batch of {strongest} is in the bucket of {strength}")
            if strength == EXPIRED or strength in retention._kept.unsorted:
                continue
            if batch.number <= last_number:
                raise CorruptedPoolError(
                    f"R7: the bucket of {strength} has number {batch.number} behind {last_number}"
                )
            last_number = batch.number + len(batch.blocks) - 1
    if not num_kept == len(kept) == retention.num_held:
        raise CorruptedPoolError(
            f"R3: {len(kept)} blocks are kept, {num_kept} in buckets, {retention.num_held} counted"
        )


def _check_deadlines(retention: BlockRetention) -> None:
    """R8."""
    entries = {(entry[0], id(entry[3])) for entry in retention._deadlines.entries}
    now = retention._clock()
    for session in retention._sessions.by_id.values():
        ends_at = session.changes_at
        if ends_at != session.claim.until or ends_at <= now or (ends_at, id(session)) not in entries:
            raise CorruptedPoolError(f"R8: nothing ends session {session.session_id!r}")
    for bucket in retention._kept.buckets.values():
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
