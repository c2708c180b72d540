"""Planted omissions of recoveries: an interrupted call is neither undone nor completed."""

from lives.omissions import Omission

HOLDINGS = "kv_pool.adapter.holdings"
CLAIMS = "kv_pool.manager.retention.placed_claims"
LEASES = "kv_pool.manager.leases"
PLANS = "kv_pool.manager.swap.open_plans"
TIERS = "kv_pool.tiers.tier_store"


def recover_nothing(original):
    return lambda owner: None


INTERRUPT_OMISSIONS = [
    Omission("leases are not derived from holds", "adapter", LEASES, "BlockLeases._rebuild", recover_nothing),
    Omission("plans are not closed", "manager", PLANS, "OpenPlans.recover", recover_nothing),
    Omission("tiers complete nothing", "manager", TIERS, "TierStore._recover", recover_nothing),
    Omission("a retention completes nothing", "manager", CLAIMS, "PlacedClaims.recover", recover_nothing),
    Omission("an adapter undoes nothing", "adapter", HOLDINGS, "Holdings.recover", recover_nothing),
]
