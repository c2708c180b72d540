"""`KVCacheManager` and `KVCacheBlocks` with vLLM's names, for level `manager`. Imports vLLM; see `plugin`."""

import inspect
from functools import cache
from typing import Any

from vllm.v1.core import kv_cache_manager as vllm_manager
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from kv_pool.core.pool_part import BlockObserver
from kv_pool.ids import BlockId, GroupId, RequestId
from kv_pool.integrations.vllm.group_views import GroupsView, GroupView
from kv_pool.integrations.vllm.pool_classes import CLASSES as POOL_CLASSES
from kv_pool.integrations.vllm.pool_classes import RELEASE
from kv_pool.integrations.vllm.releases import RULES
from kv_pool.integrations.vllm.request_options.handler import EngineOptions, read_max_pinned_blocks
from kv_pool.integrations.vllm.served_config import (
    NotServedError,
    check_served,
    read_groups,
    read_rules,
)
from kv_pool.loggers import get_logger
from kv_pool.manager import kv_cache_manager
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec
from kv_pool.manager.engine.engine_manager import EngineManager, KVCacheBlocks

logger = get_logger(__name__)

# In a tuple, because the names of replaced classes are rebound in all modules, in this one as well.
_FALLBACK = (vllm_manager.KVCacheManager,)


class HybridGroupsView(GroupsView):
    """The groups of a model with several; an instance of vLLM's class, for which connectors ask."""


HybridKVCacheCoordinator.register(HybridGroupsView)


@cache
def _view_class(manager_class: Any) -> type[GroupView]:
    """Return the class of views that are instances of the class which vLLM uses for the group."""
    view_class = type(f"{manager_class.__name__}View", (GroupView,), {})
    manager_class.register(view_class)
    return view_class


class KVCacheManager(EngineManager):
    """kv_pool's manager for one engine of vLLM.

    With a configuration that it does not serve, the constructor logs which feature that is and returns vLLM's
    own manager over kv_pool's block pool: level `pool`.
    """

    pool_class: Any = POOL_CLASSES["BlockPool"]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
        bound.apply_defaults()
        try:
            check_served(bound.arguments, RELEASE)
        except NotServedError as reason:
            logger.warning(
                "kv_pool does not serve %s at level manager: vLLM's manager runs on kv_pool's block pool",
                reason,
            )
            return _FALLBACK[0](*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: BlockObserver | None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        enable_mamba_fine_grained_prefix_cache: bool = False,  # its name in vLLM 0.30
    ) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        pool = self.pool_class(
            num_gpu_blocks=kv_cache_config.num_blocks,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            metrics_collector=metrics_collector,
            num_hash_lookahead_tokens=num_hash_lookahead_tokens,
        )
        pool.reads_options = True
        super().__init__(
            kv_cache_manager.KVCacheManager(
                pool,
                groups=read_groups(kv_cache_config),
                max_model_len=max_model_len,
                max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
                watermark=watermark,
                prefix_rules=read_rules(
                    kv_cache_config,
                    use_eagle=use_eagle,
                    num_prefill_lookahead=num_prefill_lookahead,
                    has_junction_states=enable_mamba_shared_prefix_checkpoint
                    or enable_mamba_fine_grained_prefix_cache,
                    details=RULES[RELEASE],
                ),
            ),
            event_labels=[
                (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs
            ],
            waiting_statuses=(RequestStatus.WAITING, RequestStatus.PREEMPTED),
            zeroed_groups=[
                GroupId(group_id)
                for group_id, spec in enumerate(specs)
                if kv_cache_config.needs_kv_cache_zeroing
                and isinstance(spec, AttentionSpec)
                and not isinstance(spec, CircularBufferSpec)
            ],
            copy_type=KVCacheBlockCopy,
        )
        self.set_request_options(EngineOptions(self.manager, read_max_pinned_blocks(self.manager)))
        self.kv_cache_config = kv_cache_config
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.retained_hit_group_ids: tuple[GroupId, ...] = ()
        self.mamba_shared_prefix_checkpoint: bool = self.caching.caches_junctions
        is_hybrid = enable_caching and len(specs) > 1
        self.coordinator = (HybridGroupsView if is_hybrid else GroupsView)(
            self,
            [
                _view_class(KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role))
                for group in kv_cache_config.kv_cache_groups
            ],
            specs,
            scheduler_block_size=scheduler_block_size,
        )
        # Log here as well as in `register`, for the reason given in `pool_classes`.
        logger.info(
            "kv_pool uses level manager: vLLM's scheduler calls its manager, KV cache groups: %d", len(specs)
        )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the statistics of the prefix cache since the last call; None if they are not logged."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count a look-up that hit `num_hits` tokens, if statistics are logged."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def reset_prefix_cache(self) -> bool:
        """Evict every prefix. Return False, with nothing changed, while any request holds blocks."""
        if not super().reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True


class OlderKVCacheManager(KVCacheManager):
    """A `KVCacheManager` with the methods and the field of vLLM 0.30 and 0.31."""

    @property
    def mamba_fine_grained_prefix_cache(self) -> bool:  # its name in vLLM 0.30
        return self.mamba_shared_prefix_checkpoint

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


CLASSES: dict[str, Any] = {
    "KVCacheManager": KVCacheManager if RELEASE >= (0, 32) else OlderKVCacheManager,
    "KVCacheBlocks": KVCacheBlocks,
}
"""The replacements of vLLM's manager classes, by the names in `releases.REPLACED`."""
