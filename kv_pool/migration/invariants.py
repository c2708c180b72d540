"""The numbered truths about a node, each executable. They hold whenever nobody has the site's lock.

M1  a transfer that is lent has its blocks pinned by a lease to read, as long as the lease is not over
M2  what a pull is to read into is lent to it for writing, and is not cached, until it is inserted
M3  a pull that has ended has no room and no lease to write; one in doubt has room, and writes nothing
M4  a transfer that was acknowledged, cancelled or has expired is not lent
M5  a lease to write that belongs to no pull is one whose transfer may still write: nothing else is
M6  a block that is lent has the id that it was offered with; in another generation it is not served
M7  the room of a pull is held: its hold is open, and has the blocks of the room and no others
M8  what a pull holds on is all that has arrived, by a lease to read: it has no room any more
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_pool.core import invariants
from kv_pool.errors import CorruptedPoolError, StaleTransferError
from kv_pool.manager.invariants import check_leases
from kv_pool.manager.leases import Lease, LeaseKind, LeaseState
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.source import SourceTransfers
from kv_pool.migration.status import MigrationPhase
from kv_pool.migration.target import Pull


def check(site: PoolSite, source: SourceTransfers, pulls: Sequence[Pull], unsettled: Sequence[Lease]) -> None:
    """Verify M1 to M8, those of the leases, and the pool's own. The site's lock is held. O(blocks).

    Args:
        pulls: all that run, at least.
        unsettled: leases to write of pulls that have failed, and whose bytes may still arrive.
    Raises:
        CorruptedPoolError: names the first that fails. Nothing is changed.
    """
    invariants.check(site.leases.block_pool)  # type: ignore[arg-type]
    check_source(source)
    check_pulls(site, pulls, unsettled)
    check_rooms(pulls)
    check_leases(site.leases)


def check_source(source: SourceTransfers) -> None:
    """M1, M4, M6."""
    for transfer in source.list_lent():
        transfer_id = transfer.message.transfer_id
        if source.find_outcome(transfer_id) is not None:
            raise CorruptedPoolError(f"M4: transfer {transfer_id.hex()} is over, and lent")
        lease, selection = transfer.lease, transfer.selection
        if lease is None:
            if selection.blocks:
                raise CorruptedPoolError(f"M1: transfer {transfer_id.hex()} has blocks and no lease")
            continue
        if list(lease.blocks) != selection.blocks or lease.kind is not LeaseKind.READ:
            raise CorruptedPoolError(f"M1: {lease!r} is not about the blocks of transfer {transfer_id.hex()}")
        if lease.state is not LeaseState.ACTIVE:
            continue  # its end was noticed by whoever called expire(), and is on its way here
        for block, offered in zip(selection.blocks, selection.offered, strict=True):
            if block.block_id != offered.block_id:
                raise CorruptedPoolError(
                    f"M6: block {offered.block_id} was offered, and is block {block.block_id} now"
                )
            if block.generation != offered.generation and _is_served(source, transfer_id, block.block_id):
                raise CorruptedPoolError(
                    f"M6: block {block.block_id} was offered in generation {offered.generation}, and is "
                    f"served in generation {block.generation}"
                )


def _is_served(source: SourceTransfers, transfer_id: bytes, block_id: int) -> bool:
    try:
        source.check_lent(transfer_id, [block_id])
    except StaleTransferError:
        return False
    return True


def check_pulls(site: PoolSite, pulls: Sequence[Pull], unsettled: Sequence[Lease]) -> None:
    """M2, M3, M5, M8."""
    written: list[Lease] = list(unsettled)
    for pull in pulls:
        room, lease = pull.room, pull.lease
        name = f"pull {pull.transfer_id.hex()}, which is {pull.status.phase.value}"
        if pull.status.phase.is_ended and (room is not None or lease is not None):
            raise CorruptedPoolError(f"M3: {name}, has room or a lease")
        if pull.status.phase is MigrationPhase.IN_DOUBT and (room is None or lease is not None):
            raise CorruptedPoolError(f"M3: {name}, has no room, or still writes")
        held = pull.held
        if held is not None and (
            room is not None
            or held.kind is not LeaseKind.READ
            or len(held.blocks) != len(pull.record.new_ids)
        ):
            raise CorruptedPoolError(f"M8: {held!r} is not about what has arrived by {name}")
        if lease is None:
            continue
        written.append(lease)
        missing = [] if room is None else [room.blocks[position] for position in room.missing]
        if list(lease.blocks) != missing or lease.kind is not LeaseKind.WRITE:
            raise CorruptedPoolError(f"M2: {lease!r} is not about what {name}, reads into")
        for block in missing:
            if block.block_hash is not None:
                raise CorruptedPoolError(f"M2: {name}, reads into block {block.block_id}, which is cached")
    for lease in site.leases.list_leases():
        if lease.kind is LeaseKind.WRITE and lease not in written:
            raise CorruptedPoolError(f"M5: {lease!r} belongs to no pull, and is not in quarantine for one")


def check_rooms(pulls: Sequence[Pull]) -> None:
    """M7."""
    for pull in pulls:
        room = pull.room
        if room is not None and (room.hold.is_released or set(room.hold.blocks) != set(room.blocks)):
            raise CorruptedPoolError(f"M7: {room.hold!r} is not that of the room of {pull.transfer_id.hex()}")
