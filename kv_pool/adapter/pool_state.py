"""`GPUPoolState`: the parts of a `GPUKVPool`, and the repair after an interrupted call."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kv_pool.adapter.allocation import Allocation, check_priority
from kv_pool.adapter.holdings import Holdings
from kv_pool.adapter.migration_routes import MigrationRoutes
from kv_pool.adapter.pins import Pins
from kv_pool.adapter.pool_lock import PoolLock
from kv_pool.adapter.victims import EvictionPolicy, LRUEviction, Victims
from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import as_count, as_int
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, BlockMove, SequenceId
from kv_pool.metrics.latency import LatencyWindow
from kv_pool.protocol import NORMAL, BlockAllocationRequest, KVPoolProtocol

if TYPE_CHECKING:
    from kv_pool.core.cache_policy import CachePolicy
    from kv_pool.storage.block_storage import BlockStorage


class GPUPoolState(KVPoolProtocol):
    """The base class of `GPUKVPool` that creates its parts; see there."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        device_id: int = 0,
        storage: "BlockStorage | None" = None,
        block_bytes: int = 0,
        reserved_blocks: int = 0,
        max_pinned_blocks: int | None = None,
        eviction_policy: EvictionPolicy | None = LRUEviction(),  # noqa: B008 (stateless)
        on_evicted: Callable[[SequenceId, list[BlockId]], object] | None = None,
        on_moved: Callable[[Relocation], object] | None = None,
        migration_hook: Callable[[BlockAllocationRequest, int], object] | None = None,
        migration_threshold: int = 0,
        run_length: int = DEFAULT_RUN_LENGTH,
        placement: str = "buddy",
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        policy: "str | Callable[[], CachePolicy] | None" = None,
        live_curve: bool = False,
    ) -> None:
        # Compaction plans in NumPy, whose first import takes 100 ms: too long with the lock held.
        import numpy  # noqa: F401

        total_blocks = as_int("total_blocks", total_blocks)
        block_size = as_int("block_size", block_size)
        device_id = as_int("device_id", device_id)
        block_bytes = as_count("block_bytes", block_bytes)
        reserved_blocks = as_int("reserved_blocks", reserved_blocks)
        migration_threshold = as_int("migration_threshold", migration_threshold)
        run_length = as_count("run_length", run_length, 1)
        if max_pinned_blocks is not None:
            max_pinned_blocks = as_count("max_pinned_blocks", max_pinned_blocks)
        if total_blocks < 1:
            raise InvalidArgumentError(f"total_blocks is {total_blocks}; a pool has at least 1 block")
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; a block has at least 1 token")
        if not 0 <= reserved_blocks <= total_blocks:
            raise InvalidArgumentError(f"{reserved_blocks} of {total_blocks} blocks cannot be reserved")
        if not 0 <= migration_threshold <= total_blocks or (migration_threshold and migration_hook is None):
            raise InvalidArgumentError(
                f"migration_threshold is {migration_threshold} of {total_blocks} blocks; it is 0 to all of "
                f"them, and needs a migration_hook, such as MigrationHook"
            )
        if storage is not None and storage.num_blocks <= total_blocks:
            raise InvalidArgumentError(
                f"the storage has blocks 0 to {storage.num_blocks - 1}, the pool 1 to {total_blocks}"
            )
        self.block_size = block_size
        self.device_id = device_id
        self.block_bytes = block_bytes if storage is None else storage.block_bytes
        self.reserved_blocks = reserved_blocks
        self.migration_threshold = migration_threshold
        self.run_length = run_length
        self.block_pool = RunBlockPool(
            total_blocks + 1,
            enable_caching,
            block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            dense_events=True,
            clock=clock,
            placement=placement,
            policy=policy,
            live_curve=live_curve,
        )
        self.storage = storage
        self._on_moved = on_moved
        self._migration_hook = migration_hook
        self._clock = clock
        self.lock = PoolLock()  # reentrant, so that callbacks may query the pool
        self._pins = Pins(self.block_pool, max_pinned_blocks)
        self.holdings = Holdings(self.block_pool, self._pins, clock, device_id)
        self._victims = Victims(self.holdings, eviction_policy, on_evicted)
        self._take = Allocation(
            self.block_pool,
            self._victims,
            self.count_available,
            self._copy_moves,
            None if on_moved is None else self._note_moved,
        ).take
        # Bound here: each attribute look-up costs a short call a noticeable share of its time.
        self._holders = self.holdings.holders
        self._hold = self.holdings.hold
        self._drop = self.holdings.drop
        self._evictions = self.holdings.evictions
        self._routes = MigrationRoutes(self)
        self._allocation_latency = LatencyWindow()
        self._freeing_latency = LatencyWindow()
        # Bound here and called inline for the same reason.
        self._number_allocation = self._allocation_latency.number_call
        self._number_freeing = self._freeing_latency.number_call
        self._num_moved_blocks = 0
        self._num_looked_up_blocks = 0
        self._num_hit_blocks = 0

    @property
    def total_blocks(self) -> int:
        """The number of blocks, without the null block."""
        return len(self.block_pool.blocks) - 1

    def repair(self) -> None:
        """Make the pool whole after a call that was interrupted. May be called again if it is interrupted.

        Every sequence keeps its blocks and pins; blocks of the interrupted call may be among them. All blocks
        that neither a sequence nor a hold has become free, and the prefix cache is empty: one
        `AllBlocksCleared`. If a compaction was interrupted, ids may have changed: read `blocks_of`.

        Do not hold the lock of a connected pool. Cost: O(blocks of the pool).
        """
        with self.lock:
            self.block_pool.is_changing = True
            self.block_pool.holds.begin_repair()  # sites of migrations may remove blocks from sequences
            self.block_pool.repair(self.holdings.repair())
            if self.holdings.retention is not None:
                self.holdings.retention.recount()
        self._routes.repair()

    def get_free_blocks(self) -> int:
        """Return how many blocks are free, including the reserve and cached blocks that are not in use."""
        self._expire_claims()
        return self.block_pool.get_num_free_blocks()

    def count_available(self, priority: int) -> int:
        """Return how many blocks a request of this priority can take; negative if the reserve is in use."""
        if type(priority) is not int:
            check_priority(priority)
        self._expire_claims()
        num_free = self.block_pool.free_block_queue.num_free_blocks
        return num_free if priority != NORMAL else num_free - self.reserved_blocks

    def get_time(self) -> float:
        """Return the time of the pool's clock in seconds."""
        return self._clock()

    # ---- internals, called with the lock held unless stated otherwise ----------------------------

    def _expire_claims(self) -> None:
        """Handle expired timers of the retention: blocks whose retention pins expired become free."""
        if self.holdings.retention is not None:
            with self.lock:
                self.holdings.retention.expire()

    def _copy_moves(self, moves: Sequence[BlockMove]) -> None:
        if self.storage is not None:
            self.storage.apply_moves(moves)

    def _note_moved(self, relocation: Relocation) -> None:
        self._num_moved_blocks += len(relocation.moves)
        self._evictions.note_moved(relocation.moves)
        if self._on_moved is not None:
            self._on_moved(relocation)
