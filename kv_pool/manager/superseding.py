"""`release_superseded`: release the states that a conversation has left behind."""

from kv_pool.core.evicting import evict_invalid
from kv_pool.manager.block_groups.state_chains import StateChains
from kv_pool.manager.manager_state import ManagerState


def release_superseded(state: ManagerState, chains: StateChains) -> None:
    """Evict the superseded states; their blocks are reused first. Blocks in use or retained stay cached."""
    pool = state.block_pool
    superseded = chains.superseded
    while len(superseded) > 0:
        old = superseded[-1]
        block = old.block
        if old.is_cached and block.ref_cnt == 0 and block.retention_id == 0:
            # With a reference the block leaves the queue; without content it returns to the front.
            pool.add_references([block])
            evict_invalid(pool, [block])
            pool.drop_references([block])
        superseded.pop()
