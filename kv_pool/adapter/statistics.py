"""`PoolStatistics`: the counts, shares and times of a pool at one moment."""

import msgspec

from kv_pool.metrics.latency import CallLatency


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool holds and has done. All of one moment, but for the latencies.

        used_blocks + free_blocks == total_blocks
        cached_free_blocks <= free_blocks

    Attributes:
        total_blocks: the null block not counted.
        cached_free_blocks: free blocks that can still be hit, or that somebody still reads.
        reserved_blocks: see `GPUKVPool`.
        utilization: share of the blocks that is in use, 0 to 1.
        fragmentation_rate: share of the free blocks that cannot serve a run of `run_length`, 0 to 1.
        largest_run_loss: share of the free blocks outside the largest free run, 0 to 1; harsh.
        epoch: how many times ids have been exchanged.
        moved_blocks: how many blocks have changed their id so far, those moved aside counted as well.
        evicted_sequences: how many sequences have lost their blocks to others so far, or by `evict`.
        evicted_blocks: how many cached blocks can no longer be hit, so far.
        looked_up_blocks, hit_blocks: asked of `claim_prefix` so far, and found.
        allocation: of `allocate` and `try_allocate`, from the call to the answer, waiting included.
        freeing: of `free`, `free_many` and `free_sequence`.
    """

    total_blocks: int
    used_blocks: int
    free_blocks: int
    cached_free_blocks: int
    pinned_blocks: int
    reserved_blocks: int
    num_sequences: int
    block_size: int
    utilization: float
    fragmentation_rate: float
    run_length: int
    largest_free_run: int
    largest_run_loss: float
    epoch: int
    moved_blocks: int
    evicted_sequences: int
    evicted_blocks: int
    looked_up_blocks: int
    hit_blocks: int
    allocation: CallLatency
    freeing: CallLatency
