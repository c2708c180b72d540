"""The numbered invariants of swapped requests, each executable; see also `core/invariants.py`.

    W1  a request is in at most one of: the manager, the swapped-out requests, the open plans (unless its
        scheduler allocates for it meanwhile, such as for one without computed tokens)
    W2  a host block has one reference for each swapped-out table and hold (those of plans included) with it
    W3  a device block has at least one reference for each of the manager's tables and holds with it
    W4  a swapped-out table contains the host pool's own blocks only, and so does an open plan on either side
    W5  the first num_null_blocks entries of a swapped-out table are null; it counts at most the computed
        blocks as cached
    W6  an open plan's moves go from distinct blocks to distinct blocks; a target has one reference, that of
        the plan's hold, and no hash
    W7  a plan that is listed as open is open, under its own request's id

They hold whenever no method is running. `check(swapper)` raises CorruptedPoolError for the first that fails.
"""

from collections import Counter
from collections.abc import Iterable

from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockId
from kv_pool.manager.invariants import list_tables
from kv_pool.manager.swap.open_plans import PlanState
from kv_pool.manager.swap.plan import SwapDirection, SwapPlan
from kv_pool.manager.swap.swapper import BlockSwapper


def check(swapper: BlockSwapper) -> None:
    """Verify W1 to W7 and both pools' invariants. O(blocks). Raises CorruptedPoolError; changes nothing."""
    invariants.check(swapper.manager.block_pool)  # type: ignore[arg-type]
    invariants.check(swapper.host_pool)  # type: ignore[arg-type]
    check_places(swapper)
    check_references(swapper)
    check_tables(swapper)
    for plan in swapper.list_open_plans():
        check_plan(swapper, plan)


def check_places(swapper: BlockSwapper) -> None:
    """Verify W1 and W7."""
    plans = {plan.request_id for plan in swapper.list_open_plans()}
    places = Counter([*swapper.manager.list_request_ids(), *swapper.list_swapped_out(), *plans])
    for request_id, num_places in places.items():
        # If a scheduler allocated for a request in a plan, closing the plan raises.
        if num_places > 1:
            raise CorruptedPoolError(f"W1: request {request_id!r} is in {num_places} places")
    for request_id, plan in swapper._plans.by_request.items():
        if plan.state is not PlanState.OPEN or plan.request_id != request_id:
            raise CorruptedPoolError(f"W7: {plan!r} is listed as open for request {request_id!r}")


def check_references(swapper: BlockSwapper) -> None:
    """Verify W2, W3 and W4."""
    manager = swapper.manager
    on_host = _count(
        swapper.host_pool,
        (block for _, _, table in list_tables(swapper._host) for block in table.blocks),
    )
    on_device = _count(
        manager.block_pool, (block for _, _, table in list_tables(manager) for block in table.blocks)
    )
    for plan in swapper.list_open_plans():
        _count(swapper.host_pool, plan.list_blocks(swapper._host))
        _count(manager.block_pool, plan.list_blocks(manager))
    _count_holds(swapper.host_pool, on_host)
    _count_holds(manager.block_pool, on_device)
    for pool, named, what in (
        (swapper.host_pool, on_host, "W2: host"),
        (manager.block_pool, on_device, "W3: device"),
    ):
        for block in pool.blocks[1:]:
            num_found = named[block.block_id]  # other holders may have a device block, too
            if block.ref_cnt < num_found or (block.ref_cnt > num_found and named is on_host):
                raise CorruptedPoolError(
                    f"{what} block {block.block_id} has ref_cnt {block.ref_cnt}, but {num_found} tables and "
                    "holds have it"
                )


def check_tables(swapper: BlockSwapper) -> None:
    """Verify W5."""
    for request_id, tables in swapper._host._tables.items():
        num_computed = swapper._swapped_out[request_id]
        for spec, table in zip(swapper.manager.groups, tables, strict=True):
            if not all(block.is_null for block in table.blocks[: table.num_null_blocks]):
                raise CorruptedPoolError(
                    f"W5: {table.num_null_blocks} blocks of request {request_id!r} should be null; its table "
                    f"is {table.list_ids()}"
                )
            if table.num_cached_blocks > num_computed // spec.block_size:
                raise CorruptedPoolError(
                    f"W5: {table.num_cached_blocks} blocks of request {request_id!r} count as cached, but "
                    f"{num_computed} tokens are computed"
                )


def check_plan(swapper: BlockSwapper, plan: SwapPlan) -> None:
    """Verify W6."""
    sources = [move.source for move in plan.moves]
    targets = [move.target for move in plan.moves]
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        raise CorruptedPoolError(f"W6: a block occurs twice in {plan.moves}")
    pool = swapper.host_pool if plan.direction is SwapDirection.OUT else swapper.manager.block_pool
    for block_id in targets:
        block = pool.blocks[block_id]
        if block.ref_cnt != 1 or block.block_hash is not None:
            raise CorruptedPoolError(
                f"W6: target block {block_id} has ref_cnt {block.ref_cnt} and hash {block.block_hash!r}"
            )


def _count_holds(pool: BlockPoolCore, named: Counter[BlockId]) -> None:
    for block, num_holds in pool.holds.count_references().items():
        named[block.block_id] += num_holds


def _count(pool: BlockPoolCore, blocks: Iterable[KVCacheBlock]) -> Counter[BlockId]:
    """Count the occurrences of each id, without the null block. Raise for another pool's blocks."""
    named: Counter[BlockId] = Counter()
    for block in blocks:
        if pool.blocks[block.block_id] is not block:
            raise CorruptedPoolError(f"W4: block {block.block_id} does not belong to the pool of its table")
        if not block.is_null:
            named[block.block_id] += 1
    return named
