"""`Moving`: one migration between two nodes, a step at a time, by the calls that a migrator makes.

It reads and writes at the block ids of its beginning, as a network card does. It breaks off when the source's
lease has expired, when its own lease to write is quarantined, when the target has no room, and at random; its
last bytes may arrive after that.
"""

from lives.contents import HASHER
from lives.promises import Promise

from kv_pool.errors import InvalidArgumentError, OutOfBlocksError
from kv_pool.manager.leases import LeaseState
from kv_pool.migration.subjects import BlocksSubject, PrefixSubject, SequenceSubject


class Moving:
    """See above. `steps` are the steps to come; `sequence` is None where blocks are copied, not moved."""

    def __init__(self, source, target, subject, sequence):
        self.source, self.target, self.subject, self.sequence = source, target, subject, sequence
        self.world = source.world
        self.selection = source.site.select(subject, sequence is not None)
        blocks = self.selection.blocks
        deadline = self.world.now + self.world.rng.choice((3.0, 9.0, 30.0))
        self.lease = source.leases.lend(blocks, deadline, "the target") if blocks else None
        self.frozen = None
        if self.lease is not None:
            source.readers[self.lease] = Promise(source.device, blocks, "offered to another node")
        if sequence is not None:
            source.site.freeze(subject)
            source.begin_leaving(sequence)
            self.frozen = source.expect(source.device, blocks, "of a frozen sequence")
        self.room = self.writer = self.arriving = None
        self.pairs, self.ids = [], []
        self.was_inserted = self.was_acknowledged = False
        self.steps = [self.take_room, self.read, self.read, self.insert, self.acknowledge, self.adopt]

    @property
    def is_over(self):
        return not self.steps

    @property
    def has_expired(self):
        return self.lease is not None and self.lease.state is LeaseState.EXPIRED

    @property
    def is_void(self):
        """Return True if the bytes at the source, or the lease to write, are not valid any more."""
        if self.has_expired or (self.writer is not None and self.writer.is_late):
            return True
        if self.lease is None or self.was_inserted:
            return False
        return len(self.source.readers[self.lease].entries) < len(self.selection.blocks)

    def go_on(self):
        """Make the next step, or break off."""
        step = self.steps[0]
        if not self.was_acknowledged and self.is_void:
            return self.break_off()
        try:
            step()
        except OutOfBlocksError:
            return self.break_off()
        self.steps.pop(0)
        if self.is_over:
            self.world.tally["migrated", type(self.subject).__name__] += 1
        return step.__name__

    def take_room(self):
        site, device = self.target.site, self.target.device
        offered = self.selection.offered
        room = self.room = site.take_room(self.subject, offered, self.selection.state)
        device.pool.store_pending()
        missing = [room.blocks[at] for at in room.missing]
        present = [block for at, block in enumerate(room.blocks) if at not in room.missing]
        self.world.tally["present"] += len(present)
        self.ids = [block.block_id for block in room.blocks]
        self.arriving = self.target.expect(device, present, "room of a migration")
        self.pairs = [(offered[at].block_id, room.blocks[at].block_id) for at in room.missing]
        if missing:
            self.writer = self.target.begin_writing(missing, "the pull")
            self.writer.owed = None  # written here, not whenever a node's writers go on

    def read(self):
        """Read the first half of the blocks, then the others."""
        part = self.pairs[::2] if len(self.steps) == 5 else self.pairs[1::2]
        for source_id, target_id in part:
            self.writer.write_row(target_id, self.source.device.kv[source_id])

    def insert(self):
        if self.writer is not None:
            self.writer.end()
            self.writer = None
        self.target.site.insert(self.room)
        self.was_inserted = True
        self.target.end(self.arriving)
        self.arriving = self.target.expect(self.target.device, self.room.blocks, "has arrived")

    def acknowledge(self):
        if self.sequence is not None:
            self.source.end(self.frozen)
            self.source.site.release(self.subject, "target")
            self.source.forget_departed(self.sequence)
        self.was_acknowledged = True
        self.give_lease_back()

    def adopt(self):
        room = self.room
        if room.blocks and self.world.chance(0.5):
            lease = self.target.leases.lend(room.blocks, self.world.now + 5.0, "hold_s")
            whole = [block for block in room.blocks if block.block_hash is not None]
            self.target.readers[lease] = Promise(self.target.device, whole, "held after a migration")
        self.target.end(self.arriving)
        self.target.site.adopt(room)
        self.room = None
        if self.sequence is not None:
            self.target.take_over(self.sequence)

    def break_off(self):
        """Undo the migration at both nodes; its last bytes may still be under way to the target."""
        if self.was_acknowledged:  # the source has given up its own: it is done
            return "too late"
        if self.writer is not None:
            self.target.write_late(self.writer)
            self.writer = None
        if self.room is not None:
            self.target.end(self.arriving)
            self.target.site.leave(self.room)
            self.room = None
        if self.sequence is not None:
            self.source.end(self.frozen)
            self.source.site.thaw(self.subject)
            self.source.take_back(self.sequence)
        self.give_lease_back()
        self.steps.clear()
        self.world.tally["broken off"] += 1
        return "broken off"

    def give_lease_back(self):
        if self.lease is not None and not self.has_expired:
            self.source.readers.pop(self.lease)
            self.lease.give_back()

    def list_room(self):
        return [] if self.room is None else self.room.blocks


def begin(source, target):
    """Begin to migrate a sequence, a prefix or blocks by id; None if there is nothing to migrate."""
    rng, world = source.rng, source.world
    way = rng.choice(("sequence", "sequence", "prefix", "blocks"))
    sequence = None
    if way == "sequence":
        sequence = source.draw_departure()
        if sequence is None or target.has_sequence(sequence):
            return None
        subject = SequenceSubject(source.get_id(sequence))
    elif way == "prefix":
        subject = PrefixSubject(tuple(HASHER.hash_blocks(rng.choice(world.prompts))))
    else:
        cached = source.list_copied()
        blocks = rng.sample(cached, min(3, len(cached)))
        ids, generations = [block.block_id for block in blocks], [block.generation for block in blocks]
        subject = BlocksSubject(tuple(ids), tuple(generations))
    try:
        source.run([])
        moving = Moving(source, target, subject, sequence)
    except InvalidArgumentError:
        world.tally["not migrated"] += 1
        if sequence is not None and sequence not in source.running:
            raise
        return None
    return moving
