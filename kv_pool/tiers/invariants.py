"""The numbered, executable invariants of tiers, in addition to those of `core/invariants.py`.

    X1  a tier holds at most `capacity` blocks
    X2  a tier's keys are in distinct slots, each below its capacity
    X3  a slot that was ever used either has a key or is free
    X4  a disk tier's headers match its index: the same keys in the same slots, and no other headers except
        those that could not be wiped
    X5  the pool notifies exactly these tiers; every pending block belongs to the pool
    X6  no key is queued for write-through twice: it waits either for its step or for its copy
    X7  every plan listed as open is open, under the id of its own request
    X8  the blocks of an open plan are referenced; load targets have one reference and no key
    X9  the keys that tiers hold are the keys of the open plans, with the same counts

They are true whenever no method is running. `check(onboarder)` raises CorruptedPoolError naming the first
one that fails.
"""

from collections import Counter

from kv_pool.core import invariants
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockHashWithGroupId, SlotId
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.onboarder import TierOnboarder
from kv_pool.tiers.open_plans import PlanState
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache


def check(onboarder: TierOnboarder) -> None:
    """Verify X1 to X9 and the pool's invariants. O(blocks). Raises CorruptedPoolError; changes nothing."""
    invariants.check(onboarder.manager.block_pool)  # type: ignore[arg-type]
    check_cache(onboarder.tiered_cache)
    check_plans(onboarder)


def check_tier(tier: Tier) -> None:
    """Verify X1 to X4."""
    slots = tier._slots
    used = list(slots.slot_of.values())
    if len(used) > tier.capacity:
        raise CorruptedPoolError(f"X1: a tier for {tier.capacity} blocks has {len(used)}")
    if len(set(used)) < len(used) or not all(0 <= slot < tier.capacity for slot in used):
        raise CorruptedPoolError(f"X2: slots {sorted(used)} are in use in a tier for {tier.capacity} blocks")
    if sorted(used + slots.list_free()) != list(range(slots.num_slots)):
        raise CorruptedPoolError(
            f"X3: of {slots.num_slots} slots {len(used)} are in use, {len(slots.list_free())} are free"
        )
    if isinstance(tier, DiskTier):
        headers = {slot: tier._files.read_header(slot) for slot in map(SlotId, range(tier.capacity))}
        written = {
            header.key: slot
            for slot, header in headers.items()
            if header is not None and tier._unwiped.get(slot) != header.key
        }
        if written != dict(slots.slot_of):
            wrong = written.items() ^ slots.slot_of.items()
            raise CorruptedPoolError(f"X4: headers and index differ in {sorted(wrong)}")


def check_cache(tiered_cache: TieredCache) -> None:
    """Verify X1 to X6."""
    for tier in tiered_cache.tiers:
        check_tier(tier)
    if tiered_cache.block_pool.lower_tiers is not tiered_cache:
        raise CorruptedPoolError("X5: the pool notifies other tiers than these")
    blocks = tiered_cache.block_pool.blocks
    for block in tiered_cache._pending.values():
        if blocks[block.block_id] is not block:
            raise CorruptedPoolError(f"X5: pending block {block.block_id} does not belong to the pool")
    twice = tiered_cache._unwritten.keys() & tiered_cache._written.keys()
    if any(tiered_cache._unwritten[key][0] is tiered_cache._written[key][0] for key in twice):
        raise CorruptedPoolError(f"X6: {sorted(twice)} are queued for write-through twice")


def check_plans(onboarder: TierOnboarder) -> None:
    """Verify X7 to X9."""
    held: Counter[BlockHashWithGroupId] = Counter()
    for request_id, plan in onboarder._plans.by_request.items():
        if plan.state is not PlanState.OPEN or plan.request_id != request_id:
            raise CorruptedPoolError(f"X7: {plan!r} is listed as open for request {request_id!r}")
        for block in plan.list_blocks():
            if block.ref_cnt < 1:
                raise CorruptedPoolError(f"X8: block {block.block_id} of {plan!r} is free")
        for block in plan._targets:
            if not block.is_null and (block.ref_cnt != 1 or block.block_hash is not None):
                raise CorruptedPoolError(
                    f"X8: block {block.block_id} of {plan!r} has ref_cnt {block.ref_cnt} and hash "
                    f"{block.block_hash!r}"
                )
        held.update(plan.keys)
    for tier in onboarder.tiered_cache.tiers:
        if tier._held != held:
            raise CorruptedPoolError(f"X9: the tier for {tier.medium} holds {tier._held}, not {dict(held)}")
