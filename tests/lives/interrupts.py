"""`Interrupts`: calls that an exception interrupts at a random place; the state shows what has happened."""

from interrupting import interrupt_at
from lives.promises import Promise

from kv_pool.errors import InvalidBlockError
from kv_pool.manager.leases import LeaseState

MOST_PLACES_LOG2 = 10


class Interrupts:
    """The calls of a `Node` that can be interrupted."""

    def break_call(self):
        """Interrupt one call, or let it finish if it has fewer places than were drawn."""
        return self.rng.choice(self.list_breakable())()

    def list_breakable(self):
        return [
            self.break_acquire,
            self.break_release,
            self.break_expire,
            self.break_flush,
            self.break_forget,
        ]

    def interrupt(self, call):
        """Run `call` with an exception at a random place in it. Propagates the call's own exceptions."""
        place = int(2 ** self.rng.uniform(0, MOST_PLACES_LOG2))
        try:
            self.world.tally["interrupted", interrupt_at(place, call)] += 1
        finally:
            self.settle()

    def settle(self):
        """Make the calls that complete or undo an interrupted call."""
        self.pool.get_new_blocks(0)
        self.site.list_frozen()
        self.cache.list_indexes()
        for block in list(self.watched):
            if block.block_id not in self.pool.reuse_watchers:
                del self.watched[block]

    def break_acquire(self):
        blocks = [block for block in self.pool.blocks if block.block_hash is not None]
        blocks = self.rng.sample(blocks, min(len(blocks), 3))
        if not blocks:
            return "nothing"
        before = self.leases.list_leases()
        try:
            self.interrupt(lambda: self.leases.acquire(blocks, self.world.now + 3.0, "a reader"))
        except InvalidBlockError:
            return "refused"
        for lease in self.leases.list_leases():
            if lease not in before:
                self.readers[lease] = Promise(self.device, blocks, "leased to a reader")
        return "lease_blocks"

    def break_release(self):
        if readers := self.list_readers():
            self.interrupt(self.rng.choice(readers).release)
            self.drop_ended_readers()
        return "give back"

    def break_expire(self):
        self.interrupt(self.leases.expire)
        self.drop_ended_readers()
        return "expire"

    def drop_ended_readers(self):
        for lease in list(self.readers):
            if lease.state is not LeaseState.ACTIVE:
                del self.readers[lease]

    def break_flush(self):
        self.interrupt(self.cache.flush)
        return "flush"

    def break_forget(self):
        """Forget content that no open plan reads; some of it, or all, may still be there afterwards."""
        keys = [key for tier in self.cache.tiers for key in tier.list_keys() if key not in self.cache._held]
        if keys:
            self.interrupt(lambda: self.cache.forget(self.rng.sample(keys, min(3, len(keys)))))
        return "forget"
