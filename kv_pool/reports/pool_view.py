"""`PoolView`: what a person watches of a running pool: its reading, a coarse map, its largest sequences.

Reading a view holds the pool's lock for less than a millisecond at a time, at any size of the pool: the
map looks at some blocks of each cell, and a visit of all sequences releases the lock in between. The parts of
a view, and the cells of its map, may therefore be of moments some milliseconds apart.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from heapq import nlargest
from itertools import islice
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_external_block_hashes
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.controlled_pool import ControlledPool, Rows, list_immovable
from kv_pool.reports.layout import BlockState, read_states_of
from kv_pool.reports.pool_reading import PoolReading, PoolSources, read_pool
from kv_pool.reports.sequences import SequenceReport
from kv_pool.threads import REST_S

_SAMPLES_PER_CELL = 64
_SAMPLES_AT_ONCE = 2048
_SEARCHED_BLOCKS = 4096


class MapCell(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of a pool: of those that were looked at, the number in each state.

    Attributes:
        in_use: in use, and movable.
        immovable: in use, and held in place.
    """

    empty: int
    cached: int
    in_use: int
    immovable: int


class PoolMap(msgspec.Struct, frozen=True):
    """A coarse map of a pool, by block id.

    Attributes:
        num_blocks: number of blocks, without the null block.
        blocks_per_cell: number of blocks of a cell; the last one may have fewer. Of 128 or more, some 40 to
            90 evenly spaced ones are looked at.
        cells: those of ids that the pool has lost while it was read are missing.
    """

    num_blocks: int
    blocks_per_cell: int
    cells: list[MapCell]


class HotPrefix(msgspec.Struct, frozen=True):
    """A cached prefix that several sequences use now.

    Attributes:
        prefix_hash: hash of its last block, in hexadecimal digits as `kv-pool events` prints it.
        num_sequences: number of block tables that begin with it; a request has one for each KV cache group.
    """

    prefix_hash: str
    num_tokens: int
    num_sequences: int


