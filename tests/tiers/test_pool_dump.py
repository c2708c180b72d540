"""Tests of pool dumps: hits, eviction order, bytes, events and errors after loading."""

import os
import signal
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from drawing import ids
from tiers.made_dumps import split_records, write_records

from kv_pool import (
    BlockAllocationRequest,
    BlockHasher,
    BlockPool,
    GPUKVPool,
    KVCacheManager,
    Request,
    SequenceId,
)
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.errors import InvalidArgumentError, LayoutMismatchError, PoolDumpError, TierError
from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.stream_state import StreamState
from kv_pool.storage import KVStorage
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.pool_dump import dump_pool, load_pool, read_header
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

HASHER = BlockHasher("sha256", block_size=4)
SOURCE = Path(__file__).parent.parent


def make_request(name, first, num_tokens):
    return Request(name, range(first, first + num_tokens), HASHER)


def cache(pool, first, num_tokens):
    """Return a request's full blocks, cached and in use."""
    request = make_request("r", first, num_tokens)
    blocks = pool.get_new_blocks(num_tokens // 4)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
    return request, blocks


def make_pool(num_blocks=10, **options):
    """Return a pool with two cached free sequences, the second freed last, and a third in use."""
    pool = BlockPool(num_blocks, True, 4, **options)
    requests = []
    for first, num_tokens in ((0, 12), (100, 8), (200, 12)):
        request, blocks = cache(pool, first, num_tokens)
        requests.append(request)
        if first != 200:
            pool.free_blocks(reversed(blocks))
    return pool, requests


def find(pool, request):
    return ids(pool.find_cached_prefix(request.block_hashes, 100))


def picture(pool):
    """Return all state that a failed load could have changed."""
    return (
        ids(pool.free_block_queue.get_all_free_blocks()),
        [(block.block_hash, block.ref_cnt, block.generation) for block in pool.blocks],
        sorted(pool.cached_block_hash_to_block._cache),
        pool.num_evictions,
        list(pool.kv_event_queue),
    )


def check(pool):
    invariants.check(pool)
    if isinstance(pool, RunBlockPool):
        run_invariants.check(pool)


def test_empty_pool_can_be_dumped(tmp_path):
    storage = KVStorage.allocate(10, 4, 1, 1, 2)
    dump_pool(tmp_path / "pool", BlockPool(10, True, 4), storage=storage)
    done = load_pool(tmp_path / "pool", BlockPool(10, True, 4), storage=storage)
    assert (done.num_blocks, done.next_sequence) == (0, None)


def fill(storage, seed=0):
    rng = np.random.default_rng(seed)
    for block in range(storage.num_blocks):
        storage.write_block(block, rng.bytes(storage.block_bytes))


@pytest.mark.parametrize("layout", ["NHD", "BLNHC"])
@pytest.mark.parametrize("num_blocks", [6, 10, 30])
def test_bytes_are_loaded_into_other_layouts_and_sizes(layout, num_blocks, tmp_path):
    pool, requests = make_pool()
    storage = KVStorage.allocate(10, 4, 2, 3, 8)
    fill(storage)
    dump_pool(tmp_path / "pool", pool, storage=storage)
    loaded, target = BlockPool(num_blocks, True, 4), KVStorage.allocate(num_blocks, 4, 2, 3, 8, layout=layout)
    fill(target, 1)
    done = load_pool(tmp_path / "pool", loaded, storage=target)
    for old, new in zip(done.old_ids.tolist(), done.new_ids.tolist(), strict=True):
        assert target.read_block(new) == storage.read_block(old)
    for request in requests[1:]:
        for old, new in zip(find(pool, request), find(loaded, request), strict=True):
            assert target.read_block(new) == storage.read_block(old)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.torch), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
