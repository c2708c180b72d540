"""`BlockPoolCore`: who holds which block, and which free block is next. Use `kv_pool.BlockPool`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, as_list, as_list_of, check_number, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours
from kv_pool.core.cached_keys import CachedKey, iter_cached_keys
from kv_pool.core.clock import read_clock
from kv_pool.core.deadlines import NEVER
from kv_pool.core.evicting import announce_removed
from kv_pool.core.eviction_order import Placement
from kv_pool.core.freeing import free_all, free_and_place, unpin_all, unpin_and_place
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.holds import Hold, HoldReport
from kv_pool.core.id_swap import as_pairs, swap_ids
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.observer import BlockObserver
from kv_pool.core.pool_size import check_fits_memory
from kv_pool.core.pool_state import EVICTING, NOTHING, RESETTING, finish
from kv_pool.core.recovery import recover
from kv_pool.core.references import BlockReferences
from kv_pool.core.resizing import add_last, remove_last
from kv_pool.core.stored_events import make_external_hash
from kv_pool.core.taking import tell_watchers
from kv_pool.errors import InvalidArgumentError, InvalidBlockError


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPoolCore(BlockReferences):
    """See `BlockPool`."""

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
    ) -> None:
        if not isinstance(num_gpu_blocks, int):
            num_gpu_blocks = as_int("num_gpu_blocks", num_gpu_blocks)
        check_type("enable_caching", enable_caching, bool)
        check_type("medium", medium, str)
        if num_gpu_blocks < 1:
            raise InvalidArgumentError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; a pool has at least 1 block, its null block"
            )
        check_fits_memory(num_gpu_blocks)
        blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
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
        )

    # ---- giving back -----------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each block; those at zero become free, first to be reused first.

        Pass a request's blocks tail first: its last block has the longest prefix and is the least likely
        to be hit again. Free blocks without a hash go to the front of the queue (nobody can hit them),
        those with one to the back, each kind in the given order; with caching off all go to the front.

        Null blocks are skipped, and blocks of another pool are freed there, as vLLM's callers need. A bare
        block (made outside any pool) counts as ours and is not checked.

        Raises:
            InvalidBlockError: a block is free already, or listed more often than it is referenced.
            InvalidTypeError: not a block. In both cases nothing has changed.
        Cost: O(number of blocks). Contract: vLLM 0.33 `BlockPool.free_blocks`.
        """
        listed = as_list("ordered_blocks", ordered_blocks)
        if self._placement is None:
            free_all(self, listed, False)
        else:
            free_and_place(self, listed, False)

    def free_out_of(self, ordered_blocks: list[KVCacheBlock]) -> None:
        """As `free_blocks`; `ordered_blocks` is empty afterwards, in the same step.

        Whatever interrupts the caller, the list says which references are still to be given back.
        """
        if self._placement is None:
            free_all(self, ordered_blocks, True)
        else:
            free_and_place(self, ordered_blocks, True)

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Drop one reference of each block, and be told when the block is reused.

        Those at zero go to the back of the queue, with or without hash: their content stays readable as long
        as possible. `on_reuse(block)` is called once, when `get_new_blocks` is about to hand the block out
        (it still has its hash, and no event is out), or when the prefix cache is reset; touching, freeing or
        evicting leaves it waiting, and a later `on_reuse` of the same block replaces it.

        Raises:
            InvalidBlockError: a block is null, free, or listed more often than it is referenced.
            InvalidTypeError: not a block, or nothing to call. In both cases nothing has changed.
        Contract: vLLM 0.33 `BlockPool.unpin_blocks`.
        """
        if self._placement is None:
            unpin_all(self, blocks, on_reuse)
        else:
            unpin_and_place(self, blocks, on_reuse)

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """May its only holder write into the block? Not if it is null, shared, free or cached."""
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        return not block.is_null and block.ref_cnt == 1 and block.key is None

    # ---- evicting --------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make these blocks unfindable, free or in use; references and queue places stay as they are.

        Their content counts as wrong: each `generation` advances, so that a transfer that reads one of them
        fails instead of delivering it.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        One `BlockRemoved` per block that was cached. O(len(block_ids)).
        Contract: vLLM 0.33 `BlockPool.evict_blocks`.
        """
        num_blocks: int = self.num_gpu_blocks  # an int, as the ids are: these may be of any size
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
                block.generation += 1
                self._maybe_evict_cached_block(block)
        except BaseException:
            self._unfinished_blocks = evicted
            self._unfinished = EVICTING
            self._recover()
            raise

    def iter_cached_keys(self) -> Iterator[CachedKey]:
        """Iterate over what is cached now: each hash once for each KV cache group, in no particular order.

        The keys are those of the moment of the call; what is cached or evicted later does not change them.

            >>> from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
            >>> manager = KVCacheManager(BlockPool(10, True, 4))
            >>> request = Request("r", range(9), BlockHasher("sha256_cbor", block_size=4))
            >>> _ = manager.allocate_slots(request, 9)
            >>> sorted(key.block_hash.hex()[:8] for key in manager.block_pool.iter_cached_keys())
            ['22b53a0c', 'bd29abb2']
        """
        return iter_cached_keys(self.cached_block_hash_to_block, partial(make_external_hash, self))

    def reset_prefix_cache(self) -> bool:
        """Forget every hash, as after a change of weights. One `AllBlocksCleared`.

        Returns:
            False, with a warning and nothing changed, while any block but the null block is in use.
        The order of the free queue stays. O(number of blocks).
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
                tell_watchers(self, [self.blocks[block_id] for block_id in watched])
        finally:
            self._unfinished = RESETTING
            finish(self)
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        return True

    # ---- other ids, other sizes ------------------------------------------------------------------

    def hold(
        self,
        blocks: Iterable[KVCacheBlock],
        reason: str,
        *,
        movable: bool = False,
        until: float | None = None,
    ) -> Hold:
        """Add a reference to each of these blocks and keep them at their ids, until the hold is released.

        For bytes that something else reads or writes by block id: a transfer, a copy in flight, an open plan.
        A block may be held for several reasons; each has a reference of its own. Null blocks and repeated
        ones are skipped.

        Args:
            reason: completes "the block is ..." in error messages: "sent to node b".
            movable: compaction may give the blocks other ids; the hold only keeps their content.
            until: a time of the pool's clock, after which `expire_holds` releases the hold; None for never.
        Raises:
            InvalidBlockError: a block is free and not cached, or another pool's.
            InvalidArgumentError: `until` has passed. In both cases nothing has changed.
        Cost: O(len(blocks)).
        """
        check_type("reason", reason, str)
        check_type("movable", movable, bool)
        if until is not None:
            check_number("until", until)
            if not until > self.holds.clock():
                raise InvalidArgumentError(
                    f"a hold until {until} has ended before it begins: it is {self.holds.clock()} now"
                )
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        return self.holds.open(listed, reason, movable, NEVER if until is None else until)

    def expire_holds(self) -> list[Hold]:
        """Release the holds whose deadline has passed; leases for writing are quarantined instead.

        Returns:
            Those holds, earliest deadline first. O(1) if there are none.
        """
        return self.holds.expire()

    def explain_holds(self, block_id: int) -> list[HoldReport]:
        """Say why a block is not reused or moved besides the tables it is in, since when and until when.

        Raises:
            InvalidBlockError: the id is not one of this pool's.
        Cost: O(held blocks).
        """
        block_id = as_int("block_id", block_id)
        if not 0 <= block_id < self.num_gpu_blocks:
            raise InvalidBlockError(
                f"Invalid block_id {block_id}: this pool has blocks 0..{self.num_gpu_blocks - 1}"
            )
        return self.holds.explain(self.blocks[block_id])

    def swap_block_ids(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the ids of the two blocks of each pair, after their bytes have been moved accordingly.

        A block object keeps everything else: references, hash, prefix map entries, its place in the queue,
        whoever waits for its reuse. No events. Block tables hold objects and need nothing; whoever kept an
        id has to look again.

        Raises:
            InvalidBlockError: an id is not one of this pool's, is 0, is listed twice, or is that of a held
                block. Nothing has changed.
        Cost: O(number of blocks), some nanoseconds each, and O(len(pairs)).
        """
        swap_ids(self, as_pairs(pairs))

    def add_blocks(self, num_blocks: int) -> None:
        """Add `num_blocks` free blocks with the highest ids, next to be reused. O(number of blocks).

        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
        """
        add_last(self, num_blocks)

    def remove_last_blocks(self, num_blocks: int) -> None:
        """Let the pool have `num_blocks` blocks less, those with the highest ids. O(number of blocks).

        Cached ones are evicted, and their reuse watchers are called.
        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            InvalidBlockError: one of them is in use, or the null block. Nothing has changed.
            Whatever a reuse watcher raises; the blocks are at the front of the queue then.
        """
        remove_last(self, num_blocks)

    def _recover(self) -> None:
        recover(self)

    # ---- the order of eviction ------------------------------------------------------------------

    def open_bands(self, placement: Placement) -> None:
        """Let `placement` choose the bands of blocks that become free; see `EvictionOrder`.

        Raises:
            InvalidArgumentError: the pool has a placement already. Nothing has changed.
        Cost: O(free blocks without content).
        """
        check_type("placement", placement, Placement)
        if self._placement is not None:
            raise InvalidArgumentError(
                f"the pool has a placement already: {self._placement!r}; its users share that one"
            )
        self.eviction_order.open()
        self._placement = placement

    def move_to_band(self, blocks: Iterable[KVCacheBlock], band: int) -> None:
        """Put free blocks at the back of a band of the eviction order, in the given order. O(len(blocks)).

        Args:
            band: -100 to 100; 0 is the default band, and `EXPIRED_BAND` comes before all others.
        Raises:
            InvalidArgumentError: no such band, or the pool has no bands: see `open_bands`.
            InvalidBlockError: a block is not free, or another pool's. In both cases nothing has changed.
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
        """Make all bands the default band; the order of the free blocks stays. O(bands)."""
        self.eviction_order.merge()

    # ---- looking ---------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """How many blocks `get_new_blocks` could hand out now; cached free ones count."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the allocatable blocks that is in use, 0 to 1. The null block does not count."""
        num_allocatable = self.num_gpu_blocks - 1
        if num_allocatable == 0:
            return 0
        return 1.0 - self.free_block_queue.num_free_blocks / num_allocatable
