"""`Pull`: one migration, as its target drives it: prepare, read, verify, insert, acknowledge, adopt.

            the source                                  the target
                |  <-------------- PrepareTransfer ---------  |  PREPARING
    M1  lend    |  --------------- Offer ------------------>  |  take room, lent for writing          M2
                |  <============== bytes, in batches =======  |  READING
    checksums   |  <-------------- AskChecksums ------------  |  verify
                |                                             |  INSERTING: the blocks can be hit     M3
    M4  give up |  <-------------- AcknowledgeTransfer -----  |  ACKNOWLEDGING
                |  --------------- Acknowledged ----------->  |  adopt; DONE

What fails before the acknowledgement is sent leaves the source as it was and the target empty (M5); from then
on the source's answer decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kv_pool.errors import (
    InvalidContentError,
    MigrationCancelledError,
    MigrationError,
    MigrationInDoubtError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.manager.invalid_blocks import evict_wrong_blocks
from kv_pool.manager.leases import Lease, LeaseKind, LeaseState
from kv_pool.migration.messages import (
    Acknowledged,
    AcknowledgeTransfer,
    AskChecksums,
    Cancelled,
    CancelTransfer,
    Checksums,
    DescribeNode,
    LeaseRenewed,
    Message,
    NodeDescription,
    Offer,
    PrepareTransfer,
    RenewLease,
)
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.site import Room
from kv_pool.migration.status import MigrationPhase, MigrationRecord
from kv_pool.migration.transfer_backend import BlockReader
from kv_pool.storage.checksums import checksum_blocks

_Reply = TypeVar("_Reply", bound=Message)
_Result = TypeVar("_Result")
_BATCH_BYTES = 32 * 1024 * 1024
_BATCH_BLOCKS = 1024
_TRIES = 3
"""How often blocks are read, or a request is sent whose repetition is harmless, before it has failed."""
_PAUSE_S = 0.02


class PullPeer(Protocol):
    """The source, as a pull reaches it."""

    def call(self, message: Message) -> Message:
        """Ask it. Raises what it answers with, or PeerUnavailableError where it does not answer."""

    def take_reader(self, source: NodeDescription) -> BlockReader:
        """Connect, or use a connection that was left. Raises PeerUnavailableError, InvalidArgumentError."""

    def leave_reader(self, source: NodeDescription, reader: BlockReader) -> None:
        """The reader has nothing under way, and may be used by the next pull."""


class Parallel(Protocol):
    """What runs things beside the caller, such as `Workers`."""

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Run it soon."""


@dataclass(frozen=True)
class PullSettings:
    """What all pulls of a node share.

    Attributes:
        name: the target's.
        lease_s: for how long room is lent for writing without a sign of life; how long a read may take.
        clock: seconds, never falling; that of the site's leases.
        deadline_clock: `time.monotonic`, by which backends take their deadlines.
        limit: of all migrations to this node together.
        on_change: called with the pull when it has entered a phase or finished a batch, without any lock.
        on_unsettled: called with a lease and a reader that may yet write into its blocks.
    """

    name: str
    site: PoolSite
    lease_s: float
    clock: Callable[[], float]
    deadline_clock: Callable[[], float]
    limit: RateLimit
    parallel: Parallel
    on_change: Callable[[Pull], object]
    on_unsettled: Callable[[Lease, BlockReader], object]


