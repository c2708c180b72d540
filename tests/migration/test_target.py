"""What a target does when one thing goes wrong, one at a time; all at once: `test_transfers_random.py`."""

import pytest
from migration.made_nodes import HASHER, Clock, MadeEngine
from migration.test_transfers_random import Inline

from kv_pool import InvalidArgumentError, StaleLeaseError
from kv_pool.core.kv_events import BlockStored
from kv_pool.errors import (
    InvalidContentError,
    MigrationCancelledError,
    MigrationInDoubtError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.manager.invariants import check_manager
from kv_pool.manager.leases import LeaseState
from kv_pool.migration.invariants import check_pulls
from kv_pool.migration.messages import (
    AcknowledgeTransfer,
    AskChecksums,
    Cancelled,
    CancelTransfer,
    DescribeNode,
    NodeDescription,
    NodeLocation,
    PrepareTransfer,
    RenewLease,
)
from kv_pool.migration.pull_settings import PullSettings
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.source import SourceTransfers, make_epoch
from kv_pool.migration.status import MigrationPhase, MigrationRecord
from kv_pool.migration.subjects import PrefixSubject, SequenceSubject
from kv_pool.migration.target import Pull
from kv_pool.migration.transfer_backend import ReadCount

LEASE_S = 10.0
LOST = PeerUnavailableError("lost")


class Bench:
    """A source with a request of three blocks, a target, and a line between them that does as it is told.

    `trouble` says by kind of message what befalls one after the other: an error instead of sending it, or
    something that happens after it was answered. `at_phase` says what happens when a phase is entered.
    """

    def __init__(self, is_move=True, subject=None, hold_s=0.0):
        self.clock = Clock()
        self.source, self.target = MadeEngine(16, self.clock), MadeEngine(16, self.clock)
        self.source.start("r", range(10))
        self.start_source("1")
        self.asked = []
        self.trouble = {}
        self.read_trouble = []
        self.readers = []
        self.unsettled = []
        self.phases = []
        self.at_phase = {}
        self.pull = Pull(
            PullSettings(
                "target",
                self.target.site,
                LEASE_S,
                self.clock,
                self.clock,
                RateLimit(0.0, self.clock),
                Inline(),
                self.note,
                lambda lease, reader: self.unsettled.append((lease, reader)),
            ),
            self,
            MigrationRecord(b"sixteen letters!", "in", "source", subject or SequenceSubject("r"), is_move),
            RateLimit(0.0, self.clock),
            hold_s,
        )

    def start_source(self, life):
        self.epoch = make_epoch("source", life)
        self.transfers = SourceTransfers(self.source.site, "source", self.epoch, LEASE_S, self.clock)

    def note(self, pull):
        self.phases.append(pull.status.phase)
        self.at_phase.get(pull.status.phase, lambda: None)()

    def call(self, message):
        self.asked.append(type(message))
        troubles = self.trouble.get(type(message), [])
        trouble = troubles.pop(0) if troubles else None
        if isinstance(trouble, Exception):
            raise trouble
        reply = self.answer(message)
        if trouble is not None:
            trouble()
        return reply

    def answer(self, message):
        match message:
            case DescribeNode():
                layout = self.source.site.layout
                return NodeDescription("source", self.epoch, layout, 0, 0, {}, NodeLocation())
            case PrepareTransfer():
                return self.transfers.prepare(message)
            case AskChecksums():
                return self.transfers.compute_checksums(message)
            case RenewLease():
                return self.transfers.renew(message)
            case AcknowledgeTransfer():
                return self.transfers.acknowledge(message)
            case CancelTransfer():
                return self.transfers.cancel(message)

    def take_reader(self, source):
        self.readers.append(Reader(self))
        return self.readers[-1]

    def leave_reader(self, source, reader):
        reader.was_left = True

    def check(self, at_source, at_target, num_free=None):
        for engine, is_here in ((self.source, at_source), (self.target, at_target)):
            assert engine.manager.holds_blocks("r") == is_here
            check_manager(engine.manager, engine.requests.values())
            if is_here:
                engine.check_bytes("r")
        check_pulls(self.target.site, [self.pull], [lease for lease, _ in self.unsettled])
        if num_free is not None:
            assert self.target.pool.get_num_free_blocks() == num_free


class Reader:
    def __init__(self, bench):
        self.bench = bench
        self.settled = True
        self.is_closed = self.was_left = False

    def read(self, transfer_id, remote_ids, local_ids, deadline):
        bench = self.bench
        bench.transfers.check_lent(transfer_id, remote_ids)
        trouble = bench.read_trouble.pop(0) if bench.read_trouble else None
        for remote_id, local_id in zip(remote_ids, local_ids, strict=True):
            bench.target.storage.write_block(local_id, bench.source.storage.read_block(remote_id))
        if isinstance(trouble, TransferFailedError):
            self.settled = trouble.is_settled
            raise trouble
        if trouble is not None:
            trouble(local_ids)
        return ReadCount(len(local_ids) * bench.target.storage.block_bytes, 1)

    def is_settled(self):
        return self.settled

    def close(self):
        self.is_closed = True


def test_all_is_well():
    bench = Bench()
    bench.pull.run()
    assert list(dict.fromkeys(bench.phases)) == [
        MigrationPhase.PREPARING,
        MigrationPhase.READING,
        MigrationPhase.INSERTING,
        MigrationPhase.ACKNOWLEDGING,
        MigrationPhase.DONE,
    ]
    assert bench.asked == [DescribeNode, PrepareTransfer, AskChecksums, AcknowledgeTransfer]
    assert bench.readers[0].was_left
    assert not bench.readers[0].is_closed
    bench.check(at_source=False, at_target=True, num_free=12)
    stored = [event for event in bench.target.manager.take_events() if isinstance(event, BlockStored)]
    assert len(stored) == 2


@pytest.mark.parametrize("asked", [DescribeNode, PrepareTransfer, AskChecksums])
def test_a_lost_message_is_sent_again_and_a_third_loss_is_the_end(asked):
    bench = Bench()
    bench.trouble = {asked: [LOST, LOST]}
    bench.pull.run()
    bench.check(at_source=False, at_target=True)

    bench = Bench()
    bench.trouble = {asked: [LOST, LOST, LOST]}
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.FAILED
    assert bench.pull.record.error is LOST
    assert (CancelTransfer in bench.asked) == (asked is not DescribeNode)
    bench.check(at_source=True, at_target=False, num_free=15)
    assert bench.transfers.list_lent() == []


def test_where_even_the_cancellation_is_lost_the_lease_ends_by_itself():
    bench = Bench()
    bench.trouble = {AskChecksums: [LOST] * 3, CancelTransfer: [LOST]}
    bench.pull.run()
    bench.check(at_source=False, at_target=False, num_free=15)  # frozen
    bench.clock.now += LEASE_S
    bench.transfers.expire()
    bench.check(at_source=True, at_target=False, num_free=15)


def test_bytes_that_were_changed_are_read_again():
    def change(local_ids):
        bench.target.storage.write_block(local_ids[1], bytes(128))

    bench = Bench()
    bench.read_trouble = [change]
    bench.pull.run()
    assert bench.pull.status.num_bytes == 4 * 128
    bench.check(at_source=False, at_target=True)


def test_bytes_that_are_always_wrong_are_never_used():
    def change(local_ids):
        bench.target.storage.write_block(local_ids[0], bytes(128))

    bench = Bench()
    bench.read_trouble = [change] * 3
    bench.pull.run()
    with pytest.raises(TransferFailedError, match="1 blocks of node 'source' were read 3 times"):
        raise bench.pull.record.error
    assert bench.target.manager.take_events() == []
    bench.check(at_source=True, at_target=False, num_free=15)


def test_another_connection_is_tried_where_one_has_failed():
    bench = Bench()
    bench.read_trouble = [TransferFailedError("cut"), TransferFailedError("cut")]
    bench.pull.run()
    assert [reader.is_closed for reader in bench.readers] == [True, True, False]
    bench.check(at_source=False, at_target=True)


def test_a_reader_that_may_still_write_keeps_its_blocks_from_everybody():
    bench = Bench()
    bench.read_trouble = [TransferFailedError("given up", is_settled=False)]
    bench.pull.run()
    ((lease, reader),) = bench.unsettled
    assert reader.is_closed
    assert len(bench.readers) == 1
    bench.check(at_source=True, at_target=False, num_free=12)
    bench.clock.now += LEASE_S
    bench.target.site.leases.expire()
    assert lease.state is LeaseState.QUARANTINED
    lease.give_back()
    bench.check(at_source=True, at_target=False, num_free=15)
    with pytest.raises(StaleLeaseError):
        lease.give_back()


def test_a_source_that_was_started_anew_while_it_was_asked_is_not_the_one_that_was_described():
    bench = Bench()
    bench.trouble = {DescribeNode: [lambda: bench.start_source("2")]}
    bench.pull.run()
    with pytest.raises(PeerUnavailableError, match="was restarted"):
        raise bench.pull.record.error
    bench.check(at_source=True, at_target=False, num_free=15)


def test_a_lease_that_ended_is_noticed_at_the_latest_when_it_is_acknowledged():
    bench = Bench()

    def sleep_too_long(local_ids):
        bench.clock.now += LEASE_S
        bench.transfers.expire()
        bench.target.site.leases.expire()  # ours is over, too, and quarantined

    bench.read_trouble = [sleep_too_long]
    bench.pull.run()
    assert isinstance(bench.pull.record.error, StaleTransferError)
    bench.check(at_source=True, at_target=False, num_free=15)


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
@pytest.mark.parametrize(
    "phase", [MigrationPhase.READING, MigrationPhase.INSERTING, MigrationPhase.ACKNOWLEDGING]
)
def test_content_that_its_source_reports_wrong_meanwhile_is_not_hit(phase, is_move):
    """It was delivered, and requests at the target began with it."""
    prefix = PrefixSubject(tuple(HASHER.hash_blocks(range(8))))
    bench = Bench(is_move, None if is_move else prefix, hold_s=5.0)
    bench.at_phase = {phase: lambda: bench.source.manager.report_invalid_blocks([2])}
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.FAILED
    assert isinstance(bench.pull.record.error, InvalidContentError)
    assert bench.target.check_prefix(range(10)) == 0
    assert bench.source.manager.get_computed_blocks(bench.source.requests["r"]).num_tokens == 4
    bench.check(at_source=True, at_target=False, num_free=15)
    assert bench.transfers.list_lent() == []


def test_a_heartbeat_finds_out_that_content_was_reported_wrong():
    bench = Bench(is_move=False)
    bench.at_phase = {
        MigrationPhase.READING: lambda: (
            bench.source.manager.report_invalid_blocks([1]),
            bench.pull.renew(),
        )
    }
    bench.pull.run()
    assert isinstance(bench.pull.record.error, InvalidContentError)
    assert bench.readers[0].is_closed
    bench.check(at_source=True, at_target=False, num_free=15)


def test_what_was_inserted_stays_cached_where_the_source_keeps_the_request():
    bench = Bench()
    take_back = CancelTransfer(b"sixteen letters!")
    bench.at_phase = {MigrationPhase.ACKNOWLEDGING: lambda: bench.transfers.cancel(take_back)}
    bench.pull.run()
    assert isinstance(bench.pull.record.error, StaleTransferError)
    bench.check(at_source=True, at_target=False, num_free=15)
    assert bench.target.check_prefix(range(10)) == 2


# ---- in doubt ------------------------------------------------------------------------------------


def test_a_move_without_an_answer_is_in_doubt_until_there_is_one():
    bench = Bench()
    bench.trouble = {AcknowledgeTransfer: [LOST, LOST]}
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.IN_DOUBT
    assert isinstance(bench.pull.record.error, MigrationInDoubtError)
    assert bench.pull.cancel() is False
    bench.check(at_source=False, at_target=False, num_free=12)  # held here, frozen there
    bench.pull.resolve()
    assert bench.pull.status.phase is MigrationPhase.IN_DOUBT
    bench.pull.resolve()
    assert bench.pull.status.phase is MigrationPhase.DONE
    assert bench.pull.record.error is None
    bench.check(at_source=False, at_target=True)
    bench.pull.resolve()
    assert bench.asked.count(AcknowledgeTransfer) == 3


def test_an_answer_that_was_lost_is_given_again():
    def lose():
        raise LOST

    bench = Bench()
    bench.trouble = {AcknowledgeTransfer: [lose]}
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.IN_DOUBT
    bench.check(at_source=False, at_target=False)  # given up there already
    bench.clock.now += 5 * LEASE_S
    bench.transfers.expire()
    bench.pull.resolve()
    bench.check(at_source=False, at_target=True)


def test_in_doubt_for_longer_than_the_lease_the_source_has_kept_it():
    bench = Bench()
    bench.trouble = {AcknowledgeTransfer: [LOST]}
    bench.pull.run()
    bench.clock.now += LEASE_S
    bench.transfers.expire()
    bench.pull.resolve()
    assert bench.pull.status.phase is MigrationPhase.FAILED
    assert isinstance(bench.pull.record.error, StaleTransferError)
    bench.check(at_source=True, at_target=False, num_free=15)


def test_in_doubt_about_a_source_that_was_started_anew_it_is_ours():
    bench = Bench()
    bench.trouble = {AcknowledgeTransfer: [LOST]}
    bench.pull.run()
    bench.source = MadeEngine(16, bench.clock)
    bench.start_source("2")
    bench.pull.resolve()
    assert bench.pull.status.phase is MigrationPhase.DONE
    bench.check(at_source=False, at_target=True)


def test_somebody_who_knows_that_the_source_is_gone_may_say_so():
    bench = Bench()
    assert bench.pull.assume_source_gone() is False
    bench.trouble = {AcknowledgeTransfer: [LOST]}
    bench.pull.run()
    assert bench.pull.assume_source_gone() is True
    assert bench.pull.status.phase is MigrationPhase.DONE
    assert bench.target.manager.holds_blocks("r")
    assert bench.pull.assume_source_gone() is False


def test_who_stops_asking_keeps_a_cached_copy_and_not_the_request():
    bench = Bench()
    bench.trouble = {AcknowledgeTransfer: [LOST]}
    bench.pull.run()
    assert bench.pull.give_up_doubt() is True
    assert bench.pull.status.phase is MigrationPhase.FAILED
    assert bench.target.check_prefix(range(10)) == 2
    bench.check(at_source=False, at_target=False, num_free=15)
    assert bench.pull.give_up_doubt() is False


@pytest.mark.parametrize("trouble", [LOST, StaleTransferError("over")])
def test_a_copy_is_ours_whatever_becomes_of_the_acknowledgement(trouble):
    bench = Bench(is_move=False)
    bench.trouble = {AcknowledgeTransfer: [trouble]}
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.DONE
    bench.check(at_source=True, at_target=True)


# ---- what has arrived is held ----------------------------------------------------------------------


def take_all_that_is_free(engine):
    """Whatever is cached and free loses its content."""
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.pool.free_blocks(taken)


@pytest.mark.parametrize("end", ["released", "expired", "released later"])
def test_what_has_arrived_can_not_be_evicted_as_long_as_it_is_held(end):
    bench = Bench(is_move=False, subject=PrefixSubject(tuple(HASHER.hash_blocks(range(10)))), hold_s=5.0)
    bench.pull.run()
    bench.check(at_source=True, at_target=False, num_free=13)
    bench.clock.now += 4.9
    bench.target.site.leases.expire()
    take_all_that_is_free(bench.target)
    assert bench.pull.is_holding()
    assert bench.target.check_prefix(range(10)) == 2
    if end == "released":
        bench.pull.release()
    else:
        bench.clock.now += 0.2
        (lease,) = bench.target.site.leases.expire()
        assert lease is bench.pull.held
    if end == "released later":
        bench.pull.release()
    assert not bench.pull.is_holding()
    bench.pull.release()
    bench.check(at_source=True, at_target=False, num_free=15)
    assert bench.target.check_prefix(range(10)) == 2
    take_all_that_is_free(bench.target)
    assert bench.target.check_prefix(range(10)) == 0


def test_a_request_that_starts_with_what_is_held_keeps_it():
    bench = Bench(is_move=False, subject=PrefixSubject(tuple(HASHER.hash_blocks(range(10)))), hold_s=5.0)
    bench.pull.run()
    bench.target.start("next", range(10))
    bench.pull.release()
    take_all_that_is_free(bench.target)
    bench.check(at_source=True, at_target=False, num_free=12)
    bench.target.check_bytes("next")


def test_what_was_released_before_it_arrived_is_not_held():
    bench = Bench(is_move=False, hold_s=5.0)
    bench.at_phase = {MigrationPhase.READING: bench.pull.release}
    bench.pull.run()
    assert bench.pull.held is None
    bench.check(at_source=True, at_target=True, num_free=12)


def test_nothing_is_held_of_a_migration_that_failed_or_had_no_blocks():
    bench = Bench(hold_s=5.0)
    bench.trouble = {AskChecksums: [LOST, LOST, LOST]}
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.FAILED
    bench.check(at_source=True, at_target=False, num_free=15)
    nothing = Bench(is_move=False, subject=PrefixSubject(()), hold_s=5.0)
    nothing.pull.run()
    assert nothing.pull.status.phase is MigrationPhase.DONE
    assert not nothing.pull.is_holding()


# ---- others --------------------------------------------------------------------------------------


def test_a_scheduler_that_does_not_take_the_request_over_ends_the_migration():
    bench = Bench(hold_s=5.0)

    def refuse(request_id, state):
        raise KeyError(request_id)

    bench.target.take_over = refuse
    bench.pull.run()
    assert bench.pull.status.phase is MigrationPhase.FAILED
    assert isinstance(bench.pull.record.error, KeyError)
    assert not bench.target.manager.holds_blocks("r")
    assert bench.target.site.leases.list_leases() == []
    assert bench.target.pool.get_num_free_blocks() == 15


def test_cancelled_before_it_began_it_does_nothing():
    bench = Bench()
    assert bench.pull.cancel() is True
    bench.pull.run()
    assert isinstance(bench.pull.record.error, MigrationCancelledError)
    assert PrepareTransfer not in bench.asked
    bench.check(at_source=True, at_target=False, num_free=15)


def test_a_source_that_says_it_is_over_is_believed_at_the_next_batch():
    bench = Bench()

    def renew_too_late(local_ids):
        bench.transfers.cancel(CancelTransfer(b"sixteen letters!"))
        bench.pull.renew()

    bench.read_trouble = [renew_too_late]
    bench.trouble = {AskChecksums: []}
    bench.pull.run()
    assert isinstance(bench.pull.record.error, StaleTransferError)
    assert AcknowledgeTransfer not in bench.asked
    bench.check(at_source=True, at_target=False, num_free=15)


def test_renewing_prolongs_both_leases():
    bench = Bench()

    def take_long(local_ids):
        for _ in range(5):
            bench.clock.now += LEASE_S - 1
            bench.pull.renew()
            bench.transfers.expire()
            assert bench.target.site.leases.expire() == []

    bench.read_trouble = [take_long]
    bench.pull.run()
    bench.check(at_source=False, at_target=True)


def test_a_source_that_answers_something_else_is_not_believed():
    class Confused(Bench):
        def answer(self, message):
            reply = super().answer(message)
            return Cancelled() if isinstance(message, PrepareTransfer) else reply

    bench = Confused()
    bench.pull.run()
    with pytest.raises(Exception, match="has answered PrepareTransfer with Cancelled"):
        raise bench.pull.record.error
    bench.check(at_source=True, at_target=False, num_free=15)


def test_a_state_that_makes_no_sense_is_refused():
    bench = Bench()
    offered = bench.source.site.select(SequenceSubject("r"), True).offered
    for state in (b"", b"\x93", bench.source.site.select(SequenceSubject("r"), True).state[:-9]):
        with pytest.raises(InvalidArgumentError):
            bench.target.site.take_room(SequenceSubject("r"), offered, state)
    whole = bench.source.site.select(SequenceSubject("r"), True)
    with pytest.raises(InvalidArgumentError, match="here there are 1 groups, and 2 blocks were offered"):
        bench.target.site.take_room(SequenceSubject("r"), offered[:2], whole.state)
    bench.check(at_source=True, at_target=False, num_free=15)
