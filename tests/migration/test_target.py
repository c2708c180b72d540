"""A target with one fault at a time; `test_transfers_random.py` combines faults."""

import msgspec
import pytest
from migration.made_nodes import HASHER, Clock, MadeEngine, answer_as_source, make_pull

from kv_pool import InvalidArgumentError
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
from kv_pool.migration import messages
from kv_pool.migration.invariants import check_pulls
from kv_pool.migration.messages import MigrationPhase, PrefixSubject, SequenceSubject
from kv_pool.migration.source import SourceTransfers, make_incarnation
from kv_pool.migration.transfer_backend import ReadCount
from kv_pool.reports.holds import list_holds

LEASE_S = 10.0
LOST = PeerUnavailableError("lost")


class Bench:
    """A source with a request of three blocks, a target, and a connection with scripted faults.

    `trouble` maps a message class to a list of faults, one per message: an error raised instead of sending
    it, or a function called after the answer. `at_phase` maps a phase to a function called on entering it.
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
        wanted = messages.PullSubject(b"sixteen letters!", subject or SequenceSubject("r"), is_move, "source")
        self.pull = make_pull(
            self.target.site,
            self,
            wanted,
            hold_s,
            LEASE_S,
            self.clock,
            self.note,
            self.unsettled,
        )

    def start_source(self, life):
        self.incarnation = make_incarnation("source", life)
        self.transfers = SourceTransfers(self.source.site, "source", self.incarnation, LEASE_S, self.clock)

    def note(self, pull):
        self.phases.append(pull.status.phase)
        self.at_phase.get(pull.status.phase, lambda: None)()

    def call(self, name, message, timeout_s):
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
        return answer_as_source(self.transfers, message, self.source.site)

    def take_reader(self, source, only):
        self.readers.append(Reader(self))
        return self.readers[-1]

    def return_reader(self, source, reader):
        reader.was_left = True

    def check(self, at_source, at_target, num_free=None):
        for engine, is_here in ((self.source, at_source), (self.target, at_target)):
            assert engine.manager.holds_blocks("r") == is_here
            check_manager(engine.manager, engine.requests.values())
            if is_here:
                engine.check_bytes("r")
        check_pulls(self.target.site, [self.pull], [hold for hold, _ in self.unsettled])
        if num_free is not None:
            assert self.target.pool.get_num_free_blocks() == num_free


class Reader:
    def __init__(self, bench):
        self.bench = bench
        self.settled = True
        self.is_closed = self.was_left = False

    def read(self, transfer_id, remote_ids, local_ids, deadline):
        bench = self.bench
        bench.transfers.check_leased(transfer_id, remote_ids)
        trouble = bench.read_trouble.pop(0) if bench.read_trouble else None
        for remote_id, local_id in zip(remote_ids, local_ids, strict=True):
            bench.target.storage.write_block(local_id, bench.source.storage.read_block(remote_id))
        if isinstance(trouble, TransferFailedError):
            self.settled = str(trouble) != "in flight"
            raise trouble
        if trouble is not None:
            trouble(local_ids)
        return ReadCount(len(local_ids) * bench.target.storage.block_bytes, 1)

    def is_settled(self):
        return self.settled

    def close(self):
        self.is_closed = True


def test_a_pull_without_faults_succeeds():
    bench = Bench()
    bench.pull.run()
    assert list(dict.fromkeys(bench.phases)) == [
        MigrationPhase.PREPARING,
        MigrationPhase.READING,
        MigrationPhase.INSERTING,
        MigrationPhase.ACKNOWLEDGING,
        MigrationPhase.DONE,
    ]
    assert bench.asked == [
        messages.DescribeNode,
        messages.PrepareTransfer,
        messages.AskChecksums,
        messages.AcknowledgeTransfer,
    ]
    assert bench.readers[0].was_left
    assert not bench.readers[0].is_closed
    bench.check(at_source=False, at_target=True, num_free=12)
    stored = [event for event in bench.target.manager.take_events() if isinstance(event, BlockStored)]
    assert len(stored) == 2


@pytest.mark.parametrize("asked", [messages.DescribeNode, messages.PrepareTransfer, messages.AskChecksums])
def test_a_message_is_retried_twice_then_the_pull_fails(asked):
    bench = Bench()
    bench.trouble = {asked: [LOST, LOST]}
    bench.pull.run()
    bench.check(at_source=False, at_target=True)

    bench = Bench()
    bench.trouble = {asked: [LOST, LOST, LOST]}
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.FAILED
    assert bench.pull.error is LOST
    assert (messages.CancelTransfer in bench.asked) == (asked is not messages.DescribeNode)
    bench.check(at_source=True, at_target=False, num_free=15)
    assert bench.transfers.list_prepared() == []


def test_corrupted_bytes_are_read_again():
    def change(local_ids):
        bench.target.storage.write_block(local_ids[0], bytes(128))

    bench = Bench()
    bench.read_trouble = [change]
    bench.pull.run()
    assert bench.pull.status.num_bytes == 4 * 128
    bench.check(at_source=False, at_target=True)

    bench = Bench()
    bench.read_trouble = [change] * 3
    bench.pull.run()
    with pytest.raises(TransferFailedError, match="1 blocks of node 'source' did not match their checksums"):
        raise bench.pull.error
    assert bench.target.manager.take_events() == []
    bench.check(at_source=True, at_target=False, num_free=15)


def test_a_failed_connection_is_replaced():
    bench = Bench()
    bench.read_trouble = [TransferFailedError("cut"), TransferFailedError("cut")]
    bench.pull.run()
    assert [reader.is_closed for reader in bench.readers] == [True, True, False]
    bench.check(at_source=False, at_target=True)


def test_blocks_of_an_unsettled_reader_stay_in_quarantine():
    bench = Bench()
    bench.read_trouble = [TransferFailedError("in flight")]
    bench.pull.run()
    ((hold, reader),) = bench.unsettled
    assert reader.is_closed
    assert len(bench.readers) == 1
    bench.check(at_source=True, at_target=False, num_free=12)
    (reported,) = list_holds(bench.target.pool).holds
    assert (reported.num_blocks, reported.is_quarantined) == (3, True)
    hold.release()
    bench.unsettled.clear()
    bench.check(at_source=True, at_target=False, num_free=15)


def test_a_source_restart_during_preparation_fails_the_pull():
    bench = Bench()
    bench.trouble = {messages.DescribeNode: [lambda: bench.start_source("2")]}
    bench.pull.run()
    with pytest.raises(PeerUnavailableError, match="restarted during"):
        raise bench.pull.error
    bench.check(at_source=True, at_target=False, num_free=15)


def test_an_expired_lease_is_detected_by_the_acknowledgement():
    bench = Bench()

    def sleep_too_long(local_ids):
        bench.clock.now += LEASE_S
        bench.transfers.expire()

    bench.read_trouble = [sleep_too_long]
    bench.pull.run()
    assert isinstance(bench.pull.error, StaleTransferError)
    bench.check(at_source=True, at_target=False, num_free=15)


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
@pytest.mark.parametrize(
    "phase", [MigrationPhase.READING, MigrationPhase.INSERTING, MigrationPhase.ACKNOWLEDGING]
)
def test_blocks_reported_invalid_by_the_source_are_not_hit(phase, is_move):
    """Regression: the content was cached, and requests at the target used it."""
    prefix = PrefixSubject(tuple(HASHER.hash_blocks(range(8))))
    bench = Bench(is_move, None if is_move else prefix, hold_s=5.0)
    bench.at_phase = {phase: lambda: bench.source.manager.report_invalid_blocks([2])}
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.FAILED
    assert isinstance(bench.pull.error, InvalidContentError)
    assert bench.target.check_prefix(range(10)) == 0
    assert len(bench.target.manager.block_pool.cached_block_hash_to_block) == 0
    assert bench.source.manager.get_computed_blocks(bench.source.requests["r"]).num_tokens == 4
    bench.check(at_source=True, at_target=False, num_free=15)
    assert bench.transfers.list_prepared() == []


def test_a_renewal_detects_invalid_content():
    def report_and_renew():
        bench.source.manager.report_invalid_blocks([1])
        bench.pull.renew()

    bench = Bench(is_move=False)
    bench.at_phase = {MigrationPhase.READING: report_and_renew}
    bench.pull.run()
    assert isinstance(bench.pull.error, InvalidContentError)
    assert bench.readers[0].is_closed
    bench.check(at_source=True, at_target=False, num_free=15)


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
@pytest.mark.parametrize(
    "during", ["READING", "INSERTING", "ACKNOWLEDGING", "ACKNOWLEDGING, invalid", "joining", "arrival"]
)
def test_a_pull_whose_pool_is_interrupted_fails_or_is_adopted_after_the_repair(during, is_move):
    """Regression: it never ended, its blocks stayed reserved, and the source of a move had released them."""

    def interrupt():
        bench.target.pool.is_changing = True
        bench.read_trouble = [TransferFailedError("in flight")] if during == "READING" else []
        bench.source.manager.report_invalid_blocks([2] if "invalid" in during else [])

    bench = Bench(is_move, hold_s=5.0)
    bench.at_phase = {MigrationPhase.__members__.get(during.removesuffix(", invalid")): interrupt}
    with pytest.MonkeyPatch.context() as patch:
        if during == "joining":
            join = (lambda *_: {}["r"]), [[]]
            patch.setattr(bench.target.site.sequences, "make_join", lambda *_: join)
        elif during == "arrival":
            patch.setattr(bench.target, "on_arrived", lambda *_: interrupt() or {}["r"])
        bench.pull.run()
    is_kept = is_move and during in ("ACKNOWLEDGING", "joining", "arrival")
    if is_kept:
        bench.trouble = {messages.AcknowledgeTransfer: [StaleTransferError("forgotten")]}
        bench.pull.resolve()
        assert "reserved until its pool is repaired" in str(bench.pull.error)
    bench.target.manager.repair()
    bench.pull.resolve()
    assert bench.pull.phase is (MigrationPhase.DONE if is_kept else MigrationPhase.FAILED)
    assert bench.target.site.sequences.frozen == {}
    bench.check(not is_kept, is_kept, 12 if is_kept or during == "READING" else 15)


# ---- in doubt ------------------------------------------------------------------------------------


def test_a_move_is_in_doubt_until_the_source_answers():
    bench = Bench()
    bench.trouble = {messages.AcknowledgeTransfer: [LOST, LOST]}
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.IN_DOUBT
    assert isinstance(bench.pull.error, MigrationInDoubtError)
    assert bench.pull.cancel() is False
    bench.check(at_source=False, at_target=False, num_free=12)  # held here, frozen there
    bench.pull.resolve()
    assert bench.pull.phase is MigrationPhase.IN_DOUBT
    bench.pull.resolve()
    assert bench.pull.phase is MigrationPhase.DONE
    assert bench.pull.error is None
    bench.check(at_source=False, at_target=True)
    bench.pull.resolve()
    assert bench.asked.count(messages.AcknowledgeTransfer) == 3


def test_a_lost_acknowledgement_reply_is_repeated():
    def lose():
        raise LOST

    bench = Bench()
    bench.trouble = {messages.AcknowledgeTransfer: [lose]}
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.IN_DOUBT
    bench.check(at_source=False, at_target=False)  # already released there
    bench.clock.now += 5 * LEASE_S
    bench.transfers.expire()
    bench.pull.resolve()
    bench.check(at_source=False, at_target=True)


def let_the_lease_end(bench):
    bench.clock.now += LEASE_S
    bench.transfers.expire()
    bench.pull.resolve()


def restart_the_source(bench):
    bench.source = MadeEngine(16, bench.clock)
    bench.start_source("2")
    bench.pull.resolve()


def assume_it_gone(bench):
    assert bench.pull.assume_source_gone() is True


def abandon(bench):
    assert bench.pull.abandon_doubt() is True


@pytest.mark.parametrize(
    ("resolve", "phase", "at_source"),
    [
        (let_the_lease_end, MigrationPhase.FAILED, True),
        (restart_the_source, MigrationPhase.DONE, False),
        (assume_it_gone, MigrationPhase.DONE, False),
        (abandon, MigrationPhase.FAILED, False),
    ],
)
def test_doubt_is_resolved_for_one_node(resolve, phase, at_source):
    bench = Bench()
    assert bench.pull.assume_source_gone() is False
    bench.trouble = {messages.AcknowledgeTransfer: [LOST]}
    bench.pull.run()
    resolve(bench)
    assert bench.pull.phase is phase
    is_done = phase is MigrationPhase.DONE
    bench.check(at_source=at_source, at_target=is_done, num_free=12 if is_done else 15)
    assert bench.target.check_prefix(range(10)) == 2
    assert bench.pull.abandon_doubt() is bench.pull.assume_source_gone() is False


@pytest.mark.parametrize("trouble", [LOST, StaleTransferError("over")])
def test_a_copy_is_done_even_if_the_acknowledgement_is_lost(trouble):
    bench = Bench(is_move=False)
    bench.trouble = {messages.AcknowledgeTransfer: [trouble]}
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.DONE
    bench.check(at_source=True, at_target=True)


# ---- holds on arrived blocks -----------------------------------------------------------------------


def take_all_that_is_free(engine):
    """Evict all cached free blocks."""
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.pool.free_blocks(taken)


@pytest.mark.parametrize("end", ["released", "expired", "released later"])
def test_held_blocks_cannot_be_evicted(end):
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


def test_only_arrived_blocks_are_held_until_then():
    prefix = PrefixSubject(tuple(HASHER.hash_blocks(range(10))))
    bench = Bench(is_move=False, subject=prefix, hold_s=5.0)
    bench.pull.run()
    bench.target.start("next", range(10))  # keeps the blocks that it hits
    bench.pull.release()
    take_all_that_is_free(bench.target)
    bench.check(at_source=True, at_target=False, num_free=12)
    bench.target.check_bytes("next")

    bench = Bench(is_move=False, hold_s=5.0)
    bench.at_phase = {MigrationPhase.READING: bench.pull.release}
    bench.pull.run()
    assert bench.pull.held is None
    bench.check(at_source=True, at_target=True, num_free=12)

    bench = Bench(hold_s=5.0)
    bench.trouble = {messages.AskChecksums: [LOST, LOST, LOST]}
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.FAILED
    bench.check(at_source=True, at_target=False, num_free=15)

    nothing = Bench(is_move=False, subject=PrefixSubject(()), hold_s=5.0)
    nothing.pull.run()
    assert nothing.pull.phase is MigrationPhase.DONE
    assert not nothing.pull.is_holding()


# ---- other tests ---------------------------------------------------------------------------------


def test_an_error_in_take_over_fails_the_migration():
    bench = Bench(hold_s=5.0)

    def refuse(request_id, state):
        raise KeyError(request_id)

    bench.target.on_arrived = refuse
    bench.pull.run()
    assert bench.pull.phase is MigrationPhase.FAILED
    assert isinstance(bench.pull.error, KeyError)
    assert bench.target.site.leases.list_leases() == []
    bench.check(at_source=False, at_target=False, num_free=15)


def test_a_pull_cancelled_before_its_start_does_nothing():
    bench = Bench()
    assert bench.pull.cancel() is True
    bench.pull.run()
    assert isinstance(bench.pull.error, MigrationCancelledError)
    assert bench.pull.cancel() is False
    assert messages.PrepareTransfer not in bench.asked
    bench.check(at_source=True, at_target=False, num_free=15)


def test_a_stale_renewal_stops_the_pull_at_the_next_batch():
    bench = Bench()

    def renew_too_late(local_ids):
        bench.transfers.cancel(messages.CancelTransfer(b"sixteen letters!"))
        bench.pull.renew()

    bench.read_trouble = [renew_too_late]
    bench.pull.run()
    assert isinstance(bench.pull.error, StaleTransferError)
    assert messages.AcknowledgeTransfer not in bench.asked
    bench.check(at_source=True, at_target=False, num_free=15)


def test_renew_extends_both_leases():
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


def test_a_reply_of_the_wrong_type_fails_the_pull():
    class Confused(Bench):
        def answer(self, message):
            reply = super().answer(message)
            return messages.Cancelled() if isinstance(message, messages.PrepareTransfer) else reply

    bench = Confused()
    bench.pull.run()
    with pytest.raises(Exception, match="answered with Cancelled; expected Offer"):
        raise bench.pull.error
    bench.check(at_source=True, at_target=False, num_free=15)


def test_an_invalid_request_state_is_refused():
    bench = Bench()
    offered = bench.source.site.select(SequenceSubject("r"), True).offered
    whole = bench.source.site.select(SequenceSubject("r"), True).state
    newer = msgspec.msgpack.decode(whole)
    newer[1][0].append("one more field")
    for state in (b"\x93", whole[:-9], msgspec.msgpack.encode(newer)):
        with pytest.raises(InvalidArgumentError, match="cannot decode"):
            bench.target.site.reserve(SequenceSubject("r"), offered, state)
    for few, state in ((offered, b""), (offered[:2], whole)):
        with pytest.raises(InvalidArgumentError, match=r"has 1 groups, and [23] blocks were offered"):
            bench.target.site.reserve(SequenceSubject("r"), few, state)
    bench.check(at_source=True, at_target=False, num_free=15)
