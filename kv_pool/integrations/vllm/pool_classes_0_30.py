"""`BlockPool` for vLLM 0.30, whose events of partial blocks have fewer extra keys. See `releases`."""

from kv_pool.integrations.vllm import pool_classes_0_31
from kv_pool.integrations.vllm.older_partial_blocks import LastFeatureOnly


class BlockPool(LastFeatureOnly, pool_classes_0_31.BlockPool):
    """A `pool_classes_0_31.BlockPool` whose events of partial blocks name only the last multimodal input."""
