"""Host memory and disk below a pool: offload, onboard, prefetch, and dumps for warm restarts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import PoolDumpError, TierError
    from kv_pool.tiers.disk_tier import DiskTier
    from kv_pool.tiers.formats.block_format import BlockFormat
    from kv_pool.tiers.formats.make_format import make_format
    from kv_pool.tiers.host_tier import HostTier
    from kv_pool.tiers.onboarder import OnboardStatistics, TierOnboarder
    from kv_pool.tiers.pool_dump import LoadedPool, dump_pool, load_pool, read_header
    from kv_pool.tiers.tier import Tier, TierStatistics
    from kv_pool.tiers.tier_events import TierEvents
    from kv_pool.tiers.tier_hit import TierHit
    from kv_pool.tiers.tiered_cache import TieredCache
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.errors": (
                "TierError",
                "PoolDumpError",
            ),
            "kv_pool.tiers.disk_tier": ("DiskTier",),
            "kv_pool.tiers.formats.block_format": ("BlockFormat",),
            "kv_pool.tiers.formats.make_format": ("make_format",),
            "kv_pool.tiers.host_tier": ("HostTier",),
            "kv_pool.tiers.pool_dump": (
                "dump_pool",
                "load_pool",
                "read_header",
                "LoadedPool",
            ),
            "kv_pool.tiers.onboarder": (
                "TierOnboarder",
                "OnboardStatistics",
            ),
            "kv_pool.tiers.tier": (
                "Tier",
                "TierStatistics",
            ),
            "kv_pool.tiers.tier_events": ("TierEvents",),
            "kv_pool.tiers.tier_hit": ("TierHit",),
            "kv_pool.tiers.tiered_cache": ("TieredCache",),
        },
    )

__all__ = [
    "TieredCache",
    "TierOnboarder",
    "OnboardStatistics",
    "HostTier",
    "DiskTier",
    "Tier",
    "TierStatistics",
    "TierHit",
    "TierEvents",
    "make_format",
    "BlockFormat",
    "dump_pool",
    "load_pool",
    "read_header",
    "LoadedPool",
    "TierError",
    "PoolDumpError",
]
