"""`Moving`: one migration between two nodes, by a `Pull` that goes on from message to message."""

from types import SimpleNamespace

from lives.contents import HASHER
from lives.network import Link
from lives.promises import Promise, Writer
from lives.source_role import ACKNOWLEDGED, LEASE_S
from lives.turns import Turns
from migration.made_nodes import make_pull

from kv_pool.errors import InvalidContentError
from kv_pool.migration.messages import (
    BlocksSubject,
    CancelTransfer,
    MigrationPhase,
    PrefixSubject,
    PullSubject,
    SequenceSubject,
)


class Moving:
    """A pull, and the expectations of its target.

    Attributes:
        sequence: the moved sequence; None for copied blocks.
        reserved: the blocks that the pull has reserved; [] for none.
        arriving: a promise for the blocks already present, and after the insertion for all.
        is_abandoned: the target has stopped asking; the sequence may be lost.
    """

    def __init__(self, source, target, subject, sequence):
        self.source, self.target, self.subject, self.sequence = source, target, subject, sequence
        self.world = world = source.world
        if sequence is not None:
            world.travelling[subject.sequence_id] = sequence
        wanted = PullSubject(world.rng.randbytes(16), subject, sequence is not None, source.name)
        self.hold_s = world.rng.choice((0.0, 5.0))
        self.pull = make_pull(
            target.site,
            Link(self),
            wanted,
            self.hold_s,
            LEASE_S,
            world.read_clock,
            lambda pull: self.observe(),
            SimpleNamespace(append=self.note_unsettled),
            target.name,
        )
        self.pull._calls.wait = lambda seconds: None
        self.reserved, self.writer, self.arriving = [], None, None
        self.is_inserted = self.is_finished = self.is_abandoned = False
        self.turns = Turns(self.pull.run)

    @property
    def phase(self):
        return self.pull.status.phase

    @property
    def is_over(self):
        return self.is_finished and self.turns.is_over

    @property
    def is_in_doubt(self):
        return self.phase is MigrationPhase.IN_DOUBT

    def go_on(self):
        """Run to the next message; ask again if in doubt."""
        if self.turns.is_over:
            self.turns = Turns(self.pull.resolve)
        self.turns.go_on()
        self.observe()
        return self.phase.value

    def break_off(self):
        """Cancel at one of the nodes; or stop asking."""
        if self.is_in_doubt and self.world.chance(0.2):
            self.is_abandoned = True
            return "abandoned", self.pull.abandon_doubt()
        if self.world.chance(0.5):
            return "cancelled", self.pull.cancel()
        return self.source.source_role.deliver(
            CancelTransfer(self.pull.transfer_id, "the source wants them back")
        )

    # ---- what the pull has done ------------------------------------------------------------------

    def observe(self):
        """Bring the expectations up to date; at each change and after each turn."""
        pull, target = self.pull, self.target
        reservation = pull.reservation
        missing = [] if reservation is None else [reservation.blocks[at] for at in reservation.missing]
        is_writing = bool(missing) and not pull.is_inserted
        if self.writer is not None and not is_writing:
            target.writers.remove(self.writer)
            self.writer = None
        elif self.writer is None and is_writing:
            self.writer = Writer(target, SimpleNamespace(blocks=missing, state=None))
        if reservation is None:
            self.release_reserved()
        elif self.arriving is None:
            self.reserved = list(reservation.blocks)
            present = [block for at, block in enumerate(reservation.blocks) if at not in reservation.missing]
            self.world.tally["present"] += len(present)
            self.arriving = target.expect(target.device, present, "reserved by a migration")
        elif not self.is_inserted and self.phase in (MigrationPhase.ACKNOWLEDGING, MigrationPhase.IN_DOUBT):
            self.is_inserted = True
            target.end(self.arriving)
            self.arriving = target.expect(target.device, self.reserved, "has arrived")
        if self.phase.is_ended and not self.is_finished:
            self.is_finished = True
            self.finish()

    def release_reserved(self):
        if self.arriving is not None:
            self.target.end(self.arriving)
            self.arriving, self.reserved = None, []

    def finish(self):
        """Check that the sequence is at one node, and let the target run it if it is there."""
        pull, tally = self.pull, self.world.tally
        was_acknowledged = self.source.source_role.find_state(pull.transfer_id) == ACKNOWLEDGED
        if self.phase is not MigrationPhase.DONE:
            tally["broken off"] += 1
            self.world.note_error(pull.error)
            if isinstance(pull.error, InvalidContentError):
                self.target.note_evicting()
            if self.sequence is not None and was_acknowledged:
                assert self.is_abandoned, "the sequence is at neither node"
                tally["lost"] += 1
            return
        tally["migrated", type(self.subject).__name__] += 1
        assert pull.is_holding() == bool(self.hold_s and pull.new_ids)
        if pull.is_holding():
            whole = [block for block in pull.held.blocks if block.block_hash is not None]
            self.target.readers[pull.held] = Promise(self.target.device, whole, "held after a migration")
            self.target.holding.append(pull)
        if self.sequence is not None:
            assert was_acknowledged, "the sequence is at both nodes"
            self.target.running.append(self.sequence)

    def note_unsettled(self, both):
        """The last bytes arrive after the pull has failed."""
        self.writer.lease, _ = both
        self.target.write_late(self.writer)
        self.writer = None


def begin(source, target):
    """Begin to migrate a sequence, a prefix or blocks by id; None if there is nothing to migrate."""
    rng, world = source.rng, source.world
    way = rng.choice(("sequence", "sequence", "sequence", "prefix", "blocks"))
    sequence = None
    if way == "sequence":
        sequence = source.draw_departure()
        if sequence is None:
            return None
        subject = SequenceSubject(sequence.name)
    elif way == "prefix":
        subject = PrefixSubject(tuple(HASHER.hash_blocks(rng.choice(world.prompts))))
    else:
        cached = source.list_copied()
        blocks = rng.sample(cached, min(3, len(cached)))
        ids, generations = [block.block_id for block in blocks], [block.generation for block in blocks]
        subject = BlocksSubject(tuple(ids), tuple(generations))
    return Moving(source, target, subject, sequence)
