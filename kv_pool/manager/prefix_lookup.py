"""`PrefixLookup`: finds a `CachedPrefix`, the longest one from which all groups of a request can continue."""

from typing import NamedTuple

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, GroupId, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup, ChunkedLocalGroup, SlidingWindowGroup
from kv_pool.manager.block_groups.mamba_group import MambaGroup


class CachedPrefix(NamedTuple):
    """The result of `get_computed_blocks`: the longest cached prefix of one request.

    Attributes:
        request_id: the request that it was found for.
        blocks: for each group, head first; the null block where none is needed. They are not referenced yet,
            so other requests may take them until `allocate_slots`.
        num_tokens: tokens of the prefix.
        num_evictions: the pool's count at the look-up, to detect that the blocks may be stale.
        junction: with `PrefixRules`, tokens of the longest prefix that a single group has, if the common
            prefix is shorter; 0 otherwise. The other groups cache the end of that prefix.
    """

    request_id: RequestId
    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    num_evictions: int
    junction: int = 0

    def __repr__(self) -> str:
        counts = ", ".join(str(len(group)) for group in self.blocks)
        return f"<CachedPrefix of request {self.request_id!r}: {self.num_tokens} tokens, {counts} blocks>"


@mypyc_attr(allow_interpreted_subclasses=False)
class EqualGroups:
    """Groups that are looked up together, because they keep the same tokens.

    Args:
        alignment: tokens; each hit is a multiple of it.
        drops_hits: whether hits drop their last block, for a drafter.
    """

    def __init__(self, groups: list[BlockGroup], alignment: int, drops_hits: bool) -> None:
        first = groups[0]
        unit = first.pool.hash_block_size
        self.pool: BlockPoolCore = first.pool
        self.first: BlockGroup = first
        self.group_ids: list[GroupId] = [group.group_id for group in groups]
        self.alignment: int = alignment
        self.unit: int = unit
        self.drops_hits: bool = drops_hits
        self.is_full: bool = not first.forgets
        # Whether hits may end within a block.
        self.is_partial: bool = alignment < first.block_size
        # A drafter needs this many tokens after a hit to be cached, too: they are found and dropped.
        self.margin: int = 0
        if drops_hits and not first.is_state:
            self.margin = unit if self.is_partial else first.block_size

    def find(
        self, hashes: list[BlockHash], max_num_tokens: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Return the blocks of the longest prefix, one list per group, and the number of its tokens.

        Args:
            hashes: at the pool's `hash_block_size`.
            drops: find the last block of the hit, and drop it.
        """
        first = self.first
        if self.is_full:
            return self._find_full(hashes, max_num_tokens, drops)
        if isinstance(first, MambaGroup):
            return self._find_state(hashes, max_num_tokens)
        if isinstance(first, SlidingWindowGroup):
            return self._find_window(hashes, max_num_tokens, first.count_hit_blocks(drops), drops)
        assert isinstance(first, ChunkedLocalGroup)
        return self._find_chunk(hashes, max_num_tokens, first)

    def _find_full(
        self, hashes: list[BlockHash], max_num_tokens: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find all blocks from the head on; with partial hits also a cached part of the next one."""
        block_size = self.first.block_size
        own = self.first.list_hashes(hashes)
        found = self._find_from(own, min(len(own), max_num_tokens // block_size))
        num_tokens = len(found[0]) * block_size
        if self.is_partial:
            stride = block_size // self.unit
            start = len(found[0]) * stride
            end = min(start + stride - 1, max_num_tokens // self.unit, len(hashes))
            for index in range(end - 1, start - 1, -1):
                if self._append(found, hashes[index]):
                    num_tokens = (index + 1) * self.unit
                    break
        if drops and num_tokens > 0:
            num_tokens -= min(self.alignment, block_size)
        num_tokens -= num_tokens % self.alignment
        num_blocks = -(-num_tokens // block_size)
        for blocks in found:
            del blocks[num_blocks:]
        return found, num_tokens

    def _find_state(
        self, hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the last cached state."""
        pool = self.pool
        own = hashes if self.is_partial else self.first.list_hashes(hashes)
        step = self.unit if self.is_partial else self.first.block_size
        for index in range(min(max_num_tokens // step, len(own)) - 1, -1, -1):
            num_tokens = (index + 1) * step
            if num_tokens % self.alignment:
                continue
            blocks = pool.get_cached_block(own[index], self.group_ids)
            if blocks is not None:
                nulls = [pool.null_block] * ((num_tokens - 1) // self.first.block_size)
                return [[*nulls, block] for block in blocks], num_tokens
        return [[] for _ in self.group_ids], 0

    def _find_window(
        self, hashes: list[BlockHash], max_num_tokens: int, num_needed: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the last `num_needed` consecutive blocks whose end is aligned, or all from the head on."""
        pool = self.pool
        block_size = self.first.block_size
        own = self.first.list_hashes(hashes)
        run: list[list[KVCacheBlock]] = []
        end = 0
        shift = 0 if drops else 1
        position = min(max_num_tokens // block_size, len(own)) - 1
        while position >= 0:
            blocks = pool.get_cached_block(own[position], self.group_ids)
            if blocks is None:
                run = []
            elif run or (position + shift) * block_size % self.alignment == 0:
                if not run:
                    end = position + 1
                run.append(blocks)
                if len(run) >= num_needed:
                    break
            position -= 1
        if not run:
            return [[] for _ in self.group_ids], 0
        run.reverse()
        num_blocks = end if len(run) >= num_needed else self._align(end)
        if drops and num_blocks:
            num_blocks = self._align(num_blocks - 1)
        found: list[list[KVCacheBlock]] = []
        for index in range(len(self.group_ids)):
            listed = [pool.null_block] * (end - len(run))
            listed.extend([blocks[index] for blocks in run])
            del listed[num_blocks:]
            found.append(listed)
        return found, num_blocks * block_size

    def _find_chunk(
        self, hashes: list[BlockHash], max_num_tokens: int, group: ChunkedLocalGroup
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the blocks of the chunk in which the prefix ends."""
        block_size = group.block_size
        own = group.list_hashes(hashes)
        num_blocks = self._align(min(max_num_tokens // block_size, len(own)))
        while True:
            # A shorter prefix may end in another chunk, which needs other blocks.
            num_passed = group.count_skipped_tokens(num_blocks * block_size) // block_size
            nulls = [self.pool.null_block] * num_passed
            found = self._find_from(own[num_passed:num_blocks], num_blocks - num_passed)
            num_found = num_passed + len(found[0])
            if num_found == num_blocks:
                return [nulls + blocks for blocks in found], num_blocks * block_size
            num_blocks = self._align(num_found)

    def _align(self, num_blocks: int) -> int:
        """Return the largest number of blocks, up to this one, whose end is aligned."""
        while num_blocks * self.first.block_size % self.alignment:
            num_blocks -= 1
        return num_blocks

    def _find_from(self, own: list[BlockHash], num_most: int) -> list[list[KVCacheBlock]]:
        """Return the blocks of the first of these hashes, at most `num_most`, that every group has."""
        if len(self.group_ids) == 1:
            return [self.pool.find_cached_prefix(own, num_most, self.group_ids[0])]
        found: list[list[KVCacheBlock]] = [[] for _ in self.group_ids]
        for position in range(num_most):
            if not self._append(found, own[position]):
                break
        return found

    def _append(self, found: list[list[KVCacheBlock]], block_hash: BlockHash) -> bool:
        """Append the block of each group. Return False if one of them does not have it."""
        blocks = self.pool.get_cached_block(block_hash, self.group_ids)
        if blocks is None:
            return False
        for index, block in enumerate(blocks):
            found[index].append(block)
        return True


@mypyc_attr(allow_interpreted_subclasses=False)
class PrefixLookup:
    """Finds the longest prefix from which all groups can continue, and junctions of shared prefixes.

    Args:
        parts: of the groups with prefixes. Their order does not matter.
        num_groups: number of the manager's groups, with those that are never hit.
        unit: tokens per hash.
        looks_past_limit: see `RuleDetails`.

    Attributes:
        full: the first groups with full attention; None for none.
    """

    def __init__(self, parts: list[EqualGroups], num_groups: int, unit: int, looks_past_limit: bool) -> None:
        # Full attention first: its blocks need one look-up, and its hits bound those of the others.
        self._parts: list[EqualGroups] = sorted(parts, key=lambda part: not part.is_full)
        self._num_groups: int = num_groups
        self.full: EqualGroups | None = next((part for part in self._parts if part.is_full), None)
        self._unit: int = unit
        self._looks_past_limit: bool = looks_past_limit

    def find_full_block(self, hashes: list[BlockHash], num_tokens: int) -> KVCacheBlock | None:
        """Return the full-attention block with which a cached prefix ends; None if it is not cached."""
        full = self.full
        if full is None:
            return None
        found = full.pool.get_cached_block(hashes[num_tokens // self._unit - 1], full.group_ids[:1])
        return None if found is None else found[0]

    def find(self, hashes: list[BlockHash], max_num_tokens: int) -> tuple[list[list[KVCacheBlock]], int, int]:
        """Return the blocks of the prefix by group, its tokens, and the junction; 0 for none.

        The junction is the longest prefix of a single group, if the common prefix is shorter: the groups
        without it should cache it, since requests share it.
        """
        parts = self._parts
        if not parts or max_num_tokens <= 0:
            return [[] for _ in range(self._num_groups)], 0, 0
        if self._num_groups == 1:
            part = parts[0]
            blocks, num_tokens = part.find(hashes, max_num_tokens, part.drops_hits)
            return blocks, num_tokens, 0
        return self._find_common(hashes, max_num_tokens)

    def _find_common(
        self, hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int, int]:
        """Shorten the prefix group by group until all groups have it; see `find`."""
        parts = self._parts
        found: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        num_tokens = max_num_tokens
        num_most = self._find_most(hashes, max_num_tokens)
        num_longest = 0
        num_full: list[int] = [-1] * len(parts)
        has_dropped = [False] * len(parts)
        while True:
            num_current = num_tokens
            for index, part in enumerate(parts):
                if part.is_full and num_full[index] >= 0:
                    num_current = min(num_current, num_full[index])
                    continue
                drops = part.drops_hits and not has_dropped[index]
                limit = min(num_current + part.margin, num_most) if drops else num_current
                blocks, num_found = part.find(hashes, limit, drops)
                if drops:
                    has_dropped[index] = True
                elif num_found < num_current:
                    has_dropped = [False] * len(parts)
                num_current = num_found
                for group_id, listed in zip(part.group_ids, blocks):  # noqa: B905 (compiles to a loop)
                    found[group_id] = listed
                if part.is_full:
                    num_full[index] = num_found
                num_longest = max(num_longest, num_current)
            if num_current >= num_tokens:
                break
            num_tokens = num_current
            if len(parts) == 2 and parts[0].is_full:
                break
        for part in parts:
            if part.is_full:
                num_blocks = -(-num_tokens // part.first.block_size)
                for group_id in part.group_ids:
                    del found[group_id][num_blocks:]
        return found, num_tokens, num_longest if num_longest > num_tokens else 0

    def _find_most(self, hashes: list[BlockHash], max_num_tokens: int) -> int:
        """Return the most tokens to look up for a hit that drops its last block."""
        return len(hashes) * self._unit if self._looks_past_limit else max_num_tokens

    def find_by_group(
        self, hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], list[int]]:
        """Return the blocks and the tokens of each group's own longest prefix, whatever the others have."""
        found: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        lengths = [0] * self._num_groups
        for part in self._parts:
            limit = min(max_num_tokens + part.margin, self._find_most(hashes, max_num_tokens))
            blocks, num_tokens = part.find(hashes, limit, part.drops_hits)
            for group_id, listed in zip(part.group_ids, blocks, strict=True):
                found[group_id] = listed
                lengths[group_id] = num_tokens
        return found, lengths
