"""The pools that a live replay can run on: a `GPUKVPool`, or a `KVCacheManager`."""

import threading
from collections.abc import Callable

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.control.serve_settings import ServeSettings, make_pool
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import PoolExhaustedError
from kv_pool.ids import BlockId, RequestId, SequenceId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.preemption import find_victim
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.storage.block_storage import BlockStorage

OnEvicted = Callable[[RequestId], object]


class PoolEngine:
    """The requests of a live replay as sequences of a `GPUKVPool`; the sequence id is the request's number.

    Call its methods with the pool's lock held.

    Attributes:
        pool: the pool that `ControlServer`, `LiveNode` and `Defragmenter` use.
    """

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
            on_evicted=lambda sequence_id, block_ids: on_evicted(RequestId(str(sequence_id))),
            enable_kv_cache_events=enable_events,
        )

    def admit(self, request: ReplayRequest, num_blocks: int) -> tuple[int, list[BlockId]] | None:
        """Allocate blocks for the tokens of a request.

        Returns:
            The number of hit blocks, and the ids of the others. None if too few blocks are free; nothing has
            changed.
        """
        sequence_id = _get_sequence_id(request)
        num_hashes = min(len(request.block_hashes), request.max_hit_tokens // self.pool.block_size)
        num_hits = len(self.pool.claim_prefix(sequence_id, request.block_hashes[:num_hashes]))
        return num_hits, self.pool.allocate(BlockAllocationRequest(num_blocks - num_hits, sequence_id))

    def grow(self, request: ReplayRequest, num_tokens: int, num_blocks: int) -> list[BlockId] | None:
        """Add `num_blocks` blocks for `num_tokens` more tokens; evict other requests if too few are free.

        Returns:
            The ids of the new blocks; None while a migration holds the blocks that could be evicted.
        """
        try:
            return self.pool.allocate(BlockAllocationRequest(num_blocks, _get_sequence_id(request)))
        except PoolExhaustedError:
            if not self.pool.block_pool.holds.list_immovable_ids():
                raise
            return None

    def cache(self, request: ReplayRequest, includes_tokens: bool) -> None:
        """Register the request's full blocks in the prefix cache."""
        token_ids = request.all_token_ids if includes_tokens else None
        self.pool.cache_prefix(_get_sequence_id(request), request.block_hashes, token_ids)

    def list_ids(self, request: ReplayRequest) -> list[BlockId]:
        """Return the ids of the request's blocks, first block first."""
        return self.pool.blocks_of(_get_sequence_id(request))

    def finish(self, request: ReplayRequest) -> None:
        """Release the request's blocks."""
        self.pool.free_sequence(_get_sequence_id(request))

    def on_arrived(self, request: ReplayRequest) -> None:
        """Add a request that has arrived from another node with its blocks."""

    def on_departed(self, request_id: RequestId) -> None:
        """Forget a request that has moved to another node."""

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of cached blocks since the last call."""
        return self.pool.take_events()


class ManagerEngine:
    """The requests of a `KVCacheManager` over a `RunBlockPool`, with the methods of `PoolEngine`.

    If no block is free for a token, the request that was admitted last is evicted.
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
            live_curve=settings.live_curve,
        )
        self.manager = KVCacheManager(pool)
        self._requests: dict[RequestId, ReplayRequest] = {}
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

    def admit(self, request: ReplayRequest, num_blocks: int) -> tuple[int, list[BlockId]] | None:
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        num_new_tokens = request.num_tokens - prefix.num_tokens
        if self.manager.allocate_slots(request, num_new_tokens, prefix, delay_cache_blocks=True) is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self._requests[request.request_id] = request
        num_hits = len(prefix.blocks[0])
        return num_hits, self.list_ids(request)[num_hits:]

    def grow(self, request: ReplayRequest, num_tokens: int, num_blocks: int) -> list[BlockId] | None:
        while True:
            added = self.manager.allocate_slots(request, num_tokens, delay_cache_blocks=True)
            if added is not None:
                return [block.block_id for block in added[0]]
            others = [name for name in self.manager.list_request_ids() if name != request.request_id]
            if not others:
                if not self.pool.block_pool.holds.list_immovable_ids():
                    raise PoolExhaustedError(
                        f"request {request.request_id} asked for {num_blocks} blocks, "
                        f"{self.manager.get_num_free_blocks()} are free, and no other request has blocks"
                    )
                return None
            evicted = self._requests[find_victim(others)]
            self.finish(evicted)
            self._on_evicted(evicted.request_id)

    def cache(self, request: ReplayRequest, includes_tokens: bool) -> None:
        self.manager.cache_blocks(request, request.num_tokens)

    def list_ids(self, request: ReplayRequest) -> list[BlockId]:
        return self.manager.get_block_ids(request.request_id)

    def finish(self, request: ReplayRequest) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        del self._requests[request.request_id]

    def on_arrived(self, request: ReplayRequest) -> None:
        request.num_computed_tokens = request.num_tokens
        self._requests[request.request_id] = request

    def on_departed(self, request_id: RequestId) -> None:
        del self._requests[request_id]

    def take_events(self) -> list[KVCacheEvent]:
        with self.pool.lock:
            return self.manager.take_events()


LiveEngine = PoolEngine | ManagerEngine


def _get_sequence_id(request: ReplayRequest) -> SequenceId:
    return SequenceId(int(request.request_id))


def _copy_nothing(moves: object) -> None:
    """Do nothing: the blocks have no bytes."""


def _remap_nothing(relocation: object) -> None:
    """Do nothing: ids are read from the manager's tables whenever they are needed."""
