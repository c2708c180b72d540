"""Build `BlockStored` events from the hashes, tokens and extra keys of a request, and complete them."""

from collections.abc import Iterable, Sequence
from typing import Any

from kv_pool.core.arguments import as_list
from kv_pool.core.block_keys import make_external_block_hash, make_external_block_hashes
from kv_pool.core.extra_keys import (
    CacheableRequest,
    ExtraKeysWalk,
    has_extra_keys,
    read_hashes,
    untag_extra_keys,
)
from kv_pool.core.kv_events import BlockRemoved, KVCacheEvent
from kv_pool.core.pool_state import PoolState
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, ExternalBlockHash, GroupId


def make_stored(
    pool: PoolState,
    request: CacheableRequest,
    hashes: list[BlockHash | None],
    parent: BlockHash | None,
    start: int,
    block_size: int,
    group_id: GroupId,
    make_event: Any = None,
) -> KVCacheEvent:
    """Return the `BlockStored` for the blocks with these hashes, the first beginning at token `start`.

    A block whose hash is None is skipped, but the event carries its tokens. `make_event` is the event class,
    by default `pool.stored_type`.
    """
    num_lookahead = pool.num_hash_lookahead_tokens
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
    event: KVCacheEvent = (make_event or pool.stored_type)(
        block_hashes=make_external_block_hashes(stored, 0) if pool.use_int_block_hashes else stored,
        parent_block_hash=None if parent is None else make_external_hash(pool, parent),
        token_ids=token_ids if isinstance(token_ids, list) else list(token_ids),
        block_size=block_size,
        lora_id=lora.adapter_id if lora else None,
        medium=pool.medium,
        lora_name=lora.name if lora else None,
        extra_keys=extra_keys or None,
        group_idx=group_id,
        session_id=getattr(request, "session_id", None),
        lookahead_token_ids=lookahead if num_lookahead else None,
    )
    return event


def make_stored_range(
    pool: PoolState,
    request: CacheableRequest,
    stored: list[BlockHash | None],
    hashes: list[BlockHash],
    num_before: int,
    block_size: int,
    group_id: GroupId,
) -> list[KVCacheEvent]:
    """Return the events for the request's blocks after its first `num_before`.

    One event; with `dense_events`, one per run of `stored` without None, whose parent is the block before
    the run. `hashes` has the hash of every block; `stored` has None for skipped blocks.
    """
    parent: BlockHash | None = None
    if num_before:
        (parent,) = hashes_of(pool, request, num_before - 1, num_before, block_size)
    start = num_before * block_size
    if not pool.dense_events or None not in stored:
        return [make_stored(pool, request, stored, parent, start, block_size, group_id)]
    events: list[KVCacheEvent] = []
    part: list[BlockHash | None] = []
    for end, block_hash in enumerate([*stored, None]):
        if block_hash is not None:
            part.append(block_hash)
        elif part:
            first = end - len(part)
            before = hashes[first - 1] if first else parent
            first_token = start + first * block_size
            events.append(make_stored(pool, request, part, before, first_token, block_size, group_id))
            part = []
    return events


def add_kinds(
    events: Iterable[Any], labels: Sequence[tuple[str, int | None]], other_kind: str | None = None
) -> None:
    """Add the kind and the window of its group to each event that has a field for them and no kind yet.

    Args:
        events: of kv_pool's or any other classes.
        labels: kind and window by group id.
        other_kind: the kind of other groups.
    """
    removed: Any = BlockRemoved
    for event in events:
        if type(event) is removed:
            continue
        group_id = getattr(event, "group_idx", None)
        if group_id is None or getattr(event, "kv_cache_spec_kind", "") is not None:
            continue
        if 0 <= group_id < len(labels):
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = labels[group_id]
        else:
            event.kv_cache_spec_kind = other_kind


def hashes_of(
    pool: PoolState, request: CacheableRequest, first: int, end: int, block_size: int
) -> list[BlockHash]:
    """Return the hashes of the request's blocks `[first, end)` at `block_size` tokens per block.

    Raises:
        InvalidArgumentError: `block_size` does not fit, or the request has too few hashes.
    """
    stride = block_size // pool.hash_block_size
    if stride < 1 or stride * pool.hash_block_size != block_size:
        raise InvalidArgumentError(
            f"block_size {block_size} is not a multiple of hash_block_size {pool.hash_block_size}"
        )
    fine = read_hashes(request)
    if len(fine) < end * stride:
        raise InvalidArgumentError(
            f"the request has {len(fine)} block hashes of {pool.hash_block_size} tokens; caching its first "
            f"{end} blocks of {block_size} tokens needs {end * stride}"
        )
    if stride == 1:
        listed = fine[first:end]
        return listed if isinstance(listed, list) else as_list("block_hashes", listed)
    # A fine hash covers everything before it, so the last fine hash in a block identifies the block.
    return [fine[(index + 1) * stride - 1] for index in range(first, end)]


def make_external_hash(pool: PoolState, block_hash: BlockHash) -> ExternalBlockHash:
    """Return the hash in the form that the pool's events carry."""
    return make_external_block_hash(block_hash) if pool.use_int_block_hashes else block_hash
