"""Checks of a live replay that work over a `GPUKVPool` and over a `KVCacheManager`."""

from adapter import made_pool

from kv_pool import GPUKVPool
from kv_pool.contiguous import invariants
from kv_pool.migration.pool_site import PoolSite


def check(pool):
    """Check the invariants of either kind of pool."""
    if isinstance(pool, GPUKVPool):
        made_pool.check(pool)
    else:
        invariants.check(pool.block_pool)


def list_held(replay):
    """Return the number of blocks of each request, in order of admission."""
    return {int(one.sequence_id): one.num_blocks for one in replay.pool.describe_sequences().sequences}


def list_ids(replay, number):
    """Return the ids of a request's blocks."""
    if isinstance(replay.pool, GPUKVPool):
        return replay.pool.blocks_of(number)
    return replay.pool.manager.get_block_ids(str(number))


def count_free(replay):
    return replay.pool.get_statistics().free_blocks


def make_site(replay):
    """Return a migration site over the replay's pool."""
    if isinstance(replay.pool, GPUKVPool):
        return made_pool.make_site(replay.pool, owner=replay)
    return PoolSite(replay.pool.get_sequences(), owner=replay)
