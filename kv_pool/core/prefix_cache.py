"""`PrefixCache`: which blocks carry which keys, and the events that tell of it.

A key is a block hash with its KV cache group. A block has one primary key (on the block itself) and any
number of secondary ones (in `cached_block_hashes_by_block`), each of which finds it.
"""

import gc
from collections.abc import Sequence
from typing import Any, Final, cast
from weakref import ref

from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.core.arguments import as_int, as_ints, as_list, as_list_of, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import (
    GROUP_0,
    get_block_hash,
    get_group_id,
    group_suffix,
    is_key,
    make_block_hash_with_group_id,
    make_external_block_hash,
    make_external_block_hashes,
)
from kv_pool.core.extra_keys import CacheableRequest, ExtraKeysWalk, has_extra_keys, untag_extra_keys
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.kv_events import KVCacheEvent, KVEventTypes
from kv_pool.core.mode import COMPILED
from kv_pool.core.observer import BlockObserver, ColderTiers
from kv_pool.errors import (
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
)
from kv_pool.ids import BlockHash, BlockHashWithGroupId, ExternalBlockHash

# What `_recover` has to do: `PrefixCache._recover` and `BlockPoolCore._recover`.
NOTHING: Final = 0
UNDO_CACHING: Final = 1
EVICTING: Final = 2
MOVING_KEYS: Final = 3


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """The part of `BlockPool` that knows keys and events, but nothing of who holds a block."""

    def __init__(
        self,
        blocks: list[KVCacheBlock],
        hash_block_size: int,
        enable_kv_cache_events: bool,
        metrics_collector: BlockObserver | None,
        num_hash_lookahead_tokens: int,
        medium: str,
        event_types: KVEventTypes,
        use_int_block_hashes: bool,
        dense_events: bool,
    ) -> None:
        if not isinstance(hash_block_size, int) or hash_block_size < 1:
            raise InvalidArgumentError(
                f"hash_block_size is {hash_block_size!r}; it counts tokens, at least 1"
            )
        self.hash_block_size: int = hash_block_size
        self.enable_kv_cache_events: bool = enable_kv_cache_events
        self.metrics_collector: BlockObserver | None = metrics_collector
        self.num_hash_lookahead_tokens: int = num_hash_lookahead_tokens
        self.medium: str = medium
        self._stored_type: Any = event_types.stored
        self._removed_type: Any = event_types.removed
        self._cleared_type: Any = event_types.cleared
        self._reported_type: Any = event_types.reported or event_types.stored
        self.use_int_block_hashes: bool = use_int_block_hashes
        self.dense_events: bool = dense_events
        self.num_evictions: int = 0
        self.colder_tiers: ColderTiers | None = None
        self.cached_block_hash_to_block: BlockHashToBlockMap = BlockHashToBlockMap()
        # Secondary keys, oldest first: block id -> {key: None}. The primary key is on the block.
        self.cached_block_hashes_by_block: dict[int, dict[BlockHashWithGroupId, None]] = {}
        self._kv_event_queue: list[KVCacheEvent] = []
        # Keys that are not in the map any more and have no event yet; empty unless a call was interrupted.
        self._unannounced: list[BlockHashWithGroupId] = []
        # What `_recover` does for a call that was interrupted, and with what.
        self._unfinished: i64 = NOTHING
        self._unfinished_blocks: list[KVCacheBlock] = []
        self._unfinished_hashes: list[BlockHash] = []
        self._unfinished_suffix: bytes = b""
        self._owner: Any = ref(self)
        for block in blocks:
            block._owner = self._owner
        # A tuple of objects without GC header leaves the cyclic GC at its first visit (a list never does),
        # and a young collection now lets that visit happen here instead of while requests are served.
        self.blocks: tuple[KVCacheBlock, ...] = tuple(blocks)
        gc.collect(0)
        # The block that was looked up last; the next look-up is likely for what was cached after it. To check
        # that guess is cheaper than the map for compiled code, and dearer for interpreted code.
        self._last_found: KVCacheBlock = self.blocks[0]
        self._num_guessable: i32 = len(blocks) if COMPILED else 0
        self._is_map_sure: bool = True
        self._moved_keys: list[BlockHashWithGroupId] = []
        self._moved_num_tokens: int | None = None

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """Events since the last `take_events()`. A property, so that a subclass may redirect it."""
        return self._kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[KVCacheEvent]) -> None:
        self._kv_event_queue = events

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the events since the last call, oldest first; the list is the caller's to change."""
        if not self.enable_kv_cache_events:
            return []
        if self._unfinished != NOTHING:
            self._recover()
        if self._unannounced:
            announce_removed(self)
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events

    def _recover(self) -> None:
        """Finish or undo what an interrupted call left; may itself be interrupted and called again."""
        if self._unfinished == UNDO_CACHING:
            cache = self.cached_block_hash_to_block
            remove_added_keys(self, self._unfinished_blocks, self._unfinished_hashes, self._unfinished_suffix)
            if self._is_map_sure:
                cache._num_keys = len(cache._cache)
        elif self._unfinished == EVICTING:
            for block in self._unfinished_blocks:
                block.generation += 1  # for some the second time, which changes nothing
                evict(self, block)
        elif self._unfinished == MOVING_KEYS:
            source, target = self._unfinished_blocks
            drop_keys(self, source, self._moved_keys)
            for key in self._moved_keys:
                self._insert_block_hash(key, target, self._moved_num_tokens)
        self._unfinished = NOTHING

    def store_pending(self) -> None:
        """Let colder tiers copy out what blocks held that were taken anew, before others write to them.

        For whoever moves blocks, or writes to taken ones, not in a step. Nothing happens without tiers.
        """
        if self.colder_tiers is not None:
            self.colder_tiers.store_pending()

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """The blocks that hold this prefix in all of these groups, in their order, or None.

        All or nothing: a miss in one group is a miss. Of several copies the oldest is returned. Only
        looks; `touch()` what you mean to keep. O(number of groups).
        Contract: vLLM 0.33 `BlockPool.get_cached_block`.
        """
        if not isinstance(block_hash, bytes):
            refuse_type("block_hash", block_hash, "bytes")
        try:
            cache = self.cached_block_hash_to_block
            entries: dict[Any, Any] = cache._cache
            if self._num_guessable > 0 and len(kv_cache_group_ids) == 1 and cache._num_keys == len(entries):
                # Blocks are looked up one by one, head first: likely for what was cached after the last one.
                next_id = self._last_found._next_cached_id
                if 0 < next_id < self._num_guessable:
                    guess = self.blocks[next_id]
                    suffix = group_suffix(kv_cache_group_ids[0])
                    if guess._next_cached_id >= 0 and is_key(guess._block_hash, block_hash, suffix):
                        self._last_found = guess
                        return [guess]
            found: list[KVCacheBlock] = []
            for group_id in kv_cache_group_ids:
                # An entry is all but always a block, and a call saved is felt here.
                key = block_hash + (GROUP_0 if group_id == 0 else group_suffix(group_id))
                block = entries.get(key)
                if not isinstance(block, KVCacheBlock):
                    block = cache.get_one_block(BlockHashWithGroupId(key))
                    if block is None:
                        return None
                found.append(block)
            if found:
                self._last_found = found[0]
            return found
        except TypeError:
            group_ids = as_ints("kv_cache_group_ids", kv_cache_group_ids)
            unchecked: Any = kv_cache_group_ids
            if all(isinstance(group_id, int) for group_id in unchecked):
                raise
            return self.get_cached_block(block_hash, group_ids)  # they were NumPy's integers

    def find_cached_prefix(
        self,
        block_hashes: Sequence[BlockHash],
        max_num_blocks: int,
        kv_cache_group_id: int = 0,
    ) -> list[KVCacheBlock]:
        """The blocks that hold the longest cached prefix of a sequence, head first.

        Args:
            block_hashes: the sequence's hashes at this group's block size, head first.
            max_num_blocks: look at no more than this many; 0 or less gives [].

        Stops at the first miss. Only looks. One call for what `get_cached_block` needs one call per block:
        O(blocks found + 1).
        """
        if not isinstance(max_num_blocks, int):
            max_num_blocks = as_int("max_num_blocks", max_num_blocks)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
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
                    if guess._next_cached_id >= 0 and is_key(guess._block_hash, block_hash, suffix):
                        found.append(guess)
                        next_id = guess._next_cached_id
                        continue
                block = cache.get_one_block(BlockHashWithGroupId(block_hash + suffix))
                if block is None:
                    break
                found.append(block)
                next_id = block._next_cached_id
        except TypeError:
            as_list_of("block_hashes", block_hashes, bytes)
            raise
        return found

    def list_keys(self, blocks: Sequence[KVCacheBlock]) -> list[BlockHashWithGroupId]:
        """All keys of these blocks, of each the primary one first. Only looks. O(keys)."""
        secondary = self.cached_block_hashes_by_block
        keys: list[BlockHashWithGroupId] = []
        listed: list[KVCacheBlock] = as_list_of("blocks", blocks, KVCacheBlock)
        for block in listed:
            if block._block_hash is not None:
                keys.append(cast(BlockHashWithGroupId, block._block_hash))
                if secondary:
                    keys.extend(secondary.get(block.block_id, ()))
        return keys

    def cache_full_blocks(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
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

        Null and masked blocks are skipped. A block that is cached already is keyed anew if its old hash
        covers fewer tokens (promotion; one `BlockRemoved`). Caches whatever `enable_caching` says.
        With events on and a range that is not empty: exactly one `BlockStored`, after the removals; with
        `dense_events`, one for each part of the range without skipped blocks.

        Raises:
            InvalidArgumentError: the range does not fit the table, the hashes, the mask or the sizes.
            InvalidBlockError: a block is free, another pool's, or cached for as many tokens or more.
            InvalidTypeError: not a block. In all cases, and when the request lacks what an event needs,
                nothing has changed.
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
        suffix = group_suffix(kv_cache_group_id)
        range_blocks: list[KVCacheBlock] = as_list("blocks", blocks[num_cached_blocks:num_full_blocks])
        num_blocks = num_full_blocks - num_cached_blocks
        if num_cached_blocks < 0 or len(range_blocks) != num_blocks:
            raise InvalidArgumentError(
                f"blocks {num_cached_blocks}..{num_full_blocks} of a table of {len(blocks)} blocks"
            )
        if block_mask is not None and len(block_mask) != num_blocks:
            raise InvalidArgumentError(f"block_mask has {len(block_mask)} flags for {num_blocks} blocks")
        hashes = self._hashes_of(request, num_cached_blocks, num_full_blocks, block_size)
        owner = self._owner
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
                if block._owner is not owner:
                    check_ours(block, owner, "cache_full_blocks()")
                elif block.ref_cnt <= 0:
                    raise InvalidBlockError(
                        f"block {block.block_id} is free; only blocks in use can be cached"
                    )
                if block._block_hash is not None and not 0 <= block._num_hash_tokens < num_tokens:
                    raise InvalidBlockError(
                        f"block {block.block_id} is cached for {block.block_hash_num_tokens} tokens "
                        f"already; only a hash over more than that replaces it, this one covers {num_tokens}"
                    )
                if not isinstance(block_hash, bytes):
                    raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are bytes")
        except Exception as error:
            raise_typed(error, range_blocks, "cache_full_blocks()")
        if num_skipped:
            range_blocks = [
                self.blocks[0] if block_mask is not None and not block_mask[position] else block
                for position, block in enumerate(range_blocks)
            ]

        # Built before anything changes, since it reads the request; appended after the removals.
        new_events: list[KVCacheEvent] | None = None
        if self.enable_kv_cache_events:
            parent: BlockHash | None = None
            if num_cached_blocks:
                (parent,) = self._hashes_of(request, num_cached_blocks - 1, num_cached_blocks, block_size)
            stored: list[BlockHash | None] = cast(Any, hashes)
            if num_skipped:
                stored = [
                    None if range_blocks[position].is_null else block_hash
                    for position, block_hash in enumerate(hashes)
                ]
            start = num_cached_blocks * block_size
            if num_skipped and self.dense_events:
                new_events = self._make_dense(
                    request, stored, hashes, parent, start, block_size, kv_cache_group_id
                )
            else:
                new_events = [
                    self._make_stored(request, stored, parent, start, block_size, kv_cache_group_id)
                ]
        before = blocks[num_cached_blocks - 1] if num_cached_blocks else self.blocks[0]
        cache = self.cached_block_hash_to_block
        is_sure = cache._num_keys == len(cache._cache)
        try:
            add_keys(self, before, range_blocks, hashes, suffix, num_cached_blocks * block_size, block_size)
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
        if self.colder_tiers is not None:
            self.colder_tiers.on_blocks_cached(
                request, range_blocks, hashes, num_cached_blocks, block_size, kv_cache_group_id
            )

    def _hashes_of(self, request: CacheableRequest, first: int, end: int, block_size: int) -> list[BlockHash]:
        """Hashes of the request's blocks `[first, end)` at `block_size` tokens a block."""
        stride = block_size // self.hash_block_size
        if stride < 1 or stride * self.hash_block_size != block_size:
            raise InvalidArgumentError(
                f"block_size {block_size} is not a multiple of hash_block_size {self.hash_block_size}"
            )
        fine = read_hashes(request)
        if len(fine) < end * stride:
            raise InvalidArgumentError(
                f"request has {len(fine)} block hashes of {self.hash_block_size} tokens; caching its first "
                f"{end} blocks of {block_size} tokens needs {end * stride}"
            )
        if stride == 1:
            return as_list("block_hashes", fine[first:end])
        # A fine hash covers everything before it, so the last one in a block identifies the block.
        return [fine[(index + 1) * stride - 1] for index in range(first, end)]

    def emit_cached_block_events(
        self,
        request: CacheableRequest,
        num_cached_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Announce the first `num_cached_blocks` blocks of the request again, as hit; nothing else changes.

        One `BlockStored` from the start of the sequence, every block counted; none with events off or for 0
        blocks. Contract: vLLM 0.33 `BlockPool.emit_cached_block_events`.
        """
        if not isinstance(num_cached_blocks, int):
            num_cached_blocks = as_int("num_cached_blocks", num_cached_blocks)
        if not isinstance(block_size, int):
            block_size = as_int("block_size", block_size)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
        if not self.enable_kv_cache_events or num_cached_blocks <= 0:
            return
        hashes: list[BlockHash | None] = [*self._hashes_of(request, 0, num_cached_blocks, block_size)]
        event = self._make_stored(
            request, hashes, None, 0, block_size, kv_cache_group_id, self._reported_type
        )
        self.kv_event_queue.append(event)

    def cache_partial_block(
        self,
        request: CacheableRequest,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> BlockHashWithGroupId | None:
        """Make `block` findable by the request's first `num_tokens` tokens, which may end inside it.

        Args:
            num_tokens: a multiple of `hash_block_size`, no more than the request has hashes for.
            block_size: tokens per block of this group, a multiple of `hash_block_size`.
            replace_existing_hashes: the block holds other content now; its old keys go, however much they
                cover.
        Returns:
            The key; None for the null block, which is never cached.

        A block with a hash over fewer tokens is keyed anew (one `BlockRemoved` a key). Where its hash covers
        as many or more, the new key becomes a secondary one: both find the block. With events on, a
        `BlockStored` over the last `hash_block_size` tokens, unless the block had that key.

        Raises:
            InvalidArgumentError: sizes or a count that do not fit.
            InvalidBlockError: the block is free, or another pool's. In both cases nothing has changed.
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
        if block._owner is not self._owner:
            check_ours(block, self._owner, "cache_partial_block()")
        if block.ref_cnt <= 0 and block._owner is not None:
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
        (block_hash,) = self._hashes_of(request, num_units - 1, num_units, unit)
        key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
        covered = block.block_hash_num_tokens
        is_known = not replace_existing_hashes and (
            block._block_hash == key or self.cached_block_hash_to_block.contain(key, block.block_id)
        )
        if is_known:
            return key
        event: KVCacheEvent | None = None
        if self.enable_kv_cache_events:
            parent: BlockHash | None = None
            if num_units > 1:
                (parent,) = self._hashes_of(request, num_units - 2, num_units - 1, unit)
            event = self._make_stored(
                request, [block_hash], parent, num_tokens - unit, unit, kv_cache_group_id
            )
        if replace_existing_hashes or (covered is not None and covered < num_tokens):
            evict(self, block)
        if event is None:
            self._insert_block_hash(key, block, num_tokens)
            return key
        events = self.kv_event_queue
        new_events = [event]
        try:
            self._insert_block_hash(key, block, num_tokens)
            events += new_events
        except MemoryError:
            evict(self, block)  # the key may be there without its event
            raise
        return key

    def _insert_block_hash(
        self, block_hash_with_group_id: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        """Give `block` one key more, its first or a secondary one; a key it has already changes nothing.

        No event. vLLM's CPU offloading calls this one by name.
        """
        if block._owner is not self._owner:
            check_ours(block, self._owner, "_insert_block_hash()")
        if block.is_null:
            raise InvalidBlockError("the null block is never cached")
        key = block_hash_with_group_id
        if block._block_hash == key or self.cached_block_hash_to_block.contain(key, block.block_id):
            return
        insert_key(self, key, block, num_tokens)

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """Let `dst_block`, a copy of `src_block`, be found under all its keys; `src_block` is bare then.

        For a request that goes on writing into a cached block. No events: the prefixes stay cached.
        Raises:
            InvalidBlockError: `dst_block` has a key already or is null, or one is another pool's. Nothing has
                changed.
        Contract: vLLM 0.33 `BlockPool.move_block_hashes`.
        """
        if not isinstance(src_block, KVCacheBlock):
            refuse_type("src_block", src_block, "KVCacheBlock")
        if not isinstance(dst_block, KVCacheBlock):
            refuse_type("dst_block", dst_block, "KVCacheBlock")
        if src_block._owner is not self._owner:
            check_ours(src_block, self._owner, "move_block_hashes()")
        if dst_block._owner is not self._owner:
            check_ours(dst_block, self._owner, "move_block_hashes()")
        if dst_block.is_null:
            raise InvalidBlockError("the null block is never cached")
        secondary = self.cached_block_hashes_by_block
        if dst_block._block_hash is not None or (secondary and dst_block.block_id in secondary):
            raise InvalidBlockError(
                f"block {dst_block.block_id} carries hashes of its own; evict it before it takes over those "
                f"of block {src_block.block_id}"
            )
        num_tokens = src_block.block_hash_num_tokens
        keys: list[BlockHashWithGroupId] = []
        try:
            drop_keys(self, src_block, keys)
            for key in keys:
                self._insert_block_hash(key, dst_block, num_tokens)
        except BaseException:
            self._moved_keys = keys
            self._moved_num_tokens = num_tokens
            self._unfinished_blocks = [src_block, dst_block]
            self._unfinished = MOVING_KEYS
            self._recover()
            raise

    def _make_dense(
        self,
        request: CacheableRequest,
        stored: list[BlockHash | None],
        hashes: list[BlockHash],
        parent: BlockHash | None,
        start: int,
        block_size: int,
        group_id: int,
    ) -> list[KVCacheEvent]:
        """One event for each part of `stored` without None; its parent is the block before in the sequence.

        `hashes` are those of all blocks, skipped ones included; `parent` is the one before the first.
        """
        events: list[KVCacheEvent] = []
        part: list[BlockHash | None] = []
        for end, block_hash in enumerate([*stored, None]):
            if block_hash is not None:
                part.append(block_hash)
            elif part:
                first = end - len(part)
                before = hashes[first - 1] if first else parent
                first_token = start + first * block_size
                events.append(self._make_stored(request, part, before, first_token, block_size, group_id))
                part = []
        return events

    def _make_stored(
        self,
        request: CacheableRequest,
        hashes: list[BlockHash | None],
        parent: BlockHash | None,
        start: int,
        block_size: int,
        group_id: int,
        make_event: Any = None,
    ) -> KVCacheEvent:
        """The one `BlockStored` for the blocks with these hashes, the first beginning at token `start`.

        A block with None for a hash is skipped, but its tokens are not. `make_event` is the event's class
        if it is not that of stores.
        """
        num_lookahead = self.num_hash_lookahead_tokens
        stored = [block_hash for block_hash in hashes if block_hash is not None]
        end = start + len(hashes) * block_size
        extra_keys: list[tuple[Any, ...] | None] = [None] * len(stored)
        lookahead: list[list[int]] = []
        if num_lookahead or has_extra_keys(request):
            extra_keys.clear()
            walk = ExtraKeysWalk(request)
            first = start
            for block_hash in hashes:
                after = first + block_size
                if block_hash is not None:
                    found = walk.find(first, after + num_lookahead)
                    extra_keys.append(untag_extra_keys(found))
                    if num_lookahead:
                        lookahead.append(list(request.all_token_ids[after : after + num_lookahead]))
                first = after
        token_ids = request.all_token_ids[start:end]
        lora = request.lora_request
        event: KVCacheEvent = (make_event or self._stored_type)(
            block_hashes=make_external_block_hashes(stored, 0) if self.use_int_block_hashes else stored,
            parent_block_hash=None if parent is None else self._make_external_hash(parent),
            token_ids=token_ids if isinstance(token_ids, list) else list(token_ids),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=self.medium,
            lora_name=lora.name if lora else None,
            extra_keys=extra_keys or None,
            group_idx=group_id,
            session_id=getattr(request, "session_id", None),
            lookahead_token_ids=lookahead if num_lookahead else None,
        )
        return event

    def _make_external_hash(self, block_hash: BlockHash) -> ExternalBlockHash:
        return make_external_block_hash(block_hash) if self.use_int_block_hashes else block_hash

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Make `block` unfindable. True if it was in the prefix map: then one `BlockRemoved`.

        vLLM's Mamba manager calls this one by name.
        """
        if block._owner is not self._owner:
            check_ours(block, self._owner, "_maybe_evict_cached_block()")
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        return evict(self, block)


# Functions, since a compiled method that subclasses may override is looked up by name at each call.
#
# A signal handler may raise wherever plain Python calls something or jumps back, and any allocation may fail.
# What has to change together is therefore a stretch of assignments without calls, after all allocations.
def add_keys(
    pool: PrefixCache,
    before: KVCacheBlock,
    blocks: list[KVCacheBlock],
    hashes: list[BlockHash],
    suffix: bytes,
    num_tokens: i32,
    block_size: i32,
) -> None:
    """Key each block that is not null by its hash and the suffix of its group; no event but of removals.

    Args:
        before: the block before the first one in the sequence, or the null block.
        num_tokens: how many tokens come before the first block.
    Raises:
        Whatever interrupts it; `remove_added_keys` undoes what was done.
    """
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    owner = pool._owner
    num_added: i64 = 0
    num_keys: i64 = len(entries)
    try:
        for block, block_hash in zip(blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
            num_tokens += block_size
            if block.is_null:
                continue
            if block._block_hash is not None:
                evict(pool, block)
                num_keys = len(entries)
            key = BlockHashWithGroupId(block_hash + suffix)
            if entries.setdefault(key, block) is block and len(entries) > num_keys:
                num_keys += 1
                num_added += 1
                block._next_cached_id = 0
            elif cache.contain(key, block.block_id):
                continue
            else:
                cache.insert(key, block)
            block._block_hash = key
            block._num_hash_tokens = num_tokens
            if block._retention_id > 0:
                block._retention_id = -block._retention_id
            if block._owner is owner:
                if before._next_cached_id >= 0:
                    before._next_cached_id = block.block_id
                before = block
    finally:
        cache._num_keys += num_added


def remove_added_keys(
    pool: PrefixCache, blocks: list[KVCacheBlock], hashes: list[BlockHash], suffix: bytes
) -> None:
    """Undo an interrupted `add_keys`: take these keys off the blocks and out of the map. No event.

    May itself be interrupted and called again. What a block was evicted from before stays lost.
    """
    entries = pool.cached_block_hash_to_block._cache
    for block, block_hash in zip(blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
        if block.is_null:
            continue
        key = BlockHashWithGroupId(block_hash + suffix)
        if block._block_hash == key:
            drop_keys(pool, block, None)
            continue
        # The map may know the block under a key that the block did not get any more.
        found = entries.get(key)
        if found is block:
            block._next_cached_id = -1
            del entries[key]
        elif isinstance(found, dict) and found.get(block.block_id) is block:
            del found[block.block_id]


def evict(pool: PrefixCache, block: KVCacheBlock) -> bool:
    """Drop the block's keys; for each that the prefix map knew, a count and an event. True if any.

    Raises:
        Whatever interrupts it: the keys that are dropped by then are counted and announced.
    """
    num_before = pool.num_evictions
    if not pool.enable_kv_cache_events:
        drop_keys(pool, block, None)
    elif block._block_hash is not None or pool.cached_block_hashes_by_block:
        try:
            drop_keys(pool, block, pool._unannounced)
        finally:
            if pool._unannounced:
                announce_removed(pool)
    return pool.num_evictions > num_before


def evict_all(pool: PrefixCache, blocks: list[KVCacheBlock]) -> None:
    """`evict` for each of these blocks, in order."""
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    # Only what the map's own counts and flags vouch for is deleted without a look at the entry first.
    is_sure = cache._num_keys == len(entries) and not pool.cached_block_hashes_by_block
    announces = pool.enable_kv_cache_events
    keys = pool._unannounced
    num_deleted = 0
    block = pool.blocks[0]
    try:
        for block in blocks:
            if is_sure and block._next_cached_id >= 0:
                key = cast(BlockHashWithGroupId, block._block_hash)
                if announces:
                    keys.append(key)
                block._block_hash = None
                block._num_hash_tokens = -1
                block._next_cached_id = -1
                try:
                    del entries[key]
                except KeyError:  # edited by hand after all
                    if announces:
                        del keys[-1]
                    continue
                num_deleted += 1
            elif block._block_hash is not None or pool.cached_block_hashes_by_block:
                drop_keys(pool, block, keys if announces else None)
    finally:
        if keys and block._block_hash is keys[-1]:  # interrupted before it was dropped
            del keys[-1]
        cache._num_keys -= num_deleted
        pool.num_evictions += num_deleted
        if keys:
            announce_removed(pool)


def announce_removed(pool: PrefixCache) -> None:
    """Append `BlockRemoved` events for the keys in `_unannounced`, and empty that.

    One for each key; with `dense_events` one for all in a row of one group, as long as no hash repeats.
    """
    keys = pool._unannounced
    events = pool.kv_event_queue
    medium = pool.medium
    make_removed = pool._removed_type
    hashes: list[Any] = (
        cast(Any, make_external_block_hashes(keys, 4))
        if pool.use_int_block_hashes
        else [get_block_hash(key) for key in keys]
    )
    suffix = keys[0][-4:]
    group_id = get_group_id(keys[0])
    made: list[Any] = []
    if pool.dense_events:
        join_removed(pool, keys, hashes, made)
    else:
        for key, block_hash in zip(keys, hashes):  # noqa: B905 (mypyc makes a loop of this only)
            if not key.endswith(suffix):
                suffix = key[-4:]
                group_id = get_group_id(key)
            made.append(make_removed([block_hash], medium, group_id))
    nothing: list[BlockHashWithGroupId] = []
    events += made
    pool._unannounced = nothing


def join_removed(
    pool: PrefixCache, keys: list[BlockHashWithGroupId], hashes: list[Any], made: list[Any]
) -> None:
    """Append one `BlockRemoved` for all keys in a row of one group, as long as no hash repeats."""
    make_removed = pool._removed_type
    suffix = keys[0][-4:]
    group_id = get_group_id(keys[0])
    seen: dict[Any, None] = {}
    for key, block_hash in zip(keys, hashes):  # noqa: B905 (mypyc makes a loop of this only)
        if block_hash in seen or not key.endswith(suffix):
            made.append(make_removed(list(seen), pool.medium, group_id))
            seen = {}
            suffix = key[-4:]
            group_id = get_group_id(key)
        seen[block_hash] = None
    made.append(make_removed(list(seen), pool.medium, group_id))


def drop_keys(pool: PrefixCache, block: KVCacheBlock, dropped: list[BlockHashWithGroupId] | None) -> None:
    """Take all keys off the block, primary first, and count those that the prefix map knew.

    Args:
        dropped: gets those keys; None for nothing.

    Key by key: whatever interrupts it, each key is either dropped in all places, or still there.
    """
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    secondary = pool.cached_block_hashes_by_block
    while True:
        others: dict[BlockHashWithGroupId, None] | None = None
        following: BlockHashWithGroupId | None = None
        block_id: int = block.block_id
        if secondary:
            others = secondary.get(block_id)
            if others is not None:
                following = next(iter(others), None)
        key = cast(BlockHashWithGroupId | None, block._block_hash)
        if key is None and others is None:
            return
        found: Any = None if key is None else entries.get(key)
        copies: dict[int, KVCacheBlock] | None = None
        is_known = False
        if isinstance(found, KVCacheBlock):
            is_known = found.block_id == block.block_id
        elif isinstance(found, dict):
            is_known = block.block_id in found
            if is_known and len(found) > 1:
                copies = found
        elif found is not None:
            raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")
        if is_known and key is not None:
            if dropped is not None:
                dropped += [key]
            if copies is None:
                del entries[key]
                cache._num_keys -= 1
            else:
                del copies[block.block_id]
            pool.num_evictions += 1
        # The next key becomes the primary one, and is dropped then.
        block._block_hash = following
        block._num_hash_tokens = -1
        block._next_cached_id = -1
        if others is not None:
            if following is not None:
                del others[following]
            if not others:
                del secondary[block.block_id]


def insert_key(
    pool: PrefixCache, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None
) -> None:
    """Let the prefix map find the block by a key that it does not have yet, its first or a secondary one."""
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    secondary = pool.cached_block_hashes_by_block
    block_id = block.block_id
    is_primary = block._block_hash is None
    if is_primary and block._num_hash_tokens >= 0:
        raise InvalidBlockError(f"block {block_id} has a token count without a hash; call reset_hash()")
    others = secondary.get(block_id)
    only_other: dict[BlockHashWithGroupId, None] = {key: None}
    found: Any = entries.get(key)
    copies: dict[int, KVCacheBlock] | None = None
    if isinstance(found, KVCacheBlock):
        copies = {found.block_id: found, block_id: block}
    elif found is not None and not isinstance(found, dict):
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")
    try:
        if not is_primary:
            if others is None:
                secondary[block_id] = only_other
            else:
                others[key] = None
        if copies is not None:
            entries[key] = copies
            found._next_cached_id = -1
            block._next_cached_id = -1
        elif found is not None:
            found[block_id] = block
            block._next_cached_id = -1
        else:
            entries[key] = block
            cache._num_keys += 1
    except MemoryError:
        if not is_primary:
            if others is None:
                del secondary[block_id]
            else:
                del others[key]
        raise
    if is_primary:
        block._block_hash = key
        block._num_hash_tokens = -1 if num_tokens is None else num_tokens
        block._next_cached_id = -1
        if block._retention_id > 0:
            block._retention_id = -block._retention_id


def plan_rekeying(
    pool: PrefixCache, moved: list[KVCacheBlock], new_ids: dict[int, int]
) -> tuple[
    dict[int, dict[BlockHashWithGroupId, None]] | None,
    list[tuple[BlockHashWithGroupId, dict[int, KVCacheBlock]]],
]:
    """What is kept under the ids of these blocks, as it has to be when they have their new ids. Only looks.

    Returns:
        Secondary keys by block id, None where there are none; and the entries of the prefix map that are
        keyed by block id, in order: the oldest copy is the one that is found.
    """
    secondary: dict[int, dict[BlockHashWithGroupId, None]] | None = None
    if pool.cached_block_hashes_by_block:
        secondary = {
            new_ids.get(block_id, block_id): keys
            for block_id, keys in pool.cached_block_hashes_by_block.items()
        }
    entries = pool.cached_block_hash_to_block._cache
    changed: dict[BlockHashWithGroupId, dict[int, KVCacheBlock]] = {}
    for block in moved:
        if block._block_hash is None or (block._next_cached_id >= 0 and secondary is None):
            continue
        keys: list[Any] = [block._block_hash]
        if secondary is not None:
            keys.extend(pool.cached_block_hashes_by_block.get(block.block_id, ()))
        for key in keys:
            copies = entries.get(key)
            if isinstance(copies, dict) and key not in changed:
                changed[key] = {new_ids.get(copy.block_id, copy.block_id): copy for copy in copies.values()}
    return secondary, list(changed.items())


def read_hashes(request: CacheableRequest) -> Sequence[BlockHash]:
    """Return `request.block_hashes`. Raise InvalidTypeError for what is not a request."""
    unchecked: Any = request
    try:
        hashes: Sequence[BlockHash] = unchecked.block_hashes
    except AttributeError:
        refuse_type("request", request, "a request")
    return hashes


def check_ours(block: KVCacheBlock, owner: Any, call: str) -> None:
    """Raise InvalidBlockError if `block` is another pool's; a bare or a null block is nobody's."""
    if block._owner is not owner and block._owner is not None and not block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} belongs to another pool; {call} takes blocks of this one"
        )


def raise_typed(error: BaseException, listed: Sequence[object], call: str) -> None:
    """Raise `error`, or an InvalidTypeError where it came from an element that is not a block."""
    if not isinstance(error, Exception):
        raise error
    for position, element in enumerate(listed):
        if not isinstance(element, KVCacheBlock):
            raise InvalidTypeError(
                f"{call} takes blocks; element {position} is a {type(element).__name__}"
            ) from error
    raise error
