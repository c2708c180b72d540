"""`BlockLeases`: blocks lent to a transfer until a deadline, so that nothing in flight is reused or leaks."""

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NoReturn, SupportsIndex

from kv_pool.core.arguments import as_list_of, check_number, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold, HoldState
from kv_pool.core.identity import refuse_copy
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, StaleLeaseError


class LeaseKind(Enum):
    """What the transfer does with the blocks."""

    READ = "read"
    WRITE = "write"


class LeaseState(Enum):
    """Where a lease is in its life.

        READ    ACTIVE -> GIVEN_BACK                       give_back()
                ACTIVE -> EXPIRED                          expire(), the deadline has passed
        WRITE   ACTIVE -> GIVEN_BACK                       give_back()
                ACTIVE -> QUARANTINED -> GIVEN_BACK        expire(), then give_back()

    ACTIVE and QUARANTINED leases hold a reference on each of their blocks, the others none.
    """

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    GIVEN_BACK = "given back"
    EXPIRED = "expired"


_STATES = {
    HoldState.OPEN: LeaseState.ACTIVE,
    HoldState.QUARANTINED: LeaseState.QUARANTINED,
    HoldState.RELEASED: LeaseState.GIVEN_BACK,
    HoldState.EXPIRED: LeaseState.EXPIRED,
}


class Lease:
    """Blocks lent to one transfer. Made by `BlockLeases.lend`.

    Attributes:
        lease_id: never used again.
        blocks: what was lent, in the order of the call.
        holder: the transfer, in words; for messages and lists.
        hold: has the references, and keeps the blocks at their ids.
    """

    def __init__(
        self,
        leases: "BlockLeases",
        lease_id: int,
        kind: LeaseKind,
        blocks: tuple[KVCacheBlock, ...],
        deadline: float,
        holder: str,
        hold: Hold,
    ) -> None:
        self.leases = leases
        self.lease_id = lease_id
        self.kind = kind
        self.blocks = blocks
        self.holder = holder
        self.hold = hold
        self._last_deadline = deadline

    @property
    def deadline(self) -> float:
        """A time of the leases' clock; once it has passed, the last that there was."""
        return self._last_deadline if self.hold.until is None else self.hold.until

    @property
    def state(self) -> LeaseState:
        """The state of its hold."""
        return _STATES[self.hold.state]

    def give_back(self) -> None:
        """See `BlockLeases.give_back`."""
        self.leases.give_back(self)

    def extend(self, deadline: float) -> None:
        """See `BlockLeases.extend`."""
        self.leases.extend(self, deadline)

    def __repr__(self) -> str:
        return (
            f"Lease({self.lease_id}, {self.kind.value}, {len(self.blocks)} blocks, until {self.deadline}, "
            f"{self.holder!r}, {self.state.value})"
        )


