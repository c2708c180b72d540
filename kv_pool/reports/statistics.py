"""`PoolStatistics`: the counts, shares and times of a pool at one moment."""

import msgspec

from kv_pool.contiguous.fragmentation import (
    get_fragmentation_rate,
    get_largest_run_loss,
    get_unusable_share,
)
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.metrics.latency import CallLatency
from kv_pool.reports.block_states import BlockState, count_states, list_free_runs, read_states


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool holds and has done. All of one moment, but for the latencies.

        used_blocks + free_blocks == total_blocks
        cached_free_blocks <= free_blocks

    None where the face of the pool does not count it: a `KVCacheManager` times no calls, and vLLM's scheduler
    keeps its requests to itself.

    Attributes:
        total_blocks: the null block not counted.
        cached_free_blocks: free blocks that can still be hit, or whose reuse is waited for.
        fixed_blocks: in use, and held where they are: pinned, or by a transfer or an open plan.
        utilization: share of the blocks that is in use, 0 to 1.
        fragmentation_rate: share of the possible runs that is lost to scattering, 0 to 1: of runs of
            `run_length`, or of the largest power of two that fewer free blocks allow. 0 if they are in one
            piece.
        unusable_share: U(run_length), share of the free blocks that cannot serve a run of it, 0 to 1.
        largest_run_loss: share of the free blocks outside the largest free run, 0 to 1; harsh.
        epoch: how many times ids have been exchanged.
        evicted_blocks: how many cached blocks can no longer be hit, so far.
        queued_events: events about the cache that nobody has taken yet.
        pinned_blocks: pinned by the user, free or in use; of a manager, what counts against its limit.
        reserved_blocks: blocks that some requests leave free: see `GPUKVPool`; a manager's watermark.
        moved_blocks: how many blocks have changed their id so far, those moved aside counted as well.
        evicted_sequences: how many sequences have lost their blocks to others so far, or by `evict`.
        looked_up_blocks, hit_blocks: asked of `claim_prefix` so far, and found.
        taken_events: by kind, those that were taken from the pool so far.
        allocation: of `allocate` and `try_allocate`, from the call to the answer, waiting included.
        freeing: of `free`, `free_many` and `free_sequence`.
    """

    total_blocks: int
    used_blocks: int
    free_blocks: int
    cached_free_blocks: int
    fixed_blocks: int
    block_size: int
    utilization: float
    fragmentation_rate: float
    unusable_share: float
    run_length: int
    largest_free_run: int
    largest_run_loss: float
    epoch: int
    evicted_blocks: int
    queued_events: int
    pinned_blocks: int = 0
    reserved_blocks: int = 0
    moved_blocks: int = 0
    num_sequences: int | None = None
    evicted_sequences: int | None = None
    looked_up_blocks: int | None = None
    hit_blocks: int | None = None
    taken_events: dict[str, int] | None = None
    allocation: CallLatency | None = None
    freeing: CallLatency | None = None


def read_statistics(pool: BlockPoolCore, *, block_size: int, run_length: int) -> PoolStatistics:
    """Return what the block pool itself knows; the face adds its own counts. O(number of blocks)."""
    states = read_states(pool)
    counts = count_states(states)
    run_lengths = list_free_runs(states)
    total_blocks = len(states) - 1
    used_blocks = counts[BlockState.IN_USE] + counts[BlockState.PINNED]
    return PoolStatistics(
        total_blocks=total_blocks,
        used_blocks=used_blocks,
        free_blocks=total_blocks - used_blocks,
        cached_free_blocks=counts[BlockState.CACHED],
        fixed_blocks=counts[BlockState.PINNED],
        block_size=block_size,
        utilization=used_blocks / total_blocks if total_blocks else 0.0,
        fragmentation_rate=get_fragmentation_rate(run_lengths, run_length),
        unusable_share=get_unusable_share(run_lengths, run_length),
        run_length=run_length,
        largest_free_run=max(run_lengths, default=0),
        largest_run_loss=get_largest_run_loss(run_lengths),
        epoch=pool.epoch,
        evicted_blocks=pool.num_evictions,
        queued_events=len(pool.kv_event_queue),
    )


def read_fragmentation_rate(pool: BlockPoolCore, run_length: int) -> float:
    """Return `PoolStatistics.fragmentation_rate` alone. O(number of blocks)."""
    return get_fragmentation_rate(list_free_runs(read_states(pool)), run_length)
