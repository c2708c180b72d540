"""`KVCacheManager`: block tables for a scheduler's requests."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import (
    as_count,
    as_int,
    as_ints,
    as_list_of,
    check_ours,
    check_type,
    get_request_id,
    refuse_copy,
    refuse_interrupted,
    refuse_type,
)
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import evict_invalid
from kv_pool.core.extra_keys import find_adapter_load, find_extra_keys
from kv_pool.core.hash_map import CachedKey
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.repairing import forget_all
from kv_pool.core.stored_events import add_kinds
from kv_pool.core.taking import touch_listed
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, BlockMove, GroupId, RequestId
from kv_pool.manager.admission import AllocStatus, count_max_blocks, judge, list_lasting_pins
from kv_pool.manager.allocating import allocate_step, cache_written, free_skipped_blocks, release_blocks
from kv_pool.manager.block_groups.block_group import CachedPrefix
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState, read_step
from kv_pool.manager.requests.request import SchedulableRequest

if TYPE_CHECKING:
    from kv_pool.manager.invalid_blocks import InvalidBlocksReport


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager(ManagerState):
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
        policy: the cache policy that chooses which of the blocks without claims to evict; see
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._tables)} requests over {self.block_pool!r}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    # ---- looking -----------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that are in use, 0 to 1."""
        num_blocks = self.block_pool.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / num_blocks if num_blocks else 0.0

    def get_computed_blocks(
        self, request: SchedulableRequest, max_num_tokens: SupportsIndex | None = None
    ) -> CachedPrefix:
        """Find the longest cached prefix that all groups have; it may be empty. Changes nothing.

        Args:
            max_num_tokens: maximum length of the prefix. Default: all tokens but the last. The logits of the
                last token are needed, so its whole block is recomputed. A caller that needs no logits passes
                `request.num_tokens`.
        Cost: O(blocks found) for full attention, in one call into the pool; O(blocks of the prompt) for other
            groups.
        """
        request_id = get_request_id("request", request)
        num_tokens = junction = 0
        blocks: list[list[KVCacheBlock]]
        limit = self._find_limit(request, max_num_tokens)
        if limit is None:
            blocks = [[] for _ in self._groups]
        else:
            self.caching.check_hash_count(request, request.num_tokens, 0)
            blocks, num_tokens, junction = self.caching.find_prefix(request, limit)
        return CachedPrefix(request_id, tuple(blocks), num_tokens, self.block_pool.num_evictions, junction)

    def _find_limit(self, request: SchedulableRequest, max_num_tokens: SupportsIndex | None) -> int | None:
        """Return the most tokens that a prefix of the request may have, on the device or in lower tiers.

        None if the request hits nothing.
        """
        if not self.block_pool.enable_caching or not self.caching.covers_encoder(request):
            return None
        if max_num_tokens is None:
            return request.num_tokens - 1
        return as_count("max_num_tokens", max_num_tokens)

    def list_step_ends(self, request: SchedulableRequest, cached_prefix: CachedPrefix) -> list[int]:
        """Return the numbers of tokens, ascending, at which steps of the prompt must end to cache its states.

        A `MambaSpec` group has a state at the end of a step only. `PrefixRules` select two states per request
        or, with a `retention_interval` other than 0, more. Without rules and without states: [].
        """
        get_request_id("request", request)
        check_type("cached_prefix", cached_prefix, CachedPrefix)
        return self.caching.list_step_ends(request, cached_prefix.num_tokens, cached_prefix.junction)

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
        return judge(self, step)

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
            InvalidBlockError: the prefix is stale: one of its blocks was evicted. Look it up again. In both
                cases nothing has changed.
            Any exception of a reuse watcher (`unpin_blocks`), and OutOfBlocksError if a watcher takes blocks
                that this call needs; the pool is then interrupted: see `repair`.
        Full blocks of known tokens are cached at once. Blocks that the step writes and that a fork shares are
        replaced: see `take_block_copies`.
        Cost: O(groups + blocks touched, added and released).
        """
        if self.block_pool.is_changing:
            refuse_interrupted()
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
            num_in_flight_tokens,
        )
        step.caches = not delay_cache_blocks
        return allocate_step(self, request, step)

    def fits_alone(
        self,
        num_tokens: SupportsIndex,
        *,
        num_encoder_tokens: int = 0,
        cached_prefix: CachedPrefix | None = None,
    ) -> bool:
        """Return True if a request of `num_tokens` tokens in total can be completed, if necessary alone.

        If False, reject the request on arrival, or it waits forever; `explain_fit` says why. A window needs
        few blocks if steps are short, hence `max_in_flight_tokens`; without it, one step for all tokens is
        assumed.

        Args:
            cached_prefix: the result of `get_computed_blocks`. Blocks that are pinned without a deadline are
                not available, except those of this prefix.
        """
        return not self.explain_fit(
            num_tokens, num_encoder_tokens=num_encoder_tokens, cached_prefix=cached_prefix
        )

    def explain_fit(
        self,
        num_tokens: SupportsIndex,
        *,
        num_encoder_tokens: int = 0,
        cached_prefix: CachedPrefix | None = None,
    ) -> str:
        """Return why a request does not fit alone, with the pins that are in its way; "" if `fits_alone`."""
        num_most = self.count_max_blocks(num_tokens, num_encoder_tokens=num_encoder_tokens)
        num_blocks = self.block_pool.num_gpu_blocks - 1
        own: list[KVCacheBlock] = []
        request_id: RequestId | None = None
        if cached_prefix is not None:
            check_type("cached_prefix", cached_prefix, CachedPrefix)
            request_id = cached_prefix.request_id
            for blocks in cached_prefix.blocks:
                own += blocks
        pinned = list_lasting_pins(self, request_id, own)
        if num_most <= num_blocks - len(pinned):
            return ""
        why = f"a request of {num_tokens} tokens takes up to {num_most} of {num_blocks} blocks"
        if pinned:
            ids = sorted([block.block_id for block in pinned])
            listed = ", ".join([str(block_id) for block_id in ids[:16]]) + (", ..." if len(ids) > 16 else "")
            why += (
                f"; {len(ids)} are pinned without a deadline ({listed}); unpin some with "
                "BlockRetention.change_directives(), or reject the request"
            )
        return why

    def count_max_blocks(self, num_tokens: SupportsIndex, *, num_encoder_tokens: int = 0) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds; see `fits_alone`."""
        return count_max_blocks(
            self, as_count("num_tokens", num_tokens), as_count("num_encoder_tokens", num_encoder_tokens)
        )

    def take_block_copies(self) -> list[BlockMove]:
        """Return the copies to make before the next step writes. Call once per step, after `allocate_slots`.

        A request that writes to a block shared with a fork gets another block, whose content one of these
        copies provides; so does one whose hit ends within a block. Make the copies in order. Allocations
        after this call may reuse the sources.
        """
        if self.block_pool.is_changing:
            refuse_interrupted()
        self.caching.begin_step()
        return self.copies.take(False)[0]

    def take_block_copies_with_blocks(self) -> tuple[list[BlockMove], list[KVCacheBlock]]:
        """Return the copies as `take_block_copies` does, but keep their blocks until they are made.

        Returns:
            The copies, and their blocks with one reference each. The caller frees the blocks, in this order,
            once the copies are made.
        Does not begin a step: see `begin_step`.
        """
        self.block_pool.holds.check_whole()
        return self.copies.take(True)

    def begin_step(self) -> None:
        """Begin a step: states written by the steps before it can be hit. `take_block_copies` calls it."""
        self.caching.begin_step()

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
        self.block_pool.holds.check_whole()
        tables = self._find_tables(get_request_id("parent", parent))
        get_request_id("child", child)
        num_computed = parent.num_computed_tokens
        if child.request_id in self._tables:
            raise InvalidArgumentError(f"request {child.request_id!r} has blocks already")
        if child.num_computed_tokens != num_computed:
            raise InvalidArgumentError(
                f"request {parent.request_id!r} has {num_computed} computed tokens, but its fork "
                f"{child.request_id!r} has {child.num_computed_tokens}; set the child's count to the parent's"
            )
        num_hashes = num_computed // self.block_pool.hash_block_size
        if list(child.block_hashes[:num_hashes]) != list(parent.block_hashes[:num_hashes]):
            raise InvalidArgumentError(
                f"the first {num_computed} tokens of {child.request_id!r} are not those of its parent "
                f"{parent.request_id!r}: their hashes differ"
            )
        # The rest of the computed tokens has no hash yet, and its block may be shared and cached later.
        first = num_hashes * self.block_pool.hash_block_size
        if num_computed > first and (
            list(child.all_token_ids[first:num_computed]) != list(parent.all_token_ids[first:num_computed])
            or find_extra_keys(child, first, num_computed) != find_extra_keys(parent, first, num_computed)
            or find_adapter_load(child, True) != find_adapter_load(parent, True)
        ):
            raise InvalidArgumentError(
                f"the first {num_computed} tokens of {child.request_id!r} are not those of its parent "
                f"{parent.request_id!r}: from token {first} on, tokens, adapter, salt or multimodal inputs "
                "differ"
            )
        self._check_counted(parent.request_id, tables, num_computed)
        copies: list[BlockTable] = [BlockTable() for _ in tables]
        pool = self.block_pool
        pool.is_changing = True
        for table, copy, group in zip(tables, copies, self._groups, strict=True):
            num_shared = len(table.blocks)
            if group.is_cacheable:
                num_shared = min(num_shared, group.count_table_blocks(num_computed))
            table.is_forked = True
            copy.is_forked = True
            copy.request = child
            copy.num_hits = table.num_hits
            copy.past = None if table.past is None else table.past.copy()
            copy.num_valid_tokens = table.num_valid_tokens
            copy.unaligned_position = table.unaligned_position
            if table.copy_position < num_shared:
                copy.copy_position = table.copy_position  # the last of the two to write keeps the block
            copy.num_cached_blocks = min(table.num_cached_blocks, num_shared)
            copy.num_null_blocks = min(table.num_null_blocks, num_shared)
            shared = table.blocks[:num_shared]
            touch_listed(pool, shared)
            copy.blocks += shared
            if table.past is not None and group.is_cacheable and num_computed % group.block_size:
                # The child may continue in the parent's copy of a block.
                for block in table.list_past(num_computed // group.block_size):
                    start = num_computed - num_computed % group.block_size
                    pool.origins.note_continued(block, start, child.block_hashes)
        self._has_forks = True
        if self._owners is not None:
            self._owners.note_forked(parent.request_id, child)
        self._tables[child.request_id] = copies
        pool.is_changing = False

    def _check_counted(self, request_id: RequestId, tables: list[BlockTable], num_computed: int) -> None:
        """Raise InvalidArgumentError if the request's computed tokens do not include its cached ones yet."""
        for group, table in zip(self._groups, tables, strict=False):
            num_cached = table.num_cached_blocks * group.block_size
            if group.is_cacheable and num_computed < num_cached:
                raise InvalidArgumentError(
                    f"request {request_id!r} has blocks cached for {num_cached} tokens, but "
                    f"num_computed_tokens is {num_computed}; update it between two steps"
                )

    # ---- caching ---------------------------------------------------------------------------------

    def cache_blocks(self, request: SchedulableRequest, num_computed_tokens: int) -> None:
        """Cache the full blocks among the first `num_computed_tokens` tokens, so that they can be hit.

        For blocks whose content arrives after `allocate_slots(delay_cache_blocks=True)`; blocks that are
        cached already are skipped.
        Raises:
            InvalidArgumentError: no such request, or it lacks slots or hashes for these tokens. Nothing has
                changed.
        """
        self.block_pool.holds.check_whole()
        tables = self._find_tables(get_request_id("request", request))
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens)
        for table, group in zip(tables, self._groups, strict=True):
            num_slots = len(table.blocks) * group.block_size
            if group.is_cacheable and not 0 <= num_computed_tokens <= num_slots:
                raise InvalidArgumentError(
                    f"request {request.request_id!r} has slots for {num_slots} tokens, "
                    f"not {num_computed_tokens}; call allocate_slots() first"
                )
        if self.block_pool.enable_caching:
            cache_written(self, request, tables, min(num_computed_tokens, tables[0].num_valid_tokens))

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Evict these blocks, whose content is invalid, and all that was computed from them.

        As `report_invalid_blocks`, for a caller that frees all requests with these blocks. A request that
        goes on nevertheless computes from invalid content, and what it computes is not cached.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        listed = cast("list[BlockId]", as_ints("block_ids", block_ids))
        self.report_invalid_blocks([block_id for block_id in listed if block_id])

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
        self.caching.uncached.update([one for one in running if one in self._tables])
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

    def report_invalid_blocks(self, block_ids: Collection[BlockId]) -> "InvalidBlocksReport":
        """Evict blocks that failed to load, and report how much of the affected requests is still valid.

        See `invalid_blocks.report_invalid_blocks`. Before the next `allocate_slots` of each request in the
        report, set its `num_computed_tokens` to the reported value, unless it is smaller already; blocks that
        several of them recompute are then replaced like those of forks. If the value is 0, free the request
        and admit it again.

        Raises:
            InvalidBlockError: an id is not one of this pool's. Nothing has changed.
        """
        listed = cast("list[BlockId]", as_ints("block_ids", block_ids))
        self.block_pool.holds.check_whole()
        from kv_pool.manager.invalid_blocks import report_invalid_blocks  # while nothing fails, not needed

        return report_invalid_blocks(self, listed)

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
            if host.block_pool.is_changing:
                refuse_interrupted()
            if host._tables or host.detached_tables:
                return False
        retention = self.retention
        if retention is not None:
            num_free = pool.free_block_queue.num_free_blocks + retention.num_pinned
            if num_free == pool.num_gpu_blocks - 1:
                retention.release_all()
        for host in hosts:
            host.block_pool.is_changing = True  # its content is that of before the reset, until it is reset
        is_reset = pool.reset_prefix_cache()
        for host in hosts:
            if is_reset:
                forget_all(host.block_pool)
                if host.block_pool.metrics_collector is not None:
                    host.block_pool.metrics_collector.reset()
            host.block_pool.is_changing = False
        return is_reset

    def take_events(self) -> list[KVCacheEvent]:
        """Return the pool's events since the last call; stores state their group's kind of attention."""
        events = self.block_pool.take_events()
        add_kinds(events, self.event_labels)
        return events

    # ---- releasing -------------------------------------------------------------------------------

    def release_skipped_blocks(self, request: SchedulableRequest, num_tokens: SupportsIndex) -> None:
        """Release the blocks that no token after the first `num_tokens` attends to, as `allocate_slots` does.

        Pass final tokens only: a request that later has fewer computed tokens can no longer get slots.
        Raises:
            InvalidArgumentError: the request has no blocks, or a negative count. Nothing has changed.
        """
        request_id = get_request_id("request", request)
        tables = self._find_tables(request_id)
        num_final = as_count("num_tokens", num_tokens)
        self.block_pool.holds.check_whole()
        free_skipped_blocks(self, request_id, tables, num_final)

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
        self.block_pool.holds.check_whole()
        request_id = get_request_id("request", request)
        unchecked: Any = request
        num_left = as_int("num_tokens", num_tokens)
        num_computed = as_int("num_computed_tokens", unchecked.num_computed_tokens)
        if not 1 <= num_left <= request.num_tokens:
            raise InvalidArgumentError(
                f"request {request_id!r} has {request.num_tokens} tokens; {num_left} of them cannot be left"
            )
        has_tables = request_id in self._tables or num_computed != 0
        tables = self._find_tables(request_id) if has_tables else []
        self._check_counted(request_id, tables, num_computed)
        for group, table in zip(self._groups, tables, strict=False):
            if not group.is_cacheable:
                continue
            first = group.count_skipped_tokens(num_left) // group.block_size
            read = table.blocks[first : num_left // group.block_size + 1]
            if num_left < num_computed and (group.is_state or any(block.is_null for block in read)):
                raise InvalidArgumentError(
                    f"request {request_id!r} cannot go back from {num_computed} to {num_left} computed "
                    f"tokens: group {group.group_id} has only the state, or the window, of a later token. "
                    "Free the request, truncate it, and admit it again"
                )
        pool = self.block_pool
        pool.is_changing = True
        for group, table in zip(self._groups, tables, strict=False):
            if not group.is_cacheable or group.is_state:
                continue
            num_entries = group.count_table_blocks(num_left)
            position = num_left // group.block_size
            leaving = table.blocks[num_entries:]
            if leaving:
                del table.blocks[num_entries:]
                table.num_edits += 2  # more than one, so that no reader takes it for entries that became null
                release_blocks(self, request_id, group.group_id, num_entries, leaving)
            table.num_cached_blocks = min(table.num_cached_blocks, position)
            if position < len(table.blocks):
                block = table.blocks[position]
                if block.num_key_tokens > num_left:
                    evict_invalid(pool, [block])
                if block.ref_cnt > 1:
                    table.is_forked = self._has_forks = True
        pool.is_changing = False
        unchecked.num_computed_tokens = min(num_computed, num_left)
        unchecked.truncate(num_left)

    def free(self, request: SchedulableRequest) -> None:
        """Release all blocks of the request. Its tail is reused before its head.

        Its blocks can still be hit until they are reused.
        Raises:
            InvalidArgumentError: the request has no blocks (freed twice?). Nothing has changed.
        """
        if self.block_pool.is_changing:
            refuse_interrupted()
        request_id = get_request_id("request", request)
        tables = self._find_tables(request_id)
        if self.retention is not None:
            self.retention.expire()  # before these blocks, others become the next to be reused
        self.block_pool.is_changing = True
        del self._tables[request_id]
        for group_id, table in enumerate(tables):
            first = table.num_null_blocks
            # A slice of its own, which is reversed; the listeners read the table.
            release_blocks(self, request_id, GroupId(group_id), first, table.blocks[first:])
        for listener in self.listeners:
            listener.note_ended(request_id, tables)
        self.block_pool.is_changing = False

    # ---- whole tables, for swaps and migrations ----------------------------------------------------

    def holds_blocks(self, request_id: RequestId) -> bool:
        """Return True if the request has a block table."""
        check_type("request_id", request_id, str)
        return request_id in self._tables

    def list_request_ids(self) -> list[RequestId]:
        """Return the ids of the requests that hold blocks, in the order in which they got them."""
        return list(self._tables)

    def get_table(self, request_id: RequestId, group_id: GroupId = GroupId(0)) -> BlockTable:
        """Return the request's live block table, which only the manager may change.

        Raises:
            InvalidArgumentError: the request has no blocks, or there is no such group.
        """
        check_type("request_id", request_id, str)
        group_id = GroupId(as_int("group_id", group_id))
        tables = self._find_tables(request_id)
        if not 0 <= group_id < len(tables):
            raise InvalidArgumentError(f"there is no group {group_id}; there are {len(tables)}")
        return tables[group_id]

    def get_block_ids(self, request_id: RequestId, group_id: GroupId = GroupId(0)) -> list[BlockId]:
        """Return the request's block ids in token order; 0 for an entry without a block.

        Raises:
            InvalidArgumentError: the request has no blocks, or there is no such group.
        """
        return self.get_table(request_id, group_id).list_ids()

    def _find_tables(self, request_id: RequestId) -> list[BlockTable]:
        """Return the request's tables. Raise InvalidArgumentError if it has none."""
        tables = self._tables.get(request_id)
        if tables is None:
            raise InvalidArgumentError(
                f"request {request_id!r} has no blocks: "
                f"{self.detached_requests.get(request_id, 'never allocated, or freed already')}"
            )
        return tables

    def pop_tables(self, request_id: RequestId) -> list[BlockTable]:
        """Detach the request's tables, one per group, and return them. The caller now owns the references.

        Put them back, or free their blocks and call `forget_tables`.
        Copies into some of the blocks may be pending; call `copies.check_made` before reading their bytes.

        Raises:
            InvalidArgumentError: the request has no blocks.
        """
        check_type("request_id", request_id, str)
        tables = self._find_tables(request_id)
        self.detached_tables[request_id] = tables
        del self._tables[request_id]
        return tables.copy()

    def forget_tables(self, request_id: RequestId) -> None:
        """Forget the detached tables of a request, whose blocks are freed. No-op if there are none."""
        check_type("request_id", request_id, str)
        self.detached_tables.pop(request_id, None)

    def put_tables(self, request_id: RequestId, tables: list[BlockTable]) -> None:
        """Attach tables with referenced blocks to a request without tables: the inverse of `pop_tables`.

        Raises:
            InvalidArgumentError: the request has blocks, or the number of tables differs from that of groups.
        """
        check_type("request_id", request_id, str)
        put = as_list_of("tables", tables, BlockTable).copy()
        if request_id in self._tables:
            raise InvalidArgumentError(f"request {request_id!r} has blocks already")
        if len(put) != len(self._groups):
            raise InvalidArgumentError(f"{len(put)} tables for {len(self._groups)} groups")
        self._has_forks = self._has_forks or any(table.is_forked for table in put)
        self.detached_tables.pop(request_id, None)
        self._tables[request_id] = put

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are in no table. The first block is reused first.

        Raises:
            InvalidBlockError: a block is free, or of another pool. Nothing has changed.
        """
        check_type("blocks", blocks, list)
        for block in as_list_of("blocks", blocks, KVCacheBlock):
            check_ours(block, self.block_pool.block_owner, "KVCacheManager.free_blocks()")
        if len(self.copies):
            self.copies.drop(blocks)
        self.block_pool.free_blocks(blocks)

    # ---- after an interrupted call -----------------------------------------------------------------

    def repair(self) -> None:
        """Make manager and pool whole after an interrupted call. May itself be interrupted and repeated.

        Every request keeps its blocks. Blocks that belong to no request, swap, transfer or hold become free,
        and the prefix cache is empty: one `AllBlocksCleared`. Claims of retention, pins included, end with
        the content that they were about. A request whose `allocate_slots` was interrupted may have got its
        blocks already, or have none: call it again.

        Cost: O(blocks of the pool).
        """
        pool = self.block_pool
        pool.is_changing = True
        for host in self.list_hosts():
            host.block_pool.is_changing = True
        pool.holds.begin_repair()  # open plans may put tables back
        self.copies.repair()
        for tables in (*self._tables.values(), *self.detached_tables.values()):
            for table, group in zip(tables, self._groups, strict=True):
                # The request's next step caches again what it computes, after the content that it has.
                table.num_cached_blocks = 0
                if group.forgets:
                    num_blocks = len(table.blocks)
                    table.num_null_blocks = next(
                        (place for place, block in enumerate(table.blocks) if not block.is_null), num_blocks
                    )
        self.caching.begin_step()
        for host in self.list_hosts():
            cast("KVCacheManager", host).repair()
        # Last, since it clears the flag.
        pool.repair([block for tables in self._tables.values() for table in tables for block in table.blocks])