@dataclass
class _Batch:
    """Blocks that are read at once: positions in the offer, ids at both sides."""

    positions: list[int]
    remote_ids: list[int]
    local_ids: list[int]


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
        self._peer = peer
        self._limit = limit
        self._source: NodeDescription | None = None
        self._offer: Offer | None = None
        self._reader: BlockReader | None = None
        self._may_be_lent = False
        self._is_inserted = False
        # Whether it may still be stopped, and by what it was.
        self._lock = threading.Lock()
        self._is_too_late = False
        self._stopped_by: MigrationError | None = None
        self._woken = threading.Event()
        # Held by whoever ends it: the thread that asks the source, or somebody who knows that it is gone.
        self._ending = threading.Lock()

    # ---- from other threads ----------------------------------------------------------------------

    def cancel(self) -> bool:
        """Give it up before the acknowledgement is sent. False: it was sent, or the pull has ended."""
        return self._stop(MigrationCancelledError("the migration was cancelled; its source has the blocks"))

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
            self._call(RenewLease(self.transfer_id), LeaseRenewed)
        except StaleTransferError as error:
            self._stop(error)
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
        """M1: the source lends its blocks. Whoever means something else by them is not even asked."""
        self._enter(MigrationPhase.PREPARING)
        self._source = source = self._repeat(DescribeNode(), NodeDescription)
        self._site.layout.check_same(source.layout, f"node {source.name!r}")
        self._reader = self._peer.take_reader(source)
        self._check_wanted()
        self._may_be_lent = True
        request = PrepareTransfer(
            self.transfer_id, self.subject, self.is_move, self._site.layout, self._settings.name
        )
        offer = self._repeat(request, Offer)
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
                site.leases.block_pool.store_pending()
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
        positions = self._get_room().missing
        for _ in range(_TRIES):
            positions = self._read_once(positions)
            if not positions:
                return
        raise TransferFailedError(
            f"{len(positions)} blocks of node {self._get_source().name!r} were read {_TRIES} times, and were "
            "never what their checksums say. Does somebody write to them, or is the network broken?"
        )

    def _insert(self) -> None:
        """M3: from here on the blocks can be hit, whatever becomes of the rest."""
        self._enter(MigrationPhase.INSERTING)
        self._check_wanted()
        if self._reader is not None:
            self._peer.leave_reader(self._get_source(), self._reader)
            self._reader = None
        with self._site.lock:
            room = self._get_room()
            # A block that can be hit is written by nobody; the room's own reference keeps it.
            self._give_lease_back()
            self._site.insert(room)
            self._is_inserted = True

    def _enter_acknowledging(self) -> None:
        with self._lock:
            if self._stopped_by is not None:
                raise self._stopped_by
            self._is_too_late = True
        self._enter(MigrationPhase.ACKNOWLEDGING)

    def _acknowledge(self) -> None:
        """M3, M4: a move's subject is ours when the source has answered; a copy is, unless it is wrong."""
        new_ids = [block.block_id for block in self._get_room().blocks]
        message = AcknowledgeTransfer(self.transfer_id, self._get_offer().epoch, new_ids)
        try:
            (self._call if self.is_move else self._repeat)(message, Acknowledged)
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
            self._settings.on_change(self)

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
        self._settings.on_change(self)

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
        """M5: nothing is kept, and the source is told."""
        with self._lock:
            self._is_too_late = True
        if self._reader is not None:
            self._reader.close()
        with self._site.lock:
            room, self.room = self.room, None
            if self._is_inserted and room is not None:
                self._leave_room(room, error)
            elif room is not None:
                if self.lease is not None and self._reader is not None and not self._reader.is_settled():
                    self._settings.on_unsettled(self.lease, self._reader)
                    self.lease = None
                self._give_lease_back()
                self._site.leave(room)
        self._reader = None
        if self._may_be_lent:
            # Once, and whatever comes of it: without this the source's lease ends by itself.
            with suppress(Exception):
                self._call(CancelTransfer(self.transfer_id, str(error)[:200]), Cancelled)
        self.record.set_error(error)
        is_wanted = isinstance(error, MigrationCancelledError)
        self._enter(MigrationPhase.CANCELLED if is_wanted else MigrationPhase.FAILED)

    # ---- reading ---------------------------------------------------------------------------------

    def _read_once(self, positions: Sequence[int]) -> list[int]:
        """Read these blocks, each batch verified while the next one is read.

        Returns:
            Positions whose bytes are not those of their checksums.
        """
        parallel = self._settings.parallel
        wrong: list[int] = []
        verifying: Future[list[int]] | None = None
        for batch in self._make_batches(positions):
            asked = parallel.submit(partial(self._ask_checksums, batch))
            self._read_batch(batch)
            if verifying is not None:
                wrong += verifying.result()
            verifying = parallel.submit(partial(self._verify, batch, asked))
            self._settings.on_change(self)
        if verifying is not None:
            wrong += verifying.result()
        return wrong

    def _make_batches(self, positions: Sequence[int]) -> Iterator[_Batch]:
        """In the order of the ids at the source, so that neighbours are one piece."""
        offered, blocks = self._get_offer().blocks, self._get_room().blocks
        limits = (self._settings.limit, self._limit)
        most_bytes = min(limit.count_batch_bytes(_BATCH_BYTES) for limit in limits)
        size = min(_BATCH_BLOCKS, max(1, most_bytes // self._site.storage.block_bytes))
        order = sorted(positions, key=lambda position: offered[position].block_id)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            yield _Batch(
                some,
                [offered[position].block_id for position in some],
                [blocks[position].block_id for position in some],
            )

    def _read_batch(self, batch: _Batch) -> None:
        """Read it; over another connection where one has failed, unless that one may still write."""
        num_bytes = len(batch.positions) * self._site.storage.block_bytes
        wait_s = max(self._settings.limit.take(num_bytes), self._limit.take(num_bytes))
        if wait_s:
            self._woken.wait(wait_s)
        for num_left in reversed(range(_TRIES)):
            self._check_wanted()
            if self._reader is None:
                self._reader = self._peer.take_reader(self._get_source())
            deadline = self._settings.deadline_clock() + self._settings.lease_s
            try:
                count = self._reader.read(self.transfer_id, batch.remote_ids, batch.local_ids, deadline)
            except TransferFailedError:
                self._reader.close()
                if not num_left or not self._reader.is_settled():
                    raise
                self._reader = None
                continue
            self.status.num_bytes += count.num_bytes
            self.status.num_descriptors += count.num_descriptors
            return

    def _ask_checksums(self, batch: _Batch) -> npt.NDArray[np.uint64]:
        reply = self._repeat(AskChecksums(self.transfer_id, batch.positions), Checksums)
        if len(reply.values) != 8 * len(batch.positions):
            raise TransferFailedError(
                f"node {self._get_source().name!r} has sent {len(reply.values)} bytes of checksums for "
                f"{len(batch.positions)} blocks; each has 8"
            )
        return np.frombuffer(reply.values, ">u8").astype(np.uint64)

    def _verify(self, batch: _Batch, asked: Future[npt.NDArray[np.uint64]]) -> list[int]:
        expected = asked.result()
        found = checksum_blocks(self._site.storage, batch.local_ids)
        wrong = np.flatnonzero(found != expected).tolist()
        self.status.num_done_blocks += len(batch.positions) - len(wrong)
        return [batch.positions[index] for index in wrong]

    # ---- inside ----------------------------------------------------------------------------------

    def _call(self, message: Message, reply_type: type[_Reply]) -> _Reply:
        reply = self._peer.call(message)
        if not isinstance(reply, reply_type):
            raise MigrationError(
                f"the source has answered {type(message).__name__} with {type(reply).__name__}"
            )
        return reply

    def _repeat(self, message: Message, reply_type: type[_Reply]) -> _Reply:
        """Ask until there is an answer, a few times: a message may be lost, and none of these harms twice."""
        for num_left in reversed(range(_TRIES)):
            try:
                return self._call(message, reply_type)
            except PeerUnavailableError:
                self._check_wanted()
                if not num_left:
                    raise
                # For a node that is being restarted, or a connection that was cut and is made anew.
                self._woken.wait(_PAUSE_S)
        raise AssertionError("the loop above returns or raises")

    def _stop(self, reason: MigrationError) -> bool:
        with self._lock:
            if self._is_too_late:
                return False
            if self._stopped_by is None:
                self._stopped_by = reason
        self._woken.set()
        return True

    def _check_wanted(self) -> None:
        if self._stopped_by is not None:
            raise self._stopped_by

    def _give_lease_back(self) -> None:
        """Locked. In quarantine, after a pause longer than the lease, or not: nothing is under way."""
        if self.lease is not None:
            self.lease.give_back()
            self.lease = None

    def _enter(self, phase: MigrationPhase) -> None:
        self.status.phase = phase
        self._settings.on_change(self)

    def _get_source(self) -> NodeDescription:
        assert self._source is not None
        return self._source

    def _get_offer(self) -> Offer:
        assert self._offer is not None
        return self._offer

    def _get_room(self) -> Room:
        assert self.room is not None
        return self.room
