"""`Step`: the tokens of one request for which a call asks for slots."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_groups.block_table import BlockTable


# Each call makes one: compiled, it has no cyclic-GC header, and takes over the memory of the last one.
@mypyc_attr(acyclic=True, free_list_len=1)
class Step:
    """What one call of `allocate_slots` asks for; all counts are tokens from the head of the request.

        |<- computed ->|<- prefix ->|<- external ->|<- new ->|<- lookahead ->|
        |<- num_computed
        |<------------- num_before --------------->|
        |<------------------ num_scheduled ----------------->|

    Attributes:
        tables: of each group; None for a request without blocks.
        prefix_blocks: hits of each group that are not in the tables yet.
        num_prefix: tokens of the prefix alone.
        num_lookahead: slots behind `num_scheduled`, for tokens that are only guessed.
        num_encoder_tokens: slots for cross-attention.
    """

    __slots__ = (
        "num_before",
        "num_computed",
        "num_encoder_tokens",
        "num_lookahead",
        "num_prefix",
        "num_scheduled",
        "prefix_blocks",
        "request_id",
        "tables",
    )

    def __init__(
        self,
        request_id: str,
        tables: list[BlockTable] | None,
        prefix_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_computed: int,
        num_prefix: int,
        num_before: int,
        num_scheduled: int,
        num_lookahead: int,
        num_encoder_tokens: int,
    ) -> None:
        self.request_id: str = request_id
        self.tables: list[BlockTable] | None = tables
        self.prefix_blocks: tuple[Sequence[KVCacheBlock], ...] = prefix_blocks
        self.num_computed: int = num_computed
        self.num_prefix: int = num_prefix
        self.num_before: int = num_before
        self.num_scheduled: int = num_scheduled
        self.num_lookahead: int = num_lookahead
        self.num_encoder_tokens: int = num_encoder_tokens
