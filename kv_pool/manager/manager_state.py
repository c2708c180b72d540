"""`ManagerState`: the state of a `KVCacheManager`; the modules that change it import this one.

`read_step` checks the arguments of `allocate_slots` and `can_allocate` against it, and returns their `Step`.
"""

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import (
    as_count,
    as_int,
    as_list_of,
    check_number,
    check_type,
    get_request_id,
    refuse_type,
)
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_copies import BlockCopies
from kv_pool.manager.block_groups.block_group import BlockGroup, CachedPrefix
from kv_pool.manager.block_groups.block_table import BlockTable, Step, TableListener
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from kv_pool.manager.owned_prefixes import OwnedPrefixes
from kv_pool.manager.prefix_caching import PrefixCaching
from kv_pool.manager.prefix_rules import PrefixRules
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.retention.block_retention import BlockRetention


@mypyc_attr(allow_interpreted_subclasses=True)
class ManagerState:
    """The tables of a manager's requests. A call that changes them sets `is_changing` of the pool meanwhile.

    Args: as for `KVCacheManager`.

    Attributes:
        caching: finds prefixes, and registers the tables' blocks in the prefix map.
        detached_tables: the tables of requests that are swapped out, or in an open plan or a migration.
        listeners: what follows the life of tables: caching, the retention, the owners of prefixes; or none.
        looked_up_tokens, hit_tokens: tokens of requests that got their first blocks, and those of them that
            were cached. A request that was preempted counts again.
        discounts_states: whether surplus states may be used instead of blocks to leave free, as by vLLM.
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
        specs: tuple[KVCacheSpec, ...] = tuple(as_list_of("groups", groups, KVCacheSpec))
        self.max_model_len: int = 0  # for no bound
        if max_model_len is not None:
            self.max_model_len = as_count("max_model_len", max_model_len, 1)
        self.max_in_flight_tokens: int = 0
        if max_in_flight_tokens is not None:
            self.max_in_flight_tokens = as_count("max_in_flight_tokens", max_in_flight_tokens, 1)
        if not 0 <= watermark < 1:
            raise InvalidArgumentError(f"watermark is {watermark}; it is a share of the pool, 0 to below 1")
        for spec in specs:
            if spec.is_cacheable and block_pool.enable_caching:
                check_block_size(block_pool, spec.block_size)
        self.block_pool: BlockPoolCore = block_pool
        self.groups: tuple[KVCacheSpec, ...] = specs
        self.block_size: int = specs[0].block_size
        # For each group, the kind of attention and the window that events state.
        self.event_labels: list[tuple[str, int | None]] = [
            (spec.kind, getattr(spec, "sliding_window", None)) for spec in specs
        ]
        self.watermark_blocks: int = int(watermark * block_pool.num_gpu_blocks)
        # Tokens at whose multiples all groups can resume. With a single group, the end of any block.
        self.alignment: int = lcm(*(spec.block_size for spec in specs if spec.is_cacheable))
        self._groups: list[BlockGroup] = [
            spec.make_group(block_pool, GroupId(group_id)) for group_id, spec in enumerate(specs)
        ]
        self._forgets: bool = any(group.forgets for group in self._groups)
        # Entered last, when a request starts, and removed first, when it ends: a repair keeps what is here.
        self._tables: dict[RequestId, list[BlockTable]] = {}
        self.detached_requests: dict[RequestId, str] = {}
        self.detached_tables: dict[RequestId, list[BlockTable]] = {}
        self._hosts: list[Callable[[], ManagerState | None]] = []  # weak references
        self._has_forks: bool = False
        self.looked_up_tokens: int = 0
        self.hit_tokens: int = 0
        self.discounts_states: bool = False
        self.listeners: list[TableListener] = []
        self.copies: BlockCopies = BlockCopies(block_pool)
        self.prefix_rules: PrefixRules | None = prefix_rules
        self.caching: PrefixCaching = PrefixCaching(
            prefix_rules, specs, self._groups, block_pool, self.alignment
        )
        if self.caching.has_states or self.caching.chains is not None:
            self.listeners.append(self.caching)
        self.retention: BlockRetention | None = None
        self._owners: OwnedPrefixes | None = None
        self._no_blocks: tuple[Sequence[KVCacheBlock], ...] = tuple([()] * len(specs))
        if policy is not None:
            block_pool.open_policy(policy)
        host = block_pool.policy_host
        for group in self._groups:
            if host is not None and group.is_cacheable and group.forgets:
                host.unchain(group.group_id)
        if retention is not None:
            self.attach_retention(retention)
        if tracks_owners:
            group_ids = [group.group_id for group in self._groups if group.is_cacheable]
            tables = (self._tables, self.detached_tables)
            self._owners = OwnedPrefixes(block_pool, group_ids, self.caching.uncached, tables)
            self.listeners.append(self._owners)

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks of the pool, including those that a retention keeps."""
        if self.retention is not None and self.retention.holds_blocks:
            self.retention.expire()  # expired pins free their blocks
        return self.block_pool.free_block_queue.num_free_blocks

    def add_host(self, host: Callable[[], "ManagerState | None"]) -> None:
        """Add a weak reference to a manager of copies in host memory: its tables are of swapped-out requests.

        Its pool is reset and repaired with the device's.
        """
        self._hosts = [one for one in self._hosts if one() is not None]
        self._hosts.append(host)

    def list_hosts(self) -> list["ManagerState"]:
        """Return the managers of copies in host memory that are still in use."""
        hosts = [host() for host in self._hosts]
        return [host for host in hosts if host is not None]

    def attach_retention(self, retention: BlockRetention) -> None:
        """Start to keep cached blocks as this retention says; requests may hold blocks already.

        Raises:
            InvalidArgumentError: the manager has another retention, or this one is for another pool. Nothing
                has changed.
        """
        check_type("retention", retention, BlockRetention)
        if self.retention is not None and self.retention is not retention:
            raise InvalidArgumentError("the manager has a retention already; it cannot be replaced")
        if retention.block_pool is not self.block_pool:
            raise InvalidArgumentError("the retention belongs to another pool than the manager's")
        block_sizes = [spec.block_size if spec.is_cacheable else 0 for spec in self.groups]
        retention.attach(block_sizes, self._tables)
        if self.retention is None:
            self.listeners.append(retention)
        self.retention = retention


