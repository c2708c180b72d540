"""The pools that a live replay can run on, a `GPUKVPool` or a `KVCacheManager`, and their lower tiers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.control.serve_settings import ServeSettings, make_pool
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.kv_events import MEDIUM_GPU, KVCacheEvent
from kv_pool.errors import InvalidArgumentError, PoolExhaustedError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId, RequestId, SequenceId
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.preemption import find_victim
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.reports.tiers import TierList
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

OnEvicted = Callable[[RequestId], object]

_DISK_BLOCKS_PER_BLOCK = 10


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
        sequence_id = SequenceId(request.number)
        num_hashes = min(len(request.block_hashes), request.max_hit_tokens // self.pool.block_size)
        num_hits = len(self.pool.claim_prefix(sequence_id, request.block_hashes[:num_hashes]))
        return num_hits, self.pool.allocate(BlockAllocationRequest(num_blocks - num_hits, sequence_id))

    def grow(self, request: ReplayRequest, num_tokens: int, num_blocks: int) -> list[BlockId] | None:
        """Add `num_blocks` blocks for `num_tokens` more tokens; evict other requests if too few are free.

        Returns:
            The ids of the new blocks; None while a migration holds the blocks that could be evicted.
        """
        try:
            return self.pool.allocate(BlockAllocationRequest(num_blocks, SequenceId(request.number)))
        except PoolExhaustedError:
            if not self.pool.block_pool.holds.list_immovable_ids():
                raise
            return None

    def cache(self, request: ReplayRequest, includes_tokens: bool) -> None:
        """Register the request's full blocks in the prefix cache."""
        token_ids = request.all_token_ids if includes_tokens else None
        self.pool.cache_prefix(SequenceId(request.number), request.block_hashes, token_ids)

    def list_ids(self, request: ReplayRequest) -> list[BlockId]:
        """Return the ids of the request's blocks, first block first."""
        return self.pool.blocks_of(SequenceId(request.number))

    def finish(self, request: ReplayRequest) -> None:
        """Release the request's blocks."""
        self.pool.free_sequence(SequenceId(request.number))

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of cached blocks since the last call."""
        return self.pool.take_events()


class ManagerEngine:
    """The requests of a `KVCacheManager` over a `RunBlockPool`, with the methods of `PoolEngine`.

    If no block is free for a token, the request that was admitted last is evicted.

    Args:
        running: the requests that have blocks, by id; live.
    """

    def __init__(
        self,
        settings: ServeSettings,
        storage: BlockStorage | None,
        on_evicted: OnEvicted,
        running: Mapping[RequestId, ReplayRequest],
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
        self._running = running
        self._on_evicted = on_evicted
        self.pool = ControlledManager(
            self.manager,
            storage=storage,
            copy=(lambda moves: None) if storage is None else None,  # blocks without bytes
            lock=threading.RLock(),
            on_moved=lambda relocation: None,  # ids are read from the tables whenever they are needed
            requests=running,
            run_length=settings.run_length,
        )

    def admit(self, request: ReplayRequest, num_blocks: int) -> tuple[int, list[BlockId]] | None:
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        num_new_tokens = request.num_tokens - prefix.num_tokens
        if self.manager.allocate_slots(request, num_new_tokens, prefix, delay_cache_blocks=True) is None:
            return None
        request.num_computed_tokens = request.num_tokens
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
            victim = find_victim(others)
            self.manager.free(self._running[victim])
            self._on_evicted(victim)

    def cache(self, request: ReplayRequest, includes_tokens: bool) -> None:
        self.manager.cache_blocks(request, request.num_tokens)

    def list_ids(self, request: ReplayRequest) -> list[BlockId]:
        return self.manager.get_block_ids(request.request_id)

    def finish(self, request: ReplayRequest) -> None:
        self.manager.free(request)

    def take_events(self) -> list[KVCacheEvent]:
        with self.pool.lock:
            return self.manager.take_events()


class LiveTiers:
    """The lower tiers of a pool, as named in the settings. Call its methods with the pool's lock held.

    Args:
        storage: the bytes of the pool's blocks.
        settings: `host_tier`, `disk_tier`, or both are set.
        enable_events: whether the pool's events include the blocks that tiers store and remove.

    Raises:
        TierError, LayoutMismatchError: the folder cannot be used, or contains blocks of another layout.
    """

    def __init__(
        self,
        pool: GPUKVPool | ControlledManager,
        storage: BlockStorage | None,
        settings: ServeSettings,
        *,
        enable_events: bool,
    ) -> None:
        if storage is None:
            raise InvalidArgumentError("tiers store the bytes of blocks, and this pool has no storage")
        self._lock: AbstractContextManager[object] = pool.lock
        tiers: list[Tier] = []
        if settings.host_tier:
            tiers.append(HostTier(settings.host_tier, storage))
        if settings.disk_tier is not None:
            capacity = settings.disk_tier_blocks or _DISK_BLOCKS_PER_BLOCK * settings.blocks
            layout = BlockLayout.describe(storage, settings.block_size)
            tiers.append(DiskTier(settings.disk_tier, capacity, layout))
        self.cache = TieredCache(pool.block_pool, storage, tiers, enable_events=enable_events)
        self._hits = dict.fromkeys([MEDIUM_GPU, *(tier.medium for tier in tiers)], 0)

    def find(self, block_hashes: Sequence[BlockHash]) -> list[BlockHashWithGroupId]:
        """Return the keys of the longest prefix of these hashes that tiers contain. Changes nothing."""
        keys = (make_block_hash_with_group_id(block_hash, GroupId(0)) for block_hash in block_hashes)
        return list(takewhile(lambda key: self.cache.find_tier(key) is not None, keys))

    def onboard(self, num_hits: int, block_hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> int:
        """Onboard the prefix of these hashes, which follow `num_hits` hits in the pool itself.

        Returns:
            The number of blocks onboarded before the first failure; those after it are to be recomputed.
        """
        self._hits[MEDIUM_GPU] += num_hits
        keys = self.find(block_hashes)
        levels = [self.cache.find_tier(key) for key in keys]
        failed = set(self.cache.load(keys, block_ids[: len(keys)]))
        num_good = next((at for at, key in enumerate(keys) if key in failed), len(keys))
        for level in levels[:num_good]:
            self._hits[self.cache.tiers[level or 0].medium] += 1
        return num_good

    def prefetch(self, owner: RequestId, block_hashes: Sequence[BlockHash]) -> None:
        """Start to read from disk the blocks that a waiting request will need."""
        self.cache.prefetch(owner, self.find(block_hashes))

    def get_report(self) -> TierList:
        """Return the contents of each tier, and the hits by medium. Takes the lock itself."""
        with self._lock:
            return TierList(dict(self._hits), self.cache.get_statistics(), self.cache.num_dropped)

    def close(self) -> None:
        """Flush pending blocks and close the tiers; blocks on disk stay there. Takes the lock itself."""
        with self._lock:
            self.cache.flush()
            self.cache.close()