def test_bytes_are_dumped_from_and_loaded_to_torch_tensors(device, tmp_path):
    pool, _ = make_pool()
    storage = KVStorage.allocate(10, 4, 2, 3, 8, "bfloat16", device, library="torch")
    fill(storage)
    dump_pool(tmp_path / "pool", pool, storage=storage)
    for target in (
        KVStorage.allocate(10, 4, 2, 3, 8, "bfloat16", device, library="torch"),
        KVStorage.allocate(10, 4, 2, 3, 8, "bfloat16"),
    ):
        done = load_pool(tmp_path / "pool", BlockPool(10, True, 4), storage=target)
        for block_id in done.new_ids.tolist():
            assert target.read_block(block_id) == storage.read_block(block_id)


def test_dump_larger_than_the_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr("kv_pool.tiers.dump_file.BATCH_BYTES", 1000)
    monkeypatch.setattr("kv_pool.tiers.pool_dump.BATCH_BYTES", 700)
    test_bytes_are_loaded_into_other_layouts_and_sizes("NHD", 6, tmp_path)


# ---- events ----------------------------------------------------------------------------------------


def make_told_pool(num_blocks=10):
    pool, requests = make_pool(num_blocks=num_blocks, enable_kv_cache_events=True)
    state = StreamState()
    state.apply(pool.take_events(), 41)
    return pool, requests, state


def follow(pool):
    mirror = PrefixMirror(learns_tokens=True)
    mirror.apply("engine", pool.take_events())
    return mirror


@pytest.mark.parametrize("num_blocks", [6, 10])
def test_loading_publishes_all_blocks_with_tokens(num_blocks, tmp_path):
    pool, requests, state = make_told_pool()
    header = dump_pool(tmp_path / "pool", pool, stream_state=state)
    loaded = BlockPool(num_blocks, True, 4, enable_kv_cache_events=True)
    done = load_pool(tmp_path / "pool", loaded)
    assert header.next_sequence == done.next_sequence == 42
    mirror = follow(loaded)
    for request in requests:
        found = mirror.find_prefix(list(request.block_hashes))
        by_tokens = mirror.find_prefix_of_tokens(request.all_token_ids)
        hit = len(find(loaded, request))
        assert found == ({"engine": hit} if hit else {})
        assert by_tokens == ({"engine": 4 * hit} if hit else {})


def test_loading_without_stream_state_publishes_hashes_only(tmp_path):
    pool, requests, _ = make_told_pool()
    dump_pool(tmp_path / "pool", pool)
    loaded = BlockPool(10, True, 4, enable_kv_cache_events=True)
    done = load_pool(tmp_path / "pool", loaded)
    assert done.next_sequence is None
    mirror = follow(loaded)
    assert mirror.find_prefix(requests[0].block_hashes) == {"engine": 3}
    assert mirror.find_prefix_of_tokens(requests[0].all_token_ids) == {}


def test_reader_of_the_old_stream_drops_unloaded_blocks(tmp_path):
    """The publisher continues its numbering, so the reader has no other sign of the restart."""
    pool, requests, state = make_told_pool()
    mirror = PrefixMirror()
    mirror.apply("engine", state.take_snapshot()[1])
    dump_pool(tmp_path / "pool", pool, stream_state=state)
    loaded = BlockPool(6, True, 4, enable_kv_cache_events=True)
    load_pool(tmp_path / "pool", loaded)
    mirror.apply("engine", loaded.take_events())
    assert [mirror.find_prefix(request.block_hashes) for request in requests] == [
        {},
        {"engine": 2},
        {"engine": 3},
    ]


