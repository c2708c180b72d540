"""The numbered truths about tiers, each executable; beside those of `core/invariants.py`.

    X1  a tier has no more blocks than its capacity
    X2  a tier's keys are in distinct slots, each below its capacity
    X3  a slot that was used has a key or is free, and is not both
    X4  a disk tier's headers say what its index says: the same keys in the same slots, and no others but
        those that the disk did not let it wipe
    X5  the pool tells these tiers, and no others; a block that is pending is one of the pool
    X6  no key is written through twice: it waits for its step, or for its copy
    X7  a plan that is listed as open is open, under its own request's id
    X8  an open plan's blocks are referenced; those to be read into have one reference and no key
    X9  the keys that tiers hold are those of the open plans, as often as these name them

They hold whenever no method is running. `check(read_back)` raises CorruptedPoolError naming the first that
fails.
"""

from collections import Counter

from kv_pool.core import invariants
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.manager.swap.open_plans import PlanState
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.read_back import TierReadBack
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache


def check(read_back: TierReadBack) -> None:
    """Verify X1 to X9 and the pool's invariants. O(blocks). Raises CorruptedPoolError; changes nothing."""
    invariants.check(read_back.manager.block_pool)  # type: ignore[arg-type]
    check_cache(read_back.tiered_cache)
    check_plans(read_back)


def check_tier(tier: Tier) -> None:
    """X1 to X4."""
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
        headers = {slot: tier._files.read_header(slot) for slot in range(tier.capacity)}
        written = {
            header.key: slot
            for slot, header in headers.items()
            if header is not None and tier._unwiped.get(slot) != header.key
        }
        if written != dict(slots.slot_of):
            wrong = written.items() ^ slots.slot_of.items()
            raise CorruptedPoolError(f"X4: headers and index differ in {sorted(wrong)}")


def check_cache(tiered_cache: TieredCache) -> None:
    """X1 to X6."""
    for tier in tiered_cache.tiers:
        check_tier(tier)
    if tiered_cache.block_pool.colder_tiers is not tiered_cache:
        raise CorruptedPoolError("X5: the pool tells other tiers than these")
    blocks = tiered_cache.block_pool.blocks
    for block in tiered_cache._pending.values():
        if blocks[block.block_id] is not block:
            raise CorruptedPoolError(f"X5: block {block.block_id}, which is pending, is not one of the pool")
    twice = tiered_cache._unwritten.keys() & tiered_cache._written.keys()
    if any(tiered_cache._unwritten[key][0] is tiered_cache._written[key][0] for key in twice):
        raise CorruptedPoolError(f"X6: {sorted(twice)} are to be written through twice")


def check_plans(read_back: TierReadBack) -> None:
    """X7 to X9."""
    held: Counter[BlockHashWithGroupId] = Counter()
    for request_id, plan in read_back._open_plans.by_request.items():
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
    for tier in read_back.tiered_cache.tiers:
        if tier._held != held:
            raise CorruptedPoolError(f"X9: the tier for {tier.medium} holds {tier._held}, not {dict(held)}")
