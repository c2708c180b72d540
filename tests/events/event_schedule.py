"""Random calls on a real pool, without calls that emit no event."""

from core.pool_schedule import PoolSchedule


class EventSchedule(PoolSchedule):
    """`PoolSchedule` for a pool whose events are taken after each call.

    Omitted: keys inserted and events appended from outside; bare blocks; direct edits of the map.
    """

    def __init__(self, seed):
        super().__init__(seed)
        self.options |= {"events": True, "shares_events": False}
        self.edits_map = False

    def nothing(self):
        return iter(())

    insert_key = append_event = take_events = offload = use_bare_blocks = nothing
