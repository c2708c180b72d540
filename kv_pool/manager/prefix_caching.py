"""`PrefixCaching`: caches the full blocks of requests, as far as they can serve a hit."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.caching import cache_full
from kv_pool.core.evicting import note_own_hash
from kv_pool.core.extra_keys import check_announceable, find_extra_keys
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.requests.request import SchedulableRequest


@mypyc_attr(allow_interpreted_subclasses=False)
class PrefixCaching:
    """Registers blocks in the prefix map for all groups of a manager.

    Args:
        alignment: tokens; with several groups, a prefix is only useful if it ends at a multiple of it.

    Attributes:
        unwritten: cached states whose content exists only after the step whose slots are being allocated.
        uncached: running requests that cache nothing any more; see `KVCacheManager.evict_owned`.
        has_encoder: whether K and V also depend on an encoder's input, through a group that is never hit.
    """

    def __init__(self, pool: BlockPoolCore, groups: list[BlockGroup], alignment: int) -> None:
        self._pool: BlockPoolCore = pool
        self._groups: list[BlockGroup] = groups
        self._alignment: int = alignment
        self.unwritten: set[Any] = set()
        self.uncached: set[RequestId] = set()
        self.has_encoder: bool = any(not group.is_cacheable for group in groups)
        self._reads_whole_sequence: bool = any(group.reads_whole_sequence for group in groups)

    def covers_encoder(self, request: SchedulableRequest) -> bool:
        """Return whether the request's hashes cover the encoder's input, on which its K and V depend, too.

        They do if the first block's hash covers all its multimodal inputs or, without such inputs, a salt. If
        an encoder reads the whole prompt, only a salt can stand for that. For groups with `has_encoder`; a
        request that its hashes do not cover is neither cached nor hit.
        """
        num_inputs = num_salts = 0
        for key in find_extra_keys(request, 0, self._pool.hash_block_size) or ():
            num_inputs += key[0] in ("mm", "media")
            num_salts += key[0] in ("cache_salt", "salt_region")
        features = request.mm_features
        if not features or self._reads_whole_sequence:
            return num_salts > 0
        return num_inputs == len(features)

    def begin_step(self) -> None:
        """Start a step: all blocks allocated so far are written before blocks allocated later are read."""
        if len(self.unwritten) > 0:  # compiled, this is cheaper than the set's truth value
            self.unwritten = set()

    def note_unwritten(self, block: KVCacheBlock) -> None:
        """Note that a copied or new state can be hit, and is written only before or in the coming step."""
        self.unwritten.add(block)

    def is_unwritten(self, prefix_blocks: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Return True if a request with this prefix must wait for the next step."""
        return any(bool(blocks) and blocks[-1] in self.unwritten for blocks in prefix_blocks)

    def find_ends(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable] | None,
        num_prefix_tokens: int,
        num_tokens: int,
    ) -> list[int] | None:
        """Find what `cache` caches of the first `num_tokens` tokens. Changes nothing.

        Args:
            tables: None for a request without blocks; its hits are the first `num_prefix_tokens` tokens.
        Returns:
            For each group, the tokens up to which `cache` caches blocks; None if all of them are already.
        Raises:
            InvalidArgumentError, InvalidTypeError: the request lacks the hashes of these blocks, a new one
                lacks a hash for a full block of its known tokens, or an event could not name its keys.
        """
        pool = self._pool
        ends: list[int] | None = None
        if self.has_encoder and not self.covers_encoder(request):
            return None
        if len(self.uncached) > 0 and request.request_id in self.uncached:
            return None
        for group in self._groups:
            if not group.is_cacheable:
                continue
            block_size = group.block_size
            if tables is None:
                first = num_prefix_tokens // block_size
            else:
                first = tables[group.group_id].num_cached_blocks
            if num_tokens < (first + 1) * block_size:
                continue  # most decode steps: they end in the block in which they began
            num_known = request.num_tokens
            num_cacheable = min(num_tokens, num_known)
            if len(self._groups) > 1:
                num_cacheable -= num_cacheable % self._alignment
            end = max(0, min(num_cacheable, num_known - pool.num_hash_lookahead_tokens)) // block_size
            if end <= first:
                continue
            hashes = request.block_hashes
            self.check_hash_count(request, False)
            num_hashed = len(hashes) // group.stride
            if end > num_hashed:
                raise InvalidArgumentError(
                    f"request {request.request_id!r} has hashes for {num_hashed} blocks of "
                    f"{block_size} tokens; {end} are full. Was its hasher made with another block size?"
                )
            listed: list[Any] = hashes if isinstance(hashes, list) else list(hashes)
            for position in range(first * group.stride, end * group.stride):
                if not isinstance(listed[position], bytes):
                    raise InvalidTypeError(
                        f"block hash {position} is a {type(listed[position]).__name__}; hashes are bytes"
                    )
            if pool.enable_kv_cache_events:
                check_announceable(request)
            if ends is None:
                ends = [0] * len(self._groups)
            ends[group.group_id] = end * block_size
        if tables is None:
            self.check_hash_count(request, True)
        return ends

    def is_end_due(self, request: SchedulableRequest, tables: list[BlockTable], num_tokens: int) -> bool:
        """Return True if a step may cache the end of a prompt, within a block, after the computed tokens."""
        return False

    def cache(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable],
        ends: list[int],
        num_written: int,
        is_written: bool,
        num_loaded: int = 0,
    ) -> None:
        """Cache the blocks from the head of each table to its end in `ends` that are not cached yet.

        Part of a larger call, which has set `is_changing`.

        Args:
            ends: the result of `find_ends`.
            num_written: tokens after the step, including speculative ones in blocks that are not full.
            is_written: whether the content is there already, not only after the coming step.
            num_loaded: tokens with the external ones, whose state a connector writes before the step; 0 for
                none.
        """
        for group in self._groups:
            table = tables[group.group_id]
            first = table.num_cached_blocks
            end = ends[group.group_id] // group.block_size
            if end <= first:
                continue
            mask = None if group.is_downward_closed else group.make_mask(first, end, num_written)
            if group.reads_before_writes and mask is not None and num_loaded % group.block_size == 0:
                loaded = num_loaded // group.block_size - 1
                if first <= loaded < end:
                    mask[loaded - first] = True
                    self.note_unwritten(table.blocks[loaded])
            mask = leave_out_cached(table, first, end, group.block_size, mask)
            if mask is None or True in mask:
                cache_full(
                    self._pool, request, table.blocks, first, end, group.block_size, group.group_id, mask
                )
            else:
                for position in range(first, end):
                    block = table.blocks[position]
                    if not block.is_null and block.key is None:
                        note_own_hash(block, request.block_hashes[(position + 1) * group.stride - 1])
            if group.reads_before_writes and not is_written and mask is not None and mask[-1]:
                self.note_unwritten(table.blocks[end - 1])
            table.num_cached_blocks = end

    def check_hash_count(self, request: SchedulableRequest, is_new: bool) -> None:
        """Raise InvalidArgumentError for a request that was hashed with another block size.

        Args:
            is_new: also if a hash of its known tokens is missing.
        """
        unit = self._pool.hash_block_size
        num_known = request.num_tokens
        num_hashed = len(request.block_hashes) * unit
        num_missing = num_known - self._pool.num_hash_lookahead_tokens - num_hashed
        if num_hashed > num_known or (is_new and num_missing >= unit):
            raise InvalidArgumentError(
                f"request {request.request_id!r} has {num_known} tokens but hashes for {num_hashed}. Was its "
                f"hasher made with another block size than the pool's {unit}?"
            )


def leave_out_cached(
    table: BlockTable, first: int, end: int, block_size: int, mask: list[bool] | None
) -> list[bool] | None:
    """Return the mask of the blocks `[first, end)` without those cached by a fork, which continued first."""
    for position in range(first, end):
        block = table.blocks[position]
        if block.key is not None and block.num_key_tokens >= (position + 1) * block_size:
            if mask is None:
                mask = [True] * (end - first)
            mask[position - first] = False
    return mask
