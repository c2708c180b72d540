"""Random operations on a pool with runs: invariants after each step, bytes and hits after each move."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from contiguous.slot_engine import CopyFailedError, SlotEngine
from core.plain_operations import find_differences, run
from core.pool_operations import PoolSide
from core.pool_schedule import PoolSchedule
from drawing import hash_of, ids, make_request

import kv_pool
from kv_pool import InvalidBlockError, OutOfBlocksError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.compaction import apply_moves, pack, shrink, take_run
from kv_pool.contiguous.plan import plan_clear_run, plan_pack
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.contiguous.run_pool import RunBlockPool

NUM_STEPS = 250
NUM_HASHES = 60


class UnpreferringPool(RunBlockPool):
    """A pool with an index, used without requests for runs."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, early_share=0.0, **options)


class Life:
    """A pool, an engine, and the content that the engine wrote, by block object."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.pool = RunBlockPool(
            rng.randrange(2, 70),
            rng.random() < 0.9,
            4,
            enable_kv_cache_events=rng.random() < 0.5,
            early_share=rng.choice([0.0, 0.1, 0.3, 1.0]),
            placement=rng.choice(PLACEMENTS),
        )
        self.engine = SlotEngine(self.pool)
        self.tables = []  # lists of blocks, shared ones in several
        self.holds = []  # of blocks that must not move
        self.where_held = {}  # hold -> the ids of its blocks
        self.content = {}  # block object -> what it must read
        self.told = []
        self.num_moved = 0

    def step(self):
        steps = {
            self.start: 8,
            self.start_run: 5,
            self.grow: 4,
            self.share: 3,
            self.hit: 4,
            self.duplicate: 2,
            self.free: 10,
            self.unpin: 2,
            self.hold: 1,
            self.let_go: 1,
            self.evict: 2,
            self.pack: 2,
            self.pack_a_bit: 2,
            self.clear: 2,
            self.fail_to_move: 2,
            self.take_run: 2,
            self.resize: 1,
            self.reset: 1,
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        step()
        self.check()

    def check(self):
        invariants.check(self.pool)
        for block in self.live():
            assert self.engine.slots[block.block_id] == self.content[block]
        for hold, block_ids in self.where_held.items():
            assert ids(hold.blocks) == block_ids
        references = Counter(block for blocks in self.tables for block in blocks)
        references.update(block for hold in self.holds for block in hold.blocks)
        assert references == Counter(
            {block: block.ref_cnt for block in self.pool.blocks[1:] if block.ref_cnt}
        )

    def live(self):
        """Return the blocks whose bytes matter: in use, cached, or watched."""
        watched = self.pool.reuse_watchers
        return [
            block
            for block in self.pool.blocks[1:]
            if block.ref_cnt or block.block_hash is not None or block.block_id in watched
        ]

    def note(self, blocks):
        for block in blocks:
            self.content[block] = f"content {self.rng.random()}"
            self.engine.slots[block.block_id] = self.content[block]

    def add_table(self, blocks):
        if blocks:
            self.note(blocks)
            self.tables.append(list(blocks))
            self.cache(blocks)

    def cache(self, blocks):
        if self.pool.enable_caching and self.rng.random() < 0.7:
            count = self.rng.randrange(len(blocks) + 1)
            numbers = [self.rng.randrange(NUM_HASHES) for _ in range(count)]
            fresh = [block for block in blocks[:count] if block.block_hash is None]
            request = make_request([hash_of(number) for number in numbers])
            self.pool.cache_full_blocks(request, fresh, 0, len(fresh), 4, 0)
            if fresh and self.rng.random() < 0.3:
                more = make_request([b"more-%03d" % self.rng.randrange(NUM_HASHES)])
                self.pool.cache_partial_block(more, fresh[0], 4, 0, 4)

    def some_table(self):
        return self.rng.choice(self.tables) if self.tables else None

    # ---- steps -----------------------------------------------------------------------------------

    def start(self):
        count = self.rng.randrange(1, 12)
        try:
            taken = self.pool.get_new_blocks(count)
        except OutOfBlocksError:
            assert self.pool.get_num_free_blocks() < count
            return
        assert len(set(ids(taken))) == count
        self.add_table(taken)

    def start_run(self):
        count = self.rng.randrange(1, 12)
        if count > self.pool.get_num_free_blocks():
            return
        longest = max(self.pool.list_free_runs())
        taken = self.pool.get_new_run(count)
        assert (taken is None) == (longest < count)
        if taken is not None:
            assert ids(taken) == list(range(taken[0].block_id, taken[0].block_id + count))
            self.add_table(taken)

    def grow(self):
        table = self.some_table()
        count = self.rng.randrange(1, 4)
        if table and count <= self.pool.get_num_free_blocks():
            new = self.pool.get_new_blocks_after(table[-1], count)
            self.note(new)
            table.extend(new)

    def share(self):
        table = self.some_table()
        if table:
            shared = table[: self.rng.randrange(1, len(table) + 1)]
            self.pool.touch(shared)
            self.tables.append(list(shared))

    def hit(self):
        found = self.pool.get_cached_block(hash_of(self.rng.randrange(NUM_HASHES)), [0])
        if found:
            self.pool.touch(tuple(found))
            self.tables.append(found)

    def duplicate(self):
        """Cache a second copy of cached content."""
        bare = [block for table in self.tables for block in table if block.block_hash is None]
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if bare and cached and self.pool.enable_caching:
            block_hash = self.rng.choice(cached).block_hash[:-4]
            self.pool.cache_full_blocks(make_request([block_hash]), [self.rng.choice(bare)], 0, 1, 4, 0)

    def free(self):
        if self.tables:
            table = self.tables.pop(self.rng.randrange(len(self.tables)))
            self.pool.free_blocks(iter(table[::-1]))

    def unpin(self):
        if self.tables:
            table = self.tables.pop(self.rng.randrange(len(self.tables)))
            self.pool.unpin_blocks(table, self.note_reuse)

    def note_reuse(self, block):
        assert self.engine.slots[block.block_id] == self.content[block]

    def hold(self):
        """Hold a table, which may be freed meanwhile, or a found prefix."""
        table = self.some_table()
        if table:
            self.holds.append(self.pool.hold(table, "held by a test"))
            self.where_held[self.holds[-1]] = ids(table)
        found = self.pool.get_cached_block(hash_of(self.rng.randrange(NUM_HASHES)), [0])
        if found:
            self.holds.append(self.pool.hold(found, "held by a test", movable=True))

    def let_go(self):
        if self.holds:
            hold = self.holds.pop(self.rng.randrange(len(self.holds)))
            self.where_held.pop(hold, None)
            hold.release()

    def evict(self):
        self.pool.evict_blocks([self.rng.randrange(self.pool.num_gpu_blocks) for _ in range(2)])

    def reset(self):
        for table in self.tables:
            self.pool.free_blocks(table)
        self.tables = []
        while self.holds:
            self.let_go()
        assert self.pool.reset_prefix_cache()

    # ---- moves -----------------------------------------------------------------------------------

    def hits(self):
        """Return every cached prefix with its block object and its bytes."""
        keys = self.pool.cached_block_hash_to_block._cache
        found = {key: self.pool.cached_block_hash_to_block.get_one_block(key) for key in keys}
        return {key: (block, self.engine.slots[block.block_id]) for key, block in found.items()}

    def move(self, act):
        """Remap tables of ids by the relocation, and check that they agree with the objects."""
        by_id = [ids(table) for table in self.tables]

        def remap(relocation):
            self.num_moved += len(relocation.moves)
            lookup = relocation.make_remap()
            for table in by_id:
                table[:] = lookup[table].tolist()

        hits = self.hits()
        before = invariants.Snapshot(self.pool)
        act(remap)
        assert by_id == [ids(table) for table in self.tables[: len(by_id)]]
        return before, hits

    def pack(self):
        _, hits = self.move(lambda remap: pack(self.pool, self.engine.copy, on_moved=remap))
        assert self.hits() == hits
        assert not plan_pack(self.pool) or self.pool.list_free_runs()

    def pack_a_bit(self):
        planned = plan_pack(self.pool, max_moves=3)
        relocations = []

        def act(remap):
            relocations.append(apply_moves(self.pool, planned, self.engine.copy))
            remap(relocations[0])

        before, hits = self.move(act)
        assert self.hits() == hits
        invariants.check_relocation(before, self.pool, relocations[0])

    def clear(self):
        clearance = plan_clear_run(self.pool, self.rng.randrange(1, 6))
        if clearance is not None:
            self.move(lambda remap: remap(apply_moves(self.pool, clearance.moves, self.engine.copy)))

    def fail_to_move(self):
        planned = plan_pack(self.pool)
        if planned:
            hits = self.hits()
            before = invariants.Snapshot(self.pool)
            self.engine.fail_after = self.rng.randrange(len(planned) + 1)
            with pytest.raises(CopyFailedError):
                apply_moves(self.pool, planned, self.engine.copy)
            self.engine.fail_after = None
            invariants.check_nothing_moved(before, self.pool)
            assert self.hits() == hits

    def take_run(self):
        count = self.rng.randrange(1, 10)
        if count > self.pool.get_num_free_blocks():
            return
        taken = []

        def act(remap):
            run = take_run(self.pool, count, self.engine.copy, remap)
            taken.extend(run or ())

        self.move(act)
        if taken:
            assert ids(taken) == list(range(taken[0].block_id, taken[0].block_id + count))
            self.add_table(taken)

    def resize(self):
        if self.rng.random() < 0.5:
            self.pool.add_blocks(self.rng.randrange(4))
        else:
            count = self.rng.randrange(min(4, self.pool.num_gpu_blocks))
            top = set(range(self.pool.num_gpu_blocks - count, self.pool.num_gpu_blocks))
            if top.isdisjoint(self.pool.holds.list_immovable_ids()):
                self.move(lambda remap: self.shrink(count, remap))
            else:
                with pytest.raises(InvalidBlockError, match="it cannot be drained"):
                    shrink(self.pool, count, self.engine.copy)
        for block in self.pool.blocks:
            self.engine.slots.setdefault(block.block_id, "nothing")

    def shrink(self, count, remap):
        num_blocks = self.pool.num_gpu_blocks
        try:
            shrink(self.pool, count, self.engine.copy, on_moved=remap)
        except OutOfBlocksError:
            assert self.pool.num_gpu_blocks == num_blocks


@pytest.mark.parametrize("seed", range(60))
def test_random_operations_keep_bytes_hits_and_invariants(seed):
    life = Life(seed)
    for _ in range(NUM_STEPS):
        life.step()
    for _ in range(NUM_STEPS):  # few runs have moved no block by now
        if not life.num_moved:
            life.step()
    if life.pool.num_gpu_blocks > 10:
        assert life.num_moved > 0


@pytest.mark.parametrize("seed", range(60))
def test_without_runs_it_behaves_like_a_block_pool(seed):
    schedule = PoolSchedule(seed)
    classes = {name: getattr(kv_pool, name) for name in kv_pool.__all__}
    plain = PoolSide(kv_pool, schedule.options)
    with_runs = PoolSide(SimpleNamespace(**{**classes, "BlockPool": UnpreferringPool}), schedule.options)
    for operation, answers in run(schedule, plain, with_runs, num_steps=400):
        assert answers[0] == answers[1], operation
        pictures = plain.picture(), with_runs.picture()
        if pictures[0] != pictures[1]:
            pytest.fail("\n".join([f"after {operation}", *find_differences(*pictures)]))
