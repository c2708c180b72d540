"""`read_step`: check the arguments of `allocate_slots` and `can_allocate`, and return their `Step`."""

from typing import Any, SupportsIndex

from kv_pool.core.arguments import as_count, as_int, get_request_id, refuse_type
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.step import Step
from kv_pool.manager.manager_state import ManagerState
from kv_pool.manager.prefix_lookup import CachedPrefix
from kv_pool.manager.requests.request import SchedulableRequest


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
    num_new = as_count("num_new_tokens", num_new_tokens)
    if num_lookahead_tokens != 0:
        num_lookahead_tokens = as_count("num_lookahead_tokens", num_lookahead_tokens)
    if num_external_computed_tokens != 0:
        num_external_computed_tokens = as_count("num_external_computed_tokens", num_external_computed_tokens)
    if num_encoder_tokens != 0:
        num_encoder_tokens = as_count("num_encoder_tokens", num_encoder_tokens)
    if not isinstance(full_sequence_must_fit, bool):
        refuse_type("full_sequence_must_fit", full_sequence_must_fit, "bool")
    if reserved_blocks != 0:
        reserved_blocks = as_count("reserved_blocks", reserved_blocks)
    if num_in_flight_tokens != 0:
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
    step.prefill_end = state._rules.find_prefill_end(request)
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
