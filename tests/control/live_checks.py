"""Checks of a live replay that work over a `GPUKVPool` and over a `KVCacheManager`."""

from adapter import made_pool

from kv_pool import GPUKVPool
from kv_pool.contiguous import invariants
from kv_pool.migration.pool_site import PoolSite


def check(pool):
    """The invariants of the pool, whichever it is."""
    if isinstance(pool, GPUKVPool):
        made_pool.check(pool)
    else:
        invariants.check(pool.block_pool)


def list_held(replay):
    """How many blocks each request holds, in the order in which they got them."""
    return {int(one.sequence_id): one.num_blocks for one in replay.pool.describe_sequences().sequences}


def list_ids(replay, number):
    """The ids of a request's blocks."""
    if isinstance(replay.pool, GPUKVPool):
        return replay.pool.blocks_of(number)
    return replay.pool.manager.get_block_ids(str(number))


def count_free(replay):
    return replay.pool.get_statistics().free_blocks


def make_site(replay):
    """A site of migrations over the replay's pool."""
    if isinstance(replay.pool, GPUKVPool):
        return made_pool.make_site(replay.pool, owner=replay)
    return PoolSite(replay.pool.get_sequences(), owner=replay)
