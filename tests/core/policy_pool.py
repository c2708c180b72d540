"""Pools with cache policies: requests by token lists, and policies that break in every way."""

from types import SimpleNamespace

from drawing import ids

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.core.cache_policy import STAY, CachePolicy

BLOCK_SIZE = 4
HASHER = BlockHasher(block_size=BLOCK_SIZE)


def make_manager(num_blocks, policy, pool_type=BlockPool, **options):
    """Return a manager over a pool with `num_blocks` usable blocks; None for no policy."""
    if policy is not None:
        options["policy"] = policy
    return KVCacheManager(pool_type(num_blocks + 1, True, BLOCK_SIZE, **options))


def start(manager, name, tokens):
    """Begin a request with these tokens. Return it, the number of hit blocks, and the ids of new blocks."""
    request = Request(name, list(tokens), HASHER)
    prefix = manager.get_computed_blocks(request)
    added = manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
    if added is None:
        return None
    request.num_computed_tokens = request.num_tokens
    return request, prefix.num_tokens // BLOCK_SIZE, ids(added[0])


def run(manager, name, tokens):
    """Run a request from start to end. Return the number of hit blocks."""
    request, num_hits, _ = start(manager, name, tokens)
    manager.free(request)
    return num_hits


def look_up_alone(pool, key):
    """Use one block as a request of its own, as simulators of flat caches do. Return whether it was hit."""
    found = pool.get_cached_block(key, [0])
    if found is None:
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(make_one_block_request(key), blocks, 0, 1, pool.hash_block_size, 0)
        pool.free_blocks(blocks)
        return False
    pool.touch(found)
    pool.free_blocks(found)
    return True


def make_one_block_request(key):
    return SimpleNamespace(request_id=key, block_hashes=[key], session_id=None)


class BrokenError(Exception):
    """The exception that a broken policy raises."""


def raise_in(hook):
    """Return a policy class that raises in a hook."""

    def fail(self, *arguments):
        raise BrokenError(f"in {hook}")

    return type(f"RaisesIn_{hook}", (CachePolicy,), {hook: fail})


class NamesAbsentQueue(CachePolicy):
    def freed(self, run):
        return 3


class ChoosesAbsentQueue(CachePolicy):
    def choose(self):
        return -1  # STAY, which only `freed` may return


class ChoosesEmptyQueue(CachePolicy):
    num_queues = 2

    def choose(self):
        return 1


class ReturnsNothing(CachePolicy):
    def freed(self, run):
        return None


class LosesRuns(CachePolicy):
    def freed(self, run):
        return STAY
