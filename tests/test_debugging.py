"""repr() is one line of bounded length, and pools refuse copies."""

import copy
import pickle

import pytest

from kv_pool import (
    BlockAllocationRequest,
    BlockHasher,
    BlockLeases,
    BlockPool,
    BlockRetention,
    GPUKVPool,
    InvalidTypeError,
    KVCacheManager,
    Request,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager.batch_block_table import BatchBlockTable


def make_things():
    pool = BlockPool(100, True, 4)
    retention = BlockRetention(pool, lambda: 0.0, max_pinned_blocks=8)
    manager = KVCacheManager(pool, retention=retention)
    request = Request("chat", range(50), BlockHasher("sha256", block_size=4))
    manager.allocate_slots(request, 50)
    adapter = GPUKVPool(20, 16, device_id=2)
    adapter.allocate(BlockAllocationRequest(3, 7, pinned=True))
    leases = BlockLeases(pool, lambda: 0.0)
    leases.acquire(manager.get_table("chat").blocks[:2], 5.0, "reader")
    return pool, retention, manager, request, adapter, leases


def test_repr_shows_the_use_of_pools_and_requests():
    pool, retention, manager, request, adapter, leases = make_things()
    assert repr(pool) == "<BlockPool of 100 blocks: 86 free, 13 in use, 12 keys cached>"
    assert repr(RunBlockPool(8, True, 4)) == "<RunBlockPool of 8 blocks: 7 free, 0 in use, 0 keys cached>"
    assert repr(manager) == f"<KVCacheManager of 1 requests over {pool!r}>"
    assert repr(retention) == "<BlockRetention: 0 blocks retained, 0 of 8 pins, 0 sessions>"
    assert repr(leases) == "<BlockLeases: 1 leases of 2 blocks>"
    assert repr(request) == "<Request 'chat': 50 tokens, 50 of the prompt, 0 computed, 12 block hashes>"
    assert repr(adapter) == "<GPUKVPool of 20 blocks on device 2: 17 free, 3 in use by 1 sequences, 3 pinned>"


def test_repr_of_tables_and_prefixes_is_bounded():
    manager = make_things()[2]
    assert repr(manager.get_table("chat")) == "<BlockTable of 13 blocks: 1 2 3 4 5 6 7 8 ...>"
    other = Request("other", range(50), BlockHasher("sha256", block_size=4))
    assert (
        repr(manager.get_computed_blocks(other)) == "<CachedPrefix of request 'other': 48 tokens, 12 blocks>"
    )
    batch = BatchBlockTable(4, 16, 4)
    batch.add_request("chat", manager.get_table("chat"))
    assert repr(batch) == "<BatchBlockTable of 1 requests in 4 rows of 16 blocks>"


@pytest.mark.parametrize("number", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_copying_pools_and_managers_is_refused(number, duplicate):
    thing = make_things()[number]
    with pytest.raises(InvalidTypeError, match=r"cannot be pickled or copied.*dump_pool"):
        duplicate(thing)
