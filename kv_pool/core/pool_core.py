"""`BlockPoolCore`: all of `BlockPool` that compiles. Use `kv_pool.BlockPool`."""

import gc
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from weakref import ref

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import CacheableRequest, find_extra_keys, untag_extra_keys
from kv_pool.core.free_queue import FreeKVCacheBlockQueue
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from kv_pool.core.observer import BlockObserver
from kv_pool.errors import (
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    OutOfBlocksError,
)
from kv_pool.ids import BlockHash, BlockHashWithGroupId, ExternalBlockHash

_MAX_GROUP_ID = 2**32 - 1
_GROUP_0 = b"\0\0\0\0"


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The prefix map's key: the hash, then the group id as 4 bytes big-endian.

    Raises:
        InvalidArgumentError: `group_id` does not fit into 4 bytes unsigned.
    """
    return BlockHashWithGroupId(block_hash + _group_suffix(group_id))


def _group_suffix(group_id: int) -> bytes:
    if group_id < 0 or group_id > _MAX_GROUP_ID:
        raise InvalidArgumentError(f"KV cache group id {group_id} is not in 0..{_MAX_GROUP_ID}")
    return group_id.to_bytes(4, "big")


def make_external_block_hash(block_hash: bytes) -> ExternalBlockHash:
    """A block hash as events carry it: its last 8 bytes as an unsigned big-endian integer."""
    return int.from_bytes(block_hash[-8:], "big")


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPoolCore:
    """See `BlockPool`."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: BlockObserver | None = None,
        medium: str = MEDIUM_GPU,
    ) -> None:
        if not isinstance(num_gpu_blocks, int) or num_gpu_blocks < 1:
            raise InvalidArgumentError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; a pool has at least 1 block, its null block"
            )
        if not isinstance(hash_block_size, int) or hash_block_size < 1:
            raise InvalidArgumentError(
                f"hash_block_size is {hash_block_size!r}; it counts tokens, at least 1"
            )
        self.num_gpu_blocks: int = num_gpu_blocks
        self.enable_caching: bool = enable_caching
        self.hash_block_size: int = hash_block_size
        self.enable_kv_cache_events: bool = enable_kv_cache_events
        self.metrics_collector: BlockObserver | None = metrics_collector
        self.medium: str = medium
        self.num_evictions: int = 0

        self._owner: Any = ref(self)
        blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        for block in blocks:
            block._owner = self._owner
        # A tuple of objects without GC header leaves the cyclic GC at its first visit (a list never does),
        # and a young collection now lets that visit happen here instead of while requests are served.
        self.blocks: tuple[KVCacheBlock, ...] = tuple(blocks)
        gc.collect(0)
        self.free_block_queue: FreeKVCacheBlockQueue = FreeKVCacheBlockQueue(blocks)
        self.cached_block_hash_to_block: BlockHashToBlockMap = BlockHashToBlockMap()
        self.null_block: KVCacheBlock = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self._kv_event_queue: list[KVCacheEvent] = []

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """Events since the last `take_events()`. A property, so that a subclass may redirect it."""
        return self._kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[KVCacheEvent]) -> None:
        self._kv_event_queue = events

    # ---- taking ----------------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the `num_blocks` free blocks that are next in eviction order.

        Returns:
            Distinct blocks in that order, each with ref_cnt 1 and no hash. Their KV slots still hold the
            last owner's bytes. `num_blocks` counts blocks, not tokens; 0 gives [].
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            CorruptedPoolError: a free block has references that something else wrote. All blocks are
                back in the queue; those before it have lost their hash.

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
        blocks = queue.popleft_n(num_blocks)
        caching = self.enable_caching
        observer = self.metrics_collector
        if observer is None:
            for block in blocks:
                if block.ref_cnt != 0:
                    self._undo_take(blocks, block)
                if block._block_hash is not None and caching:
                    _evict(self, block)
                block.ref_cnt = 1
        else:
            for block in blocks:
                if block.ref_cnt != 0:
                    self._undo_take(blocks, block)
                if caching:
                    observer.on_block_evicted(block)
                    if block._block_hash is not None:
                        _evict(self, block)
                block.ref_cnt = 1
                observer.on_block_allocated(block)
        return blocks

    def _undo_take(self, blocks: list[KVCacheBlock], culprit: KVCacheBlock) -> None:
        for block in blocks:
            if block is culprit:
                break
            block.ref_cnt = 0
        self.free_block_queue.prepend_n(blocks)
        raise CorruptedPoolError(
            f"block {culprit.block_id} is in the free queue with ref_cnt {culprit.ref_cnt}; "
            "only touch() may reference a free block"
        )

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block; a free one leaves the free queue. Its hash stays.

        Null blocks are skipped. A block that is listed twice gets two references.

        Raises:
            InvalidBlockError: a block of another pool, or a bare block that was never free here.
            InvalidTypeError: not a block. In both cases nothing has changed.
        Cost: O(len(blocks)). Contract: vLLM 0.33 `BlockPool.touch`.
        """
        owner = self._owner
        listed: list[KVCacheBlock] = list(blocks)
        freed: list[KVCacheBlock] = []
        index = -1
        try:
            for index, block in enumerate(listed):  # noqa: B007 (undoing reads it)
                if block._owner is not owner:
                    self._check_bare(block, "touch()")
                if block.is_null:
                    continue
                if block.ref_cnt == 0:
                    if block.next_free_block is None or block.prev_free_block is None:
                        raise InvalidBlockError(
                            f"block {block.block_id} has ref_cnt 0 but is not in the free queue: {block!r}"
                        )
                    freed.append(block)
                block.ref_cnt += 1
        except Exception as error:
            for block in listed[:index]:
                if not block.is_null:
                    block.ref_cnt -= 1
            _raise_typed(error, listed, index, "touch()")
        queue = self.free_block_queue
        for block in freed:
            queue.remove(block)
        observer = self.metrics_collector
        if observer is not None:
            for block in listed:
                if not block.is_null:
                    observer.on_block_accessed(block)

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
        listed: list[KVCacheBlock] = list(ordered_blocks)
        reused_first: list[KVCacheBlock] = []
        reused_last: list[KVCacheBlock] = []
        foreign: list[KVCacheBlock] | None = None
        by_pool: dict[int, tuple[Any, list[KVCacheBlock]]] | None = None
        index = -1
        try:
            for index, block in enumerate(listed):  # noqa: B007 (undoing reads it)
                if block.is_null:
                    continue
                if block._owner is not owner and block._owner is not None:
                    if foreign is None:
                        foreign = []
                    foreign.append(block)
                    continue
                ref_cnt = block.ref_cnt - 1
                if ref_cnt < 0 and block._owner is not None:
                    raise InvalidBlockError(
                        f"block {block.block_id} is free; free_blocks() takes blocks that are in use. "
                        "Was it freed twice?"
                    )
                block.ref_cnt = ref_cnt
                if ref_cnt == 0:
                    if block._block_hash is None or not caching:
                        reused_first.append(block)
                    else:
                        reused_last.append(block)
            if foreign is not None:
                index = len(listed)
                by_pool = _group_by_pool(foreign)
        except Exception as error:
            for block in listed[:index]:
                if not block.is_null and (block._owner is owner or block._owner is None):
                    block.ref_cnt += 1
            _raise_typed(error, listed, index, "free_blocks()")
        queue = self.free_block_queue
        if reused_first:
            queue.prepend_n(reused_first)
        if reused_last:
            queue.append_n(reused_last)
        if by_pool is not None:
            for pool, theirs in by_pool.values():
                pool.free_blocks(theirs)

    def _check_bare(self, block: KVCacheBlock, call: str) -> None:
        """Raise unless `block`, which is not marked as ours, was made outside any pool (or is null)."""
        if block._owner is not None and not block.is_null:
            raise InvalidBlockError(
                f"block {block.block_id} belongs to another pool; {call} takes blocks of this one"
            )

    # ---- prefix cache ----------------------------------------------------------------------------

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """The blocks that hold this prefix in all of these groups, in their order, or None.

        All or nothing: a miss in one group is a miss. Of several copies the oldest is returned. Only
        looks; `touch()` what you mean to keep. O(number of groups).
        Contract: vLLM 0.33 `BlockPool.get_cached_block`.
        """
        found: list[KVCacheBlock] = []
        cache = self.cached_block_hash_to_block
        for group_id in kv_cache_group_ids:
            suffix = _GROUP_0 if group_id == 0 else _group_suffix(group_id)
            block = cache.get_one_block(BlockHashWithGroupId(block_hash + suffix))
            if block is None:
                return None
            found.append(block)
        return found

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
        suffix = _group_suffix(kv_cache_group_id)
        found: list[KVCacheBlock] = []
        if max_num_blocks <= 0:
            return found
        cache = self.cached_block_hash_to_block
        entries = cache._cache
        for block_hash in block_hashes[:max_num_blocks]:
            key = BlockHashWithGroupId(block_hash + suffix)
            entry = entries.get(key)
            if isinstance(entry, KVCacheBlock):
                found.append(entry)
            elif entry is None:
                break
            else:
                block = cache.get_one_block(key)
                if block is None:
                    break
                found.append(block)
        return found

    def cache_full_blocks(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
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
        With events on and a range that is not empty: exactly one `BlockStored`, after the removals.

        Raises:
            InvalidArgumentError: the range does not fit the table, the hashes, the mask or the sizes.
            InvalidBlockError: a block is free, or cached for as many tokens or more.
            InvalidTypeError: not a block. In all cases nothing has changed.
        Cost: O(num_full_blocks - num_cached_blocks). Contract: vLLM 0.33 `BlockPool.cache_full_blocks`.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        suffix = _group_suffix(kv_cache_group_id)
        range_blocks: list[KVCacheBlock] = list(blocks[num_cached_blocks:num_full_blocks])
        num_blocks = num_full_blocks - num_cached_blocks
        if num_cached_blocks < 0 or len(range_blocks) != num_blocks:
            raise InvalidArgumentError(
                f"blocks {num_cached_blocks}..{num_full_blocks} of a table of {len(blocks)} blocks"
            )
        if block_mask is not None and len(block_mask) != num_blocks:
            raise InvalidArgumentError(f"block_mask has {len(block_mask)} flags for {num_blocks} blocks")
        hashes = self._hashes_of(request, num_cached_blocks, num_full_blocks, block_size)
        owner = self._owner
        num_tokens = num_cached_blocks * block_size
        keep: list[bool] = []
        index = -1
        try:
            for index, block in enumerate(range_blocks):
                num_tokens += block_size
                if block.is_null or (block_mask is not None and not block_mask[index]):
                    keep.append(False)
                    continue
                keep.append(True)
                if block._block_hash is not None:
                    covered = block._block_hash_num_tokens
                    if covered is None or covered >= num_tokens:
                        raise InvalidBlockError(
                            f"block {block.block_id} is cached for {covered} tokens already; only a hash "
                            f"over more than that replaces it, this one covers {num_tokens}"
                        )
                if block.ref_cnt <= 0 and block._owner is owner:
                    raise InvalidBlockError(
                        f"block {block.block_id} is free; only blocks in use can be cached"
                    )
        except Exception as error:
            _raise_typed(error, range_blocks, index, "cache_full_blocks()")

        cache = self.cached_block_hash_to_block
        num_tokens = num_cached_blocks * block_size
        for index, block in enumerate(range_blocks):
            num_tokens += block_size
            if not keep[index]:
                continue
            if block._block_hash is not None:
                _evict(self, block)
            key = BlockHashWithGroupId(hashes[index] + suffix)
            block._block_hash = key
            block._block_hash_num_tokens = num_tokens
            cache.insert(key, block)
        if self.enable_kv_cache_events:
            self._announce_stored(request, hashes, keep, num_cached_blocks, block_size, kv_cache_group_id)

    def _hashes_of(self, request: CacheableRequest, first: int, end: int, block_size: int) -> list[BlockHash]:
        """Hashes of the request's blocks `[first, end)` at `block_size` tokens a block."""
        stride = block_size // self.hash_block_size
        if stride < 1 or stride * self.hash_block_size != block_size:
            raise InvalidArgumentError(
                f"block_size {block_size} is not a multiple of hash_block_size {self.hash_block_size}"
            )
        fine = request.block_hashes
        if len(fine) < end * stride:
            raise InvalidArgumentError(
                f"request has {len(fine)} block hashes of {self.hash_block_size} tokens; caching its first "
                f"{end} blocks of {block_size} tokens needs {end * stride}"
            )
        if stride == 1:
            return list(fine[first:end])
        # A fine hash covers everything before it, so the last one in a block identifies the block.
        return [fine[(index + 1) * stride - 1] for index in range(first, end)]

    def _announce_stored(
        self,
        request: CacheableRequest,
        hashes: list[BlockHash],
        keep: list[bool],
        first: int,
        block_size: int,
        group_id: int,
    ) -> None:
        """Append the one `BlockStored` for blocks `[first, first + len(hashes))` of `request`."""
        parent: ExternalBlockHash | None = None
        if first:
            parent = make_external_block_hash(self._hashes_of(request, first - 1, first, block_size)[0])
        stored: list[ExternalBlockHash] = []
        extra_keys: list[tuple[Any, ...] | None] = []
        for index, kept in enumerate(keep):
            if kept:
                start = (first + index) * block_size
                stored.append(make_external_block_hash(hashes[index]))
                extra_keys.append(untag_extra_keys(find_extra_keys(request, start, start + block_size)))
        lora = request.lora_request
        self.kv_event_queue.append(
            BlockStored(
                block_hashes=stored,
                parent_block_hash=parent,
                token_ids=list(
                    request.all_token_ids[first * block_size : (first + len(hashes)) * block_size]
                ),
                block_size=block_size,
                lora_id=lora.adapter_id if lora else None,
                medium=self.medium,
                lora_name=lora.name if lora else None,
                extra_keys=extra_keys or None,
                group_idx=group_id,
                session_id=request.session_id,
            )
        )

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Make `block` unfindable. True if it was in the prefix map: then one `BlockRemoved`.

        vLLM's Mamba manager calls this one by name.
        """
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        return _evict(self, block)

    def evict_blocks(self, block_ids: Collection[int]) -> None:
        """Make these blocks unfindable, free or in use; references and queue places stay as they are.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        One `BlockRemoved` per block that was cached. O(len(block_ids)).
        Contract: vLLM 0.33 `BlockPool.evict_blocks`.
        """
        for block_id in block_ids:
            if not isinstance(block_id, int):
                raise InvalidTypeError(f"evict_blocks() takes block ids, got a {type(block_id).__name__}")
            if block_id < 0 or block_id >= self.num_gpu_blocks:
                raise InvalidBlockError(
                    f"Invalid block_id {block_id}: this pool has blocks 0..{self.num_gpu_blocks - 1}. "
                    "Did a KV connector report a block that was never allocated here?"
                )
        for block_id in block_ids:
            self._maybe_evict_cached_block(self.blocks[block_id])

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
        self.num_evictions += len(self.cached_block_hash_to_block)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block._block_hash = None
            block._block_hash_num_tokens = None
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

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

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the events since the last call, oldest first; the list is the caller's to change."""
        if not self.enable_kv_cache_events:
            return []
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events


# A function, since a compiled method that subclasses may override is looked up by name at each call.
def _evict(pool: BlockPoolCore, block: KVCacheBlock) -> bool:
    """Drop the block's hash; True, an event and a count if the prefix map knew it."""
    key = block._block_hash
    if key is None:
        return False
    block._block_hash = None
    block._block_hash_num_tokens = None
    if pool.cached_block_hash_to_block.pop(key, block.block_id) is None:
        return False
    pool.num_evictions += 1
    if pool.enable_kv_cache_events:
        pool.kv_event_queue.append(
            BlockRemoved(
                block_hashes=[make_external_block_hash(key[:-4])],
                medium=pool.medium,
                group_idx=int.from_bytes(key[-4:], "big"),
            )
        )
    return True


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


def _raise_typed(error: Exception, listed: Sequence[object], index: int, call: str) -> None:
    """Raise `error`, or an InvalidTypeError where it came from an element that is not a block."""
    for position, element in enumerate(listed):
        if not isinstance(element, KVCacheBlock):
            raise InvalidTypeError(
                f"{call} takes blocks; element {position} is a {type(element).__name__}"
            ) from error
    raise error
