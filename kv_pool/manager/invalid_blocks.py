"""`report_invalid_blocks`: blocks whose content is bad, and what is left of the requests that hold them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.manager.block_table import BlockTable


@dataclass(frozen=True)
class InvalidBlocksReport:
    """What a failed load leaves behind.

    Attributes:
        num_valid_tokens: for each request that holds a bad block, how many of its leading tokens can be gone
            on from; the scheduler sets `num_computed_tokens` to that, and the rest is computed anew.
        evicted_blocks: the bad blocks, and those that were computed from them; nobody hits them any more.
    """

    num_valid_tokens: dict[str, int]
    evicted_blocks: list[KVCacheBlock]


def report_invalid_blocks(
    block_pool: BlockPoolCore,
    tables: Mapping[str, Sequence[BlockTable]],
    block_sizes: Sequence[int],
    block_ids: Collection[int],
    count_skipped_tokens: Sequence[Callable[[int], int]] | None = None,
    state_groups: Collection[int] = (),
) -> InvalidBlocksReport:
    """Forget the content of these blocks and of what was computed from it; say what is left.

        tokens   0 . . . | . . . . | . . . . | . . . .
        table    good    | bad     | computed from it: evicted, too
                 valid  ->|

    Args:
        tables: per request one table for each group.
        block_sizes: of the groups, in tokens.
        block_ids: what could not be loaded.
        count_skipped_tokens: for each group, how many tokens from the head nobody attends to any more when so
            many tokens are computed. By default none, as for full attention. A request with windows goes on
            from where all that its next token attends to is still there: the bad block, or further back.
        state_groups: groups whose blocks hold one state each; only that in a cached block is known to be the
            state at the block's end, and can be gone on from.

    The tables keep their blocks, since the recomputed content goes there; their `num_cached_blocks` falls, so
    that it is cached again. Requests that share a bad block are all listed: one of them computes it, the
    others wait for it or are given blocks of their own.

    Raises:
        InvalidBlockError: an id is not one of this pool's, or the null block's.
        InvalidArgumentError: a request has another number of tables than there are groups. In both cases
            nothing has changed.
    Cost: O(blocks in the tables).
    """
    for block_id in block_ids:
        if not 0 < block_id < block_pool.num_gpu_blocks:
            raise InvalidBlockError(
                f"block {block_id} was reported as invalid; this pool has blocks "
                f"1..{block_pool.num_gpu_blocks - 1}"
            )
    for request_id, group_tables in tables.items():
        if len(group_tables) != len(block_sizes):
            raise InvalidArgumentError(
                f"request {request_id!r} has {len(group_tables)} tables; there are {len(block_sizes)} groups"
            )
    bad = {block_pool.blocks[block_id] for block_id in block_ids}
    evicted: dict[KVCacheBlock, None] = dict.fromkeys(block_pool.blocks[block_id] for block_id in block_ids)
    num_valid_tokens: dict[str, int] = {}
    for request_id, group_tables in tables.items():
        num_good = _count_good_tokens(group_tables, block_sizes, bad)
        if num_good is None:
            continue
        for table, block_size in zip(group_tables, block_sizes, strict=True):
            num_good_blocks = num_good // block_size
            for block in table.blocks[num_good_blocks:]:
                if not block.is_null:
                    evicted[block] = None
            table.num_cached_blocks = min(table.num_cached_blocks, num_good_blocks)
        num_valid_tokens[request_id] = _find_resumable(
            group_tables, block_sizes, num_good, count_skipped_tokens, state_groups
        )
    block_pool.evict_blocks([block.block_id for block in evicted])
    return InvalidBlocksReport(num_valid_tokens, list(evicted))


def _count_good_tokens(
    tables: Sequence[BlockTable], block_sizes: Sequence[int], bad: set[KVCacheBlock]
) -> int | None:
    """Tokens before the first bad block of any group; None when there is none."""
    first: int | None = None
    for table, block_size in zip(tables, block_sizes, strict=True):
        for index, block in enumerate(table.blocks):
            if block in bad:
                if first is None or index * block_size < first:
                    first = index * block_size
                break
    return first


def _find_resumable(
    tables: Sequence[BlockTable],
    block_sizes: Sequence[int],
    num_tokens: int,
    count_skipped_tokens: Sequence[Callable[[int], int]] | None,
    state_groups: Collection[int],
) -> int:
    """The most leading tokens, at most `num_tokens`, after which no group misses a block."""
    settled = False
    while num_tokens and not settled:
        settled = True
        for group_id, (table, block_size) in enumerate(zip(tables, block_sizes, strict=True)):
            if group_id in state_groups:
                num_left = num_tokens // block_size * block_size
                while num_left and not _ends_with_state(table, num_left // block_size):
                    num_left -= block_size
            else:
                num_skipped = (
                    0 if count_skipped_tokens is None else count_skipped_tokens[group_id](num_tokens)
                )
                num_left = _find_hole(table, num_skipped, num_tokens, block_size)
            if num_left != num_tokens:
                num_tokens = num_left
                settled = False
    return num_tokens


def _ends_with_state(table: BlockTable, num_blocks: int) -> bool:
    """Is the state after so many blocks there?"""
    return num_blocks <= len(table.blocks) and table.blocks[num_blocks - 1].block_hash is not None


def _find_hole(table: BlockTable, num_skipped: int, num_tokens: int, block_size: int) -> int:
    """Where the last block missing among those of tokens `[num_skipped, num_tokens)` begins; or their end."""
    end = -(-num_tokens // block_size)
    for index in range(min(end, len(table.blocks)) - 1, num_skipped // block_size - 1, -1):
        if table.blocks[index].is_null:
            return index * block_size
    return min(num_tokens, len(table.blocks) * block_size)
