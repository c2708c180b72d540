"""What `KVCacheManager` refuses before it changes anything."""

from typing import Any, SupportsIndex

from kv_pool.core.arguments import as_int, refuse_type
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.request import SchedulableRequest


def check_prefix(
    request: SchedulableRequest,
    prefix: CachedPrefix,
    has_blocks: bool,
    groups: list[BlockGroup],
    pool: BlockPoolCore,
) -> None:
    """Raise unless the prefix is this request's, which has no blocks yet, and is still cached."""
    if prefix.request_id != request.request_id:
        raise InvalidArgumentError(
            f"the cached prefix was found for request {prefix.request_id!r}, not {request.request_id!r}"
        )
    if has_blocks or (prefix.num_tokens and request.num_computed_tokens):
        raise InvalidArgumentError(
            f"request {request.request_id!r} has blocks already; a cached prefix, even an empty one, is for "
            "one that has none. Are there two requests with this id?"
        )
    if len(prefix.blocks) != len(groups):
        raise InvalidArgumentError(
            f"the cached prefix has {len(prefix.blocks)} groups, this manager {len(groups)}"
        )
    if prefix.num_evictions == pool.num_evictions:
        return
    hashes = request.block_hashes
    for group in groups:
        for position, block in enumerate(prefix.blocks[group.group_id]):
            if block.is_null:
                continue
            block_hash = hashes[(position + 1) * group.stride - 1]
            if block.block_hash != make_block_hash_with_group_id(block_hash, group.group_id):
                raise InvalidBlockError(
                    f"block {block.block_id}, position {position} of the cached prefix of request "
                    f"{request.request_id!r}, has been given to somebody else since; look it up again"
                )


def get_request_id(name: str, request: SchedulableRequest) -> str:
    """Return the id of a request. Raise InvalidTypeError for what is not a request."""
    unchecked: Any = request
    try:
        request_id = unchecked.request_id
    except AttributeError:
        refuse_type(name, request, "a request")
    if not isinstance(request_id, str):
        refuse_type(f"{name}.request_id", request_id, "str")
    return request_id


def check_block_size(block_pool: BlockPoolCore, block_size: SupportsIndex | None) -> int:
    """A group's block size, a multiple of the pool's `hash_block_size`, which is the default."""
    if block_size is None:
        return block_pool.hash_block_size
    checked = as_int("block_size", block_size)
    if checked < 1 or checked % block_pool.hash_block_size:
        raise InvalidArgumentError(
            f"block_size {block_size} is not a multiple of the pool's hash_block_size "
            f"{block_pool.hash_block_size}"
        )
    return checked


def check_bound(name: str, value: SupportsIndex | None) -> int:
    """The bound, 0 for None."""
    if value is None:
        return 0
    bound = as_int(name, value)
    if bound < 1:
        raise InvalidArgumentError(f"{name} is {bound}; it counts tokens, at least 1, or None for no bound")
    return bound
