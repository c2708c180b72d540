"""Block tables for a scheduler: requests, prefix hits, forks, preemption, retention, leases."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import (
        CopyFailedError,
        OutOfBlocksError,
        PinLimitError,
        PlanClosedError,
        StaleLeaseError,
    )
    from kv_pool.manager.admission import AllocStatus
    from kv_pool.manager.batch_block_table import BatchBlockTable
    from kv_pool.manager.block_groups.kv_cache_spec import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from kv_pool.manager.cached_prefix import CachedPrefix
    from kv_pool.manager.invalid_blocks import InvalidBlocksReport
    from kv_pool.manager.kv_cache_manager import KVCacheManager
    from kv_pool.manager.leases import BlockLeases, Lease, LeaseKind, LeaseState
    from kv_pool.manager.positions import list_slots
    from kv_pool.manager.preemption import (
        PreemptionCost,
        PreemptionKind,
        PreemptionLoss,
        PreemptionRule,
        count_loss,
        find_victim,
    )
    from kv_pool.manager.prefix_rules import PrefixRules
    from kv_pool.manager.requests.request import (
        LoRARequest,
        MultiModalFeature,
        PlaceholderRange,
        Request,
        SchedulableRequest,
    )
    from kv_pool.manager.requests.salt_region import SaltRegion
    from kv_pool.manager.requests.serialized_request import dump_request, load_request
    from kv_pool.manager.retention.block_retention import BlockRetention
    from kv_pool.manager.retention.directive import RetentionDirective
    from kv_pool.manager.slot_mapping import SlotMapping
    from kv_pool.manager.swap.plan import SwapDirection, SwapPlan
    from kv_pool.manager.swap.swapper import BlockSwapper
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.errors": (
                "OutOfBlocksError",
                "PinLimitError",
                "StaleLeaseError",
                "PlanClosedError",
                "CopyFailedError",
            ),
            "kv_pool.manager.admission": ("AllocStatus",),
            "kv_pool.manager.batch_block_table": ("BatchBlockTable",),
            "kv_pool.manager.block_groups.kv_cache_spec": (
                "KVCacheSpec",
                "FullAttentionSpec",
                "SlidingWindowSpec",
                "ChunkedLocalAttentionSpec",
                "MambaSpec",
                "CrossAttentionSpec",
                "EncoderOnlyAttentionSpec",
            ),
            "kv_pool.manager.cached_prefix": ("CachedPrefix",),
            "kv_pool.manager.invalid_blocks": ("InvalidBlocksReport",),
            "kv_pool.manager.kv_cache_manager": ("KVCacheManager",),
            "kv_pool.manager.leases": (
                "BlockLeases",
                "Lease",
                "LeaseKind",
                "LeaseState",
            ),
            "kv_pool.manager.positions": ("list_slots",),
            "kv_pool.manager.preemption": (
                "PreemptionCost",
                "PreemptionKind",
                "PreemptionLoss",
                "PreemptionRule",
                "find_victim",
                "count_loss",
            ),
            "kv_pool.manager.prefix_rules": ("PrefixRules",),
            "kv_pool.manager.requests.request": (
                "Request",
                "LoRARequest",
                "MultiModalFeature",
                "PlaceholderRange",
                "SchedulableRequest",
            ),
            "kv_pool.manager.requests.salt_region": ("SaltRegion",),
            "kv_pool.manager.requests.serialized_request": (
                "dump_request",
                "load_request",
            ),
            "kv_pool.manager.retention.block_retention": ("BlockRetention",),
            "kv_pool.manager.retention.directive": ("RetentionDirective",),
            "kv_pool.manager.slot_mapping": ("SlotMapping",),
            "kv_pool.manager.swap.plan": (
                "SwapPlan",
                "SwapDirection",
            ),
            "kv_pool.manager.swap.swapper": ("BlockSwapper",),
        },
    )

__all__ = [
    "KVCacheManager",
    "Request",
    "LoRARequest",
    "MultiModalFeature",
    "PlaceholderRange",
    "SaltRegion",
    "SchedulableRequest",
    "CachedPrefix",
    "PrefixRules",
    "AllocStatus",
    "KVCacheSpec",
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "BatchBlockTable",
    "SlotMapping",
    "list_slots",
    "PreemptionCost",
    "PreemptionKind",
    "PreemptionLoss",
    "PreemptionRule",
    "find_victim",
    "count_loss",
    "BlockSwapper",
    "SwapPlan",
    "SwapDirection",
    "BlockRetention",
    "RetentionDirective",
    "BlockLeases",
    "Lease",
    "LeaseKind",
    "LeaseState",
    "InvalidBlocksReport",
    "dump_request",
    "load_request",
    "OutOfBlocksError",
    "PinLimitError",
    "StaleLeaseError",
    "PlanClosedError",
    "CopyFailedError",
]
