"""`BlockLeases`: leases on blocks that transfers read or write; no block is reused or leaked in flight."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, SupportsIndex
from weakref import ref

from kv_pool.core.arguments import as_list_of, check_number, check_type, refuse_copy
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold, HoldState
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, StaleLeaseError
from kv_pool.ids import LeaseId


class LeaseKind(Enum):
    """The access that a transfer has to leased blocks."""

    READ = "read"
    WRITE = "write"


class LeaseState(Enum):
    """The state of a lease.

        READ    ACTIVE -> RELEASED                       release()
                ACTIVE -> EXPIRED                        expire(), the deadline has passed
        WRITE   ACTIVE -> RELEASED                       release()
                ACTIVE -> QUARANTINED -> RELEASED        expire(), then release()

    ACTIVE and QUARANTINED leases hold a reference on each of their blocks; the other states hold none.
    """

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass(eq=False, repr=False)
class Lease:
    """A lease on the blocks of one transfer. Created by `BlockLeases.acquire`.

    Attributes:
        lease_id: unique; never reused.
        blocks: the leased blocks, in the order of the call.
        holder: a description of the transfer, for messages and lists.
        hold: the hold that owns the references and keeps the blocks at their ids.
    """

    leases: "BlockLeases"
    lease_id: LeaseId
    kind: LeaseKind
    blocks: tuple[KVCacheBlock, ...]
    holder: str
    hold: Hold
    _last_deadline: float
    _is_reported: bool = False  # as overdue

    @property
    def deadline(self) -> float:
        """The deadline, a time of the leases' clock; after it has passed, the last one that was set."""
        return self._last_deadline if self.hold.until is None else self.hold.until

    @property
    def state(self) -> LeaseState:
        """The state of the lease, derived from its hold."""
        if self.hold.state is HoldState.OPEN:
            return LeaseState.ACTIVE
        return LeaseState[self.hold.state.name]

    def release(self) -> None:
        """Release the lease: the transfer has ended and no longer accesses the blocks.

        A lease past its deadline can be released until `BlockLeases.expire` has ended it; a quarantined lease
        can always be released. In a pool whose last call was interrupted, `repair` drops its references.

        Raises:
            StaleLeaseError: the lease has ended. Nothing has changed.
        """
        self._check_live()
        self.hold.release()
        self.leases._leases.pop(self.hold, None)

    def extend(self, deadline: float) -> None:
        """Set a new deadline, later or earlier, such as on a heartbeat. O(log leases).

        Raises:
            StaleLeaseError: the lease has ended or is quarantined.
            InvalidArgumentError: the new deadline has passed. In both cases nothing has changed.
        """
        self._check_live()
        check_number("deadline", deadline)
        if self.state is LeaseState.QUARANTINED:
            raise StaleLeaseError(
                f"{self!r} cannot be extended: its deadline has passed and was reported. Release it with "
                "release() once the transfer is known to be over."
            )
        self.hold.extend(deadline)
        self._last_deadline = deadline

    def _check_live(self) -> None:
        if self.hold.is_released:
            raise StaleLeaseError(f"{self!r} is over; its blocks may hold other content by now")

    def __repr__(self) -> str:
        return (
            f"Lease({self.lease_id}, {self.kind.value}, {len(self.blocks)} blocks, until {self.deadline}, "
            f"{self.holder!r}, {self.state.value})"
        )


