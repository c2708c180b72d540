"""Checks of the blocks that callers pass, and the errors for them."""

from collections.abc import Sequence
from typing import Any, NoReturn

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidBlockError, InvalidTypeError


def check_ours(block: KVCacheBlock, owner: Any, call: str) -> None:
    """Raise InvalidBlockError if `block` is another pool's; a bare or a null block is nobody's."""
    if block.owner is not owner and block.owner is not None and not block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} belongs to another pool; {call} takes blocks of this one"
        )


def raise_typed(error: BaseException, listed: Sequence[object], call: str) -> NoReturn:
    """Raise `error`, or an InvalidTypeError where it came from an element that is not a block."""
    if not isinstance(error, Exception):
        raise error
    for position, element in enumerate(listed):
        if not isinstance(element, KVCacheBlock):
            raise InvalidTypeError(
                f"{call} takes blocks; element {position} is a {type(element).__name__}"
            ) from error
    raise error


def raise_not_queued(block: KVCacheBlock) -> NoReturn:
    """A block with ref_cnt 0 that the free queue does not have."""
    raise InvalidBlockError(
        f"block {block.block_id} has ref_cnt 0 but is not in this pool's queue: {block!r}"
    )


def raise_not_takeable(block: KVCacheBlock, owner: Any) -> NoReturn:
    """A block that `take_blocks` does not take."""
    if block.owner is not owner or block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; "
            "take_blocks() takes free blocks of the pool"
        )
    raise InvalidBlockError(
        f"block {block.block_id} is in use, or listed twice; take_blocks() takes free blocks"
    )
