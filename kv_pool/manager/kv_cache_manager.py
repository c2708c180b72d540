"""`KVCacheManager`: block tables for a scheduler's requests."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import (
    as_count,
    as_int,
    as_ints,
    as_list_of,
    check_number,
    check_type,
    refuse_type,
)
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_keys import CachedKey
from kv_pool.core.identity import refuse_copy
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, BlockMove
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.allocating import allocate, free_skipped_blocks
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.event_labels import label_events, list_labels
from kv_pool.manager.forking import fork_tables
from kv_pool.manager.freeing import free_tables, truncate_tables
from kv_pool.manager.invalid_blocks import InvalidBlocksReport, report_invalid_blocks
from kv_pool.manager.owned_prefixes import OwnedPrefixes
from kv_pool.manager.prefix_rules import PrefixRules
from kv_pool.manager.queries import ManagerQueries
from kv_pool.manager.recovery import recover
from kv_pool.manager.request_tables import find_tables
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.requests.request_checks import check_block_size, check_bound, get_request_id
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.step_checks import read_step


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager(ManagerQueries):
    """The block tables of requests over one pool, for one KV cache group or several.

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
        block_pool: the pool that the blocks come from. Several managers may use one pool, but they hit each
            other's blocks, which only hashes keep apart: for two models, or one model with other groups, use
            `BlockHasher`s with different seeds, or no caching. With a `RunBlockPool` a request's blocks have
            consecutive ids as far as possible, also when it grows.
        block_size: tokens per block of a single full-attention group; a multiple of the pool's
            `hash_block_size`, which is the default.
        groups: instead of `block_size`, the KV cache groups of a model whose layers differ.
        max_model_len: maximum tokens of a request; no request gets slots beyond it. None: no bound.
        max_in_flight_tokens: maximum tokens of one request that are scheduled in one step; with it,
            `full_sequence_must_fit` counts the few blocks that a window needs. None: no bound.
        watermark: share of the pool, 0 to 1, that a request without blocks must leave free while other
            requests hold blocks, so that these can grow.
        retention: keeps cached blocks that directives, pins and sessions cover; made for the same pool.
        policy: the cache policy that chooses the blocks to evict, instead of a retention; see
            `BlockPool.open_policy`. None: as the pool has it.
        prefix_rules: which blocks of windows and states are cached, and how hits with drafters end. None:
            all blocks that can serve a hit; no drafter.
        tracks_owners: remember the hashes of requests with an adapter, salt or session, for `evict_owned`.

    Attributes:
        detached_requests: id -> reason, such as "it is being moved to another node", for errors.

    In a scheduler's step: call `get_computed_blocks` once for a new request, `allocate_slots` before its
    tokens are computed, `take_block_copies` before the step runs; then increase
    `request.num_computed_tokens`. Call `free` when the request ends or is preempted.
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
        prefix_rules: PrefixRules | None = None,
        policy: Any = None,
        tracks_owners: bool = False,
    ) -> None:
        check_type("tracks_owners", tracks_owners, bool)
        check_type("block_pool", block_pool, BlockPoolCore)
        check_number("watermark", watermark)
        if groups is None:
            groups = [FullAttentionSpec(block_size=check_block_size(block_pool, block_size))]
        elif block_size is not None:
            raise InvalidArgumentError("block_size is for one group; with groups, each has its own")
        elif not groups:
            raise InvalidArgumentError("groups is empty; a model has at least one group of layers")
        super().__init__(
            block_pool,
            tuple(as_list_of("groups", groups, KVCacheSpec)),
            check_bound("max_model_len", max_model_len),
            check_bound("max_in_flight_tokens", max_in_flight_tokens),
            watermark,
            retention,
            prefix_rules,
            policy,
        )
        if tracks_owners:
            self._owners = OwnedPrefixes(
                block_pool, [group.group_id for group in self._groups if group.is_cacheable]
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._tables)} requests over {self.block_pool!r}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    # ---- allocating ------------------------------------------------------------------------------

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
        num_in_flight_tokens: int = 0,
    ) -> AllocStatus:
        """Return OK if `allocate_slots` with the same arguments would succeed now, else LATER or NEVER.

        LATER: it would succeed if all other requests released their blocks. NEVER: not even then; blocks that
        are pinned without a deadline stay pinned, see `explain_fit`. Changes nothing. Raises the errors of
        `allocate_slots`.
        """
        if not isinstance(num_in_flight_tokens, int):
            num_in_flight_tokens = as_int("num_in_flight_tokens", num_in_flight_tokens)
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
            num_in_flight_tokens,
        )
        if self._plans_checkpoints and self._rules is not None:
            step.prefill_end = self._rules.find_prefill_end(request)
        tables = step.tables
        num_sequence = request.num_tokens if full_sequence_must_fit else 0
        num_available = self.get_num_free_blocks()
        if tables is None and self._tables:
            num_available -= self.watermark_blocks
        if not num_sequence or self._needs.count_full_sequence(step, num_sequence) <= num_available:
            if tables is not None:
                num_final = step.num_before - num_in_flight_tokens
                num_available += self._needs.count_to_forget(step.request_id, tables, num_final)
            fits = self._needs.count(step) <= num_available - reserved_blocks
            if fits and not self._caching.is_unwritten(step.prefix_blocks):
                return AllocStatus.OK
        num_usable = self.block_pool.num_gpu_blocks - 1
        if self.retention is not None:
            own = self._needs.list_own_blocks(step)
            num_usable -= len(self._list_lasting_pins(step.request_id, own))
        fits_alone = self._needs.fits_alone(num_usable, step, num_sequence, reserved_blocks)
        return AllocStatus.LATER if fits_alone else AllocStatus.NEVER

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
        num_in_flight_tokens: int = 0,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Make room for the next `num_new_tokens` tokens of the request.

            |<- num_computed_tokens ->|<- cached_prefix ->|<- external ->|<- new ->|<- lookahead ->|
            |    in the block table   |    touch these    |          get_new_blocks                |

        Args:
            num_new_tokens: tokens about to be computed; 0 or more.
            cached_prefix: the result of `get_computed_blocks` for this request, if it has no blocks yet.
            num_lookahead_tokens: slots after the new tokens, for speculative tokens.
            num_external_computed_tokens: tokens after the prefix whose KV comes from elsewhere, for a request
                without blocks. The caller writes it before the step runs, or passes `delay_cache_blocks` and
                calls `cache_blocks` once it has arrived.
            delay_cache_blocks: do not cache the new full blocks yet, because their content is still in
                transit; `cache_blocks` does it later.
            num_encoder_tokens: tokens of the encoder, for cross-attention groups.
            full_sequence_must_fit: return None unless all tokens of the request fit now, even if this call
                asks for the first chunk only.
            reserved_blocks: number of blocks to leave free.
            num_in_flight_tokens: computed tokens of steps that still run, or whose drafts may be rejected:
                windows and states before them are kept.
        Returns:
            For each group, the blocks added after the prefix and the external tokens. None if they do not
            fit: nothing has changed, except that blocks which left the window are released. Free prefix
            blocks count as needed, since they leave the free queue. Also None for a prefix that ends with a
            `MambaSpec` state which a request scheduled since `take_block_copies` is about to write: a step
            reads states before it writes any, so the request must wait for the next step.
        Raises:
            InvalidArgumentError: a negative count, more computed tokens than slots, a prefix of another
                request or for a request with blocks.
            InvalidBlockError: the prefix is stale: one of its blocks was evicted. Look it up again. In all
                cases nothing has changed.
        Full blocks of known tokens are cached at once. Blocks that the step writes and that a fork shares are
        replaced: see `take_block_copies`.
        Cost: O(groups + blocks touched, added and released).
        """
        if self._unsettled is not None:
            recover(self)
        if not isinstance(delay_cache_blocks, bool):
            refuse_type("delay_cache_blocks", delay_cache_blocks, "bool")
        if not isinstance(num_in_flight_tokens, int):
            num_in_flight_tokens = as_int("num_in_flight_tokens", num_in_flight_tokens)
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
            num_in_flight_tokens,
        )
        if self._plans_checkpoints and self._rules is not None:
            step.prefill_end = self._rules.find_prefill_end(request)
        tables = step.tables
        is_new = tables is None
        full: list[int] | None = None
        if self._has_forks and tables is not None and step.num_computed > tables[0].num_valid_tokens:
            delay_cache_blocks = True  # what it computes from invalid content is not cached
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
                num_final = step.num_before - num_in_flight_tokens
                free_skipped_blocks(self, step.request_id, tables, num_final)
            except BaseException:
                recover(self)
                raise
            num_available = self.get_num_free_blocks()
        need = self._needs.count(step)
        if need > num_available - num_left - reserved_blocks:
            return None
        if len(self._caching.unwritten) > 0 and self._caching.is_unwritten(step.prefix_blocks):
            return None

        if not (is_new or need or full or self._has_forks or self._plans_checkpoints):
            return self._no_blocks
        junction = 0 if cached_prefix is None else cached_prefix.junction
        return allocate(self, request, step, junction, full, need)

    def take_block_copies(self) -> list[BlockMove]:
        """Return the copies to make before the next step writes. Call once per step, after `allocate_slots`.

        A request that writes to a block shared with a fork gets another block, whose content one of these
        copies provides; so does one whose hit ends within a block. Make the copies in order. Allocations
        after this call may reuse the sources.
        """
        self._caching.begin_step()
        if not self.copies.state_pairs:
            return self.copies.take()
        try:
            moves = self.copies.take_onto(self._leaving)
            self.block_pool.free_out_of(self._leaving)
        except BaseException:
            recover(self)
            raise
        return moves

    def take_block_copies_onto(self, retained: list[KVCacheBlock]) -> list[BlockMove]:
        """Return the copies as `take_block_copies` does, but keep their blocks until they are made.

        Args:
            retained: the blocks of the copies are appended, with one reference each. The caller frees them,
                in this order, once the copies are made.
        Does not begin a step: see `begin_step`.
        """
        return self.copies.take_onto(retained)

    def begin_step(self) -> None:
        """Begin a step: states written by the steps before it can be hit. `take_block_copies` calls it."""
        self._caching.begin_step()

    def fork(self, parent: SchedulableRequest, child: SchedulableRequest) -> None:
        """Start `child` from the current state of `parent`, in the same blocks.

        Blocks with computed tokens get one more reference; later slots stay with the parent. The first of the
        two to write to the shared last block gets a copy of it; the other keeps the block.

        Args:
            parent: between two steps: its `num_computed_tokens` counts all tokens that are written.
            child: a request without blocks; its `num_computed_tokens` equals the parent's, and so do its
                first `num_computed_tokens` tokens.
        Raises:
            InvalidArgumentError: a parent without blocks, or whose last step is not counted yet; a child with
                blocks, another count or other tokens. Nothing has changed.
        Cost: O(blocks of the parent).
        """
        tables = find_tables(self, get_request_id("parent", parent))
        get_request_id("child", child)
        fork_tables(self, tables, parent, child)

    # ---- caching ---------------------------------------------------------------------------------

    def cache_blocks(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        """Cache the full blocks among the first `num_computed_tokens` tokens, so that they can be hit.

        For blocks whose content arrives after `allocate_slots(delay_cache_blocks=True)`; blocks that are
        cached already are skipped.
        Raises:
            InvalidArgumentError: no such request, or it lacks slots or hashes for these tokens. Nothing has
                changed.
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
            num_computed_tokens = min(num_computed_tokens, tables[0].num_valid_tokens)
            full = self._caching.count_full(request, tables, 0, num_computed_tokens)
            if full is not None:
                self._caching.cache(request, tables, full, num_computed_tokens, is_written=True)

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Evict these blocks, whose content is invalid, and all that was computed from them.

        As `report_invalid_blocks`, for a caller that frees all requests with these blocks. A request that
        goes on nevertheless computes from invalid content, and what it computes is not cached.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        listed = cast("list[BlockId]", as_ints("block_ids", block_ids))
        for block_id in listed:
            if not 0 <= block_id < self.block_pool.num_gpu_blocks:
                self.block_pool.evict_blocks([block_id])  # raises
        report_invalid_blocks(self, [block_id for block_id in listed if block_id])

    def evict_owned(
        self, *, adapter: str | None = None, cache_salt: str | None = None, session_id: str | None = None
    ) -> int:
        """Evict all that requests of an adapter, a salt or a session have cached, in the lower tiers, too.

        For an adapter that is loaded again with other weights, or data to be deleted. Of several arguments,
        all must match. Running requests of these owners keep their blocks; what they compute from now on is
        not cached.

        Args:
            adapter: the adapter's name, whatever its path, id and version.
            cache_salt: of the whole request, or of a region: then the blocks from there on.
            session_id: blocks that the session shares with others are evicted, too.
        Returns:
            The number of blocks of the pool that are evicted.
        Raises:
            InvalidArgumentError: no argument, or a manager without `tracks_owners`. Nothing has changed.

        Does not find blocks that came by a migration, from a dump or from an earlier run's disk tier: no
        request of this manager computed them. For those use an adapter's version or a new salt, or
        `reset_prefix_cache`.
        Cost: O(blocks of the pool + hashes of the requests whose blocks are cached).
        """
        for name, value in (("adapter", adapter), ("cache_salt", cache_salt), ("session_id", session_id)):
            if value is not None:
                check_type(name, value, str)
        if self._owners is None:
            raise InvalidArgumentError(
                "the manager does not know which requests cached its blocks; make it with tracks_owners=True"
            )
        running, keys = self._owners.find(adapter, cache_salt, session_id)
        self._caching.uncached.update([one for one in running if one in self._tables])
        pool = self.block_pool
        if pool.lower_tiers is not None and keys:
            pool.lower_tiers.on_content_invalidated(keys)
        wanted = set(keys)
        evicted = [
            block.block_id
            for block in pool.blocks
            if block.key is not None and not wanted.isdisjoint(pool.list_keys([block]))
        ]
        self.evict_blocks(evicted)
        return len(evicted)

    def report_invalid_blocks(self, block_ids: Collection[BlockId]) -> InvalidBlocksReport:
        """Evict blocks that failed to load, and report how much of the affected requests is still valid.

        See `invalid_blocks.report_invalid_blocks`. Before the next `allocate_slots` of each request in the
        report, set its `num_computed_tokens` to the reported value, unless it is smaller already; blocks that
        several of them recompute are then replaced like those of forks. If the value is 0, free the request
        and admit it again.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        return report_invalid_blocks(self, cast("list[BlockId]", as_ints("block_ids", block_ids)))

    def iter_cached_keys(self) -> Iterator[CachedKey]:
        """Iterate over the cached keys, as `BlockPool.iter_cached_keys`: hash, group, name in events."""
        return self.block_pool.iter_cached_keys()

    def reset_prefix_cache(self) -> bool:
        """Evict every prefix, also in the host pools of swappers and in lower tiers.

        Return False, with nothing changed, while any request holds blocks, here or swapped out.
        """
        pool = self.block_pool
        hosts = self.list_hosts()
        for host in hosts:
            if not host.is_idle():
                return False
        retention = self.retention
        if retention is not None:
            num_free = pool.free_block_queue.num_free_blocks + retention.num_pinned
            if num_free == pool.num_gpu_blocks - 1:
                retention.release_all()
        if not pool.reset_prefix_cache():
            return False
        for host in hosts:
            host.reset_host()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Return the pool's events since the last call; stores state their group's kind of attention."""
        return label_events(self.block_pool, list_labels(self.groups))

    # ---- releasing -------------------------------------------------------------------------------

    def release_skipped_blocks(self, request: SchedulableRequest, num_tokens: SupportsIndex) -> None:
        """Release the blocks that no token after the first `num_tokens` attends to, as `allocate_slots` does.

        Pass final tokens only: a request that later has fewer computed tokens can no longer get slots.
        Raises:
            InvalidArgumentError: the request has no blocks, or a negative count. Nothing has changed.
        """
        request_id = get_request_id("request", request)
        tables = find_tables(self, request_id)
        num_final = as_count("num_tokens", num_tokens)
        try:
            free_skipped_blocks(self, request_id, tables, num_final)
        except BaseException:
            recover(self)
            raise

    def truncate(self, request: SchedulableRequest, num_tokens: SupportsIndex) -> None:
        """Withdraw all tokens after the first `num_tokens` from a request, between two steps.

        For sessions whose next input replaces their last tokens. Blocks after those tokens are released; they
        stay cached. A last block that is no longer full loses its hash; if others hold it, the next step
        replaces it by a copy. `num_computed_tokens` decreases to `num_tokens`, and `request.truncate` is
        called, which also withdraws the hashes; a request class of your own needs this method.

        Raises:
            InvalidArgumentError: the request has fewer tokens; its last step is not counted yet; or a group
                has dropped what the next token would read: a `MambaSpec` has no state of an earlier token, a
                window no earlier blocks. Nothing has changed. Free such a request, truncate it, and admit it
                again.
        Cost: O(blocks released).
        """
        if self._unsettled is not None:
            recover(self)
        request_id = get_request_id("request", request)
        unchecked: Any = request
        num_left = as_int("num_tokens", num_tokens)
        num_computed = as_int("num_computed_tokens", unchecked.num_computed_tokens)
        if not 1 <= num_left <= request.num_tokens:
            raise InvalidArgumentError(
                f"request {request_id!r} has {request.num_tokens} tokens; {num_left} of them cannot be left"
            )
        if request_id in self._tables or num_computed:
            tables = find_tables(self, request_id)
            truncate_tables(self, request_id, tables, num_computed, num_left)
        unchecked.num_computed_tokens = min(num_computed, num_left)
        unchecked.truncate(num_left)

    def free(self, request: SchedulableRequest) -> None:
        """Release all blocks of the request. Its tail is reused before its head.

        Its blocks can still be hit until they are reused.
        Raises:
            InvalidArgumentError: the request has no blocks (freed twice?). Nothing has changed.
        """
        if self._unsettled is not None:
            recover(self)
        request_id = get_request_id("request", request)
        free_tables(self, request_id, find_tables(self, request_id))
