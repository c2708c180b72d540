"""Runs of consecutive block ids, and compaction, which moves other blocks out of their way."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.contiguous.background_defragmenter import BackgroundDefragmenter
    from kv_pool.contiguous.buddy import BuddySystem
    from kv_pool.contiguous.compaction import Relocation, apply_moves, compact, gather, pack, shrink, take_run
    from kv_pool.contiguous.defragmenter import Defragmentable, Defragmenter
    from kv_pool.contiguous.fragmentation import get_fragmentation_rate, get_unusable_share
    from kv_pool.contiguous.plan import plan_clear_run, plan_drain, plan_gather, plan_pack
    from kv_pool.contiguous.run_pool import RunBlockPool
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.contiguous.background_defragmenter": ("BackgroundDefragmenter",),
            "kv_pool.contiguous.buddy": ("BuddySystem",),
            "kv_pool.contiguous.compaction": (
                "Relocation",
                "pack",
                "gather",
                "compact",
                "shrink",
                "take_run",
                "apply_moves",
            ),
            "kv_pool.contiguous.defragmenter": (
                "Defragmenter",
                "Defragmentable",
            ),
            "kv_pool.contiguous.fragmentation": (
                "get_fragmentation_rate",
                "get_unusable_share",
            ),
            "kv_pool.contiguous.plan": (
                "plan_pack",
                "plan_gather",
                "plan_clear_run",
                "plan_drain",
            ),
            "kv_pool.contiguous.run_pool": ("RunBlockPool",),
        },
    )

__all__ = [
    "RunBlockPool",
    "Relocation",
    "pack",
    "gather",
    "compact",
    "shrink",
    "take_run",
    "plan_pack",
    "plan_gather",
    "plan_clear_run",
    "plan_drain",
    "apply_moves",
    "Defragmenter",
    "BackgroundDefragmenter",
    "Defragmentable",
    "BuddySystem",
    "get_fragmentation_rate",
    "get_unusable_share",
]