def check_block_size(block_pool: BlockPoolCore, block_size: SupportsIndex | None) -> int:
    """Return a group's block size: a multiple of the pool's `hash_block_size`, which is the default."""
    if block_size is None:
        return block_pool.hash_block_size
    checked = as_int("block_size", block_size)
    if checked < 1 or checked % block_pool.hash_block_size:
        raise InvalidArgumentError(
            f"block_size {block_size} is not a multiple of the pool's hash_block_size "
            f"{block_pool.hash_block_size}"
        )
    return checked


# ---- the arguments of a step ---------------------------------------------------------------------


def read_step(
    state: ManagerState,
    request: SchedulableRequest,
    num_new_tokens: SupportsIndex,
    cached_prefix: CachedPrefix | None,
    num_lookahead_tokens: int,
    num_external_computed_tokens: int,
    num_encoder_tokens: int,
    full_sequence_must_fit: bool,
    reserved_blocks: int,
    num_in_flight_tokens: int,
) -> Step:
    """Check the arguments and return their step. Raises what `allocate_slots` documents; changes nothing."""
    found = getattr(request, "request_id", None)
    request_id = RequestId(found) if isinstance(found, str) else get_request_id("request", request)
    tables = state._tables.get(request_id)
    num_new = num_new_tokens if isinstance(num_new_tokens, int) else -1
    if num_new < 0:
        num_new = as_count("num_new_tokens", num_new_tokens)
    if not isinstance(num_lookahead_tokens, int) or num_lookahead_tokens < 0:
        num_lookahead_tokens = as_count("num_lookahead_tokens", num_lookahead_tokens)
    if not isinstance(num_external_computed_tokens, int) or num_external_computed_tokens < 0:
        num_external_computed_tokens = as_count("num_external_computed_tokens", num_external_computed_tokens)
    if not isinstance(num_encoder_tokens, int) or num_encoder_tokens < 0:
        num_encoder_tokens = as_count("num_encoder_tokens", num_encoder_tokens)
    if not isinstance(full_sequence_must_fit, bool):
        refuse_type("full_sequence_must_fit", full_sequence_must_fit, "bool")
    if not isinstance(reserved_blocks, int) or reserved_blocks < 0:
        reserved_blocks = as_count("reserved_blocks", reserved_blocks)
    if not isinstance(num_in_flight_tokens, int) or num_in_flight_tokens < 0:
        num_in_flight_tokens = as_count("num_in_flight_tokens", num_in_flight_tokens)
    unchecked: Any = request  # compiled code would reject a numpy integer here
    computed = unchecked.num_computed_tokens
    num_computed = computed if isinstance(computed, int) else as_int("num_computed_tokens", computed)
    num_prefix = 0
    if cached_prefix is not None:
        if not isinstance(cached_prefix, CachedPrefix):
            refuse_type("cached_prefix", cached_prefix, "CachedPrefix or None")
        check_prefix(state, request, request_id, cached_prefix)
        num_prefix = cached_prefix.num_tokens
    if tables is not None:
        if num_external_computed_tokens:
            raise InvalidArgumentError(
                f"request {request_id!r} has blocks already; external tokens must come first"
            )
        for group in state._groups:
            if group.is_cacheable:
                check_table(state, request, group, tables[group.group_id], num_computed)
    elif num_computed:
        raise_missing_blocks(state, request_id, num_computed, 0, state.block_size)
    step = Step(
        request_id,
        tables,
        num_computed,
        num_prefix,
        num_external_computed_tokens,
        num_new,
        num_lookahead_tokens,
        state.max_model_len,
    )
    if cached_prefix is not None:
        step.prefix_blocks = cached_prefix.blocks
        step.junction = cached_prefix.junction
    elif tables is None:
        step.prefix_blocks = state._no_blocks
    step.prefill_end = state.caching.find_prefill_end(request)
    step.num_encoder_tokens = num_encoder_tokens
    step.num_reserved = reserved_blocks
    step.num_final = max(0, step.num_before - num_in_flight_tokens)
    if full_sequence_must_fit:
        step.num_sequence = request.num_tokens
    if step.tables is None and state._tables:
        step.num_left = state.watermark_blocks
    return step


