"""Random calls on pools against a slow model: a list of blocks for each band, and one for each hold."""

import random
from collections import Counter

import pytest
from core.banded_pool import ByHash, check, list_bands, list_once
from drawing import GROUP, hash_of, ids, state

from kv_pool import BlockPool, InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.deadlines import NEVER
from kv_pool.core.eviction_order import EMPTY_BAND, EXPIRED_BAND
from kv_pool.core.holds import HoldState

BANDS = [EXPIRED_BAND, -100, -7, -1, 0, 1, 2, 50, 100]
NUM_STEPS = 250


class WatcherError(Exception):
    """The error of a reuse watcher."""


class Life:
    """A pool, and the expected content of its bands and holds."""

    def __init__(self, seed, pool_type):
        self.rng = rng = random.Random(seed)
        options = {"early_share": rng.choice([0.0, 0.0, 0.3])} if pool_type is RunBlockPool else {}
        self.is_in_order = not options.get("early_share")
        self.now = 10.0
        self.pool = pool_type(rng.randrange(2, 24), rng.random() < 0.9, 4, clock=lambda: self.now, **options)
        self.policy = ByHash(self.pool)
        self.bands = {EMPTY_BAND: list(self.pool.blocks[1:]), 0: []}
        self.tables = []  # lists of references that no hold has
        self.held = {}  # hold -> its blocks, in order
        self.until = {}  # hold -> its deadline
        self.quarantined = set()
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
        self.check_holds()
        assert list_bands(self.pool) == {
            band: ids(self.bands[band]) for band in sorted(self.bands) if self.bands[band]
        }
        for band, listed in self.pool.eviction_order.list_bands():
            assert listed == self.bands.get(band, [])
        assert self.pool.get_num_free_blocks() == len(self.list_free())

    def check_holds(self):
        holds, watched = self.pool.holds, self.pool.reuse_watchers
        assert self.count_references() == {
            block: block.ref_cnt for block in self.pool.blocks[1:] if block.ref_cnt
        }
        assert holds.list_holds() == list(self.held)
        assert holds.count_references() == Counter(block for held in self.held.values() for block in held)
        fixed = [block.block_id for hold, held in self.held.items() if not hold.is_movable for block in held]
        assert Counter(holds.list_immovable_ids()) == Counter([*fixed, *watched])
        for hold, held in self.held.items():
            assert hold.blocks == held
            assert hold.until == (None if self.until[hold] == NEVER else self.until[hold])
            assert (hold.state is HoldState.QUARANTINED) == (hold in self.quarantined)
            assert not hold.is_released
        block = self.rng.choice(self.pool.blocks)
        expected = [hold.reason for hold, held in self.held.items() if block in held]
        expected += ["watched until its reuse"] * (block.block_id in watched)
        assert [report.reason for report in self.pool.explain_holds(block.block_id)] == expected

    # ---- the model -----------------------------------------------------------------------------------

    def list_free(self):
        return [block for band in sorted(self.bands) for block in self.bands[band]]

    def remove(self, blocks):
        for block in blocks:
            for listed in self.bands.values():
                if block in listed:
                    listed.remove(block)

    def count_references(self):
        return Counter(block for one in (*self.tables, *self.held.values()) for block in one)

    def add(self, blocks, is_unpinned=False):
        """Put blocks that have lost a reference into their bands, in order, if they are free now."""
        counts = self.count_references()
        freed = [block for block in list_once(reversed(blocks)) if not counts[block] and not block.is_null][
            ::-1
        ]
        back = [block for block in freed if is_unpinned or (block.block_hash and self.pool.enable_caching)]
        self.bands[EMPTY_BAND] = [block for block in freed if block not in back] + self.bands[EMPTY_BAND]
        self.bands[0] += back
        if self.is_open:
            for block in list_once(blocks):
                if block in freed and self.policy.find_band(block):
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

    def some_blocks(self):
        """Return blocks that can be held: referenced, or with content."""
        some = [block for block in self.pool.blocks if block.ref_cnt or block.block_hash or block.is_null]
        return self.rng.choices(some, k=self.rng.randrange(5))

    def some_hold(self):
        return self.rng.choice(list(self.held))

    def some_time(self):
        return self.now + self.rng.randrange(1, 9)

    def note(self, hold, blocks, until=NEVER):
        self.held[hold] = [block for block in dict.fromkeys(blocks) if not block.is_null]
        self.until[hold] = until
        self.remove(blocks)

    def forget(self, hold):
        del self.until[hold]
        self.quarantined.discard(hold)
        return self.held.pop(hold)

    def hold(self):
        some, is_movable = self.some_blocks(), self.rng.random() < 0.3
        until = self.some_time() if self.rng.random() < 0.6 else None
        hold = self.pool.hold(some, f"reason {self.rng.randrange(5)}", movable=is_movable, until=until)
        self.note(hold, some, NEVER if until is None else until)

    def hold_for_writing(self):
        some, until = self.some_blocks(), self.some_time()
        self.note(self.pool.holds.open(some, "written", False, until, True), some, until)

    def hold_wrongly(self):
        """Try to hold a free block without content, which is refused and changes nothing."""
        empty = [block for block in self.pool.blocks[1:] if not block.ref_cnt and block.block_hash is None]
        if empty:
            before = state(self.pool)
            for hold in (lambda some: self.pool.hold(some, "wrong"), *[one.add for one in self.held]):
                with pytest.raises(InvalidBlockError):
                    hold([*self.some_blocks(), self.rng.choice(empty)])
            assert state(self.pool) == before

    def hold_more(self):
        if self.held:
            hold, some = self.some_hold(), self.some_blocks()
            hold.add(some)
            self.note(hold, self.held[hold] + some, self.until[hold])

    def hold_less(self):
        if self.held:
            hold, some = self.some_hold(), self.rng.choices(self.pool.blocks, k=4)
            dropped = [block for block in list_once(some) if block in self.held[hold]]
            self.held[hold] = [block for block in self.held[hold] if block not in some]
            self.add(dropped[::-1])
            hold.remove(some)

    def release(self):
        if self.held:
            hold = self.some_hold()
            self.add(self.forget(hold)[::-1])
            hold.release()
            assert hold.is_released

    def extend(self):
        if self.held:
            hold, until = self.some_hold(), self.some_time()
            if hold in self.quarantined:
                with pytest.raises(InvalidArgumentError):
                    hold.extend(until)
            else:
                hold.extend(until)
                self.until[hold] = until

    def expire(self):
        self.now += self.rng.randrange(4)
        overdue = {hold: until for hold, until in self.until.items() if until <= self.now}
        expired = self.pool.expire_holds()
        assert set(expired) == overdue.keys()
        assert [overdue[hold] for hold in expired] == sorted(overdue.values())
        for hold in expired:
            if hold.is_quarantined_late:
                self.quarantined.add(hold)
                self.until[hold] = NEVER
            else:
                assert hold.state is HoldState.EXPIRED
                self.add(self.forget(hold)[::-1])

    def adopt(self):
        if self.tables and len(set(self.tables[-1])) == len(self.tables[-1]):
            adopted = self.tables.pop()
            self.note(self.pool.holds.adopt(adopted, "adopted"), adopted)

    def hand_over(self):
        if self.held:
            hold = self.some_hold()
            table = self.pool.holds.hand_over(hold)
            assert table == self.forget(hold)
            self.tables += [table] if table else []

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
        self.pool.eviction_order.merge()
        for part in self.pool.parts:
            part.rebuild_from(self.pool)
        merged = [block for band in sorted(self.bands) if band != EMPTY_BAND for block in self.bands[band]]
        self.bands = {EMPTY_BAND: self.bands[EMPTY_BAND], 0: merged}

    def reset(self):
        while self.tables:
            self.free()
        while self.held:
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
                return
            before = self.pool.blocks
            with pytest.raises(InvalidBlockError, match="C3: "):
                self.pool.swap_block_ids([(first, second)])
            assert self.pool.blocks is before

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
    "hold": 4,
    "hold_for_writing": 1,
    "hold_wrongly": 0.5,
    "hold_more": 2,
    "hold_less": 2,
    "release": 2,
    "extend": 1,
    "expire": 2,
    "adopt": 1,
    "hand_over": 1,
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
@pytest.mark.parametrize("seed", range(60))
def test_random_calls_agree_with_a_slow_model(seed, pool_type):
    life = Life(seed, pool_type)
    for _ in range(NUM_STEPS):
        life.step()
