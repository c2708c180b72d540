"""`BlockPoolCore`: who holds which block, and which free block is next. Use `kv_pool.BlockPool`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.core.arguments import as_int, as_list, as_list_of, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_keys import CachedKey, iter_cached_keys
from kv_pool.core.free_queue import FreeKVCacheBlockQueue
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.holds import BlockHolds, Hold
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.observer import BlockObserver, ColderTiers
from kv_pool.core.pool_size import check_fits_memory
from kv_pool.core.prefix_cache import (
    EVICTING,
    NOTHING,
    PrefixCache,
    check_ours,
    evict,
    evict_all,
    plan_rekeying,
    raise_typed,
)
from kv_pool.errors import (
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    OutOfBlocksError,
)
from kv_pool.ids import BlockHashWithGroupId

# What `_recover` has to do, besides what a `PrefixCache` knows.
UNDO_TAKING_FIRST: Final = 10
UNDO_TOUCHING: Final = 11
CLEARING_LINKS: Final = 12
UNDO_FREEING: Final = 13
RESETTING: Final = 14
SWAPPING_IDS: Final = 15
CLEARING_LINKS_OF_TAKEN: Final = 16
UNDO_TAKING_LISTED: Final = 17
WATCHING: Final = 18

MAX_REFERENCES: Final = 2**31 - 1
"""The most references that one block can have; the count has 32 bits."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPoolCore(PrefixCache):
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
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
            medium,
            event_types,
            use_int_block_hashes,
            dense_events,
        )
        self.num_gpu_blocks: int = num_gpu_blocks
        self.enable_caching: bool = enable_caching
        self.free_block_queue: FreeKVCacheBlockQueue = FreeKVCacheBlockQueue(blocks)
        self._reuse_watchers: dict[int, Callable[[KVCacheBlock], None]] = {}
        self.holds: BlockHolds = BlockHolds(self._owner)
        self._has_retention: bool = False  # blocks have room for what one says of them
        self._unfinished_count: i64 = 0
        self._unfinished_total: int = 0
        self._unfinished_swap: IdSwap | None = None
        self._unfinished_watcher: Callable[[KVCacheBlock], None] | None = None
        self.null_block: KVCacheBlock = self.free_block_queue.popleft()
        self.null_block.is_null = True

    # ---- taking ----------------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the `num_blocks` free blocks that are next in eviction order.

        Returns:
            Distinct blocks in that order, each with ref_cnt 1 and no hash. Their KV slots still hold the
            last owner's bytes. `num_blocks` counts blocks, not tokens; 0 gives [].
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            Whatever a reuse watcher raises; all blocks are back in the queue.
            CorruptedPoolError: a free block has references that something else wrote, or fewer are linked
                than the queue counts. Nothing has changed.

        A taken block that was cached is evicted: one `BlockRemoved` each. Touch prefix hits before
        calling this, or the hits themselves may be taken.
        Cost: O(num_blocks), whatever the size of the pool.
        Contract: vLLM 0.33 `BlockPool.get_new_blocks`.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        return take_first(self, num_blocks, None)

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> list[KVCacheBlock]:
        """As `get_new_blocks`; the blocks are appended to `blocks` in the same step.

        Whatever interrupts the caller, `blocks` says which references it has to give back.
        """
        return take_first(self, num_blocks, blocks)

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take these free blocks out of wherever they are in the queue, as `get_new_blocks` takes the next.

        Each has ref_cnt 1 and no hash afterwards; one that was cached is evicted, in the given order.

        Raises:
            InvalidBlockError: a block is null, in use, listed twice, or not this pool's. Nothing has changed.
            InvalidTypeError: not a block. Nothing has changed.
            Whatever a reuse watcher raises; the blocks are at the front of the queue then.
        Cost: O(len(blocks)), whatever the size of the pool.
        """
        take_listed(self, as_list("blocks", blocks), None)

    def _tell_observer(self, taken: list[KVCacheBlock], observer: BlockObserver) -> None:
        """Evict and hand out these blocks one after the other, as the observer expects it."""
        for block in taken:
            block.ref_cnt = 0
        for block in taken:
            if self.enable_caching:
                observer.on_block_evicted(block)
                evict(self, block)
            block.ref_cnt = 1
            observer.on_block_allocated(block)

    def _tell_tiers(self, taken: list[KVCacheBlock], tiers: ColderTiers) -> None:
        """Say which of these blocks lose content that could be hit; they still have their keys."""
        if self.enable_caching:
            tiers.on_blocks_reused([block for block in taken if block._block_hash is not None])

    def _tell_watchers(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Call the reuse watchers of these blocks, in order, and forget them."""
        for block in blocks:
            on_reuse = self._reuse_watchers.get(block.block_id)
            if on_reuse is not None:
                del self._reuse_watchers[block.block_id]
                on_reuse(block)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block; a free one leaves the free queue. Its hash stays.

        Null blocks are skipped. A block that is listed twice gets two references.

        Raises:
            InvalidBlockError: a block of another pool, or a bare block that was never free here.
            InvalidTypeError: not a block. In both cases nothing has changed.
        Cost: O(len(blocks)). Contract: vLLM 0.33 `BlockPool.touch`.
        """
        touch_all(self, as_list("blocks", blocks), None)

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        """As `touch`; the blocks are appended to `onto` in the same step, see `take_onto`."""
        touch_all(self, blocks, onto)

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
        free_all(self, listed, False)

    def free_out_of(self, ordered_blocks: list[KVCacheBlock]) -> None:
        """As `free_blocks`; `ordered_blocks` is empty afterwards, in the same step.

        Whatever interrupts the caller, the list says which references are still to be given back.
        """
        free_all(self, ordered_blocks, True)

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
        if not callable(on_reuse):
            raise InvalidTypeError(f"on_reuse is a {type(on_reuse).__name__}; it is called with the block")
        if self._unfinished != NOTHING:
            self._recover()
        owner = self._owner
        queue = self.free_block_queue
        listed: list[KVCacheBlock] = list(as_list("blocks", blocks))
        first: KVCacheBlock | None = None
        last: KVCacheBlock | None = None
        num_freed: i64 = 0
        num_done: i64 = 0
        is_freed = False
        try:
            for block in listed:
                check_ours(block, owner, "unpin_blocks()")
                if block.is_null or block.ref_cnt < 1:
                    raise InvalidBlockError(
                        f"block {block.block_id} is {'the null block' if block.is_null else 'free'}; "
                        "unpin_blocks() takes blocks that are in use"
                    )
                block.ref_cnt -= 1
                num_done += 1
                if block.ref_cnt == 0:
                    if last is None:
                        first = block
                    else:
                        last.next_free_block = block
                        block.prev_free_block = last
                    last = block
                    num_freed += 1
            queue.splice(None, None, 0, first, last, num_freed)
            is_freed = True
            watchers = self._reuse_watchers
            for block in listed:
                watchers[block.block_id] = on_reuse
        except BaseException as error:
            self._unfinished_blocks = listed
            self._unfinished_count = num_done
            self._unfinished_watcher = on_reuse
            self._unfinished = WATCHING if is_freed else UNDO_FREEING
            self._recover()
            raise_typed(error, listed, "unpin_blocks()")

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """May its only holder write into the block? Not if it is null, shared, free or cached."""
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        return not block.is_null and block.ref_cnt == 1 and block._block_hash is None

    def _check_stranger(self, block: KVCacheBlock) -> None:
        """Raise unless `touch()` may have this block of no pool or of another: null, in use, or free here.

        O(num_free_blocks) for a bare block that is free.
        """
        check_ours(block, self._owner, "touch()")
        if block._owner is not None or block.ref_cnt or block.is_null:
            return
        if not any(free is block for free in self.free_block_queue.iter_blocks_after(None)):
            raise_not_queued(block)

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
        return iter_cached_keys(self.cached_block_hash_to_block, self._make_external_hash)

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
        num_keys = sum([len(keys) for keys in self.cached_block_hashes_by_block.values()])
        for block in self.blocks:
            if block._block_hash is not None:
                num_keys += 1
        self._unfinished_total = self.num_evictions + num_keys
        try:
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            if self._reuse_watchers:
                watched = [block_id for block_id in self._reuse_watchers if block_id < self.num_gpu_blocks]
                self._tell_watchers([self.blocks[block_id] for block_id in watched])
        finally:
            self._unfinished = RESETTING
            finish(self)
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        return True

    # ---- other ids, other sizes ------------------------------------------------------------------

    def hold(self, blocks: Iterable[KVCacheBlock], reason: str) -> Hold:
        """Keep these blocks at their ids until the hold is released: no compaction moves them meanwhile.

        For bytes that something else reads or writes by block id: a transfer, a copy in flight, an open plan.
        The hold takes no reference; the caller has one on each block. Null blocks are skipped.

        Args:
            reason: completes "the block is ..." in error messages: "sent to node b".
        Raises:
            InvalidBlockError: a block is free or another pool's. Nothing has changed.
        Cost: O(len(blocks)).
        """
        check_type("reason", reason, str)
        return self.holds.open(as_list_of("blocks", blocks, KVCacheBlock), reason)

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
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgumentError(
                f"the pool cannot grow by {num_blocks} blocks; see remove_last_blocks()"
            )
        if num_blocks == 0:
            return
        if self._unfinished != NOTHING:
            self._recover()
        queue = self.free_block_queue
        num_before = self.num_gpu_blocks
        added = [KVCacheBlock(block_id) for block_id in range(num_before, num_before + num_blocks)]
        last = added[0]
        for block in added:
            block._owner = self._owner
            if block is not last:
                block.prev_free_block = last
                last.next_free_block = block
                last = block
        blocks = self.blocks + tuple(added)
        queue.check_linked()
        try:
            queue.splice(added[0], last, num_blocks, None, None, 0)
            self.num_gpu_blocks += num_blocks
            if self._num_guessable:
                self._num_guessable = self.num_gpu_blocks
            self.blocks = blocks
        except BaseException:
            for block in added:  # no longer linked to each other, so that they can be collected
                block.prev_free_block = None
                block.next_free_block = None
            raise

    def remove_last_blocks(self, num_blocks: int) -> None:
        """Let the pool have `num_blocks` blocks less, those with the highest ids. O(number of blocks).

        Cached ones are evicted, and their reuse watchers are called.
        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            InvalidBlockError: one of them is in use, or the null block. Nothing has changed.
            Whatever a reuse watcher raises; the blocks are at the front of the queue then.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgumentError(f"the pool cannot shrink by {num_blocks} blocks; see add_blocks()")
        if num_blocks == 0:
            return
        if self._unfinished != NOTHING:
            self._recover()
        num_left = max(0, self.num_gpu_blocks - num_blocks)
        removed = list(self.blocks[num_left:])
        for block in removed:
            if block.ref_cnt != 0 or block.is_null:
                raise InvalidBlockError(
                    f"block {block.block_id} is {'null' if block.is_null else 'in use'}; only free blocks "
                    "can be removed. Move it below the others first."
                )
        blocks = self.blocks[:num_left]
        if self._reuse_watchers:
            tell_watchers_of(self, removed)
        for block in removed:
            self._maybe_evict_cached_block(block)
        gone: list[KVCacheBlock] = []
        try:
            take_listed(self, removed, gone, False)
        finally:
            if gone:
                self._last_found = blocks[0]
                self.blocks = blocks
                self.num_gpu_blocks = num_left
                if self._num_guessable:
                    self._num_guessable = num_left
        for block in removed:
            block.ref_cnt = 0

    def _recover(self) -> None:
        queue = self.free_block_queue
        head = queue.fake_free_list_head
        todo = self._unfinished
        blocks = self._unfinished_blocks
        if todo == UNDO_TAKING_FIRST:
            if self._unfinished_count < 0:
                self._unfinished_count = len(blocks)
            while self._unfinished_count > 0:
                # From the last one on, each to the front of the queue.
                block = blocks[self._unfinished_count - 1]
                after = head.next_free_block
                assert after is not None
                block.ref_cnt = 0
                block.prev_free_block = head
                block.next_free_block = after
                head.next_free_block = block
                after.prev_free_block = block
                self._unfinished_count -= 1
            queue.num_free_blocks = self._unfinished_total
        elif todo in (UNDO_TOUCHING, UNDO_TAKING_LISTED):
            while self._unfinished_count > 0:
                # From the last one on, each to between the neighbours that it still names.
                block = blocks[self._unfinished_count - 1]
                if not block.is_null:
                    block.ref_cnt = block.ref_cnt - 1 if todo == UNDO_TOUCHING else 0
                    if block.ref_cnt == 0:
                        before = block.prev_free_block
                        after = block.next_free_block
                        assert before is not None
                        assert after is not None
                        before.next_free_block = block
                        after.prev_free_block = block
                self._unfinished_count -= 1
        elif todo in (CLEARING_LINKS, CLEARING_LINKS_OF_TAKEN):
            for block in blocks:
                if block.next_free_block is not None:
                    block.prev_free_block = None
                    block.next_free_block = None
                    if todo == CLEARING_LINKS_OF_TAKEN:
                        block.generation += 1
        elif todo == UNDO_FREEING:
            owner = self._owner
            while self._unfinished_count > 0:
                block = blocks[self._unfinished_count - 1]
                if not block.is_null and (block._owner is owner or block._owner is None):
                    if block.ref_cnt == 0:
                        block.prev_free_block = None
                        block.next_free_block = None
                    block.ref_cnt += 1
                self._unfinished_count -= 1
        elif todo == WATCHING:
            on_reuse = self._unfinished_watcher
            assert on_reuse is not None
            for block in blocks:
                self._reuse_watchers[block.block_id] = on_reuse
        elif todo == RESETTING:
            if self.colder_tiers is not None:
                self.colder_tiers.on_cache_reset()
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            self.cached_block_hashes_by_block.clear()
            self._reuse_watchers.clear()  # what is left waits for bare blocks
            for block in self.blocks:
                if block._block_hash is not None:
                    block._block_hash = None
                    block._num_hash_tokens = -1
                    block._next_cached_id = -1
            cleared = [self._cleared_type()] if self.enable_kv_cache_events else []
            events = self.kv_event_queue
            events += cleared
            self.num_evictions = self._unfinished_total
            self._unfinished = NOTHING
        elif todo == SWAPPING_IDS:
            self._put_ids()
        else:
            super()._recover()
        self._unfinished = NOTHING

    def _put_ids(self) -> None:
        """Put in place what `swap_block_ids` worked out; again, if it was interrupted."""
        swap = self._unfinished_swap
        assert swap is not None
        entries = self.cached_block_hash_to_block._cache
        for first_id, second_id in swap.pairs:
            swap.blocks[first_id].block_id = first_id
            swap.blocks[second_id].block_id = second_id
        for key, copies in swap.copies:
            entries[key] = copies
        if swap.any_cached:
            if swap.successors is None:
                swap.successors = find_moved_successors(self.blocks)
            for index in range(0, len(swap.successors), 2):
                swap.successors[index]._next_cached_id = swap.successors[index + 1].block_id
        if swap.secondary is not None:
            self.cached_block_hashes_by_block = swap.secondary
        if swap.watchers is not None:
            self._reuse_watchers = swap.watchers
        self.blocks = swap.blocks
        self._unfinished = NOTHING
        self._unfinished_swap = None

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