class BlockLeases:
    """The blocks of one pool that transfers read or write, each lease a hold with a deadline.

        >>> from kv_pool import BlockPool
        >>> from kv_pool.manager.leases import BlockLeases, LeaseKind
        >>> pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=4)
        >>> leases = BlockLeases(pool, clock=lambda: 0.0)
        >>> blocks = pool.get_new_blocks(2)
        >>> lease = leases.lend(blocks, 30.0, "prefill worker 3", LeaseKind.WRITE)
        >>> pool.free_blocks(blocks)      # the request was aborted; the blocks are not reused meanwhile
        >>> pool.get_num_free_blocks()
        7
        >>> lease.give_back()
        >>> pool.get_num_free_blocks()
        9

    A lease to **read** (the source of a transfer) may expire: `expire` drops its references; a late reader
    reads other content, which checksums and generations detect. A lease to **write** (the target) may not:
    the end of a request does not stop bytes in flight. When its deadline has passed it is quarantined, which
    is reported and listed; its blocks are released only by `give_back`, once the transfer is known to be over
    (done, disconnected, or its agent gone).

    Args:
        clock: the time in seconds, never falling; deadlines are times of it. It becomes the clock of the
            pool's holds. None: the pool's own clock.

    As the pool, it belongs to one thread.
    """

    def __init__(self, block_pool: BlockPoolCore, clock: Callable[[], float] | None = None) -> None:
        check_type("block_pool", block_pool, BlockPoolCore)
        self.block_pool = block_pool
        self._book = block_pool.holds
        if clock is not None:
            self._book.clock = clock
        self._leases: dict[Hold, Lease] = {}  # active and quarantined ones, oldest first
        self._written: dict[KVCacheBlock, Lease] = {}
        self._num_leases: dict[KVCacheBlock, int] = {}
        self._reported: set[Hold] = set()
        self._num_overdue = 0  # holds of the pool whose expiry has been looked at
        self._last_id = 0
        # A call was interrupted, and `_rebuild` has not completed it; the holds that it was opening.
        self._is_unfinished = False
        self._opening: list[Hold] = []

    def __repr__(self) -> str:
        return f"<BlockLeases: {len(self._leases)} leases of {self.num_lent_blocks} blocks>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    @property
    def num_lent_blocks(self) -> int:
        """Distinct blocks that are lent, quarantined ones included. O(lent blocks)."""
        return len(self.list_lent_blocks())

    def lend(
        self,
        blocks: Iterable[KVCacheBlock],
        deadline: float,
        holder: str,
        kind: LeaseKind = LeaseKind.READ,
    ) -> Lease:
        """Hold each block until the lease is given back or has expired.

        Args:
            blocks: distinct ones of this pool. To read: cached or in use, free ones included. To write: in
                use by one holder, without a hash, and not lent to anybody; colder tiers have what was in
                them when this returns. A block that is being written cannot be lent again.
        Raises:
            InvalidArgumentError: no blocks, or a deadline that has passed.
            InvalidBlockError: a block that is not as said above. In both cases nothing has changed.
        """
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        check_number("deadline", deadline)
        check_type("holder", holder, str)
        check_type("kind", kind, LeaseKind)
        now = self._book.clock()
        if not listed or not deadline > now:
            raise InvalidArgumentError(
                f"{holder} asks for {len(listed)} blocks until {deadline}, and it is {now} now; a lease has "
                "at least one block and a deadline to come"
            )
        if len(set(listed)) != len(listed):
            raise InvalidBlockError(f"{holder} asks for a block twice in one lease")
        if self._is_unfinished or self._book.num_overdue != self._num_overdue:
            self._rebuild()  # leases may have expired that are not reported yet
        for block in listed:
            self._check_block(block, holder, kind)
        is_written = kind is LeaseKind.WRITE
        if is_written:
            self.block_pool.store_pending()
        holds: list[Hold] = []
        self._opening = holds
        try:
            reason = f"lent to {holder} ({kind.value})"
            hold = self._book.open(listed, reason, False, deadline, is_written, holds)
            self._last_id += 1
            lease = Lease(self, self._last_id, kind, tuple(listed), deadline, holder, hold)
            for block in listed:
                self._num_leases[block] = self._num_leases.get(block, 0) + 1
            if is_written:
                self._written.update(dict.fromkeys(listed, lease))
            self._leases[hold] = lease  # no call behind this
        except BaseException:
            self._is_unfinished = True
            self._rebuild()
            raise
        return lease

    def give_back(self, lease: Lease) -> None:
        """Drop the lease's references: the transfer has ended and does not access the blocks any more.

        A lease whose deadline has passed can be given back until `expire` has ended it; a quarantined one
        always can.

        Raises:
            StaleLeaseError: the lease has ended, or is of other leases. Nothing has changed.
        """
        self._check_live(lease)
        try:
            lease.hold.release()
            self._remove(lease)
        except BaseException:
            self._is_unfinished = True
            self._rebuild()
            raise

    def extend(self, lease: Lease, deadline: float) -> None:
        """Move the deadline, to later or earlier, as a heartbeat does. O(log leases).

        Raises:
            StaleLeaseError: the lease has ended, is quarantined, or is of other leases.
            InvalidArgumentError: the new deadline has passed. In both cases nothing has changed.
        """
        self._check_live(lease)
        check_number("deadline", deadline)
        if lease.state is LeaseState.QUARANTINED:
            raise StaleLeaseError(
                f"{lease!r} cannot be extended: its deadline has passed and was reported. Give it back once "
                "the transfer is known to be over."
            )
        now = self._book.clock()
        if not deadline > now:
            raise InvalidArgumentError(f"{lease!r} cannot be extended to {deadline}: it is {now} now")
        lease.hold.extend(deadline)
        lease._last_deadline = deadline

    def expire(self) -> list[Lease]:
        """End what is overdue: leases to read are over, leases to write are quarantined.

        Returns:
            Those leases, earliest deadline first; each is reported once. Call it in every step; O(1) if
            nothing is overdue.
        """
        if self._is_unfinished:
            self._rebuild()
        self._book.expire()
        if self._book.num_overdue == self._num_overdue:
            return []
        num_overdue = self._book.num_overdue
        overdue = [
            lease
            for hold, lease in self._leases.items()
            if hold.state in (HoldState.EXPIRED, HoldState.QUARANTINED) and hold not in self._reported
        ]
        reported = self._reported | {lease.hold for lease in overdue if lease.state is LeaseState.QUARANTINED}
        left = {hold: lease for hold, lease in self._leases.items() if hold.state is not HoldState.EXPIRED}
        # No call in between: an interrupt before this leaves the leases to be reported by the next call.
        self._leases = left
        self._reported = reported
        self._num_overdue = num_overdue
        self._is_unfinished = True
        try:
            self._rebuild()
        except BaseException:
            self._rebuild()
            raise
        return sorted(overdue, key=lambda lease: lease.deadline)

    def list_leases(self) -> list[Lease]:
        """Active and quarantined leases, oldest first."""
        return [lease for lease in self._leases.values() if not lease.hold.is_released]

    def list_quarantined(self) -> list[Lease]:
        """Leases to write whose transfer was not confirmed to be over in time, oldest first."""
        return [lease for lease in self._leases.values() if lease.state is LeaseState.QUARANTINED]

    def list_lent_blocks(self) -> list[KVCacheBlock]:
        """Distinct blocks that transfers read or write, or may yet, oldest lease first."""
        return list(dict.fromkeys(block for lease in self.list_leases() for block in lease.blocks))

    def is_lent(self, block: KVCacheBlock) -> bool:
        """Return True if a transfer reads or writes this block, or may yet. O(leases)."""
        check_type("block", block, KVCacheBlock)
        return any(lease.hold.contains(block) for lease in self.list_leases())

    def _check_block(self, block: KVCacheBlock, holder: str, kind: LeaseKind) -> None:
        if block.is_null or block.pool is not self.block_pool:
            raise InvalidBlockError(
                f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; it "
                f"cannot be lent to {holder}"
            )
        writing = self._written.get(block)
        if writing is not None:
            raise InvalidBlockError(
                f"block {block.block_id} cannot be lent to {holder}: {writing!r} writes it"
            )
        if kind is LeaseKind.READ:
            if block.ref_cnt == 0 and block.block_hash is None:
                raise InvalidBlockError(
                    f"block {block.block_id} is free and has no content; {holder} has nothing to read there"
                )
        elif block.ref_cnt != 1 or block.block_hash is not None or block in self._num_leases:
            raise InvalidBlockError(
                f"block {block.block_id} cannot be lent to {holder} for writing: it has {block.ref_cnt} "
                f"references and is {'not ' if block.block_hash is None else ''}cached; only a block "
                "with one reference and without a hash can"
            )

    def _check_live(self, lease: Lease) -> None:
        check_type("lease", lease, Lease)
        if self._is_unfinished:
            self._rebuild()
        if lease.leases is not self or lease.hold.is_released:
            raise StaleLeaseError(
                f"{lease!r} is {'not of these leases' if lease.leases is not self else 'over'}; its blocks "
                "may have other content by now"
            )

    def _remove(self, lease: Lease) -> None:
        """Forget a lease whose hold has ended."""
        self._leases.pop(lease.hold, None)
        self._reported.discard(lease.hold)
        for block in lease.blocks:
            count = self._num_leases.get(block, 1) - 1
            if count:
                self._num_leases[block] = count
            else:
                self._num_leases.pop(block, None)
        if lease.kind is LeaseKind.WRITE:
            for block in lease.blocks:
                self._written.pop(block, None)

    def _rebuild(self) -> None:
        """Derive what is remembered from the holds, after a call that was interrupted."""
        for hold in self._opening:
            if hold not in self._leases and not hold.is_released:
                hold.release()
        self._opening = []
        live = {hold: lease for hold, lease in self._leases.items() if hold.state is not HoldState.RELEASED}
        self._leases = live
        listed = self.list_leases()
        self._num_leases = dict(Counter(block for lease in listed for block in lease.blocks))
        self._written = {
            block: lease for lease in listed if lease.kind is LeaseKind.WRITE for block in lease.blocks
        }
        self._is_unfinished = False
