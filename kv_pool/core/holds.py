"""`BlockHolds`: which blocks may not be freed or moved, for what reason, since when and until when.

    kind         made by               the blocks
    Hold         BlockPool.hold        have a reference of the hold; keep their ids unless it is movable
    PlaceHold    keep_places           have none and may be free; keep their ids

`BlockPool.holds` is the one book that compaction, resizing and migration read.
"""

from collections.abc import Callable, Container, Iterable
from enum import Enum
from typing import Any, NamedTuple

from kv_pool.core.arguments import as_list_of, check_number
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Deadlines, Ending
from kv_pool.errors import InvalidArgumentError, InvalidBlockError


class HoldState(Enum):
    """Where a hold is in its life; OPEN and QUARANTINED ones have references, the others none.

    OPEN -> RELEASED                   release()
    OPEN -> EXPIRED                    expire(), the deadline has passed
    OPEN -> QUARANTINED -> RELEASED    expire() of a hold that is quarantined, then release()
    """

    OPEN = "open"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    EXPIRED = "expired"


class HoldReport(NamedTuple):
    """One answer of `BlockPool.explain_holds`.

    Attributes:
        reason: completes "the block is ...".
        since, until: times of the pool's clock, in seconds; `until` is None without a deadline.
        is_movable: compaction may give the block another id meanwhile.
        state: of the hold.
        has_references: the hold keeps the content; False if it only keeps the block at its id.
    """

    reason: str
    since: float
    until: float | None
    is_movable: bool
    state: HoldState
    has_references: bool


