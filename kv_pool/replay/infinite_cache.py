"""Counts the hits of a cache that never evicts: the upper bound for every capacity."""

from kv_pool.ids import BlockHash
from kv_pool.replay.report import InfiniteCache
from kv_pool.replay.settings import ReplaySettings, find_block_size


def count_infinite_hits(settings: ReplaySettings) -> InfiniteCache:
    """Count the hits of an infinite cache on the requests of `settings`.

    Uses the trace, limit, block size and convention; ignores capacities, clock and groups.
    Raises:
        TraceError: the trace cannot be read.
    """
    trace = settings.open_trace()
    block_size = find_block_size(settings.block_size, trace)
    cached: set[BlockHash] = set()
    found = InfiniteCache()
    num_blocks = num_tokens = 0
    for request in settings.read_requests(trace, block_size):
        num_hits = 0
        for block_hash in request.block_hashes[: request.max_hit_tokens // block_size]:
            if block_hash not in cached:
                break
            num_hits += 1
        cached.update(request.block_hashes)
        found.blocks_hit += num_hits
        found.tokens_hit += min(num_hits * block_size, request.input_length)
        num_blocks += request.num_cacheable_blocks
        num_tokens += request.input_length
    found.num_blocks = len(cached)
    found.set_rates(num_blocks, num_tokens)
    return found
