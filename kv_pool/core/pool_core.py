"""`BlockPoolCore`: the compiled base class of `kv_pool.BlockPool`, which users import instead."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, as_list, as_list_of, check_number, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours
from kv_pool.core.cached_keys import CachedKey, iter_cached_keys
from kv_pool.core.clock import read_clock
from kv_pool.core.deadlines import NEVER
from kv_pool.core.evicting import announce_removed, find_own_hash, note_own_hash
from kv_pool.core.eviction_order import BandPolicy
from kv_pool.core.freeing import free_all, free_and_place, unpin_all, unpin_and_place
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.holds import Hold, HoldReport
from kv_pool.core.id_swap import as_pairs, swap_ids
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.live_curve import LiveCurve
from kv_pool.core.observer import BlockObserver
from kv_pool.core.policy_host import PolicyHost
from kv_pool.core.policy_names import find_policy
from kv_pool.core.pool_size import check_fits_memory
from kv_pool.core.pool_state import EVICTING, NOTHING, RESETTING, finish
from kv_pool.core.recovery import recover
from kv_pool.core.references import BlockReferences
from kv_pool.core.resizing import add_last, remove_last
from kv_pool.core.stored_events import make_external_hash
from kv_pool.core.taking import notify_watchers
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPoolCore(BlockReferences):
    """The compiled base class of `BlockPool`; see there."""

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
        policy: Any = None,
        live_curve: bool = False,
    ) -> None:
        if not isinstance(num_gpu_blocks, int):
            num_gpu_blocks = as_int("num_gpu_blocks", num_gpu_blocks)
        check_type("enable_caching", enable_caching, bool)
        check_type("medium", medium, str)
        check_type("live_curve", live_curve, bool)
        if num_gpu_blocks < 1:
            raise InvalidArgumentError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; a pool has at least 1 block, its null block"
            )
        check_fits_memory(num_gpu_blocks)
        blocks = [KVCacheBlock(cast(BlockId, number)) for number in range(num_gpu_blocks)]
        super().__init__(
            blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
            medium,
            event_types,
            use_int_block_hashes,
            dense_events,
            clock,
            live_curve,
        )
        if policy is not None:
            self.open_policy(policy)

    # ---- freeing ---------------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each block. Blocks without references become free.

        Pass a request's blocks tail first: its last block has the longest prefix and is the least likely
        to be hit again. Freed blocks without a hash go to the front of the queue, since they cannot be hit;
        those with a hash go to the back. Each kind keeps the given order, first to be reused first. With
        caching off, all go to the front.

        Null blocks are skipped. Blocks of another pool are freed there, as vLLM's callers need. A bare block
        (made outside any pool) is treated as one of this pool and is not checked.

        Raises:
            InvalidBlockError: a block is already free, or is listed more often than it is referenced.
            InvalidTypeError: an element is not a block. In both cases nothing has changed.
        Cost: O(number of blocks). Contract: vLLM 0.33 `BlockPool.free_blocks`.
        """
        listed = as_list("ordered_blocks", ordered_blocks)
        if self._band_policy is None:
            free_all(self, listed, False)
        else:
            free_and_place(self, listed, False)

    def free_out_of(self, ordered_blocks: list[KVCacheBlock]) -> None:
        """Run `free_blocks`, and clear `ordered_blocks` in the same step.

        If the caller is interrupted, the list contains exactly the references that it still has to release.
        """
        if self._band_policy is None:
            free_all(self, ordered_blocks, True)
        else:
            free_and_place(self, ordered_blocks, True)

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Drop one reference of each block, and call `on_reuse` when the block is reused.

        Blocks without references go to the back of the queue, with or without a hash, so that their content
        stays readable as long as possible. `on_reuse(block)` is called once: before `get_new_blocks`
        allocates the block (it still has its hash, and no event has been emitted), or when the prefix cache
        is reset. Touching, freeing or evicting the block does not call it. A later `on_reuse` for the same
        block replaces it.

        Raises:
            InvalidBlockError: a block is null or free, or is listed more often than it is referenced.
            InvalidTypeError: an element is not a block, or `on_reuse` is not callable. In both cases
                nothing has changed.
        Contract: vLLM 0.33 `BlockPool.unpin_blocks`.
        """
        if self._band_policy is None:
            unpin_all(self, blocks, on_reuse)
        else:
            unpin_and_place(self, blocks, on_reuse)

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """Return True if the block may be written to: it has one reference, no hash, and is not null."""
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        return not block.is_null and block.ref_cnt == 1 and block.key is None

    # ---- evicting --------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Evict these blocks, free or in use. References and queue positions do not change.

        Their content is treated as invalid: each block's `generation` advances, so that a transfer that reads
        the block fails instead of delivering it.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        One `BlockRemoved` per key. O(len(block_ids)).
        Contract: vLLM 0.33 `BlockPool.evict_blocks`.
        """
        num_blocks: int = self.num_gpu_blocks  # an int of any size, as the ids may be
        evicted: list[KVCacheBlock] = []
        for element in as_list("block_ids", block_ids):
            position = len(evicted)
            block_id: int = element if isinstance(element, int) else as_int(f"block_ids[{position}]", element)
            if block_id < 0 or block_id >= num_blocks:
                raise InvalidBlockError(
                    f"Invalid block_id {block_id}: this pool has blocks 0..{self.num_gpu_blocks - 1}. "
                    "Did a KV connector report a block that was never allocated here?"
                )
            evicted.append(self.blocks[block_id])
        if self._unfinished != NOTHING:
            self._recover()
        try:
            for block in evicted:
                key = block.key
                own_hash = key[:-4] if isinstance(key, bytes) else find_own_hash(block)
                block.generation += 1
                self._maybe_evict_cached_block(block)
                if own_hash is not None:
                    note_own_hash(block, own_hash)
        except BaseException:
            self._unfinished_blocks = evicted
            self._unfinished = EVICTING
            self._recover()
            raise

    def iter_cached_keys(self) -> Iterator[CachedKey]:
        """Iterate over the cached keys: each hash once per KV cache group, in no particular order.

        The keys are those cached at the time of the call; later changes do not affect the iterator.

            >>> from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
            >>> manager = KVCacheManager(BlockPool(10, True, 4))
            >>> request = Request("r", range(9), BlockHasher("sha256_cbor", block_size=4))
            >>> _ = manager.allocate_slots(request, 9)
            >>> sorted(key.block_hash.hex()[:8] for key in manager.block_pool.iter_cached_keys())
            ['22b53a0c', 'bd29abb2']
        """
        return iter_cached_keys(self.cached_block_hash_to_block, partial(make_external_hash, self))

    def reset_prefix_cache(self) -> bool:
        """Evict every key, for example after a weight update. One `AllBlocksCleared`.

        Returns:
            True; or False, with a warning and nothing changed, if any block but the null block is in use.
        The order of the free queue does not change. O(number of blocks).
        Contract: vLLM 0.33 `BlockPool.reset_prefix_cache`.
        """
        if self._unfinished != NOTHING:
            self._recover()
        num_in_use = self.num_gpu_blocks - 1 - self.free_block_queue.num_free_blocks
        if num_in_use:
            import logging

            logging.getLogger(__name__).warning(
                "prefix cache not reset: %d blocks are still in use", num_in_use
            )
            return False
        if self._unannounced:
            announce_removed(self)
        num_keys = sum([len(keys) for keys in self.cached_block_hashes_by_block.values()])
        for block in self.blocks:
            if block.key is not None:
                num_keys += 1
        self._unfinished_total = self.num_evictions + num_keys
        try:
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            if self.reuse_watchers:
                watched = [block_id for block_id in self.reuse_watchers if block_id < self.num_gpu_blocks]
                notify_watchers(self, [self.blocks[block_id] for block_id in watched])
        finally:
            self._unfinished = RESETTING
            finish(self)
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        return True

    # ---- holds, block ids, pool size --------------------------------------------------------------

    def hold(
        self,
        blocks: Iterable[KVCacheBlock],
        reason: str,
        *,
        movable: bool = False,
        until: float | None = None,
    ) -> Hold:
        """Hold blocks: add a reference to each and keep its id, until the hold is released.

        For blocks that are read or written by id: a transfer, a copy in flight, an open plan. A block may
        have several holds, each with its own reference. Null and repeated blocks are skipped.

        Args:
            reason: completes "the block is ..." in error messages: "sent to node b".
            movable: compaction may change the ids of the blocks; the hold only keeps their content.
            until: a time of the pool's clock, after which `expire_holds` releases the hold; None for never.
        Raises:
            InvalidBlockError: a block is free and not cached, or of another pool.
            InvalidArgumentError: `until` has passed. In both cases nothing has changed.
        Cost: O(len(blocks)).
        """
        check_type("reason", reason, str)
        check_type("movable", movable, bool)
        if until is not None:
            check_number("until", until)
            if not until > self.holds.clock():
                raise InvalidArgumentError(
                    f"cannot hold blocks until {until}: it is {self.holds.clock()} now"
                )
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        return self.holds.open(listed, reason, movable, NEVER if until is None else until)

    def expire_holds(self) -> list[Hold]:
        """Release the holds whose deadline has passed; write leases are quarantined instead.

        Returns:
            These holds, earliest deadline first. O(1) if there are none.
        """
        return self.holds.expire()

    def explain_holds(self, block_id: BlockId) -> list[HoldReport]:
        """Return the holds on a block: why it may not be reused or moved, since when and until when.

        References of block tables are not included.

        Raises:
            InvalidBlockError: the id is not one of this pool's.
        Cost: O(held blocks).
        """
        if not isinstance(block_id, int):
            block_id = as_int("block_id", block_id)
        if not 0 <= block_id < self.num_gpu_blocks:
            raise InvalidBlockError(
                f"Invalid block_id {block_id}: this pool has blocks 0..{self.num_gpu_blocks - 1}"
            )
        return self.holds.explain(self.blocks[block_id])

    def swap_block_ids(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Swap the ids of the two blocks of each pair, after the caller has moved their bytes.

        A block object keeps everything else: references, hash, prefix map entries, queue position. No events.
        Block tables hold block objects and stay valid; code that stored a block id has to read it again.

        Raises:
            InvalidBlockError: an id is not one of this pool's, is 0, is listed twice, or is that of a held
                block. Nothing has changed.
        Cost: O(number of blocks), a few nanoseconds each, and O(len(pairs)).
        """
        swap_ids(self, as_pairs(pairs))

    def add_blocks(self, num_blocks: int) -> None:
        """Add `num_blocks` free blocks with the highest ids, next to be reused. O(number of blocks).

        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
        """
        add_last(self, num_blocks)

    def remove_last_blocks(self, num_blocks: int) -> None:
        """Remove the `num_blocks` blocks with the highest ids. O(number of blocks).

        Cached ones are evicted, and their reuse watchers are called.

        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            InvalidBlockError: one of the blocks is in use, or is the null block. Nothing has changed.
            Any exception of a reuse watcher; the blocks are then at the front of the queue.
        """
        remove_last(self, num_blocks)

    def _recover(self) -> None:
        recover(self)

    # ---- the order of eviction ------------------------------------------------------------------

    def open_bands(self, policy: BandPolicy) -> None:
        """Divide the free queue into bands, chosen by `policy` for each freed block; see `EvictionOrder`.

        Raises:
            InvalidArgumentError: the pool already has a band policy. Nothing has changed.
        Cost: O(free blocks without content).
        """
        check_type("policy", policy, BandPolicy)
        if self._policy_host is not None:
            raise InvalidArgumentError(
                f"the pool has the cache policy {self._policy_host.name}, which orders its free blocks; for "
                "directives, pins and sessions make the pool without a policy, or give the policy hints "
                "(a request's kv_hints)"
            )
        if self._band_policy is not None:
            raise InvalidArgumentError(
                f"the pool already has a band policy, {self._band_policy!r}, which orders its free blocks; "
                "use that one, or make another pool"
            )
        self.eviction_order.open()
        self._band_policy = policy

    def open_policy(self, policy: Any) -> None:
        """Let a cache policy choose the blocks to evict, instead of the least recently freed ones.

        Args:
            policy: what `find_policy` accepts: a name such as "s3fifo", "module:Class", "file.py:Class", or
                a function without arguments that returns a new `CachePolicy`, such as its class.
        Raises:
            InvalidArgumentError: there is no such policy, caching is off, or the pool has a policy already;
                a pool with a retention cannot have one. Nothing has changed.
            CachePolicyError: the policy cannot be started. Nothing has changed.
        Cost: O(blocks of the pool).
        """
        choice = find_policy(policy)
        if not self.enable_caching:
            raise InvalidArgumentError(f"the cache policy {choice.name} needs a pool with enable_caching")
        if self._band_policy is not None:
            raise InvalidArgumentError(
                f"the pool already has {self._band_policy!r}, which orders its free blocks; for the cache "
                f"policy {choice.name} make a pool without retention and without another policy"
            )
        host = PolicyHost(
            self.block_owner,
            self.eviction_order,
            choice.make,
            choice.name,
            self.num_gpu_blocks - 1,
            self.holds.clock,
            choice.is_flat,
        )
        host.is_stale = True
        self.eviction_order.open()
        self._band_policy = host
        self._policy_host = host

    @property
    def policy_host(self) -> PolicyHost | None:
        """The host of the cache policy; None without one."""
        return self._policy_host

    @property
    def live_curve(self) -> LiveCurve | None:
        """The sample behind the curve that `read_live_curve` returns; None without `live_curve=True`."""
        return self._live_curve

    def move_to_band(self, blocks: Iterable[KVCacheBlock], band: int) -> None:
        """Move free blocks to the back of a band of the eviction order, in the given order. O(len(blocks)).

        Args:
            band: -100 to 100, or `EXPIRED_BAND`, which is reused before these; 0 is the default band.
        Raises:
            InvalidArgumentError: the band does not exist, or the pool has no bands: see `open_bands`.
            InvalidBlockError: a block is not free, or of another pool. In both cases nothing has changed.
        """
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        band = as_int("band", band)
        if self._unfinished != NOTHING:
            self._recover()
        for block in listed:
            if block.owner is not self.block_owner:
                check_ours(block, self.block_owner, "move_to_band()")
        self.eviction_order.move(listed, band)

    def merge_bands(self) -> None:
        """Merge all bands but that of blocks without content into the default band. O(bands).

        The order of the free blocks does not change.
        """
        self.eviction_order.merge()

    # ---- usage -----------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that `get_new_blocks` can allocate now, cached free ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Return the share of the allocatable blocks that is in use, 0 to 1, without the null block."""
        num_allocatable = self.num_gpu_blocks - 1
        if num_allocatable == 0:
            return 0
        return 1.0 - self.free_block_queue.num_free_blocks / num_allocatable
