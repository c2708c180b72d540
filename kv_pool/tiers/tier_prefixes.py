"""`TierPrefixes`: the part of a prefix that lower tiers have beyond the device; `TierHit`: that part."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kv_pool.core.block_keys import group_suffix
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId, RequestId

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


class TierKeys(Protocol):
    """The keys that the tiers of a pool hold, such as a `TieredCache`."""

    @property
    def block_pool(self) -> Any:
        """The pool; its `enable_caching` and `hash_block_size` are read."""

    def list_indexes(self) -> Sequence[Mapping[BlockHashWithGroupId, object]]:
        """Return mappings whose keys are in a tier. Valid until a change."""


class PrefixGroup(Protocol):
    """A KV cache group whose blocks may be in tiers, such as a `BlockGroup`."""

    @property
    def group_id(self) -> GroupId: ...

    @property
    def block_size(self) -> int: ...

    @property
    def stride(self) -> int:
        """Number of the request's hashes per block."""

    @property
    def is_cacheable(self) -> bool: ...

    @property
    def is_downward_closed(self) -> bool:
        """Whether a hit needs all blocks before its end."""

    def count_skipped_tokens(self, num_computed_tokens: int, /) -> int:
        """Return how many of the first tokens the next token does not attend to."""


class HashedRequest(Protocol):
    """A request with block hashes."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]: ...


class TierPrefixes:
    """A read-only lookup of prefixes in lower tiers. Each block may be in any tier.

    Args:
        tier_keys: the keys that the tiers hold.
        groups: the manager's groups; their own pool is not consulted.
        alignment: hits are a multiple of this number of tokens.
    """

    def __init__(self, tier_keys: TierKeys, groups: Sequence[PrefixGroup], alignment: int) -> None:
        self._tier_keys = tier_keys
        self._groups = groups
        self._alignment = alignment

    def count_tokens(self, request: HashedRequest, num_device_tokens: int, max_num_tokens: int) -> int:
        """Return how many tokens after the first `num_device_tokens` the tiers have for the request.

        The result is a multiple of the alignment; `num_device_tokens` must be one, too. A group with a window
        needs only the blocks that the next token attends to; of these, the blocks before the hit come from
        the device.
        Cost: one look-up for each block of a full-attention group; other groups look up the blocks they
        need once for each length that is tried.
        """
        if not self._tier_keys.block_pool.enable_caching or not any(
            group.is_cacheable for group in self._groups
        ):
            return 0
        num_hashed = len(request.block_hashes) * self._tier_keys.block_pool.hash_block_size
        num_tokens = self._align(min(max_num_tokens, num_hashed))
        hashes = [list(self._list_hashes(request, group)) for group in self._groups]
        for group, group_hashes in zip(self._groups, hashes, strict=True):
            if group.is_cacheable and group.is_downward_closed:
                first = num_device_tokens // group.block_size
                wanted = group_hashes[first : num_tokens // group.block_size]
                num_found = self._count_cached(wanted, group.group_id)
                num_tokens = min(num_tokens, self._align((first + num_found) * group.block_size))
        while num_tokens > num_device_tokens:
            missing = self._find_missing(hashes, num_device_tokens, num_tokens)
            if missing is None:
                return num_tokens - num_device_tokens
            num_tokens = self._align(missing)
        return 0

    def list_blocks(self, request: HashedRequest, start: int, end: int) -> Rows:
        """Return the keys of the blocks for tokens `[start, end)`, whether in a tier or not.

        Leaves out blocks to which no token from `end` on attends.
        """
        rows: Rows = []
        for group in self._groups:
            row: dict[int, BlockHashWithGroupId] = {}
            if group.is_cacheable:
                needed = self._list_needed(group, start, end)
                suffix = group_suffix(group.group_id)
                hashes = self._list_hashes(request, group)[needed.start : needed.stop]
                keys = [BlockHashWithGroupId(block_hash + suffix) for block_hash in hashes]
                row = dict(zip(needed, keys, strict=True))
            rows.append(row)
        return rows

    def find_blocks(self, request: HashedRequest, start: int, end: int) -> Rows | None:
        """Return what `list_blocks` returns; None if a block is in no tier."""
        rows = self.list_blocks(request, start, end)
        missing = [key for row in rows for key in row.values()]
        for index in self._tier_keys.list_indexes():
            missing = [key for key in missing if key not in index]
        return None if missing else rows

    def _count_cached(self, block_hashes: Sequence[BlockHash], group_id: GroupId) -> int:
        """Return the length of the longest prefix of `block_hashes` that the tiers have."""
        suffix = group_suffix(group_id)
        indexes = self._tier_keys.list_indexes()
        for number, block_hash in enumerate(block_hashes):
            key = BlockHashWithGroupId(block_hash + suffix)
            for index in indexes:
                if key in index:
                    break
            else:
                return number
        return len(block_hashes)

    def _find_missing(self, hashes: list[list[BlockHash]], start: int, end: int) -> int | None:
        """Return the first token of the first block that a hit of `end` tokens needs and no tier has.

        Every length between that token and `end` needs the block, too, because a shorter hit's needed range
        begins no later. Returns None if no block is missing.
        """
        for group, group_hashes in zip(self._groups, hashes, strict=True):
            if not group.is_cacheable or group.is_downward_closed:
                continue
            needed = self._list_needed(group, start, end)
            wanted = group_hashes[needed.start : needed.stop]
            num_found = self._count_cached(wanted, group.group_id)
            if num_found < len(needed):
                return needed[num_found] * group.block_size
        return None

    def _list_needed(self, group: PrefixGroup, start: int, end: int) -> range:
        first = max(start, group.count_skipped_tokens(end)) // group.block_size
        return range(first, end // group.block_size)

    def _list_hashes(self, request: HashedRequest, group: PrefixGroup) -> Sequence[BlockHash]:
        hashes = request.block_hashes
        return hashes if group.stride == 1 else hashes[group.stride - 1 :: group.stride]

    def _align(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment
