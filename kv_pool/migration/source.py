"""`SourceTransfers`: the transfers of a source node, and the calls that targets make for them.

                        +-- acknowledge   -> ACKNOWLEDGED    a move's subject is released, exactly here
    prepare -> PREPARED +-- lease expired -> EXPIRED
                        +-- cancel        -> CANCELLED

While a transfer is PREPARED, its blocks are held by a read lease, and a move's subject is frozen. The outcome
is remembered, so a repeated, late or reordered call gets the same answer as the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kv_pool.errors import InvalidContentError, MigrationError, StaleTransferError
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.manager.leases import Lease, LeaseKind, LeaseState
from kv_pool.migration import messages
from kv_pool.migration.messages import describe_subject
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.site import Selection
from kv_pool.storage.checksums import checksum_blocks

MAX_REMEMBERED = 65_536


class TransferState(Enum):
    """The final state of a transfer; see the diagram above."""

    ACKNOWLEDGED = "acknowledged"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an ended transfer.

    Attributes:
        new_ids: ids of its blocks at the target, if acknowledged.
        reason: why it was cancelled or has expired; "" if unknown.
        is_invalid: content was reported invalid while the transfer was prepared.
    """

    state: TransferState
    new_ids: tuple[BlockId, ...] = ()
    reason: str = ""
    is_invalid: bool = False


@dataclass(eq=False)
class Transfer:
    """A prepared transfer. Only `SourceTransfers` changes it.

    Attributes:
        is_offered: False while `prepare` runs, and if it was interrupted: the transfer then ends unused.
        outcome: set when the transfer starts to end; if that is interrupted, a later call completes it.
        positions: block id -> position in the offer.
    """

    message: messages.PrepareTransfer
    selection: Selection
    lease: Lease
    positions: dict[BlockId, int]
    is_offered: bool = False
    outcome: Outcome | None = None


