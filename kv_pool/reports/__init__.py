"""What a running pool reports of itself, whichever face serves it: states, runs, counts, sequences, holds."""

from kv_pool.reports.block_states import BlockState
from kv_pool.reports.holds import HoldList, HoldSummary
from kv_pool.reports.layout import PoolLayout
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics

__all__ = [
    "BlockState",
    "HoldList",
    "HoldSummary",
    "PoolLayout",
    "PoolStatistics",
    "SequenceList",
    "SequenceReport",
]
