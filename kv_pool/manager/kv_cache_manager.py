"""`KVCacheManager`: gives a scheduler's requests their block tables."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import lcm
from typing import Any, NoReturn, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_pool.contiguous.run_pool_core import RunPoolCore
from kv_pool.core.arguments import as_int, as_ints, as_list, as_list_of, check_number, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_keys import CachedKey
from kv_pool.core.identity import refuse_copy
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, BlockMove
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.block_copies import BlockCopies
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from kv_pool.manager.block_groups.make_group import make_group
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.event_labels import label_events
from kv_pool.manager.invalid_blocks import InvalidBlocksReport, evict_wrong_blocks, report_invalid_blocks
from kv_pool.manager.prefix_caching import PrefixCaching
from kv_pool.manager.prefix_hit import check_prefix, find_common_hit
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.requests.request_checks import check_block_size, check_bound, get_request_id
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.slot_needs import SlotNeeds


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager:
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
        taken_out: requests whose tables somebody has taken out and may put back, and what for: "it is being
            moved to another node". Whoever does both says so here, for messages.

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
        self.block_pool: BlockPoolCore = block_pool
        if groups is None:
            groups = [FullAttentionSpec(block_size=check_block_size(block_pool, block_size))]
        elif block_size is not None:
            raise InvalidArgumentError("block_size is for one group; with groups each has its own")
        elif not groups:
            raise InvalidArgumentError("groups is empty; a model has at least one group of layers")
        if not 0 <= watermark < 1:
            raise InvalidArgumentError(f"watermark is {watermark}; it is a share of the pool, 0 to below 1")
        self.groups: tuple[KVCacheSpec, ...] = tuple(as_list_of("groups", groups, KVCacheSpec))
        for spec in self.groups:
            if spec.is_cacheable:
                check_block_size(block_pool, spec.block_size)
        self.block_size: int = self.groups[0].block_size
        self.max_model_len: int = check_bound("max_model_len", max_model_len)
        self.max_in_flight_tokens: int = check_bound("max_in_flight_tokens", max_in_flight_tokens)
        self.watermark_blocks: int = int(watermark * block_pool.num_gpu_blocks)
        # What all groups can resume at. Of one group alone, any block's end.
        self.alignment: int = lcm(*(spec.block_size for spec in self.groups if spec.is_cacheable))
        self._groups: list[BlockGroup] = [
            make_group(spec, block_pool, group_id, self.alignment)
            for group_id, spec in enumerate(self.groups)
        ]
        self._is_full_attention: bool = len(self._groups) == 1 and isinstance(
            self.groups[0], FullAttentionSpec
        )
        self._forgets: bool = any(group.forgets for group in self._groups)
        self._tables: dict[str, list[BlockTable]] = {}
        self.taken_out: dict[str, str] = {}
        self._has_forks: bool = False
        self.copies: BlockCopies = BlockCopies(block_pool)
        self._caching: PrefixCaching = PrefixCaching(block_pool, self._groups, self.alignment)
        self._needs: SlotNeeds = SlotNeeds(
            self._groups, self.max_model_len, self.max_in_flight_tokens, self.copies, retention
        )
        self._run_pool: RunPoolCore | None = block_pool if isinstance(block_pool, RunPoolCore) else None
        self.retention: BlockRetention | None = retention
        if retention is not None:
            if retention.block_pool is not block_pool:
                raise InvalidArgumentError("the retention was made for another pool than the manager's")
            retention.attach([spec.block_size if spec.is_cacheable else 0 for spec in self.groups])
        # What an interrupted call leaves for `_recover`: a request's tables, whether they go altogether, and
        # blocks with a reference that no table has.
        self._unsettled: list[BlockTable] | None = None
        self._is_leaving: bool = False
        self._taken: list[KVCacheBlock] = []
        self._leaving: list[KVCacheBlock] = []
        self._no_blocks: tuple[Sequence[KVCacheBlock], ...] = tuple([()] * len(self._groups))

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
        """The longest cached prefix of the request that all groups have. Changes nothing; an empty one is an
        answer.

        Args:
            max_num_tokens: the prefix covers no more than this. By default all tokens but the last: of a
                fully cached prompt the last token is computed anew, since its logits are needed, and with
                it its whole block. A caller that needs no logits passes `request.num_tokens`.
        Cost: O(blocks found) for full attention, in one call into the pool; O(blocks of the prompt) for the
        others.
        """
        request_id = get_request_id("request", request)
        num_tokens = 0
        blocks: tuple[list[KVCacheBlock], ...]
        if not self.block_pool.enable_caching:
            blocks = tuple([[] for _ in self._groups])
        else:
            num_known = request.num_tokens
            limit = num_known - 1
            if max_num_tokens is not None:
                limit = as_int("max_num_tokens", max_num_tokens)
            hashes: list[BlockHash] = request.block_hashes  # type: ignore[assignment]
            self._caching.check_hash_size(request, len(hashes), num_known)
            if self._is_full_attention:
                group = self._groups[0]
                found, num_tokens = group.find_longest_hit(group.list_hashes(hashes), limit)
                blocks = (found,)
            else:
                found_by_group, num_tokens = find_common_hit(self._groups, hashes, limit)
                blocks = tuple(found_by_group)
        return CachedPrefix(request_id, blocks, num_tokens, self.block_pool.num_evictions)

    def holds_blocks(self, request_id: str) -> bool:
        """Whether the request has a block table."""
        if not isinstance(request_id, str):
            refuse_type("request_id", request_id, "str")
        return request_id in self._tables

    def list_request_ids(self) -> list[str]:
        """The requests that hold blocks, in the order in which they got them."""
        return list(self._tables)

    def get_table(self, request_id: str, group_id: int = 0) -> BlockTable:
        """The request's block table, live; only the manager changes it.

        Raises:
            InvalidArgumentError: the request has no blocks, or there is no such group.
        """
        if not isinstance(request_id, str):
            refuse_type("request_id", request_id, "str")
        if not isinstance(group_id, int):
            group_id = as_int("group_id", group_id)
        tables = self._tables_of(request_id)
        if not 0 <= group_id < len(tables):
            raise InvalidArgumentError(f"there is no group {group_id}; there are {len(tables)}")
        return tables[group_id]

    def get_block_ids(self, request_id: str, group_id: int = 0) -> list[int]:
        """The request's block table: ids in the order of its tokens, 0 where nothing is kept any more.

        Raises:
            InvalidArgumentError: the request has no blocks, or there is no such group.
        """
        return self.get_table(request_id, group_id).list_ids()

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
        request_id = get_request_id("request", request)
        tables = self._tables.get(request_id)
        num_new = (
            num_new_tokens if isinstance(num_new_tokens, int) else as_int("num_new_tokens", num_new_tokens)
        )
        _check_options(num_encoder_tokens, full_sequence_must_fit, False, reserved_blocks)
        num_computed = self._check_call(
            request, tables, num_new, cached_prefix, num_lookahead_tokens, num_external_computed_tokens
        )
        num_prefix = 0 if cached_prefix is None else cached_prefix.num_tokens
        num_before = num_computed + num_prefix + num_external_computed_tokens
        num_scheduled = self._needs.limit(num_before + num_new)
        num_tokens = self._needs.limit(num_before + num_new + num_lookahead_tokens)
        prefix_blocks = self._no_blocks if cached_prefix is None else cached_prefix.blocks
        num_available = self.get_num_free_blocks() - self._count_to_leave(tables)
        fits = True
        if full_sequence_must_fit:
            need = self._needs.count_full_sequence(
                request.num_tokens, tables, prefix_blocks, num_before, num_encoder_tokens
            )
            fits = need <= num_available
        if fits:
            need = self._needs.count(
                tables, prefix_blocks, num_computed, num_before, num_scheduled, num_tokens, num_encoder_tokens
            )
            if tables is not None:
                num_available += self._needs.count_to_forget(request_id, tables, num_before)
            if need <= num_available - reserved_blocks and not self._caching.is_unwritten(prefix_blocks):
                return AllocStatus.OK
        fits_alone = self._needs.fits_alone(
            self.block_pool.num_gpu_blocks - 1,
            tables,
            prefix_blocks,
            num_before,
            num_scheduled,
            num_tokens,
            num_encoder_tokens,
            request.num_tokens if full_sequence_must_fit else 0,
            reserved_blocks,
        )
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
            self._recover()
        request_id = get_request_id("request", request)
        tables = self._tables.get(request_id)
        num_new = (
            num_new_tokens if isinstance(num_new_tokens, int) else as_int("num_new_tokens", num_new_tokens)
        )
        _check_options(num_encoder_tokens, full_sequence_must_fit, delay_cache_blocks, reserved_blocks)
        num_computed = self._check_call(
            request, tables, num_new, cached_prefix, num_lookahead_tokens, num_external_computed_tokens
        )
        num_prefix = 0 if cached_prefix is None else cached_prefix.num_tokens
        num_before = num_computed + num_prefix + num_external_computed_tokens
        num_scheduled = self._needs.limit(num_before + num_new)
        num_tokens = self._needs.limit(num_before + num_new + num_lookahead_tokens)
        prefix_blocks = self._no_blocks if cached_prefix is None else cached_prefix.blocks
        num_to_cache = 0
        if self.block_pool.enable_caching and not delay_cache_blocks:
            num_known = request.num_tokens
            num_to_cache = min(num_scheduled, num_known)
            fills_blocks = self._caching.check(request, tables, num_prefix, num_to_cache, num_known)
            if tables is None:
                self._caching.check_new_hashes(request, num_known)
            elif not fills_blocks:
                num_to_cache = 0  # most decode steps: they end in the block in which they began

        num_available = self.get_num_free_blocks()
        num_left = self._count_to_leave(tables)
        if full_sequence_must_fit:
            need = self._needs.count_full_sequence(
                request.num_tokens, tables, prefix_blocks, num_before, num_encoder_tokens
            )
            if need > num_available - num_left:
                return None
        if self._forgets and tables is not None:
            try:
                self._forget_blocks(request_id, tables, num_before)
            except BaseException:
                self._recover()
                raise
            num_available = self.get_num_free_blocks()
        need = self._needs.count(
            tables, prefix_blocks, num_computed, num_before, num_scheduled, num_tokens, num_encoder_tokens
        )
        if need > num_available - num_left - reserved_blocks or self._caching.is_unwritten(prefix_blocks):
            return None

        is_new = tables is None
        if not (is_new or need or num_to_cache or self._has_forks):
            return self._no_blocks
        if self.retention is not None:
            self.retention.expire()  # which blocks are hit or taken next depends on the time
        if tables is None:
            tables = [BlockTable() for _ in self._groups]
        else:
            for table in tables:
                table.num_settled = len(table.blocks)
                table.num_settled_cached = table.num_cached_blocks
        try:
            if is_new:
                # Hits first, in all groups: until they are touched, they may be among those that are taken.
                self._add_prefix(tables, prefix_blocks, num_before)
                if self.retention is not None and self.retention.is_active:
                    self.retention.note_admitted(request)
                if num_external_computed_tokens:
                    self._extend(tables, num_before, num_before, 0)
            elif self._has_forks:
                self._replace_shared(tables, num_computed, num_scheduled, num_tokens)
            if need or num_external_computed_tokens:
                added = self._extend(tables, num_scheduled, num_tokens, num_encoder_tokens)
            else:
                added = self._no_blocks
            if num_to_cache:
                self._caching.cache(request, tables, num_to_cache, num_scheduled, is_written=False)
            if is_new:
                self._tables[request_id] = tables
        except BaseException:
            self._is_leaving = False
            self._unsettled = tables
            self._recover()
            raise
        return added

    def _recover(self) -> None:
        """Undo an `allocate_slots` that was interrupted, or complete a `free`; may itself be interrupted.

        Blocks behind what was settled are given back. What the call made findable is evicted: nobody computes
        it now.
        """
        self.copies.recover()
        self.block_pool.free_out_of(self._taken)
        self.block_pool.free_out_of(self._leaving)
        for table in self._unsettled or ():
            blocks = table.blocks
            if self._is_leaving:
                table.num_settled = 0
                self.copies.drop(blocks)
            else:
                # What was cached before, of a new request the prefix, stays.
                unwritten = [
                    block.block_id
                    for block in blocks[table.num_settled_cached :]
                    if block.block_hash is not None
                ]
                self.block_pool.evict_blocks(unwritten)
                table.num_cached_blocks = min(table.num_cached_blocks, table.num_settled_cached)
            self._leaving = blocks[table.num_settled :][::-1]
            del blocks[table.num_settled :]
            self.block_pool.free_out_of(self._leaving)
        self._unsettled = None

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
        tables = self._tables_of(get_request_id("parent", parent))
        child_id = get_request_id("child", child)
        num_computed = parent.num_computed_tokens
        if child_id in self._tables:
            raise InvalidArgumentError(f"request {child_id!r} has blocks already")
        if child.num_computed_tokens != num_computed:
            raise InvalidArgumentError(
                f"request {parent.request_id!r} has {num_computed} computed tokens, its fork "
                f"{child.request_id!r} says {child.num_computed_tokens}; set the child's to the parent's"
            )
        num_hashes = num_computed // self.block_pool.hash_block_size
        if list(child.block_hashes[:num_hashes]) != list(parent.block_hashes[:num_hashes]):
            raise InvalidArgumentError(
                f"the first {num_computed} tokens of {child.request_id!r} are not those of its parent "
                f"{parent.request_id!r}: they have other hashes"
            )
        for table, group in zip(tables, self._groups, strict=True):
            num_cached = table.num_cached_blocks * group.block_size
            if group.is_cacheable and num_computed < num_cached:
                raise InvalidArgumentError(
                    f"request {parent.request_id!r} has blocks cached for {num_cached} tokens and says "
                    f"{num_computed} are computed; count them up before it is forked"
                )
        copies: list[BlockTable] = [BlockTable() for _ in tables]
        try:
            for table, copy, group in zip(tables, copies, self._groups, strict=True):
                num_shared = len(table.blocks)
                if group.is_cacheable:
                    num_shared = min(num_shared, group.count_table_blocks(num_computed))
                table.is_forked = True
                copy.is_forked = True
                copy.num_cached_blocks = min(table.num_cached_blocks, num_shared)
                copy.num_null_blocks = min(table.num_null_blocks, num_shared)
                self.block_pool.touch_onto(table.blocks[:num_shared], copy.blocks)
            self._has_forks = True
            self._tables[child_id] = copies
        except BaseException:
            self._is_leaving = True
            self._unsettled = copies
            self._recover()
            raise

    # ---- caching ---------------------------------------------------------------------------------

    def cache_blocks(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens findable.

        For blocks whose content arrives after `allocate_slots(delay_cache_blocks=True)`; blocks that are
        findable already are passed over.
        Raises:
            InvalidArgumentError: no such request, or it has no slots or hashes for so many tokens. Nothing
                has changed.
        """
        tables = self._tables_of(get_request_id("request", request))
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
            self._caching.check(request, tables, 0, num_computed_tokens, request.num_tokens)
            self._caching.cache(request, tables, num_computed_tokens, num_computed_tokens, is_written=True)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks hold, here and in colder tiers, so that nobody hits it; who holds them
        keeps them.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        listed = as_ints("block_ids", block_ids)
        evict_wrong_blocks(self.block_pool, listed)
        if self.retention is not None and self.retention.is_active:
            self.retention.forget_blocks([self.block_pool.blocks[block_id] for block_id in listed])

    def report_invalid_blocks(self, block_ids: Collection[int]) -> InvalidBlocksReport:
        """Say what is left of the requests whose blocks could not be loaded; nobody hits these blocks any
        more.

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
            self._recover()
        request_id = get_request_id("request", request)
        tables = self._tables_of(request_id)
        retention = self.retention
        if retention is not None:
            retention.expire()
            if not retention.is_active:
                retention = None
        try:
            self._is_leaving = True
            self._unsettled = tables
            del self._tables[request_id]
            for group_id, table in enumerate(tables):
                blocks = table.blocks
                if len(self.copies):
                    self.copies.drop(blocks[table.num_null_blocks :])
                # In place: the table still has what is not given back.
                if table.num_null_blocks:
                    del blocks[: table.num_null_blocks]
                if retention is not None:
                    retention.label_table(request_id, group_id, table.num_null_blocks, blocks)
                blocks.reverse()
                self.block_pool.free_out_of(blocks)
            if retention is not None:
                retention.forget_request(request_id)
            self._unsettled = None
        except BaseException:
            if self._unsettled is not None:
                self._recover()
            raise

    def pop_tables(self, request_id: str) -> list[BlockTable]:
        """Take the request's tables out, one for each group; the blocks stay referenced, by the caller now.

        Copies into some of them may still be pending; `copies.check_made` tells, before their bytes are read.

        Raises:
            InvalidArgumentError: the request has no blocks.
        """
        return self.pop_tables_onto(request_id, [])

    def pop_tables_onto(self, request_id: str, onto: list[BlockTable]) -> list[BlockTable]:
        """As `pop_tables`; the tables are appended to `onto` in the same step.

        Whatever interrupts the caller, `onto` says which tables it has to put back.
        """
        check_type("request_id", request_id, str)
        tables = self._tables_of(request_id)
        onto += tables
        del self._tables[request_id]
        return tables

    def put_tables(self, request_id: str, tables: list[BlockTable]) -> None:
        """Give tables with referenced blocks to a request that has none: the inverse of `pop_tables`.

        Raises:
            InvalidArgumentError: the request has blocks, or a number of tables that is not that of groups.
        """
        self.put_tables_out_of(request_id, as_list_of("tables", tables, BlockTable).copy())

    def put_tables_out_of(self, request_id: str, tables: list[BlockTable]) -> None:
        """As `put_tables`; `tables` is empty afterwards, in the same step.

        Whatever interrupts the caller, the list says which tables are still to be put back.
        """
        check_type("request_id", request_id, str)
        if request_id in self._tables:
            raise InvalidArgumentError(f"request {request_id!r} has blocks already")
        if len(tables) != len(self._groups):
            raise InvalidArgumentError(f"{len(tables)} tables for {len(self._groups)} groups")
        has_forks = any(table.is_forked for table in tables)
        put = tables.copy()
        self._has_forks = self._has_forks or has_forks
        self._tables[request_id] = put
        del tables[:]

    def _count_to_leave(self, tables: list[BlockTable] | None) -> int:
        """The watermark, for a request without blocks while others hold some."""
        return self.watermark_blocks if tables is None and self._tables else 0

    # ---- changing tables -------------------------------------------------------------------------

    def take_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for whoever works beside the manager, a swapper say; what a retention keeps makes room.

        Raises:
            OutOfBlocksError: `get_num_free_blocks()` is less. Nothing has changed.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        return self.take_onto([], num_blocks)

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> list[KVCacheBlock]:
        """As `take_blocks`; the blocks are appended to `blocks` in the same step: `BlockPool.take_onto`."""
        if self.retention is not None:
            self.retention.expire()
        return self.block_pool.take_onto(blocks, num_blocks)

    def free_out_of(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are in no table; `blocks` is empty afterwards: `BlockPool.free_out_of`."""
        if len(self.copies):
            self.copies.drop(blocks)
        self.block_pool.free_out_of(blocks)

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are in no table, first to be reused first."""
        check_type("blocks", blocks, list)
        if len(self.copies):
            self.copies.drop(blocks)
        self.block_pool.free_blocks(blocks)

    def _add_prefix(
        self, tables: list[BlockTable], prefix_blocks: Sequence[Sequence[KVCacheBlock]], num_before: int
    ) -> None:
        """Start the tables of a request with its hits; the null block where the window has passed."""
        for group in self._groups:
            hits = prefix_blocks[group.group_id]
            num_skipped = group.count_skipped_tokens(num_before) // group.block_size
            if not hits and not num_skipped:
                continue
            table = tables[group.group_id]
            used = as_list("cached_prefix", hits[num_skipped:] if num_skipped else hits)
            if num_skipped:
                table.blocks.extend([self.block_pool.null_block] * num_skipped)
                table.num_null_blocks = num_skipped
            self.block_pool.touch_onto(used, table.blocks)
            if self.retention is not None and self.retention.holds_blocks:
                self.retention.note_taken(used)
            table.num_cached_blocks = len(table.blocks)
            table.num_settled_cached = table.num_cached_blocks

    def _extend(
        self, tables: list[BlockTable], num_scheduled: int, num_tokens: int, num_encoder_tokens: int
    ) -> tuple[Sequence[KVCacheBlock], ...]:
        """Append new blocks until each table has slots for `num_tokens` tokens; what was appended."""
        added: list[Sequence[KVCacheBlock]] = []
        for group in self._groups:
            table = tables[group.group_id]
            num_blocks = self._needs.count_blocks(group, num_scheduled, num_tokens, num_encoder_tokens)
            num_new = group.count_new_blocks(len(table.blocks), num_blocks)
            if not num_new:
                added.append(self._no_blocks[0])
                continue
            num_before = len(table.blocks)
            blocks = self._taken if group.adds_null_blocks else table.blocks
            if self._run_pool is not None and table.blocks and not table.blocks[-1].is_null:
                taken = self._run_pool.take_onto_after(blocks, table.blocks[-1], num_new)
            else:
                taken = self.block_pool.take_onto(blocks, num_new)
            if group.adds_null_blocks:
                # From one list to the other without a call in between.
                new_entries = group.pad(table, num_blocks, blocks)
                table.blocks += new_entries
                self._taken = []
                taken = table.blocks[num_before:]
            added.append(taken)
        return tuple(added)

    def _forget_blocks(self, request_id: str, tables: list[BlockTable], num_computed: int) -> None:
        """Give up what no later token attends to, the last of it first; the null block takes its place."""
        null_block = self.block_pool.null_block
        for group in self._groups:
            if not group.forgets:
                continue
            table = tables[group.group_id]
            blocks = table.blocks
            end = min(group.count_skipped_tokens(num_computed) // group.block_size, len(blocks))
            if end <= table.num_null_blocks:
                continue
            first = table.num_null_blocks
            given_up = blocks[first:end]
            if all(block.is_null for block in given_up):
                table.num_null_blocks = end
                continue  # between two states
            if len(self.copies):
                self.copies.drop(given_up)
            backwards = given_up[::-1]
            if self.retention is not None and self.retention.is_active:
                self.retention.label_table(request_id, group.group_id, first, given_up)
            nulls = [null_block] * (end - first)
            self._leaving = backwards
            blocks[first:end] = nulls
            table.num_null_blocks = end
            table.num_edits += 1
            self.block_pool.free_out_of(backwards)

    def _replace_shared(
        self, tables: list[BlockTable], num_computed: int, num_scheduled: int, num_tokens: int
    ) -> None:
        """Put blocks of its own where a request would write to one that others hold; note what to copy."""
        for group in self._groups:
            table = tables[group.group_id]
            if not table.is_forked:
                continue
            num_blocks = self._needs.count_blocks(group, num_scheduled, num_tokens, 0)
            for position in self._needs.list_shared(table, group, num_computed, num_blocks):
                shared = table.blocks[position]
                is_copied = position * group.block_size < num_computed
                source = self.copies.find_source(shared) if is_copied else shared
                self.block_pool.take_onto(self._taken, 1)
                if source is not shared:
                    # It is not written yet itself: what it will hold is elsewhere.
                    self.block_pool.touch_onto([source], self._taken)
                own = self._taken[0]
                if is_copied:
                    self.copies.add(source, own)
                nothing: list[KVCacheBlock] = []
                self._leaving = [] if is_copied and source is shared else [shared]
                table.blocks[position] = own
                table.num_edits += 1
                self._taken = nothing
                if self._leaving:
                    self.block_pool.free_out_of(self._leaving)
            table.is_forked = False

    # ---- checking --------------------------------------------------------------------------------

    def _tables_of(self, request_id: str) -> list[BlockTable]:
        tables = self._tables.get(request_id)
        if tables is None:
            raise InvalidArgumentError(
                f"request {request_id!r} has no blocks: "
                f"{self.taken_out.get(request_id, 'never allocated, or freed already')}"
            )
        return tables

    def _check_call(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable] | None,
        num_new_tokens: int,
        cached_prefix: CachedPrefix | None,
        num_lookahead_tokens: int,
        num_external_computed_tokens: int,
    ) -> int:
        """The request's computed tokens. Raises what `allocate_slots` says."""
        if not isinstance(num_lookahead_tokens, int):
            num_lookahead_tokens = as_int("num_lookahead_tokens", num_lookahead_tokens)
        if not isinstance(num_external_computed_tokens, int):
            num_external_computed_tokens = as_int(
                "num_external_computed_tokens", num_external_computed_tokens
            )
        if num_new_tokens < 0 or num_lookahead_tokens < 0 or num_external_computed_tokens < 0:
            raise InvalidArgumentError(
                f"num_new_tokens is {num_new_tokens}, num_lookahead_tokens {num_lookahead_tokens}, "
                f"num_external_computed_tokens {num_external_computed_tokens}; they count tokens, 0 or more"
            )
        unchecked: Any = request  # compiled code would refuse a numpy integer here
        computed = unchecked.num_computed_tokens
        num_computed = computed if isinstance(computed, int) else as_int("num_computed_tokens", computed)
        if cached_prefix is not None:
            if not isinstance(cached_prefix, CachedPrefix):
                refuse_type("cached_prefix", cached_prefix, "CachedPrefix or None")
            check_prefix(request, cached_prefix, tables is not None, self._groups, self.block_pool)
        if tables is None:
            if num_computed:
                self._raise_uncomputed(request, num_computed, 0, self.block_size)
            return 0
        if num_external_computed_tokens:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has blocks already; external tokens come before all"
            )
        for group in self._groups:
            if group.is_cacheable:
                table = tables[group.group_id]
                num_held = len(table.blocks)
                if not 0 <= num_computed <= num_held * group.block_size:
                    self._raise_uncomputed(request, num_computed, num_held, group.block_size)
                if num_computed < table.num_null_blocks * group.block_size:
                    raise InvalidArgumentError(
                        f"request {request.request_id!r} says {num_computed} tokens are computed; its first "
                        f"{table.num_null_blocks * group.block_size} have left the window of group "
                        f"{group.group_id} and have no blocks any more. Free it and admit it again"
                    )
        return num_computed

    def _raise_uncomputed(
        self, request: SchedulableRequest, num_computed: int, num_held: int, block_size: int
    ) -> None:
        why = self.taken_out.get(request.request_id)
        if why is not None:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has no blocks: {why}. Do not schedule it until it is back"
            )
        raise InvalidArgumentError(
            f"request {request.request_id!r} says {num_computed} tokens are computed, but holds "
            f"{num_held} blocks of {block_size}; set num_computed_tokens to 0 when it is freed (and where it "
            "is swapped out, swap it in)"
        )


def _check_options(
    num_encoder_tokens: int, full_sequence_must_fit: bool, delay_cache_blocks: bool, reserved_blocks: int
) -> None:
    """Raise InvalidTypeError for options of a wrong type."""
    if not isinstance(num_encoder_tokens, int):
        as_int("num_encoder_tokens", num_encoder_tokens)
    if not isinstance(reserved_blocks, int):
        as_int("reserved_blocks", reserved_blocks)
    if not isinstance(full_sequence_must_fit, bool):
        refuse_type("full_sequence_must_fit", full_sequence_must_fit, "bool")
    if not isinstance(delay_cache_blocks, bool):
        refuse_type("delay_cache_blocks", delay_cache_blocks, "bool")
