"""`PrefixLookup`: finds a `CachedPrefix`, the longest one from which all groups of a request can continue."""

from typing import NamedTuple

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockHash, RequestId
from kv_pool.manager.block_groups.block_group import EqualGroups


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
