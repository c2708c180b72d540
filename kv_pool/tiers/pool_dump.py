"""`dump_pool`, `load_pool`: save a pool's cached blocks to a file, and restore them after a restart."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kv_pool.core.block_hash import find_random_root
from kv_pool.core.block_keys import get_block_hash
from kv_pool.core.freeing import free_listed
from kv_pool.core.kv_events import BlockStored, KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.taking import take_listed
from kv_pool.errors import InvalidArgumentError, LayoutMismatchError, PoolDumpError
from kv_pool.events.stream_state import StreamState, slice_positions
from kv_pool.ids import BlockHashWithGroupId, BlockId, GroupId
from kv_pool.storage.block_layout import BlockLayout, check_alike, describe_root
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.dump_file import (
    BATCH_BYTES,
    UNKNOWN,
    CachedRows,
    PoolDumpHeader,
    RecordKind,
    collect_rows,
    encode_rows,
    open_dump,
    replace_file,
    write_records,
)
from kv_pool.tiers.host_tier import RowBuffer
from kv_pool.tiers.tier_events import EventKey, name_key


@dataclass(frozen=True, eq=False)
class LoadedPool:
    """The result of `load_pool`.

    Attributes:
        header: the dump's header.
        old_ids, new_ids: (n,), int64, the ids of the loaded blocks in the dumped pool and in this one, the
            next to be evicted first. A block keeps its id if this pool has it.
        num_dropped: cached blocks that did not fit into this pool, the least recently used ones.
    """

    header: PoolDumpHeader
    old_ids: npt.NDArray[np.int64]
    new_ids: npt.NDArray[np.int64]
    num_dropped: int

    @property
    def num_blocks(self) -> int:
        """Number of loaded blocks."""
        return len(self.new_ids)

    @property
    def next_sequence(self) -> int | None:
        """Value for `PublisherConfig.first_sequence`, so that a publisher continues the numbering."""
        return self.header.next_sequence


def dump_pool(
    path: str | os.PathLike[str],
    pool: BlockPoolCore,
    *,
    storage: BlockStorage | None = None,
    layout: BlockLayout | None = None,
    stream_state: StreamState | None = None,
) -> PoolDumpHeader:
    """Write a pool's cached blocks to a file: keys, eviction order and, with a storage, bytes.

        |<--------- free, the next to be evicted first --------->|<-- in use: tails, then heads -->|

    Args:
        path: the file to write. It is replaced atomically once all data is on the disk.
        storage: the storage with the blocks' bytes; None dumps the keys only.
        layout: the meaning of bytes and hashes, from `BlockLayout.describe(storage, block_size, hasher)`. The
            default does not describe the hasher; a pool that hashes differently then loads the dump, but
            never hits its blocks. Loading warns if the reason is the random seed of this process.
        stream_state: the state of the published events. With it, loading emits events with tokens and
            continues the numbering of batches. Close the publisher first, so that the state is complete.
    Returns:
        The header, as `read_header` returns it.
    Raises:
        TierError: the disk is full, or the folder is missing. An existing file at `path` is unchanged.
        InvalidArgumentError: the storage has fewer blocks than the pool, or does not match the layout.

    Does not change the pool. Call it between two steps, from the scheduler's thread; it waits for the device.
    References, block tables, retention, and blocks without a key are not dumped. The file contains tokens and
    KV data of prompts; only its owner can read it. A process killed during the dump leaves a hidden file
    `.NAME.*.tmp` in the folder, which can be deleted.
    Memory: about 200 bytes for each cached block, and a 32 MiB buffer for the bytes.
    """
    layout = _find_layout(pool, storage, layout)
    pool.holds.check_whole()
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
        _find_random_seed(layout, rows),
    )
    with replace_file(path) as file:
        write_records(file, _list_records(header, rows, chunks, storage))
    return header


def read_header(path: str | os.PathLike[str]) -> PoolDumpHeader:
    """Return the header of a dump. Does not read the rest of the file.

    Raises:
        PoolDumpError: the file is missing, is not a pool dump, has another version, or its header is damaged.
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
    """Load the cached blocks of a dump into an empty pool, as free cached blocks.

    The loaded blocks are hit as before and keep their eviction order. In a larger pool the additional, empty
    blocks are reused first. A smaller pool gets the most recently used blocks; it may then have the end of a
    sequence without its beginning. Such blocks are never hit, and are evicted in turn.

    Args:
        pool: no block is cached or in use.
        storage: the target of the bytes; same block format as the dumped storage, any layout and device.
            Required for a dump with bytes. Must be None for one without: then the bytes are already in place,
            at `old_ids`, or there are none, as in a simulation.
        layout: as in `dump_pool`.
    Returns:
        The loaded blocks and their ids.
    Raises:
        PoolDumpError: the file is missing, is not a pool dump, has another version, or is truncated or
            damaged; it has bytes and there is no storage, or the reverse; the pool is not empty, or its
            caching is off.
        LayoutMismatchError: bytes or hashes have another meaning here.
        CopyFailedError: copying into the storage failed.
        In all cases the pool is unchanged; the storage's blocks, all free and empty, may hold any bytes.
    Warns:
        RuntimeWarning: the hashes may have been made with a seed that was random in the process of the dump;
            then no block is ever hit. A layout with the hasher turns this into an error, or shows that it is
            not so.

    With events on, the pool queues a clear, in front of all other queued events, and a store for each loaded
    block: with tokens, parents before children, if the dump has the state of the event stream; otherwise with
    the hash only. Lower tiers are notified of each block as of one that arrives, so attach them before
    loading. An observer is notified that the blocks were allocated.
    Cost: reads the file once; about 300 bytes of memory for each cached block, more with tokens.
    """
    layout = _find_layout(pool, storage, layout)
    pool.holds.check_whole()
    with open_dump(path) as dump:
        header = dump.header
        _check_fits(os.fspath(path), header, pool, storage, layout)
        if header.random_seed and header.random_seed != describe_root(find_random_root()):
            warnings.warn(
                f"{os.fspath(path)}: its hashes may have been made by a BlockHasher without a seed, which is "
                "random in each process; then no loaded block is ever hit. Give the hasher a seed, and pass "
                "layout=BlockLayout.describe(storage, block_size, hasher) to dump and load",
                RuntimeWarning,
                stacklevel=2,
            )
        rows, stores = dump.read_blocks()
        num_dropped = max(0, len(rows) - pool.get_num_free_blocks())
        new_ids = _choose_ids(rows.ids[num_dropped:], pool.num_gpu_blocks)
        if storage is not None:
            dump.read_bytes(storage, [*[None] * num_dropped, *new_ids])
        dump.check_end()
    pool.is_changing = True
    _insert(pool, new_ids, rows, num_dropped)
    pool.num_evictions += header.num_evictions
    if pool.enable_kv_cache_events:
        keys = [key for block_keys in rows.keys[num_dropped:] for key in block_keys]
        cleared, *stored = make_events(pool, keys, stores)
        pool.kv_event_queue.insert(0, cleared)  # events queued before, from tiers, are still true
        pool.kv_event_queue.extend(stored)
    pool.is_changing = False
    if pool.lower_tiers is not None:
        labels = split_events(pool, stores) if pool.enable_kv_cache_events else {}
        for block in (pool.blocks[block_id] for block_id in new_ids):
            event = labels.get(name_key(pool, block.block_hash))
            pool.lower_tiers.on_block_arrived(block, None, event)
    old_ids = np.array(rows.ids[num_dropped:], np.int64)
    return LoadedPool(header, old_ids, np.array(new_ids, np.int64), num_dropped)


