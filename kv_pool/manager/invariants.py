"""The numbered invariants of a manager and its leases, each executable; see also `core/invariants.py`.

Tables and copies
    T1  an entry of a table is the null block, or a block of this pool that is in use
    T2  b.ref_cnt == |entries that are b| + |holds of b| + |others|
    T3  a table has entries for at least all computed tokens; an encoder-only one has none
    T4  each entry that the next token attends to has a block;  windows: the first num_null_blocks entries
        are null and, without extra retained tokens, no other is
    T5  num_cached_blocks <= |entries|;  a block at position i that carries a hash carries that of the
        request's first (i + 1) * block_size tokens, in this group;  with prefix rules, that of any
        number of tokens up to the end of the block, which `block_hash_num_tokens` states;  except a block
        that a truncated request shares and has not replaced yet
    T6  a pending copy's target is in a table or held, its source is held, and no source is a target
    T7  every request with tables is among the given requests
    T8  a block that a step is about to write is not null, has one writer, and carries no hash but that of the
        content to be written;  other tables with the block got it by that hash, and their requests begin
        after it;  no other table has a state's block

Leases
    L1  a listed lease has an open hold on its blocks, and is active or quarantined
    L2  a lease to read is never quarantined; an active one ends at its deadline
    L3  a block that is being written has one lease, and no hash

T1 to T7 hold between two steps, when each request's `num_computed_tokens` counts all tokens that are written;
T8 between the last `allocate_slots` of a step and the step; L whenever no method is running. A check raises
CorruptedPoolError for the first invariant that fails. Never compiled.
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
from kv_pool.ids import BlockId, GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.leases import BlockLeases, Lease, LeaseKind, LeaseState
from kv_pool.manager.requests.request import SchedulableRequest

# ---- tables --------------------------------------------------------------------------------------


def check_manager(
    manager: KVCacheManager,
    requests: Iterable[SchedulableRequest],
    held_elsewhere: Iterable[KVCacheBlock] = (),
) -> None:
    """Verify T1 to T7 and the pool's own invariants. O(number of blocks + entries of all tables).

    Args:
        requests: at least all requests that hold blocks, between two steps.
        held_elsewhere: blocks that are referenced from elsewhere than this manager's tables, its copies and
            the pool's holds, once for each reference.
    Raises:
        CorruptedPoolError: names the first invariant that fails. Changes nothing.
    """
    pool = manager.block_pool
    if isinstance(pool, RunBlockPool):
        run_invariants.check(pool)
    elif isinstance(pool, BlockPool):
        invariants.check(pool)
    by_id = {request.request_id: request for request in requests}
    for request_id in manager.list_request_ids():
        if request_id not in by_id:
            raise CorruptedPoolError(f"T7: request {request_id!r} has blocks and is not a known request")
    check_references(manager, held_elsewhere)
    check_copies(manager)
    for request_id, group_id, table in list_tables(manager):
        where = f"request {request_id!r}, group {group_id}"
        check_coverage(table, manager.groups[group_id], by_id[request_id].num_computed_tokens, where)
        check_hashes(manager, table, group_id, by_id[request_id], where)


def list_tables(manager: KVCacheManager) -> list[tuple[RequestId, GroupId, BlockTable]]:
    """Return the tables of all requests and groups."""
    return [
        (request_id, GroupId(number), manager.get_table(request_id, GroupId(number)))
        for request_id in manager.list_request_ids()
        for number in range(len(manager.groups))
    ]


def check_references(manager: KVCacheManager, held_elsewhere: Iterable[KVCacheBlock] = ()) -> None:
    """Verify T1 and T2. O(number of blocks + entries of all tables)."""
    pool = manager.block_pool
    num_holders: Counter[BlockId] = Counter()
    for request_id, group_id, table in list_tables(manager):
        for position, block in enumerate(table.blocks):
            where = f"request {request_id!r}, group {group_id}, entry {position}"
            if not 0 <= block.block_id < len(pool.blocks) or pool.blocks[block.block_id] is not block:
                raise CorruptedPoolError(f"T1: {where} is block {block.block_id}, not one of this pool's")
            if block.is_null:
                continue
            if block.ref_cnt < 1:
                raise CorruptedPoolError(f"T1: {where} is block {block.block_id}, which is free")
            num_holders[block.block_id] += 1
    num_holders.update(block.block_id for block in held_elsewhere)
    for block, num_holds in pool.holds.count_references().items():
        num_holders[block.block_id] += num_holds
    for block in pool.blocks:
        if not block.is_null and block.ref_cnt != num_holders[block.block_id]:
            raise CorruptedPoolError(
                f"T2: block {block.block_id} has ref_cnt {block.ref_cnt} and "
                f"{num_holders[block.block_id]} holders"
            )


def check_copies(manager: KVCacheManager) -> None:
    """Verify T6. O(entries of all tables)."""
    in_tables = {block for _, _, table in list_tables(manager) for block in table.blocks}
    copies = manager.copies._source_of
    for target, source in copies.items():
        if target in manager.copies._group_of:
            if not manager.copies.is_source(target):
                raise CorruptedPoolError(f"T6: block {target.block_id} is the target of a copy, and not held")
        elif target not in in_tables:
            raise CorruptedPoolError(f"T6: block {target.block_id} is the target of a copy, and in no table")
        if source in copies:
            raise CorruptedPoolError(f"T6: block {source.block_id} is both source and target of copies")
        if not manager.copies.is_source(source):
            raise CorruptedPoolError(f"T6: block {source.block_id} is the source of a copy, and not held")


def check_coverage(table: BlockTable, spec: KVCacheSpec, num_computed: int, where: str) -> None:
    """Verify T3 and T4. O(entries)."""
    blocks = table.blocks
    if isinstance(spec, EncoderOnlyAttentionSpec):
        if blocks:
            raise CorruptedPoolError(f"T3: {where} has {len(blocks)} blocks, but its group keeps none")
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
                f"T4: {where} is null at entry {position}, but token {num_computed} attends to it"
            )
    num_null = table.num_null_blocks
    # Null entries may follow the first ones where a hit need not have all blocks.
    has_gaps = isinstance(spec, MambaSpec) or getattr(spec, "extra_retained_tokens", 0) > 0
    for position, block in enumerate(blocks):
        if position < num_null and not block.is_null:
            raise CorruptedPoolError(
                f"T4: {where} counts {num_null} null entries, but entry {position} is block {block.block_id}"
            )
        if position >= num_null and block.is_null and not has_gaps:
            raise CorruptedPoolError(
                f"T4: {where} counts {num_null} null entries, but entry {position} is null, too"
            )


def count_unread_tokens(spec: KVCacheSpec, num_computed: int) -> int:
    """Return the number of leading tokens that later tokens do not attend to, by the specs' definitions."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, num_computed - (spec.sliding_window - 1))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return num_computed - num_computed % spec.attention_chunk_size
    if isinstance(spec, MambaSpec):
        return max(0, num_computed - 1)
    return 0


