"""Planted omissions: a hold or a reference that is not taken, released early, released twice, or forgotten.

Each replaces one attribute of the product: `make(original)` returns the replacement. To re-point an entry,
change module, attribute and replacement; the life that has to find it stays.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

HOLDS = "kv_pool.core.holds"
LEASES = "kv_pool.manager.leases"
PLAN = "kv_pool.tiers.swapper"
TIERS = "kv_pool.tiers.tiered_cache"
SITE = "kv_pool.migration.pool_site"


@dataclass(frozen=True)
class Omission:
    """One entry.

    Attributes:
        name: the omitted step.
        kind: the kind of life that finds it.
        module, attribute: "Class.method" in the module.
        make: returns the replacement for the original.
    """

    name: str
    kind: str
    module: str
    attribute: str
    make: Any

    def plant(self, monkeypatch, calls):
        """Install the replacement; `calls` gets an entry for each call of it."""
        path = self.attribute.split(".")
        owner = import_module(self.module)
        for name in path[:-1]:
            owner = getattr(owner, name)
        replacement = self.make(getattr(owner, path[-1]))

        def counted(*args, **options):
            calls.append(self.name)
            return replacement(*args, **options)

        monkeypatch.setattr(owner, path[-1], counted)


# ---- holds, by their reasons ---------------------------------------------------------------------


def not_held(start):
    """A hold with this reason has no blocks."""

    def make(original):
        def open_hold(book, blocks, reason, *args, **options):
            return original(book, [] if reason.startswith(start) else blocks, reason, *args, **options)

        return open_hold

    return make


def held_twice(start):
    """A hold with this reason is opened twice, and released once."""

    def make(original):
        def open_hold(book, blocks, reason, *args, **options):
            if reason.startswith(start):
                original(book, blocks, reason)
            return original(book, blocks, reason, *args, **options)

        return open_hold

    return make


def not_taken(start):
    """Blocks added to a hold with this reason are not held."""

    def make(original):
        def take_references(book, hold, blocks):
            if not hold.reason.startswith(start):
                original(book, hold, blocks)

        return take_references

    return make


def not_ended(start):
    """A hold with this reason stays in the book."""

    def make(original):
        def end(book, hold, state):
            if not hold.reason.startswith(start):
                original(book, hold, state)

        return end

    return make


def not_adopted(start):
    """A hold with this reason does not take over the references that it is given."""

    def make(original):
        def adopt(book, references, reason):
            return original(book, [] if reason.startswith(start) else references, reason)

        return adopt

    return make


def not_taken_over(start):
    """A hold with this reason does not take over the references that it is given."""

    def make(original):
        def take_over(book, hold, references):
            if not hold.reason.startswith(start):
                original(book, hold, references)

        return take_over

    return make


def adopted_for_no_time(start):
    """A hold with this reason drops its references as soon as it has taken them over."""

    def make(original):
        def adopt(book, references, reason):
            hold = original(book, references, reason)
            if reason.startswith(start):
                book.drop_references(hold, hold.blocks)
            return hold

        return adopt

    return make


def not_handed_over(start):
    """A hold with this reason keeps its references when a table gets them."""

    def make(original):
        def hand_over(book, hold):
            return hold.blocks if hold.reason.startswith(start) else original(book, hold)

        return hand_over

    return make


def nothing_immovable(original):
    return lambda book: []


# ---- references ----------------------------------------------------------------------------------


def expire_writers(original):
    def expire(leases):
        overdue = original(leases)
        for lease in leases.list_quarantined():
            leases.release(lease)
        return overdue

    return expire


def release_twice(original):
    def release_lease(leases, lease):
        blocks = list(lease.blocks)
        original(leases, lease)
        leases.block_pool.free_blocks(blocks[::-1])

    return release_lease


def free_reserved(original):
    def insert(site, reservation):
        original(site, reservation)
        reservation.hold.remove(reservation.hold.blocks[-1:])

    return insert


def forget_reservation(original):
    return lambda site, reservation: site._unfreeze(reservation.sequence_ids)


def leave_twice(original):
    def leave(site, reservation):
        original(site, reservation)
        site.pool.free_blocks(reservation.blocks[::-1])

    return leave


def free_frozen(original):
    def freeze(site, subject):
        original(site, subject)
        for hold in site._frozen[subject].holds:
            hold.remove(hold.blocks[-1:])

    return freeze


def free_sources(original):
    def open_plan(plan):
        original(plan)
        sources = [block for table in plan._tables for block in table.blocks if not block.is_null]
        plan._source.block_pool.free_blocks(sources[-1:])

    return open_plan


def keep_targets(original):
    def end_holds(plan, leaving, staying):
        if leaving is not plan._target:
            return original(plan, leaving, staying)
        for book, hold in plan._holds:
            book.hand_over(hold)
        return None

    return end_holds


def hold_no_keys(original):
    return lambda cache, keys: None


def store_nothing(original):
    return lambda pool: None


def free_copied(original):
    def add(copies, source, target):
        original(copies, source, target)
        copies._holds[0].remove([source])

    return add


def keep_copied(original):
    def take(copies, keeps_blocks):
        moves, blocks = original(copies, keeps_blocks)
        copies._pool.touch([copies._pool.blocks[move.source] for move in moves])
        return moves, blocks

    return take


def note_no_pins(original):
    """Blocks get their claims, but pins among them are not noted."""
    return lambda placed, blocks, record: placed.records.put(blocks, record)


def free_unwatched(original):
    return lambda pool, blocks, on_reuse: pool.free_blocks(blocks)


def call_no_watchers(original):
    """The watchers of reused blocks are forgotten."""

    def notify_watchers(pool, blocks):
        for block in blocks:
            pool.reuse_watchers.pop(block.block_id, None)

    return notify_watchers


OMISSIONS = [
    Omission(
        "a reader's blocks are not held",
        "adapter",
        HOLDS,
        "BlockHolds.take_references",
        not_taken("leased to a"),
    ),
    Omission(
        "a writer's blocks are not held",
        "manager",
        HOLDS,
        "BlockHolds.take_references",
        not_taken("leased to the load"),
    ),
    Omission(
        "a lease's hold is forgotten", "manager", HOLDS, "BlockHolds.end", not_ended("leased to a reader")
    ),
    Omission("a lease to write expires", "manager", LEASES, "BlockLeases.expire", expire_writers),
    Omission("a lease is released twice", "adapter", LEASES, "BlockLeases.release", release_twice),
    Omission("a reservation is not held", "manager", HOLDS, "BlockHolds.adopt", not_adopted("arriving")),
    Omission(
        "a reservation is held for no time",
        "adapter",
        HOLDS,
        "BlockHolds.adopt",
        adopted_for_no_time("arriving"),
    ),
    Omission("a reservation is released early", "manager", SITE, "PoolSite.insert", free_reserved),
    Omission(
        "a reservation is forgotten", "manager", SITE, "PoolSite.release_reservation", forget_reservation
    ),
    Omission("a reservation is released twice", "adapter", SITE, "PoolSite.release_reservation", leave_twice),
    Omission("a frozen table is not held", "manager", HOLDS, "BlockHolds.adopt", not_adopted("in sequence")),
    Omission("a frozen sequence is not held", "adapter", HOLDS, "BlockHolds.open", not_held("in sequence")),
    Omission(
        "a frozen sequence is held twice", "adapter", HOLDS, "BlockHolds.open", held_twice("in sequence")
    ),
    Omission(
        "a thawed table stays held", "manager", HOLDS, "BlockHolds.hand_over", not_handed_over("in sequence")
    ),
    Omission("a frozen table is released early", "manager", SITE, "PoolSite.freeze", free_frozen),
    Omission(
        "a swap's blocks are not held",
        "manager",
        HOLDS,
        "BlockHolds.take_over",
        not_taken_over("in an open plan to swap"),
    ),
    Omission("a swap's sources are released early", "manager", PLAN, "SwapPlan.open", free_sources),
    Omission("an aborted swap forgets its targets", "manager", PLAN, "SwapPlan._end_holds", keep_targets),
    Omission(
        "a load's blocks are not held",
        "manager",
        HOLDS,
        "BlockHolds.take_over",
        not_taken_over("in an open plan to load"),
    ),
    Omission("a load's keys are not held", "manager", TIERS, "TieredCache.hold", hold_no_keys),
    Omission("a load's keys stay held", "manager", TIERS, "TieredCache.release", hold_no_keys),
    Omission(
        "pending tier writes are forgotten",
        "manager",
        "kv_pool.core.pool_core",
        "BlockPoolCore.flush_evicted",
        store_nothing,
    ),
    Omission(
        "an adapter's pins hold nothing", "adapter", HOLDS, "BlockHolds.take_references", not_taken("pinned")
    ),
    Omission(
        "a retention's pin is not noted",
        "manager",
        "kv_pool.manager.retention.placed_claims",
        "PlacedClaims._put",
        note_no_pins,
    ),
    Omission(
        "a copy on write frees its source early",
        "manager",
        "kv_pool.manager.block_copies",
        "BlockCopies.add",
        free_copied,
    ),
    Omission(
        "a copy on write keeps its source",
        "manager",
        "kv_pool.manager.block_copies",
        "BlockCopies.take",
        keep_copied,
    ),
    Omission(
        "a compaction knows no holds", "adapter", HOLDS, "BlockHolds.list_immovable_ids", nothing_immovable
    ),
    Omission(
        "a reuse watcher is not noted",
        "adapter",
        "kv_pool.contiguous.run_pool_core",
        "RunPoolCore.unpin_blocks",
        free_unwatched,
    ),
    Omission(
        "a reuse watcher is not called",
        "manager",
        "kv_pool.core.taking",
        "notify_watchers",
        call_no_watchers,
    ),
]
