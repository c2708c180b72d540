"""`SourceRole`: a node as the source of migrations: its transfers, and a table of their expected replies."""

from lives.promises import Promise

from kv_pool.errors import InvalidArgumentError, InvalidContentError, KVPoolError, StaleTransferError
from kv_pool.migration.messages import (
    Acknowledged,
    AcknowledgeTransfer,
    AskChecksums,
    BlocksSubject,
    Cancelled,
    CancelTransfer,
    DescribeNode,
    NodeDescription,
    NodeLocation,
    PrepareTransfer,
    RenewLease,
)
from kv_pool.migration.source import SourceTransfers, TransferState, make_incarnation

LEASE_S = 5.0
ACKNOWLEDGED, OVER = "acknowledged", "over"


class Departure:
    """A leased transfer, its blocks, and the sequence that it moves; None for a copy."""

    def __init__(self, node, transfer):
        self.lease = transfer.lease
        self.blocks = list(transfer.selection.blocks)
        self.sequence = None
        if self.lease is not None:
            node.readers[self.lease] = Promise(node.device, self.blocks, "offered to another node")
        if transfer.message.is_move:
            self.sequence = node.world.travelling[transfer.message.subject.sequence_id]
            node.begin_leaving(self.sequence)
            self.frozen = node.expect(node.device, self.blocks, "of a frozen sequence")

    def end(self, node, was_acknowledged):
        node.readers.pop(self.lease, None)
        if self.sequence is not None:
            node.end(self.frozen)
            assert node.has_sequence(self.sequence) is not was_acknowledged
            (node.forget_departed if was_acknowledged else node.take_back)(self.sequence)


class SourceRole:
    """See above.

    Attributes:
        departures: the transfers leased now, by transfer id.
        states: by transfer id, the deadline of its lease, or its outcome.
        late: messages that are still on their way.
    """

    def __init__(self, node):
        self.node, self.world = node, node.world
        self.incarnation = make_incarnation(node.name, "1")
        self.transfers = SourceTransfers(
            node.site, node.name, self.incarnation, LEASE_S, node.world.read_clock, self.note_change
        )
        self.departures, self.states, self.late = {}, {}, []

    def note_change(self, transfer):
        transfer_id = transfer.message.transfer_id
        outcome = self.transfers.find_outcome(transfer_id)
        if outcome is None:
            self.departures[transfer_id] = Departure(self.node, transfer)
        else:
            self.departures.pop(transfer_id).end(self.node, outcome.state is TransferState.ACKNOWLEDGED)

    def list_copied(self):
        """Return the blocks that are leased to be copied, not moved."""
        copied = [one for one in self.departures.values() if one.sequence is None]
        return [block for departure in copied for block in departure.blocks]

    def find_state(self, transfer_id):
        """Return a deadline in the future, ACKNOWLEDGED, OVER, or None if unknown."""
        state = self.states.get(transfer_id)
        if isinstance(state, float) and state <= self.world.now:
            self.states[transfer_id] = state = OVER
        return state

    def deliver(self, message):
        """Answer a message. The next check of the life raises any contradiction to the table."""
        try:
            return self.answer(message)
        except Exception as error:
            self.world.note_error(error)
            raise

    def answer(self, message):
        node, transfers = self.node, self.transfers
        if isinstance(message, DescribeNode):
            return NodeDescription(node.name, self.incarnation, node.site.layout, 0, 0, {}, NodeLocation())
        transfer_id = message.transfer_id
        state = self.find_state(transfer_id)
        is_leased = isinstance(state, float)
        is_whole = self.is_whole(transfer_id)
        answer = {
            PrepareTransfer: self.prepare,
            AskChecksums: transfers.compute_checksums,
            RenewLease: transfers.renew,
            AcknowledgeTransfer: transfers.acknowledge,
            CancelTransfer: transfers.cancel,
        }[type(message)]
        try:
            reply = answer(message)
        except InvalidContentError:
            assert state != ACKNOWLEDGED
            if isinstance(message, AcknowledgeTransfer):
                self.states[transfer_id] = OVER
            raise
        except StaleTransferError:
            assert not is_leased, f"{message} was refused, and is about blocks that are leased"
            assert not (isinstance(message, AcknowledgeTransfer) and state == ACKNOWLEDGED)
            raise
        match message:
            case PrepareTransfer() | RenewLease():
                assert is_leased or (state is None and isinstance(message, PrepareTransfer))
                self.states[transfer_id] = self.world.now + LEASE_S
            case AskChecksums():
                assert is_leased
            case AcknowledgeTransfer():
                assert reply == Acknowledged()
                assert state == ACKNOWLEDGED or (is_leased and is_whole), f"{message} was accepted"
                self.states[transfer_id] = ACKNOWLEDGED
            case CancelTransfer():
                assert reply == Cancelled(is_acknowledged=state == ACKNOWLEDGED)
                if state != ACKNOWLEDGED:
                    self.states[transfer_id] = OVER
        return reply

    def is_whole(self, transfer_id):
        """Return True if no content of a leased transfer was found invalid."""
        departure = self.departures.get(transfer_id)
        if departure is None or departure.lease not in self.node.readers:
            return True
        return len(self.node.readers[departure.lease].entries) == len(departure.blocks)

    def prepare(self, message):
        """Let the engine make its copies first. Offers running sequences and blocks of no sequence."""
        if message.transfer_id not in self.states:
            sequence = self.world.travelling.get(getattr(message.subject, "sequence_id", None))
            if sequence is not None and sequence not in self.node.running:
                raise InvalidArgumentError(f"sequence {sequence.name} does not run here")
            if isinstance(message.subject, BlocksSubject) and not self.node.may_copy(
                message.subject.block_ids
            ):
                raise InvalidArgumentError("the blocks are in a sequence, and would come with it")
            self.node.run([])
        return self.transfers.prepare(message)

    def expire(self):
        self.transfers.expire()

    def close(self):
        """Let late messages arrive, and end the remaining leases."""
        while self.late:
            self.deliver_late()
        for transfer_id in list(self.departures):
            self.deliver(CancelTransfer(transfer_id, "the source stops"))

    def deliver_late(self):
        message = self.late.pop(self.world.rng.randrange(len(self.late)))
        try:
            self.deliver(message)
        except KVPoolError as error:
            return type(message).__name__, type(error).__name__
        return type(message).__name__
