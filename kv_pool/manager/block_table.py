"""`BlockTable`: the blocks of one request, in the order of its tokens."""

from kv_pool.core.block import KVCacheBlock


class BlockTable:
    """The blocks of one request: block i holds tokens `[i * block_size, (i + 1) * block_size)`.

    Append-only: an id that was given to a request stays at its place until the request is freed.

    Attributes:
        blocks: head first.
        num_cached_blocks: how many from the head are registered in the prefix map.
    """

    __slots__ = ("blocks", "num_cached_blocks")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached_blocks = 0
