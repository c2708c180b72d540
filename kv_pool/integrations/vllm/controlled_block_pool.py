"""`make_controlled`: the pool of a vLLM engine core with a control socket."""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.environment import CONTROL
from kv_pool.ids import GroupId
from kv_pool.integrations.vllm.locked_calls import locked
from kv_pool.integrations.vllm.pool_control import PoolControl, open_socket


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
