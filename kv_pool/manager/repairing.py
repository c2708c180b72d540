"""`repair_manager`: make a manager and its pool whole after an interrupted call."""

from kv_pool.manager.manager_state import ManagerState


def repair_manager(state: ManagerState) -> None:
    """Implement `KVCacheManager.repair`. Each step can be repeated."""
    pool = state.block_pool
    pool.is_changing = True
    for host in state.list_hosts():
        host.host_pool.is_changing = True
    pool.holds.begin_repair()  # may attach tables again
    state.copies.repair()
    for tables in (*state._tables.values(), *state.detached_tables.values()):
        for table, group in zip(tables, state._groups, strict=True):
            # The request's next step caches again what it computes, after the content that it has.
            table.num_cached_blocks = 0
            if group.forgets:
                num_blocks = len(table.blocks)
                table.num_null_blocks = next(
                    (place for place, block in enumerate(table.blocks) if not block.is_null), num_blocks
                )
    state._caching.begin_step()
    pool.repair([block for tables in state._tables.values() for table in tables for block in table.blocks])
    if state.retention is not None:
        state.retention.recount()
    for host in state.list_hosts():
        host.repair_host()
