"""The numbered invariants of a pool. They hold whenever no method of the pool is running.

    Q1  head -> ... -> tail takes num_free_blocks + 1 steps along next_free_block
    Q2  for every step a -> b:  b.prev_free_block is a;  head has no prev, tail no next
    Q3  linked(b)  <=>  b.ref_cnt == 0 and not b.is_null;  otherwise both its links are None
    P1  num_free_blocks + |in use| + 1 (the null block) == num_gpu_blocks == len(blocks)
    P2  the map holds (h, b)  <=>  b carries h, as its primary or a secondary key
    P3  blocks[i].block_id == i, and blocks[i].pool is this pool
    P4  block 0, and only block 0, is null; it carries no hash
    P5  b.ref_cnt >= 0
    P6  a block with secondary keys has a primary key, which is not among them
    P7  a held block is one of the pool's and not null, and has at least as many references as holds
    P8  the queue contains the end markers of the bands in band order; `append` inserts before the end of the
        default band, or before the tail if the queue has no bands
    K1  a block's number is n > 0  =>  run n lists it;  a free run lists only blocks with its number
    K2  the blocks of a free run are free and in the default band; those of others are in use, or in other
        bands
    K3  run.num_children == number of runs whose parent it is;  a parent has blocks, unless a caller took them
    K4  a free run is in exactly one queue, in its list or parked; a parked run is in use or has children
    K5  num_ordered == blocks of free runs == blocks of the default band;  elsewhere are those of bands other
        than this and the empty one, num_above of them in bands above the default
    K6  queue.num_blocks == blocks of the runs whose queue it is
    D1  the blocks in a live curve's stack are ordered by their stamps, which differ
    D2  the stack has each of these blocks under its key
    D3  a sampled block's parent is in the stack, and was used at the same access or later
    D4  the stack has at most `limit` blocks
    H1  no entry of the map is empty; an entry that is a dict is keyed by its blocks' ids
    H2  a block with a _next_cached_id of 0 or more is the bare entry of its primary key
    H3  the map's key count equals its number of keys

`check(pool)` raises CorruptedPoolError with the number of the first invariant that fails. Never compiled:
it is for tests and for debugging.
"""

from kv_pool.core.arguments import refuse_interrupted
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.eviction_order import DEFAULT_BAND
from kv_pool.core.free_queue import BAND_END, FreeKVCacheBlockQueue
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockId


def check(pool: BlockPool) -> None:
    """Verify every invariant. O(number of blocks).

    Changes nothing but its counts.

    Raises:
        PoolInterruptedError: a call was interrupted, so they need not hold.
        CorruptedPoolError: an invariant fails; the message begins with its number.
    """
    if pool.is_changing:
        refuse_interrupted()
    pool.num_checks += 1
    pool.num_failed_checks += 1  # until all have passed
    check_free_queue(pool.free_block_queue)
    check_blocks(pool)
    check_holds(pool)
    check_bands(pool)
    check_runs(pool)
    check_live_curve(pool)
    check_prefix_map(pool)
    pool.num_failed_checks -= 1


def check_free_queue(queue: FreeKVCacheBlockQueue) -> None:
    """Check Q1 and Q2. O(num_free_blocks)."""
    block = queue.fake_free_list_head
    if block.prev_free_block is not None:
        raise CorruptedPoolError("Q2: the head sentinel has a prev_free_block")
    num_left = queue.num_free_blocks + 1
    while num_left:
        after = block.next_free_block
        num_left -= after is None or after.ref_cnt != BAND_END
        if after is None:
            raise CorruptedPoolError(f"Q1: the queue ends at block {block.block_id}")
        if after.prev_free_block is not block:
            raise CorruptedPoolError(
                f"Q2: block {after.block_id} does not point back to block {block.block_id}"
            )
        block = after
    if block is not queue.fake_free_list_tail:
        raise CorruptedPoolError(
            f"Q1: {queue.num_free_blocks} steps from the head lead to block {block.block_id}, not the tail"
        )
    if block.next_free_block is not None:
        raise CorruptedPoolError("Q2: the tail sentinel has a next_free_block")


def check_blocks(pool: BlockPool) -> None:
    """Check Q3, P1, P3, P4 and P5. O(number of blocks)."""
    linked = {id(block) for block in pool.free_block_queue.get_all_free_blocks()}
    num_in_use = 0
    if len(pool.blocks) != pool.num_gpu_blocks:
        raise CorruptedPoolError(f"P1: {len(pool.blocks)} blocks of {pool.num_gpu_blocks}")
    for position, block in enumerate(pool.blocks):
        _check_block(pool, position, block, id(block) in linked)
        num_in_use += block.ref_cnt > 0 and not block.is_null
    if len(linked) + num_in_use + 1 != pool.num_gpu_blocks:
        raise CorruptedPoolError(f"P1: {len(linked)} free + {num_in_use} in use + 1 != {pool.num_gpu_blocks}")


