"""Checks of a request's id, and of a manager's block size and bounds."""

from typing import Any, SupportsIndex

from kv_pool.core.arguments import as_count, as_int, refuse_type
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import RequestId
from kv_pool.manager.requests.request import SchedulableRequest


def get_request_id(name: str, request: SchedulableRequest) -> RequestId:
    """Return the id of a request. Raise InvalidTypeError if `request` is not a request."""
    unchecked: Any = request
    try:
        request_id = unchecked.request_id
    except AttributeError:
        refuse_type(name, request, "a request")
    if not isinstance(request_id, str):
        refuse_type(f"{name}.request_id", request_id, "str")
    return RequestId(request_id)


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


def check_bound(name: str, value: SupportsIndex | None) -> int:
    """Return the bound; 0 for None."""
    return 0 if value is None else as_count(name, value, 1)
