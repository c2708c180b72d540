"""`BlockHolds`: the holds on a pool's blocks, each with its reason, start and deadline.

    kind         made by               effect on the blocks
    Hold         BlockPool.hold        one reference each; they keep their ids unless the hold is movable
    PlaceHold    open_place_hold       no references, so they may be free; they keep their ids

Compaction, resizing and migration read `BlockPool.holds`, and nothing else, to learn which blocks must keep
their ids.
"""

from collections.abc import Callable, Container, Iterable
from enum import Enum
from typing import Any, NamedTuple

from kv_pool.core.arguments import as_list_of, check_number, refuse_interrupted
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Deadlines, TimedItem
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId


class HoldState(Enum):
    """The state of a hold. OPEN and QUARANTINED holds have references, the others have none.

    OPEN -> RELEASED                   release()
    OPEN -> EXPIRED                    expire() after the deadline
    OPEN -> QUARANTINED -> RELEASED    expire() with is_quarantined_late, or a migration that fails while its
                                       blocks may still be written; then release()
    """

    OPEN = "open"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    EXPIRED = "expired"


class HoldReport(NamedTuple):
    """One hold on a block, as `BlockPool.explain_holds` reports it.

    Attributes:
        reason: completes "the block is ...".
        since, until: times of the pool's clock, in seconds; `until` is None without a deadline.
        is_movable: compaction may change the block's id during the hold.
        state: state of the hold.
        has_references: True if the hold keeps the content; False if the block only keeps its id.
    """

    reason: str
    since: float
    until: float | None
    is_movable: bool
    state: HoldState
    has_references: bool


HoldSpan = tuple[float, float, list[KVCacheBlock]]
"""Blocks of a hold with their start and deadline, times of the pool's clock; `NEVER` without a deadline."""


