"""`RunPoolState`: a block pool with the index of its free runs; base of the modules that change both."""

from collections.abc import Callable
from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.contiguous.ages import EMPTY, RETAINED
from kv_pool.contiguous.run_index import PLACEMENTS, FreeRunIndex
from kv_pool.core.clock import read_clock
from kv_pool.core.eviction_order import DEFAULT_BAND
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.observer import BlockObserver
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import (
    CachePolicyError,
    InvalidArgumentError,
    KVPoolError,
)

DEFAULT_EARLY_SHARE = 0.2


# Each call first changes the pool, all or nothing, and then the index, which can be rebuilt from the pool. An
# interrupted call therefore ends with a rebuild.
@mypyc_attr(allow_interpreted_subclasses=True)
class RunPoolState(BlockPoolCore):
    """A pool that rebuilds its index after an interrupted call."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: BlockObserver | None = None,
        num_hash_lookahead_tokens: int = 0,
        medium: str = MEDIUM_GPU,
        *,
        event_types: KVEventTypes = KV_EVENT_TYPES,
        use_int_block_hashes: bool = True,
        dense_events: bool = False,
        clock: Callable[[], float] = read_clock,
        early_share: float = DEFAULT_EARLY_SHARE,
        placement: str = "oldest",
        policy: Any = None,
        live_curve: bool = False,
    ) -> None:
        if placement not in PLACEMENTS:
            raise InvalidArgumentError(f"placement is {placement!r}; it is one of {', '.join(PLACEMENTS)}")
        if not 0 <= early_share <= 1:
            raise InvalidArgumentError(f"early_share is {early_share}; it is a share of the queue, 0 to 1")
        super().__init__(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
            medium,
            event_types=event_types,
            use_int_block_hashes=use_int_block_hashes,
            dense_events=dense_events,
            clock=clock,
            live_curve=live_curve,
        )
        self.early_share: float = early_share
        self.run_index: FreeRunIndex = FreeRunIndex(self.num_gpu_blocks, early_share, placement)
        self.rebuild_index()
        if policy is not None:
            self.open_policy(policy)

    def rebuild_index(self) -> None:
        """Rebuild the index from the free queue, such as after a direct change of the queue. O(blocks)."""
        self.run_index.is_stale = True  # until the rebuild is complete
        if self._unfinished:
            self._recover()
        free = [
            block for block in self.free_block_queue.get_all_free_blocks() if block.owner is self.block_owner
        ]
        has_content = [
            (block.block_hash is not None and self.enable_caching) or block.block_id in self.reuse_watchers
            for block in free
        ]
        self.run_index.rebuild(self.num_gpu_blocks, free, has_content)
        if self.eviction_order.is_open:
            num_ordered = 0  # blocks of the default band and higher ones, which are last in the queue
            for band, blocks in self.eviction_order.list_bands():
                ours = [block for block in blocks if block.owner is self.block_owner]
                if band >= DEFAULT_BAND:
                    num_ordered += len(ours)
                if band > DEFAULT_BAND:
                    self.run_index.note_moved(ours, RETAINED)
            self.run_index.note_moved(free[: len(free) - num_ordered], EMPTY + 1)
        self.run_index.is_stale = False

    def _follow(self, error: BaseException, was_stale: bool) -> None:
        """Make the index, which is marked as stale, consistent with the pool after a call that raised."""
        if (
            isinstance(error, KVPoolError)
            and not isinstance(error, CachePolicyError)
            and not was_stale
            and self.metrics_collector is None
            and self.lower_tiers is None
            and not self.reuse_watchers
        ):
            self.run_index.is_stale = False
            return  # a refusal has changed nothing
        self.rebuild_index()
        if self._band_policy is not None and not isinstance(error, KVPoolError):
            self._band_policy.recover()