class RunningMigration(msgspec.Struct, frozen=True):
    """A migration that has not ended, with fields of `MigrationStatus`."""

    subject: str
    direction: str
    peer: str
    phase: str
    num_done_blocks: int
    num_blocks: int
    bytes_per_s: float
    elapsed_s: float
    migration_id: str


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A running pool as a person watches it.

    Attributes:
        sequences: the sequences, or requests, with the most blocks, largest first; None if unknown.
        prefixes: the hottest prefixes, see `read_view`; None if the sequences are unknown.
        migrations: those that have not ended; None if the pool is not a node.
    """

    reading: PoolReading
    map: PoolMap
    sequences: list[SequenceReport] | None
    prefixes: list[HotPrefix] | None
    migrations: list[RunningMigration] | None


def read_view(
    sources: PoolSources, num_cells: int = 256, num_sequences: int = 20, num_prefixes: int = 10
) -> PoolView:
    """Return a view of a pool. Call it without the pool's lock.

    The hottest prefixes are those that the most block tables share now, as the reference counts of their
    blocks tell; longer ones first among equals. The first 4,096 blocks of a table are searched, and none of a
    table that begins with null blocks. A cached prefix that one sequence or none uses is not found: to know
    how often it is hit, each hit would have to be counted.

    Args:
        num_cells, num_sequences, num_prefixes: maximum length of the lists.

    Cost: O(cells + sequences + shared blocks + held blocks): 10 ms for 2,000 sequences in a million blocks.
    """
    pool, node, blocks, lock = sources.pool, sources.node, sources.block_pool, sources.held_lock
    reading = read_pool(sources)
    immovable = list_immovable(blocks.holds, lock)
    sequences = prefixes = migrations = None
    if isinstance(pool, ControlledPool) and reading.num_sequences is not None:
        sequences, prefixes = _read_sequences(pool, immovable, num_sequences, num_prefixes)
    if node is not None:
        running = [one for one in node.list_migrations() if not one.phase.is_ended]
        migrations = msgspec.convert(msgspec.to_builtins(running), list[RunningMigration])
    return PoolView(
        reading=reading,
        map=_read_map(blocks, lock, immovable, num_cells),
        sequences=sequences,
        prefixes=prefixes,
        migrations=migrations,
    )


def _read_map(
    pool: BlockPoolCore,
    lock: AbstractContextManager[object],
    immovable: Collection[KVCacheBlock],
    num_cells: int,
) -> PoolMap:
    """Return a map of at most `num_cells` cells. O(cells + immovable blocks)."""
    num_blocks = pool.num_gpu_blocks - 1
    per_cell = max(1, -(-num_blocks // num_cells))
    # Sequences are placed in aligned runs of a power of two: an odd step meets all places of such runs.
    step = per_cell // _SAMPLES_PER_CELL | 1
    states = bytearray()
    for first in range(1, num_blocks + 1, _SAMPLES_AT_ONCE * step):
        with lock:
            states += read_states_of(pool, slice(first, first + _SAMPLES_AT_ONCE * step, step))
        time.sleep(REST_S)
    for block in immovable:
        position, rest = divmod(block.block_id - 1, step)
        if not rest and position < len(states):
            is_used = states[position] == BlockState.IN_USE
            states[position] = BlockState.IMMOVABLE if is_used else BlockState.CACHED  # free, but watched
    cells = []
    for first in range(0, num_blocks, per_cell):
        if cell := states[-(-first // step) : -(-(first + per_cell) // step)]:
            cells.append(MapCell(*map(cell.count, list(BlockState)[1:])))
    return PoolMap(num_blocks, per_cell, cells)


def _read_sequences(
    pool: ControlledPool[Any], immovable: set[KVCacheBlock], num_sequences: int, num_prefixes: int
) -> tuple[list[SequenceReport], list[HotPrefix]]:
    """Return the largest sequences and the hottest prefixes."""
    users: Counter[tuple[int, bytes]] = Counter()  # by number of blocks, and key of the last one

    def look(sequence_id: Any, rows: Rows) -> tuple[int, Any]:
        for row in rows:
            for num_blocks, block in _find_prefixes(row):
                users[num_blocks, block.key] += 1
        return sum(map(len, rows)), sequence_id

    sizes = pool.read_sequences(look)
    largest = [one for _, one in nlargest(num_sequences, sizes, key=lambda one: one[0])]
    # A long sequence is copied with the lock held, and counted without it.
    tables = pool.read_sequences(lambda one, rows: (one, [list(row) for row in rows]), largest)
    counts = {one: pool.count_held(rows, immovable) for one, rows in tables}
    hottest = nlargest(num_prefixes, ((count, *one) for one, count in users.items() if count > 1))
    return pool.read_sequences(lambda one, _: pool.report_sequence(one, *counts[one]), counts), [
        HotPrefix(f"{make_external_block_hashes([key], 4)[0]:016x}", num_blocks * pool.block_size, count)
        for count, num_blocks, key in hottest
    ]


def _find_prefixes(row: Collection[KVCacheBlock]) -> Iterator[tuple[int, KVCacheBlock]]:
    """Yield the number of blocks, and the last block, of each prefix that a table shares with others."""
    size, blocks = 1, [*islice(row, 1)]
    while len(blocks) == size < _SEARCHED_BLOCKS and blocks[-1].ref_cnt > 1:
        size *= 16
        blocks = [*islice(row, size)]
    end = 0
    while end < len(blocks) and blocks[end].ref_cnt > 1:
        count = blocks[end].ref_cnt
        # A table that shares a block shares those before it, so the counts only fall.
        end = bisect_left(blocks, 1 - count, end, key=lambda block: -block.ref_cnt)
        if blocks[end - 1].key is not None:
            yield end, blocks[end - 1]