class Hold(Ending):
    """References to blocks, for a reason, until `release` or a deadline. Made by `BlockPool.hold`.

    A hold has one reference to each of its blocks, so that they are not reused; unless it is movable, they
    keep their ids, too. As a context manager it is released at the end of the block.

    Attributes:
        reason: completes "the block is ..." in error messages: "lent to prefill worker 3 (write)".
        is_movable: compaction may give the blocks other ids.
        is_quarantined_late: at the deadline the hold is quarantined instead of released.
        since: when it was made, a time of the pool's clock.
        state: see `HoldState`.
    """

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_book",
        "is_movable",
        "is_quarantined_late",
        "reason",
        "since",
        "state",
    )

    def __init__(self, book: "BlockHolds", reason: str, is_movable: bool, is_quarantined_late: bool) -> None:
        super().__init__(NEVER)
        self.reason: str = reason
        self.is_movable: bool = is_movable
        self.is_quarantined_late: bool = is_quarantined_late
        self.since: float = book.clock()
        self.state: HoldState = HoldState.OPEN
        self._book: BlockHolds = book
        self._blocks: dict[KVCacheBlock, None] = {}

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The distinct blocks, without null blocks, in the order in which they were added."""
        return list(self._blocks)

    @property
    def until(self) -> float | None:
        """The deadline, a time of the pool's clock; None if the hold has none, or it has passed."""
        return None if self.changes_at == NEVER else self.changes_at

    @property
    def is_released(self) -> bool:
        """Whether the hold has no references any more: it was released, or has expired."""
        return self not in self._book._open

    @property
    def has_blocks(self) -> bool:
        """Whether the hold has any reference."""
        return len(self._blocks) > 0

    def report(self) -> HoldReport:
        """Return what the hold says of each of its blocks."""
        return HoldReport(self.reason, self.since, self.until, self.is_movable, self.state, True)

    def contains(self, block: KVCacheBlock) -> bool:
        """Return True if the hold has a reference to the block. O(1)."""
        return block in self._blocks

    def add(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold these blocks as well; those that the hold has already are skipped, as null blocks are.

        Raises:
            As `BlockPool.hold`; and InvalidArgumentError after the hold has ended. Nothing has changed.
        """
        self._check_open()
        held = self._blocks
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        added = [block for block in self._book.list_holdable(listed, self.reason) if block not in held]
        self._book.take_references(self, added)

    def remove(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop the references to these blocks; blocks that this hold does not contain are ignored."""
        held = self._blocks
        removed = [block for block in dict.fromkeys(blocks) if block in held]
        if removed:
            self._book.drop_references(self, removed)

    def release(self) -> None:
        """End the hold, and drop its references.

        Raises:
            InvalidArgumentError: the hold has ended before. Nothing has changed.
        """
        self._check_open()
        self._book.end(self, HoldState.RELEASED)

    def extend(self, until: float) -> None:
        """Move the deadline, to later or earlier. O(log holds).

        Raises:
            InvalidArgumentError: the new deadline has passed, or the hold has ended or is quarantined.
                Nothing has changed.
        """
        self._check_open()
        check_number("until", until)
        now = self._book.clock()
        if self.state is HoldState.QUARANTINED or not until > now:
            raise InvalidArgumentError(f"{self!r} cannot be extended to {until}: it is {now} now")
        self._book.deadlines.push_at(self, until)
        self.changes_at = until

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if not self.is_released:  # it may have expired
            self.release()

    def _check_open(self) -> None:
        if self not in self._book._open:
            raise InvalidArgumentError(f"{self!r} was released before")

    def __repr__(self) -> str:
        return f"Hold({self.reason!r}, {len(self._blocks)} blocks)"


class PlaceHold:
    """Blocks that keep their ids without a reference: something waits for what happens to them there.

    Free blocks may be taken meanwhile. A reuse watcher and a tier that has still to read the old bytes of a
    block are such.

    Attributes:
        reason: completes "the block is ...", as of `Hold`.
    """

    __slots__ = ("_get_blocks", "reason")

    def __init__(self, reason: str, get_blocks: Callable[[], dict[KVCacheBlock, float]]) -> None:
        self.reason: str = reason
        self._get_blocks: Callable[[], dict[KVCacheBlock, float]] = get_blocks

    def get_blocks(self) -> dict[KVCacheBlock, float]:
        """Return the blocks, and since when each is held, a time of the pool's clock."""
        return self._get_blocks()

    def report(self, since: float) -> HoldReport:
        """Return what the hold says of a block that it has had since then."""
        return HoldReport(self.reason, since, None, False, HoldState.OPEN, False)

    def __repr__(self) -> str:
        return f"PlaceHold({self.reason!r}, {len(self.get_blocks())} blocks)"


class BlockHolds:
    """The holds on one pool's blocks: `BlockPool.holds`.

    Compaction, resizing and migration read it, and nothing else, to learn which blocks keep their ids. A pool
    without holds pays nothing.

    Args:
        owner: the weak reference to the pool that its blocks share.
        clock: the time in seconds, never falling.

    Attributes:
        deadlines: of the open holds.
        num_overdue: holds whose deadline has passed so far; only grows.
    """

    def __init__(self, owner: Any, clock: Callable[[], float]) -> None:
        self.owner: Any = owner
        self.clock: Callable[[], float] = clock
        self.deadlines: Deadlines = Deadlines()
        self.num_overdue: int = 0
        self._open: dict[Hold, None] = {}
        self._places: dict[PlaceHold, None] = {}
        # What a call which was interrupted has still to do: references that no hold has yet, and references
        # to drop, with the hold that they are from.
        self._arriving: list[KVCacheBlock] = []
        self._leaving: list[KVCacheBlock] = []
        self._leaving_from: Hold | None = None

    def list_holds(self) -> list[Hold]:
        """Open and quarantined holds with references, oldest first."""
        return list(self._open)

    def list_place_holds(self) -> list[PlaceHold]:
        """The holds without references, oldest first; most have no blocks most of the time."""
        return list(self._places)

    def keep_places(self, reason: str, get_blocks: Callable[[], dict[KVCacheBlock, float]]) -> PlaceHold:
        """Keep blocks at their ids, without a reference to them, until `end_places`.

        Args:
            reason: completes "the block is ..." in error messages.
            get_blocks: returns the blocks of the moment, and since when each waits. It must not raise, nor
                call back into the pool.
        """
        places = PlaceHold(reason, get_blocks)
        self._places[places] = None
        return places

    def end_places(self, places: PlaceHold) -> None:
        """End what `keep_places` began; nothing happens if it has ended before."""
        self._places.pop(places, None)

    def list_fixed_ids(self) -> list[int]:
        """Ids of blocks that may not be moved, once for each hold that says so. O(these)."""
        ids = [block.block_id for hold in self._open if not hold.is_movable for block in hold._blocks]
        for places in self._places:
            ids += [block.block_id for block in places.get_blocks()]
        return ids

    def count_references(self) -> dict[KVCacheBlock, int]:
        """How many references holds have to each block. O(held blocks)."""
        counts: dict[KVCacheBlock, int] = {}
        for hold in self._open:
            for block in hold._blocks:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def count_by_reason(self) -> dict[str, int]:
        """How many blocks are held for each reason, oldest hold first: the owners of what leaks. O(holds)."""
        counts: dict[str, int] = {}
        for hold in self._open:
            counts[hold.reason] = counts.get(hold.reason, 0) + len(hold._blocks)
        return counts

    def explain(self, block: KVCacheBlock) -> list[HoldReport]:
        """See `BlockPool.explain_holds`."""
        reports = [hold.report() for hold in self._open if hold.contains(block)]
        for places in self._places:
            since = places.get_blocks().get(block)
            if since is not None:
                reports.append(places.report(since))
        return reports

    def expire(self) -> list[Hold]:
        """Handle expired deadlines. O(1) if none has expired.

        Returns:
            The holds that were overdue, earliest deadline first: released ones, and quarantined ones.
        """
        overdue: list[Hold] = []
        if not self.deadlines.entries:
            return overdue
        now = self.clock()
        ending = self.deadlines.find_due(now)
        while ending is not None:
            assert isinstance(ending, Hold)
            self.num_overdue += 1
            if ending.is_quarantined_late:
                ending.state = HoldState.QUARANTINED
                ending.changes_at = NEVER
            else:
                self.end(ending, HoldState.EXPIRED)
            overdue.append(ending)
            ending = self.deadlines.find_due(now)
        return overdue

    def open(
        self,
        blocks: list[KVCacheBlock],
        reason: str,
        is_movable: bool = False,
        until: float = NEVER,
        is_quarantined_late: bool = False,
        onto: list[Hold] | None = None,
    ) -> Hold:
        """As `BlockPool.hold`; the hold is appended to `onto` in the same step.

        Whatever interrupts the caller, `onto` says which holds it has to release.
        """
        self.settle()
        listed = self.list_holdable(blocks, reason)
        hold = Hold(self, reason, is_movable, is_quarantined_late)
        opened = [hold]
        held = dict.fromkeys(listed)
        nothing: list[KVCacheBlock] = []
        self.deadlines.push_at(hold, until)
        try:
            if listed:
                self.owner().touch_onto(listed, self._arriving)
            # No call until the references are the hold's.
            self._open[hold] = None
            if onto is not None:
                onto += opened
            hold._blocks = held
            hold.changes_at = until
            self._arriving = nothing
        except BaseException:
            self._open.pop(hold, None)
            self.settle()
            raise
        return hold

    def adopt(self, references: list[KVCacheBlock], reason: str, onto: list[Hold]) -> Hold:
        """Open a hold that takes over references to distinct blocks; `references` is empty then."""
        self.settle()
        hold = Hold(self, reason, False, False)
        opened = [hold]
        hold._blocks = dict.fromkeys(references)
        try:  # no call until the references are the hold's, but an allocation may fail
            self._open[hold] = None
            onto += opened
        except BaseException:
            self._open.pop(hold, None)
            raise
        references.clear()
        return hold

    def hand_over(self, hold: Hold, onto: list[KVCacheBlock]) -> None:
        """End a hold; its references are the caller's, appended to `onto` in the same step."""
        hold._check_open()
        self.settle()
        blocks = list(hold._blocks)
        nothing: dict[KVCacheBlock, None] = {}
        onto += blocks  # no call from here on
        del self._open[hold]
        hold._blocks = nothing
        hold.changes_at = NEVER
        hold.state = HoldState.RELEASED

    def list_holdable(self, blocks: list[KVCacheBlock], reason: str) -> list[KVCacheBlock]:
        """Return the distinct blocks without null blocks. Raises what `BlockPool.hold` says."""
        owner = self.owner
        has_nulls = False
        for block in blocks:
            if block.is_null:
                has_nulls = True
            elif block.owner is not owner or (block.ref_cnt < 1 and block.key is None):
                why = "free and has no content" if block.owner is owner else "not one of this pool"
                raise InvalidBlockError(f"block {block.block_id} is {why}; it cannot be held as {reason}")
        distinct = list(dict.fromkeys(blocks))
        return [block for block in distinct if not block.is_null] if has_nulls else distinct

    def check_movable(self, block_ids: Container[int], what: str = "cannot be moved") -> None:
        """Raise InvalidBlockError for the first of these ids that may not be moved. O(held blocks)."""
        for block_id in self.list_fixed_ids():
            if block_id in block_ids:
                reports = self.explain(self.owner().blocks[block_id])
                reasons = [report.reason for report in reports if not report.is_movable]
                raise InvalidBlockError(
                    f"C3: block {block_id} is {' and '.join(reasons)}: it {what} before that has ended"
                )

    # ---- references --------------------------------------------------------------------------------

    def take_references(self, hold: Hold, blocks: list[KVCacheBlock]) -> None:
        """Add a reference of the hold to each of these blocks, which it does not hold."""
        if not blocks:
            return
        self.settle()
        added = dict.fromkeys(blocks)
        nothing: list[KVCacheBlock] = []
        try:
            self.owner().touch_onto(blocks, self._arriving)
            hold._blocks |= added
            self._arriving = nothing  # no call in between
        except BaseException:
            self.settle()
            raise

    def drop_references(self, hold: Hold, blocks: list[KVCacheBlock]) -> None:
        """Drop the hold's references to these blocks, which it holds, the last one first."""
        self.settle()
        blocks.reverse()
        self._leaving_from = hold
        self._leaving = blocks
        try:
            self.settle()
        except BaseException:
            self.settle()
            raise

    def end(self, hold: Hold, state: HoldState) -> None:
        """Close a hold and drop its references, the last one first."""
        self.settle()
        leaving = list(hold._blocks)
        leaving.reverse()
        nothing: dict[KVCacheBlock, None] = {}
        try:
            del self._open[hold]
            self._leaving = leaving
            hold._blocks = nothing
            hold.changes_at = NEVER
            hold.state = state
            self.settle()
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """Drop the references that a call has left, also one that was interrupted."""
        if self._arriving:
            self.owner().free_out_of(self._arriving)
        if self._leaving:
            if self._leaving_from is not None:
                for block in self._leaving:
                    self._leaving_from._blocks.pop(block, None)
                self._leaving_from = None
            self.owner().free_out_of(self._leaving)
