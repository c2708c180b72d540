"""Reports about a running pool: block states, layout, statistics, sequences and holds."""

from kv_pool.reports.holds import HoldList, HoldSummary
from kv_pool.reports.layout import BlockState, PoolLayout
from kv_pool.reports.live_curve import LiveCurvePoint, LiveCurveReport, read_live_curve
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics

__all__ = [
    "BlockState",
    "HoldList",
    "HoldSummary",
    "LiveCurvePoint",
    "LiveCurveReport",
    "PoolLayout",
    "PoolStatistics",
    "SequenceList",
    "SequenceReport",
    "read_live_curve",
]