def _find_layout(
    pool: BlockPoolCore, storage: BlockStorage | None, layout: BlockLayout | None
) -> BlockLayout | None:
    """Return the caller's layout, or describe the storage's. Raises InvalidArgumentError if they differ."""
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
            f"the layout has blocks of {layout.block_bytes} bytes, {layout.block_format!r}; the storage has "
            f"{storage.block_bytes}, {storage.block_format!r}"
        )
    return layout


def _find_random_seed(layout: BlockLayout | None, rows: CachedRows) -> str:
    """Return the name of this process's random seed if the keys may depend on it; "" otherwise."""
    is_described = layout is not None and layout.hash_algorithm != ""
    root = find_random_root()
    if root is None or is_described:
        return ""
    sizes = {len(get_block_hash(key)) for keys in rows.keys for key in keys[:1]}
    return describe_root(root) if len(root) in sizes else ""


def _list_records(
    header: PoolDumpHeader,
    rows: CachedRows,
    chunks: Iterable[list[KVCacheEvent]],
    storage: BlockStorage | None,
) -> Iterator[tuple[RecordKind, bytes | memoryview]]:
    """Yield the records of a dump. The payload of a DATA record is valid until the next one is requested."""
    yield RecordKind.HEADER, msgspec.msgpack.encode(header)
    for record in encode_rows(rows):
        yield RecordKind.ROWS, record
    yield RecordKind.COPIES, msgspec.msgpack.encode(rows.copies)
    for events in chunks:
        yield RecordKind.EVENTS, msgspec.msgpack.encode(events)
    if storage is not None:
        buffer = RowBuffer(storage.block_bytes, storage.block_format, BATCH_BYTES)
        storage.synchronize()
        for start in range(0, len(rows), buffer.num_blocks):
            for row in buffer.gather(storage, rows.ids[start : start + buffer.num_blocks]):
                yield RecordKind.DATA, row.data
    yield RecordKind.END, b""


