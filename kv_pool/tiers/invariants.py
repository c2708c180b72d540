"""The numbered, executable invariants of tiers and swapped requests, in addition to those of the pools.

    X1  a tier holds at most `capacity` blocks
    X2  a tier's keys are in distinct slots, each below its capacity
    X3  a slot that was ever used either has a key or is free
    X4  a disk tier's headers match its index: the same keys in the same slots, and no other headers except
        those that could not be wiped
    X5  the pool notifies exactly these tiers; every pending block belongs to the pool
    X6  a block that is queued for write-through and still has its key belongs to the pool
    X7  every plan listed as open is open, under the id of its own request
    X8  the blocks of an open plan are referenced; targets of its copies have one reference and no key
    X9  the keys that tiers hold are the keys of the open plans, with the same counts

    W1  a request is in at most one of: the manager, the swapped-out requests, the open plans (unless its
        scheduler allocates for it meanwhile, such as for one without computed tokens)
    W2  an open plan has blocks of the pool of each side
    W3  a swapped-out table counts at most the computed blocks as cached
    W4  an open plan's moves go from distinct blocks to distinct blocks

Running and swapped-out requests have the tables of managers: T1 to T4 hold for them, see
`manager/invariants.py`. All are true whenever no method is running. `check(onboarder)` and
`check_swapper(swapper)` raise CorruptedPoolError naming the first one that fails.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockHashWithGroupId, SlotId
from kv_pool.manager import invariants as manager_invariants
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.onboarder import TierOnboarder
from kv_pool.tiers.open_plans import OpenPlans, PlanState
from kv_pool.tiers.swapper import BlockSwapper, SwapDirection
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache


def check(onboarder: TierOnboarder) -> None:
    """Verify X1 to X9 and the pool's invariants. O(blocks). Raises CorruptedPoolError; changes nothing."""
    invariants.check(onboarder.manager.block_pool)  # type: ignore[arg-type]
    check_cache(onboarder.tiered_cache)
    check_open(onboarder._plans)
    held: Counter[BlockHashWithGroupId] = Counter()
    for plan in onboarder.list_open_plans():
        for block in plan.list_blocks():
            if block.ref_cnt < 1:
                raise CorruptedPoolError(f"X8: block {block.block_id} of {plan!r} is free")
        check_targets(plan, plan._targets)
        held.update(plan.keys)
    for tier in onboarder.tiered_cache.tiers:
        if tier.held != held:
            raise CorruptedPoolError(f"X9: the tier for {tier.medium} holds {tier.held}, not {dict(held)}")


def check_tier(tier: Tier) -> None:
    """Verify X1 to X4."""
    used = list(tier._slot_of.values())
    if len(used) > tier.capacity:
        raise CorruptedPoolError(f"X1: a tier for {tier.capacity} blocks has {len(used)}")
    if len(set(used)) < len(used) or not all(0 <= slot < tier.capacity for slot in used):
        raise CorruptedPoolError(f"X2: slots {sorted(used)} are in use in a tier for {tier.capacity} blocks")
    if sorted(used + tier._free_slots) != list(range(tier._num_slots)):
        raise CorruptedPoolError(
            f"X3: of {tier._num_slots} slots {len(used)} are in use, {len(tier._free_slots)} are free"
        )
    if isinstance(tier, DiskTier):
        headers = {slot: tier._files.read_header(slot) for slot in map(SlotId, range(tier.capacity))}
        written = {
            header.key: slot
            for slot, header in headers.items()
            if header is not None and tier._unwiped.get(slot) != header.key
        }
        if written != dict(tier._slot_of):
            wrong = written.items() ^ tier._slot_of.items()
            raise CorruptedPoolError(f"X4: headers and index differ in {sorted(wrong)}")


def check_cache(tiered_cache: TieredCache) -> None:
    """Verify X1 to X6."""
    for tier in tiered_cache.tiers:
        check_tier(tier)
    if tiered_cache.block_pool.lower_tiers is not tiered_cache:
        raise CorruptedPoolError("X5: the pool notifies other tiers than these")
    blocks = tiered_cache.block_pool.blocks
    queued = [block for block, (key, _, _) in tiered_cache._through.items() if block.block_hash == key]
    for name, listed in (("X5: pending", tiered_cache._pending.values()), ("X6: queued", queued)):
        for block in listed:
            if blocks[block.block_id] is not block:
                raise CorruptedPoolError(f"{name} block {block.block_id} does not belong to the pool")


def check_open(plans: OpenPlans[Any]) -> None:
    """Verify X7."""
    for request_id, plan in plans.by_request.items():
        if plan.state is not PlanState.OPEN or plan.request_id != request_id:
            raise CorruptedPoolError(f"X7: {plan!r} is listed as open for request {request_id!r}")


def check_targets(plan: object, targets: Iterable[KVCacheBlock]) -> None:
    """Verify X8 for the blocks that an open plan copies into."""
    for block in targets:
        if block.ref_cnt != 1 or block.block_hash is not None:
            raise CorruptedPoolError(
                f"X8: block {block.block_id} of {plan!r} has ref_cnt {block.ref_cnt} and hash "
                f"{block.block_hash!r}"
            )


def check_swapper(swapper: BlockSwapper) -> None:
    """Verify W1 to W4, X7, X8 and both pools' invariants. O(blocks). Raises CorruptedPoolError."""
    invariants.check(swapper.manager.block_pool)  # type: ignore[arg-type]
    invariants.check(swapper.host_pool)  # type: ignore[arg-type]
    check_open(swapper._plans)
    plans = swapper.list_open_plans()
    places = Counter([*swapper.manager.list_request_ids(), *swapper.list_swapped_out()])
    places.update(plan.request_id for plan in plans)
    for request_id, num_places in places.items():
        # If a scheduler allocated for a request in a plan, closing the plan raises.
        if num_places > 1:
            raise CorruptedPoolError(f"W1: request {request_id!r} is in {num_places} places")
    for side in (swapper.manager, swapper._host):
        manager_invariants.check_references(side)
        for plan in plans:
            for block in plan.list_blocks(side):
                if side.block_pool.blocks[block.block_id] is not block:
                    raise CorruptedPoolError(f"W2: block {block.block_id} of {plan!r} is of another pool")
    check_tables(swapper)
    for plan in plans:
        sources, targets = [move.source for move in plan.moves], [move.target for move in plan.moves]
        if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
            raise CorruptedPoolError(f"W4: a block occurs twice in {plan.moves}")
        pool = swapper.host_pool if plan.direction is SwapDirection.OUT else swapper.manager.block_pool
        check_targets(plan, [pool.blocks[block_id] for block_id in targets])


def check_tables(swapper: BlockSwapper) -> None:
    """Verify W3; also T3 and T4 of the tables on the host."""
    for request_id, tables in swapper._host._tables.items():
        num_computed = swapper._swapped_out[request_id]
        for spec, table in zip(swapper.manager.groups, tables, strict=True):
            manager_invariants.check_coverage(
                table, spec, num_computed, f"swapped-out request {request_id!r}"
            )
            if table.num_cached_blocks > num_computed // spec.block_size:
                raise CorruptedPoolError(
                    f"W3: {table.num_cached_blocks} blocks of request {request_id!r} count as cached, but "
                    f"{num_computed} tokens are computed"
                )
