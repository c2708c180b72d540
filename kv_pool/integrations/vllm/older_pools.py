"""`BlockPool` for earlier releases of vLLM, each with what differs from the next. See `releases`."""

from typing import Any

from vllm.distributed.kv_events import BlockStored

from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.core.pool_part import BlockObserver
from kv_pool.integrations.vllm import pool_classes
from kv_pool.integrations.vllm.older_behaviour import LastFeatureOnly, PartialBlocksOnly


def make_stored(*, lookahead_token_ids: None, **fields: Any) -> BlockStored:
    """Return vLLM's event without the field that 0.33 added, which is None without lookahead."""
    return BlockStored(**fields)


class BlockPool032(pool_classes.BlockPool):
    """A `pool_classes.BlockPool` with the signature of vLLM 0.32: no lookahead in hashes and events."""

    event_types = pool_classes.EVENT_TYPES._replace(stored=make_stored)

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: BlockObserver | None = None,
        medium: str = MEDIUM_GPU,
    ) -> None:
        super().__init__(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            medium=medium,
        )


class BlockPool031(PartialBlocksOnly, BlockPool032):
    """A `BlockPool032` that refuses full blocks in `cache_partial_block`."""


class BlockPool030(LastFeatureOnly, BlockPool031):
    """A `BlockPool031` whose events of partial blocks name only the last multimodal input."""