def _check_fits(
    name: str,
    header: PoolDumpHeader,
    pool: BlockPoolCore,
    storage: BlockStorage | None,
    layout: BlockLayout | None,
) -> None:
    """Raise LayoutMismatchError or PoolDumpError unless the dump can be loaded into the pool."""
    num_in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if num_in_use or len(pool.cached_block_hash_to_block) or not pool.enable_caching:
        raise PoolDumpError(
            f"{name} was not loaded: the pool has {num_in_use} blocks in use and "
            f"{len(pool.cached_block_hash_to_block)} keys, and enable_caching is {pool.enable_caching}. "
            "Load into a new pool with caching enabled, before its first request"
        )
    check_alike(name, ("hash_block_size", "num_hash_lookahead_tokens", "medium"), pool, header)
    if layout is not None and header.layout is not None:
        layout.check_same(header.layout, name)
    elif layout is not header.layout:
        raise LayoutMismatchError(
            f"{name} cannot be used here: a layout was given "
            f"{'when it was dumped, but not now' if layout is None else 'now, but not when it was dumped'}"
        )
    if (storage is None) == (header.block_bytes > 0):
        raise PoolDumpError(
            f"{name} was not loaded: it has the bytes of its blocks, but no storage was given"
            if storage is None
            else f"{name} was not loaded: it has no bytes, but a storage was given; empty blocks would be hit"
        )


def _choose_ids(old_ids: list[BlockId], num_blocks: int) -> list[BlockId]:
    """Return an id for each block: the old one if the pool has it, else an unused one, heads first."""
    taken = set(old_ids)
    others = iter([BlockId(block_id) for block_id in range(1, num_blocks) if block_id not in taken])
    new_ids = [block_id if block_id < num_blocks else next(others) for block_id in reversed(old_ids)]
    return new_ids[::-1]


def _insert(pool: BlockPoolCore, new_ids: list[BlockId], rows: CachedRows, num_dropped: int) -> None:
    """Assign the keys of the rows from `num_dropped` on to these free, empty blocks, in order."""
    blocks = [pool.blocks[block_id] for block_id in new_ids]
    take_listed(pool, blocks)
    prefix_map = pool.cached_block_hash_to_block
    shared = {key for key, _ in rows.copies}
    for row, block in enumerate(blocks, start=num_dropped):
        num_tokens, keys = rows.num_tokens[row], rows.keys[row]
        block.set_block_hash(keys[0], None if num_tokens == UNKNOWN else num_tokens)
        block.parent = rows.parents[row]
        if len(keys) > 1:
            pool.cached_block_hashes_by_block[block.block_id] = dict.fromkeys(keys[1:])
        for key in keys:
            if key not in shared:
                prefix_map.insert(key, block)
    for key, places in rows.copies:
        for row in places:
            if row >= num_dropped:
                prefix_map.insert(key, blocks[row - num_dropped])
    free_listed(pool, blocks)


def make_events(
    pool: BlockPoolCore, keys: Iterable[BlockHashWithGroupId], snapshot: Sequence[BlockStored]
) -> list[KVCacheEvent]:
    """Return one clear, followed by one store for each occurrence of a key in `keys`.

    Args:
        pool: determines the form of the hashes, the medium and the event classes.
        keys: the keys of the pool's cached blocks.
        snapshot: earlier stores of these blocks, parents before children. Entries for other keys, or for
            blocks outside this pool's memory, are ignored.

    A key that the snapshot lacks is stored by its hash only, without tokens, parent and adapter.
    """
    counts: dict[EventKey, int] = {}
    for key in keys:
        event_key = name_key(pool, key)
        counts[event_key] = counts.get(event_key, 0) + 1
    stores: list[BlockStored] = []
    again: list[BlockStored] = []
    for event in snapshot:
        if not _is_of(pool, event):
            continue
        group_id = GroupId(event.group_idx or 0)
        positions = []
        for position, block_hash in enumerate(event.block_hashes):
            count = counts.pop((block_hash, group_id), 0)
            if count:
                positions.append(position)
            for _ in range(count - 1):
                again += slice_positions(event, [position])
        if positions:
            stores += slice_positions(event, positions)
    for (block_hash, group_id), count in counts.items():
        bare = BlockStored(
            [block_hash], None, [], pool.hash_block_size, None, pool.medium, None, group_idx=group_id
        )
        again += [bare] * count
    stores += again
    if pool.stored_type is not BlockStored:  # the engine's class; it may lack some of the fields
        names = [name for name in BlockStored.__struct_fields__ if name in pool.stored_type.__struct_fields__]
        stores = [pool.stored_type(**{name: getattr(one, name) for name in names}) for one in stores]
    return [pool.cleared_type(), *stores]


def split_events(pool: BlockPoolCore, snapshot: Sequence[BlockStored]) -> dict[EventKey, BlockStored]:
    """Return, for each block of the pool in the snapshot, an event about this block only."""
    return {
        (event.block_hashes[position], GroupId(event.group_idx or 0)): part
        for event in snapshot
        if _is_of(pool, event)
        for position in range(len(event.block_hashes))
        for part in slice_positions(event, [position])
    }


def _is_of(pool: BlockPoolCore, event: BlockStored) -> bool:
    """Return True if the event is about blocks in the pool's own memory."""
    return (event.medium, event.locality, event.ownership) == (pool.medium, None, None)