class BlockLeases:
    """The leases on blocks of one pool that transfers read or write; each lease is a hold with a deadline.

        >>> from kv_pool import BlockPool
        >>> from kv_pool.manager.leases import BlockLeases, LeaseKind
        >>> pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=4)
        >>> leases = BlockLeases(pool, clock=lambda: 0.0)
        >>> blocks = pool.get_new_blocks(2)
        >>> lease = leases.acquire(blocks, 30.0, "prefill worker 3", LeaseKind.WRITE)
        >>> pool.free_blocks(blocks)      # the request was aborted; the blocks are not reused meanwhile
        >>> pool.get_num_free_blocks()
        7
        >>> lease.release()
        >>> pool.get_num_free_blocks()
        9

    A lease to **read** (the source of a transfer) may expire: `expire` drops its references. A reader that is
    late then reads other content, which checksums and generations detect. A lease to **write** (the target)
    cannot expire, because bytes may still be in flight after its request has ended. After its deadline it is
    quarantined, reported and listed; only `release` frees its blocks, once the transfer is known to be
    over (done, disconnected, or its agent gone).

    Args:
        clock: returns the time in seconds and never goes backwards; deadlines are times of it. It becomes the
            clock of the pool's holds. None: the pool's own clock.

    Not thread-safe: use it from the thread that uses the pool.
    """

    def __init__(self, block_pool: BlockPoolCore, clock: Callable[[], float] | None = None) -> None:
        check_type("block_pool", block_pool, BlockPoolCore)
        self.block_pool = block_pool
        self._book = block_pool.holds
        if clock is not None:
            self._book.clock = clock
        self._leases: dict[Hold, Lease] = {}  # active and quarantined leases, oldest first
        self._num_overdue = 0  # overdue holds of the pool that are already processed
        self._last_id = 0
        self._opening: Lease | None = None  # by a call that runs now, or was interrupted
        self._book.add_party(ref(self))

    def __repr__(self) -> str:
        return f"<BlockLeases: {len(self._leases)} leases of {self.num_leased_blocks} blocks>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    @property
    def num_leased_blocks(self) -> int:
        """Number of distinct leased blocks, quarantined ones included. O(leased blocks)."""
        return len(self.list_leased_blocks())

    def acquire(
        self,
        blocks: Iterable[KVCacheBlock],
        deadline: float,
        holder: str,
        kind: LeaseKind = LeaseKind.READ,
    ) -> Lease:
        """Hold each block until the lease is released or expires.

        Args:
            blocks: distinct blocks of this pool. To read: cached (free or not) or in use. To write: in use by
                one holder, without a hash, and not leased; their previous content is flushed to the lower
                tiers before this returns. A block that is being written cannot be leased again.
        Cost: O(blocks + leased blocks).
        Raises:
            InvalidArgumentError: a deadline that has passed.
            InvalidBlockError: a block that does not meet the conditions above. In both cases nothing has
                changed.
        """
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        check_number("deadline", deadline)
        check_type("holder", holder, str)
        check_type("kind", kind, LeaseKind)
        now = self._book.clock()
        if not deadline > now:
            raise InvalidArgumentError(
                f"{holder} requests a lease on {len(listed)} blocks until {deadline}; it is {now} now. A "
                "lease needs a deadline in the future"
            )
        if len(set(listed)) != len(listed):
            raise InvalidBlockError(f"{holder} requests a lease that lists a block twice")
        self._book.check_whole()
        leased = {block: lease for lease in self.list_leases() for block in lease.blocks}
        for block in listed:
            self._check_block(block, leased.get(block), holder, kind)
        is_written = kind is LeaseKind.WRITE
        if is_written:
            self.block_pool.flush_evicted()
        self.block_pool.is_changing = True
        hold = self._book.open([], f"leased to {holder} ({kind.value})", False, deadline, is_written)
        self._last_id += 1
        lease = Lease(self, LeaseId(self._last_id), kind, tuple(listed), holder, hold, deadline)
        self._opening = lease
        self._leases[hold] = lease
        self._book.take_references(hold, listed)
        self._opening = None
        self.block_pool.is_changing = False
        return lease

    def expire(self) -> list[Lease]:
        """End overdue leases: release leases to read, quarantine leases to write. Call it in every step.

        Returns:
            The leases that ended or were quarantined, earliest deadline first; each is reported once.
        Cost: O(1) if nothing is overdue.
        """
        self._book.check_whole()
        self._book.expire()
        if self._book.num_overdue == self._num_overdue:
            return []
        over = (LeaseState.EXPIRED, LeaseState.QUARANTINED)
        overdue = [lease for lease in self._leases.values() if lease.state in over and not lease._is_reported]
        for lease in overdue:
            lease._is_reported = True
            if lease.state is LeaseState.EXPIRED:
                del self._leases[lease.hold]
        self._num_overdue = self._book.num_overdue
        return sorted(overdue, key=lambda lease: lease.deadline)

    def list_leases(self) -> list[Lease]:
        """Return the active and quarantined leases, oldest first."""
        return [lease for lease in self._leases.values() if not lease.hold.is_released]

    def list_leased_blocks(self) -> list[KVCacheBlock]:
        """Return the distinct blocks that transfers may read or write, oldest lease first."""
        return list(dict.fromkeys(block for lease in self.list_leases() for block in lease.blocks))

    def _check_block(self, block: KVCacheBlock, lease: Lease | None, holder: str, kind: LeaseKind) -> None:
        """Raise InvalidBlockError unless the block can be leased.

        Args:
            lease: one on this block; of several, all read.
        """
        if block.is_null or block.pool is not self.block_pool:
            raise InvalidBlockError(
                f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; it "
                f"cannot be leased to {holder}"
            )
        if lease is not None and lease.kind is LeaseKind.WRITE:
            raise InvalidBlockError(
                f"block {block.block_id} cannot be leased to {holder}: {lease!r} writes it"
            )
        if kind is LeaseKind.READ:
            if block.ref_cnt == 0 and block.block_hash is None:
                raise InvalidBlockError(
                    f"block {block.block_id} is free and has no content; {holder} has nothing to read there"
                )
        elif block.ref_cnt != 1 or block.block_hash is not None or lease is not None:
            raise InvalidBlockError(
                f"block {block.block_id} cannot be leased to {holder} for writing: it has {block.ref_cnt} "
                f"references and is {'not ' if block.block_hash is None else ''}cached; it needs one "
                "reference and no hash"
            )

    def begin_repair(self) -> None:
        """Drop the lease whose `acquire` was interrupted. Called by a repair of the pool."""
        if self._opening is not None:
            self._opening.hold.forget()
            if not self._opening.hold.is_released:
                self._book.end(self._opening.hold, HoldState.RELEASED)
            self._opening = None
        self._leases = {
            hold: lease for hold, lease in self._leases.items() if hold.state is not HoldState.RELEASED
        }
