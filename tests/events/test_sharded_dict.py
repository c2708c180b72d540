"""A dict in shards."""

from kv_pool.events.resident_copy import NUM_SHARDS, ShardedDict


def test_value_is_found_in_its_shard():
    sharded = ShardedDict()
    for key in (1, b"bytes", 2**64 - 1, NUM_SHARDS + 1):
        sharded.shard(key)[key] = str(key)
    assert sum(map(len, sharded.shards)) == 4
    assert sharded.shard(b"bytes")[b"bytes"] == "b'bytes'"
    assert sharded.shard(1) is sharded.shard(NUM_SHARDS + 1)
    assert sharded.shard(2**64 - 1)[2**64 - 1] == str(2**64 - 1)
    assert 5 not in sharded.shard(5)


def test_hashes_spread_evenly_over_shards():
    sharded = ShardedDict()
    for number in range(10_000):
        key = (number * 0x9E3779B97F4A7C15) % 2**64
        sharded.shard(key)[key] = None
    assert max(map(len, sharded.shards)) < 100
