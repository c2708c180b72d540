"""Random pools, dumped repeatedly: the loaded pool is compared with a scan of the dumped one."""

import random

import pytest
from core.plain_operations import run
from core.pool_operations import PoolSide
from core.pool_schedule import PoolSchedule
from events.living_pool import LivingPool
from events.pool_map import pool_map

import kv_pool
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.stream_state import StreamState
from kv_pool.storage import KVStorage
from kv_pool.tiers.pool_dump import dump_pool, load_pool

NUM_STEPS = 160


def scan(pool):
    """Return the cached blocks, the next to be evicted first: (primary key, tokens, all keys), and ids.

    Also return, for each key, the position of the block that a look-up finds.
    """
    carried, first = {}, {}
    for key, entry in pool.cached_block_hash_to_block._cache.items():
        copies = [entry] if isinstance(entry, KVCacheBlock) else list(entry.values())
        # If the map was edited by hand, count only what map and blocks agree on.
        secondary = pool.cached_block_hashes_by_block
        ours = [
            block
            for block in copies
            if block.pool is pool and (block.block_hash == key or key in secondary.get(block.block_id, ()))
        ]
        for block in ours:
            carried.setdefault(block.block_id, set()).add(key)
        if ours:
            first[key] = [block.block_id for block in ours]
    free = [block for block in pool.free_block_queue.get_all_free_blocks() if block.pool is pool]
    in_use = [block for block in pool.blocks if block.ref_cnt]
    in_use.sort(key=lambda block: (-(block.block_hash_num_tokens or 0), block.block_id))
    found, ids = [], []
    for block in free + in_use:
        keys = carried.get(block.block_id)
        if keys and block.block_hash is not None:
            is_found = block.block_hash in keys
            tokens = block.block_hash_num_tokens if is_found else None
            found.append((block.block_hash if is_found else None, tokens, keys))
            ids.append(block.block_id)
    return found, ids, first


def check_loaded(pool, loaded, done):
    invariants.check(loaded)
    if isinstance(loaded, RunBlockPool):
        run_invariants.check(loaded)
    dumped, old_ids, old_first = scan(pool)
    there, new_ids, new_first = scan(loaded)
    kept = min(len(dumped), loaded.num_gpu_blocks - 1)
    assert done.num_dropped == len(dumped) - kept
    assert loaded.num_evictions == pool.num_evictions
    dumped, old_ids = dumped[len(dumped) - kept :], old_ids[len(old_ids) - kept :]
    assert [keys for _, _, keys in there] == [keys for _, _, keys in dumped]
    for (primary, tokens, _), (new_primary, new_tokens, _) in zip(dumped, there, strict=True):
        assert primary is None or (new_primary, new_tokens) == (primary, tokens)
    new_of = dict(zip(old_ids, new_ids, strict=True))
    assert new_of == dict(zip(done.old_ids.tolist(), done.new_ids.tolist(), strict=True))
    for key, ids in old_first.items():
        assert new_first.get(key, []) == [new_of[block_id] for block_id in ids if block_id in new_of]
    assert loaded.get_num_free_blocks() == loaded.num_gpu_blocks - 1
    cached = [block.block_hash is not None for block in loaded.free_block_queue.get_all_free_blocks()]
    assert cached == sorted(cached)  # empty blocks come first


@pytest.mark.parametrize("seed", range(60))
def test_random_pool_is_loaded_unchanged(seed, tmp_path):
    schedule = PoolSchedule(seed)
    options = schedule.options
    side = PoolSide(kv_pool, options)
    pool = side.pools["gpu"]
    rng = random.Random(seed)
    num_dumps = 0
    for number, _ in enumerate(run(schedule, side, num_steps=NUM_STEPS)):
        if number % 40 != 39:
            continue
        before = side.picture()
        dump_pool(tmp_path / "pool", pool)
        assert side.picture() == before
        kind = rng.choice([kv_pool.BlockPool, RunBlockPool])
        size = rng.choice([pool.num_gpu_blocks, rng.randrange(1, 40)])
        loaded = kind(
            size,
            True,
            options["hash_block_size"],
            num_hash_lookahead_tokens=options["num_lookahead"],
            medium=options["medium"],
        )
        check_loaded(pool, loaded, load_pool(tmp_path / "pool", loaded))
        num_dumps += 1
    assert num_dumps == NUM_STEPS // 40


class LivingEngine(LivingPool):
    """A pool with a publisher's state, a reader, and bytes that identify the key a block was cached under."""

    def __init__(self, seed, num_blocks):
        super().__init__(seed, num_blocks)
        self.start(num_blocks)

    def start(self, num_blocks):
        self.storage = KVStorage.allocate(num_blocks, 4, 1, 1, 8)
        self.state, self.mirror = StreamState(), PrefixMirror()

    def restart(self, path, num_blocks):
        """Continue with a new pool loaded from a dump of the old one."""
        dump_pool(path, self.pool, storage=self.storage, stream_state=self.state)
        super().__init__(self.rng.randrange(2**30), num_blocks)
        next_sequence = self.state.last_sequence + 1
        self.start(num_blocks)
        done = load_pool(path, self.pool, storage=self.storage)
        assert done.next_sequence == next_sequence
        self.state.last_sequence = done.next_sequence - 1
        self.tell(self.manager.take_events())

    def live(self):
        self.tell(self.step())
        for block in self.pool.blocks:
            if block.block_hash is not None:
                self.storage.write_block(block.block_id, self.expect(block))

    def tell(self, events):
        self.mirror.apply("engine", self.state.apply(events))

    def check(self):
        invariants.check(self.pool)
        assert self.mirror.get_blocks("engine") == pool_map(self.pool)
        for block in self.pool.blocks:
            if block.block_hash is not None:
                assert self.storage.read_block(block.block_id) == self.expect(block)

    def expect(self, block):
        return (block.block_hash * 4)[: self.storage.block_bytes].ljust(self.storage.block_bytes, b"\0")


@pytest.mark.parametrize("seed", range(12))
def test_engine_with_many_restarts_keeps_its_blocks(seed, tmp_path):
    rng = random.Random(seed)
    engine = LivingEngine(seed, 40)
    for _ in range(6):
        for _ in range(rng.randrange(1, 25)):
            engine.live()
        engine.check()
        engine.restart(tmp_path / "pool", rng.choice([20, 40, 60]))
        engine.check()
