"""`TierPrefixes`: the part of a prefix that lower tiers have beyond the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kv_pool.core.block_keys import group_suffix
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.tiers.tier import LeveledKeys

Rows = list[dict[int, BlockHashWithGroupId]]
"""For each group, keys by position in the block table."""


@dataclass(frozen=True)
class GroupKeys:
    """The keys of a KV cache group's blocks, and which of them a hit needs.

    Attributes:
        group_id: its index among the engine's groups.
        block_size: tokens per block.
        stride: number of the request's hashes per block; a block has the last one.
        skip: returns how many of the first tokens the next token does not attend to; None with full
            attention, when a hit needs all blocks before its end.
        is_cacheable: whether its blocks have keys at all.
    """

    group_id: GroupId
    block_size: int
    stride: int = 1
    skip: Callable[[int], int] | None = None
    is_cacheable: bool = True

    def count_blocks(self, request: SchedulableRequest, num_tokens: int) -> int:
        """Return the number of full blocks of the first `num_tokens` tokens that have a hash."""
        return min(num_tokens // self.block_size, len(request.block_hashes) // self.stride)

    def list_hashes(self, request: SchedulableRequest, start: int, end: int) -> Sequence[BlockHash]:
        """Return the hashes of blocks [start, end) of a request, as far as it has them."""
        stride = self.stride
        return request.block_hashes[(start + 1) * stride - 1 : end * stride : stride]

    def list_keys(self, request: SchedulableRequest, start: int, end: int) -> list[BlockHashWithGroupId]:
        """Return the keys of blocks [start, end) of a request. All of them must have a hash."""
        suffix = group_suffix(self.group_id)
        keys = [block_hash + suffix for block_hash in self.list_hashes(request, start, end)]
        return cast("list[BlockHashWithGroupId]", keys)

    def list_needed(self, start: int, end: int) -> range:
        """Return the blocks of tokens `[start, end)` to which a token from `end` on attends."""
        first = start if self.skip is None else max(start, self.skip(end))
        return range(first // self.block_size, end // self.block_size)


class TierPrefixes:
    """A read-only lookup of prefixes in lower tiers. Each block may be in any tier.

    Args:
        list_indexes: returns what each tier has, fastest first, valid until a change.
        groups: the engine's groups.
        alignment: hits are a multiple of this number of tokens.
        drops_last: hits leave out what is found last, one alignment, for a drafter that computes it again.
    """

    def __init__(
        self,
        list_indexes: Callable[[], Sequence[LeveledKeys]],
        groups: Sequence[GroupKeys],
        alignment: int,
        drops_last: bool = False,
    ) -> None:
        self._drops_last = drops_last
        self._list_indexes = list_indexes
        self._groups = groups
        self._alignment = alignment
        self._full = [group for group in groups if group.is_cacheable and group.skip is None]
        self._partial = [group for group in groups if group.is_cacheable and group.skip is not None]

    def find(self, request: SchedulableRequest, start: int, max_num_tokens: int) -> dict[int, int]:
        """Return how many tokens after the first `start` the tiers have for the request, by tier.

        Tokens count for the lowest tier that must be read for them, and for the top tier, 0, if none must.
        Their sum is a multiple of the alignment, and 0 if `start` is none. A group with a window needs only
        the blocks that the next token attends to; of these, the blocks before the hit come from the device.
        Cost: one look-up for each block of a full-attention group; other groups look up the blocks they
        need once for each length that is tried.
        """
        if not (self._full or self._partial) or start % self._alignment:
            return {}
        found = self.find_all(request, start, max_num_tokens)
        if found and self._drops_last:
            found = self.find_all(request, start, start + sum(found.values()) - self._alignment)
        return found

    def find_all(self, request: SchedulableRequest, start: int, max_num_tokens: int) -> dict[int, int]:
        """See `find`; `start` is aligned, and nothing is dropped."""
        end = self._align(max_num_tokens)
        for group in (*self._full, *self._partial):
            end = self._align(group.count_blocks(request, end) * group.block_size)
        # For each aligned stretch of tokens, the lowest tier that must be read for it. What a group needs for
        # an end that is found too late, it needs for the next one, too, as far as that reaches.
        levels = [0] * ((end - start) // self._alignment)
        # Only once: what they have up to an end, they have up to each shorter one.
        for group in self._full:
            end = self._shorten(request, group, start, end, levels)
        longer = 0
        while end > start and end != longer:
            longer = end
            for group in self._partial:
                end = self._shorten(request, group, start, end, levels)
        counts = Counter(levels[: max(0, end - start) // self._alignment])
        return {level: count * self._alignment for level, count in counts.items()}

    def _shorten(
        self, request: SchedulableRequest, group: GroupKeys, start: int, end: int, levels: list[int]
    ) -> int:
        """Return where a hit of tokens `[start, end)` ends without the blocks that it needs and no tier has.

        `end` if no block is missing. Every length between the result and `end` needs a missing block, too,
        because a shorter hit's needed range begins no later. Notes the tiers of the blocks found in `levels`.
        """
        needed = group.list_needed(start, end)
        hashes = group.list_hashes(request, needed.start, needed.stop)
        suffix = group_suffix(group.group_id)
        indexes = self._list_indexes()
        for position, block_hash in enumerate(hashes, needed.start):
            key = block_hash + suffix
            for level, index in indexes:
                if key in index:
                    if level:
                        number = (position * group.block_size - start) // self._alignment
                        levels[number] = max(levels[number], level)
                    break
            else:
                return self._align(position * group.block_size)
        return end

    def list_blocks(self, request: SchedulableRequest, start: int, end: int) -> Rows:
        """Return the keys of the blocks for tokens `[start, end)`, whether in a tier or not.

        Leaves out blocks to which no token from `end` on attends.
        """
        rows: Rows = []
        for group in self._groups:
            needed = group.list_needed(start, end) if group.is_cacheable else range(0)
            rows.append(dict(zip(needed, group.list_keys(request, needed.start, needed.stop), strict=True)))
        return rows

    def _align(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment
