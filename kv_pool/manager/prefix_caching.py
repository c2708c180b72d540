"""`PrefixCaching`: makes the full blocks of requests findable, as far as they can serve a hit."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import check_block_hashes
from kv_pool.core.extra_keys import check_announceable
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.step import Step


@mypyc_attr(allow_interpreted_subclasses=False)
class PrefixCaching:
    """Registers the blocks of all groups of a manager.

    Args:
        alignment: tokens; of several groups, no prefix that does not end at a multiple of it is of use.
    """

    def __init__(self, pool: BlockPoolCore, groups: list[BlockGroup], alignment: int) -> None:
        self._pool: BlockPoolCore = pool
        self._groups: list[BlockGroup] = groups
        self._alignment: int = alignment
        # Findable states that are there only after the step for which slots are being allocated.
        self._unwritten: set[KVCacheBlock] = set()

    def begin_step(self) -> None:
        """All that was allocated is written by the time anybody reads what is allocated from now on."""
        if len(self._unwritten) > 0:  # compiled, cheaper than the set's truth
            self._unwritten = set()

    def is_unwritten(self, prefix_blocks: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Whether a request with this prefix has to wait for the next step."""
        return len(self._unwritten) > 0 and any(
            bool(blocks) and blocks[-1] in self._unwritten for blocks in prefix_blocks
        )

    def cache(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable],
        num_tokens: int,
        num_written: int,
        is_written: bool,
    ) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable that are not yet.

        Args:
            num_written: tokens after the step; more than `num_tokens` where some are only guessed.
            is_written: their content is there, not only after the step to come.
        """
        for group in self._groups:
            if not group.is_cacheable:
                continue
            table = tables[group.group_id]
            first = table.num_cached_blocks
            # No call for most decode steps: they end in the block in which they began.
            if num_tokens < (first + 1) * group.block_size:
                continue
            end = self._count_cacheable_blocks(group, num_tokens, request.num_tokens)
            if end > first:
                mask = _pass_over_cached(table, first, end, group, group.make_mask(first, end, num_written))
                if mask is None or True in mask:
                    self._pool.cache_full_blocks(
                        request, table.blocks, first, end, group.block_size, group.group_id, mask
                    )
                if group.reads_before_writes and not is_written and mask is not None and mask[-1]:
                    self._unwritten.add(table.blocks[end - 1])
                table.num_cached_blocks = end

    def count_to_cache(self, request: SchedulableRequest, step: Step) -> int:
        """How many tokens `cache` is to be called with after this step; 0: it need not be called.

        Raises:
            InvalidArgumentError: `cache` would. For a request without blocks also if it has not a hash for
                each full block of its known tokens.
        """
        tables = step.tables
        if tables is not None:
            for group in self._groups:
                if group.is_cacheable:
                    num_cached = tables[group.group_id].num_cached_blocks
                    if step.num_scheduled >= (num_cached + 1) * group.block_size:
                        break
            else:
                return 0  # most decode steps: they end in the block in which they began
        num_known = request.num_tokens
        num_tokens = min(step.num_scheduled, num_known)
        fills_blocks = self.check(request, tables, step.num_prefix, num_tokens, num_known)
        if tables is None:
            self.check_new_hashes(request, num_known)
        elif not fills_blocks:
            return 0
        return num_tokens

    def check(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable] | None,
        num_prefix_tokens: int,
        num_tokens: int,
        num_known: int,
    ) -> bool:
        """Raise InvalidArgumentError now if `cache` would later.

        Args:
            num_known: the tokens of the request.
        Returns:
            Whether `cache` will find full blocks that are not cached yet.
        """
        fills_blocks = False
        for group in self._groups:
            if not group.is_cacheable:
                continue
            if tables is None:
                first = num_prefix_tokens // group.block_size
            else:
                first = tables[group.group_id].num_cached_blocks
            if num_tokens < (first + 1) * group.block_size:
                continue
            end = self._count_cacheable_blocks(group, num_tokens, num_known)
            if end <= first:
                continue
            fills_blocks = True
            hashes = request.block_hashes
            self.check_hash_size(request, len(hashes), num_known)
            num_hashed = len(hashes) // group.stride
            if end > num_hashed:
                raise InvalidArgumentError(
                    f"request {request.request_id!r} has hashes for {num_hashed} blocks of "
                    f"{group.block_size} tokens; {end} are full. Was its hasher made with another block size?"
                )
            check_block_hashes(hashes, first * group.stride, end * group.stride)
            if self._pool.enable_kv_cache_events:
                check_announceable(request)
        return fills_blocks

    def check_hash_size(self, request: SchedulableRequest, num_hashes: int, num_known: int) -> None:
        """Raise InvalidArgumentError if the request was hashed at a smaller block size."""
        num_hashed_tokens = num_hashes * self._pool.hash_block_size
        if num_hashed_tokens > num_known:
            self._refuse_hash_size(request, num_hashed_tokens)

    def check_new_hashes(self, request: SchedulableRequest, num_known: int) -> None:
        """Raise InvalidArgumentError if the request was hashed at another block size.

        For one that is to be admitted, and has a hash for each full block of its known tokens.
        """
        hash_block_size = self._pool.hash_block_size
        num_hashed_tokens = len(request.block_hashes) * hash_block_size
        num_hashable = num_known - self._pool.num_hash_lookahead_tokens
        if num_hashed_tokens > num_known or num_hashed_tokens + hash_block_size <= num_hashable:
            self._refuse_hash_size(request, num_hashed_tokens)

    def _refuse_hash_size(self, request: SchedulableRequest, num_hashed_tokens: int) -> None:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has {request.num_tokens} tokens but hashes for "
            f"{num_hashed_tokens}. Was its hasher made with another block size than the pool's "
            f"{self._pool.hash_block_size}?"
        )

    def _count_cacheable_blocks(self, group: BlockGroup, num_tokens: int, num_known: int) -> int:
        """Full blocks among these tokens that are worth caching, and whose hash can be known."""
        if len(self._groups) > 1:
            num_tokens -= num_tokens % self._alignment
        num_known -= self._pool.num_hash_lookahead_tokens
        return max(0, min(num_tokens, num_known)) // group.block_size


def _pass_over_cached(
    table: BlockTable, first: int, end: int, group: BlockGroup, mask: list[bool] | None
) -> list[bool] | None:
    """The mask without blocks that are cached already: by a fork that shares them and went on first."""
    for position in range(first, end):
        block = table.blocks[position]
        if block.key is not None and block.num_key_tokens >= (position + 1) * group.block_size:
            if mask is None:
                mask = [True] * (end - first)
            mask[position - first] = False
    return mask
