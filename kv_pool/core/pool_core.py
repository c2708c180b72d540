"""`BlockPoolCore`: the compiled base class of `kv_pool.BlockPool`, which users import instead."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import (
    as_int,
    as_ints,
    as_list,
    as_list_of,
    check_number,
    check_ours,
    check_type,
    refuse_interrupted,
    refuse_type,
)
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import GROUP_0, get_block_hash, get_group_id, group_suffix, is_key
from kv_pool.core.caching import add_key, cache_full, cache_partial, move_keys
from kv_pool.core.deadlines import NEVER
from kv_pool.core.evicting import count_cause, evict, evict_invalid
from kv_pool.core.eviction_order import BandPolicy
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.freeing import free_listed, unpin_listed
from kv_pool.core.hash_map import BlockHashToBlockMap, CachedKey
from kv_pool.core.holds import Hold, HoldReport
from kv_pool.core.id_swap import as_pairs, check_pairs, swap_ids
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.live_curve import LiveCurve
from kv_pool.core.policy_host import PolicyHost, find_host, open_policy
from kv_pool.core.pool_state import PoolState, check_whole, set_blocks
from kv_pool.core.repairing import forget_all, repair_pool
from kv_pool.core.stored_events import hashes_of, make_external_hash, make_stored
from kv_pool.core.taking import (
    check_takeable,
    notify_watchers,
    notify_watchers_off_queue,
    refuse_count,
    take,
    take_listed,
    touch_listed,
)
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPoolCore(PoolState):
    """The compiled base class of `BlockPool`; see there."""

    # ---- lookups and events ------------------------------------------------------------------------

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[GroupId]
    ) -> list[KVCacheBlock] | None:
        """Return the blocks that hold this prefix, one per group in the order of the groups, or None.

        A miss in one group is a miss. If several blocks hold the prefix, the oldest is returned. Changes
        nothing: call `touch()` on the blocks to keep them. O(number of groups).
        Contract: vLLM 0.33 `BlockPool.get_cached_block`.
        """
        if not isinstance(block_hash, bytes):
            refuse_type("block_hash", block_hash, "bytes")
        if self.is_changing:
            refuse_interrupted()
        try:
            cache = self.cached_block_hash_to_block
            entries: dict[Any, Any] = cache._cache
            if self._num_guessable > 0 and len(kv_cache_group_ids) == 1 and cache._num_keys == len(entries):
                # Callers look up a sequence head first: the next lookup is likely for the block that was
                # cached after the last one found.
                next_id = self._last_found._next_cached_id
                if 0 < next_id < self._num_guessable:
                    guess = self.blocks[next_id]
                    suffix = group_suffix(kv_cache_group_ids[0])
                    if guess._next_cached_id >= 0 and is_key(guess.key, block_hash, suffix):
                        self._last_found = guess
                        return [guess]
            found: list[KVCacheBlock] = []
            for group_id in kv_cache_group_ids:
                # An entry is nearly always a bare block. This is a hot path, so skip the method call then.
                key = block_hash + (GROUP_0 if group_id == 0 else group_suffix(group_id))
                block = entries.get(key)
                if not isinstance(block, KVCacheBlock):
                    block = cache.get_one_block(BlockHashWithGroupId(key))
                    if block is None:
                        note_missed(self, key)
                        return None
                found.append(block)
            if found:
                self._last_found = found[0]
            return found
        except TypeError:
            group_ids = cast("list[GroupId]", as_ints("kv_cache_group_ids", kv_cache_group_ids))
            unchecked: Any = kv_cache_group_ids
            if all(isinstance(group_id, int) for group_id in unchecked):
                raise
            return self.get_cached_block(block_hash, group_ids)  # the ids were NumPy integers

    def find_cached_prefix(
        self,
        block_hashes: Sequence[BlockHash],
        max_num_blocks: int,
        kv_cache_group_id: GroupId = GroupId(0),
    ) -> list[KVCacheBlock]:
        """Return the blocks that hold the longest cached prefix of a sequence, head first.

        Args:
            block_hashes: the sequence's hashes at this group's block size, head first.
            max_num_blocks: the most blocks to return; 0 or less gives [].

        Stops at the first miss. Changes nothing. Replaces one `get_cached_block` call per block.
        O(blocks found + 1).
        """
        if not isinstance(max_num_blocks, int):
            max_num_blocks = as_int("max_num_blocks", max_num_blocks)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = GroupId(as_int("kv_cache_group_id", kv_cache_group_id))
        if self.is_changing:
            refuse_interrupted()
        suffix = group_suffix(kv_cache_group_id)
        found: list[KVCacheBlock] = []
        if max_num_blocks <= 0:
            return found
        cache = self.cached_block_hash_to_block
        blocks = self.blocks
        num_guessable = self._num_guessable if cache._num_keys == len(cache._cache) else 0
        next_id = 0
        try:
            for block_hash in block_hashes[:max_num_blocks]:
                if 0 < next_id < num_guessable:
                    guess = blocks[next_id]
                    if guess._next_cached_id >= 0 and is_key(guess.key, block_hash, suffix):
                        found.append(guess)
                        next_id = guess._next_cached_id
                        continue
                key = BlockHashWithGroupId(block_hash + suffix)
                block = cache.get_one_block(key)
                if block is None:
                    note_missed(self, key)
                    break
                found.append(block)
                next_id = block._next_cached_id
        except TypeError:
            as_list_of("block_hashes", block_hashes, bytes)
            raise
        return found

    def list_keys(self, blocks: Sequence[KVCacheBlock]) -> list[BlockHashWithGroupId]:
        """Return all keys of these blocks, the primary key of each block first. O(keys)."""
        secondary = self.cached_block_hashes_by_block
        keys: list[BlockHashWithGroupId] = []
        listed: list[KVCacheBlock] = as_list_of("blocks", blocks, KVCacheBlock)
        for block in listed:
            if block.key is not None:
                keys.append(cast(BlockHashWithGroupId, block.key))
                if secondary:
                    keys.extend(secondary.get(block.block_id, ()))
        return keys

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first. The caller may modify the list."""
        if not self.enable_kv_cache_events:
            return []
        if self.is_changing:
            refuse_interrupted()
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events

    def flush_evicted(self) -> None:
        """Flush evicted blocks that are not yet copied to the lower tiers. No-op without tiers.

        Call this outside the step loop, before moving blocks or overwriting newly allocated ones.
        """
        if self.lower_tiers is not None:
            self.lower_tiers.flush_evicted()

    # ---- adding references -------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate the `num_blocks` free blocks that are next in eviction order.

        Returns:
            Distinct blocks in that order, each with ref_cnt 1 and no hash. Their KV slots still hold the
            last owner's bytes. `num_blocks` counts blocks, not tokens; 0 gives [].
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            Any exception of a reuse watcher; all blocks are back in the queue.
            CorruptedPoolError: a free block has references, or fewer blocks are linked than the queue
                counts. Repair the pool.

        An allocated block that was cached is evicted: one `BlockRemoved` each. Touch prefix hits before
        calling this, or the hits themselves may be reused.
        Cost: O(num_blocks), whatever the size of the pool.
        Contract: vLLM 0.33 `BlockPool.get_new_blocks`.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if self.is_changing:
            refuse_interrupted()
        if num_blocks < 0 or num_blocks > self.free_block_queue.num_free_blocks:
            refuse_count(self, num_blocks)
        return take(self, num_blocks)

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Allocate these free blocks, wherever they are in the queue.

        As after `get_new_blocks`, each has ref_cnt 1 and no hash. Cached ones are evicted, in the given
        order.

        Raises:
            InvalidBlockError: a block is null, in use, listed twice, or of another pool. Nothing has changed.
            InvalidTypeError: an element is not a block. Nothing has changed.
            Any exception of a reuse watcher; the blocks are then at the front of the queue.
        Cost: O(len(blocks)), whatever the size of the pool.
        """
        listed = as_list("blocks", blocks)
        check_whole(self)
        check_takeable(self, listed)
        take_listed(self, listed)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block. A free block leaves the free queue and keeps its hash.

        Null blocks are skipped. A block that is listed twice gets two references.

        Raises:
            InvalidBlockError: a block is of another pool, or is a bare block with no references that is not
                in this pool's queue.
            InvalidTypeError: an element is not a block. In both cases nothing has changed.
        Cost: O(len(blocks)). Contract: vLLM 0.33 `BlockPool.touch`.
        """
        listed = as_list("blocks", blocks)
        if self.is_changing:
            refuse_interrupted()
        touch_listed(self, listed)

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
        if self.is_changing:
            refuse_interrupted()
        free_listed(self, listed)

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
        check_whole(self)
        unpin_listed(self, blocks, on_reuse)

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """Return True if the block may be written to: it has one reference, no hash, and is not null."""
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        return not block.is_null and block.ref_cnt == 1 and block.key is None

    # ---- caching -----------------------------------------------------------------------------------

    def cache_full_blocks(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: GroupId,
        block_mask: Sequence[Any] | None = None,
    ) -> None:
        """Make the request's blocks `[num_cached_blocks, num_full_blocks)` findable by their prefix.

            |<- num_cached_blocks ->|<- keyed by this call ->|
            |<------------- num_full_blocks ---------------->|  partial
            blocks: the request's whole table

        Args:
            request: gives `block_hashes`, at `hash_block_size`; with events on also its tokens, adapter,
                multimodal inputs, salt and session.
            block_size: tokens per block of this group, a multiple of `hash_block_size`; block i then has
                the last fine hash inside it.
            block_mask: one flag per block of the range; False skips the block as if it were null.

        Null and masked blocks are skipped. If a block is cached with a hash over fewer tokens, the new key
        replaces its keys (promotion; one `BlockRemoved` per key). `enable_caching` is not checked. With
        events on and a non-empty range: exactly one `BlockStored`, after the removals; with `dense_events`,
        one for each part of the range without skipped blocks.

        Raises:
            InvalidArgumentError: the range does not fit the table, the hashes, the mask or the sizes.
            InvalidBlockError: a block is free, of another pool, or cached for as many tokens or more.
            InvalidTypeError: an element is not a block. In all cases, and if the request lacks an attribute
                that an event needs, nothing has changed.
        Cost: O(num_full_blocks - num_cached_blocks). Contract: vLLM 0.33 `BlockPool.cache_full_blocks`.
        """
        if not isinstance(num_cached_blocks, int):
            num_cached_blocks = as_int("num_cached_blocks", num_cached_blocks)
        if not isinstance(num_full_blocks, int):
            num_full_blocks = as_int("num_full_blocks", num_full_blocks)
        if not isinstance(block_size, int):
            block_size = as_int("block_size", block_size)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = GroupId(as_int("kv_cache_group_id", kv_cache_group_id))
        if num_cached_blocks >= num_full_blocks:
            return
        if not isinstance(blocks, (list, tuple)):
            blocks = as_list("blocks", blocks)
        if block_mask is not None and not isinstance(block_mask, (list, tuple)):
            block_mask = as_list("block_mask", block_mask)
        if self.is_changing:
            refuse_interrupted()
        cache_full(
            self,
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )

    def cache_partial_block(
        self,
        request: CacheableRequest,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: GroupId,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> BlockHashWithGroupId | None:
        """Make `block` findable by the request's first `num_tokens` tokens, which may end inside it.

        Args:
            num_tokens: a multiple of `hash_block_size`, at most the tokens that the request has hashes for.
            block_size: tokens per block of this group, a multiple of `hash_block_size`.
            replace_existing_hashes: the content of the block has changed; drop all its old keys.
        Returns:
            The key; None for the null block, which is never cached.

        If the block's hash covers fewer tokens, the new key replaces its keys (one `BlockRemoved` per key).
        If it covers as many or more, the new key becomes a secondary key, and the block is found under both.
        With events on, emits a `BlockStored` over the last `hash_block_size` tokens, unless the block
        already had the key.

        Raises:
            InvalidArgumentError: a size or a count does not fit.
            InvalidBlockError: the block is free, or of another pool. In both cases nothing has changed.
        Cost: O(keys of the block). Contract: vLLM 0.33 `BlockPool.cache_partial_block`.
        """
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        num_tokens = as_int("num_tokens", num_tokens)
        kv_cache_group_id = GroupId(as_int("kv_cache_group_id", kv_cache_group_id))
        block_size = as_int("block_size", block_size)
        if not isinstance(replace_existing_hashes, bool):
            refuse_type("replace_existing_hashes", replace_existing_hashes, "bool")
        check_whole(self)
        return cache_partial(
            self, request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes
        )

    def emit_cached_block_events(
        self,
        request: CacheableRequest,
        num_cached_blocks: int,
        block_size: int,
        kv_cache_group_id: GroupId,
    ) -> None:
        """Emit an event that reports the request's first `num_cached_blocks` blocks as hit.

        One `BlockStored` from the start of the sequence, covering every block; none with events off or for 0
        blocks. Changes nothing else. Contract: vLLM 0.33 `BlockPool.emit_cached_block_events`.
        """
        num_cached_blocks = as_int("num_cached_blocks", num_cached_blocks)
        block_size = as_int("block_size", block_size)
        kv_cache_group_id = GroupId(as_int("kv_cache_group_id", kv_cache_group_id))
        if not self.enable_kv_cache_events or num_cached_blocks <= 0:
            return
        hashes: list[BlockHash | None] = [*hashes_of(self, request, 0, num_cached_blocks, block_size)]
        event = make_stored(self, request, hashes, None, 0, block_size, kv_cache_group_id, self.reported_type)
        self.kv_event_queue.append(event)

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """Move all keys of `src_block` to `dst_block`, a copy of it. `src_block` then has no key.

        For a request that continues to write into a cached block. Emits no events: the prefixes stay cached.

        Raises:
            InvalidBlockError: `dst_block` already has a key or is null, or a block is of another pool.
                Nothing has changed.
        Contract: vLLM 0.33 `BlockPool.move_block_hashes`.
        """
        if not isinstance(src_block, KVCacheBlock):
            refuse_type("src_block", src_block, "KVCacheBlock")
        if not isinstance(dst_block, KVCacheBlock):
            refuse_type("dst_block", dst_block, "KVCacheBlock")
        check_whole(self)
        move_keys(self, src_block, dst_block)

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
        parent: bytes | None = None,
    ) -> None:
        """Add a key to `block`, as its primary or a secondary key. No-op if the block already has it.

        Emits no event. vLLM's CPU offloading calls this method by name.

        Args:
            parent: see `KVCacheBlock.parent`; None if unknown.
        """
        check_whole(self)
        add_key(self, block_hash_with_group_id, block, num_tokens, parent)

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
        check_whole(self)
        evict_invalid(self, evicted, "evict")

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Evict `block`. Return True if it was in the prefix map; one `BlockRemoved` per key then.

        vLLM's Mamba manager calls this method by name.
        """
        if block.owner is not self.block_owner:
            check_ours(block, self.block_owner, "_maybe_evict_cached_block()")
        check_whole(self)
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        return evict(self, block)

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
        keys = list(self.cached_block_hash_to_block._cache)
        return (
            CachedKey(block_hash, get_group_id(key), make_external_hash(self, block_hash))
            for key in keys
            for block_hash in (get_block_hash(key),)
        )

    def reset_prefix_cache(self) -> bool:
        """Evict every key, for example after a weight update. One `AllBlocksCleared`.

        Returns:
            True; or False, with a warning and nothing changed, if any block but the null block is in use.
        Raises:
            Any exception of a reuse watcher. Nothing else has changed.
        The order of the free queue does not change. O(number of blocks).
        Contract: vLLM 0.33 `BlockPool.reset_prefix_cache`.
        """
        check_whole(self)
        num_in_use = self.num_gpu_blocks - 1 - self.free_block_queue.num_free_blocks
        if num_in_use:
            from kv_pool.loggers import get_logger

            get_logger(__name__).warning("prefix cache not reset: %d blocks are still in use", num_in_use)
            return False
        if self.reuse_watchers:
            watched = [block_id for block_id in self.reuse_watchers if block_id < self.num_gpu_blocks]
            cache = self.cached_block_hash_to_block
            self.cached_block_hash_to_block = BlockHashToBlockMap()  # a watcher finds no block, as in vLLM
            try:
                notify_watchers(self, [self.blocks[block_id] for block_id in watched])
            finally:
                self.cached_block_hash_to_block = cache
        self.is_changing = True
        forget_all(self)
        self.reuse_watchers.clear()  # those of bare blocks
        self.is_changing = False
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
        check_whole(self)
        return self.holds.open(listed, reason, movable, NEVER if until is None else until)

    def expire_holds(self) -> list[Hold]:
        """Release the holds whose deadline has passed; write leases are quarantined instead.

        Returns:
            These holds, earliest deadline first. O(1) if there are none.
        """
        check_whole(self)
        return self.holds.expire()

    def explain_holds(self, block_id: BlockId) -> list[HoldReport]:
        """Return the holds on a block: why it may not be reused or moved, since when and until when.

        References of block tables are not included.

        Raises:
            InvalidBlockError: the id is not one of this pool's.
        Cost: O(held blocks).
        """
        block_id = BlockId(as_int("block_id", block_id))
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
        listed = as_pairs(pairs)
        check_whole(self)
        check_pairs(self, listed)
        swap_ids(self, listed)

    def add_blocks(self, num_blocks: int) -> None:
        """Add `num_blocks` free blocks with the highest ids, next to be reused. O(number of blocks).

        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        check_whole(self)
        if num_blocks < 0:
            raise InvalidArgumentError(
                f"the pool cannot grow by {num_blocks} blocks; see remove_last_blocks()"
            )
        if num_blocks == 0:
            return
        first, end = self.num_gpu_blocks, self.num_gpu_blocks + num_blocks
        added = [KVCacheBlock(cast(BlockId, block_id)) for block_id in range(first, end)]
        self.is_changing = True
        for block in added:
            block.owner = self.block_owner
        self.free_block_queue.prepend_n(added)
        set_blocks(self, self.blocks + tuple(added))
        self.is_changing = False

    def remove_last_blocks(self, num_blocks: int) -> None:
        """Remove the `num_blocks` blocks with the highest ids. O(number of blocks).

        Cached ones are evicted, and their reuse watchers are called.

        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            InvalidBlockError: one of the blocks is in use, or is the null block. Nothing has changed.
            Any exception of a reuse watcher; the blocks are then at the front of the queue.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        check_whole(self)
        if num_blocks < 0:
            raise InvalidArgumentError(f"the pool cannot shrink by {num_blocks} blocks; see add_blocks()")
        if num_blocks == 0:
            return
        num_left = max(0, self.num_gpu_blocks - num_blocks)
        removed = list(self.blocks[num_left:])
        for block in removed:
            if block.ref_cnt != 0 or block.is_null:
                raise InvalidBlockError(
                    f"block {block.block_id} is {'null' if block.is_null else 'in use'}; only free blocks "
                    "can be removed. Move it to a lower id first."
                )
        if self.lower_tiers is not None:
            self.lower_tiers.flush_evicted()  # the tiers may still have to copy bytes of removed blocks
        if self.reuse_watchers:
            notify_watchers_off_queue(self, removed)
        num_before = self.num_evictions
        self.is_changing = True
        for block in removed:
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_evicted(block)
            evict(self, block)
            self.free_block_queue.remove(block)
            block.generation += 1
        count_cause(self, "shrink", num_before)
        self._last_found = self.null_block
        set_blocks(self, self.blocks[:num_left])
        for part in self.parts:
            part.note_removed(removed)
        self.is_changing = False

    # ---- after an interrupted call -----------------------------------------------------------------

    def repair(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        """Make the pool whole after a call that was interrupted. May be called again if it is interrupted.

        References are those of `blocks` and of the pool's holds. All other blocks become free, and the prefix
        cache is empty: one `AllBlocksCleared`. A manager and an adapter have a `repair` of their own, which
        knows their blocks.

        Args:
            blocks: the blocks that the caller still uses, each once per reference.
        Raises:
            InvalidBlockError: a block is not one of this pool's. Nothing has changed.
        Cost: O(blocks of the pool).
        """
        repair_pool(self, as_list_of("blocks", blocks, KVCacheBlock))

    # ---- parts of larger calls ---------------------------------------------------------------------

    # For holds, which the state of the pool knows, and for the retention. Others call the functions.

    def add_references(self, blocks: list[KVCacheBlock], is_access: bool = True) -> None:
        """Touch blocks as part of a larger call; see `touch_listed`."""
        touch_listed(self, blocks, is_access)

    def drop_references(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks as part of a larger call."""
        free_listed(self, blocks)

    def place_in_band(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Move free blocks as `move_to_band` does, as part of a larger call: see `BandPolicy.place`."""
        was_changing = self.is_changing
        self.eviction_order.check_movable(blocks, band)
        self.is_changing = True
        self.eviction_order.move(blocks, band)
        for part in self.parts:
            part.note_moved_to(blocks, band)
        self.is_changing = was_changing

    # ---- the order of eviction ------------------------------------------------------------------

    def open_bands(self, policy: BandPolicy) -> None:
        """Divide the free queue into bands, chosen by `policy` for each freed block; see `EvictionOrder`.

        Raises:
            InvalidArgumentError: the pool already has a band policy. Nothing has changed.
        Cost: O(free blocks without content).
        """
        check_type("policy", policy, BandPolicy)
        for part in self.parts:
            if isinstance(part, BandPolicy):
                raise InvalidArgumentError(
                    f"the pool already has a band policy, {part!r}, which orders its free blocks; "
                    "use that one, or make another pool"
                )
        self.eviction_order.open()
        # Before the cache policy, which orders what stays in the default band.
        host = self.policy_host
        self.parts.insert(len(self.parts) if host is None else self.parts.index(host), policy)

    def open_policy(self, policy: Any) -> None:
        """Let a cache policy choose the blocks to evict, instead of the least recently freed ones.

        Args:
            policy: what `find_policy` accepts: a name such as "s3fifo", "module:Class", "file.py:Class", or
                a function without arguments that returns a new `CachePolicy`, such as its class.
        Raises:
            InvalidArgumentError: there is no such policy, caching is off, or the pool has a policy already.
                Nothing has changed.
            CachePolicyError: the policy cannot be started. Nothing has changed.
        Cost: O(blocks of the pool).
        """
        open_policy(self, policy)

    @property
    def policy_host(self) -> PolicyHost | None:
        """The host of the cache policy; None without one."""
        return find_host(self.parts)

    @property
    def live_curve(self) -> LiveCurve | None:
        """The sample behind the curve that `read_live_curve` returns; None without `live_curve=True`."""
        for part in self.parts:
            if isinstance(part, LiveCurve):
                return part
        return None

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
        check_whole(self)
        for block in listed:
            if block.owner is not self.block_owner:
                check_ours(block, self.block_owner, "move_to_band()")
        self.place_in_band(listed, band)

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


def note_missed(pool: PoolState, key: Any) -> None:
    """Tell the parts, which must not call the pool, of a lookup whose first missing block has this key."""
    pool.is_changing = True
    for part in pool.parts:
        part.note_missed(key)
    pool.is_changing = False
