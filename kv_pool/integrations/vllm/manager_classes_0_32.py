"""`KVCacheManager` for vLLM 0.32, whose hashes have no lookahead. See `releases`."""

from typing import Any

from kv_pool.core.observer import BlockObserver
from kv_pool.integrations.vllm import manager_classes, pool_classes_0_32
from kv_pool.integrations.vllm.older_rules import RULES_0_32
from kv_pool.integrations.vllm.served_config import NotServedError


class KVCacheManager(manager_classes.KVCacheManager):
    """A `manager_classes.KVCacheManager` with the signature and the rules of vLLM 0.32."""

    pool_class = pool_classes_0_32.BlockPool
    rule_details = RULES_0_32

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        """Raise NotServedError if the options need vLLM's own manager; see the class for 0.33."""
        groups = options["kv_cache_config"].kv_cache_groups
        if not options["use_eagle"] and any(group.is_eagle_group for group in groups):
            raise NotServedError("a drafter's groups without EAGLE")  # vLLM marks none then
        manager_classes.KVCacheManager.check_options(options)

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
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        super().__init__(
            kv_cache_config,
            max_model_len,
            scheduler_block_size,
            hash_block_size,
            max_in_flight_tokens,
            enable_caching,
            use_eagle,
            0,
            num_prefill_lookahead,
            log_stats,
            enable_kv_cache_events,
            dcp_world_size,
            pcp_world_size,
            metrics_collector,
            watermark,
            enable_mamba_shared_prefix_checkpoint,
        )
