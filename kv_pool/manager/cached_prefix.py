"""`CachedPrefix`: the longest cached prefix of a request, at the time of the look-up."""

from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import RequestId


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