def test_each_copy_of_a_block_is_published(tmp_path):
    pool = BlockPool(10, True, 4, enable_kv_cache_events=True)
    _, older = cache(pool, 0, 8)
    request, newer = cache(pool, 0, 8)
    state = StreamState()
    state.apply(pool.take_events())
    dump_pool(tmp_path / "pool", pool, stream_state=state)
    loaded = BlockPool(10, True, 4, enable_kv_cache_events=True)
    load_pool(tmp_path / "pool", loaded)
    after, mirror = StreamState(), PrefixMirror()
    mirror.apply("engine", after.apply(loaded.take_events()))
    loaded.evict_blocks(ids(older))
    mirror.apply("engine", after.apply(loaded.take_events()))
    assert mirror.find_prefix(request.block_hashes) == {"engine": 2}
    loaded.evict_blocks(ids(newer))
    mirror.apply("engine", after.apply(loaded.take_events()))
    assert mirror.find_prefix(request.block_hashes) == {}


def test_tiers_receive_the_event_data_of_loaded_blocks(tmp_path):
    pool, requests, state = make_told_pool()
    dump_pool(tmp_path / "pool", pool, stream_state=state)
    loaded = BlockPool(10, True, 4, enable_kv_cache_events=True)
    tiers = TieredCache(loaded, None, [Tier(20)], enable_events=True)
    load_pool(tmp_path / "pool", loaded)
    loaded.take_events()
    loaded.get_new_blocks(9)
    mirror = follow(loaded)
    for request in requests:
        assert mirror.find_prefix(list(request.block_hashes)) == {"engine": len(request.block_hashes)}
        assert mirror.find_prefix_of_tokens(request.all_token_ids) == {"engine": request.num_tokens}
    assert len(tiers.tiers[0]) == 8


def test_loading_keeps_tier_blocks_known_to_readers(tmp_path):
    pool, requests, state = make_told_pool()
    dump_pool(tmp_path / "pool", pool, stream_state=state)
    tier = Tier(20)
    only_there = make_request("r", 700, 8)
    before = BlockPool(10, True, 4)
    tiers = TieredCache(before, None, [tier], "through")
    blocks = before.get_new_blocks(2)
    before.cache_full_blocks(only_there, blocks, 0, 2, 4, 0)
    before.lower_tiers = None  # the process ends; the next one opens the tier's folder
    del tiers
    loaded = BlockPool(10, True, 4, enable_kv_cache_events=True)
    TieredCache(loaded, None, [tier], enable_events=True)
    load_pool(tmp_path / "pool", loaded)
    mirror = follow(loaded)
    assert mirror.find_prefix(list(only_there.block_hashes)) == {"engine": 2}
    assert mirror.find_prefix(list(requests[0].block_hashes), medium="GPU") == {"engine": 3}


def test_loaded_blocks_are_written_through(tmp_path):
    pool, requests = make_pool()
    storage = KVStorage.allocate(10, 4, 1, 1, 2)
    for block in pool.blocks:
        storage.write_block(block.block_id, bytes([block.block_id]) * storage.block_bytes)
    dump_pool(tmp_path / "pool", pool, storage=storage)
    loaded, target = BlockPool(10, True, 4), KVStorage.allocate(10, 4, 1, 1, 2)
    host = HostTier(20, target)
    tiers = TieredCache(loaded, target, [host], "through")
    load_pool(tmp_path / "pool", loaded, storage=target)
    tiers.flush()
    assert len(host) == 8
    for key in host.list_keys():
        block = loaded.cached_block_hash_to_block.get_one_block(key)
        read = host.read([key])
        assert read.storage.read_block(read.block_ids[0]) == bytes([block.block_id]) * storage.block_bytes
    assert sum(len(request.block_hashes) for request in requests) == 8


def test_loading_publishes_nothing_with_events_off(tmp_path):
    pool, _, state = make_told_pool()
    dump_pool(tmp_path / "pool", pool, stream_state=state)
    loaded = BlockPool(10, True, 4)
    load_pool(tmp_path / "pool", loaded)
    assert loaded.kv_event_queue == []


# ---- errors ----------------------------------------------------------------------------------------


def refuse(error, path, pool, match, **options):
    before = picture(pool)
    with pytest.raises(error, match=match):
        load_pool(path, pool, **options)
    assert picture(pool) == before
    check(pool)


