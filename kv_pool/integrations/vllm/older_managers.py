"""`KVCacheManager` for earlier releases of vLLM, each with what differs from the next.

See `releases` and `older_pools`.
"""

from typing import Any

from kv_pool.ids import BlockId, RequestId
from kv_pool.integrations.vllm import manager_classes, older_pools
from kv_pool.integrations.vllm.older_behaviour import RULES_0_30, RULES_0_31, RULES_0_32
from kv_pool.integrations.vllm.served_config import NotServedError, list_eagle_groups
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec


class KVCacheManager032(manager_classes.KVCacheManager):
    """A `manager_classes.KVCacheManager` with the rules of vLLM 0.32."""

    pool_class = older_pools.BlockPool032
    rule_details = RULES_0_32

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        """Raise NotServedError if the options need vLLM's own manager; see the class for 0.33."""
        if not options["use_eagle"] and list_eagle_groups(options["kv_cache_config"], use_eagle=False):
            raise NotServedError("a drafter's groups without EAGLE")  # vLLM marks none then
        manager_classes.KVCacheManager.check_options(options)


class KVCacheManager031(KVCacheManager032):
    """A `KVCacheManager032` with the methods and the rules of vLLM 0.31."""

    pool_class = older_pools.BlockPool031
    rule_details = RULES_0_31

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        """Raise NotServedError if the options need vLLM's own manager; see the class for 0.33."""
        for group in options["kv_cache_config"].kv_cache_groups:
            if getattr(group.kv_cache_spec, "num_prefill_checkpoint_blocks", 0):
                raise NotServedError("Mamba states that are saved in the middle of a step")
        KVCacheManager032.check_options(options)

    def get_num_common_prefix_blocks(self, running_request_id: RequestId) -> list[int]:
        """Return the number of leading blocks that all requests with blocks share, by group.

        0 for groups other than full attention, and without prefix caching.
        """
        counts = [0] * self.num_kv_cache_groups
        if self.enable_caching:
            for group_id, view in enumerate(self.coordinator.single_type_managers):
                if isinstance(self.manager.groups[group_id], FullAttentionSpec):
                    num_requests = len(view.req_to_blocks)
                    for block in view.req_to_blocks[running_request_id]:
                        if block.ref_cnt != num_requests:
                            break
                        counts[group_id] += 1
        return counts

    def get_zeroing_block_ids_in_range(
        self, request_id: RequestId, start_token: int, end_token: int
    ) -> list[BlockId]:
        """Return the blocks of these tokens, of the groups whose new blocks are overwritten with zeros."""
        ids: list[BlockId] = []
        for view in self.coordinator.single_type_managers:
            if view.records_new_block_ids:
                end = -(-end_token // view.block_size)
                blocks = view.req_to_blocks[request_id][start_token // view.block_size : end]
                ids += [block.block_id for block in blocks]
        return ids


class KVCacheManager030(KVCacheManager031):
    """A `KVCacheManager031` with the rules and a field of vLLM 0.30."""

    pool_class = older_pools.BlockPool030
    rule_details = RULES_0_30

    @property
    def mamba_fine_grained_prefix_cache(self) -> bool:
        return self.mamba_shared_prefix_checkpoint