def check_slice(pool: BlockPoolCore, first: int, num_blocks: int) -> None:
    """Check what Q2, Q3, P2 to P5 say of some blocks and their neighbours. O(num_blocks).

    Changes nothing but the pool's counts of checks. `check` verifies the rest.

    Args:
        first: the lowest of the ids.
    Raises:
        PoolInterruptedError, CorruptedPoolError: as `check`.
    """
    if pool.is_changing:
        refuse_interrupted()
    pool.num_checks += 1
    pool.num_failed_checks += 1  # until all have passed
    entries = pool.cached_block_hash_to_block._cache
    for position, block in enumerate(pool.blocks[first : first + num_blocks], first):
        before, after = block.prev_free_block, block.next_free_block
        _check_block(pool, position, block, before is not None and after is not None)
        if before is not None and before.next_free_block is not block:
            raise CorruptedPoolError(f"Q2: the block before {position} does not point to it")
        if after is not None and after.prev_free_block is not block:
            raise CorruptedPoolError(f"Q2: the block after {position} does not point back to it")
        if block.block_hash is not None:
            entry = entries.get(block.block_hash)
            if entry is not block and not (isinstance(entry, dict) and entry.get(position) is block):
                raise CorruptedPoolError(f"P2: block {position} carries a hash that is not in the map")
    pool.num_failed_checks -= 1


def _check_block(pool: BlockPoolCore, position: int, block: KVCacheBlock, is_linked: bool) -> None:
    """Check Q3, P3, P4 and P5 of one block."""
    if block.block_id != position:
        raise CorruptedPoolError(f"P3: block {block.block_id} is at position {position}")
    if block.pool is not pool:
        raise CorruptedPoolError(f"P3: block {position} does not refer to its pool")
    if block.is_null != (position == 0) or (position == 0) != (block is pool.null_block):
        raise CorruptedPoolError(f"P4: block {position} has is_null {block.is_null}")
    if block.is_null and block.block_hash is not None:
        raise CorruptedPoolError("P4: the null block carries a hash")
    if block.ref_cnt < 0:
        raise CorruptedPoolError(f"P5: block {position} has ref_cnt {block.ref_cnt}")
    should_be_linked = block.ref_cnt == 0 and not block.is_null
    if is_linked != should_be_linked:
        raise CorruptedPoolError(
            f"Q3: block {position} has ref_cnt {block.ref_cnt} and is "
            f"{'' if is_linked else 'not '}in the free queue"
        )
    if not should_be_linked and (block.prev_free_block is not None or block.next_free_block is not None):
        raise CorruptedPoolError(f"Q3: block {position} is not free but has links")


def check_holds(pool: BlockPool) -> None:
    """Check P7. O(held blocks)."""
    for hold in pool.holds.list_holds():
        for block in hold.blocks:
            if block.is_null or block.pool is not pool:
                raise CorruptedPoolError(f"P7: {block!r} is held as {hold.reason}")
    for block, num_holds in pool.holds.count_references().items():
        if block.ref_cnt < num_holds:
            raise CorruptedPoolError(
                f"P7: block {block.block_id} has {num_holds} holds and {block.ref_cnt} references"
            )


def check_bands(pool: BlockPool) -> None:
    """Check P8. O(number of free blocks)."""
    order = pool.eviction_order
    queue = pool.free_block_queue
    expected = order._ends[DEFAULT_BAND] if order.is_open else queue.fake_free_list_tail
    if queue.append_before is not expected:
        raise CorruptedPoolError("P8: blocks are not appended to the default band")
    ends = []
    block = queue.fake_free_list_head.next_free_block
    while block is not None:
        if block.ref_cnt == BAND_END:
            ends.append(block)
        block = block.next_free_block
    bands = sorted(order._ends)
    if ends != [order._ends[band] for band in bands]:
        raise CorruptedPoolError(f"P8: the queue has {len(ends)} band markers for the bands {bands}")


