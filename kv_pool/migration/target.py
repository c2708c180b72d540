"""`Pull`: one migration, as its target drives it: prepare, read, verify, insert, acknowledge, adopt.

            the source                                  the target
                |  <-------------- PrepareTransfer ---------  |  PREPARING
    M1  lend    |  --------------- Offer ------------------>  |  take room, lent for writing          M2
                |  <============== bytes, in batches =======  |  READING
    checksums   |  <-------------- AskChecksums ------------  |  verify
                |                                             |  INSERTING: the blocks can be hit
    M4  give up |  <-------------- AcknowledgeTransfer -----  |  ACKNOWLEDGING
                |  --------------- Acknowledged ----------->  |  adopt; DONE                          M3

What fails before the acknowledgement is sent leaves the source as it was and the target empty (M3); from then
on the source's answer decides.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from kv_pool.errors import (
    InvalidContentError,
    MigrationCancelledError,
    MigrationError,
    MigrationInDoubtError,
    PeerUnavailableError,
    StaleTransferError,
)
from kv_pool.manager.invalid_blocks import evict_wrong_blocks
from kv_pool.manager.leases import Lease, LeaseKind, LeaseState
from kv_pool.migration.messages import (
    Acknowledged,
    AcknowledgeTransfer,
    Cancelled,
    CancelTransfer,
    DescribeNode,
    LeaseRenewed,
    NodeDescription,
    Offer,
    PrepareTransfer,
    RenewLease,
)
from kv_pool.migration.pull_settings import PullSettings
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.site import Room
from kv_pool.migration.source_calls import PullPeer, SourceCalls
from kv_pool.migration.status import MigrationPhase, MigrationRecord
from kv_pool.migration.verified_reads import VerifiedReads


class Pull:
    """One migration to this node. One thread calls `run`, then `resolve` as long as it is in doubt.

    Attributes:
        record: of this migration; a pull that its source asked for has the id that the source chose.
        room, lease: what it holds of the pool, None for nothing. Behind the site's lock.
        held: the lease to read by which what has arrived stays for `hold_s`, None for none; over when its
            deadline has passed, or after `release`. Behind the site's lock.
    """

    def __init__(
        self,
        settings: PullSettings,
        peer: PullPeer,
        record: MigrationRecord,
        limit: RateLimit,
        hold_s: float = 0.0,
    ) -> None:
        self.record = record
        self.status = record.status
        self.transfer_id = record.transfer_id
        self.subject = record.subject
        self.is_move = record.is_move
        self.room: Room | None = None
        self.lease: Lease | None = None
        self.held: Lease | None = None
        self._hold_s = hold_s
        self._settings = settings
        self._site = settings.site
        self._calls = SourceCalls(peer)
        self._limit = limit
        self._source: NodeDescription | None = None
        self._offer: Offer | None = None
        self._reads: VerifiedReads | None = None
        self._may_be_lent = False
        self._is_inserted = False
        # Held by whoever ends it: the thread that asks the source, or somebody who knows that it is gone.
        self._ending = threading.Lock()

    # ---- from other threads ----------------------------------------------------------------------

    def cancel(self) -> bool:
        """Give it up before the acknowledgement is sent. False: it was sent, or the pull has ended."""
        return self._calls.stop(
            MigrationCancelledError("the migration was cancelled; its source has the blocks")
        )

    def renew(self) -> None:
        """Tell the source that the blocks are still needed, and prolong our own lease.

        An answer that is missing is no matter: there will be another, or the source's lease ends.
        """
        if self.status.phase is not MigrationPhase.READING:
            return
        with self._site.lock:
            if self.lease is not None and self.lease.state is LeaseState.ACTIVE:
                self.lease.extend(self._settings.clock() + self._settings.lease_s)
        try:
            self._calls.call(RenewLease(self.transfer_id), LeaseRenewed)
        except StaleTransferError as error:
            self._calls.stop(error)
        except MigrationError:
            return

    def release(self) -> None:
        """Hold what has arrived no longer, or not at all. Nothing happens if it is not held any more."""
        with self._site.lock:
            self._hold_s = 0.0
            held, self.held = self.held, None
            if held is not None and held.state is LeaseState.ACTIVE:
                held.give_back()

    def is_holding(self) -> bool:
        """Is what has arrived held still?"""
        held = self.held
        return held is not None and held.state is LeaseState.ACTIVE

    def assume_source_gone(self) -> bool:
        """The source uses the blocks no more, and will not say so: they are ours. False if not in doubt."""
        if self.status.phase is not MigrationPhase.IN_DOUBT:
            return False
        self._adopt()
        return self.record.error is None

    def give_up_doubt(self) -> bool:
        """Ask no more, and do not take it over: the source may go on with it. False if not in doubt."""
        with self._ending:
            if self.status.phase is not MigrationPhase.IN_DOUBT or self.record.error is None:
                return False
            self._leave(self.record.error)
            return True

    # ---- the way ---------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first request to the end, or until it is in doubt. What goes wrong is in `error`."""
        try:
            self._prepare()
            self._take_room()
            self._read()
            self._insert()
            self._enter_acknowledging()
        except Exception as error:
            self._fail(error)
        else:
            self._acknowledge()

    def resolve(self) -> None:
        """Ask the source once more whether it gave a move up, where it has not answered."""
        if self.status.phase is MigrationPhase.IN_DOUBT:
            self._acknowledge()

    def _prepare(self) -> None:
        """M1: check layout compatibility, then ask the source to lend its blocks."""
        self._enter(MigrationPhase.PREPARING)
        self._source = source = self._calls.repeat(DescribeNode(), NodeDescription)
        self._site.layout.check_same(source.layout, f"node {source.name!r}")
        self._reads = VerifiedReads(self._settings, self._calls, source, self.record, self._limit)
        self._calls.check_wanted()
        self._may_be_lent = True
        request = PrepareTransfer(
            self.transfer_id, self.subject, self.is_move, self._site.layout, self._settings.name
        )
        offer = self._calls.repeat(request, Offer)
        if offer.epoch != source.epoch:
            raise PeerUnavailableError(f"node {source.name!r} was restarted while it was asked; try again")
        self._offer = offer
        self.status.num_blocks = len(offer.blocks)

    def _take_room(self) -> None:
        """M2: a block for each that is offered; those to be written are lent to this pull."""
        offer, site = self._get_offer(), self._site
        with site.lock:
            room = site.take_room(self.subject, offer.blocks, offer.state)
            try:
                if room.missing:
                    self.lease = site.leases.lend(
                        [room.blocks[position] for position in room.missing],
                        self._settings.clock() + self._settings.lease_s,
                        f"transfer {self.transfer_id.hex()} from {self._get_source().name}",
                        LeaseKind.WRITE,
                    )
            except BaseException:
                site.leave(room)
                raise
            self.room = room
        self.status.num_present_blocks = self.status.num_done_blocks = len(room.blocks) - len(room.missing)

    def _read(self) -> None:
        """M2: the missing bytes; those that are not as they were sent are read again."""
        self._enter(MigrationPhase.READING)
        room = self._get_room()
        self._get_reads().read(self._get_offer().blocks, room.blocks, room.missing)

    def _insert(self) -> None:
        """End M2: from here on the blocks can be hit, whatever becomes of the rest."""
        self._enter(MigrationPhase.INSERTING)
        self._calls.check_wanted()
        self._get_reads().leave()
        with self._site.lock:
            room = self._get_room()
            # A block that can be hit is written by nobody; the room's own reference keeps it.
            self._give_lease_back()
            self._site.insert(room)
            self._is_inserted = True

    def _enter_acknowledging(self) -> None:
        self._calls.commit()
        self._enter(MigrationPhase.ACKNOWLEDGING)

    def _acknowledge(self) -> None:
        """M4: a move's subject is ours when the source has answered; a copy is, unless it is wrong."""
        new_ids = [block.block_id for block in self._get_room().blocks]
        message = AcknowledgeTransfer(self.transfer_id, self._get_offer().epoch, new_ids)
        try:
            (self._calls.call if self.is_move else self._calls.repeat)(message, Acknowledged)
        except Exception as error:
            if self.is_move or isinstance(error, InvalidContentError):
                if isinstance(error, StaleTransferError):
                    self._end_with_copy(error)
                else:
                    self._stay_in_doubt(error)
                return
        self._adopt()

    # ---- its ends --------------------------------------------------------------------------------

    def _adopt(self) -> None:
        with self._ending:
            if self.status.phase.is_ended:
                return
            try:
                with self._site.lock:
                    room = self._get_room()
                    held = self._hold(room)
                    try:
                        self._site.adopt(room)
                    except BaseException:
                        if held is not None:
                            held.give_back()
                        raise
                    self.held = held
                    self.record.new_ids = [block.block_id for block in room.blocks]
                    self.record.set_error(None)
                    self.room, self.status.phase = (
                        None,
                        MigrationPhase.DONE,
                    )  # together: one in doubt has room
            except Exception as error:
                self._leave(error)
                return
            self._settings.on_change(self.record)

    def _hold(self, room: Room) -> Lease | None:
        """Lend what has arrived to whoever asked for it, so that it stays cached until he uses it. Locked."""
        if not self._hold_s or not room.blocks:
            return None
        deadline = self._settings.clock() + self._hold_s
        holder = f"who fetched transfer {self.transfer_id.hex()}"
        return self._site.leases.lend(room.blocks, deadline, holder, LeaseKind.READ)

    def _end_with_copy(self, error: Exception) -> None:
        """The subject is not ours; what was inserted may be hit, unless the source reports it wrong."""
        with self._ending:
            if not self.status.phase.is_ended:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        with self._site.lock:
            self._leave_room(self._get_room(), error)
            self.record.set_error(error)
            self.room, self.status.phase = None, MigrationPhase.FAILED
        self._settings.on_change(self.record)

    def _leave_room(self, room: Room, error: Exception) -> None:
        """Drop our references; what was inserted stays cached, unless it is wrong. Locked."""
        if isinstance(error, InvalidContentError):
            wrong = [room.blocks[position].block_id for position in room.missing]
            evict_wrong_blocks(self._site.leases.block_pool, wrong)
        self._site.leave(room)

    def _stay_in_doubt(self, error: Exception) -> None:
        with self._ending:
            if self.status.phase.is_ended:
                return
            self.record.set_error(
                MigrationInDoubtError(
                    f"node {self._get_source().name!r} has not answered whether it gave up "
                    f"{self.status.num_blocks} blocks; they are kept aside here until it does. ({error})"
                )
            )
            # Told each time, so that whoever waits sees for how long.
            self._enter(MigrationPhase.IN_DOUBT)

    def _fail(self, error: Exception) -> None:
        """M3: keep nothing, and cancel the transfer at the source."""
        self._calls.refuse_stop()
        if self._reads is not None:
            self._reads.close()
        with self._site.lock:
            room, self.room = self.room, None
            if self._is_inserted and room is not None:
                self._leave_room(room, error)
            elif room is not None:
                reader = None if self._reads is None else self._reads.reader
                if self.lease is not None and reader is not None and not reader.is_settled():
                    self._settings.on_unsettled(self.lease, reader)
                    self.lease = None
                self._give_lease_back()
                self._site.leave(room)
        if self._may_be_lent:
            # Once, and whatever comes of it: without this the source's lease ends by itself.
            with suppress(Exception):
                self._calls.call(CancelTransfer(self.transfer_id, str(error)[:200]), Cancelled)
        self.record.set_error(error)
        is_wanted = isinstance(error, MigrationCancelledError)
        self._enter(MigrationPhase.CANCELLED if is_wanted else MigrationPhase.FAILED)

    # ---- inside ----------------------------------------------------------------------------------

    def _give_lease_back(self) -> None:
        """Locked. In quarantine, after a pause longer than the lease, or not: nothing is under way."""
        if self.lease is not None:
            self.lease.give_back()
            self.lease = None

    def _enter(self, phase: MigrationPhase) -> None:
        self.status.phase = phase
        self._settings.on_change(self.record)

    def _get_reads(self) -> VerifiedReads:
        assert self._reads is not None
        return self._reads

    def _get_source(self) -> NodeDescription:
        assert self._source is not None
        return self._source

    def _get_offer(self) -> Offer:
        assert self._offer is not None
        return self._offer

    def _get_room(self) -> Room:
        assert self.room is not None
        return self.room