class SourceTransfers:
    """The transfers whose source is one site. Thread-safe: the site's lock guards all state.

    Args:
        name: of the node.
        incarnation: identifies this start of the node; see `make_incarnation`.
        lease_s: duration of a lease unless the target renews it.
        clock: monotonic time in seconds, the clock of the site's leases.
        on_change: called with a transfer that was prepared or has ended, without the site's lock and before
            the reply to the target.
    """

    def __init__(
        self,
        site: PoolSite,
        name: NodeName,
        incarnation: str,
        lease_s: float,
        clock: Callable[[], float],
        on_change: Callable[[Transfer], object] = lambda transfer: None,
    ) -> None:
        self._site = site
        self._name = name
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._clock = clock
        self._on_change = on_change
        self._prepared: dict[TransferId, Transfer] = {}
        # A separate limit: a forgotten acknowledgement of a move would be answered with an error.
        self._acknowledged: OrderedDict[TransferId, Outcome] = OrderedDict()
        self._broken_off: OrderedDict[TransferId, Outcome] = OrderedDict()

    # ---- calls of a target -----------------------------------------------------------------------

    def prepare(self, message: messages.PrepareTransfer) -> messages.Offer:
        """Lease the blocks of a subject (M1).

        A repeated call renews the lease and returns the same offer.

        Raises:
            LayoutMismatchError: the target's block layout differs.
            StaleTransferError: this transfer has ended.
            Errors of `PoolSite.select` and `freeze`. Nothing has changed in all cases.
        """
        site = self._site
        site.layout.check_same(message.layout, f"node {message.target!r}")
        self.expire()
        with site.lock:
            transfer, is_new = self._prepare(message)
        if is_new:
            self._on_change(transfer)
        selection = transfer.selection
        return messages.Offer(
            message.transfer_id, self._incarnation, self._lease_s, selection.offered, selection.state
        )

    def compute_checksums(self, message: messages.AskChecksums) -> messages.Checksums:
        """Return the checksums of leased blocks. Reads the bytes without the site's lock.

        Raises:
            StaleTransferError: the blocks are not leased, or their lease ended during the read.
        """
        with self._site.lock:
            transfer = self._find(message.transfer_id)
            blocks = transfer.selection.blocks
            if not all(0 <= position < len(blocks) for position in message.positions):
                raise StaleTransferError(
                    f"transfer {message.transfer_id.hex()} has {len(blocks)} blocks; checksums requested "
                    f"for positions {min(message.positions)} to {max(message.positions)}"
                )
            block_ids = [transfer.selection.offered[position].block_id for position in message.positions]
        self.check_leased(message.transfer_id, block_ids)
        values = checksum_blocks(self._site.storage, block_ids)
        self.check_leased(message.transfer_id, block_ids)
        return messages.Checksums(values.astype(">u8").tobytes())

    def renew(self, message: messages.RenewLease) -> messages.Acknowledged:
        """Renew the lease of a transfer for `lease_s` from now.

        Raises:
            StaleTransferError: the lease has ended.
            InvalidContentError: the content of a block was reported invalid.
        """
        with self._site.lock:
            transfer = self._find(message.transfer_id)
            if self._has_invalid_content(transfer):
                raise self._make_invalid(message.transfer_id)
            transfer.lease.extend(self._clock() + self._lease_s)
        return messages.Acknowledged()

    def acknowledge(self, message: messages.AcknowledgeTransfer) -> messages.Acknowledged:
        """End the lease of a transfer that the target has completed; release a move's subject (M4).

        An acknowledgement for an earlier incarnation of this node is accepted: its leases ended with it.

        Raises:
            StaleTransferError: the lease had ended; this node keeps the subject.
            InvalidContentError: the content of a block was reported invalid; this node keeps the subject.
            MigrationError: the acknowledgement is for another node.
        """
        if message.incarnation != self._incarnation:
            if get_node_name(message.incarnation) != self._name:
                raise MigrationError(
                    f"node {self._name!r} received an acknowledgement for node "
                    f"{get_node_name(message.incarnation)!r}; check whether two nodes have the same address"
                )
            return messages.Acknowledged()
        with self._site.lock:
            if message.transfer_id in self._acknowledged:
                return messages.Acknowledged()
            transfer = self._find(message.transfer_id)
            outcome = transfer.outcome
            if outcome is None and self._has_invalid_content(transfer):
                reason = "content was reported invalid"
                outcome = Outcome(TransferState.CANCELLED, reason=reason, is_invalid=True)
            elif outcome is None:
                outcome = Outcome(TransferState.ACKNOWLEDGED, tuple(message.new_ids))
            self._end(transfer, outcome)
        self._on_change(transfer)
        if outcome.state is not TransferState.ACKNOWLEDGED:
            self._check_not_over(message.transfer_id)
        return messages.Acknowledged()

    def cancel(self, message: messages.CancelTransfer) -> messages.Cancelled:
        """End the lease of a transfer, and refuse a delayed `PrepareTransfer` with this id."""
        with self._site.lock:
            if message.transfer_id in self._acknowledged:
                return messages.Cancelled(is_acknowledged=True)
            transfer = self._prepared.get(message.transfer_id)
            if transfer is None:
                if message.transfer_id not in self._broken_off:
                    self._remember(
                        message.transfer_id, Outcome(TransferState.CANCELLED, reason=message.reason)
                    )
                return messages.Cancelled()
            outcome = transfer.outcome or Outcome(TransferState.CANCELLED, reason=message.reason)
            self._end(transfer, outcome)
        self._on_change(transfer)
        return messages.Cancelled(outcome.state is TransferState.ACKNOWLEDGED)

    # ---- calls of this node ----------------------------------------------------------------------

    def check_leased(self, transfer_id: TransferId, block_ids: Sequence[BlockId]) -> None:
        """Raise StaleTransferError unless this transfer leases all these blocks, as they were offered.

        Raise InvalidContentError if their content was reported invalid since. A backend that serves bytes
        itself calls this before and after reading them.
        """
        with self._site.lock:
            transfer = self._find(transfer_id)
            for block_id in block_ids:
                position = transfer.positions.get(block_id)
                if position is None:
                    raise StaleTransferError(
                        f"block {block_id} is not leased by transfer {transfer_id.hex()}"
                    )
                block = transfer.selection.blocks[position]
                if block.generation != transfer.selection.offered[position].generation:
                    raise self._make_invalid(transfer_id)

    def expire_target(self, target: NodeName) -> None:
        """End the leases of a target whose process has ended, as if they had expired."""
        self._expire(
            lambda transfer: transfer.message.target == target,
            "has closed its connections: its process has ended, or it cannot be reached",
        )

    def expire(self) -> None:
        """End the transfers whose lease has expired (M4); their subjects stay here."""
        self._expire(self._is_overdue, f"did not renew its lease for {self._lease_s:g} s")

    def _expire(self, is_over: Callable[[Transfer], bool], why: str) -> None:
        with self._site.lock:
            over = [transfer for transfer in self._prepared.values() if is_over(transfer)]
            for transfer in over:
                reason = f"node {transfer.message.target!r} {why}; the source keeps its blocks"
                self._end(transfer, transfer.outcome or Outcome(TransferState.EXPIRED, reason=reason))
        for transfer in over:
            self._on_change(transfer)

    def find_outcome(self, transfer_id: TransferId) -> Outcome | None:
        """Return the outcome of a transfer; None if it is still prepared, or unknown."""
        with self._site.lock:
            return self._acknowledged.get(transfer_id) or self._broken_off.get(transfer_id)

    def is_prepared(self, transfer_id: TransferId) -> bool:
        """Return True while the transfer leases its blocks."""
        with self._site.lock:
            return transfer_id in self._prepared

    def list_prepared(self) -> list[Transfer]:
        """Return the prepared transfers, oldest first."""
        with self._site.lock:
            return list(self._prepared.values())

    # ---- inside, locked --------------------------------------------------------------------------

    def _has_invalid_content(self, transfer: Transfer) -> bool:
        """Return True if content was reported invalid since the offer.

        Leased blocks are neither reused nor moved, so nothing else changes their generation.
        """
        selection = transfer.selection
        return any(
            block.generation != offered.generation
            for block, offered in zip(selection.blocks, selection.offered, strict=True)
        )

    def _make_invalid(self, transfer_id: TransferId) -> InvalidContentError:
        return InvalidContentError(
            f"node {self._name!r} reported content of transfer {transfer_id.hex()} invalid after the offer; "
            "recompute it or fetch it from another node"
        )

    def _prepare(self, message: messages.PrepareTransfer) -> tuple[Transfer, bool]:
        known = self._prepared.get(message.transfer_id)
        if known is not None and not known.is_offered:
            self._end(known, Outcome(TransferState.CANCELLED, reason="its preparation was interrupted"))
        elif known is not None:
            if known.message != message:
                raise StaleTransferError(
                    f"transfer {message.transfer_id.hex()} already leases "
                    f"{describe_subject(known.message.subject)} to node {known.message.target!r}; choose "
                    "another id"
                )
            known.lease.extend(self._clock() + self._lease_s)
            return known, False
        self._check_not_over(message.transfer_id)
        site = self._site
        selection = site.select(message.subject, message.is_move)
        holder = f"transfer {message.transfer_id.hex()} to {message.target}"
        lease = site.leases.acquire(selection.blocks, self._clock() + self._lease_s, holder, LeaseKind.READ)
        positions = {offered.block_id: position for position, offered in enumerate(selection.offered)}
        transfer = Transfer(message, selection, lease, positions)
        self._prepared[message.transfer_id] = transfer
        try:
            if message.is_move:
                site.freeze(message.subject, selection.rows)
        except Exception:
            if not site.pool.is_changing:  # otherwise `expire` ends it after the repair
                del self._prepared[message.transfer_id]
                lease.release()
            raise
        transfer.is_offered = True
        return transfer, True

    def _find(self, transfer_id: TransferId) -> Transfer:
        """Return a prepared transfer. Raises StaleTransferError."""
        transfer = self._prepared.get(transfer_id)
        if transfer is None:
            self._check_not_over(transfer_id)
            raise StaleTransferError(f"node {self._name!r} has no transfer {transfer_id.hex()}")
        if transfer.outcome is None and self._is_overdue(transfer):
            raise StaleTransferError(
                f"the lease of transfer {transfer_id.hex()} expired after {self._lease_s:g} s without "
                "renewal; the source keeps its blocks"
            )
        return transfer

    def _check_not_over(self, transfer_id: TransferId) -> None:
        outcome = self._acknowledged.get(transfer_id) or self._broken_off.get(transfer_id)
        if outcome is not None:
            if outcome.is_invalid:
                raise self._make_invalid(transfer_id)
            raise StaleTransferError(
                f"transfer {transfer_id.hex()} has ended: it was {outcome.state.value} at node {self._name!r}"
            )

    def _is_overdue(self, transfer: Transfer) -> bool:
        lease, is_interrupted = transfer.lease, transfer.outcome is not None
        # Another caller of the leases' expire() may have ended the lease already.
        return is_interrupted or lease.state is not LeaseState.ACTIVE or lease.deadline <= self._clock()

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        """End a prepared transfer; it may be called again with the same outcome."""
        transfer.outcome = outcome
        message = transfer.message
        if message.is_move and outcome.state is TransferState.ACKNOWLEDGED:
            self._site.release(message.subject, message.target)
        elif message.is_move:
            self._site.thaw(message.subject)
        self._remember(message.transfer_id, outcome)
        if transfer.lease.state is LeaseState.ACTIVE:
            transfer.lease.release()
        del self._prepared[message.transfer_id]

    def _remember(self, transfer_id: TransferId, outcome: Outcome) -> None:
        is_acknowledged = outcome.state is TransferState.ACKNOWLEDGED
        remembered = self._acknowledged if is_acknowledged else self._broken_off
        remembered[transfer_id] = outcome
        if len(remembered) > MAX_REMEMBERED:
            remembered.popitem(last=False)


def make_incarnation(name: NodeName, random_hex: str) -> str:
    """Return the id of one incarnation of a node: the node's name and a random part."""
    return f"{name}@{random_hex}"


def get_node_name(incarnation: str) -> NodeName:
    """Return the node name of an incarnation."""
    return NodeName(incarnation.rpartition("@")[0])
