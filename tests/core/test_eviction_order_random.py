"""Random calls on pools with bands against a slow model: a list of blocks for each band."""

import random

import pytest
from core.banded_pool import ByHash, check, list_bands, list_once
from drawing import GROUP, hash_of, ids

from kv_pool import BlockPool, InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.eviction_order import EMPTY_BAND, EXPIRED_BAND

BANDS = [EXPIRED_BAND, -100, -7, -1, 0, 1, 2, 50, 100]
NUM_STEPS = 250


class WatcherError(Exception):
    """The error of a reuse watcher."""


class Life:
    """A pool, and the expected content of its bands."""

    def __init__(self, seed, pool_type):
        self.rng = rng = random.Random(seed)
        options = {"early_share": rng.choice([0.0, 0.0, 0.3])} if pool_type is RunBlockPool else {}
        self.is_in_order = not options.get("early_share")
        self.pool = pool_type(rng.randrange(2, 24), rng.random() < 0.9, 4, **options)
        self.policy = ByHash(self.pool)
        self.bands = {EMPTY_BAND: list(self.pool.blocks[1:]), 0: []}
        self.tables = []
        self.holds = []
        self.watched = {}  # block -> whether its watcher raises
        self.num_cached = 0
        for _ in range(rng.randrange(30)):  # before the bands are opened
            rng.choice([self.take, self.free])()
        self.is_open = True
        cached = [block for block in self.list_free() if block.block_hash is not None]
        if cached:
            self.bands[EMPTY_BAND], self.bands[0] = split(self.list_free(), cached[0])
        self.pool.open_bands(self.policy)

    is_open = False

    def step(self):
        name = self.rng.choices(list(STEPS), list(STEPS.values()))[0]
        getattr(self, name)()
        check(self.pool)
        assert list_bands(self.pool) == {
            band: ids(self.bands[band]) for band in sorted(self.bands) if self.bands[band]
        }
        for band, listed in self.pool.eviction_order.list_bands():
            assert listed == self.bands.get(band, [])
        assert self.pool.get_num_free_blocks() == len(self.list_free())
        assert (
            not any(self.bands[band] for band in self.bands if band > 0)
            or self.pool.eviction_order.has_retained
        )

    # ---- the model -----------------------------------------------------------------------------------

    def list_free(self):
        return [block for band in sorted(self.bands) for block in self.bands[band]]

    def remove(self, blocks):
        for block in blocks:
            for listed in self.bands.values():
                if block in listed:
                    listed.remove(block)

    def add(self, blocks, is_unpinned=False):
        """Put blocks that lost a reference into their bands, in order, if they are free now."""
        front, back = [], []
        left = {}
        for block in blocks:
            left[block] = left.get(block, block.ref_cnt) - 1
            if left[block] == 0:
                has_content = block.block_hash is not None and self.pool.enable_caching
                (back if has_content or is_unpinned else front).append(block)
        self.bands[EMPTY_BAND] = front + self.bands[EMPTY_BAND]
        self.bands[0] += back
        if self.is_open:
            for block in list_once(blocks):
                if left[block] == 0 and self.policy.find_band(block):
                    self.move([block], self.policy.find_band(block))

    def move(self, blocks, band):
        for block in blocks:
            self.remove([block])
            self.bands.setdefault(band, []).append(block)

    # ---- steps ---------------------------------------------------------------------------------------

    def take(self):
        count = self.rng.randrange(8)
        if count > len(self.list_free()):
            with pytest.raises(OutOfBlocksError):
                self.pool.get_new_blocks(count)
            return
        expected = self.list_free()[:count]
        above = [block for band, listed in self.bands.items() if band > 0 for block in listed]
        kept = {block for block in above if block.block_hash is not None}
        try:
            taken = self.pool.get_new_blocks(count)
        except WatcherError:
            self.note_refusal()
            return
        if self.is_in_order or count == 1:
            assert taken == expected
        else:  # retained blocks are taken only if no others are left
            assert len(kept.intersection(taken)) <= len(kept.intersection(expected))
        self.remove(taken)
        self.note_taken(taken)

    def note_taken(self, taken):
        for block in taken:
            self.watched.pop(block, None)
        if taken:
            self.tables.append(list(taken))
            if self.pool.enable_caching:
                for block in taken:
                    if self.rng.random() < 0.7:
                        self.num_cached += 1
                        key = hash_of(self.num_cached) + GROUP
                        self.pool._insert_block_hash(key, block, 4)
                        self.policy.bands[key] = self.rng.choice(BANDS)

    def note_refusal(self):
        """Handle a watcher that raised: the blocks to be taken are now at the front of the queue."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert sorted(ids(free)) == sorted(ids(self.list_free()))
        self.watched = {block: raises for block, raises in self.watched.items() if self.is_watched(block)}
        order = list_bands(self.pool)
        self.bands = {
            band: [self.pool.blocks[block_id] for block_id in listed] for band, listed in order.items()
        }
        self.bands.setdefault(0, [])
        self.bands.setdefault(EMPTY_BAND, [])

    def is_watched(self, block):
        return block.block_id in self.pool.reuse_watchers

    def take_listed(self):
        free = self.list_free()
        listed = self.rng.sample(free, self.rng.randrange(min(4, len(free)) + 1))
        try:
            self.pool.take_blocks(listed)
        except WatcherError:
            self.note_refusal()
            return
        self.remove(listed)
        self.note_taken(listed)

    def free(self):
        if self.tables:
            table = self.tables.pop(self.rng.randrange(len(self.tables)))
            self.rng.shuffle(table)
            self.add(table)
            self.pool.free_blocks(table)

    def share(self):
        """Touch blocks in use and free ones, which leave their bands."""
        some = [block for block in self.pool.blocks[1:] if block.ref_cnt or block.block_hash is not None]
        if some:
            touched = self.rng.choices(some, k=self.rng.randrange(1, 4))
            self.pool.touch(touched)
            self.remove(touched)
            self.tables.append(touched)

    def hold(self):
        some = [block for block in self.pool.blocks[1:] if block.ref_cnt or block.block_hash is not None]
        held = self.rng.sample(some, min(len(some), 3))
        self.holds.append(self.pool.hold(held, "held by a test"))
        self.remove(held)

    def release(self):
        if self.holds:
            hold = self.holds.pop(self.rng.randrange(len(self.holds)))
            self.add(hold.blocks[::-1])
            hold.release()

    def watch(self):
        if self.tables:
            table = self.tables.pop(self.rng.randrange(len(self.tables)))
            raises = self.rng.random() < 0.2
            self.add(table, True)
            self.watched |= dict.fromkeys(table, raises)
            self.pool.unpin_blocks(table, self.on_reuse)

    def on_reuse(self, block):
        if self.watched[block]:
            raise WatcherError

    def evict(self):
        self.pool.evict_blocks([self.rng.randrange(self.pool.num_gpu_blocks) for _ in range(2)])

    def move_blocks(self):
        free, band = self.list_free(), self.rng.choice([*BANDS, EMPTY_BAND])
        moved = self.rng.sample(free, self.rng.randrange(min(4, len(free)) + 1))
        self.pool.move_to_band(moved, band)
        self.move(moved, band)

    def move_wrongly(self):
        free = self.list_free()[:2]
        with pytest.raises(InvalidBlockError):
            self.pool.move_to_band([*free, self.pool.null_block], 5)
        if self.tables:
            with pytest.raises(InvalidBlockError):
                self.pool.move_to_band([*free, self.tables[0][0]], 5)
        with pytest.raises(InvalidArgumentError):
            self.pool.move_to_band(free, 101)

    def merge(self):
        self.pool.merge_bands()
        merged = [block for band in sorted(self.bands) if band != EMPTY_BAND for block in self.bands[band]]
        self.bands = {EMPTY_BAND: self.bands[EMPTY_BAND], 0: merged}

    def reset(self):
        while self.tables:
            self.free()
        while self.holds:
            self.release()
        free = self.list_free()
        try:
            assert self.pool.reset_prefix_cache()
        except WatcherError:
            self.watched = {block: raises for block, raises in self.watched.items() if self.is_watched(block)}
            return
        self.watched.clear()
        self.bands = {EMPTY_BAND: free, 0: []}

    def swap(self):
        if self.pool.num_gpu_blocks > 2:
            first, second = self.rng.sample(range(1, self.pool.num_gpu_blocks), 2)
            if {first, second}.isdisjoint(self.pool.holds.list_immovable_ids()):
                self.pool.swap_block_ids([(first, second)])

    def resize(self):
        count = self.rng.randrange(4)
        num_before = self.pool.num_gpu_blocks
        if self.rng.random() < 0.5:
            self.pool.add_blocks(count)
            self.bands[EMPTY_BAND][:0] = self.pool.blocks[num_before:]
        elif count < num_before - 1:
            removed = list(self.pool.blocks[num_before - count :])
            try:
                self.pool.remove_last_blocks(count)
            except InvalidBlockError:
                assert any(block.ref_cnt for block in removed)
            except WatcherError:
                self.note_refusal()
            else:
                self.remove(removed)
                assert count == 0 or self.policy.removed[-count:] == removed
                for block in removed:
                    self.watched.pop(block, None)

    def rebuild(self):
        if isinstance(self.pool, RunBlockPool):
            self.pool.rebuild_index()


STEPS = {
    "take": 8,
    "take_listed": 2,
    "free": 8,
    "share": 3,
    "hold": 2,
    "release": 2,
    "watch": 1,
    "evict": 2,
    "move_blocks": 5,
    "move_wrongly": 1,
    "merge": 0.5,
    "reset": 0.3,
    "swap": 2,
    "resize": 1,
    "rebuild": 1,
}


def split(blocks, first):
    position = blocks.index(first)
    return blocks[:position], blocks[position:]


@pytest.mark.parametrize("pool_type", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_agree_with_a_slow_model_of_bands(seed, pool_type):
    life = Life(seed, pool_type)
    for _ in range(NUM_STEPS):
        life.step()
