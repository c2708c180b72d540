"""The numbered invariants of a `GPUKVPool`, with a check for each; extends `contiguous/invariants.py`.

    A1  every sequence in `holders` is stored under its own id and holds at least one block
    A2  holders_of[b] are the sequences whose blocks include b, if there are any
    A3  a held block belongs to this pool, is not null, and is in use
    A4  ref_cnt(b) == sequences that hold b + holds + references of others, for every block but the null block
    A5  every pinned block is held by a sequence and by the pins' hold; at most `max_pinned_blocks` are
        pinned; a sequence in whose name a block is pinned holds it
    A6  a storage has at least as many blocks as the block pool
    A7  no evicted sequence is in `holders`

They hold whenever no method of the pool is running. Never compiled: for tests and for development.
"""

from collections import Counter
from collections.abc import Iterable

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.contiguous import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import SequenceId
from kv_pool.manager.sequences.holdings import Holder


def check(pool: GPUKVPool, others: Iterable[KVCacheBlock] = ()) -> None:
    """Verify the invariants of the block pool and A1 to A7. O(number of blocks). Raises CorruptedPoolError.

    Args:
        others: blocks referenced by neither sequences nor holds, such as by a caller of `block_pool`; once
            for each reference.
    """
    with pool.lock:
        invariants.check(pool.block_pool)
        holders = _check_sequences(pool)
        _check_references(pool, holders, Counter(others) + Counter(pool.block_pool.holds.count_references()))
        _check_pins_and_sizes(pool)


def _check_sequences(pool: GPUKVPool) -> dict[KVCacheBlock, list[Holder]]:
    """A1, A2, A3 and A7. Returns the sequences that hold each block."""
    holdings = pool.holdings
    found: dict[KVCacheBlock, list[Holder]] = {}
    for sequence_id, holder in holdings.holders.items():
        if holder.sequence_id != sequence_id or not holder.blocks:
            raise CorruptedPoolError(
                f"A1: sequence {holder.sequence_id} is stored as {sequence_id}, {len(holder.blocks)} blocks"
            )
        for block in holder.blocks:
            found.setdefault(block, []).append(holder)
            if block.is_null or block.ref_cnt < 1 or pool.block_pool.blocks[block.block_id] is not block:
                raise CorruptedPoolError(f"A3: sequence {sequence_id} holds {block!r}")
    for sequence_id in holdings.evictions.list_sequences():
        if sequence_id in holdings.holders:
            raise CorruptedPoolError(f"A7: sequence {sequence_id} was evicted and holds blocks")
    for block in {*found, *holdings.holders_of}:
        booked = holdings.holders_of.get(block, ())
        if not booked or Counter(map(id, booked)) != Counter(map(id, found.get(block, ()))):
            raise CorruptedPoolError(
                f"A2: block {block.block_id} has the holders {_list_ids(booked)} and is among the blocks of "
                f"{_list_ids(found.get(block, []))}"
            )
    return found


def _check_references(
    pool: GPUKVPool, holders: dict[KVCacheBlock, list[Holder]], others: Counter[KVCacheBlock]
) -> None:
    """A4."""
    for block in pool.block_pool.blocks[1:]:
        num_sequences = len(holders.get(block, ()))
        if block.ref_cnt != num_sequences + others[block]:
            raise CorruptedPoolError(
                f"A4: block {block.block_id} has {block.ref_cnt} references: {num_sequences} by sequences "
                f"and {others[block]} by others"
            )


def _check_pins_and_sizes(pool: GPUKVPool) -> None:
    """A5 and A6."""
    holdings = pool.holdings
    if len(holdings.pins) > holdings.pins.max_pinned_blocks:
        raise CorruptedPoolError(
            f"A5: {len(holdings.pins)} blocks are pinned, at most {holdings.pins.max_pinned_blocks} may be"
        )
    for block in pool.block_pool.blocks:
        if block in holdings.pins and block not in holdings.holders_of:
            raise CorruptedPoolError(f"A5: block {block.block_id} is pinned and held by no sequence")
    if set(holdings.pins.hold.blocks) != set(holdings.pins.owners):
        raise CorruptedPoolError(
            f"A5: {len(holdings.pins)} blocks are pinned, {len(holdings.pins.hold.blocks)} are in their hold"
        )
    for block, counts in holdings.pins.owners.items():
        names = {*counts} - {None, *holdings.holders_of.get(block, ())}
        if names or min(counts.values(), default=0) < 1:
            raise CorruptedPoolError(f"A5: block {block.block_id} has pins of sequences that do not hold it")
    num_blocks = pool.block_pool.num_gpu_blocks
    if pool.storage is not None and pool.storage.num_blocks < num_blocks:
        raise CorruptedPoolError(f"A6: a storage of {pool.storage.num_blocks} blocks for {num_blocks}")


def _list_ids(holders: Iterable[Holder]) -> list[SequenceId]:
    return sorted(holder.sequence_id for holder in holders)