class IdSwap:
    """What `swap_block_ids` is about to put in place; see `BlockPoolCore._recover`."""

    def __init__(
        self, blocks: tuple[KVCacheBlock, ...], pairs: list[tuple[int, int]], any_cached: bool
    ) -> None:
        self.blocks: tuple[KVCacheBlock, ...] = blocks
        self.pairs: list[tuple[int, int]] = pairs
        self.any_cached: bool = any_cached
        self.secondary: dict[int, dict[BlockHashWithGroupId, None]] | None = None
        self.copies: list[tuple[BlockHashWithGroupId, dict[int, KVCacheBlock]]] = []
        # See `find_moved_successors`; None until the blocks have their new ids.
        self.successors: list[KVCacheBlock] | None = None
        self.watchers: dict[int, Callable[[KVCacheBlock], None]] | None = None


# Functions, since a compiled method that subclasses may override is looked up by name at each call.
#
# Each changes blocks in a loop that can be undone, and puts the result in place by assignments without a call
# in between; see the remark in prefix_cache.py. What interrupts the undoing, `_recover` completes at the next
# call.


def finish(pool: BlockPoolCore) -> None:
    """Do what is noted to be unfinished, to its end even if it is interrupted once."""
    try:
        pool._recover()
    except BaseException:
        pool._recover()
        raise


