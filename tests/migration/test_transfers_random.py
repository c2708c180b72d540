"""A source and targets in one thread, with a fake clock and random faults.

Calls are lost, repeated and delayed; replies are lost; either side restarts; leases expire; bytes are
corrupted; abandoned readers continue to write; both pools are compacted; content is reported invalid at the
source. A slow model gives the expected answers of the source and the expected owners at the end.
"""

import itertools
import random
from collections import Counter
from contextlib import suppress

import pytest
from migration.made_nodes import Clock, MadeEngine, answer_as_source, make_pull

from kv_pool.contiguous import compaction
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants as pool_invariants
from kv_pool.errors import (
    InvalidContentError,
    KVPoolError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.manager.invariants import check_manager
from kv_pool.migration import invariants, messages
from kv_pool.migration.messages import MigrationPhase, PrefixSubject, SequenceSubject
from kv_pool.migration.source import SourceTransfers, make_incarnation
from kv_pool.migration.transfer_backend import ReadCount

LEASE_S = 10.0
SEEDS = [*range(50), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(50, 250))]


class Killed(BaseException):
    """Raised to end a process at this point."""


class ModelledSource:
    """A source, and a model of its answers: a second implementation of the transfer table."""

    def __init__(self, clock, number):
        self.clock = clock
        self.engine = MadeEngine(24, clock, pool_class=RunBlockPool)
        self.incarnation = make_incarnation("source", f"life{number}")
        self.transfers = SourceTransfers(self.engine.site, "source", self.incarnation, LEASE_S, clock)
        # Transfer -> its deadline while it is leased, else "acknowledged" or "over".
        self.model = {}
        self.invalid = set()
        self.given_away = set()

    def is_leased(self, transfer_id):
        state = self.model.get(transfer_id)
        if isinstance(state, float) and state <= self.clock.now:
            self.model[transfer_id] = state = "over"
        return isinstance(state, float)

    def deliver(self, message):
        """Return the real answer, after comparing it with the model's."""
        if isinstance(message, messages.DescribeNode):
            return answer_as_source(self.transfers, message, self.engine.site)
        transfer_id = message.transfer_id
        is_leased = self.is_leased(transfer_id)
        state = self.model.get(transfer_id)
        try:
            reply = answer_as_source(self.transfers, message, self.engine.site)
        except InvalidContentError:
            assert transfer_id in self.invalid
            if isinstance(message, messages.AcknowledgeTransfer):
                self.model[transfer_id] = "over"
            raise
        except StaleTransferError:
            is_old = (
                isinstance(message, messages.AcknowledgeTransfer) and message.incarnation != self.incarnation
            )
            assert not is_leased, f"{message}: it is leased"
            assert not isinstance(message, messages.CancelTransfer)
            assert not is_old
            if isinstance(message, messages.AcknowledgeTransfer):
                assert state != "acknowledged"
            raise
        except KVPoolError:
            assert isinstance(message, messages.PrepareTransfer)
            assert state is None
            raise
        match message:
            case messages.PrepareTransfer():
                assert isinstance(reply, messages.Offer)
                assert is_leased or state is None
                self.model[transfer_id] = self.clock.now + LEASE_S
            case messages.RenewLease():
                assert is_leased
                assert transfer_id not in self.invalid
                self.model[transfer_id] = self.clock.now + LEASE_S
            case messages.AskChecksums():
                assert is_leased
            case messages.AcknowledgeTransfer() if message.incarnation == self.incarnation:
                assert reply == messages.Acknowledged()
                assert state == "acknowledged" or (is_leased and transfer_id not in self.invalid)
                self.model[transfer_id] = "acknowledged"
            case messages.CancelTransfer():
                assert reply == messages.Cancelled(is_acknowledged=state == "acknowledged")
                if state != "acknowledged":
                    self.model[transfer_id] = "over"
        return reply


class LateReader:
    """A direct reader that continues to write after an abandoned read, until it is stopped."""

    def __init__(self, world, transfer_id):
        self.world = world
        self.unsettled = []

    def read(self, transfer_id, remote_ids, local_ids, deadline):
        world = self.world
        source = world.source
        source.transfers.check_leased(transfer_id, remote_ids)
        data = [source.engine.storage.read_block(block_id) for block_id in remote_ids]
        world.disturb()
        draw = world.random.random()
        if draw < 0.06:
            self.unsettled = list(local_ids)
            world.late_readers.append(self)
            raise TransferFailedError("cancelled while bytes are in flight")
        if draw < 0.12:
            self.scribble(local_ids)
            raise TransferFailedError("broken off")
        if world.source is not source:
            raise TransferFailedError("the source is no more")
        source.transfers.check_leased(transfer_id, remote_ids)
        for block_id, content in zip(local_ids, data, strict=True):
            if world.random.random() < 0.02:
                content = bytes([content[0] ^ 1]) + content[1:]
            world.target.storage.write_block(block_id, content)
        return ReadCount(len(local_ids), 1)

    def scribble(self, local_ids):
        storage = self.world.target.storage
        for block_id in local_ids:
            storage.write_block(block_id, self.world.random.randbytes(storage.block_bytes))

    def is_settled(self):
        return not self.unsettled

    def close(self):
        pass


