"""`TierCounts`: what the tiers of an engine have done, counted in the scheduler's process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierCounts:
    """Counts of an interval.

    Attributes:
        num_stored: blocks that were stored in host memory.
        num_loaded_tokens: tokens that requests loaded instead of computing them, failed loads included.
        num_demoted: blocks that were evicted from host memory to disk.
        num_skipped: blocks that were not stored at their request's end, because of too many other stores.
        num_lost: blocks that could not be stored or loaded.
    """

    num_stored: int = 0
    num_loaded_tokens: int = 0
    num_demoted: int = 0
    num_skipped: int = 0
    num_lost: int = 0