def check_runs(pool: BlockPool) -> None:
    """Check K1 to K6. O(number of blocks). They do not hold after an error of the policy."""
    host = pool.policy_host
    if host is None or host.failure is not None:
        return
    runs = host.table.list_runs()
    for block in pool.blocks:
        owner = host.table.runs[block.run_id] if block.run_id > 0 else None
        if block.run_id > 0 and (owner is None or not any(block is other for other in owner.blocks)):
            raise CorruptedPoolError(f"K1: run {block.run_id} does not list block {block.block_id}")
    children: dict[int, int] = {}
    linked = {run.number: queue for queue in host.policy.queues for run in queue.list_runs()}
    sizes = [0] * len(host.policy.queues)
    num_ordered = 0
    for run in runs:
        if run.is_free and any(block.run_id != run.number for block in run.blocks):
            raise CorruptedPoolError(f"K1: run {run.number} lists a block of another run")
        if any(
            (block.ref_cnt == 0 and block not in host.elsewhere) != run.is_free
            for block in run.blocks
            if block.run_id == run.number
        ):
            raise CorruptedPoolError(f"K2: run {run.number} has is_free {run.is_free}")
        if run.parent is not None:
            children[run.parent.number] = children.get(run.parent.number, 0) + 1
        if linked.get(run.number) is not (None if run.is_parked else run.queue):
            raise CorruptedPoolError(f"K4: run {run.number} is not where its queue is")
        if run.is_free and run.queue is None:
            raise CorruptedPoolError(f"K4: run {run.number} is free and in no queue")
        if run.is_parked and run.is_free and run.num_children == 0:
            raise CorruptedPoolError(f"K4: run {run.number} is parked, although it can be evicted")
        if run.is_free:
            num_ordered += len(run.blocks)
        if run.queue is not None:
            sizes[run.queue.index] += len(run.blocks)
    for run in runs:
        if not run.blocks or run.num_children != children.get(run.number, 0):
            raise CorruptedPoolError(
                f"K3: run {run.number} has {len(run.blocks)} blocks and {children.get(run.number, 0)} "
                f"children, and counts {run.num_children}"
            )
    bands = dict(pool.eviction_order.list_bands())
    num_default = len(bands.pop(DEFAULT_BAND))
    if not num_ordered == host.num_ordered == num_default:
        raise CorruptedPoolError(
            f"K5: {num_ordered} blocks of free runs, {host.num_ordered} counted, {num_default} in the queue"
        )
    elsewhere = {block: band > DEFAULT_BAND for band, blocks in bands.items() for block in blocks}
    if host.elsewhere != elsewhere or host.num_above != sum(elsewhere.values()):
        raise CorruptedPoolError(
            f"K5: {len(host.elsewhere)} blocks in other bands, {host.num_above} of them above, and "
            f"{len(elsewhere)} and {sum(elsewhere.values())} in the queue"
        )
    if sizes != [queue.num_blocks for queue in host.policy.queues]:
        raise CorruptedPoolError(f"K6: the queues have {sizes} blocks")


def check_live_curve(pool: BlockPool) -> None:
    """Check D1 to D4. O(limit)."""
    curve = pool.live_curve
    if curve is None:
        return
    stack = curve.stack
    stamps = [block.stamp for block in stack.order]
    if stamps != sorted(set(stamps)):
        raise CorruptedPoolError(f"D1: the stamps of {len(stack.order)} sampled blocks do not ascend")
    if stack.blocks != {block.key: block for block in stack.order}:
        raise CorruptedPoolError(f"D2: {len(stack.blocks)} keys of {len(stack.order)} sampled blocks")
    for key, block in stack.blocks.items():
        parent = block.parent
        if parent is not None and (stack.blocks.get(parent.key) is not parent or parent.stamp < block.stamp):
            raise CorruptedPoolError(f"D3: the parent of {key.hex()} is not in the stack, or is less recent")
    if len(stack.blocks) > stack.limit:
        raise CorruptedPoolError(f"D4: the stack has {len(stack.blocks)} blocks; its limit is {stack.limit}")


def check_prefix_map(pool: BlockPool) -> None:
    """Check H1, H2, H3, P2 and P6. O(number of blocks and keys)."""
    carried: set[tuple[bytes, BlockId]] = set()
    entries = pool.cached_block_hash_to_block._cache
    for block in pool.blocks:
        if block.block_hash is not None:
            carried.add((block.block_hash, block.block_id))
    for block_id, keys in pool.cached_block_hashes_by_block.items():
        primary = pool.blocks[block_id].block_hash
        if primary is None or primary in keys or not keys:
            raise CorruptedPoolError(
                f"P6: block {block_id} has the secondary keys {sorted(key.hex() for key in keys)} "
                f"besides the primary key {primary.hex() if primary else None}"
            )
        carried.update((key, block_id) for key in keys)
    mapped: set[tuple[bytes, BlockId]] = set()
    for key, entry in entries.items():
        copies = {entry.block_id: entry} if isinstance(entry, KVCacheBlock) else entry
        if not copies:
            raise CorruptedPoolError(f"H1: the entry for {key.hex()} is empty")
        for block_id, block in copies.items():
            if block.block_id != block_id:
                raise CorruptedPoolError(f"H1: block {block.block_id} is mapped under the id {block_id}")
            if not 0 <= block_id < len(pool.blocks) or pool.blocks[block_id] is not block:
                raise CorruptedPoolError(f"P2: the map has a block {block_id} that is not this pool's")
            if (key, block_id) not in carried:
                raise CorruptedPoolError(
                    f"P2: the map has block {block_id} under {key.hex()}, which it does not carry"
                )
            mapped.add((key, block_id))
    for unmapped, block_id in carried - mapped:
        raise CorruptedPoolError(f"P2: block {block_id} carries {unmapped.hex()}, which is not in the map")
    if len(entries) != pool.cached_block_hash_to_block._num_keys:
        raise CorruptedPoolError(
            f"H3: the map has {len(entries)} keys but counts {pool.cached_block_hash_to_block._num_keys}"
        )
    for block in pool.blocks:
        if block._next_cached_id >= 0 and entries.get(block.key) is not block:
            raise CorruptedPoolError(f"H2: block {block.block_id} is not the bare entry of its hash")
