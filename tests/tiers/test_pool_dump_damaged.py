"""Damaged or crafted dumps raise a typed error and leave the pool unchanged."""

import random
from contextlib import suppress

import numpy as np
import pytest
from damage import NASTY_RAW, craft_or_damage, damage
from tiers.made_dumps import split_records, write_records

from kv_pool import BlockHasher, BlockPool, KVPoolError, Request
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.events.stream_state import StreamState
from kv_pool.storage import BlockStorage
from kv_pool.tiers.dump_file import RecordKind
from kv_pool.tiers.pool_dump import dump_pool, load_pool, read_header
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

HASHER = BlockHasher("sha256", block_size=4)


def make_file(path, storage):
    """Write a dump with copies of a key, blocks in use, tokens and bytes."""
    pool = BlockPool(10, True, 4, enable_kv_cache_events=True)
    state = StreamState()
    for first in (0, 0, 100):
        request = Request("r", range(first, first + 12), HASHER)
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)
        if not first:
            pool.free_blocks(reversed(blocks))
    state.apply(pool.take_events(), 0)
    dump_pool(path, pool, storage=storage, stream_state=state)


@pytest.fixture(scope="module", params=[True, False], ids=["with bytes", "without"])
def dumped(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "pool"
    storage = BlockStorage.wrap_state([np.zeros((10, 16), np.uint8)]) if request.param else None
    make_file(path, storage)
    return path.read_bytes(), storage


def try_to_load(path, storage, kind):
    """Load a dump. It may only raise a KVPoolError, and then nothing may have changed."""
    pool = kind(12, True, 4, enable_kv_cache_events=True)
    room = None if storage is None else BlockStorage.wrap_state([np.zeros((12, 16), np.uint8)])
    if storage is None:
        TieredCache(pool, None, [Tier(4)])
    try:
        load_pool(path, pool, storage=room)
    except KVPoolError:
        assert pool.get_num_free_blocks() == 11
        assert len(pool.cached_block_hash_to_block) == 0
        assert pool.take_events() == []
        assert pool.num_evictions == 0
    invariants.check(pool)
    if kind is RunBlockPool:
        run_invariants.check(pool)
    with suppress(KVPoolError):
        read_header(path)


@pytest.mark.parametrize("seed", range(300))
def test_crafted_dump_is_refused_or_loaded_completely(tmp_path, dumped, seed):
    rng = random.Random(seed)
    data, storage = dumped
    records = split_records(data)
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(len(records))
        kind, payload = records[place]
        match rng.randrange(8):
            case 0:
                records.insert(place, rng.choice(records))
            case 1:
                del records[place]
            case 2:
                records[place] = (rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1]), payload)
            case _ if kind in (RecordKind.DATA, RecordKind.END):
                records[place] = (kind, rng.choice([damage(rng, payload), *NASTY_RAW]))
            case _:
                records[place] = (kind, craft_or_damage(rng, payload))
    write_records(tmp_path / "pool", records)
    try_to_load(tmp_path / "pool", storage, rng.choice([BlockPool, RunBlockPool]))
