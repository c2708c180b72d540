"""`BlockPoolCore`: who holds which block, and which free block is next. Use `kv_pool.BlockPool`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from mypy_extensions import i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_keys import CachedKey, iter_cached_keys
from kv_pool.core.free_queue import FreeKVCacheBlockQueue, link
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.observer import BlockObserver, ColderTiers
from kv_pool.core.prefix_cache import PrefixCache, check_ours, evict, evict_all, raise_typed, rekey
from kv_pool.errors import (
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    OutOfBlocksError,
)


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
        if not isinstance(num_gpu_blocks, int) or num_gpu_blocks < 1:
            raise InvalidArgumentError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; a pool has at least 1 block, its null block"
            )
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
        self._has_retention: bool = False  # blocks have room for what one says of them
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
            raise InvalidTypeError(f"num_blocks is a {type(num_blocks).__name__}; it counts blocks, an int")
        queue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise OutOfBlocksError(
                f"Cannot get {num_blocks} free blocks from the pool: asked for {num_blocks} blocks, "
                f"{queue.num_free_blocks} are free of {self.num_gpu_blocks - 1}. "
                "Free a request, or ask for fewer."
            )
        if num_blocks < 0:
            raise InvalidArgumentError(f"asked for {num_blocks} blocks; the count is 0 or more")
        if self._reuse_watchers:
            self._tell_watchers_of_next(num_blocks)
        taken: list[KVCacheBlock] = []
        if num_blocks == 0:
            return taken
        head = queue.fake_free_list_head
        block = head.next_free_block
        any_cached = len(self.cached_block_hashes_by_block) > 0
        for _ in range(num_blocks):
            if block is None or block.ref_cnt != 0:
                self._undo_take(taken, block)
            after = block.next_free_block
            if after is None:  # the tail has none
                self._undo_take(taken, block)
            block.prev_free_block = None
            block.next_free_block = None
            block.ref_cnt = 1
            block.generation += 1
            if block._block_hash is not None:
                any_cached = True
            taken.append(block)
            block = after
        assert block is not None
        head.next_free_block = block
        block.prev_free_block = head
        queue.num_free_blocks -= num_blocks
        if any_cached and self.colder_tiers is not None:
            self._tell_tiers(taken, self.colder_tiers)
        if self.metrics_collector is not None:
            self._tell_observer(taken, self.metrics_collector)
        elif any_cached and self.enable_caching:
            evict_all(self, taken)
        return taken

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take these free blocks out of wherever they are in the queue, as `get_new_blocks` takes the next.

        Each has ref_cnt 1 and no hash afterwards; one that was cached is evicted, in the given order.

        Raises:
            InvalidBlockError: a block is null, in use, listed twice, or not this pool's. Nothing has changed.
            InvalidTypeError: not a block. Nothing has changed.
            Whatever a reuse watcher raises; the blocks are at the front of the queue then.
        Cost: O(len(blocks)), whatever the size of the pool.
        """
        owner = self._owner
        listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
        num_done: i64 = 0
        try:
            for block in listed:
                if block._owner is not owner or block.is_null:
                    raise InvalidBlockError(
                        f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; "
                        "take_blocks() takes free blocks of the pool"
                    )
                if block.ref_cnt != 0 or block.next_free_block is None or block.prev_free_block is None:
                    raise InvalidBlockError(
                        f"block {block.block_id} is in use, or listed twice; take_blocks() takes free blocks"
                    )
                block.ref_cnt = 1  # which a second mention of the block comes upon
                num_done += 1
        except Exception as error:
            for block in listed[:num_done]:
                block.ref_cnt = 0
            raise_typed(error, listed, "take_blocks()")
        if self._reuse_watchers:
            self._tell_watchers_of(listed)
        any_cached = len(self.cached_block_hashes_by_block) > 0
        for block in listed:
            before = block.prev_free_block
            after = block.next_free_block
            assert before is not None
            assert after is not None
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = None
            block.next_free_block = None
            block.generation += 1
            if block._block_hash is not None:
                any_cached = True
        self.free_block_queue.num_free_blocks -= len(listed)
        if any_cached and self.colder_tiers is not None:
            self._tell_tiers(listed, self.colder_tiers)
        if self.metrics_collector is not None:
            self._tell_observer(listed, self.metrics_collector)
        elif any_cached and self.enable_caching:
            evict_all(self, listed)

    def _tell_watchers_of(self, blocks: list[KVCacheBlock]) -> None:
        """Call whoever waits for these free blocks, off the queue meanwhile and at its front afterwards."""
        queue = self.free_block_queue
        for block in blocks:
            block.ref_cnt = 0
            queue.remove(block)
        try:
            self._tell_watchers(blocks)
        finally:
            queue.prepend_n(blocks)
        for block in blocks:
            block.ref_cnt = 1

    def _undo_take(self, taken: list[KVCacheBlock], culprit: KVCacheBlock | None) -> NoReturn:
        """Link again what was taken off the front of the queue, and say what is wrong with what came next."""
        queue = self.free_block_queue
        for block in taken:
            block.ref_cnt = 0
        link(queue.fake_free_list_head, taken, queue.fake_free_list_tail if culprit is None else culprit)
        if culprit is None or culprit.ref_cnt == 0:
            raise CorruptedPoolError(
                f"num_free_blocks is {queue.num_free_blocks} but only {len(taken)} blocks are linked: "
                "the counter is out of sync with the queue"
            )
        raise CorruptedPoolError(
            f"block {culprit.block_id} is in the free queue with ref_cnt {culprit.ref_cnt}; "
            "only touch() may reference a free block"
        )

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

    def _tell_watchers_of_next(self, num_blocks: int) -> None:
        """Call, once and in order, whoever waits for the next `num_blocks` free blocks to be reused.

        They are off the queue meanwhile, and back at its front even if a watcher raises.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        try:
            self._tell_watchers(blocks)
        finally:
            self.free_block_queue.prepend_n(blocks)

    def _tell_watchers(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Call, once and in order, whoever waits for these blocks to be reused."""
        for block in blocks:
            on_reuse = self._reuse_watchers.pop(block.block_id, None)
            if on_reuse is not None:
                on_reuse(block)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block; a free one leaves the free queue. Its hash stays.

        Null blocks are skipped. A block that is listed twice gets two references.

        Raises:
            InvalidBlockError: a block of another pool, or a bare block that was never free here.
            InvalidTypeError: not a block. In both cases nothing has changed.
        Cost: O(len(blocks)). Contract: vLLM 0.33 `BlockPool.touch`.
        """
        owner = self._owner
        listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
        num_taken: i64 = 0
        num_done: i64 = 0
        try:
            for block in listed:
                if block._owner is not owner:
                    self._check_stranger(block)
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
                block.ref_cnt = ref_cnt + 1
                num_done += 1
        except Exception as error:
            self._undo_touch(listed[:num_done])
            raise_typed(error, listed, "touch()")
        if num_taken:
            for block in listed:
                if block.next_free_block is not None:
                    block.prev_free_block = None
                    block.next_free_block = None
            self.free_block_queue.num_free_blocks -= num_taken
        observer = self.metrics_collector
        if observer is not None:
            for block in listed:
                if not block.is_null:
                    observer.on_block_accessed(block)

    def _undo_touch(self, touched: list[KVCacheBlock]) -> None:
        """Backwards, each to between the neighbours that it still names."""
        for block in reversed(touched):
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                before = block.prev_free_block
                after = block.next_free_block
                assert before is not None
                assert after is not None
                before.next_free_block = block
                after.prev_free_block = block

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
        owner = self._owner
        caching = self.enable_caching
        listed: list[KVCacheBlock] = (
            ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
        )
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
        except Exception as error:
            for block in listed[:num_done]:
                if not block.is_null and (block._owner is owner or block._owner is None):
                    if block.ref_cnt == 0:
                        block.prev_free_block = None
                        block.next_free_block = None
                    block.ref_cnt += 1
            raise_typed(error, listed, "free_blocks()")
        queue = self.free_block_queue
        if front_first is not None and front_last is not None:
            queue.splice_front(front_first, front_last, num_front)
        if back_first is not None and back_last is not None:
            queue.splice_back(back_first, back_last, num_back)
        if by_pool is not None:
            for pool, theirs in by_pool.values():
                pool.free_blocks(theirs)

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
        owner = self._owner
        listed: list[KVCacheBlock] = list(blocks)
        released: list[KVCacheBlock] = []
        index = -1
        try:
            for index, block in enumerate(listed):  # noqa: B007 (undoing reads it)
                check_ours(block, owner, "unpin_blocks()")
                if block.is_null or block.ref_cnt < 1:
                    raise InvalidBlockError(
                        f"block {block.block_id} is {'the null block' if block.is_null else 'free'}; "
                        "unpin_blocks() takes blocks that are in use"
                    )
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    released.append(block)
        except Exception as error:
            for block in listed[:index]:
                block.ref_cnt += 1
            raise_typed(error, listed, "unpin_blocks()")
        for block in listed:
            self._reuse_watchers[block.block_id] = on_reuse
        self.free_block_queue.append_n(released)

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """May its only holder write into the block? Not if it is null, shared, free or cached."""
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

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        One `BlockRemoved` per block that was cached. O(len(block_ids)).
        Contract: vLLM 0.33 `BlockPool.evict_blocks`.
        """
        listed: list[Any] = list(block_ids)
        num_blocks: i64 = self.num_gpu_blocks
        for element in listed:
            if not isinstance(element, int):
                raise InvalidTypeError(f"evict_blocks() takes block ids, got a {type(element).__name__}")
            block_id: i64 = element
            if block_id < 0 or block_id >= num_blocks:
                raise InvalidBlockError(
                    f"Invalid block_id {block_id}: this pool has blocks 0..{self.num_gpu_blocks - 1}. "
                    "Did a KV connector report a block that was never allocated here?"
                )
        for element in listed:
            block_id = element
            self._maybe_evict_cached_block(self.blocks[block_id])

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
        num_in_use = self.num_gpu_blocks - 1 - self.free_block_queue.num_free_blocks
        if num_in_use:
            import logging

            logging.getLogger(__name__).warning(
                "prefix cache not reset: %d blocks are still in use", num_in_use
            )
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for secondary in self.cached_block_hashes_by_block.values():
            self.num_evictions += len(secondary)
        self.cached_block_hashes_by_block.clear()
        try:
            if self._reuse_watchers:
                watched = [block_id for block_id in self._reuse_watchers if block_id < self.num_gpu_blocks]
                self._tell_watchers([self.blocks[block_id] for block_id in watched])
                self._reuse_watchers.clear()  # what is left waits for bare blocks
        finally:
            for block in self.blocks:
                if block._block_hash is not None:
                    self.num_evictions += 1
                    block.reset_hash()
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(self._cleared_type())
        if self.colder_tiers is not None:
            self.colder_tiers.on_cache_reset()
        return True

    # ---- other ids, other sizes ------------------------------------------------------------------

    def swap_block_ids(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the ids of the two blocks of each pair, after their bytes have been moved accordingly.

        A block object keeps everything else: references, hash, prefix map entries, its place in the queue,
        whoever waits for its reuse. No events. Block tables hold objects and need nothing; whoever kept an
        id has to look again.

        Raises:
            InvalidBlockError: an id is not one of this pool's, is 0, or is listed twice. Nothing has changed.
        Cost: O(number of blocks), some nanoseconds each, and O(len(pairs)).
        """
        old = self.blocks
        num_blocks = len(old)
        new = list(old)
        moved: list[KVCacheBlock] = []
        for first_id, second_id in pairs:
            # An id that is not its block's any more has been listed before.
            is_wrong = not (0 < first_id < num_blocks and 0 < second_id < num_blocks) or first_id == second_id
            if is_wrong or old[first_id].block_id != first_id or old[second_id].block_id != second_id:
                for block_id, block in enumerate(old):
                    block.block_id = block_id
                raise InvalidBlockError(
                    f"swap_block_ids() takes distinct ids of 1..{num_blocks - 1}, each listed once"
                )
            first = old[first_id]
            second = old[second_id]
            first.block_id = second_id
            second.block_id = first_id
            new[first_id] = second
            new[second_id] = first
            moved.append(first)
            moved.append(second)
        self.blocks = tuple(new)
        any_cached = False
        for block in moved:
            if block._block_hash is not None:
                any_cached = True
        if any_cached:
            rekey(self, moved, pairs)
            for block in old:  # each remembers its successor by id
                if 0 < block._next_cached_id < num_blocks:
                    block._next_cached_id = old[block._next_cached_id].block_id
        if self._reuse_watchers:
            self._reuse_watchers = {
                old[block_id].block_id if 0 <= block_id < num_blocks else block_id: on_reuse
                for block_id, on_reuse in self._reuse_watchers.items()
            }

    def add_blocks(self, num_blocks: int) -> None:
        """Let the pool have `num_blocks` blocks more, free and next to be reused. O(number of blocks)."""
        added = [
            KVCacheBlock(block_id)
            for block_id in range(self.num_gpu_blocks, self.num_gpu_blocks + num_blocks)
        ]
        for block in added:
            block._owner = self._owner
        self.blocks += tuple(added)
        self.num_gpu_blocks += num_blocks
        if self._num_guessable:
            self._num_guessable = self.num_gpu_blocks
        self.free_block_queue.prepend_n(added)

    def remove_last_blocks(self, num_blocks: int) -> None:
        """Let the pool have `num_blocks` blocks less, those with the highest ids. O(number of blocks).

        They are evicted where cached, and whoever waits for their reuse is told.
        Raises:
            InvalidBlockError: one of them is in use, or the null block. Nothing has changed.
            Whatever a reuse watcher raises; the blocks are at the front of the queue then.
        """
        num_left = self.num_gpu_blocks - num_blocks
        removed = list(self.blocks[num_left:])
        for block in removed:
            if block.ref_cnt != 0 or block.is_null:
                raise InvalidBlockError(
                    f"block {block.block_id} is {'null' if block.is_null else 'in use'}; only free blocks "
                    "can be removed. Move it below the others first."
                )
        if self._reuse_watchers:
            self._tell_watchers_of(removed)
        for block in removed:
            block.ref_cnt = 0
            self.free_block_queue.remove(block)
            self._maybe_evict_cached_block(block)
        self.blocks = self.blocks[:num_left]
        self.num_gpu_blocks = num_left
        if self._num_guessable:
            self._num_guessable = num_left
        self._last_found = self.blocks[0]

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
