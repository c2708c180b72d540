"""`CachedPrefix`: the longest cached prefix of a request, as it was found."""

from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock


class CachedPrefix(NamedTuple):
    """What `get_computed_blocks` found: the longest cached prefix of one request.

    Attributes:
        request_id: whose prefix it is.
        blocks: for each group, head first; the null block where none is needed. Not touched yet: they may be
            taken by others until `allocate_slots`.
        num_tokens: tokens of the prefix.
        num_evictions: the pool's count at that moment, to notice whether the blocks may be stale.
    """

    request_id: str
    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    num_evictions: int

    def __repr__(self) -> str:
        counts = ", ".join(str(len(group)) for group in self.blocks)
        return f"<CachedPrefix of request {self.request_id!r}: {self.num_tokens} tokens, {counts} blocks>"
