"""The numbered invariants of a node, each executable. They hold whenever the site's lock is free.

M1  a prepared transfer holds its blocks by a read lease until the lease expires
M2  blocks that a pull will read into are not cached until they are inserted, nor are those in quarantine
M3  an ended pull has no reservation; one in doubt has one
M4  an acknowledged, cancelled or expired transfer is not prepared
M5  every reservation belongs to a pull; a quarantine holds the blocks that its transfer may still write
M6  a leased block keeps the id that was offered; it is not served in another generation
M7  the hold of a pull's reservation is open, and holds the blocks of the reservation and no others
M8  a pull that holds arrived blocks (`hold_s`) holds all of them by a read lease, and has no reservation
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_pool.core import invariants
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold
from kv_pool.errors import CorruptedPoolError, StaleTransferError
from kv_pool.ids import BlockId, TransferId
from kv_pool.manager.invariants import check_leases
from kv_pool.manager.leases import LeaseKind, LeaseState
from kv_pool.migration.messages import MigrationPhase
from kv_pool.migration.pool_site import RESERVED, PoolSite
from kv_pool.migration.source import SourceTransfers
from kv_pool.migration.target import Pull


def check(site: PoolSite, source: SourceTransfers, pulls: Sequence[Pull], unsettled: Sequence[Hold]) -> None:
    """Verify M1 to M8, and the invariants of the leases and the pool. Called with the site's lock. O(blocks).

    Args:
        pulls: at least all running pulls.
        unsettled: holds of failed pulls whose bytes may still arrive.
    Raises:
        CorruptedPoolError: names the first invariant that fails. Nothing has changed.
    """
    invariants.check(site.leases.block_pool)  # type: ignore[arg-type]
    check_source(source)
    check_pulls(site, pulls, unsettled)
    check_leases(site.leases)


def check_source(source: SourceTransfers) -> None:
    """Verify M1, M4 and M6."""
    for transfer in source.list_prepared():
        transfer_id = transfer.message.transfer_id
        if source.find_outcome(transfer_id) is not None:
            raise CorruptedPoolError(f"M4: transfer {transfer_id.hex()} has ended and still leases blocks")
        lease, selection = transfer.lease, transfer.selection
        if list(lease.blocks) != selection.blocks or lease.kind is not LeaseKind.READ:
            raise CorruptedPoolError(
                f"M1: {lease!r} is not a read lease on the blocks of transfer {transfer_id.hex()}"
            )
        if lease.state is not LeaseState.ACTIVE:
            continue  # the leases' expire() has ended it; SourceTransfers has not yet noticed
        for block, offered in zip(selection.blocks, selection.offered, strict=True):
            if block.block_id != offered.block_id:
                raise CorruptedPoolError(
                    f"M6: block {offered.block_id} was offered and is now block {block.block_id}"
                )
            if block.generation != offered.generation and _is_served(source, transfer_id, block.block_id):
                raise CorruptedPoolError(
                    f"M6: block {block.block_id} was offered in generation {offered.generation} and is "
                    f"served in generation {block.generation}"
                )


def _is_served(source: SourceTransfers, transfer_id: TransferId, block_id: BlockId) -> bool:
    try:
        source.check_leased(transfer_id, [block_id])
    except StaleTransferError:
        return False
    return True


def check_pulls(site: PoolSite, pulls: Sequence[Pull], unsettled: Sequence[Hold]) -> None:
    """Verify M2, M3, M5, M7 and M8."""
    reserved: list[Hold] = []
    for pull in pulls:
        reservation, phase, held = pull.reservation, pull.status.phase, pull.held
        name = f"pull {pull.transfer_id.hex()} ({phase.value})"
        if reservation is None and phase is MigrationPhase.IN_DOUBT:
            raise CorruptedPoolError(f"M3: {name} has no reservation")
        if held is not None and (
            reservation is not None
            or held.kind is not LeaseKind.READ
            or len(held.blocks) != len(pull.new_ids)
        ):
            raise CorruptedPoolError(f"M8: {held!r} is not a read lease on the blocks that arrived by {name}")
        if reservation is None:
            continue
        if phase.is_ended:
            raise CorruptedPoolError(f"M3: {name} has a reservation")
        hold = reservation.get_hold()
        if reservation.is_ended or set(hold.blocks) != set(reservation.blocks):
            raise CorruptedPoolError(f"M7: {hold!r} does not hold the blocks reserved by {name}")
        reserved.append(hold)
        if not pull.is_inserted:
            _check_uncached([reservation.blocks[position] for position in reservation.missing], name)
    for hold in site.pool.holds.list_holds():
        if hold.reason == RESERVED and hold not in reserved:
            raise CorruptedPoolError(f"M5: {hold!r} belongs to no pull")
    for hold in unsettled:
        if hold.is_released:
            raise CorruptedPoolError(f"M5: {hold!r} is in quarantine and has ended")
        _check_uncached(hold.blocks, repr(hold))


def _check_uncached(blocks: Sequence[KVCacheBlock], name: str) -> None:
    for block in blocks:
        if block.block_hash is not None:
            raise CorruptedPoolError(f"M2: {name} may write to block {block.block_id}, which is cached")
