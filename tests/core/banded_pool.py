"""A pool whose free queue has bands, and a band policy by the hashes of blocks."""

from drawing import ids, make_pool

from kv_pool import BlockPool
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.eviction_order import EMPTY_BAND, BandPolicy

PICTURE = "free: 9 1* 2* 3* 4* 5* | in use: 6* 7* 8"


class ByHash(BandPolicy):
    """A band policy that assigns bands by block hash."""

    def __init__(self, pool):
        self.pool = pool
        self.bands = {}
        self.placed = []
        self.removed = []
        self.num_resets = 0

    def place(self, freed):
        self.placed.append(ids(freed))
        for block in list_once(freed):
            if block.next_free_block is not None and self.find_band(block):
                self.pool.place_in_band([block], self.find_band(block))

    def find_band(self, block):
        return self.bands.get(block.block_hash, 0)

    def note_reset(self):
        self.num_resets += 1

    def note_removed(self, blocks):
        self.removed += blocks


def list_once(blocks):
    return list(dict.fromkeys(blocks))


def check(pool):
    (run_invariants if isinstance(pool, RunBlockPool) else invariants).check(pool)


def list_bands(pool):
    """Return the ids of the free blocks of each band that has any."""
    listed = {band: ids(found) for band, found in pool.eviction_order.list_bands() if found}
    others = {block_id for found in listed.values() for block_id in found}
    free = ids(pool.free_block_queue.get_all_free_blocks())
    empty = [block_id for block_id in free if block_id not in others]
    assert free[: len(empty)] == empty
    return ({EMPTY_BAND: empty} if empty else {}) | listed


def make_banded(picture=PICTURE, pool_type=BlockPool, **options):
    """Return a pool as `make_pool` does, with a `ByHash` as `pool.policy`."""
    pool = make_pool(picture, pool_type, **options)
    if pool_type is RunBlockPool:
        pool.rebuild_index()
    pool.policy = ByHash(pool)
    pool.open_bands(pool.policy)
    return pool