def take_first(pool: BlockPoolCore, num_blocks: int, onto: list[KVCacheBlock] | None) -> list[KVCacheBlock]:
    """See `BlockPoolCore.get_new_blocks`; appends the blocks to `onto` as well."""
    if pool._unfinished != NOTHING:
        pool._recover()
    queue = pool.free_block_queue
    if num_blocks > queue.num_free_blocks:
        raise OutOfBlocksError(
            f"Cannot get {num_blocks} free blocks from the pool: asked for {num_blocks} blocks, "
            f"{queue.num_free_blocks} are free of {pool.num_gpu_blocks - 1}. "
            "Free a request, or ask for fewer."
        )
    if num_blocks < 0:
        raise InvalidArgumentError(f"asked for {num_blocks} blocks; the count is 0 or more")
    if pool._reuse_watchers:
        tell_watchers_of_next(pool, num_blocks)
    taken: list[KVCacheBlock] = []
    if num_blocks == 0:
        return taken
    num_free = queue.num_free_blocks
    head = queue.fake_free_list_head
    block = head.next_free_block
    any_cached = len(pool.cached_block_hashes_by_block) > 0
    is_cut = False
    try:
        for _ in range(num_blocks):
            if block is None or block.ref_cnt != 0:
                raise CorruptedPoolError(_describe_bad_queue(queue, len(taken), block))
            taken.append(block)
            after = block.next_free_block
            if after is None:  # the tail has none
                raise CorruptedPoolError(_describe_bad_queue(queue, len(taken) - 1, block))
            # No call from here to the end of the turn: a block is unlinked, and the next one is at hand.
            block.prev_free_block = None
            block.next_free_block = None
            block.ref_cnt = 1
            block.generation += 1
            if block._block_hash is not None:
                any_cached = True
            block = after
        assert block is not None
        head.next_free_block = block
        block.prev_free_block = head
        queue.num_free_blocks = num_free - num_blocks
        is_cut = True
        if any_cached or pool.metrics_collector is not None:
            give_content_away(pool, taken, any_cached)
        if onto is not None:
            onto += taken
    except BaseException:
        if is_cut:
            pool._unfinished_total = queue.num_free_blocks + num_blocks
        else:
            if taken and taken[-1] is block:
                del taken[-1]  # appended, and not unlinked yet
            following = block
            if following is None:
                following = queue.fake_free_list_tail
            head.next_free_block = following
            following.prev_free_block = head
            pool._unfinished_total = num_free
        pool._unfinished_blocks = taken
        pool._unfinished_count = -1
        pool._unfinished = UNDO_TAKING_FIRST
        pool._recover()
        raise
    return taken


