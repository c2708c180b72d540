"""`ControlledBlockPool`: the pool of a vLLM engine core with a control socket. Imports vLLM; see `plugin`."""

import os
from typing import Any

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.integrations.vllm.locked_calls import locked
from kv_pool.integrations.vllm.pool_classes import BlockPool
from kv_pool.integrations.vllm.pool_control import PoolControl, open_socket


class ControlledBlockPool(BlockPool):
    """A `BlockPool` that answers `kv-pool stats`, `layout` and `sequences --holds` from a thread.

    Each vLLM call that changes the pool takes a lock, so that answers are consistent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.control = PoolControl(self)
        super().__init__(*args, **kwargs)
        open_socket(self, self.control, os.environ.get("KV_POOL_VLLM_CONTROL", ""))

    get_new_blocks = locked(BlockPool.get_new_blocks)
    touch = locked(BlockPool.touch)
    free_blocks = locked(BlockPool.free_blocks)
    cache_full_blocks = locked(BlockPool.cache_full_blocks)
    cache_partial_block = locked(BlockPool.cache_partial_block)
    evict_blocks = locked(BlockPool.evict_blocks)
    reset_prefix_cache = locked(BlockPool.reset_prefix_cache)

    @locked
    def take_events(self) -> list[KVCacheEvent]:
        events = super().take_events()
        self.control.note_taken_events(events)
        return events
