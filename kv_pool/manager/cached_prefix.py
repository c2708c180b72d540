"""`CachedPrefix`: the longest cached prefix of a request, from which all its KV cache groups can continue."""

from collections.abc import Sequence
from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHash, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.requests.request import SchedulableRequest


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


def find_common_hit(
    groups: list[BlockGroup], block_hashes: list[BlockHash], max_num_tokens: int
) -> tuple[list[list[KVCacheBlock]], int]:
    """Return the blocks of the prefix, one list per group (empty for one without prefixes), and its tokens.

    Each group accepts a length or proposes the next shorter one that it has; the groups are queried in turn
    until all accept. Lengths only decrease, so the loop ends, at the longest length that all accept. Changes
    nothing.
    """
    if len(groups) == 1 and groups[0].is_cacheable and max_num_tokens > 0:
        blocks, num_tokens = groups[0].find_longest_hit(groups[0].list_hashes(block_hashes), max_num_tokens)
        return [blocks], num_tokens
    num_tokens = max_num_tokens if any(group.is_cacheable for group in groups) else 0
    found: list[list[KVCacheBlock]] = [[] for _ in groups]
    accepted = [-1] * len(groups)
    changed = True
    while changed and num_tokens > 0:
        changed = False
        # Groups whose blocks are found from the head on need one look-up only; they bound the others.
        for is_first_pass in (True, False):
            for index, group in enumerate(groups):
                if not group.is_cacheable or group.is_downward_closed != is_first_pass:
                    continue
                if accepted[index] == num_tokens:
                    continue
                if accepted[index] > num_tokens and is_first_pass:
                    accepted[index] = num_tokens - num_tokens % group.alignment
                    if accepted[index] != num_tokens:
                        num_tokens = accepted[index]
                        changed = True
                    continue
                hashes = group.list_hashes(block_hashes)
                found[index], accepted[index] = group.find_longest_hit(hashes, num_tokens)
                if accepted[index] != num_tokens:
                    num_tokens = accepted[index]
                    changed = True
    for index, group in enumerate(groups):
        if num_tokens <= 0 or not group.is_cacheable:
            found[index] = []
        else:
            del found[index][num_tokens // group.block_size :]
    return found, max(0, num_tokens)


def check_still_cached(
    request: SchedulableRequest,
    prefix_blocks: tuple[Sequence[KVCacheBlock], ...],
    num_tokens: int,
    groups: list[BlockGroup],
) -> None:
    """Raise InvalidBlockError if a block of the prefix has been evicted since it was found.

    A block in which the prefix ends may have the hash of more tokens of the request.
    """
    hashes = request.block_hashes
    for group in groups:
        cache = group.pool.cached_block_hash_to_block
        for position, block in enumerate(prefix_blocks[group.group_id]):
            if block.is_null:
                continue
            end = (position + 1) * group.stride
            first = min(end, num_tokens // group.pool.hash_block_size)
            if not any(
                cache.contain(make_block_hash_with_group_id(block_hash, group.group_id), block.block_id)
                for block_hash in hashes[first - 1 : end]
            ):
                raise InvalidBlockError(
                    f"block {block.block_id}, position {position} of the cached prefix of request "
                    f"{request.request_id!r}, was evicted or reused since; look it up again"
                )
