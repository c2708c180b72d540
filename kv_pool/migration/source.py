"""`SourceTransfers`: what a node lends to targets, and what becomes of it; the calls that a target makes.

                        +-- acknowledge -> ACKNOWLEDGED    a move's subject is given up, exactly here
    prepare -> PREPARED +-- lease over  -> EXPIRED
                        +-- cancel      -> CANCELLED

A transfer is PREPARED as long as its blocks are lent: pinned by a lease to read, and a move's subject frozen.
What became of it is remembered, so that a repeated, late or reordered call is answered as the first was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kv_pool.errors import InvalidContentError, MigrationError, StaleTransferError
from kv_pool.manager.leases import Lease, LeaseKind, LeaseState
from kv_pool.migration.messages import (
    Acknowledged,
    AcknowledgeTransfer,
    AskChecksums,
    Cancelled,
    CancelTransfer,
    Checksums,
    LeaseRenewed,
    Offer,
    PrepareTransfer,
    RenewLease,
)
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.site import Selection
from kv_pool.migration.subjects import describe_subject
from kv_pool.storage.checksums import checksum_blocks

MAX_REMEMBERED = 65_536


class TransferState(Enum):
    """What became of a transfer; see the picture above."""

    ACKNOWLEDGED = "acknowledged"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class Transfer:
    """One that is lent. Only `SourceTransfers` changes it.

    Attributes:
        lease: None where the subject has no blocks.
        positions: by block id of the offer the place in it.
        deadline: of the source's clock; that of the lease.
    """

    message: PrepareTransfer
    selection: Selection
    lease: Lease | None
    positions: dict[int, int]
    deadline: float


@dataclass(frozen=True)
class Outcome:
    """What became of a transfer that is not lent any more.

    Attributes:
        new_ids: of its blocks at the target, if it was acknowledged.
        reason: why it was cancelled, if that is known.
        is_invalid: content was reported wrong while it was lent.
    """

    state: TransferState
    new_ids: tuple[int, ...] = ()
    reason: str = ""
    is_invalid: bool = False


class SourceTransfers:
    """The transfers that one site is the source of.

    Args:
        name: the node's.
        epoch: the node's; it names one life of the process, see `make_epoch`.
        lease_s: how long blocks are lent without a sign of life from the target.
        clock: the time in seconds, never falling; that of the site's leases.
        on_change: called with the transfer when one was lent or has ended, without the site's lock, and
            before the target is answered.

    Safe for several threads: all state is behind the site's lock.
    """

    def __init__(
        self,
        site: PoolSite,
        name: str,
        epoch: str,
        lease_s: float,
        clock: Callable[[], float],
        on_change: Callable[[Transfer], object] = lambda transfer: None,
    ) -> None:
        self._site = site
        self._name = name
        self._epoch = epoch
        self._lease_s = lease_s
        self._clock = clock
        self._on_change = on_change
        self._lent: dict[bytes, Transfer] = {}
        # Apart, since a forgotten acknowledgement of a move would be answered with its contrary.
        self._acknowledged: OrderedDict[bytes, Outcome] = OrderedDict()
        self._broken_off: OrderedDict[bytes, Outcome] = OrderedDict()

    # ---- what a target asks ----------------------------------------------------------------------

    def prepare(self, message: PrepareTransfer) -> Offer:
        """Lend the blocks of a subject (M1). Repeated: the same offer, its lease renewed.

        Raises:
            LayoutMismatchError: the target's blocks mean something else.
            StaleTransferError: this transfer has ended before.
            What `PoolSite.select` and `freeze` raise. Nothing has changed in any case.
        """
        site = self._site
        site.layout.check_same(message.layout, f"node {message.target!r}")
        self.expire()
        with site.lock:
            transfer, is_new = self._prepare(message)
        if is_new:
            self._on_change(transfer)
        selection = transfer.selection
        return Offer(message.transfer_id, self._epoch, self._lease_s, selection.offered, selection.state)

    def compute_checksums(self, message: AskChecksums) -> Checksums:
        """Checksums of lent blocks. The bytes are read without the site's lock.

        Raises:
            StaleTransferError: they are not lent, or were not all the time.
        """
        with self._site.lock:
            transfer = self._find(message.transfer_id)
            blocks = transfer.selection.blocks
            if not all(0 <= position < len(blocks) for position in message.positions):
                raise StaleTransferError(
                    f"transfer {message.transfer_id.hex()} has {len(blocks)} blocks; there is no checksum of "
                    f"one of the positions {min(message.positions)} to {max(message.positions)}"
                )
            block_ids = [transfer.selection.offered[position].block_id for position in message.positions]
        self.check_lent(message.transfer_id, block_ids)
        values = checksum_blocks(self._site.storage, block_ids)
        self.check_lent(message.transfer_id, block_ids)
        return Checksums(values.astype(">u8").tobytes())

    def renew(self, message: RenewLease) -> LeaseRenewed:
        """Lend the blocks for another `lease_s` from now on.

        Raises:
            StaleTransferError: they are not lent any more.
            InvalidContentError: content of one of them was reported wrong.
        """
        with self._site.lock:
            transfer = self._find(message.transfer_id)
            if self._has_invalid_content(transfer):
                raise self._make_invalid(message.transfer_id)
            self._extend(transfer)
        return LeaseRenewed(self._lease_s)

    def acknowledge(self, message: AcknowledgeTransfer) -> Acknowledged:
        """The target has the blocks: give the lease back, and a move's subject up (M4).

        An acknowledgement of an earlier life of this node is accepted: what it lent went with it.

        Raises:
            StaleTransferError: they were not lent any more, and stay ours.
            InvalidContentError: content of one of them was reported wrong since; they stay ours.
            MigrationError: it is meant for another node.
        """
        if message.epoch != self._epoch:
            if get_epoch_name(message.epoch) != self._name:
                raise MigrationError(
                    f"node {self._name!r} was asked to acknowledge a transfer of node "
                    f"{get_epoch_name(message.epoch)!r}; do two nodes have one address?"
                )
            return Acknowledged()
        with self._site.lock:
            if message.transfer_id in self._acknowledged:
                return Acknowledged()
            transfer = self._find(message.transfer_id)
            is_invalid = self._has_invalid_content(transfer)
            if is_invalid:
                reason = "content was reported wrong"
                self._end_unacknowledged(
                    transfer, Outcome(TransferState.CANCELLED, reason=reason, is_invalid=True)
                )
            else:
                if transfer.message.is_move:
                    self._site.release(transfer.message.subject, transfer.message.target)
                self._end(transfer, Outcome(TransferState.ACKNOWLEDGED, tuple(message.new_ids)))
        self._on_change(transfer)
        if is_invalid:
            raise self._make_invalid(message.transfer_id)
        return Acknowledged()

    def cancel(self, message: CancelTransfer) -> Cancelled:
        """Take the blocks back, and refuse to lend under this id later: a `PrepareTransfer` may be late."""
        with self._site.lock:
            if message.transfer_id in self._acknowledged:
                return Cancelled(is_acknowledged=True)
            transfer = self._lent.get(message.transfer_id)
            if transfer is None:
                if message.transfer_id not in self._broken_off:
                    self._remember(
                        message.transfer_id, Outcome(TransferState.CANCELLED, reason=message.reason)
                    )
                return Cancelled()
            self._end_unacknowledged(transfer, Outcome(TransferState.CANCELLED, reason=message.reason))
        self._on_change(transfer)
        return Cancelled()

    # ---- what this node asks ---------------------------------------------------------------------

    def check_lent(self, transfer_id: bytes, block_ids: Sequence[int]) -> None:
        """Raise StaleTransferError unless these blocks are lent by this transfer, as they were offered.

        It is an InvalidContentError where their content was reported wrong since. A backend that serves the
        bytes itself calls this before they are read, and after.
        """
        with self._site.lock:
            transfer = self._find(transfer_id)
            for block_id in block_ids:
                position = transfer.positions.get(block_id)
                if position is None:
                    raise StaleTransferError(
                        f"block {block_id} is not one of those that transfer {transfer_id.hex()} lends"
                    )
                block = transfer.selection.blocks[position]
                if block.generation != transfer.selection.offered[position].generation:
                    raise self._make_invalid(transfer_id)

    def expire(self) -> None:
        """End leases that are overdue (M4); subjects stay here."""
        with self._site.lock:
            overdue = self._end_overdue()
        for transfer in overdue:
            self._on_change(transfer)

    def find_outcome(self, transfer_id: bytes) -> Outcome | None:
        """What became of it: None where it is lent still, or not known."""
        with self._site.lock:
            return self._acknowledged.get(transfer_id) or self._broken_off.get(transfer_id)

    def list_lent(self) -> list[Transfer]:
        """Transfers whose blocks are lent now, oldest first."""
        with self._site.lock:
            return list(self._lent.values())

    # ---- inside, locked --------------------------------------------------------------------------

    def _has_invalid_content(self, transfer: Transfer) -> bool:
        """Was content reported wrong since it was offered? A lent block is neither reused nor moved."""
        selection = transfer.selection
        return any(
            block.generation != offered.generation
            for block, offered in zip(selection.blocks, selection.offered, strict=True)
        )

    def _make_invalid(self, transfer_id: bytes) -> InvalidContentError:
        return InvalidContentError(
            f"node {self._name!r} has reported content of transfer {transfer_id.hex()} wrong since it was "
            "offered; compute it again, or fetch it from another node"
        )

    def _prepare(self, message: PrepareTransfer) -> tuple[Transfer, bool]:
        known = self._lent.get(message.transfer_id)
        if known is not None:
            if known.message != message:
                raise StaleTransferError(
                    f"transfer {message.transfer_id.hex()} lends {describe_subject(known.message.subject)} "
                    f"to node {known.message.target!r}; choose another id"
                )
            self._extend(known)
            return known, False
        self._check_not_over(message.transfer_id)
        site = self._site
        selection = site.select(message.subject, message.is_move)
        deadline = self._clock() + self._lease_s
        lease = None
        if selection.blocks:
            holder = f"transfer {message.transfer_id.hex()} to {message.target}"
            lease = site.leases.lend(selection.blocks, deadline, holder, LeaseKind.READ)
        try:
            if message.is_move:
                site.freeze(message.subject)
        except BaseException:
            if lease is not None:
                lease.give_back()
            raise
        positions = {offered.block_id: position for position, offered in enumerate(selection.offered)}
        transfer = Transfer(message, selection, lease, positions, deadline)
        self._lent[message.transfer_id] = transfer
        return transfer, True

    def _find(self, transfer_id: bytes) -> Transfer:
        """The transfer, if it is lent. Raises StaleTransferError."""
        transfer = self._lent.get(transfer_id)
        if transfer is None:
            self._check_not_over(transfer_id)
            raise StaleTransferError(f"node {self._name!r} knows no transfer {transfer_id.hex()}")
        if self._is_overdue(transfer):
            raise StaleTransferError(
                f"the lease of transfer {transfer_id.hex()} has ended, after {self._lease_s:g} s without a "
                "sign of life; the source keeps what it has"
            )
        return transfer

    def _check_not_over(self, transfer_id: bytes) -> None:
        outcome = self._acknowledged.get(transfer_id) or self._broken_off.get(transfer_id)
        if outcome is not None:
            if outcome.is_invalid:
                raise self._make_invalid(transfer_id)
            raise StaleTransferError(
                f"transfer {transfer_id.hex()} is over: it has been {outcome.state.value} at node "
                f"{self._name!r}"
            )

    def _is_overdue(self, transfer: Transfer) -> bool:
        # Whoever else calls the leases' expire() may have been there first.
        is_taken_back = transfer.lease is not None and transfer.lease.state is not LeaseState.ACTIVE
        return is_taken_back or transfer.deadline <= self._clock()

    def _extend(self, transfer: Transfer) -> None:
        deadline = self._clock() + self._lease_s
        if transfer.lease is not None:
            transfer.lease.extend(deadline)
        transfer.deadline = deadline

    def _end_overdue(self) -> list[Transfer]:
        overdue = [transfer for transfer in self._lent.values() if self._is_overdue(transfer)]
        for transfer in overdue:
            self._end_unacknowledged(transfer, Outcome(TransferState.EXPIRED))
        return overdue

    def _end_unacknowledged(self, transfer: Transfer, outcome: Outcome) -> None:
        if transfer.message.is_move:
            self._site.thaw(transfer.message.subject)
        self._end(transfer, outcome)

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        transfer_id = transfer.message.transfer_id
        del self._lent[transfer_id]
        if transfer.lease is not None and transfer.lease.state is LeaseState.ACTIVE:
            transfer.lease.give_back()
        self._remember(transfer_id, outcome)

    def _remember(self, transfer_id: bytes, outcome: Outcome) -> None:
        is_acknowledged = outcome.state is TransferState.ACKNOWLEDGED
        remembered = self._acknowledged if is_acknowledged else self._broken_off
        remembered[transfer_id] = outcome
        if len(remembered) > MAX_REMEMBERED:
            remembered.popitem(last=False)


def make_epoch(name: str, random_hex: str) -> str:
    """The name of one life of a node: the node's own, and something new each time."""
    return f"{name}@{random_hex}"


def get_epoch_name(epoch: str) -> str:
    """The node of an epoch."""
    return epoch.rpartition("@")[0]
