"""`dump_pool`, `load_pool`: what a pool has cached, in a file, so that an engine starts where it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, LayoutMismatchError, PoolDumpError
from kv_pool.events.resident_state import ResidentState
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.tiers.dump.dump_reader import BATCH_BYTES, DumpedBlocks, PoolDumpHeader, open_dump
from kv_pool.tiers.dump.records import RecordKind, RecordWriter, replace_file
from kv_pool.tiers.dump.rows import UNKNOWN, collect_rows, encode_rows, list_copies
from kv_pool.tiers.dump.told_blocks import encode_events, make_events, name_key, split_events


@dataclass(frozen=True, eq=False)
class LoadedPool:
    """What became of a dumped pool.

    Attributes:
        header: the dump's.
        old_ids, new_ids: (n,), int64, of the blocks that were loaded, the next to be evicted first. Ids are
            the old ones where this pool has them.
        num_dropped: cached blocks for which this pool had no room, those used longest ago.
    """

    header: PoolDumpHeader
    old_ids: npt.NDArray[np.int64]
    new_ids: npt.NDArray[np.int64]
    num_dropped: int

    @property
    def num_blocks(self) -> int:
        """How many blocks were loaded."""
        return len(self.new_ids)

    @property
    def next_sequence(self) -> int | None:
        """For `PublisherConfig.first_sequence`, so that a publisher goes on counting."""
        return self.header.next_sequence


def dump_pool(
    path: str | os.PathLike[str],
    pool: BlockPoolCore,
    *,
    storage: BlockStorage | None = None,
    layout: BlockLayout | None = None,
    stream_state: ResidentState | None = None,
) -> PoolDumpHeader:
    """Write down which blocks hold which prefix, in which order they would be evicted, and what they hold.

        |<--------- free, the next to be evicted first --------->|<-- in use: tails, then heads -->|

    Args:
        path: of the file, which is replaced at once when all is on the disk.
        storage: the bytes of the blocks; None for a dump without.
        layout: what bytes and hashes mean, `BlockLayout.describe(storage, block_size, hasher)`. By default it
            says nothing of the hasher: then a pool whose hashes are made otherwise loads it, and never hits.
        stream_state: what was told of the blocks; for events with tokens after loading, and for going on with
            their count. All that was published has gone through it: close the publisher before.
    Returns:
        What `read_header` says of the file.
    Raises:
        TierError: the disk is full, the folder not there. A file that was at `path` is as it was.
        InvalidArgumentError: a storage of fewer blocks than the pool has, or that is not of the layout.

    Nothing changes in the pool. Call it between two steps, from the thread that schedules; the device's work
    is waited for. What a block holds beyond its key is not dumped: references, tables, retention, partial
    content of blocks without a key. Tokens and prompts' bytes are in the file, which only its owner can read.
    A process that is killed meanwhile leaves a hidden file `.NAME.*.tmp` in the folder, which nobody reads.
    Memory: some 200 bytes for each cached block; the blocks' bytes pass through 32 MiB.
    """
    layout = _find_layout(pool, storage, layout)
    rows = collect_rows(pool)
    next_sequence: int | None = None
    chunks: Iterator[list[KVCacheEvent]] = iter(())
    if stream_state is not None:
        last_sequence, chunks = stream_state.iter_snapshot()
        next_sequence = last_sequence + 1
    header = PoolDumpHeader(
        layout,
        pool.hash_block_size,
        pool.num_hash_lookahead_tokens,
        pool.medium,
        pool.num_gpu_blocks,
        len(rows),
        pool.num_evictions,
        0 if storage is None else storage.block_bytes,
        next_sequence,
    )
    with replace_file(path) as file:
        writer = RecordWriter(file)
        writer.write(RecordKind.HEADER, msgspec.msgpack.encode(header))
        for record in encode_rows(rows):
            writer.write(RecordKind.ROWS, record)
        writer.write(RecordKind.COPIES, msgspec.msgpack.encode(list_copies(pool, rows)))
        for events in chunks:
            writer.write(RecordKind.EVENTS, encode_events(events))
        if storage is not None:
            for row in _read_blocks(storage, rows.ids):
                writer.write(RecordKind.DATA, row)
        writer.write(RecordKind.END, b"")
    return header


def read_header(path: str | os.PathLike[str]) -> PoolDumpHeader:
    """What a file says of the pool in it. The rest of the file is not looked at.

    Raises:
        PoolDumpError: no such file, no dumped pool, another version, or damaged so far.
    """
    with open_dump(path) as dump:
        return dump.header


def load_pool(
    path: str | os.PathLike[str],
    pool: BlockPoolCore,
    *,
    storage: BlockStorage | None = None,
    layout: BlockLayout | None = None,
) -> LoadedPool:
    """Let an empty pool, nothing cached or in use, have the cached blocks of a dumped one, all of them free.

    Prefixes are hit as before, and blocks evicted in the order in which they would have been. A larger pool
    has empty blocks in front of them. A smaller one has the blocks that were used last; like any pool, it
    may then have the end of a sequence without its beginning, which no one hits and which is evicted in turn.

    Args:
        storage: where the bytes go; of the dumped one's block format, in any layout and on any device. Only
            for a file with bytes, and None only for one without: then they are in place already, at
            `old_ids`, or there are none at all, as in a simulation.
        layout: as in `dump_pool`.
    Returns:
        What was loaded, and where.
    Raises:
        PoolDumpError: no such file, not a dumped pool, of another version, cut off or damaged anywhere; with
            bytes and no storage, or the other way round; a pool that is not empty, or caches nothing.
        LayoutMismatchError: bytes or hashes mean something else here.
        CopyFailedError: the storage did not take the bytes.
        In all cases the pool is as it was; blocks of the storage, all free and empty, may hold anything.

    With events on, the pool tells of a clear, before what else it has to tell, and of all blocks that it has
    now: with tokens, parents before children, where the state of the stream was dumped, by their hashes alone
    where not. Colder tiers are told as of blocks that arrive: put them below the pool before. An observer is
    told that the blocks were taken.
    Cost: reads the file once; some 300 bytes of memory for each cached block, more with tokens.
    """
    layout = _find_layout(pool, storage, layout)
    with open_dump(path) as dump:
        header = dump.header
        _check_fits(os.fspath(path), header, pool, storage, layout)
        dumped = dump.read_blocks()
        num_dropped = max(0, len(dumped.rows) - pool.get_num_free_blocks())
        new_ids = _choose_ids(dumped.rows.ids[num_dropped:], pool.num_gpu_blocks)
        if storage is not None:
            dump.read_bytes(storage, [*[None] * num_dropped, *new_ids])
        dump.check_end()
    _insert(pool, new_ids, dumped, num_dropped)
    pool.num_evictions += header.num_evictions
    if pool.enable_kv_cache_events:
        keys = [key for block_keys in dumped.rows.keys[num_dropped:] for key in block_keys]
        cleared, *stored = make_events(pool, keys, dumped.stores)
        pool.kv_event_queue.insert(0, cleared)  # what tiers told before is true yet
        pool.kv_event_queue.extend(stored)
    if pool.colder_tiers is not None:
        labels = split_events(pool, dumped.stores) if pool.enable_kv_cache_events else {}
        for block in (pool.blocks[block_id] for block_id in new_ids):
            told = labels.get(name_key(pool, block.block_hash))
            pool.colder_tiers.on_block_arrived(block, None, told)
    old_ids = np.array(dumped.rows.ids[num_dropped:], np.int64)
    return LoadedPool(header, old_ids, np.array(new_ids, np.int64), num_dropped)


def _find_layout(
    pool: BlockPoolCore, storage: BlockStorage | None, layout: BlockLayout | None
) -> BlockLayout | None:
    """What the caller says of bytes and hashes, or else what the storage does."""
    if storage is None:
        return layout
    if storage.num_blocks < pool.num_gpu_blocks:
        raise InvalidArgumentError(
            f"the storage has {storage.num_blocks} blocks, the pool {pool.num_gpu_blocks}"
        )
    if layout is None:
        return BlockLayout.describe(storage, pool.hash_block_size)
    if (layout.block_format, layout.block_bytes) != (storage.block_format, storage.block_bytes):
        raise InvalidArgumentError(
            f"blocks of the layout are {layout.block_bytes} bytes, {layout.block_format!r}, of the storage "
            f"{storage.block_bytes}, {storage.block_format!r}"
        )
    return layout


def _read_blocks(storage: BlockStorage, block_ids: list[int]) -> Iterator[memoryview]:
    """The bytes of these blocks, one after another; each is valid until the next is asked for."""
    step = max(1, min(len(block_ids), BATCH_BYTES // storage.block_bytes))
    host = make_host_buffer(storage.block_bytes, step, storage.block_format)
    whole = memoryview(host.segments.owners[0])
    storage.synchronize()
    for start in range(0, len(block_ids), step):
        some = block_ids[start : start + step]
        storage.copy_to(host, [(block_id, place) for place, block_id in enumerate(some)])
        for place in range(len(some)):
            first = place * storage.block_bytes
            yield whole[first : first + storage.block_bytes]


def _check_fits(
    name: str,
    header: PoolDumpHeader,
    pool: BlockPoolCore,
    storage: BlockStorage | None,
    layout: BlockLayout | None,
) -> None:
    """Raise LayoutMismatchError or PoolDumpError unless the pool can take what is in the file."""
    num_in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if num_in_use or len(pool.cached_block_hash_to_block) or not pool.enable_caching:
        raise PoolDumpError(
            f"{name} was not loaded: the pool has {num_in_use} blocks in use and "
            f"{len(pool.cached_block_hash_to_block)} keys, and enable_caching is {pool.enable_caching}. "
            "Load into a new pool with caching, before its first request"
        )
    for what in ("hash_block_size", "num_hash_lookahead_tokens", "medium"):
        here, there = getattr(pool, what), getattr(header, what)
        if here != there:
            raise LayoutMismatchError(
                f"{name} can not be used here: {what} is {here!r} here and {there!r} there"
            )
    if layout is not None and header.layout is not None:
        layout.check_same(header.layout, name)
    elif layout is not header.layout:
        raise LayoutMismatchError(
            f"{name} can not be used here: what bytes and hashes mean was said "
            f"{'when it was dumped, and is not now' if layout is None else 'now, and not when it was dumped'}"
        )
    if (storage is None) == (header.block_bytes > 0):
        raise PoolDumpError(
            f"{name} was not loaded: it has the bytes of its blocks, and there is no storage for them"
            if storage is None
            else f"{name} was not loaded: it has no bytes, and blocks that hold none would be hit"
        )


def _choose_ids(old_ids: list[int], num_blocks: int) -> list[int]:
    """An id for each block: its old one where the pool has that; the others get what is left, heads first."""
    taken = set(old_ids)
    others = iter([block_id for block_id in range(1, num_blocks) if block_id not in taken])
    new_ids = [block_id if block_id < num_blocks else next(others) for block_id in reversed(old_ids)]
    return new_ids[::-1]


def _insert(pool: BlockPoolCore, new_ids: list[int], dumped: DumpedBlocks, num_dropped: int) -> None:
    """Let these free, empty blocks carry the keys of the rows from `num_dropped` on, in their order."""
    blocks = [pool.blocks[block_id] for block_id in new_ids]
    pool.take_blocks(blocks)
    prefix_map = pool.cached_block_hash_to_block
    shared = {copies.key for copies in dumped.copies}
    for row, block in enumerate(blocks, start=num_dropped):
        num_tokens, keys = dumped.rows.num_tokens[row], dumped.rows.keys[row]
        block.set_block_hash(keys[0], None if num_tokens == UNKNOWN else num_tokens)
        if len(keys) > 1:
            pool.cached_block_hashes_by_block[block.block_id] = dict.fromkeys(keys[1:])
        for key in keys:
            if key not in shared:
                prefix_map.insert(key, block)
    for copies in dumped.copies:
        for row in copies.rows:
            if row >= num_dropped:
                prefix_map.insert(copies.key, blocks[row - num_dropped])
    pool.free_blocks(blocks)