def check_prefix(
    state: ManagerState,
    request: SchedulableRequest,
    request_id: RequestId,
    prefix: CachedPrefix,
) -> None:
    """Raise InvalidArgumentError for another request's prefix, InvalidBlockError for a stale one."""
    if prefix.request_id != request_id:
        raise InvalidArgumentError(
            f"the cached prefix was found for request {prefix.request_id!r}, not {request_id!r}"
        )
    if request_id in state._tables:
        raise InvalidArgumentError(
            f"request {request_id!r} has blocks already; a cached prefix, even an empty one, is for a "
            "request without blocks. Are there two requests with this id?"
        )
    if len(prefix.blocks) != len(state._groups):
        raise InvalidArgumentError(
            f"the cached prefix has {len(prefix.blocks)} groups; this manager has {len(state._groups)}"
        )
    if prefix.num_evictions == state.block_pool.num_evictions:
        return
    cache = state.block_pool.cached_block_hash_to_block
    hashes = request.block_hashes
    for group in state._groups:
        for position, block in enumerate(prefix.blocks[group.group_id]):
            if block.is_null:
                continue
            # A block in which the prefix ends may have the hash of more tokens of the request.
            end = (position + 1) * group.stride
            first = min(end, prefix.num_tokens // state.block_pool.hash_block_size)
            keys = [make_block_hash_with_group_id(one, group.group_id) for one in hashes[first - 1 : end]]
            if not any(cache.contain(key, block.block_id) for key in keys):
                raise InvalidBlockError(
                    f"block {block.block_id}, position {position} of the cached prefix of request "
                    f"{request_id!r}, was evicted or reused since; look it up again"
                )


def check_table(
    state: ManagerState, request: SchedulableRequest, group: BlockGroup, table: BlockTable, num_computed: int
) -> None:
    """Raise InvalidArgumentError if the table cannot continue after the computed tokens."""
    block_size = group.block_size
    num_held = len(table.blocks)
    if not 0 <= num_computed <= num_held * block_size:
        raise_missing_blocks(state, request.request_id, num_computed, num_held, block_size)
    num_released = table.num_null_blocks * block_size
    if num_released and group.count_skipped_tokens(num_computed) < num_released:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has num_computed_tokens {num_computed}, and its next token "
            f"needs the tokens from {group.count_skipped_tokens(num_computed)} on; its first {num_released} "
            f"tokens have left the window of group {group.group_id} and their blocks are released. Free it "
            "and admit it again. While drafts may be rejected, pass num_in_flight_tokens"
        )
    if num_computed >= table.num_cached_blocks * block_size:
        return
    # A step must not write other tokens to a block than it is cached for.
    for position in range(num_computed // group.block_size, table.num_cached_blocks):
        block = table.blocks[position]
        if block.num_key_tokens != (position + 1) * group.block_size:
            continue  # not cached, or for fewer tokens
        hashes = request.block_hashes
        number = (position + 1) * group.stride - 1
        keys = state.block_pool.list_keys([block])
        if number >= len(hashes) or make_block_hash_with_group_id(hashes[number], group.group_id) not in keys:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has num_computed_tokens {num_computed}, and its block "
                f"{block.block_id} is cached for tokens that the request does not have any more; withdraw "
                "computed tokens with KVCacheManager.truncate()"
            )


def raise_missing_blocks(
    state: ManagerState, request_id: RequestId, num_computed: int, num_held: int, block_size: int
) -> None:
    """Raise InvalidArgumentError for a request whose computed tokens have no blocks."""
    why = state.detached_requests.get(request_id)
    if why is not None:
        raise InvalidArgumentError(
            f"request {request_id!r} has no blocks: {why}. Do not schedule it until it is back"
        )
    raise InvalidArgumentError(
        f"request {request_id!r} has num_computed_tokens {num_computed}, but holds "
        f"{num_held} blocks of {block_size}; set num_computed_tokens to 0 when the request is freed (if it "
        "is swapped out, swap it in)"
    )
