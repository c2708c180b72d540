"""`BlockCaching`: make blocks findable by prefix: full blocks, partial blocks, and copies."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.core.arguments import as_int, as_list, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours, raise_typed
from kv_pool.core.block_keys import GROUP_0, get_block_hash, group_suffix, make_block_hash_with_group_id
from kv_pool.core.evicting import drop_keys, evict, note_own_hash
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_state import MOVING_KEYS, NOTHING, UNDO_CACHING, PoolState
from kv_pool.core.prefix_cache import PrefixCache
from kv_pool.core.prefix_keys import add_keys, insert_key
from kv_pool.core.stored_events import hashes_of, make_stored, make_stored_range, read_hashes
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockCaching(PrefixCache):
    """The part of `BlockPool` that makes blocks findable by their prefix."""

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
            kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
        if num_cached_blocks >= num_full_blocks:
            return
        if not isinstance(blocks, (list, tuple)):
            blocks = as_list("blocks", blocks)
        if block_mask is not None and not isinstance(block_mask, (list, tuple)):
            block_mask = as_list("block_mask", block_mask)
        if self._unfinished != NOTHING:
            self._recover()
        suffix = GROUP_0 if kv_cache_group_id == 0 else group_suffix(kv_cache_group_id)
        listed = blocks[num_cached_blocks:num_full_blocks]
        range_blocks: list[KVCacheBlock] = listed if isinstance(listed, list) else list(listed)
        num_blocks = num_full_blocks - num_cached_blocks
        if num_cached_blocks < 0 or len(range_blocks) != num_blocks:
            raise InvalidArgumentError(
                f"cannot cache blocks {num_cached_blocks}..{num_full_blocks} of a table of "
                f"{len(blocks)} blocks"
            )
        if block_mask is not None and len(block_mask) != num_blocks:
            raise InvalidArgumentError(f"block_mask has {len(block_mask)} flags for {num_blocks} blocks")
        hashes = hashes_of(self, request, num_cached_blocks, num_full_blocks, block_size)
        owner = self.block_owner
        num_tokens: i32 = num_cached_blocks * block_size
        step: i32 = block_size
        num_skipped: i64 = 0
        index: i64 = -1
        try:
            for block, block_hash in zip(range_blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
                num_tokens += step
                index += 1
                if block.is_null or (block_mask is not None and not block_mask[index]):
                    num_skipped += 1
                    continue
                if block.owner is not owner:
                    check_ours(block, owner, "cache_full_blocks()")
                elif block.ref_cnt <= 0:
                    raise InvalidBlockError(
                        f"block {block.block_id} is free; only blocks in use can be cached"
                    )
                if block.key is not None and not 0 <= block.num_key_tokens < num_tokens:
                    raise InvalidBlockError(
                        f"block {block.block_id} is already cached for {block.block_hash_num_tokens} tokens; "
                        f"only a hash over more tokens replaces that, and this one covers {num_tokens}"
                    )
                if not isinstance(block_hash, bytes):
                    raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are bytes")
        except Exception as error:
            raise_typed(error, range_blocks, "cache_full_blocks()")
        if num_skipped:
            if block_mask is not None:
                note_left_out(range_blocks, hashes, block_mask)
            range_blocks = [
                self.blocks[0] if block_mask is not None and not block_mask[position] else block
                for position, block in enumerate(range_blocks)
            ]

        # Build the events before anything changes, since that reads the request; append them after the
        # removals.
        new_events: list[KVCacheEvent] | None = None
        if self.enable_kv_cache_events:
            stored: list[BlockHash | None] = [*hashes]
            for position in range(num_blocks if num_skipped else 0):
                if range_blocks[position].is_null:
                    stored[position] = None
            new_events = make_stored_range(
                self, request, stored, hashes, num_cached_blocks, block_size, kv_cache_group_id
            )
        before = self.blocks[0]
        parent: bytes = b""
        if num_cached_blocks:
            before = blocks[num_cached_blocks - 1]
            num_covered: i32 = num_cached_blocks * block_size
            if before.num_key_tokens == num_covered and isinstance(before.key, bytes):
                parent = before.key
            else:
                (last,) = hashes_of(self, request, num_cached_blocks - 1, num_cached_blocks, block_size)
                parent = last + suffix
        cache = self.cached_block_hash_to_block
        is_sure = cache._num_keys == len(cache._cache)
        try:
            num_before: i32 = num_cached_blocks * block_size
            add_keys(self, before, parent, range_blocks, hashes, suffix, num_before, block_size)
            if new_events is not None:
                events = self.kv_event_queue
                events += new_events
        except BaseException:
            self._is_map_sure = is_sure
            self._unfinished_blocks = range_blocks
            self._unfinished_hashes = hashes
            self._unfinished_suffix = suffix
            self._unfinished = UNDO_CACHING
            self._recover()
            raise
        if self.lower_tiers is not None:
            self.lower_tiers.on_blocks_cached(
                request, range_blocks, hashes, num_cached_blocks, block_size, kv_cache_group_id
            )
        if self._policy_host is not None:
            self._policy_host.note_cached(
                request,
                blocks,
                range_blocks if self.lower_tiers is None else range_blocks.copy(),
                num_cached_blocks,
                kv_cache_group_id,
                block_size,
                num_skipped > 0,
            )
        if self._live_curve is not None:
            self._live_curve.note_cached(
                request, blocks, range_blocks, num_cached_blocks, block_size, num_skipped > 0
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
        if not isinstance(num_cached_blocks, int):
            num_cached_blocks = as_int("num_cached_blocks", num_cached_blocks)
        if not isinstance(block_size, int):
            block_size = as_int("block_size", block_size)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
        if not self.enable_kv_cache_events or num_cached_blocks <= 0:
            return
        hashes: list[BlockHash | None] = [*hashes_of(self, request, 0, num_cached_blocks, block_size)]
        event = make_stored(self, request, hashes, None, 0, block_size, kv_cache_group_id, self.reported_type)
        self.kv_event_queue.append(event)

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
        if not isinstance(num_tokens, int):
            num_tokens = as_int("num_tokens", num_tokens)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
        if not isinstance(block_size, int):
            block_size = as_int("block_size", block_size)
        if not isinstance(replace_existing_hashes, bool):
            refuse_type("replace_existing_hashes", replace_existing_hashes, "bool")
        if block.is_null:
            return None
        if self._unfinished != NOTHING:
            self._recover()
        if block.owner is not self.block_owner:
            check_ours(block, self.block_owner, "cache_partial_block()")
        if block.ref_cnt <= 0 and block.owner is not None:
            raise InvalidBlockError(f"block {block.block_id} is free; only blocks in use can be cached")
        unit = self.hash_block_size
        if block_size < 1 or block_size % unit:
            raise InvalidArgumentError(f"block_size {block_size} is not a multiple of hash_block_size {unit}")
        num_units = num_tokens // unit
        num_hashed = len(read_hashes(request))
        if num_tokens % unit or num_units < 1 or num_units > num_hashed:
            raise InvalidArgumentError(
                f"num_tokens is {num_tokens}; a partial entry covers a multiple of {unit} tokens, here "
                f"{unit} to {num_hashed * unit}"
            )
        (block_hash,) = hashes_of(self, request, num_units - 1, num_units, unit)
        key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
        covered = block.block_hash_num_tokens
        is_known = not replace_existing_hashes and (
            block.key == key or self.cached_block_hash_to_block.contain(key, block.block_id)
        )
        if is_known:
            return key
        event: KVCacheEvent | None = None
        if self.enable_kv_cache_events:
            parent: BlockHash | None = None
            if num_units > 1:
                (parent,) = hashes_of(self, request, num_units - 2, num_units - 1, unit)
            event = make_stored(
                self, request, [block_hash], parent, num_tokens - unit, unit, kv_cache_group_id
            )
        start = (num_tokens - 1) // block_size * block_size  # the block's first token
        before: bytes = b""
        if start:
            (last,) = hashes_of(self, request, start // unit - 1, start // unit, unit)
            before = make_block_hash_with_group_id(last, kv_cache_group_id)
        if replace_existing_hashes or (covered is not None and covered < num_tokens):
            evict(self, block)
        if event is None:
            add_key(self, key, block, num_tokens, before)
            return key
        events = self.kv_event_queue
        new_events = [event]
        try:
            add_key(self, key, block, num_tokens, before)
            events += new_events
        except MemoryError:
            evict(self, block)  # the key may be there without its event
            raise
        return key

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
        add_key(self, block_hash_with_group_id, block, num_tokens, parent)

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
        if src_block.owner is not self.block_owner:
            check_ours(src_block, self.block_owner, "move_block_hashes()")
        if dst_block.owner is not self.block_owner:
            check_ours(dst_block, self.block_owner, "move_block_hashes()")
        if dst_block.is_null:
            raise InvalidBlockError("the null block is never cached")
        secondary = self.cached_block_hashes_by_block
        if dst_block.key is not None or (secondary and dst_block.block_id in secondary):
            raise InvalidBlockError(
                f"block {dst_block.block_id} already carries a hash; evict it before you move the hashes "
                f"of block {src_block.block_id} to it"
            )
        num_tokens = src_block.block_hash_num_tokens
        parent = src_block.parent
        keys: list[BlockHashWithGroupId] = []
        try:
            drop_keys(self, src_block, keys)
            for key in keys:
                add_key(self, key, dst_block, num_tokens, parent)
            if keys:
                note_own_hash(src_block, get_block_hash(keys[0]))
        except BaseException:
            self._moved_keys = keys
            self._moved_num_tokens = num_tokens
            self._unfinished_blocks = [src_block, dst_block]
            self._unfinished = MOVING_KEYS
            self._recover()
            raise

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Evict `block`. Return True if it was in the prefix map; one `BlockRemoved` per key then.

        vLLM's Mamba manager calls this method by name.
        """
        if block.owner is not self.block_owner:
            check_ours(block, self.block_owner, "_maybe_evict_cached_block()")
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        return evict(self, block)


def note_left_out(blocks: list[KVCacheBlock], hashes: list[BlockHash], block_mask: Sequence[Any]) -> None:
    """Note the hashes of blocks that the mask leaves out: see `KVCacheBlock.parent`."""
    position: i64 = -1
    for block, block_hash in zip(blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
        position += 1
        if not block_mask[position] and block.key is None and not block.is_null:
            note_own_hash(block, block_hash)


def add_key(
    pool: PoolState,
    key: BlockHashWithGroupId,
    block: KVCacheBlock,
    num_tokens: int | None,
    parent: bytes | None = None,
) -> None:
    """Add a key to `block`, without an event. No-op if the block already has it."""
    if block.owner is not pool.block_owner:
        check_ours(block, pool.block_owner, "_insert_block_hash()")
    if block.is_null:
        raise InvalidBlockError("the null block is never cached")
    if block.key == key or pool.cached_block_hash_to_block.contain(key, block.block_id):
        return
    insert_key(pool, key, block, num_tokens, parent)
