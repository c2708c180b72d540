# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.reports.holds import HoldList as HoldList
from kv_pool.reports.holds import HoldSummary as HoldSummary
from kv_pool.reports.layout import BlockState as BlockState
from kv_pool.reports.layout import PoolLayout as PoolLayout
from kv_pool.reports.live_curve import LiveCurvePoint as LiveCurvePoint
from kv_pool.reports.live_curve import LiveCurveReport as LiveCurveReport
from kv_pool.reports.live_curve import read_live_curve as read_live_curve
from kv_pool.reports.histogram import Histogram as Histogram
from kv_pool.reports.pool_reading import PoolReading as PoolReading
from kv_pool.reports.pool_reading import PoolSources as PoolSources
from kv_pool.reports.pool_reading import read_pool as read_pool
from kv_pool.reports.pool_view import HotPrefix as HotPrefix
from kv_pool.reports.pool_view import MapCell as MapCell
from kv_pool.reports.pool_view import PoolMap as PoolMap
from kv_pool.reports.pool_view import PoolView as PoolView
from kv_pool.reports.pool_view import RunningMigration as RunningMigration
from kv_pool.reports.pool_view import read_view as read_view
from kv_pool.reports.sequences import SequenceList as SequenceList
from kv_pool.reports.sequences import SequenceReport as SequenceReport
from kv_pool.reports.statistics import PoolStatistics as PoolStatistics
from kv_pool.reports.tiers import TierList as TierList
from kv_pool.reports.tiers import TierStatistics as TierStatistics