def check_hashes(
    manager: KVCacheManager, table: BlockTable, group_id: GroupId, request: SchedulableRequest, where: str
) -> None:
    """Verify T5. O(entries)."""
    spec = manager.groups[group_id]
    if table.num_cached_blocks > len(table.blocks):
        raise CorruptedPoolError(
            f"T5: {where} counts {table.num_cached_blocks} of its {len(table.blocks)} entries as cached"
        )
    hashes = request.block_hashes
    num_hashes = spec.block_size // manager.block_pool.hash_block_size
    for position, block in enumerate(table.blocks):
        if block.block_hash is None:
            continue
        if table.is_forked and position >= table.num_cached_blocks and block.ref_cnt > 1:
            continue
        index = (position + 1) * num_hashes - 1
        if manager.prefix_rules is not None:
            num_tokens = block.block_hash_num_tokens or 0
            index = min(index, num_tokens // manager.block_pool.hash_block_size - 1)
        if (
            not spec.is_cacheable
            or index >= len(hashes)
            or block.block_hash != make_block_hash_with_group_id(hashes[index], group_id)
        ):
            raise CorruptedPoolError(
                f"T5: {where}, entry {position}, is block {block.block_id} with the hash of other content"
            )


# ---- steps ---------------------------------------------------------------------------------------


def check_writes(manager: KVCacheManager, scheduled: Iterable[tuple[SchedulableRequest, int]]) -> None:
    """Verify T8. O(entries of all tables).

    Args:
        scheduled: all requests with blocks, each with the number of tokens after `num_computed_tokens` that
            the step writes; 0 for a request that is not in the step.
    Raises:
        CorruptedPoolError: a block has two writers, or another request would see it change.
    """
    scheduled = list(scheduled)
    holders: dict[BlockId, list[tuple[RequestId, GroupId, int]]] = {}
    for request_id, group_id, table in list_tables(manager):
        for position, block in enumerate(table.blocks):
            holders.setdefault(block.block_id, []).append((request_id, group_id, position))
    first_token = {request.request_id: request.num_computed_tokens for request, _ in scheduled}
    for request, num_tokens in scheduled:
        num_computed = request.num_computed_tokens
        num_known = min(num_computed + num_tokens, request.num_tokens)
        for number, spec in enumerate(manager.groups):
            if not spec.is_cacheable or not num_tokens:
                continue
            group_id = GroupId(number)
            is_state = isinstance(spec, MambaSpec)
            last = (num_computed + num_tokens - 1) // spec.block_size
            first = last if is_state else num_computed // spec.block_size
            blocks = manager.get_table(request.request_id, group_id).blocks
            for position in range(first, last + 1):
                where = f"request {request.request_id!r}, group {group_id}, entry {position}"
                if position >= len(blocks) or blocks[position].is_null:
                    raise CorruptedPoolError(f"T8: {where} is about to be written, but has no block")
                block = blocks[position]
                end = (position + 1) * spec.block_size
                if block.block_hash is not None and end > num_known:
                    raise CorruptedPoolError(
                        f"T8: {where} is about to be written, but its block {block.block_id} is cached as "
                        "other content"
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
                            f"T8: {where} is about to be written, but request {other[0]!r}, group "
                            f"{other[1]}, entry {other[2]} is the same block {block.block_id}"
                        )


# ---- leases ----------------------------------------------------------------------------------------


def check_leases(leases: BlockLeases) -> None:
    """Verify L1, L2 and L3. O(leased blocks). Raises CorruptedPoolError."""
    is_due = {id(entry[2]) for entry in leases.block_pool.holds.deadlines.entries}
    by_block: dict[KVCacheBlock, list[Lease]] = {}
    for hold, lease in leases._leases.items():
        if hold.is_released:
            continue  # expired; the next `expire` reports it
        if hold is not lease.hold or hold.blocks != list(lease.blocks):
            raise CorruptedPoolError(f"L1: {lease!r} has a hold on other blocks: {hold!r}")
        if lease.state not in (LeaseState.ACTIVE, LeaseState.QUARANTINED):
            raise CorruptedPoolError(f"L1: {lease!r} is listed, but has ended")
        is_quarantined = lease.state is LeaseState.QUARANTINED
        if is_quarantined and lease.kind is LeaseKind.READ:
            raise CorruptedPoolError(f"L2: {lease!r} reads, and is quarantined")
        if not is_quarantined and (hold.until != lease.deadline or id(hold) not in is_due):
            raise CorruptedPoolError(f"L2: no deadline ends {lease!r}")
        for block in lease.blocks:
            by_block.setdefault(block, []).append(lease)
    for block, listed in by_block.items():
        is_written = any(lease.kind is LeaseKind.WRITE for lease in listed)
        if is_written and (len(listed) > 1 or block.block_hash is not None):
            raise CorruptedPoolError(
                f"L3: block {block.block_id} is written, and also read or cached: {listed}"
            )