def _describe_bad_queue(queue: FreeKVCacheBlockQueue, num_linked: int, culprit: KVCacheBlock | None) -> str:
    """Say what is wrong with the block that comes after the first `num_linked` in the queue."""
    if culprit is None or culprit.ref_cnt == 0:
        return (
            f"num_free_blocks is {queue.num_free_blocks} but only {num_linked} blocks are linked: "
            "the counter is out of sync with the queue"
        )
    return (
        f"block {culprit.block_id} is in the free queue with ref_cnt {culprit.ref_cnt}; "
        "only touch() may reference a free block"
    )


def give_content_away(pool: BlockPoolCore, taken: list[KVCacheBlock], any_cached: bool) -> None:
    """Notify tiers and the observer that these blocks are taken, and evict what they hold."""
    if any_cached and pool.colder_tiers is not None:
        pool._tell_tiers(taken, pool.colder_tiers)
    if pool.metrics_collector is not None:
        pool._tell_observer(taken, pool.metrics_collector)
    elif any_cached and pool.enable_caching:
        evict_all(pool, taken)


def take_listed(
    pool: BlockPoolCore,
    listed: list[KVCacheBlock],
    onto: list[KVCacheBlock] | None,
    is_reuse: bool = True,
) -> None:
    """See `BlockPoolCore.take_blocks`; appends the blocks to `onto` as well.

    Args:
        is_reuse: False notifies no watcher and evicts nothing.
    """
    if pool._unfinished != NOTHING:
        pool._recover()
    if is_reuse and pool._reuse_watchers:
        check_takeable(pool, listed)
        tell_watchers_of(pool, listed)
    owner = pool._owner
    queue = pool.free_block_queue
    num_listed = len(listed)
    any_cached = len(pool.cached_block_hashes_by_block) > 0
    num_done: i64 = 0
    is_taken = False
    try:
        for block in listed:
            before = block.prev_free_block
            after = block.next_free_block
            if block._owner is not owner or block.is_null or block.ref_cnt != 0:
                raise_not_takeable(block, owner)
            if before is None or after is None:
                raise_not_takeable(block, owner)
            if block._block_hash is not None:
                any_cached = True
            # The block keeps its own links until all went well: they say where it belongs.
            before.next_free_block = after
            after.prev_free_block = before
            block.ref_cnt = 1  # which a second mention of the block comes upon
            num_done += 1
        if is_reuse and (any_cached or pool.metrics_collector is not None):
            give_content_away(pool, listed, any_cached)
        if onto is not None:
            onto += listed
        queue.num_free_blocks -= num_listed
        is_taken = True
        for block in listed:
            if block.next_free_block is not None:
                block.prev_free_block = None
                block.next_free_block = None
                block.generation += 1
    except BaseException as error:
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = CLEARING_LINKS_OF_TAKEN if is_taken else UNDO_TAKING_LISTED
        pool._recover()
        raise_typed(error, listed, "take_blocks()")


