"""`RunBlockPool`: a block pool that prefers consecutive ids, and can allocate runs."""

from kv_pool.contiguous.run_pool_core import DEFAULT_EARLY_SHARE, DEFAULT_RUN_LENGTH, RunPoolCore
from kv_pool.core.block_pool import BlockPool

__all__ = ["DEFAULT_EARLY_SHARE", "DEFAULT_RUN_LENGTH", "RunBlockPool"]


# Never compiled, for the reasons that `BlockPool` has; every method runs compiled in `RunPoolCore`.
class RunBlockPool(RunPoolCore, BlockPool):
    """A `BlockPool` that indexes its free runs of consecutive block ids, and prefers them.

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
        early_share: to form runs, `get_new_blocks` may take blocks from the first part of the free queue
            instead of strictly in eviction order; this is the size of that part, 0 to 1. At 0 it takes
            exactly the blocks that a `BlockPool` takes.
        placement: where to take a run: "oldest" evicts the oldest cached blocks, "buddy" uses an aligned
            chunk of the next power of two (`BuddySystem`), "first_fit" the lowest ids.

    Attributes:
        run_index: the index of free ids, derived from the free queue; `rebuild_index()` restores it.
        epoch: how many times ids have been exchanged; ids read at another epoch may be stale.

    The other arguments are those of `BlockPool`. Runs speed up transfers, offloading and shrinking. Attention
    kernels do not depend on them.
    """
