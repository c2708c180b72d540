"""`PoolStatistics`: the counts, shares and latencies of a pool at one moment."""

from typing import Any

import msgspec

from kv_pool.contiguous.fragmentation import (
    get_fragmentation_rate,
    get_largest_run_loss,
    get_unusable_share,
)
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.latency import CallLatency
from kv_pool.reports.layout import BlockState, list_free_runs, read_states
from kv_pool.reports.live_curve import LiveCurveReport, read_live_curve


class PoolCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a pool that are known without a scan of its blocks. Those that it does not keep are None.

        used_blocks + free_blocks == total_blocks

    Attributes:
        total_blocks: number of blocks, without the null block.
        run_length: length of the runs that the fragmentation rate counts.
        epoch: number of id swaps so far.
        queued_events: cache events that have not been taken yet.
        pinned_blocks: blocks pinned by the user, free or in use; for a manager, those counted against its
            limit.
        reserved_blocks: blocks that some requests must leave free: see `GPUKVPool`; a manager's watermark.
        moved_blocks: number of id changes of blocks so far, temporary moves included.
        evicted_sequences: number of sequences evicted so far, for other sequences or by `evict`.
    """

    total_blocks: int
    used_blocks: int
    free_blocks: int
    block_size: int
    run_length: int
    epoch: int
    queued_events: int
    pinned_blocks: int = 0
    reserved_blocks: int = 0
    moved_blocks: int = 0
    num_sequences: int | None = None
    evicted_sequences: int | None = None


class PoolStatistics(PoolCounts, frozen=True, kw_only=True):
    """The statistics of a pool. All values are of one moment, except the latencies.

        cached_free_blocks <= free_blocks

    Values that the pool does not count are None: a `KVCacheManager` times no calls, and vLLM's scheduler does
    not expose its requests.

    Attributes:
        cached_free_blocks: free blocks that can still be hit or have a reuse watcher.
        immovable_blocks: blocks in use that may not be moved: pinned, or held by a transfer or an open plan.
        utilization: share of the blocks that is in use, 0 to 1.
        fragmentation_rate: share of the possible free runs that is lost to scattering, 0 to 1. Counts runs of
            `run_length` blocks, or with fewer free blocks, of the largest power of two that fits. 0 if the
            free blocks are one run.
        unusable_share: U(run_length), the share of the free blocks that cannot serve such a run, 0 to 1.
        largest_run_loss: share of the free blocks outside the largest free run, 0 to 1; a strict measure.
        evicted_blocks: number of cache keys evicted so far.
        looked_up_blocks, hit_blocks: blocks that `claim_prefix` has looked up and found so far; under vLLM,
            full blocks of the prompts of admitted requests, and those of them that were cached.
        taken_events: number of events taken from the pool so far, by kind.
        allocation: latency of `allocate` and `try_allocate`, waiting included.
        freeing: latency of `free`, `free_many` and `free_sequence`.
        live_curve: hit rates at other capacities, of a pool with `live_curve=True`.
    """

    cached_free_blocks: int
    immovable_blocks: int
    utilization: float
    fragmentation_rate: float
    unusable_share: float
    largest_free_run: int
    largest_run_loss: float
    evicted_blocks: int
    looked_up_blocks: int | None = None
    hit_blocks: int | None = None
    taken_events: dict[str, int] | None = None
    allocation: CallLatency | None = None
    freeing: CallLatency | None = None
    live_curve: LiveCurveReport | None = None


def count_blocks(pool: BlockPoolCore) -> dict[str, Any]:
    """Return the `PoolCounts` that a block pool itself keeps."""
    total_blocks, free_blocks = pool.num_gpu_blocks - 1, pool.free_block_queue.num_free_blocks
    return {
        "total_blocks": total_blocks,
        "used_blocks": total_blocks - free_blocks,
        "free_blocks": free_blocks,
        "epoch": pool.epoch,
        "queued_events": len(pool.kv_event_queue),
    }


def read_statistics(pool: BlockPoolCore, *, run_length: int, **counts: Any) -> PoolStatistics:
    """Return the statistics of a block pool. O(number of blocks).

    Args:
        counts: the fields that the block pool does not count.
    """
    states = read_states(pool)
    run_lengths = list_free_runs(states)
    blocks = count_blocks(pool)
    return PoolStatistics(
        **blocks,
        **counts,
        cached_free_blocks=states.count(BlockState.CACHED),
        immovable_blocks=states.count(BlockState.IMMOVABLE),
        utilization=blocks["used_blocks"] / blocks["total_blocks"] if blocks["total_blocks"] else 0.0,
        fragmentation_rate=get_fragmentation_rate(run_lengths, run_length),
        unusable_share=get_unusable_share(run_lengths, run_length),
        run_length=run_length,
        largest_free_run=max(run_lengths, default=0),
        largest_run_loss=get_largest_run_loss(run_lengths),
        evicted_blocks=pool.num_evictions,
        live_curve=None if pool.live_curve is None else read_live_curve(pool.live_curve),
    )
