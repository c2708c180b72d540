"""The numbered invariants of swapped requests, each executable; see also `core/invariants.py`.

    W1  a request is in at most one of: the manager, the swapped-out requests, the open plans (unless its
        scheduler allocates for it meanwhile, such as for one without computed tokens)
    W2  a device block has at least one reference for each of the manager's tables and holds with it
    W3  the manager's tables contain its pool's own blocks only; an open plan, those of the pool of each side
    W4  a swapped-out table counts at most the computed blocks as cached
    W5  an open plan's moves go from distinct blocks to distinct blocks; a target has one reference, that of
        the plan's hold, and no hash
    W6  a plan that is listed as open is open, under its own request's id

The tables on the host are those of a manager: T1 to T4 hold for them, see `manager/invariants.py`.

They hold whenever no method is running. `check(swapper)` raises CorruptedPoolError for the first that fails.
"""

from collections import Counter
from collections.abc import Iterable

from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockId
from kv_pool.manager import invariants as manager_invariants
from kv_pool.tiers.open_plans import PlanState
from kv_pool.tiers.swap_plan import SwapDirection, SwapPlan
from kv_pool.tiers.swapper import BlockSwapper


def check(swapper: BlockSwapper) -> None:
    """Verify W1 to W6 and both pools' invariants. O(blocks). Raises CorruptedPoolError; changes nothing."""
    invariants.check(swapper.manager.block_pool)  # type: ignore[arg-type]
    invariants.check(swapper.host_pool)  # type: ignore[arg-type]
    check_places(swapper)
    manager_invariants.check_references(swapper._host)
    check_references(swapper)
    check_tables(swapper)
    for plan in swapper.list_open_plans():
        check_plan(swapper, plan)


def check_places(swapper: BlockSwapper) -> None:
    """Verify W1 and W6."""
    plans = {plan.request_id for plan in swapper.list_open_plans()}
    places = Counter([*swapper.manager.list_request_ids(), *swapper.list_swapped_out(), *plans])
    for request_id, num_places in places.items():
        # If a scheduler allocated for a request in a plan, closing the plan raises.
        if num_places > 1:
            raise CorruptedPoolError(f"W1: request {request_id!r} is in {num_places} places")
    for request_id, plan in swapper._plans.by_request.items():
        if plan.state is not PlanState.OPEN or plan.request_id != request_id:
            raise CorruptedPoolError(f"W6: {plan!r} is listed as open for request {request_id!r}")


def check_references(swapper: BlockSwapper) -> None:
    """Verify W2 and W3."""
    manager = swapper.manager
    on_device = _count(
        manager.block_pool,
        (block for _, _, table in manager_invariants.list_tables(manager) for block in table.blocks),
    )
    for plan in swapper.list_open_plans():
        _count(swapper.host_pool, plan.list_blocks(swapper._host))
        _count(manager.block_pool, plan.list_blocks(manager))
    for block, num_holds in manager.block_pool.holds.count_references().items():
        on_device[block.block_id] += num_holds
    for block in manager.block_pool.blocks[1:]:
        num_found = on_device[block.block_id]  # other holders may have it, too
        if block.ref_cnt < num_found:
            raise CorruptedPoolError(
                f"W2: device block {block.block_id} has ref_cnt {block.ref_cnt}, but {num_found} tables and "
                "holds have it"
            )


def check_tables(swapper: BlockSwapper) -> None:
    """Verify W4; also T3 and T4 of the tables on the host."""
    for request_id, tables in swapper._host._tables.items():
        num_computed = swapper._swapped_out[request_id]
        for spec, table in zip(swapper.manager.groups, tables, strict=True):
            manager_invariants.check_coverage(
                table, spec, num_computed, f"swapped-out request {request_id!r}"
            )
            if table.num_cached_blocks > num_computed // spec.block_size:
                raise CorruptedPoolError(
                    f"W4: {table.num_cached_blocks} blocks of request {request_id!r} count as cached, but "
                    f"{num_computed} tokens are computed"
                )


def check_plan(swapper: BlockSwapper, plan: SwapPlan) -> None:
    """Verify W5."""
    sources = [move.source for move in plan.moves]
    targets = [move.target for move in plan.moves]
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        raise CorruptedPoolError(f"W5: a block occurs twice in {plan.moves}")
    pool = swapper.host_pool if plan.direction is SwapDirection.OUT else swapper.manager.block_pool
    for block_id in targets:
        block = pool.blocks[block_id]
        if block.ref_cnt != 1 or block.block_hash is not None:
            raise CorruptedPoolError(
                f"W5: target block {block_id} has ref_cnt {block.ref_cnt} and hash {block.block_hash!r}"
            )


def _count(pool: BlockPoolCore, blocks: Iterable[KVCacheBlock]) -> Counter[BlockId]:
    """Count the occurrences of each id, without the null block. Raise for another pool's blocks."""
    named: Counter[BlockId] = Counter()
    for block in blocks:
        if pool.blocks[block.block_id] is not block:
            raise CorruptedPoolError(f"W3: block {block.block_id} does not belong to the pool of its table")
        if not block.is_null:
            named[block.block_id] += 1
    return named
