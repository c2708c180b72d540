"""Raise the errors about blocks that callers pass, and about a pool that was interrupted."""

from collections.abc import Sequence
from typing import Any, NoReturn

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidBlockError, InvalidTypeError, PoolInterruptedError


def check_ours(block: KVCacheBlock, owner: Any, call: str) -> None:
    """Raise InvalidBlockError if `block` belongs to another pool. Bare and null blocks are accepted."""
    if block.owner is not owner and block.owner is not None and not block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} belongs to another pool; {call} takes blocks of this one"
        )


def raise_typed(error: Exception, listed: Sequence[object], call: str) -> NoReturn:
    """Raise `error`, or an InvalidTypeError if an element of `listed` is not a block."""
    for position, element in enumerate(listed):
        if not isinstance(element, KVCacheBlock):
            raise InvalidTypeError(
                f"{call} takes blocks; element {position} is a {type(element).__name__}"
            ) from error
    raise error


def raise_not_queued(block: KVCacheBlock) -> NoReturn:
    """Raise the error for a block with ref_cnt 0 that is not in the free queue."""
    raise InvalidBlockError(
        f"block {block.block_id} has ref_cnt 0 but is not in this pool's queue: {block!r}"
    )


def raise_not_takeable(block: KVCacheBlock, owner: Any) -> NoReturn:
    """Raise the error for a block that `take_blocks` rejects."""
    if block.owner is not owner or block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; "
            "take_blocks() takes free blocks of the pool"
        )
    raise InvalidBlockError(
        f"block {block.block_id} is in use, or listed twice; take_blocks() takes free blocks"
    )


def refuse_interrupted() -> NoReturn:
    """Raise PoolInterruptedError."""
    raise PoolInterruptedError(
        "an earlier call of this pool was interrupted. Call repair() of the manager or the adapter, which "
        "keeps the blocks of all requests and empties the prefix cache; for a bare BlockPool, repair(blocks) "
        "with the blocks that you hold, each once per reference"
    )