def check_takeable(pool: BlockPoolCore, listed: list[KVCacheBlock]) -> None:
    """Raise what `take_listed` would. Only looks."""
    seen: set[int] = set()
    try:
        for block in listed:
            if block._owner is not pool._owner or block.is_null or block.ref_cnt != 0:
                raise_not_takeable(block, pool._owner)
            if block.next_free_block is None or block.block_id in seen:
                raise_not_takeable(block, pool._owner)
            seen.add(block.block_id)
    except Exception as error:
        raise_typed(error, listed, "take_blocks()")


def raise_not_takeable(block: KVCacheBlock, owner: Any) -> NoReturn:
    """A block that `take_blocks` does not take."""
    if block._owner is not owner or block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; "
            "take_blocks() takes free blocks of the pool"
        )
    raise InvalidBlockError(
        f"block {block.block_id} is in use, or listed twice; take_blocks() takes free blocks"
    )


def tell_watchers_of_next(pool: BlockPoolCore, num_blocks: int) -> None:
    """Call the reuse watchers of the next `num_blocks` free blocks, in order, and forget them.

    They are off the queue meanwhile, and back at its front even if a watcher raises.
    """
    queue = pool.free_block_queue
    listed: list[KVCacheBlock] = []
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail and len(listed) < num_blocks:
        listed.append(block)
        block = block.next_free_block
    tell_watchers_of(pool, listed)


