"""`Pull`: one migration at its target, which drives it: prepare, read, verify, insert, acknowledge, adopt.

            the source                                  the target
                |  <-------------- PrepareTransfer ---------  |  PREPARING
    M1  lease   |  --------------- Offer ------------------>  |  reserve                              M2
                |  <============== bytes, in batches =======  |  READING
    checksums   |  <-------------- AskChecksums ------------  |  verify
                |                                             |  INSERTING: the blocks can be hit
    M4  release |  <-------------- AcknowledgeTransfer -----  |  ACKNOWLEDGING
                |  --------------- Acknowledged ----------->  |  adopt; DONE                          M3

A failure before the acknowledgement is sent leaves the source unchanged, and at the target only verified
cached blocks (M3). After that the source's answer decides.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import ClassVar

from kv_pool.core.holds import Hold, HoldState
from kv_pool.errors import (
    InvalidContentError,
    MigrationCancelledError,
    MigrationError,
    MigrationInDoubtError,
    PeerUnavailableError,
    StaleTransferError,
)
from kv_pool.manager.leases import Lease, LeaseKind, LeaseState
from kv_pool.migration import messages
from kv_pool.migration.messages import MigrationPhase
from kv_pool.migration.migration import Migration
from kv_pool.migration.site import Reservation
from kv_pool.migration.verified_reads import PeerCalls, PullSettings, RateLimit, VerifiedReads


class Pull(Migration):
    """A migration at its target. One thread calls `run`, then `resolve` as long as the migration is in doubt.

    Attributes:
        reservation: of the blocks, or None. Guarded by the site's lock.
        is_inserted: the blocks of the reservation were verified and are cached.
        held: the read lease that keeps the arrived blocks for `hold_s`, or None; it ends at its deadline or
            by `release`. Guarded by the site's lock.
    """

    direction: ClassVar[str] = "in"

    def __init__(self, settings: PullSettings, wanted: messages.PullSubject, hold_s: float = 0.0) -> None:
        super().__init__(wanted, wanted.source, settings.on_change)
        self.reservation: Reservation | None = None
        self.held: Lease | None = None
        self._hold_s = hold_s
        self._settings = settings
        self._site = settings.site
        self._calls = PeerCalls(settings, wanted.source)
        self._limit = RateLimit(wanted.max_bytes_per_s, settings.clock)
        self._backend = wanted.backend
        self._incarnation = ""  # of the source
        self._reads: VerifiedReads | None = None
        self._may_be_leased = False
        self._is_confirmed = False  # the source has released the subject
        self.is_inserted = False
        # Held while the pull ends: by the thread that resolves it, or by a caller of `assume_source_gone`.
        self._ending = threading.Lock()

    # ---- from other threads ----------------------------------------------------------------------

    def cancel(self) -> bool:
        error = MigrationCancelledError("the migration was cancelled; the source keeps the blocks")
        return not self.phase.is_ended and self._calls.stop(error)

    def renew(self) -> None:
        """Renew the lease at the source.

        A missing answer is ignored: a later renewal may succeed, otherwise the source's lease expires.
        """
        if self.phase is not MigrationPhase.READING:
            return
        try:
            self._calls.call(messages.RenewLease(self.transfer_id), messages.Acknowledged)
        except StaleTransferError as error:
            self._calls.stop(error)
        except MigrationError:
            return

    def release(self) -> None:
        with self._site.lock:
            self._hold_s = 0.0
            held, self.held = self.held, None
            if held is not None and held.state is LeaseState.ACTIVE:
                held.release()

    def is_holding(self) -> bool:
        held = self.held
        return held is not None and held.state is LeaseState.ACTIVE

    def assume_source_gone(self) -> bool:
        """Resolve IN_DOUBT in favour of this node, which takes the subject over.

        Call only if the source is known to be dead, or was made to drop the subject: otherwise both nodes
        would use it. Return False, with nothing changed, if the migration is not in doubt; False also if the
        takeover fails.
        """
        if self.phase is not MigrationPhase.IN_DOUBT:
            return False
        self._adopt()
        return self.error is None

    def abandon_doubt(self) -> bool:
        """Resolve IN_DOUBT in favour of the source: fail, and keep cached blocks only.

        Return False if the pull is not in doubt.
        """
        with self._ending:
            if self.phase is not MigrationPhase.IN_DOUBT or self.error is None:
                return False
            self._end_as_failed(self.error)
            return True

    # ---- phases ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all phases, until the end or IN_DOUBT. An error is stored in `error`.

        M2 holds from `_reserve` to `_insert`, while the missing blocks are read and verified.
        """
        try:
            reads, offer = self._prepare()
            reservation = self._reserve(offer)
            self._enter(MigrationPhase.READING)
            reads.read(offer.blocks, reservation.blocks, reservation.missing)
            self._insert(reads, reservation)
            self._calls.commit()
            self._enter(MigrationPhase.ACKNOWLEDGING)
        except Exception as error:
            self._fail(error)
        else:
            self._acknowledge()

    def resolve(self) -> None:
        """Repeat the acknowledgement of a move in doubt, or its adoption if the source has confirmed."""
        if self.phase is MigrationPhase.IN_DOUBT:
            if self._is_confirmed:
                self._adopt()
            else:
                self._acknowledge()

    def _prepare(self) -> tuple[VerifiedReads, messages.Offer]:
        """M1: check layout compatibility, then ask the source for a lease on the blocks."""
        self._enter(MigrationPhase.PREPARING)
        source = self._calls.repeat(messages.DescribeNode(), messages.NodeDescription)
        self._site.layout.check_same(source.layout, f"node {source.name!r}")
        self._reads = reads = VerifiedReads(
            self._settings, self._calls, source, self, self._limit, self._backend
        )
        self._calls.check_wanted()
        self._may_be_leased = True
        request = messages.PrepareTransfer(
            self.transfer_id, self.subject, self.is_move, self._site.layout, self._settings.name
        )
        offer = self._calls.repeat(request, messages.Offer)
        if offer.incarnation != source.incarnation:
            raise PeerUnavailableError(f"node {source.name!r} restarted during the request; try again")
        self._incarnation = offer.incarnation
        self.status.num_blocks = len(offer.blocks)
        return reads, offer

    def _reserve(self, offer: messages.Offer) -> Reservation:
        """M2: reserve one block for each offered block."""
        with self._site.lock:
            self.reservation = reservation = self._site.reserve(self.subject, offer.blocks, offer.state)
        num_present = len(reservation.blocks) - len(reservation.missing)
        self.status.num_present_blocks = self.status.num_done_blocks = num_present
        return reservation

    def _insert(self, reads: VerifiedReads, reservation: Reservation) -> None:
        """End M2: insert the blocks, which can be hit from here on, even if the migration fails later."""
        self._enter(MigrationPhase.INSERTING)
        self._calls.check_wanted()
        reads.return_reader()
        with self._site.lock:
            self._site.insert(reservation)
            self.is_inserted = True

    def _acknowledge(self) -> None:
        """M4: acknowledge, then adopt: a move once the source has confirmed, a copy unless it is invalid."""
        new_ids = [block.block_id for block in self._get_reservation().blocks]
        message = messages.AcknowledgeTransfer(self.transfer_id, self._incarnation, new_ids)
        try:
            (self._calls.call if self.is_move else self._calls.repeat)(message, messages.Acknowledged)
        except Exception as error:
            if self.is_move or isinstance(error, InvalidContentError):
                self._refuse_to_adopt(error)
                return
        self._is_confirmed = True
        self._adopt()

    # ---- ends ------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Adopt, or fail; a move whose pool was interrupted is in doubt, since its source has no subject."""
        with self._ending:
            if self.phase.is_ended:
                return
            is_interrupted = False
            try:
                with self._site.lock:
                    reservation = self._get_reservation()
                    held: Lease | None = None
                    try:
                        held = self._hold(reservation)
                        self._site.adopt(reservation)
                    except Exception:
                        if held is not None:
                            held.release()
                        is_interrupted = self._site.pool.is_changing
                        raise
                    self.held = held
                    self.new_ids = [block.block_id for block in reservation.blocks]
                    self.set_error(None)
                    # Together: a pull in doubt has a reservation (M3).
                    self.reservation, self.status.phase = None, MigrationPhase.DONE
            except Exception as error:
                if self.is_move and is_interrupted:
                    self._stay_in_doubt(
                        f"this node keeps {self.status.num_blocks} blocks of node {self.peer!r} reserved "
                        f"until its pool is repaired, and then takes them over ({error})"
                    )
                else:
                    self._end_as_failed(error)
                return
            self._on_change(self)

    def _hold(self, reservation: Reservation) -> Lease | None:
        """Hold the arrived blocks for `hold_s` by a read lease. Called with the lock."""
        if not self._hold_s or not reservation.blocks:
            return None
        deadline = self._settings.clock() + self._hold_s
        holder = f"hold_s of transfer {self.transfer_id.hex()}"
        return self._site.leases.acquire(reservation.blocks, deadline, holder, LeaseKind.READ)

    def _refuse_to_adopt(self, error: Exception) -> None:
        """Fail if the source keeps the subject; stay in doubt if its answer is missing."""
        with self._ending:
            if self.phase.is_ended:
                return
            if isinstance(error, StaleTransferError):
                self._end_as_failed(error)
                return
            self._stay_in_doubt(
                f"node {self.peer!r} has not confirmed that it released {self.status.num_blocks} blocks; "
                f"this node keeps them reserved until it does ({error})"
            )

    def _stay_in_doubt(self, why: str) -> None:
        """Report the doubt each time, so that waiting callers see how long it lasts."""
        self.set_error(MigrationInDoubtError(why))
        self._enter(MigrationPhase.IN_DOUBT)

    def _end_as_failed(self, error: Exception) -> None:
        """Fail; inserted blocks stay cached, unless reported invalid."""
        with self._site.lock:
            self._release_reservation(self._get_reservation(), error)
            self.set_error(error)
            self.reservation, self.status.phase = None, MigrationPhase.FAILED
        self._on_change(self)

    def _release_reservation(self, reservation: Reservation, error: Exception) -> None:
        """Drop the reservation; inserted blocks stay cached, unless invalid. Called with the lock."""
        is_whole = not self._site.pool.is_changing  # otherwise `repair` empties the cache
        if is_whole and self.is_inserted and isinstance(error, InvalidContentError):
            wrong = [reservation.blocks[position].block_id for position in reservation.missing]
            self._site.sequences.evict_invalid(wrong)
        self._site.release_reservation(reservation)

    def _fail(self, error: Exception) -> None:
        """M3: drop the reservation and cancel the transfer at the source."""
        self._calls.refuse_stop()
        if self._reads is not None:
            self._reads.close()
        with self._site.lock:
            reservation, self.reservation = self.reservation, None
            reader = None if self._reads is None else self._reads.reader
            if reservation is not None:
                if reader is not None and not reader.is_settled():
                    self._settings.unsettled.append((self._quarantine(reservation), reader))
                self._release_reservation(reservation, error)
        if self._may_be_leased:
            # Once, ignoring errors: if this fails, the source's lease expires.
            with suppress(Exception):
                self._calls.call(
                    messages.CancelTransfer(self.transfer_id, str(error)[:200]), messages.Cancelled
                )
        self.set_error(error)
        is_wanted = isinstance(error, MigrationCancelledError)
        self._enter(MigrationPhase.CANCELLED if is_wanted else MigrationPhase.FAILED)

    # ---- inside ----------------------------------------------------------------------------------

    def _quarantine(self, reservation: Reservation) -> Hold:
        """Hold the blocks to which a read of this pull may still write. Called with the lock."""
        missing = [reservation.blocks[position] for position in reservation.missing]
        reason = f"in quarantine: transfer {self.transfer_id.hex()} from {self.peer} may still write it"
        hold = self._site.pool.holds.open(missing, reason)
        hold.state = HoldState.QUARANTINED
        return hold

    def _enter(self, phase: MigrationPhase) -> None:
        self.status.phase = phase
        self._on_change(self)

    def _is_not_waited_for(self) -> bool:
        if self.phase is MigrationPhase.IN_DOUBT and self._doubted_s:
            return time.monotonic() - self._doubted_s > self._settings.lease_s
        return self.phase.is_ended

    def _get_reservation(self) -> Reservation:
        assert self.reservation is not None
        return self.reservation
