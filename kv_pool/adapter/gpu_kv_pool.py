"""`GPUKVPool`: `KVPoolProtocol` over a block pool that indexes its free runs. Thread-safe.

Its methods by subject, each file a base class of the next: `pool_state.py`, `queries.py`, `freeing.py`,
`allocating.py`, `moving.py`.
"""

from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from kv_pool.adapter.moving import PoolMoving
from kv_pool.core.arguments import check_type
from kv_pool.core.identity import refuse_copy

if TYPE_CHECKING:
    from os import PathLike

    from kv_pool.events.resident_state import ResidentState
    from kv_pool.storage.block_layout import BlockLayout
    from kv_pool.tiers.dump.dump_reader import PoolDumpHeader
    from kv_pool.tiers.pool_dump import LoadedPool


class GPUKVPool(PoolMoving):
    """A pool of the blocks of one device; callers allocate blocks by id, for sequences.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> pool = GPUKVPool(total_blocks=100, block_size=16)
        >>> pool.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=1))
        [4, 5, 6]
        >>> pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=1)), pool.blocks_of(1)
        ([7], [4, 5, 6, 7])
        >>> pool.fork(1, 2)
        [4, 5, 6, 7]
        >>> pool.free_sequence(1), pool.get_free_blocks(), pool.get_block_info(4).sequence_id
        (0, 96, 2)

    Block ids run from 1 to `total_blocks`. Block 0 is the null block, so a storage needs `total_blocks` + 1.

    A full pool evicts sequences that have no pinned block, the least recently used first, see `allocate`.
    With `eviction_policy=None` it refuses the request. Using an evicted sequence raises EvictedSequenceError.

    Args:
        block_size: tokens per block.
        device_id: id of this pool's device; distinct among connected pools.
        storage: the bytes of the blocks. Without a storage the pool cannot migrate blocks, and if the blocks
            have bytes at all, `on_moved` has to copy them, all moves at once like `BlockStorage.apply_moves`.
        block_bytes: bytes per block for `AllocationResult`; ignored if there is a storage.
        reserved_blocks: free blocks that requests of priority 0 cannot take.
        max_pinned_blocks: how many blocks may be pinned at once; None for all, also after `grow`.
        eviction_policy: which sequences to evict for a request that finds too few free blocks: by default the
            least recently used one of the lowest priority first. None: evict no sequence.
        on_evicted: called with a sequence's id and its block ids before the sequence loses them. The pool is
            locked: do not wait for another thread in it. Without this callback, see `take_evictions`.
        on_moved: called with a `Relocation` when ids have changed, before any old id can be taken. The pool
            is locked. Without it only `defragment` and `shrink` change ids.
        migration_hook: called with the request that is about to be refused and the number of blocks that are
            missing (in `allocate_many`, for the whole batch). The pool is not locked. The hook may free or
            migrate blocks; then the pool retries the request, or the batch, once. See `MigrationHook`.
        migration_threshold: in blocks. Call the migration hook also before a request would leave fewer blocks
            free than this, and so before evicting a sequence for it.
        run_length: in blocks; the run length that `get_fragmentation_rate` measures.
        placement: how to choose runs: "buddy", "first_fit" or "oldest", see `RunBlockPool`.
        enable_caching: freed blocks keep their hashes until they are reused.
        enable_kv_cache_events: record which blocks are cached and evicted, for `take_events`.
        policy: the cache policy that chooses the cached blocks to evict, see `BlockPool.open_policy`. None:
            the least recently freed ones. With a policy, priorities have no effect on the cache, and runs are
            only looked for where they are required.
        live_curve: estimate hit rates at other capacities, for `get_statistics`.
        clock: returns seconds, for `last_access_time` and the times in results.

    Attributes:
        block_pool: the underlying pool, for its prefix cache, holds and invariants. Blocks taken from it
            directly belong to no sequence; they move like other blocks unless they are held
            (`block_pool.hold`). Calls on it are not locked.
        lock: reentrant; held during each call. Hold it to make several calls atomic.
        storage: as given.
        holdings: for other parts of the adapter; use it only with the lock held.

    Processes: a child of `fork()` has a copy of the pool, which does not follow the original's later calls.
    If another thread was in a call at the fork, the copy is incomplete, and its calls raise ForkedPoolError.

    Priorities: requests of priority 1 and 2 may use the reserve. A request never evicts a sequence of higher
    priority. The cache keeps blocks that a sequence of higher priority freed for longer.

    While a migration has frozen a sequence, its blocks cannot be added to, freed, shared or pinned: such
    calls raise FrozenSequenceError, an `InvalidArgumentError`. It is neither evicted nor moved by compaction.
    """

    def __repr__(self) -> str:
        num_free = self.get_free_blocks()
        return (
            f"<{type(self).__name__} of {self.total_blocks} blocks on device {self.device_id}: "
            f"{num_free} free, {self.total_blocks - num_free} in use by {len(self._holders)} sequences, "
            f"{len(self._pins)} pinned>"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    def dump(
        self,
        path: "str | PathLike[str]",
        *,
        layout: "BlockLayout | None" = None,
        stream_state: "ResidentState | None" = None,
    ) -> "PoolDumpHeader":
        """Write the prefix cache to a file, with its bytes if there is a storage. See `tiers.pool_dump`.

        The pool is locked meanwhile. The file does not record which sequences hold which blocks.
        """
        from kv_pool.tiers.pool_dump import dump_pool

        with self.lock:
            return dump_pool(
                path, self.block_pool, storage=self.storage, layout=layout, stream_state=stream_state
            )

    def load(self, path: "str | PathLike[str]", *, layout: "BlockLayout | None" = None) -> "LoadedPool":
        """Load the prefix cache from a file of `dump`, before the first sequence. See `tiers.pool_dump`."""
        from kv_pool.tiers.pool_dump import load_pool

        with self.lock:
            return load_pool(path, self.block_pool, storage=self.storage, layout=layout)

    def connect(self, peer: "GPUKVPool") -> None:
        """Allow blocks to migrate between this pool and another pool of this process, in both directions.

        Raises:
            InvalidArgumentError: a device id is in use already, or block sizes differ. Nothing has changed.
        """
        check_type("peer", peer, GPUKVPool)
        self._routes.connect(peer._routes)
