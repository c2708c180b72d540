"""`make_controlled_manager`: level `manager` with a control socket."""

from functools import cache, wraps
from typing import Any

from kv_pool.integrations.vllm.controlled_block_pool import make_controlled
from kv_pool.integrations.vllm.locked_calls import locked


@cache
def make_controlled_manager(manager_class: Any) -> Any:
    """Return a subclass of a manager whose pool answers commands from a thread; always the same one.

    The answers of `kv-pool sequences` name the requests and their blocks. Each vLLM call that changes block
    tables or the pool takes the pool's lock, so that answers are consistent.
    """

    class ControlledKVCacheManager(manager_class):  # type: ignore[misc]
        pool_class = make_controlled(manager_class.pool_class)

        # `__new__` reads the options from the signature.
        @wraps(manager_class.__init__)  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.control = self.block_pool.control
            self.control.note_manager(self)

        @locked
        def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
            super().record_prefix_cache_stats(request, num_hits)
            if not request.num_preemptions:  # vLLM's hit rate leaves out requests that return
                block_size = self.block_pool.hash_block_size
                self.control.note_lookup(request.num_tokens // block_size, num_hits // block_size)

        get_computed_blocks = locked(manager_class.get_computed_blocks)
        allocate_slots = locked(manager_class.allocate_slots)
        cache_blocks = locked(manager_class.cache_blocks)
        evict_blocks = locked(manager_class.evict_blocks)
        reset_prefix_cache = locked(manager_class.reset_prefix_cache)
        take_events = locked(manager_class.take_events)
        free = locked(manager_class.free)
        pop_blocks_for_free = locked(manager_class.pop_blocks_for_free)
        remove_skipped_blocks = locked(manager_class.remove_skipped_blocks)
        take_kv_cache_block_copies = locked(manager_class.take_kv_cache_block_copies)

    return ControlledKVCacheManager