def test_unsuitable_pools_are_refused(tmp_path):
    path = tmp_path / "pool"
    pool, _ = make_pool()
    dump_pool(path, pool)
    refuse(PoolDumpError, path, pool, "has 3 blocks in use and 8 keys")
    free_but_cached, _ = make_pool()
    free_but_cached.free_blocks(
        [block for block in free_but_cached.blocks if block.ref_cnt and not block.is_null]
    )
    refuse(PoolDumpError, path, free_but_cached, "has 0 blocks in use and 8 keys")
    refuse(PoolDumpError, path, BlockPool(10, False, 4), "enable_caching is False")
    refuse(LayoutMismatchError, path, BlockPool(10, True, 8), "hash_block_size is 8 here and 4 there")
    refuse(LayoutMismatchError, path, BlockPool(10, True, 4, medium="CPU"), "medium is 'CPU' here")
    refuse(
        LayoutMismatchError, path, BlockPool(10, True, 4, num_hash_lookahead_tokens=1), "num_hash_lookahead"
    )


def test_dump_of_another_layout_is_refused(tmp_path):
    path = tmp_path / "pool"
    pool, _ = make_pool()
    storage = KVStorage.allocate(10, 4, 2, 3, 8)
    here = BlockLayout.describe(storage, 4, HASHER)
    dump_pool(path, pool, storage=storage, layout=here)
    assert read_header(path).layout == here
    empty = BlockPool(10, True, 4)
    refuse(LayoutMismatchError, path, empty, "hash_algorithm is '' here", storage=storage)
    other = BlockLayout.describe(storage, 4, BlockHasher("sha256", seed="another", block_size=4))
    refuse(LayoutMismatchError, path, empty, "hash_seed is", storage=storage, layout=other)
    refuse(LayoutMismatchError, path, empty, "a layout was given when it was dumped, but not now")
    refuse(PoolDumpError, path, empty, "no storage was given", layout=here)
    wider = KVStorage.allocate(10, 4, 2, 3, 16)
    refuse(LayoutMismatchError, path, empty, "block_format is", storage=wider)
    refuse(
        InvalidArgumentError, path, empty, "the layout has blocks of 768 bytes", storage=wider, layout=here
    )
    few = KVStorage.allocate(9, 4, 2, 3, 8)
    refuse(InvalidArgumentError, path, empty, "has 9 blocks, the pool 10", storage=few, layout=here)
    load_pool(path, empty, storage=storage, layout=here)

    dump_pool(path, pool, layout=here)
    empty = BlockPool(10, True, 4)
    refuse(PoolDumpError, path, empty, "it has no bytes", storage=storage, layout=here)
    refuse(LayoutMismatchError, path, empty, "hash_algorithm is", storage=storage)
    assert load_pool(path, empty, layout=here).num_blocks == 8
    dump_pool(path, pool)
    refuse(LayoutMismatchError, path, BlockPool(10, True, 4), "now, but not when it was dumped", layout=here)


def make_small_file(path):
    """Write a dump with at least one record of each kind."""
    pool = BlockPool(6, True, 4, enable_kv_cache_events=True)
    cache(pool, 0, 4)
    cache(pool, 0, 8)
    state = StreamState()
    state.apply(pool.take_events())
    storage = KVStorage.allocate(6, 4, 1, 1, 2)
    fill(storage)
    dump_pool(path, pool, storage=storage, stream_state=state)
    return storage


def load_damaged(path, data):
    path.write_bytes(data)
    pool = BlockPool(6, True, 4, enable_kv_cache_events=True)
    before = picture(pool)
    with pytest.raises(PoolDumpError):
        load_pool(path, pool, storage=KVStorage.allocate(6, 4, 1, 1, 2))
    assert picture(pool) == before


def test_truncated_dump_is_refused(tmp_path):
    make_small_file(tmp_path / "pool")
    whole = (tmp_path / "pool").read_bytes()
    for length in range(len(whole)):
        load_damaged(tmp_path / "damaged", whole[:length])
    load_damaged(tmp_path / "damaged", whole + b"\0")


