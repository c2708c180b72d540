"""Planted omissions of events: blocks stored or removed without an event, or with gaps."""

from lives.omissions import Omission

from kv_pool import BlockStored

EVICTING = "kv_pool.core.evicting"
EVENTS = "kv_pool.tiers.tier_events"


def announce_no_eviction(original):
    return lambda pool, keys: None


def announce_part_of_an_eviction(original):
    return lambda pool, keys: original(pool, keys[:-1] if len(keys) > 1 else keys)


def announce_nothing(original):
    return lambda events, medium, keys: None


def announce_the_first(original):
    return lambda events, medium, keys: original(events, medium, keys[:1])


def drop_arrivals(original):
    def insert_keys(pool, *args):
        queue = pool.kv_event_queue
        num_before = len(queue)
        original(pool, *args)
        queue[num_before:] = [event for event in queue[num_before:] if not isinstance(event, BlockStored)]

    return insert_keys


def forget_parent(original):
    def make_stored(pool, request, hashes, parent, *args):
        return original(pool, request, hashes, None, *args)

    return make_stored


EVENT_OMISSIONS = [
    Omission("an eviction is not announced", "adapter", EVICTING, "announce_removed", announce_no_eviction),
    Omission(
        "one of several evictions is not announced",
        "manager",
        EVICTING,
        "announce_removed",
        announce_part_of_an_eviction,
    ),
    Omission(
        "a tier's store is not announced", "adapter", EVENTS, "TierEvents.announce_stored", announce_nothing
    ),
    Omission(
        "a tier announces one of its stores",
        "manager",
        EVENTS,
        "TierEvents.announce_stored",
        announce_the_first,
    ),
    Omission(
        "a tier's eviction is not announced",
        "manager",
        EVENTS,
        "TierEvents.announce_removed",
        announce_nothing,
    ),
    Omission(
        "a block that has arrived is not announced",
        "adapter",
        "kv_pool.migration.pool_site",
        "insert_keys",
        drop_arrivals,
    ),
    Omission("an event has no parent", "manager", "kv_pool.core.stored_events", "make_stored", forget_parent),
]
