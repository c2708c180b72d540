"""Random calls on a real pool, without those that no event tells of."""

from core.pool_schedule import PoolSchedule


class EventSchedule(PoolSchedule):
    """`PoolSchedule` for a pool whose events are taken after each call.

    Left out: keys that others insert, and events that they append; bare blocks; a map edited by hand.
    """

    def __init__(self, seed):
        super().__init__(seed)
        self.options |= {"events": True, "shares_events": False}
        self.edits_map = False

    def nothing(self):
        return iter(())

    insert_key = append_event = take_events = offload = use_bare_blocks = nothing