@pytest.mark.parametrize("bit", [0, 7])
def test_dump_with_a_flipped_bit_is_refused(bit, tmp_path):
    make_small_file(tmp_path / "pool")
    whole = (tmp_path / "pool").read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << bit
        load_damaged(tmp_path / "damaged", bytes(data))
    (tmp_path / "damaged").write_bytes(whole)
    load_pool(tmp_path / "damaged", BlockPool(6, True, 4), storage=KVStorage.allocate(6, 4, 1, 1, 2))


def test_reordered_or_missing_records_are_refused(tmp_path):
    """Each record is valid by itself, so its own checksum does not detect this."""
    make_small_file(tmp_path / "pool")
    whole = (tmp_path / "pool").read_bytes()
    ends = list(accumulate((32 + len(payload) for _, payload in split_records(whole)), initial=16))
    start, *records = [whole[first:end] for first, end in pairwise([0, *ends])]
    assert len(records) > 5
    for place in range(len(records)):
        before, after = records[:place], records[place + 1 :]
        load_damaged(tmp_path / "damaged", start + b"".join(before + after))
        if after:
            swapped = [*before, after[0], records[place], *after[1:]]
            load_damaged(tmp_path / "damaged", start + b"".join(swapped))


def test_file_that_is_not_a_dump_is_refused(tmp_path):
    pool = BlockPool(6, True, 4)
    refuse(PoolDumpError, tmp_path / "nothing", pool, "No such file")
    refuse(PoolDumpError, tmp_path, pool, "it is not a regular file")
    (tmp_path / "text").write_text("not a pool, but long enough for one to begin")
    refuse(PoolDumpError, tmp_path / "text", pool, "is not a pool dump")
    make_small_file(tmp_path / "pool")
    data = bytearray((tmp_path / "pool").read_bytes())
    data[8] = 9
    (tmp_path / "newer").write_bytes(data)
    refuse(PoolDumpError, tmp_path / "newer", pool, "has format version 9; supported versions are 1, 2")
    with pytest.raises(PoolDumpError):
        read_header(tmp_path / "text")


def test_version_1_dump_has_no_model(tmp_path):
    """Version 1 had no model and no weights in its layout; the rest is unchanged."""
    pool, requests = make_pool()
    storage = KVStorage.allocate(10, 4, 1, 1, 8, "float16")
    dump_pool(tmp_path / "pool", pool, storage=storage)
    header, *records = split_records((tmp_path / "pool").read_bytes())
    fields = msgspec.msgpack.decode(header[1])
    del fields["layout"]["model"], fields["layout"]["weights"]
    write_records(tmp_path / "old", [(header[0], msgspec.msgpack.encode(fields)), *records], version=1)
    empty = BlockPool(10, True, 4)
    named = BlockLayout.describe(storage, 4, model="one")
    refuse(LayoutMismatchError, tmp_path / "old", empty, "model is 'one' here", storage=storage, layout=named)
    load_pool(tmp_path / "old", empty, storage=storage)
    assert find(empty, requests[0])


# ---- files -----------------------------------------------------------------------------------------


def test_dump_is_private_and_leaves_no_other_file(tmp_path):
    make_small_file(tmp_path / "pool")
    make_small_file(tmp_path / "pool")
    assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["pool"]


def test_dump_into_a_missing_folder_raises(tmp_path):
    pool, _ = make_pool()
    with pytest.raises(TierError, match=r"nothing was dumped to .*: No such file"):
        dump_pool(tmp_path / "no" / "pool", pool)


