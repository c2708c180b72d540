"""`KVCacheManager`: gives a scheduler's requests their block tables."""

from dataclasses import dataclass
from operator import index

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import check_block_hashes, make_block_hash_with_group_id
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.extra_keys import check_announceable
from kv_pool.core.kv_events import BlockStored, KVCacheEvent
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.manager.block_table import BlockTable
from kv_pool.manager.request import SchedulableRequest

_GROUP_ID = 0
_SPEC_KIND = "full_attention"


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What `get_computed_blocks` found: the longest cached prefix of one request.

    Attributes:
        request_id: whose prefix it is.
        blocks: head first. Not touched yet: they may be taken by others until `allocate_slots`.
        num_tokens: tokens they hold, `len(blocks) * block_size`.
        num_evictions: the pool's count at that moment, to notice whether the blocks may be stale.
    """

    request_id: str
    blocks: list[KVCacheBlock]
    num_tokens: int
    num_evictions: int


class KVCacheManager:
    """Block tables for requests over one pool, for one group of full attention.

        >>> from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
        >>> manager = KVCacheManager(BlockPool(10, True, 4))
        >>> hasher = BlockHasher(block_size=4)
        >>> first = Request("first", range(100, 110), hasher)
        >>> [block.block_id for block in manager.allocate_slots(first, 10)]
        [1, 2, 3]
        >>> second = Request("second", range(100, 110), hasher)
        >>> prefix = manager.get_computed_blocks(second)
        >>> prefix.num_tokens
        8
        >>> [block.block_id for block in manager.allocate_slots(second, 2, prefix)]
        [4]
        >>> manager.get_block_ids("second")
        [1, 2, 4]

    Args:
        block_pool: where the blocks come from; it may serve others as well. With a `RunBlockPool` a request's
            blocks have consecutive ids as far as possible, when it grows too.
        block_size: tokens per block, a multiple of the pool's `hash_block_size` (the default).

    A scheduler's step: `get_computed_blocks` once for a new request, `allocate_slots` before its tokens
    are computed, then `request.num_computed_tokens` counted up; `free` at the end or on preemption.
    """

    def __init__(self, block_pool: BlockPool, block_size: int | None = None) -> None:
        self.block_pool = block_pool
        try:
            self.block_size = block_pool.hash_block_size if block_size is None else index(block_size)
        except TypeError as error:
            raise InvalidTypeError(f"block_size counts tokens: {error}") from error
        if self.block_size < 1 or self.block_size % block_pool.hash_block_size:
            raise InvalidArgumentError(
                f"block_size {block_size} is not a multiple of the pool's hash_block_size "
                f"{block_pool.hash_block_size}"
            )
        self._stride = self.block_size // block_pool.hash_block_size
        self._tables: dict[str, BlockTable] = {}
        self._run_pool = block_pool if isinstance(block_pool, RunBlockPool) else None

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that is in use, 0 to 1."""
        return self.block_pool.get_usage()

    def get_computed_blocks(
        self, request: SchedulableRequest, max_num_tokens: int | None = None
    ) -> CachedPrefix:
        """The longest cached prefix of the request. Changes nothing; an empty one is an answer.

        Args:
            max_num_tokens: the prefix covers no more than this. By default all tokens but the last: of a
                fully cached prompt the last token is computed anew, since its logits are needed, and with
                it its whole block. A caller that needs no logits passes `request.num_tokens`.
        Cost: one call into the pool, O(blocks found).
        """
        blocks: list[KVCacheBlock] = []
        if self.block_pool.enable_caching:
            limit = request.num_tokens - 1 if max_num_tokens is None else max_num_tokens
            hashes = request.block_hashes
            self._check_hash_size(request)
            if self._stride > 1:
                hashes = hashes[self._stride - 1 :: self._stride]
            blocks = self.block_pool.find_cached_prefix(hashes, limit // self.block_size, _GROUP_ID)
        return CachedPrefix(
            request.request_id,
            blocks,
            len(blocks) * self.block_size,
            self.block_pool.num_evictions,
        )

    def allocate_slots(
        self,
        request: SchedulableRequest,
        num_new_tokens: int,
        cached_prefix: CachedPrefix | None = None,
        *,
        delay_cache_blocks: bool = False,
    ) -> list[KVCacheBlock] | None:
        """Make room for the next `num_new_tokens` tokens of the request.

            |<- num_computed_tokens ->|<- cached_prefix ->|<- num_new_tokens ->|
            |    in the block table   |    touch these    |   get_new_blocks   |

        Args:
            num_new_tokens: tokens about to be computed, lookahead included; 0 or more.
            cached_prefix: what `get_computed_blocks` found for this request, if it has no blocks yet.
            delay_cache_blocks: do not make the new full blocks findable yet; `cache_blocks` does it later
                (their content is still on its way).
        Returns:
            The blocks added besides the prefix, or None when they do not fit, with nothing changed. Free
            prefix blocks count as needed: they leave the free queue too.
        Raises:
            InvalidArgumentError: a negative count, more computed tokens than there are slots, a prefix for
                another request or for one with blocks.
            InvalidBlockError: the prefix is stale: a block was given to somebody else since. Look it up
                again. In all cases nothing has changed.
        Full blocks of known tokens become findable at once.
        Cost: O(blocks touched and added).
        """
        pool = self.block_pool
        request_id = request.request_id
        table = self._tables.get(request_id)
        try:
            num_new_tokens = index(num_new_tokens)
            num_computed_tokens = index(request.num_computed_tokens)
        except TypeError as error:
            raise InvalidTypeError(f"num_new_tokens and num_computed_tokens count tokens: {error}") from error
        if num_new_tokens < 0:
            raise InvalidArgumentError(f"num_new_tokens is {num_new_tokens}; it counts tokens, 0 or more")
        hits: list[KVCacheBlock] = []
        if cached_prefix is not None:
            self._check_prefix(request, cached_prefix, table)
            hits = cached_prefix.blocks
        num_held = 0 if table is None else len(table.blocks)
        if not 0 <= num_computed_tokens <= num_held * self.block_size:
            raise InvalidArgumentError(
                f"request {request_id!r} says {num_computed_tokens} tokens are computed, but holds "
                f"{num_held} blocks of {self.block_size}; set num_computed_tokens to 0 when it is freed"
            )
        num_tokens = num_computed_tokens + len(hits) * self.block_size + num_new_tokens
        num_blocks = -(-num_tokens // self.block_size)
        num_new_blocks = max(0, num_blocks - num_held - len(hits))
        num_free_hits = 0
        for block in hits:
            if block.ref_cnt == 0:
                num_free_hits += 1
        if num_new_blocks + num_free_hits > pool.get_num_free_blocks():
            return None
        num_to_cache = 0
        if pool.enable_caching and not delay_cache_blocks:
            num_to_cache = self._count_cacheable_blocks(min(num_tokens, request.num_tokens))
            num_cached = len(hits) if table is None else table.num_cached_blocks
            self._check_cacheable(request, num_cached, num_to_cache)

        # Hits first: until they are touched, they may be among the blocks that get_new_blocks takes.
        if hits:
            pool.touch(hits)
        if not num_new_blocks:
            new_blocks = []
        elif self._run_pool is None or not (num_held or hits):
            new_blocks = pool.get_new_blocks(num_new_blocks)
        else:
            last = hits[-1] if table is None else table.blocks[-1]
            new_blocks = self._run_pool.get_new_blocks_after(last, num_new_blocks)
        if table is None:
            table = BlockTable()
            self._tables[request_id] = table
        table.blocks.extend(hits)
        table.blocks.extend(new_blocks)
        if hits:
            table.num_cached_blocks = len(hits)
        if num_to_cache > table.num_cached_blocks:
            self._cache(request, table, num_to_cache)
        return new_blocks

    def cache_blocks(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens findable.

        For blocks whose content arrives after `allocate_slots(delay_cache_blocks=True)`; blocks that are
        findable already are passed over.
        Raises:
            InvalidArgumentError: no such request, or it has no slots or hashes for so many tokens. Nothing
                has changed.
        """
        table = self._table_of(request.request_id)
        if not 0 <= num_computed_tokens <= len(table.blocks) * self.block_size:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has slots for {len(table.blocks) * self.block_size} tokens, "
                f"not {num_computed_tokens}; call allocate_slots() first"
            )
        num_full_blocks = self._count_cacheable_blocks(num_computed_tokens)
        self._check_cacheable(request, table.num_cached_blocks, num_full_blocks)
        if self.block_pool.enable_caching and num_full_blocks > table.num_cached_blocks:
            self._cache(request, table, num_full_blocks)

    def free(self, request: SchedulableRequest) -> None:
        """Give all blocks of the request back, its tail to be reused before its head.

        Its hashes stay findable until the blocks are handed out again.
        Raises:
            InvalidArgumentError: the request has no blocks (freed twice?). Nothing has changed.
        """
        table = self._table_of(request.request_id)
        self.block_pool.free_blocks(table.blocks[::-1])
        del self._tables[request.request_id]

    def get_block_ids(self, request_id: str) -> list[int]:
        """The request's block table: ids in the order of its tokens.

        Raises:
            InvalidArgumentError: the request has no blocks.
        """
        return [block.block_id for block in self._table_of(request_id).blocks]

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; False, with nothing changed, while any request holds blocks."""
        return self.block_pool.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """The pool's events since the last call; stores say the kind of attention of their group."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx == _GROUP_ID:
                event.kv_cache_spec_kind = _SPEC_KIND
        return events

    def _table_of(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise InvalidArgumentError(
                f"request {request_id!r} has no blocks: never allocated, or freed already"
            )
        return table

    def _cache(self, request: SchedulableRequest, table: BlockTable, num_full_blocks: int) -> None:
        self.block_pool.cache_full_blocks(
            request,
            table.blocks,
            table.num_cached_blocks,
            num_full_blocks,
            self.block_size,
            _GROUP_ID,
        )
        table.num_cached_blocks = num_full_blocks

    def _count_cacheable_blocks(self, num_tokens: int) -> int:
        """Full blocks among these tokens whose hash, lookahead included, can be known."""
        return max(0, num_tokens - self.block_pool.num_hash_lookahead_tokens) // self.block_size

    def _check_cacheable(
        self, request: SchedulableRequest, num_cached_blocks: int, num_full_blocks: int
    ) -> None:
        """Raise now what caching blocks `[num_cached_blocks, num_full_blocks)` would raise later."""
        if num_full_blocks <= num_cached_blocks:
            return
        self._check_hash_size(request)
        hashes = request.block_hashes
        num_hashed = len(hashes) // self._stride
        if num_full_blocks > num_hashed:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has hashes for {num_hashed} blocks of {self.block_size} "
                f"tokens; {num_full_blocks} are full. Was its hasher made with another block size?"
            )
        check_block_hashes(hashes, num_cached_blocks * self._stride, num_full_blocks * self._stride)
        if self.block_pool.enable_kv_cache_events:
            check_announceable(request)

    def _check_hash_size(self, request: SchedulableRequest) -> None:
        num_hashed_tokens = len(request.block_hashes) * self.block_pool.hash_block_size
        if num_hashed_tokens > request.num_tokens:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has {request.num_tokens} tokens but hashes for "
                f"{num_hashed_tokens}. Was its hasher made with another block size than the pool's "
                f"{self.block_pool.hash_block_size}?"
            )

    def _check_prefix(
        self, request: SchedulableRequest, prefix: CachedPrefix, table: BlockTable | None
    ) -> None:
        if prefix.request_id != request.request_id:
            raise InvalidArgumentError(
                f"the cached prefix was found for request {prefix.request_id!r}, not {request.request_id!r}"
            )
        if prefix.blocks and (table is not None or request.num_computed_tokens):
            raise InvalidArgumentError(
                f"request {request.request_id!r} has blocks already; a cached prefix goes in front of all"
            )
        if prefix.num_evictions == self.block_pool.num_evictions:
            return
        hashes = request.block_hashes
        for position, block in enumerate(prefix.blocks):
            block_hash = hashes[(position + 1) * self._stride - 1]
            if block.block_hash != make_block_hash_with_group_id(block_hash, _GROUP_ID):
                raise InvalidBlockError(
                    f"block {block.block_id}, position {position} of the cached prefix of request "
                    f"{request.request_id!r}, has been given to somebody else since; look it up again"
                )
