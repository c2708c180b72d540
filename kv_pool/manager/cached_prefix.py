"""`CachedPrefix`: the longest cached prefix of a request, from which all its KV cache groups can continue."""

from collections.abc import Sequence
from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import RequestId
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