def test_failing_stream_state_leaves_the_old_dump(tmp_path):
    class Broken:
        def iter_snapshot(self):
            def fail():
                raise RuntimeError("broken")
                yield

            return 3, fail()

    make_small_file(tmp_path / "pool")
    before = (tmp_path / "pool").read_bytes()
    pool, _ = make_pool()
    with pytest.raises(RuntimeError, match="broken"):
        dump_pool(tmp_path / "pool", pool, stream_state=Broken())
    assert (tmp_path / "pool").read_bytes() == before
    assert os.listdir(tmp_path) == ["pool"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from tiers.test_pool_dump import make_pool, fill
from kv_pool.errors import TierError
from kv_pool.storage import KVStorage
from kv_pool.tiers.pool_dump import dump_pool
path = Path(sys.argv[1])
pool, _ = make_pool()
storage = KVStorage.allocate(10, 4, 2, 3, 8)
dump_pool(path, pool, storage=storage)
before = path.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
fill(storage)
try:
    dump_pool(path, pool, storage=storage)
except TierError as error:
    print(error)
print(path.read_bytes() == before, [each.name for each in path.parent.iterdir()])
"""


def start_python(code, path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment, text=True
    )


def test_full_disk_leaves_the_old_dump(tmp_path):
    told = start_python(FULL_DISK, tmp_path / "pool").communicate()[0].splitlines()
    assert told == [f"nothing was dumped to {tmp_path / 'pool'}: File too large", "True ['pool']"]


DUMPING_FOR_EVER = """
import itertools, sys
from tiers.test_pool_dump import make_pool, fill
from kv_pool.storage import KVStorage
from kv_pool.tiers.pool_dump import dump_pool
pool, _ = make_pool()
storage = KVStorage.allocate(10, 4, 2, 3, 8)
for number in itertools.count():
    fill(storage, number)
    dump_pool(sys.argv[1], pool, storage=storage)
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_dumps", [1, 2, 5, 9])
def test_process_killed_while_dumping_leaves_a_complete_file(num_dumps, tmp_path):
    path = tmp_path / "pool"
    with start_python(DUMPING_FOR_EVER, path) as process:
        for _ in range(num_dumps):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    last = num_dumps - 1 + rest.count("\n")
    pool, storage = BlockPool(10, True, 4), KVStorage.allocate(10, 4, 2, 3, 8)
    done = load_pool(path, pool, storage=storage)
    loaded = [storage.read_block(block_id) for block_id in done.new_ids.tolist()]
    wanted = []
    for number in (last, last + 1):  # the last one printed, or one more
        written = KVStorage.allocate(10, 4, 2, 3, 8)
        fill(written, number)
        wanted.append([written.read_block(block_id) for block_id in done.old_ids.tolist()])
    assert loaded in wanted


# ---- managers, the adapter, other processes ---------------------------------------------------------


def test_adapter_dumps_and_loads_its_pool(tmp_path):
    def make():
        storage = KVStorage.allocate(21, 4, 1, 1, 2)
        return GPUKVPool(20, 4, storage=storage, enable_kv_cache_events=True), storage

    pool, storage = make()
    fill(storage)
    layout = BlockLayout.describe(storage, 4, HASHER)
    request = make_request("r", 0, 20)
    block_ids = pool.allocate(BlockAllocationRequest(num_blocks=5, sequence_id=1))
    pool.cache_prefix(1, request.block_hashes, request.all_token_ids)
    state = StreamState()
    state.apply(pool.take_events())
    header = pool.dump(tmp_path / "pool", layout=layout, stream_state=state)
    assert (header.num_cached, header.next_sequence) == (5, 1)

    again, target = make()
    assert again.load(tmp_path / "pool", layout=layout).num_blocks == 5
    assert again.get_free_blocks() == 20
    claimed = again.claim_prefix(7, request.block_hashes)
    assert claimed == block_ids
    assert [target.read_block(i) for i in claimed] == [storage.read_block(i) for i in block_ids]
    assert follow(again).find_prefix(request.block_hashes) == {"engine": 5}
    assert msgspec.to_builtins(read_header(tmp_path / "pool"))["num_blocks"] == 21


def test_a_bad_block_of_a_dump_takes_its_descendants_with_it(tmp_path):
    pool, requests = make_pool()
    dump_pool(tmp_path / "dump", pool)
    loaded = BlockPool(10, True, 4)
    load_pool(tmp_path / "dump", loaded)
    manager = KVCacheManager(loaded)
    first = find(loaded, requests[0])[0]
    manager.report_invalid_blocks([first])
    assert find(loaded, requests[0]) == []
    assert [manager.get_computed_blocks(make_request("n", n, 13)).num_tokens for n in (0, 100, 200)] == [
        0,
        8,
        12,
    ]
    computed = make_request("again", 0, 5)
    manager.allocate_slots(computed, 5, manager.get_computed_blocks(computed))
    assert manager.get_computed_blocks(make_request("n", 0, 13)).num_tokens == 4


# ---- hashes of another process -------------------------------------------------------------------

HASH_AND_DUMP = """
import sys
from kv_pool import BlockAllocationRequest, BlockHasher, GPUKVPool, SequenceId
from kv_pool.storage.block_layout import BlockLayout
BlockHasher(block_size=4)
hasher = BlockHasher(*eval(sys.argv[2]), block_size=4)
pool, one = GPUKVPool(8, 4), SequenceId(1)
pool.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=one))
pool.cache_prefix(one, hasher.hash_blocks(range(8)))
pool.free_sequence(one)
pool.dump(sys.argv[1], layout=BlockLayout.describe(None, 4, hasher) if sys.argv[3] else None)
"""


def dump_elsewhere(path, hasher=(), layout=""):
    command = [sys.executable, "-c", HASH_AND_DUMP, str(path), repr(hasher), layout]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("is_used_here", [False, True])
def test_random_seed_of_another_process_is_a_warning(tmp_path, is_used_here):
    """They were loaded without a word, and nothing could hit them."""
    if is_used_here:
        BlockHasher(block_size=4)
    dump_elsewhere(tmp_path / "dump")
    pool = GPUKVPool(8, 4)
    with pytest.raises(RuntimeWarning, match="may have been made by a BlockHasher without a seed"):
        pool.load(tmp_path / "dump")
    assert pool.block_pool.get_num_free_blocks() == 8
    with pytest.warns(RuntimeWarning, match="Give the hasher a seed, and pass layout="):
        assert pool.load(tmp_path / "dump").num_blocks == 2
    dump_elsewhere(tmp_path / "dump", (), "with the hasher")
    with pytest.raises(LayoutMismatchError, match="hash_seed is"):
        GPUKVPool(8, 4).load(
            tmp_path / "dump", layout=BlockLayout.describe(None, 4, BlockHasher(block_size=4))
        )


@pytest.mark.parametrize("layout", ["", "with the hasher"])
def test_hashes_with_a_known_seed_are_loaded_without_a_warning(tmp_path, layout):
    hasher = BlockHasher("sha256", block_size=4)
    dump_elsewhere(tmp_path / "dump", ("sha256",), layout)
    pool = GPUKVPool(8, 4)
    loaded = pool.load(tmp_path / "dump", layout=BlockLayout.describe(None, 4, hasher) if layout else None)
    assert (loaded.num_blocks, loaded.header.random_seed) == (2, "")
    assert len(pool.claim_prefix(SequenceId(1), hasher.hash_blocks(range(8)))) == 2


def test_hashes_of_this_process_are_loaded_without_a_warning(tmp_path):
    hasher = BlockHasher(block_size=4)
    pool, one = GPUKVPool(8, 4), SequenceId(1)
    pool.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=one))
    pool.cache_prefix(one, hasher.hash_blocks(range(8)))
    pool.free_sequence(one)
    assert pool.dump(tmp_path / "dump").random_seed
    assert GPUKVPool(8, 4).load(tmp_path / "dump").num_blocks == 2
