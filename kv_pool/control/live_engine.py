"""The pools that a live replay can run on: a `GPUKVPool`, or a `KVCacheManager`."""

import threading
from collections.abc import Callable
from typing import Protocol

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.control.settings_pool import make_pool
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import PoolExhaustedError
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.preemption import find_victim
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.storage.block_storage import BlockStorage

OnEvicted = Callable[[str], object]


class LiveEngine(Protocol):
    """The blocks of requests, as `LiveReplay` uses them; called with the pool's lock held.

    Attributes:
        pool: for `ControlServer`, `LiveNode` and `Defragmenter`.
    """

    @property
    def pool(self) -> GPUKVPool | ControlledManager: ...
    @property
    def block_pool(self) -> BlockPoolCore: ...

    def get_free_blocks(self) -> int:
        """Count the blocks that a request can take."""

    def admit(self, request: ReplayRequest, num_blocks: int) -> tuple[int, list[int]] | None:
        """Give a request blocks for its tokens.

        Returns:
            How many blocks are hits, and the ids of the others; None if there is no room, and nothing has
            changed.
        """

    def grow(self, request: ReplayRequest, num_tokens: int, num_blocks: int) -> list[int] | None:
        """Add `num_blocks` blocks, for `num_tokens` more tokens; evict other requests where there is no room.

        Returns:
            The ids of these blocks; None while a migration holds the blocks that could be evicted.
        """

    def cache(self, request: ReplayRequest, tells_tokens: bool) -> None:
        """Let the request's full blocks be found."""

    def list_ids(self, request: ReplayRequest) -> list[int]:
        """List the ids of the request's blocks, head first."""

    def finish(self, request: ReplayRequest) -> None:
        """Give the request's blocks back."""

    def take_over(self, request: ReplayRequest) -> None:
        """The request has come from another node, with its blocks."""

    def give_up(self, request_id: str) -> None:
        """The request is at another node now."""

    def take_events(self) -> list[KVCacheEvent]:
        """Return what has happened to cached blocks since the last call."""


class PoolEngine:
    """Requests as sequences of a `GPUKVPool`, by number."""

    def __init__(
        self,
        settings: ServeSettings,
        storage: BlockStorage | None,
        on_evicted: OnEvicted,
        *,
        enable_events: bool,
    ) -> None:
        self.pool = make_pool(
            settings,
            storage=storage,
            on_evicted=lambda sequence_id, block_ids: on_evicted(str(sequence_id)),
            enable_kv_cache_events=enable_events,
        )
        self.block_pool: BlockPoolCore = self.pool.block_pool

    def get_free_blocks(self) -> int:
        return self.pool.get_free_blocks()

    def admit(self, request: ReplayRequest, num_blocks: int) -> tuple[int, list[int]] | None:
        sequence_id = int(request.request_id)
        num_hashes = min(len(request.block_hashes), request.max_hit_tokens // self.pool.block_size)
        num_hits = len(self.pool.claim_prefix(sequence_id, request.block_hashes[:num_hashes]))
        return num_hits, self.pool.allocate(BlockAllocationRequest(num_blocks - num_hits, sequence_id))

    def grow(self, request: ReplayRequest, num_tokens: int, num_blocks: int) -> list[int] | None:
        try:
            return self.pool.allocate(BlockAllocationRequest(num_blocks, int(request.request_id)))
        except PoolExhaustedError:
            if not self.block_pool.holds.list_fixed_ids():
                raise
            return None

    def cache(self, request: ReplayRequest, tells_tokens: bool) -> None:
        token_ids = request.all_token_ids if tells_tokens else None
        self.pool.cache_prefix(int(request.request_id), request.block_hashes, token_ids)

    def list_ids(self, request: ReplayRequest) -> list[int]:
        return self.pool.blocks_of(int(request.request_id))

    def finish(self, request: ReplayRequest) -> None:
        self.pool.free_sequence(int(request.request_id))

    def take_over(self, request: ReplayRequest) -> None:
        pass

    def give_up(self, request_id: str) -> None:
        pass

    def take_events(self) -> list[KVCacheEvent]:
        return self.pool.take_events()


class ManagerEngine:
    """Requests of a `KVCacheManager` over a pool with runs.

    Where no block is free for a token, another request gives its blocks up: the one that was admitted last.
    """

    def __init__(
        self,
        settings: ServeSettings,
        storage: BlockStorage | None,
        on_evicted: OnEvicted,
        *,
        enable_events: bool,
    ) -> None:
        pool = RunBlockPool(
            settings.blocks + 1,
            True,
            settings.block_size,
            enable_kv_cache_events=enable_events,
            dense_events=True,
        )
        self.manager = KVCacheManager(pool)
        self.block_pool: BlockPoolCore = pool
        self._requests: dict[str, ReplayRequest] = {}
        self._on_evicted = on_evicted
        self.pool = ControlledManager(
            self.manager,
            storage=storage,
            copy=_copy_nothing if storage is None else None,
            lock=threading.RLock(),
            on_moved=_remap_nothing,
            requests=self._requests,
            run_length=settings.run_length,
        )

    def get_free_blocks(self) -> int:
        return self.manager.get_num_free_blocks()

    def admit(self, request: ReplayRequest, num_blocks: int) -> tuple[int, list[int]] | None:
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        num_new_tokens = request.num_tokens - prefix.num_tokens
        if self.manager.allocate_slots(request, num_new_tokens, prefix, delay_cache_blocks=True) is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self._requests[request.request_id] = request
        num_hits = len(prefix.blocks[0])
        return num_hits, self.list_ids(request)[num_hits:]

    def grow(self, request: ReplayRequest, num_tokens: int, num_blocks: int) -> list[int] | None:
        while True:
            added = self.manager.allocate_slots(request, num_tokens, delay_cache_blocks=True)
            if added is not None:
                return [block.block_id for block in added[0]]
            others = [name for name in self.manager.list_request_ids() if name != request.request_id]
            if not others:
                if not self.block_pool.holds.list_fixed_ids():
                    raise PoolExhaustedError(
                        f"request {request.request_id} asked for {num_blocks} blocks, "
                        f"{self.get_free_blocks()} are free, and no other request has any"
                    )
                return None
            evicted = self._requests[find_victim(others)]
            self.finish(evicted)
            self._on_evicted(evicted.request_id)

    def cache(self, request: ReplayRequest, tells_tokens: bool) -> None:
        self.manager.cache_blocks(request, request.num_tokens)

    def list_ids(self, request: ReplayRequest) -> list[int]:
        return self.manager.get_block_ids(request.request_id)

    def finish(self, request: ReplayRequest) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        del self._requests[request.request_id]

    def take_over(self, request: ReplayRequest) -> None:
        request.num_computed_tokens = request.num_tokens
        self._requests[request.request_id] = request

    def give_up(self, request_id: str) -> None:
        del self._requests[request_id]

    def take_events(self) -> list[KVCacheEvent]:
        with self.pool.lock:
            return self.manager.take_events()


def _copy_nothing(moves: object) -> None:
    """There are no bytes in the blocks."""


def _remap_nothing(relocation: object) -> None:
    """Ids are read from the manager's tables whenever they are needed."""
