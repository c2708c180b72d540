"""The numbered invariants of runs and compaction, with a check for each; extends `core/invariants.py`.

    F1  ages has one byte for each block;  ages[b] != 0  <=>  b is in the free queue
    F2  from the front of the queue to its back the ages of blocks with content never decrease
    F3  no age is above `now` except RETAINED, which exactly the blocks with content in higher bands have
    F4  the chunks of a buddy system are those of the free ids: aligned, disjoint, free buddies merged

    C1  no id occurs twice among sources and targets, except in an exchange: two moves between the same two
        ids, one in each direction
    C2  every source is in use or cached; every target is free, and not cached when the copy overwrites it;
        one block of an exchange is free and cached, the other in use or cached
    C3  neither the null block nor a held block is a source or a target
    C4  after the moves each target has the bytes that its source had before; no other bytes change, except in
        scratch slots
    C5  a block keeps its object, ref_cnt, hash, map entries and queue place; only its id changes, exchanged
        with the target's
    C6  everything keyed by id uses the new id: block list, secondary keys, watchers; of copies see H1
    C7  no event is sent and no key is lost
    C8  the caller gets (old id, new id) of every move, and a new epoch
    C9  writes to the old slot of a moved block are queued behind the copy
    C10 a failed copy leaves every id as it was, unless there are exchanges; in any case ids and bytes of
        blocks in use agree, and no key finds the bytes of another

F1 to F4 hold whenever no method of the pool is running. Every `apply_moves` checks C1 to C3. C4 to C8 and C10
compare the state before with the state after. C9 is kept by the engine's order of work; a violation shows as
C4. Never compiled: for tests and for development.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_index import EMPTY, IN_USE, RETAINED
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.eviction_order import DEFAULT_BAND
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockId, BlockMove


def check(pool: RunBlockPool) -> None:
    """Verify the core's invariants and F1 to F4. O(number of blocks). Raises CorruptedPoolError."""
    invariants.check(pool)
    index = pool.run_index
    if len(index.ages) != pool.num_gpu_blocks:
        raise CorruptedPoolError(f"F1: {len(index.ages)} ages for {pool.num_gpu_blocks} blocks")
    for block in pool.blocks:
        is_free = block.ref_cnt == 0 and not block.is_null
        if (index.ages[block.block_id] != IN_USE) != is_free:
            raise CorruptedPoolError(
                f"F1: block {block.block_id} is {'' if is_free else 'not '}free and has the age "
                f"{index.ages[block.block_id]}"
            )
    last = EMPTY
    for block in pool.free_block_queue.get_all_free_blocks():
        age = index.ages[block.block_id]
        if age > EMPTY:
            if age < last:
                raise CorruptedPoolError(f"F2: block {block.block_id} has age {age}, after one of {last}")
            last = age
    if index.buddies is not None and index.buddies.list_chunks(index.ages) != list_chunks(index.ages):
        raise CorruptedPoolError(
            f"F4: the chunks {index.buddies.list_chunks(index.ages)} do not match ages {bytes(index.ages)!r}"
        )
    above = {
        block.block_id
        for band, blocks in pool.eviction_order.list_bands()
        for block in blocks
        if band > DEFAULT_BAND
    }
    for block_id, age in enumerate(index.ages):
        if (age == RETAINED) != (block_id in above and age > EMPTY) or index.now < age < RETAINED:
            raise CorruptedPoolError(f"F3: block {block_id} has age {age}; `now` is {index.now}")


def list_chunks(ages: bytearray) -> list[tuple[BlockId, int]]:
    """Return the free chunks as (first id, order), by id: all ids free, but not all ids of the parent."""

    def is_free(first: int, order: int) -> bool:
        end = first + 2**order
        return end <= len(ages) and IN_USE not in ages[first:end]

    return [
        (BlockId(first), order)
        for first in range(len(ages))
        for order in range(len(ages).bit_length())
        if first % 2**order == 0 and is_free(first, order)
        if not is_free(first - first % 2 ** (order + 1), order + 1)
    ]


class Snapshot:
    """The observable state of a pool in terms of block objects, comparable after ids have changed."""

    def __init__(self, pool: RunBlockPool) -> None:
        self.epoch = pool.epoch
        self.num_events = len(pool.kv_event_queue)
        self.num_evictions = pool.num_evictions
        self.blocks = pool.blocks
        self.ids = {id(block): block.block_id for block in pool.blocks}
        self.states = {
            id(block): (block.ref_cnt, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks
        }
        self.queue = [id(block) for block in pool.free_block_queue.get_all_free_blocks()]
        self.entries = {
            key: [id(block) for block in ([entry] if isinstance(entry, KVCacheBlock) else entry.values())]
            for key, entry in pool.cached_block_hash_to_block.entries.items()
        }
        self.secondary = {
            id(pool.blocks[block_id]): list(keys)
            for block_id, keys in pool.cached_block_hashes_by_block.items()
        }
        self.watchers = {
            id(pool.blocks[block_id]): on_reuse for block_id, on_reuse in pool.reuse_watchers.items()
        }


def check_relocation(before: Snapshot, pool: RunBlockPool, relocation: Relocation) -> None:
    """Verify C5 to C8 for moves to targets that were not cached. Raises CorruptedPoolError."""
    after = Snapshot(pool)
    new_ids = dict(relocation.moves)
    new_ids.update((target, source) for source, target in relocation.moves)
    for block in before.blocks:
        old_id = before.ids[id(block)]
        if block.block_id != new_ids.get(old_id, old_id):
            raise CorruptedPoolError(
                f"C8: block {old_id} is now block {block.block_id}, which the relocation does not say"
            )
        if pool.blocks[block.block_id] is not block:
            raise CorruptedPoolError(f"C6: the block list has another block at {block.block_id}")
    for name, broken in (
        ("states", "C5: the references or the key of a block have changed"),
        ("queue", "C5: the order of the free queue has changed"),
        ("secondary", "C6: secondary keys are stored under another id than their block's"),
        ("watchers", "C6: a watcher waits for another block"),
        ("entries", "C7: the prefix map finds other blocks"),
        ("num_events", "C7: an event was sent"),
        ("num_evictions", "C7: a key was lost"),
    ):
        if getattr(after, name) != getattr(before, name):
            raise CorruptedPoolError(broken)
    if relocation.moves and not before.epoch < relocation.epoch == pool.epoch:
        raise CorruptedPoolError(
            f"C8: epoch {relocation.epoch} follows {before.epoch}, but the pool's is {pool.epoch}"
        )


def check_nothing_moved(before: Snapshot, pool: RunBlockPool) -> None:
    """Verify C10. Raises CorruptedPoolError."""
    after = Snapshot(pool)
    for name in ("ids", "states", "queue", "entries", "secondary", "watchers", "epoch"):
        if getattr(before, name) != getattr(after, name):
            raise CorruptedPoolError(f"C10: {name} changed although the copy failed")


def check_bytes(
    before: Mapping[BlockId, Any],
    after: Mapping[BlockId, Any],
    moves: Sequence[BlockMove],
    scratch_ids: Sequence[BlockId] = (),
) -> None:
    """Verify C4, given the content of each slot by id. Raises CorruptedPoolError."""
    expected = dict(before)
    expected.update((target, before[source]) for source, target in moves)
    for block_id, content in expected.items():
        if after[block_id] != content and block_id not in scratch_ids:
            raise CorruptedPoolError(f"C4: slot {block_id} holds {after[block_id]!r}, not {content!r}")
