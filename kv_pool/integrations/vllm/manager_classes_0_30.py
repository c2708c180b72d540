"""`KVCacheManager` for vLLM 0.30, which counts the blocks of states otherwise. See `releases`."""

from typing import Any

from kv_pool.core.observer import BlockObserver
from kv_pool.integrations.vllm import manager_classes_0_31, pool_classes_0_30
from kv_pool.integrations.vllm.older_rules import RULES_0_30


class KVCacheManager(manager_classes_0_31.KVCacheManager):
    """A `manager_classes_0_31.KVCacheManager` with the signature and the rules of vLLM 0.30."""

    pool_class = pool_classes_0_30.BlockPool
    rule_details = RULES_0_30

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: BlockObserver | None = None,
        watermark: float = 0.0,
        enable_mamba_fine_grained_prefix_cache: bool = False,
    ) -> None:
        super().__init__(
            kv_cache_config,
            max_model_len,
            scheduler_block_size,
            hash_block_size,
            max_in_flight_tokens,
            enable_caching,
            use_eagle,
            num_prefill_lookahead,
            log_stats,
            enable_kv_cache_events,
            dcp_world_size,
            pcp_world_size,
            metrics_collector,
            watermark,
            enable_mamba_fine_grained_prefix_cache,
        )
        self.mamba_fine_grained_prefix_cache = self.mamba_shared_prefix_checkpoint