class Hold(TimedItem):
    """A hold on blocks, with a reason, until `release` or a deadline. Made by `BlockPool.hold`.

    A hold has one reference to each of its blocks, so they are not reused. Unless the hold is movable, they
    also keep their ids. A hold is a context manager: it is released at the end of the `with` statement.

    Attributes:
        reason: completes "the block is ..." in error messages: "leased to prefill worker 3 (write)".
        is_movable: compaction may change the ids of the blocks.
        is_quarantined_late: at the deadline the hold is quarantined instead of released.
        since: when the hold was made, a time of the pool's clock.
        list_spans: returns the blocks by start and deadline, if the hold's owner adds and removes each at a
            time of its own; None if all have those of the hold.
        state: see `HoldState`.
    """

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_book",
        "is_movable",
        "is_quarantined_late",
        "list_spans",
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
        self.list_spans: Callable[[], list[HoldSpan]] | None = None
        self.state: HoldState = HoldState.OPEN
        self._book: BlockHolds = book
        self._blocks: dict[KVCacheBlock, None] = {}

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The distinct blocks, without null blocks, in the order in which they were added."""
        return list(self._blocks)

    @property
    def until(self) -> float | None:
        """The deadline, a time of the pool's clock; None if the hold has none or it has passed."""
        return None if self.changes_at == NEVER else self.changes_at

    @property
    def is_released(self) -> bool:
        """Whether the hold has ended: it was released or has expired, and has no references."""
        return self not in self._book._open

    @property
    def has_blocks(self) -> bool:
        """Whether the hold has references."""
        return len(self._blocks) > 0

    @property
    def num_blocks(self) -> int:
        """The number of distinct blocks. O(1)."""
        return len(self._blocks)

    def list_reports(self) -> list[tuple[HoldReport, list[KVCacheBlock]]]:
        """Return a report about the blocks, with the blocks; several if `list_spans` has several spans."""
        listing = self.list_spans
        spans = [(self.since, self.changes_at, list(self._blocks))] if listing is None else listing()
        reports: list[tuple[HoldReport, list[KVCacheBlock]]] = []
        for since, changes_at, blocks in spans:
            until = None if changes_at == NEVER else changes_at
            report = HoldReport(self.reason, since, until, self.is_movable, self.state, True)
            reports.append((report, blocks))
        return reports

    def contains(self, block: KVCacheBlock) -> bool:
        """Return True if the hold has a reference to the block. O(1)."""
        return block in self._blocks

    def add(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks to the hold. Null blocks, and blocks that it already contains, are skipped.

        Raises:
            As `BlockPool.hold`; also InvalidArgumentError if the hold has ended. Nothing has changed.
        """
        self._book.check_whole()
        self._check_open()
        held = self._blocks
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        added = [block for block in self._book.list_holdable(listed, self.reason) if block not in held]
        if added:
            self._book.take_references(self, added)

    def remove(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop the references to these blocks. Blocks that this hold does not contain are ignored."""
        self._book.check_whole()
        held = self._blocks
        removed = [block for block in dict.fromkeys(blocks) if block in held]
        if removed:
            self._book.drop_references(self, removed)

    def release(self) -> None:
        """End the hold and drop its references.

        In a pool whose last call was interrupted, `repair` drops them.

        Raises:
            InvalidArgumentError: the hold has already ended. Nothing has changed.
        """
        self._check_open()
        if self._book.owner().is_changing:
            self._book._end(self, HoldState.RELEASED)
        else:
            self._book.end(self, HoldState.RELEASED)

    def extend(self, until: float) -> None:
        """Set a new deadline, later or earlier than the current one. O(log holds).

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

    def forget(self, kept: Iterable[KVCacheBlock] = ()) -> None:
        """Forget all blocks but these, in a pool that is being repaired: references are counted again."""
        self._blocks = dict.fromkeys(kept)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if not self.is_released:  # it may have expired
            self.release()

    def _check_open(self) -> None:
        if self not in self._book._open:
            raise InvalidArgumentError(f"{self!r} has already been released")

    def __repr__(self) -> str:
        return f"Hold({self.reason!r}, {len(self._blocks)} blocks)"


class PlaceHold(NamedTuple):
    """A hold that keeps blocks at their ids, without references to them.

    Its blocks may be free, and free ones may be reused. Used for blocks with a reuse watcher, and for blocks
    whose old bytes a lower tier still has to read.

    Attributes:
        reason: completes "the block is ...", as in `Hold`.
        get_blocks: returns each block with the start of its hold, a time of the pool's clock.
    """

    reason: str
    get_blocks: Callable[[], dict[KVCacheBlock, float]]


def report_place(places: PlaceHold, since: float) -> HoldReport:
    """Return the report about a block of a place hold, which has been held since `since`."""
    return HoldReport(places.reason, since, None, False, HoldState.OPEN, False)


class BlockHolds:
    """The holds on one pool's blocks: `BlockPool.holds`. They cost nothing in a pool without holds.

    Args:
        owner: the weak reference to the pool that its blocks share.
        clock: returns the time in seconds, monotonic.

    Attributes:
        deadlines: the timers of the open holds.
        num_overdue: number of holds whose deadline has passed so far; only grows.
    """

    def __init__(self, owner: Any, clock: Callable[[], float]) -> None:
        self.owner: Any = owner
        self.clock: Callable[[], float] = clock
        self.deadlines: Deadlines = Deadlines()
        self.num_overdue: int = 0
        self._parties: list[Callable[[], Any]] = []  # weak references
        self._open: dict[Hold, None] = {}
        self._places: dict[PlaceHold, None] = {}

    def add_party(self, party: Callable[[], Any]) -> None:
        """Let an object that opens holds be called before the pool's references are counted again.

        Args:
            party: a weak reference to an object with a method `begin_repair()`, which makes its records and
                holds agree after a call that was interrupted. It must not change references.
        """
        self._parties = [one for one in self._parties if one() is not None]
        self._parties.append(party)

    def begin_repair(self) -> None:
        """Call `begin_repair` of all parties."""
        for one in self._parties:
            party = one()
            if party is not None:
                party.begin_repair()

    def check_whole(self) -> None:
        """Raise PoolInterruptedError if a call of the pool was interrupted."""
        if self.owner().is_changing:
            refuse_interrupted()

    def list_holds(self) -> list[Hold]:
        """Return the open and quarantined holds, oldest first, without place holds."""
        return list(self._open)

    def list_place_holds(self) -> list[PlaceHold]:
        """Return the place holds, oldest first. Most of them have no blocks most of the time."""
        return list(self._places)

    def open_place_hold(self, reason: str, get_blocks: Callable[[], dict[KVCacheBlock, float]]) -> PlaceHold:
        """Hold blocks at their ids, without references to them, until `end_place_hold`.

        Args:
            reason: completes "the block is ..." in error messages.
            get_blocks: returns the blocks that are held now, each with the start of its hold. It must not
                raise and must not call back into the pool.
        """
        places = PlaceHold(reason, get_blocks)
        self._places[places] = None
        return places

    def end_place_hold(self, places: PlaceHold) -> None:
        """End a place hold. No-op if it has already ended."""
        self._places.pop(places, None)

    def list_immovable_ids(self) -> list[BlockId]:
        """Return the ids of blocks that must not be moved, once per hold. O(number of these ids)."""
        ids = [block.block_id for hold in self._open if not hold.is_movable for block in hold._blocks]
        for places in self._places:
            ids += [block.block_id for block in places.get_blocks()]
        return ids

    def count_references(self) -> dict[KVCacheBlock, int]:
        """Return the number of references that holds have to each block. O(held blocks)."""
        counts: dict[KVCacheBlock, int] = {}
        for hold in self._open:
            for block in hold._blocks:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def explain(self, block: KVCacheBlock) -> list[HoldReport]:
        """Implement `BlockPool.explain_holds`."""
        reports: list[HoldReport] = []
        for hold in self._open:
            if hold.contains(block):
                reports += [report for report, blocks in hold.list_reports() if block in blocks]
        for places in self._places:
            since = places.get_blocks().get(block)
            if since is not None:
                reports.append(report_place(places, since))
        return reports

    def expire(self) -> list[Hold]:
        """Release or quarantine the holds whose deadline has passed. O(1) if there are none.

        Returns:
            These holds, earliest deadline first.
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
    ) -> Hold:
        """Implement `BlockPool.hold`."""
        listed = self.list_holdable(blocks, reason)
        hold = Hold(self, reason, is_movable, is_quarantined_late)
        if listed:
            self.take_references(hold, listed)
        self.deadlines.push_at(hold, until)
        hold.changes_at = until
        self._open[hold] = None  # last, without a call after it: an interrupted call opens no hold
        return hold

    def adopt(self, references: list[KVCacheBlock], reason: str) -> Hold:
        """Open a hold that takes over the caller's references to distinct blocks."""
        hold = Hold(self, reason, False, False)
        hold._blocks = dict.fromkeys(references)
        self._open[hold] = None
        return hold

    def hand_over(self, hold: Hold) -> list[KVCacheBlock]:
        """End a hold, and pass its references to the caller."""
        hold._check_open()
        blocks = list(hold._blocks)
        self._end(hold, HoldState.RELEASED)
        return blocks

    def list_holdable(self, blocks: list[KVCacheBlock], reason: str) -> list[KVCacheBlock]:
        """Return the distinct blocks without null blocks. Raises: as `BlockPool.hold`."""
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

    def check_movable(self, block_ids: Container[BlockId], what: str = "cannot be moved") -> None:
        """Raise InvalidBlockError for the first of these ids that must not be moved. O(held blocks)."""
        for block_id in self.list_immovable_ids():
            if block_id in block_ids:
                reports = self.explain(self.owner().blocks[block_id])
                reasons = [report.reason for report in reports if not report.is_movable]
                raise InvalidBlockError(
                    f"C3: block {block_id} is {' and '.join(reasons)}: it {what} until that has ended"
                )

    # ---- parts of larger calls ---------------------------------------------------------------------

    def take_references(self, hold: Hold, blocks: list[KVCacheBlock]) -> None:
        """Add a reference of the hold to each of these blocks. The hold must not contain them yet."""
        pool = self.owner()
        was_changing = pool.is_changing
        pool.is_changing = True
        pool.add_references(blocks, False)
        hold._blocks.update(dict.fromkeys(blocks))
        pool.is_changing = was_changing

    def drop_references(self, hold: Hold, blocks: list[KVCacheBlock]) -> None:
        """Drop the hold's references to these blocks, last block first. The hold must contain them."""
        pool = self.owner()
        was_changing = pool.is_changing
        pool.is_changing = True
        for block in blocks:
            del hold._blocks[block]
        pool.drop_references(blocks[::-1])
        pool.is_changing = was_changing

    def end(self, hold: Hold, state: HoldState) -> None:
        """End a hold and drop its references, last block first."""
        pool = self.owner()
        was_changing = pool.is_changing
        pool.is_changing = True
        blocks = list(hold._blocks)
        self._end(hold, state)
        pool.drop_references(blocks[::-1])
        pool.is_changing = was_changing

    def _end(self, hold: Hold, state: HoldState) -> None:
        """End a hold whose references are no longer its own."""
        del self._open[hold]
        hold._blocks = {}
        hold.changes_at = NEVER
        hold.state = state
