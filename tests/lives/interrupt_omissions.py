"""Planted omissions of recoveries: what an interrupted call has left is not undone or completed."""

from lives.omissions import Omission

HOLDINGS = "kv_pool.adapter.holdings"
LEASES = "kv_pool.manager.leases"
PLANS = "kv_pool.manager.swap.open_plans"


def recover_nothing(original):
    return lambda owner: None


INTERRUPT_OMISSIONS = [
    Omission("leases are not derived from holds", "adapter", LEASES, "BlockLeases._rebuild", recover_nothing),
    Omission("plans are not closed", "manager", PLANS, "OpenPlans.recover", recover_nothing),
    Omission("an adapter undoes nothing", "adapter", HOLDINGS, "Holdings.recover", recover_nothing),
]
