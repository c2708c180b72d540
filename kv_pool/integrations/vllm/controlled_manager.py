"""`ControlledKVCacheManager`: level `manager` with a control socket. Imports vLLM; see `plugin`."""

from typing import Any

from kv_pool.integrations.vllm.controlled_block_pool import ControlledBlockPool
from kv_pool.integrations.vllm.locked_calls import locked
from kv_pool.integrations.vllm.manager_classes import KVCacheManager
from kv_pool.integrations.vllm.pool_control import PoolControl


class ControlledKVCacheManager(KVCacheManager):
    """A `KVCacheManager` whose pool answers `kv-pool stats`, `layout` and `sequences` from a thread.

    Each vLLM call that changes tables or the pool takes the pool's lock, so that answers are consistent.
    """

    pool_class = ControlledBlockPool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.control.note_manager(self)

    @property
    def control(self) -> PoolControl:
        """The answers of the pool's control socket, and the lock."""
        pool = self.block_pool
        assert isinstance(pool, ControlledBlockPool)
        return pool.control

    get_computed_blocks = locked(KVCacheManager.get_computed_blocks)
    allocate_slots = locked(KVCacheManager.allocate_slots)
    cache_blocks = locked(KVCacheManager.cache_blocks)
    evict_blocks = locked(KVCacheManager.evict_blocks)
    reset_prefix_cache = locked(KVCacheManager.reset_prefix_cache)
    take_events = locked(KVCacheManager.take_events)
    free = locked(KVCacheManager.free)
    pop_blocks_for_free = locked(KVCacheManager.pop_blocks_for_free)
    remove_skipped_blocks = locked(KVCacheManager.remove_skipped_blocks)
    take_kv_cache_block_copies = locked(KVCacheManager.take_kv_cache_block_copies)