class World:
    """One source, one target, the network between them, and a clock."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.clock = Clock()
        self.lives = itertools.count()
        self.source = ModelledSource(self.clock, next(self.lives))
        self.start_target()
        self.late = []
        self.prompts = []
        self.is_calm = False
        self.depth = 0
        self.outcomes = Counter()
        self.numbers = itertools.count()
        self.start_request()

    def start_target(self):
        self.target = MadeEngine(16, self.clock, pool_class=RunBlockPool)
        self.quarantined = []
        self.late_readers = []
        self.pulls = []

    # ---- the peer of pulls -----------------------------------------------------------------------

    def make_pull(self, subject, is_move):
        wanted = messages.PullSubject(self.random.randbytes(16), subject, is_move, "source")
        pull = make_pull(
            self.target.site,
            self,
            wanted,
            self.random.choice([0.0, 0.5 * LEASE_S, 1.5 * LEASE_S]),
            LEASE_S,
            self.clock,
            lambda pull: None,
            self.quarantined,
        )
        self.pulls.append(pull)
        return pull

    def call(self, name, message, timeout_s):
        self.disturb()
        draw = 1.0 if self.is_calm else self.random.random()
        if draw < 0.05:
            raise PeerUnavailableError("lost on the way there")
        if draw < 0.09:
            self.late.append(message)
            raise PeerUnavailableError("on its way for longer than anybody waits")
        reply = self.source.deliver(message)
        if draw < 0.13:
            raise PeerUnavailableError("the reply was lost")
        if draw < 0.17:
            self.source.deliver(message)
        if draw < 0.19:
            self.late.append(message)
        self.disturb()
        return reply

    def take_reader(self, source, only):
        if not self.is_calm and self.random.random() < 0.02:
            raise PeerUnavailableError("no connection")
        return LateReader(self, None)

    def return_reader(self, source, reader):
        pass

    # ---- faults ----------------------------------------------------------------------------------

    def disturb(self):
        """Run another random event in the middle of this one."""
        if self.is_calm:
            return
        draw = self.random.random()
        if draw < 0.25:
            self.clock.now += self.random.choice([0.1, 1.0, 4.0, 11.0])
        elif draw < 0.32:
            self.source.transfers.expire()
        elif draw < 0.40:
            for engine in (self.source.engine, self.target):
                engine.site.leases.expire()
        elif draw < 0.50 and self.late:
            self.deliver_late(self.random.randrange(len(self.late)))
        elif draw < 0.58:
            self.start_request()
        elif draw < 0.64:
            self.start_request(self.target)
        elif draw < 0.70:
            self.finish_request(self.random.choice([self.source.engine, self.target]))
        elif draw < 0.74:
            for reader in self.late_readers:
                reader.scribble(reader.unsettled)
        elif draw < 0.77 and self.late_readers:
            self.settle(self.random.choice(self.late_readers))
        elif draw < 0.80 and self.pulls:
            self.random.choice(self.pulls).cancel()
        elif draw < 0.83 and self.pulls:
            self.random.choice(self.pulls).renew()
        elif draw < 0.845 and self.pulls:
            self.random.choice(self.pulls).release()
        elif draw < 0.86 and self.depth < 2:
            self.migrate()
        elif draw < 0.87:
            self.source = ModelledSource(self.clock, next(self.lives))
            self.start_request()
        elif draw < 0.875:
            self.start_target()
            raise Killed
        elif draw < 0.93:
            for engine in (self.source.engine, self.target):
                moves = compaction.pack(engine.pool, engine.storage.apply_moves, max_evictions=2)
                self.outcomes["compactions"] += bool(moves)
        elif draw < 0.96:
            self.report_wrong()

    def report_wrong(self):
        """Report a leased block invalid that no request needs."""
        source, engine = self.source, self.source.engine
        leased = [
            block for transfer in source.transfers.list_prepared() for block in transfer.selection.blocks
        ]
        if not leased:
            return
        block = self.random.choice(leased)
        for request_id in list(engine.requests):
            is_frozen = request_id in engine.site.list_frozen()
            if not is_frozen and block in engine.manager.get_table(request_id).blocks:
                engine.finish(request_id)
        if block in engine.pool.holds.count_references():
            return
        engine.storage.write_block(block.block_id, self.random.randbytes(engine.storage.block_bytes))
        engine.manager.evict_blocks([block.block_id])
        for transfer in source.transfers.list_prepared():
            if block in transfer.selection.blocks:
                source.invalid.add(transfer.message.transfer_id)
                self.outcomes["found wrong"] += 1

    def deliver_late(self, index):
        message = self.late.pop(index)
        with suppress(KVPoolError):
            self.source.deliver(message)

    def settle(self, reader):
        """Settle a reader and release its blocks, as a node's housekeeping does."""
        reader.unsettled = []
        self.late_readers.remove(reader)
        for entry in [entry for entry in self.quarantined if entry[1] is reader]:
            entry[0].release()
            self.quarantined.remove(entry)

    def start_request(self, engine=None):
        engine = self.source.engine if engine is None else engine
        number = next(self.numbers)
        head = self.random.choice([0, 0, 100])
        token_ids = [*range(head, head + self.random.randrange(9)), *range(1000 * number, 1000 * number + 5)]
        need = len(token_ids) // 4 + 1
        if engine.manager.get_num_free_blocks() >= need:
            engine.start(f"r{number}", token_ids)
            self.prompts.append(token_ids)

    def finish_request(self, engine):
        requests = [found for found in engine.requests if found not in engine.site.list_frozen()]
        if requests:
            engine.finish(self.random.choice(requests))

    # ---- checks ----------------------------------------------------------------------------------

    def migrate(self):
        self.depth += 1
        try:
            requests = list(self.source.engine.requests)
            if not requests:
                return
            request_id = self.random.choice(requests)
            subject, is_move = SequenceSubject(request_id), self.random.random() < 0.7
            if self.random.random() < 0.25:
                hashes = self.source.engine.requests[request_id].block_hashes
                subject, is_move = PrefixSubject(tuple(hashes)), False
            pull = self.make_pull(subject, is_move)
            try:
                pull.run()
                while pull.status.phase is MigrationPhase.IN_DOUBT and self.random.random() < 0.7:
                    self.disturb()
                    pull.resolve()
            except Killed:
                if self.depth > 1:
                    raise  # the outer one dies with it
                return
            self.check_outcome(pull)
            self.check()
        finally:
            self.depth -= 1

    def check_outcome(self, pull):
        """Check that a move is done only if its source has confirmed it or was restarted."""
        self.outcomes[pull.is_move, pull.status.phase] += 1
        if (
            pull.status.phase is MigrationPhase.DONE
            and pull.is_move
            and pull._incarnation == self.source.incarnation
        ):
            assert self.source.model[pull.transfer_id] == "acknowledged"
        if pull.status.phase in (MigrationPhase.FAILED, MigrationPhase.CANCELLED):
            assert pull.error is not None
            assert pull.reservation is None

    def check(self):
        """Check all invariants that hold at any time."""
        for engine, pulls, transfers in (
            (self.source.engine, [], self.source.transfers),
            (self.target, self.pulls, None),
        ):
            pool_invariants.check(engine.pool)
            check_manager(engine.manager, engine.requests.values())
            for request_id in engine.requests:
                if request_id not in engine.site.list_frozen():
                    engine.check_bytes(request_id)
            engine.check_all_cached(self.prompts[-8:])
            if transfers is not None:
                invariants.check_source(transfers)
            else:
                unsettled = [hold for hold, _ in self.quarantined]
                invariants.check_pulls(engine.site, pulls, unsettled)

    def finish(self):
        """Repair the network and let time pass until all transfers have ended."""
        self.is_calm = True
        while self.late:
            self.deliver_late(self.random.randrange(len(self.late)))
        for pull in self.pulls:
            pull.resolve()
            assert pull.status.phase.is_ended, pull.status.phase
        self.clock.now += 2 * LEASE_S
        self.source.transfers.expire()
        self.target.site.leases.expire()
        assert not any(pull.is_holding() for pull in self.pulls)
        for reader in list(self.late_readers):
            self.settle(reader)
        self.check()
        source, target = self.source.engine, self.target
        for engine in (source, target):
            assert engine.site.leases.list_leases() == []
            assert engine.pool.holds.list_holds() == []
        both = source.requests.keys() & target.requests.keys()
        copied = {
            pull.subject.sequence_id
            for pull in self.pulls
            if isinstance(pull.subject, SequenceSubject) and not pull.is_move
        }
        assert both <= copied, f"{both} are at both sides, and only {copied} were copied"
        for request_id in source.moved_away:
            assert request_id not in source.requests
        for engine in (source, target):
            for request_id in list(engine.requests):
                engine.finish(request_id)
            assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
        self.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_block_is_lost_shared_or_leaked_on_a_bad_network(seed):
    world = World(seed)
    for _ in range(12):
        world.start_request()
        world.migrate()
    world.finish()
