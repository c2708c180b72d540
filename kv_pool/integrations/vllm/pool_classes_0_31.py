"""`BlockPool` for vLLM 0.31, whose `cache_partial_block` refuses full blocks. See `releases`."""

from kv_pool.integrations.vllm import pool_classes_0_32
from kv_pool.integrations.vllm.older_partial_blocks import PartialBlocksOnly


class BlockPool(PartialBlocksOnly, pool_classes_0_32.BlockPool):
    """A `pool_classes_0_32.BlockPool` that refuses full blocks in `cache_partial_block`."""
