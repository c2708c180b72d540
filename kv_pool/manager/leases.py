"""`BlockLeases`: blocks lent to a transfer until a deadline, so that nothing in flight is reused or leaks."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import NoReturn, SupportsIndex

from kv_pool.core.arguments import as_list_of, check_number, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold
from kv_pool.core.identity import refuse_copy
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, StaleLeaseError
from kv_pool.manager.retention.block_retention import BlockRetention


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


@dataclass(eq=False)
class Lease:
    """Blocks lent to one transfer. Made by `BlockLeases.lend`, which alone changes it.

    Attributes:
        lease_id: never used again.
        blocks: what was lent, in the order of the call.
        deadline: a time of the leases' clock.
        holder: the transfer, in words; for messages and lists.
        hold: keeps the blocks at their ids while the lease is active or quarantined.
    """

    leases: "BlockLeases"
    lease_id: int
    kind: LeaseKind
    blocks: tuple[KVCacheBlock, ...]
    deadline: float
    holder: str
    hold: Hold
    state: LeaseState = LeaseState.ACTIVE

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
    """The blocks of one pool that transfers read or write: each has a reference more, and is held in place.

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

    A lease to **read** (the source of a transfer) may run out: `expire` takes the blocks back, and a reader
    that comes late reads what is not his any more, which checksums and generations find out. A lease to
    **write** (the target) may not: giving up a transfer does not stop bytes that are under way. When its
    deadline has passed it is quarantined, which is reported and listed; its blocks come back only by
    `give_back`, once the transfer is known to be over (done, disconnected, or its agent gone).

    Args:
        clock: the time in seconds, never falling; the same that deadlines are given in.
        retention: the manager's, if it has one.

    As the pool, it belongs to one thread.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        clock: Callable[[], float],
        retention: BlockRetention | None = None,
    ) -> None:
        check_type("block_pool", block_pool, BlockPoolCore)
        self.block_pool = block_pool
        self._clock = clock
        self._retention = retention
        self._leases: dict[int, Lease] = {}
        self._num_leases: dict[KVCacheBlock, int] = {}
        self._written: dict[KVCacheBlock, Lease] = {}
        # (deadline, lease id); an entry that is not its lease's deadline any more is passed over.
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = 0
        # What an interrupted call leaves for `_recover`: references and holds that may be no lease's.
        self._unfinished: tuple[list[KVCacheBlock], list[Hold]] | None = None

    def __repr__(self) -> str:
        return f"<BlockLeases: {len(self._leases)} leases of {len(self._num_leases)} blocks>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    @property
    def num_lent_blocks(self) -> int:
        """Distinct blocks that are lent, quarantined ones included."""
        return len(self._num_leases)

    def lend(
        self,
        blocks: Iterable[KVCacheBlock],
        deadline: float,
        holder: str,
        kind: LeaseKind = LeaseKind.READ,
    ) -> Lease:
        """Add a reference to each block, and keep it at its id, until the lease is given back or has run out.

        Args:
            blocks: distinct ones of this pool. To read: cached or in use, free ones included. To write: in
                use by one holder, without a hash, and not lent to anybody. A block that is being written is
                lent to nobody else.
        Raises:
            InvalidArgumentError: no blocks, or a deadline that has passed.
            InvalidBlockError: a block that is not as said above. In both cases nothing has changed.
        """
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        check_number("deadline", deadline)
        check_type("holder", holder, str)
        check_type("kind", kind, LeaseKind)
        now = self._clock()
        if not listed or not deadline > now:
            raise InvalidArgumentError(
                f"{holder} asks for {len(listed)} blocks until {deadline}, and it is {now} now; a lease has "
                "at least one block and a deadline to come"
            )
        if len(set(listed)) != len(listed):
            raise InvalidBlockError(f"{holder} asks for a block twice in one lease")
        self._recover()
        for block in listed:
            self._check_block(block, holder, kind)
        self._last_id += 1
        lease_id = self._last_id
        is_written = kind is LeaseKind.WRITE
        reason = f"lent to {holder} ({'write' if is_written else 'read'})"
        referenced: list[KVCacheBlock] = []
        holds: list[Hold] = []
        self._unfinished = referenced, holds
        try:
            self.block_pool.touch_onto(listed, referenced)
            if self._retention is not None:
                self._retention.note_taken(listed)
            hold = self.block_pool.holds.open_onto(listed, reason, holds)
            lease = Lease(self, lease_id, kind, tuple(listed), deadline, holder, hold)
            for block in listed:
                self._num_leases[block] = self._num_leases.get(block, 0) + 1
                if is_written:
                    self._written[block] = lease
            heappush(self._deadlines, (deadline, lease_id))
            self._leases[lease_id] = lease
            self._unfinished = None  # no call in between
        except BaseException:
            self._recover()
            raise
        return lease

    def give_back(self, lease: Lease) -> None:
        """The transfer is over and touches the blocks no more: drop the lease's references.

        Late is not too late, as long as `expire` has not taken the blocks back; quarantined ones leave
        quarantine. Blocks that nobody else holds are free then.

        Raises:
            StaleLeaseError: the lease has ended, or is of other leases. Nothing has changed.
        """
        self._check_live(lease)
        self._end(lease, LeaseState.GIVEN_BACK)

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
                f"{lease!r} can not be extended: its deadline has passed and was reported. Give it back once "
                "the transfer is known to be over."
            )
        now = self._clock()
        if not deadline > now:
            raise InvalidArgumentError(f"{lease!r} can not be extended to {deadline}: it is {now} now")
        heappush(self._deadlines, (deadline, lease.lease_id))
        lease.deadline = deadline
        if len(self._deadlines) > 64 + 4 * len(self._leases):
            self._deadlines = sorted(
                (live.deadline, live.lease_id)
                for live in self._leases.values()
                if live.state is LeaseState.ACTIVE
            )

    def expire(self) -> list[Lease]:
        """End what is overdue: leases to read are over, leases to write are quarantined.

        Returns:
            Those leases, earliest deadline first; each is reported once. Call it in every step; O(1) if
            nothing is overdue.
        """
        self._recover()
        now = self._clock()
        overdue: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.ACTIVE and lease.deadline == deadline:
                if lease.kind is LeaseKind.READ:
                    self._end(lease, LeaseState.EXPIRED)
                else:
                    lease.state = LeaseState.QUARANTINED
                overdue.append(lease)
            heappop(self._deadlines)  # last: an interrupt before leaves an entry that is passed over
        return overdue

    def list_leases(self) -> list[Lease]:
        """Active and quarantined leases, oldest first."""
        self._recover()
        return list(self._leases.values())

    def list_quarantined(self) -> list[Lease]:
        """Leases to write whose transfer has not been confirmed to be over in time, oldest first."""
        return [lease for lease in self._leases.values() if lease.state is LeaseState.QUARANTINED]

    def list_lent_blocks(self) -> list[KVCacheBlock]:
        """Distinct blocks that transfers read or write, or may yet, in no order."""
        self._recover()
        return list(self._num_leases)

    def is_lent(self, block: KVCacheBlock) -> bool:
        """Does a transfer read or write this block, or may it yet?"""
        check_type("block", block, KVCacheBlock)
        self._recover()
        return block in self._num_leases

    def _check_block(self, block: KVCacheBlock, holder: str, kind: LeaseKind) -> None:
        if block.is_null or block.pool is not self.block_pool:
            raise InvalidBlockError(
                f"block {block.block_id} is {'null' if block.is_null else 'not one of this pool'}; it can "
                f"not be lent to {holder}"
            )
        writing = self._written.get(block)
        if writing is not None:
            raise InvalidBlockError(
                f"block {block.block_id} can not be lent to {holder}: {writing!r} writes it"
            )
        if kind is LeaseKind.READ:
            if block.ref_cnt == 0 and block.block_hash is None:
                raise InvalidBlockError(
                    f"block {block.block_id} is free and has no content; {holder} has nothing to read there"
                )
        elif block.ref_cnt != 1 or block.block_hash is not None or block in self._num_leases:
            raise InvalidBlockError(
                f"block {block.block_id} can not be lent to {holder} for writing: it has {block.ref_cnt} "
                f"references and is {'not ' if block.block_hash is None else ''}cached; only a block that "
                "its one holder could write himself can"
            )

    def _check_live(self, lease: Lease) -> None:
        check_type("lease", lease, Lease)
        self._recover()
        if lease.leases is not self or self._leases.get(lease.lease_id) is not lease:
            raise StaleLeaseError(
                f"{lease!r} is {'not of these leases' if lease.leases is not self else 'over'}; its blocks "
                "may be anybody's by now"
            )

    def _end(self, lease: Lease, state: LeaseState) -> None:
        referenced = list(lease.blocks[::-1])
        try:
            self._unfinished = referenced, [lease.hold]  # no call from here on
            del self._leases[lease.lease_id]
            lease.state = state
            lease.hold.release()
            self._give_references_back(referenced)
            for block in lease.blocks:
                count = self._num_leases[block] - 1
                if count:
                    self._num_leases[block] = count
                else:
                    del self._num_leases[block]
                self._written.pop(block, None)
            self._unfinished = None
        except BaseException:
            self._recover()
            raise

    def _give_references_back(self, referenced: list[KVCacheBlock]) -> None:
        """Drop a reference of each block; the list is empty then."""
        if self._retention is None:
            self.block_pool.free_out_of(referenced)
        else:
            self._retention.free_out_of(referenced)

    def _recover(self) -> None:
        """Undo a loan, or complete the end of one, that was interrupted; may itself be interrupted."""
        if self._unfinished is None:
            return
        referenced, holds = self._unfinished
        leases = list(self._leases.values())
        self._num_leases = dict(Counter(block for lease in leases for block in lease.blocks))
        self._written = {
            block: lease for lease in leases if lease.kind is LeaseKind.WRITE for block in lease.blocks
        }
        held = [lease.hold for lease in leases]
        for hold in holds:
            if hold not in held and not hold.is_released:
                hold.release()
        self._give_references_back(referenced)
        self._unfinished = None
