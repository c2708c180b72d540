"""`KVCacheManager`: gives a scheduler's requests their block tables."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NoReturn, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, as_ints, as_list_of, check_number, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_keys import CachedKey
from kv_pool.core.identity import refuse_copy
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, BlockMove
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.allocating import extend_tables, forget_passed, replace_shared, start_tables
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.event_labels import label_events
from kv_pool.manager.forking import fork_tables
from kv_pool.manager.freeing import free_tables
from kv_pool.manager.invalid_blocks import InvalidBlocksReport, evict_wrong_blocks, report_invalid_blocks
from kv_pool.manager.prefix_hit import find_common_hit
from kv_pool.manager.recovery import recover
from kv_pool.manager.request_tables import RequestTables, find_tables
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.requests.request_checks import check_block_size, check_bound, get_request_id
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.step_checks import read_step


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager(RequestTables):
    """Block tables for requests over one pool, for one KV cache group or several.

        >>> from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
        >>> manager = KVCacheManager(BlockPool(10, True, 4))
        >>> hasher = BlockHasher(block_size=4)
        >>> first = Request("first", range(100, 110), hasher)
        >>> [[block.block_id for block in group] for group in manager.allocate_slots(first, 10)]
        [[1, 2, 3]]
        >>> second = Request("second", range(100, 110), hasher)
        >>> prefix = manager.get_computed_blocks(second)
        >>> prefix.num_tokens
        8
        >>> [[block.block_id for block in group] for group in manager.allocate_slots(second, 2, prefix)]
        [[4]]
        >>> manager.get_block_ids("second")
        [1, 2, 4]

    Args:
        block_pool: where the blocks come from; it may serve others as well. With a `RunBlockPool` a request's
            blocks have consecutive ids as far as possible, when it grows too.
        block_size: tokens per block of one group of full attention, a multiple of the pool's
            `hash_block_size` (the default).
        groups: instead of `block_size`, the KV cache groups of a model whose layers are not all alike.
        max_model_len: tokens of the longest request; none gets slots beyond it. None for no bound.
        max_in_flight_tokens: tokens of one request that are scheduled in one step at most; with it,
            `full_sequence_must_fit` knows how little a window needs. None for no bound.
        watermark: share of the pool, 0 to 1, that a request without blocks has to leave free while others
            hold some, so that these can grow.
        retention: keeps cached blocks that directives, pins and sessions cover; made for the same pool.

    Attributes:
        taken_out: detached requests: id -> reason, such as "it is being moved to another node", for errors.

    A scheduler's step: `get_computed_blocks` once for a new request, `allocate_slots` before its tokens are
    computed, `take_block_copies` before the step runs, then `request.num_computed_tokens` counted up; `free`
    at the end or on preemption.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        block_size: SupportsIndex | None = None,
        *,
        groups: Sequence[KVCacheSpec] | None = None,
        max_model_len: SupportsIndex | None = None,
        max_in_flight_tokens: SupportsIndex | None = None,
        watermark: float = 0.0,
        retention: BlockRetention | None = None,
    ) -> None:
        check_type("block_pool", block_pool, BlockPoolCore)
        check_number("watermark", watermark)
        if groups is None:
            groups = [FullAttentionSpec(block_size=check_block_size(block_pool, block_size))]
        elif block_size is not None:
            raise InvalidArgumentError("block_size is for one group; with groups each has its own")
        elif not groups:
            raise InvalidArgumentError("groups is empty; a model has at least one group of layers")
        super().__init__(
            block_pool,
            tuple(as_list_of("groups", groups, KVCacheSpec)),
            check_bound("max_model_len", max_model_len),
            check_bound("max_in_flight_tokens", max_in_flight_tokens),
            watermark,
            retention,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._tables)} requests over {self.block_pool!r}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    # ---- looking ---------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that is in use, 0 to 1."""
        num_blocks = self.block_pool.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / num_blocks if num_blocks else 0.0

    def get_num_free_blocks(self) -> int:
        """Free blocks of the pool, those included that a retention keeps longer than others."""
        if self.retention is not None and self.retention.holds_blocks:
            self.retention.expire()  # pins may end
        return self.block_pool.free_block_queue.num_free_blocks

    def get_computed_blocks(
        self, request: SchedulableRequest, max_num_tokens: SupportsIndex | None = None
    ) -> CachedPrefix:
        """Find the longest cached prefix of the request that all groups have, or an empty one. Only looks.

        Args:
            max_num_tokens: the prefix covers no more than this. By default all tokens but the last: of a
                fully cached prompt the last token is computed anew, since its logits are needed, and with
                it its whole block. A caller that needs no logits passes `request.num_tokens`.
        Cost: O(blocks found) for full attention, in one call into the pool; O(blocks of the prompt) for the
        others.
        """
        request_id = get_request_id("request", request)
        num_tokens = 0
        blocks: list[list[KVCacheBlock]]
        if not self.block_pool.enable_caching:
            blocks = [[] for _ in self._groups]
        else:
            num_known = request.num_tokens
            limit = num_known - 1
            if max_num_tokens is not None:
                limit = as_int("max_num_tokens", max_num_tokens)
            hashes: list[BlockHash] = request.block_hashes  # type: ignore[assignment]
            if len(hashes) * self.block_pool.hash_block_size > num_known:
                self._caching.refuse_hashes(request, len(hashes))
            blocks, num_tokens = find_common_hit(self._groups, hashes, limit)
        return CachedPrefix(request_id, tuple(blocks), num_tokens, self.block_pool.num_evictions)

    def fits_alone(self, num_tokens: SupportsIndex, *, num_encoder_tokens: int = 0) -> bool:
        """Whether a request of so many tokens in all can be computed to its end here, if need be alone.

        False: refuse it when it arrives, or it waits for ever. A window needs few blocks where steps
        are short, hence `max_in_flight_tokens`; without it one step for all tokens is assumed.
        """
        num_most = self.count_most_blocks(num_tokens, num_encoder_tokens=num_encoder_tokens)
        return num_most <= self.block_pool.num_gpu_blocks - 1

    def count_most_blocks(self, num_tokens: SupportsIndex, *, num_encoder_tokens: int = 0) -> int:
        """Blocks that a request of so many tokens in all holds at most at a time; see `fits_alone`."""
        if not isinstance(num_encoder_tokens, int):
            num_encoder_tokens = as_int("num_encoder_tokens", num_encoder_tokens)
        num_all = as_int("num_tokens", num_tokens)
        if num_all < 0 or num_encoder_tokens < 0:
            raise InvalidArgumentError(
                f"num_tokens is {num_all}, num_encoder_tokens {num_encoder_tokens}; they count tokens, 0 "
                "or more"
            )
        return self._needs.count_most_blocks(num_all, num_encoder_tokens)

    def can_allocate(
        self,
        request: SchedulableRequest,
        num_new_tokens: SupportsIndex,
        cached_prefix: CachedPrefix | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> AllocStatus:
        """Whether `allocate_slots` with the same arguments would give blocks. Changes nothing.

        Raises:
            What `allocate_slots` raises.
        """
        step = read_step(
            self,
            request,
            num_new_tokens,
            cached_prefix,
            num_lookahead_tokens,
            num_external_computed_tokens,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
        )
        tables = step.tables
        num_sequence = request.num_tokens if full_sequence_must_fit else 0
        num_available = self.get_num_free_blocks()
        if tables is None and self._tables:
            num_available -= self.watermark_blocks
        if not num_sequence or self._needs.count_full_sequence(step, num_sequence) <= num_available:
            if tables is not None:
                num_available += self._needs.count_to_forget(step.request_id, tables, step.num_before)
            fits = self._needs.count(step) <= num_available - reserved_blocks
            if fits and not self._caching.is_unwritten(step.prefix_blocks):
                return AllocStatus.OK
        num_usable = self.block_pool.num_gpu_blocks - 1
        fits_alone = self._needs.fits_alone(num_usable, step, num_sequence, reserved_blocks)
        return AllocStatus.LATER if fits_alone else AllocStatus.NEVER

    # ---- taking ----------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: SchedulableRequest,
        num_new_tokens: SupportsIndex,
        cached_prefix: CachedPrefix | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Make room for the next `num_new_tokens` tokens of the request.

            |<- num_computed_tokens ->|<- cached_prefix ->|<- external ->|<- new ->|<- lookahead ->|
            |    in the block table   |    touch these    |          get_new_blocks                |

        Args:
            num_new_tokens: tokens about to be computed; 0 or more.
            cached_prefix: what `get_computed_blocks` found for this request, if it has no blocks yet.
            num_lookahead_tokens: slots beyond them, for tokens that are only guessed yet.
            num_external_computed_tokens: tokens after the prefix whose KV comes from elsewhere, for a request
                without blocks. It is yours to write it before the step runs, or to pass
                `delay_cache_blocks` and call `cache_blocks` when it is there.
            delay_cache_blocks: do not make the new full blocks findable yet; `cache_blocks` does it later
                (their content is still on its way).
            num_encoder_tokens: tokens of the encoder, for groups of cross-attention.
            full_sequence_must_fit: None unless there is room now for all tokens of the request, even where
                this is only the first part of them.
            reserved_blocks: leave so many blocks free.
        Returns:
            For each group the blocks added behind the prefix and the external tokens; or None when they do
            not fit, with nothing changed but that blocks which left the window have been given up. Free
            prefix blocks count as needed: they leave the free queue too. None also for a prefix that goes on
            from a `MambaSpec` state which a request scheduled since `take_block_copies` is about to write: a
            step reads states before it writes any, so such a request starts in the next one.
        Raises:
            InvalidArgumentError: a negative count, more computed tokens than there are slots, a prefix for
                another request or for one with blocks.
            InvalidBlockError: the prefix is stale: a block was given to somebody else since. Look it up
                again. In all cases nothing has changed.
        Full blocks of known tokens become findable at once. Blocks that the step writes and that a fork
        shares are replaced: see `take_block_copies`.
        Cost: O(groups + blocks touched, added and given up).
        """
        if self._unsettled is not None:
            recover(self)
        if not isinstance(delay_cache_blocks, bool):
            refuse_type("delay_cache_blocks", delay_cache_blocks, "bool")
        step = read_step(
            self,
            request,
            num_new_tokens,
            cached_prefix,
            num_lookahead_tokens,
            num_external_computed_tokens,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
        )
        tables = step.tables
        is_new = tables is None
        full: list[int] | None = None
        if self.block_pool.enable_caching and not delay_cache_blocks:
            full = self._caching.count_full(request, tables, step.num_prefix, step.num_scheduled)

        free_queue = self.block_pool.free_block_queue
        num_available = free_queue.num_free_blocks if self.retention is None else self.get_num_free_blocks()
        num_left = self.watermark_blocks if is_new and self._tables else 0
        if full_sequence_must_fit:
            need = self._needs.count_full_sequence(step, request.num_tokens)
            if need > num_available - num_left:
                return None
        if self._forgets and tables is not None:
            try:
                forget_passed(self, step.request_id, tables, step.num_before)
            except BaseException:
                recover(self)
                raise
            num_available = self.get_num_free_blocks()
        need = self._needs.count(step)
        if need > num_available - num_left - reserved_blocks:
            return None
        if len(self._caching.unwritten) > 0 and self._caching.is_unwritten(step.prefix_blocks):
            return None

        if not (is_new or need or full or self._has_forks):
            return self._no_blocks
        if self.retention is not None:
            self.retention.expire()  # which blocks are hit or taken next depends on the time
        if tables is None:
            tables = []
        for table in tables:
            table.num_settled = len(table.blocks)
            table.num_settled_cached = table.num_cached_blocks
        try:
            if is_new:
                # Hits first, in all groups: until they are touched, they may be among those that are taken.
                start_tables(self, tables, step)
                if self.retention is not None and self.retention.is_active:
                    self.retention.note_admitted(request)
                if num_external_computed_tokens:
                    extend_tables(self, tables, step.num_before, 0, 0)
            elif self._has_forks:
                replace_shared(self, tables, step)
            added = self._no_blocks
            if need or num_external_computed_tokens:
                added = extend_tables(
                    self, tables, step.num_scheduled, step.num_lookahead, num_encoder_tokens
                )
            if full is not None:
                self._caching.cache(request, tables, full, step.num_scheduled, is_written=False)
            if is_new:
                self._tables[step.request_id] = tables
        except BaseException:
            self._is_leaving = False
            self._unsettled = tables
            recover(self)
            raise
        return added

    def take_block_copies(self) -> list[BlockMove]:
        """Copies to make before the next step writes anything; once per step, after its `allocate_slots`.

        A request that writes to a block which a fork shares gets another one in its place, and this is where
        the content comes from. The sources may be reused by whatever is allocated after this call.
        """
        self._caching.begin_step()
        return self.copies.take()

    def fork(self, parent: SchedulableRequest, child: SchedulableRequest) -> None:
        """Let `child` go on from where `parent` is, in the same blocks.

        Blocks with computed tokens get one reference more; slots beyond these are the parent's alone. Whoever
        writes first to the block that both would write to gets a copy of it; the last keeps it.

        Args:
            parent: between two steps: its `num_computed_tokens` counts all that was written.
            child: without blocks; its first `num_computed_tokens` tokens, as many as the parent's, are the
                parent's.
        Raises:
            InvalidArgumentError: a parent without blocks, or with a step still to be counted; a child with
                blocks, another count or other tokens. Nothing has changed.
        Cost: O(blocks of the parent).
        """
        tables = find_tables(self, get_request_id("parent", parent))
        get_request_id("child", child)
        fork_tables(self, tables, parent, child)

    # ---- caching ---------------------------------------------------------------------------------

    def cache_blocks(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens findable.

        For blocks whose content arrives after `allocate_slots(delay_cache_blocks=True)`; blocks that are
        findable already are passed over.
        Raises:
            InvalidArgumentError: no such request, or it has no slots or hashes for so many tokens. Nothing
                has changed.
        """
        tables = find_tables(self, get_request_id("request", request))
        if not isinstance(num_computed_tokens, int):
            num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens)
        for table, group in zip(tables, self._groups, strict=True):
            num_slots = len(table.blocks) * group.block_size
            if group.is_cacheable and not 0 <= num_computed_tokens <= num_slots:
                raise InvalidArgumentError(
                    f"request {request.request_id!r} has slots for {num_slots} tokens, "
                    f"not {num_computed_tokens}; call allocate_slots() first"
                )
        if self.block_pool.enable_caching:
            full = self._caching.count_full(request, tables, 0, num_computed_tokens)
            if full is not None:
                self._caching.cache(request, tables, full, num_computed_tokens, is_written=True)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks hold, here and in lower tiers, so that it is not hit; references stay.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        listed = as_ints("block_ids", block_ids)
        evict_wrong_blocks(self.block_pool, listed)
        if self.retention is not None and self.retention.is_active:
            self.retention.forget_blocks([self.block_pool.blocks[block_id] for block_id in listed])

    def report_invalid_blocks(self, block_ids: Collection[int]) -> InvalidBlocksReport:
        """Evict blocks that could not be loaded; report what is left of the requests that hold them.

        See `invalid_blocks.report_invalid_blocks`. Set `num_computed_tokens` of each request that is named to
        what is given there before its next `allocate_slots`; blocks that several of them would compute anew
        are replaced then as if they were forks. Where it is 0, free the request and admit it again.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        listed = as_ints("block_ids", block_ids)
        report = report_invalid_blocks(self.block_pool, self._tables, self._groups, listed)
        if report.num_valid_tokens:
            self._has_forks = True
        if self.retention is not None and self.retention.is_active:
            self.retention.forget_blocks(report.evicted_blocks)
        return report

    def iter_cached_keys(self) -> Iterator[CachedKey]:
        """Iterate over what is cached now, as `BlockPool.iter_cached_keys`: hash, group, name in events."""
        return self.block_pool.iter_cached_keys()

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; False, with nothing changed, while any request holds blocks."""
        pool = self.block_pool
        retention = self.retention
        if retention is not None:
            num_free = pool.free_block_queue.num_free_blocks + retention.num_pinned
            if num_free == pool.num_gpu_blocks - 1:
                retention.release_all()
        return pool.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """The pool's events since the last call; stores say the kind of attention of their group."""
        return label_events(self.block_pool.take_events(), self.groups)

    # ---- giving back -----------------------------------------------------------------------------

    def free(self, request: SchedulableRequest) -> None:
        """Give all blocks of the request back, its tail to be reused before its head.

        Its hashes stay findable until the blocks are handed out again.
        Raises:
            InvalidArgumentError: the request has no blocks (freed twice?). Nothing has changed.
        """
        if self._unsettled is not None:
            recover(self)
        request_id = get_request_id("request", request)
        free_tables(self, request_id, find_tables(self, request_id))