def tell_watchers_of(pool: BlockPoolCore, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these free blocks, off the queue meanwhile, then at its front."""
    queue = pool.free_block_queue
    num_free = queue.num_free_blocks
    num_blocks = len(blocks)
    off: list[KVCacheBlock] = []
    is_off = False
    try:
        for block in blocks:
            off.append(block)
            before = block.prev_free_block
            after = block.next_free_block
            assert before is not None
            assert after is not None
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = None
            block.next_free_block = None
        queue.num_free_blocks = num_free - num_blocks
        is_off = True
        pool._tell_watchers(blocks)
    finally:
        if not is_off and off and off[-1].next_free_block is not None:
            del off[-1]  # appended, and not unlinked yet
        pool._unfinished_total = queue.num_free_blocks + num_blocks if is_off else num_free
        pool._unfinished_blocks = off
        pool._unfinished_count = -1
        pool._unfinished = UNDO_TAKING_FIRST
        finish(pool)


def touch_all(pool: BlockPoolCore, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None) -> None:
    """See `BlockPoolCore.touch`; appends the blocks to `onto` as well."""
    if pool._unfinished != NOTHING:
        pool._recover()
    owner = pool._owner
    num_taken: i64 = 0
    num_done: i64 = 0
    is_touched = False
    try:
        for block in listed:
            if block._owner is not owner:
                pool._check_stranger(block)
            if block.is_null:
                num_done += 1
                continue
            ref_cnt = block.ref_cnt
            if ref_cnt == 0:
                before = block.prev_free_block
                after = block.next_free_block
                if before is None or after is None:
                    raise_not_queued(block)
                # The block keeps its own links until all went well: they say where it belongs.
                before.next_free_block = after
                after.prev_free_block = before
                num_taken += 1
            elif ref_cnt >= MAX_REFERENCES:
                raise InvalidBlockError(
                    f"block {block.block_id} has {ref_cnt} references, the most that can be counted"
                )
            block.ref_cnt = ref_cnt + 1
            num_done += 1
        observer = pool.metrics_collector
        if observer is not None:
            for block in listed:
                if not block.is_null:
                    observer.on_block_accessed(block)
        if onto is not None:
            onto += listed
        is_touched = True
        if num_taken:
            pool.free_block_queue.num_free_blocks -= num_taken
            for block in listed:
                if block.next_free_block is not None:
                    block.prev_free_block = None
                    block.next_free_block = None
    except BaseException as error:
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = CLEARING_LINKS if is_touched else UNDO_TOUCHING
        pool._recover()
        raise_typed(error, listed, "touch()")


def free_all(pool: BlockPoolCore, listed: list[KVCacheBlock], empties: bool) -> None:
    """See `BlockPoolCore.free_blocks`; empties the list in the same step, if asked to."""
    if pool._unfinished != NOTHING:
        pool._recover()
    owner = pool._owner
    caching = pool.enable_caching
    # Two chains are linked on the way, and spliced into the queue when all went well.
    front_first: KVCacheBlock | None = None
    front_last: KVCacheBlock | None = None
    back_first: KVCacheBlock | None = None
    back_last: KVCacheBlock | None = None
    num_front: i64 = 0
    num_back: i64 = 0
    foreign: list[KVCacheBlock] | None = None
    by_pool: dict[int, tuple[Any, list[KVCacheBlock]]] | None = None
    num_done: i64 = 0
    is_freed = False
    try:
        for block in listed:
            if block.is_null:
                num_done += 1
                continue
            if block._owner is not owner and block._owner is not None:
                if foreign is None:
                    foreign = []
                foreign.append(block)
                num_done += 1
                continue
            ref_cnt = block.ref_cnt - 1
            if ref_cnt < 0 and block._owner is not None:
                raise InvalidBlockError(
                    f"block {block.block_id} is free; free_blocks() takes blocks that are in use. "
                    "Was it freed twice?"
                )
            block.ref_cnt = ref_cnt
            num_done += 1
            if ref_cnt != 0:
                continue
            if block._block_hash is None or not caching:
                if front_last is None:
                    front_first = block
                else:
                    front_last.next_free_block = block
                    block.prev_free_block = front_last
                front_last = block
                num_front += 1
            else:
                if back_last is None:
                    back_first = block
                else:
                    back_last.next_free_block = block
                    block.prev_free_block = back_last
                back_last = block
                num_back += 1
        if foreign is not None:
            by_pool = _group_by_pool(foreign)
        pool.free_block_queue.splice(front_first, front_last, num_front, back_first, back_last, num_back)
        is_freed = True
        if empties:
            listed.clear()
    except BaseException as error:
        if is_freed:
            if empties:
                listed.clear()
            raise
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = UNDO_FREEING
        pool._recover()
        raise_typed(error, listed, "free_blocks(ordered_blocks)")
    if by_pool is not None:
        for other, theirs in by_pool.values():
            other.free_blocks(theirs)


def swap_ids(pool: BlockPoolCore, pairs: list[tuple[int, int]]) -> None:
    """See `BlockPoolCore.swap_block_ids`."""
    if pool._unfinished != NOTHING:
        pool._recover()
    if pool.holds.list_holds():
        pool.holds.check_movable({block_id for pair in pairs for block_id in pair})
    old = pool.blocks
    num_blocks = len(old)
    new = list(old)
    any_cached = False
    any_keyed_by_id = len(pool._reuse_watchers) > 0 or len(pool.cached_block_hashes_by_block) > 0
    is_wrong = False
    for first_id, second_id in pairs:
        # An id that is another's by now has been listed before.
        if not (0 < first_id < num_blocks and 0 < second_id < num_blocks) or first_id == second_id:
            is_wrong = True
            break
        first = old[first_id]
        second = old[second_id]
        if new[first_id] is not first or new[second_id] is not second:
            is_wrong = True
            break
        new[first_id] = second
        new[second_id] = first
        if first._block_hash is not None or second._block_hash is not None:
            any_cached = True
            if first._next_cached_id < 0 or second._next_cached_id < 0:
                any_keyed_by_id = True
    if is_wrong:
        raise InvalidBlockError(
            f"swap_block_ids() takes distinct ids of 1..{num_blocks - 1}, each listed once"
        )
    # All of it but the successors is worked out before anything changes, and put in place by `_recover`.
    swap = IdSwap(tuple(new), list(pairs), any_cached)
    new_ids: dict[int, int] = {}
    if any_keyed_by_id:
        new_ids.update(pairs)
        new_ids.update([(second_id, first_id) for first_id, second_id in pairs])
        if any_cached:
            moved = [old[block_id] for block_id in new_ids]
            swap.secondary, swap.copies = plan_rekeying(pool, moved, new_ids)
    if pool._reuse_watchers:
        swap.watchers = {
            new_ids.get(block_id, block_id): on_reuse for block_id, on_reuse in pool._reuse_watchers.items()
        }
    pool._unfinished_swap = swap
    pool._unfinished = SWAPPING_IDS
    finish(pool)


def find_moved_successors(old: tuple[KVCacheBlock, ...]) -> list[KVCacheBlock]:
    """Return each block that remembers its successor by an id which this has no longer, and the successor.

    Args:
        old: the blocks at their ids of before.
    """
    num_blocks: i32 = len(old)
    found: list[KVCacheBlock] = []  # a pair for each would cost more than the search
    for block in old:
        next_id = block._next_cached_id
        if 0 < next_id < num_blocks:
            successor = old[next_id]
            if successor.block_id != next_id:
                found.append(block)
                found.append(successor)
    return found


def as_pairs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of ids as a list of pairs of ints, a list of such as it is.

    Raises:
        InvalidTypeError: an element is not a pair of integers.
    """
    listed = as_list("pairs", pairs)
    checked: list[Any] = listed
    for position, pair in enumerate(listed):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            refuse_type(f"pairs[{position}]", pair, "a pair of int")
        if isinstance(pair, tuple) and isinstance(pair[0], int) and isinstance(pair[1], int):
            continue
        if checked is listed:
            checked = listed.copy()
        checked[position] = (
            as_int(f"pairs[{position}]", pair[0]),
            as_int(f"pairs[{position}]", pair[1]),
        )
    return checked


def raise_not_queued(block: KVCacheBlock) -> NoReturn:
    """A block with ref_cnt 0 that the free queue does not have."""
    raise InvalidBlockError(
        f"block {block.block_id} has ref_cnt 0 but is not in this pool's queue: {block!r}"
    )


def _group_by_pool(
    blocks: list[KVCacheBlock],
) -> dict[int, tuple[Any, list[KVCacheBlock]]]:
    """Blocks of other pools, by pool in order of appearance, after checking that each may be freed."""
    by_pool: dict[int, tuple[Any, list[KVCacheBlock]]] = {}
    references: dict[int, int] = {}
    for block in blocks:
        pool = block._owner()
        if pool is None:
            raise InvalidBlockError(f"block {block.block_id} belongs to a pool that is gone")
        left = references.get(id(block), block.ref_cnt) - 1
        if left < 0:
            raise InvalidBlockError(
                f"block {block.block_id} of another pool is free; free_blocks() takes blocks that are in "
                "use. Was it freed twice?"
            )
        references[id(block)] = left
        by_pool.setdefault(id(pool), (pool, []))[1].append(block)
    return by_pool
