"""Requests of a trace that benchmarks run through a manager, one after the other."""

import gc
import time

from kv_pool import BlockPool, KVCacheManager
from kv_pool.replay import ReplaySettings
from kv_pool.replay.replay_request import ReplayRequest


def read_fitting_requests(
    trace: str, num_blocks: int, block_size: int, limit: int | None
) -> list[ReplayRequest]:
    """Return the requests of a trace that fit into a pool of `num_blocks` blocks."""
    settings = ReplaySettings(trace, num_blocks, limit=limit)
    requests = settings.read_requests(settings.open_trace(), block_size)
    return [request for request in requests if len(request.block_hashes) < num_blocks]


def run_requests(requests: list[ReplayRequest], pool: BlockPool) -> tuple[float, int]:
    """Look up, allocate and free each request in turn.

    Returns:
        nanoseconds of processor time per prompt block, and the number of hit blocks.
    """
    manager = KVCacheManager(pool)
    num_blocks = num_hits = 0
    gc.collect()
    gc.disable()
    start = time.process_time_ns()
    for request in requests:
        prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
        manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        request.num_computed_tokens = request.num_tokens
        num_hits += prefix.num_tokens // pool.hash_block_size
        num_blocks += len(request.block_hashes)
        manager.free(request)
        request.num_computed_tokens = 0
    elapsed = time.process_time_ns() - start
    gc.enable()
    return elapsed / num_blocks, num_hits
