"""`TierPrefixes`: the part of a prefix that lower tiers have beyond the device; `TierHit`: that part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from kv_pool.core.block_keys import group_suffix
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId, RequestId
from kv_pool.manager.requests.request import SchedulableRequest

Rows = list[dict[int, BlockHashWithGroupId]]
"""For each group, keys by position in the block table."""


class TierHit(NamedTuple):
    """The part of a request's prefix that lower tiers have, directly after the part on the device.

    Attributes:
        request_id: the request.
        num_device_tokens: number of tokens before it, which are on the device.
        num_tokens: number of tokens that the tiers have; 0 for a miss.
        num_tokens_by_medium: these tokens, counted under the lowest tier that must be read for them. Lists
            the media of all tiers.
    """

    request_id: RequestId
    num_device_tokens: int
    num_tokens: int
    num_tokens_by_medium: dict[str, int]


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
        hashes, stride = request.block_hashes, self.stride
        return hashes[start:end] if stride == 1 else hashes[(start + 1) * stride - 1 : end * stride : stride]

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
        list_indexes: returns mappings whose keys are in a tier, valid until a change.
        groups: the engine's groups.
        alignment: hits are a multiple of this number of tokens.
        drops_last: hits leave out what is found last, one alignment, for a drafter that computes it again.
    """

    def __init__(
        self,
        list_indexes: Callable[[], Sequence[Mapping[BlockHashWithGroupId, object]]],
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

    def count_tokens(self, request: SchedulableRequest, num_device_tokens: int, max_num_tokens: int) -> int:
        """Return how many tokens after the first `num_device_tokens` the tiers have for the request.

        The result is a multiple of the alignment, and 0 if `num_device_tokens` is none. A group with a window
        needs only the blocks that the next token attends to; of these, the blocks before the hit come from
        the device.
        Cost: one look-up for each block of a full-attention group; other groups look up the blocks they
        need once for each length that is tried.
        """
        if not (self._full or self._partial) or num_device_tokens % self._alignment:
            return 0
        num_tokens = self._count_found(request, num_device_tokens, max_num_tokens)
        if num_tokens and self._drops_last:
            end = num_device_tokens + num_tokens - self._alignment
            num_tokens = self._count_found(request, num_device_tokens, end)
        return num_tokens

    def _count_found(self, request: SchedulableRequest, num_device_tokens: int, max_num_tokens: int) -> int:
        """See `count_tokens`; nothing is dropped."""
        groups = [*self._full, *self._partial]
        end = self._align(max_num_tokens)
        for group in groups:
            end = self._align(group.count_blocks(request, end) * group.block_size)
        # Only once: what they have up to an end, they have up to each shorter one.
        end = self._shorten(request, self._full, num_device_tokens, end)
        while end > num_device_tokens:
            shorter = self._shorten(request, self._partial, num_device_tokens, end)
            if shorter == end:
                return end - num_device_tokens
            end = shorter
        return 0

    def list_blocks(self, request: SchedulableRequest, start: int, end: int) -> Rows:
        """Return the keys of the blocks for tokens `[start, end)`, whether in a tier or not.

        Leaves out blocks to which no token from `end` on attends.
        """
        rows: Rows = []
        for group in self._groups:
            needed = group.list_needed(start, end) if group.is_cacheable else range(0)
            rows.append(dict(zip(needed, group.list_keys(request, needed.start, needed.stop), strict=True)))
        return rows

    def count_by_tier(
        self, rows: Rows, start: int, end: int, find_tier: Callable[[BlockHashWithGroupId], int | None]
    ) -> dict[int, int]:
        """Return the tokens `[start, end)` of a hit by tier: by the lowest that must be read for them.

        Tokens that need no read count for the top tier, 0.
        """
        step = self._alignment
        tier_of = [0] * -(-(end - start) // step)
        for group, row in zip(self._groups, rows, strict=True):
            for position, key in row.items():
                place = (position * group.block_size - start) // step
                tier_of[place] = max(tier_of[place], find_tier(key) or 0)
        counts: dict[int, int] = {}
        for place, tier in enumerate(tier_of):
            counts[tier] = counts.get(tier, 0) + min(step, end - start - place * step)
        return counts

    def _shorten(self, request: SchedulableRequest, groups: Sequence[GroupKeys], start: int, end: int) -> int:
        """Return where a hit of tokens `[start, end)` ends without the blocks that it needs and no tier has.

        `end` if no block is missing. Every length between the result and `end` needs a missing block, too,
        because a shorter hit's needed range begins no later.
        """
        for group in groups:
            needed = group.list_needed(start, end)
            num_found = self._count_stored(request, group, needed)
            if num_found < len(needed):
                end = self._align(needed[num_found] * group.block_size)
        return end

    def _count_stored(self, request: SchedulableRequest, group: GroupKeys, needed: range) -> int:
        """Return how many of these blocks the tiers have, up to the first that they do not."""
        suffix = group_suffix(group.group_id)
        indexes = self._list_indexes()
        for number, block_hash in enumerate(group.list_hashes(request, needed.start, needed.stop)):
            key = BlockHashWithGroupId(block_hash + suffix)
            for index in indexes:
                if key in index:
                    break
            else:
                return number
        return len(needed)

    def _align(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment
