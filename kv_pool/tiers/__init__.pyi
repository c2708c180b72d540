# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.tiers.tiered_cache import TieredCache as TieredCache
from kv_pool.tiers.onboarder import TierOnboarder as TierOnboarder
from kv_pool.tiers.onboarder import OnboardStatistics as OnboardStatistics
from kv_pool.tiers.host_tier import HostTier as HostTier
from kv_pool.tiers.disk_tier import DiskTier as DiskTier
from kv_pool.tiers.tier import Tier as Tier
from kv_pool.reports.tiers import TierStatistics as TierStatistics
from kv_pool.tiers.onboarder import TierHit as TierHit
from kv_pool.tiers.swapper import BlockSwapper as BlockSwapper
from kv_pool.tiers.swapper import SwapPlan as SwapPlan
from kv_pool.tiers.swapper import SwapDirection as SwapDirection
from kv_pool.tiers.tier_events import TierEvents as TierEvents
from kv_pool.tiers.formats import make_format as make_format
from kv_pool.tiers.formats.block_format import BlockFormat as BlockFormat
from kv_pool.tiers.pool_dump import dump_pool as dump_pool
from kv_pool.tiers.pool_dump import load_pool as load_pool
from kv_pool.tiers.pool_dump import read_header as read_header
from kv_pool.tiers.pool_dump import LoadedPool as LoadedPool
from kv_pool.errors import TierError as TierError
from kv_pool.errors import PoolDumpError as PoolDumpError
