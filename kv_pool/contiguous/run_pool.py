"""`RunBlockPool`: a block pool that hands out consecutive ids where it can, and on request nothing else."""

from kv_pool.contiguous.run_pool_core import DEFAULT_RUN_LENGTH, RunPoolCore
from kv_pool.contiguous.run_pool_state import DEFAULT_EARLY_SHARE
from kv_pool.core.block_pool import BlockPool

__all__ = ["DEFAULT_EARLY_SHARE", "DEFAULT_RUN_LENGTH", "RunBlockPool"]


# Never compiled, for the reasons that `BlockPool` has; every method runs compiled in `RunPoolCore`.
class RunBlockPool(RunPoolCore, BlockPool):
    """A `BlockPool` that knows its free runs of consecutive block ids, and prefers them.

        >>> from kv_pool.contiguous.run_pool import RunBlockPool
        >>> pool = RunBlockPool(32, True, 16)
        >>> [first] = pool.get_new_blocks(1)
        >>> [block.block_id for block in pool.get_new_run(4)]
        [4, 5, 6, 7]
        >>> pool.get_num_free_blocks(), pool.get_new_run(25)
        (26, None)
        >>> [block.block_id for block in pool.get_new_blocks_after(first, 2)]
        [2, 3]

    Args:
        early_share: `get_new_blocks` may take, for the sake of a run, what is not next in eviction order
            but among the first of so large a share of the queue, 0 to 1. At 0 it takes exactly what a
            `BlockPool` takes.
        placement: where a run is taken: "oldest" at the cost of the oldest cached blocks, "buddy" in an
            aligned chunk of the next power of two (`BuddySystem`), "first_fit" at the lowest ids.
        Others: as of `BlockPool`.

    Attributes:
        run_index: which ids are free; derived, `rebuild_index()` makes it anew.
        epoch: how many times ids have been exchanged; an id that was read at another epoch may have moved.

    Runs serve transfers, offloading and shrinking. Attention kernels do not care.
    """
