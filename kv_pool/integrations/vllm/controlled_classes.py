"""`make_controlled`, `make_controlled_manager`: the classes of a vLLM engine core with a control socket."""

import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, cast

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.environment import CONTROL
from kv_pool.ids import GroupId
from kv_pool.integrations.vllm.pool_control import PoolControl, open_socket

_Method = TypeVar("_Method", bound=Callable[..., Any])


def locked(method: _Method) -> _Method:
    """Return a method that holds `self.control.lock`, which the socket's answers take, during each call."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.control.lock:
            return method(self, *args, **kwargs)

    return cast(_Method, call)


@cache
def make_controlled(pool_class: type[BlockPool]) -> type[BlockPool]:
    """Return a subclass of a release's `BlockPool` that answers commands from a thread; always the same one.

    The commands are `kv-pool stats`, `layout` and `sequences --holds`. Each vLLM call that changes the pool
    takes a lock, so that answers are consistent.
    """

    class ControlledBlockPool(pool_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.control = PoolControl(self)
            super().__init__(*args, **kwargs)
            open_socket(self, self.control, os.environ.get(CONTROL, ""))

        get_new_blocks = locked(pool_class.get_new_blocks)
        free_blocks = locked(pool_class.free_blocks)
        cache_partial_block = locked(pool_class.cache_partial_block)
        evict_blocks = locked(pool_class.evict_blocks)
        reset_prefix_cache = locked(pool_class.reset_prefix_cache)

        @locked
        def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
            super().touch(blocks)
            self.control.note_touched(blocks)

        @locked
        def cache_full_blocks(
            self,
            request: Any,
            blocks: Sequence[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: GroupId,
            block_mask: Sequence[Any] | None = None,
        ) -> None:
            super().cache_full_blocks(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
            )
            self.control.note_cached(request, num_cached_blocks, num_full_blocks, block_size)

        @locked
        def take_events(self) -> list[KVCacheEvent]:
            events: list[KVCacheEvent] = super().take_events()
            self.control.note_taken_events(events)
            return events

    return ControlledBlockPool


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
