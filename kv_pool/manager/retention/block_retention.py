"""`BlockRetention`: which cached blocks are evicted before or after others, and until when."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NoReturn, SupportsIndex

from kv_pool.core.arguments import (
    as_count,
    as_int,
    as_list_of,
    check_number,
    check_type,
    get_request_id,
    refuse_copy,
    refuse_type,
)
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, Deadlines
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, PinLimitError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable, TableListener
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.retention.claims import (
    NO_CLAIMS,
    NOTHING,
    PINNED,
    Change,
    Claim,
    PlacedClaims,
    Record,
    is_pin,
    join_claims,
    rank_claim,
)
from kv_pool.manager.retention.directive import MAX_PRIORITY, RetentionDirective

Range = tuple[int, int | None, Claim]
"""First token, end (exclusive) or None, and the claim on the blocks that hold these tokens."""
Place = tuple[GroupId, int]
"""A group, and the index of a block in a request's table of this group."""
Session = tuple[Claim, list[KVCacheBlock]]
"""A conversation between two turns: the claim, with its deadline, on the blocks kept for the next turn."""


class BlockRetention(TableListener):
    """The retention of cached blocks: directives, pins and sessions decide how long each is kept.

        >>> from kv_pool import BlockPool
        >>> from kv_pool.manager.retention.block_retention import BlockRetention
        >>> from kv_pool.manager.retention.directive import RetentionDirective
        >>> pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=4)
        >>> retention = BlockRetention(pool, clock=lambda: 0.0, max_pinned_blocks=2)
        >>> retention.set_directives("chat", [RetentionDirective(0, 8, priority=90)])
        >>> retention.is_active, retention.num_retained
        (True, 0)

    Pass it to the manager (`KVCacheManager(pool, retention=retention)`), which calls the methods listed under
    "for the manager"; the scheduler calls the others. A kept block is free like any other, but in another
    band of the pool's eviction order. Free blocks are reused in this order:

        1  blocks without content
        2  blocks whose directives and sessions have ended, in the order of the ends
        3  blocks with a priority below 35, lowest first
        4  blocks without a directive, least recently freed first
        5  blocks with a priority of 35 and above, lowest first

    Within 3 and 5, of equal priority, the block that has had it longest comes first. Pinned blocks are not
    free: they are held, up to `max_pinned_blocks`.

    Args:
        block_pool: the manager's pool; a pool can have one retention.
        clock: returns the time in seconds and never goes backwards. A trace replay passes a virtual clock.
        max_pinned_blocks: maximum number of pinned blocks, free or in use, including blocks that running
            requests may still pin.
        max_sessions: maximum number of sessions; one more ends the session with the earliest deadline.

    Attributes:
        max_pinned_blocks, max_sessions: as the arguments.

    Memory is bounded by the number of blocks, of sessions, and of requests with directives that hold blocks
    or wait. Not thread-safe: use it from the thread that uses the pool.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        clock: Callable[[], float],
        max_pinned_blocks: int = 0,
        max_sessions: int = 10_000,
    ) -> None:
        check_type("block_pool", block_pool, BlockPoolCore)
        if not callable(clock):
            refuse_type("clock", clock, "a function")
        self.block_pool: BlockPoolCore = block_pool
        self._clock: Callable[[], float] = clock
        self.max_pinned_blocks: int = as_count("max_pinned_blocks", max_pinned_blocks)
        self.max_sessions: int = as_count("max_sessions", max_sessions, 1)
        # Ended ones stay until there are this many.
        self._sessions: dict[str, Session] = {}
        self._num_to_sweep_at: int = min(self.max_sessions, 64)
        self._placed: PlacedClaims = PlacedClaims(block_pool, clock)
        self._deadlines: Deadlines = self._placed.deadlines
        # Tokens per block of each group; 0 for a group that is not cached.
        self._block_sizes: tuple[int, ...] = (block_pool.hash_block_size,)
        self._tables: dict[RequestId, list[BlockTable]] = {}
        # The directives of requests that hold blocks or wait, and the blocks that these may still pin.
        self._ranges: dict[RequestId, list[Range]] = {}
        self._promised: dict[RequestId, set[Place]] = {}
        block_pool.open_bands(self._placed)

    def __repr__(self) -> str:
        return (
            f"<BlockRetention: {self.num_retained} blocks retained, {self._count_pins()} of "
            f"{self.max_pinned_blocks} pins, {self.num_sessions} sessions>"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    # ---- for the scheduler -------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """True if there are claims, such as a session's, or directives."""
        return not self._placed.is_empty or len(self._ranges) > 0

    @property
    def holds_blocks(self) -> bool:
        """True if pinned blocks are held; then time and hits change the number of free blocks."""
        return self._placed.held.has_blocks

    @property
    def num_retained(self) -> int:
        """Number of free blocks with claims in force, without pinned ones. O(blocks of the pool)."""
        self.expire()
        free = [block for block in self.block_pool.blocks if block.next_free_block is not None]
        return sum([bool(self._placed.get_claims(block)) for block in free])

    @property
    def num_pinned(self) -> int:
        """Number of pinned blocks that no request uses: neither in use nor free. O(these blocks)."""
        self.expire()
        return sum([block.ref_cnt == 1 for block in self._placed.held.blocks])

    @property
    def num_pins(self) -> int:
        """Pins that count against `max_pinned_blocks`: pinned blocks, free or in use, and promised ones."""
        self.expire()
        return self._count_pins()

    @property
    def num_sessions(self) -> int:
        """Number of sessions that are kept. O(sessions)."""
        self._forget_ended_sessions()
        return len(self._sessions)

    def set_directives(self, request_id: RequestId, directives: Sequence[RetentionDirective]) -> None:
        """Set the directives for the blocks of this request, replacing any earlier ones.

        Call it any time before the request is freed, also before it is scheduled. The directives are applied
        to the request's cached blocks when they are freed, and then removed; set them again for a preempted
        request. An empty list removes them (also for a request that is aborted before it has blocks). For
        blocks of requests that have ended, use `change_directives`.

        Raises:
            PinLimitError: with these, more than `max_pinned_blocks` blocks might be pinned. Nothing has
                changed.
        """
        check_type("request_id", request_id, str)
        listed: list[RetentionDirective] = as_list_of("directives", directives, RetentionDirective)
        self.block_pool.holds.check_whole()
        ranges = [(one.start, one.end, make_claim(one)) for one in listed if not one.is_none]
        pinned = [(one.start, one.end) for one in listed if one.pin and one.end is not None]
        pins: list[tuple[GroupId, int, int]] = []
        for group_id, block_size in enumerate(self._block_sizes):
            if block_size and pinned:
                stretches = [(start // block_size, -(-end // block_size)) for start, end in pinned]
                pins += [(GroupId(group_id), low, high) for low, high in join_stretches(stretches)]
        if pins:
            self.expire()
            num_pins = sum([high - low for _, low, high in pins])
            self._check_pins(num_pins, len(self._promised.get(request_id, ())))
        self.block_pool.is_changing = True
        self.forget_request(request_id)
        if ranges:
            self._ranges[request_id] = ranges
        if pins:
            self._promised[request_id] = {
                (group_id, index) for group_id, low, high in pins for index in range(low, high)
            }
        self.block_pool.is_changing = False

    def change_directives(self, request: SchedulableRequest, directives: Sequence[RetentionDirective]) -> int:
        """Replace the directives on the cached blocks of this prefix, from whichever request they come.

        Free blocks change at once, blocks in use when they become free. On each cached block in the ranges,
        these directives replace those in force; sessions stay. To remove directives, pass one without effect:
        `RetentionDirective(0, 1000)`. Durations of free blocks count from this call. Blocks that get the same
        priority are reused tail first, whatever the order of the directives.

        Args:
            request: its hashes find the blocks; it need not hold any.
        Returns:
            The number of blocks found.
        Raises:
            PinLimitError: more than `max_pinned_blocks` blocks would be pinned. Nothing has changed.
        Cost: O(blocks in the ranges), each block once, whatever the number of directives.
        """
        get_request_id("request", request)
        listed: list[RetentionDirective] = as_list_of("directives", directives, RetentionDirective)
        self.block_pool.holds.check_whole()
        self.expire()
        ranges = [(one.start, one.end, NOTHING if one.is_none else make_claim(one)) for one in listed]
        pool = self.block_pool
        num_hashed = len(request.block_hashes) * pool.hash_block_size
        changes: list[Change] = []
        changed: dict[KVCacheBlock, None] = {}  # a block may be found under several keys
        num_pinned = 0
        for group_id, block_size in enumerate(self._block_sizes):
            if block_size == 0:
                continue
            for low, high, claims in cut_into_segments(ranges, 0, num_hashed // block_size, block_size):
                start, end = low * block_size, high * block_size
                found = find_cached(pool, request, GroupId(group_id), block_size, start, end)
                found = [block for block in found if block not in changed]
                changed.update(dict.fromkeys(found))
                if is_pin(claims):
                    num_pinned += len(found)
                changes.append((found, NO_CLAIMS if claims is NOTHING.alone else claims))
        if num_pinned:
            self._check_pins(num_pinned, sum([is_pin(self._placed.get_claims(block)) for block in changed]))
        pool.is_changing = True
        self._placed.change(changes, lambda claim: claim.is_session, True)
        pool.is_changing = False
        return len(changed)

    def keep_session(
        self, session_id: str, request: SchedulableRequest, until: float, priority: int = MAX_PRIORITY
    ) -> int:
        """Keep the cached blocks of this request for the next turn of its conversation.

        Call it just before or after the request is freed. A second call for the same session replaces the
        first. The session also ends when a request with this `session_id` takes its hits: `note_started`.

        Args:
            until: a time of the clock. After it, blocks without other claims are evicted first.
        Returns:
            The number of blocks found.
        Raises:
            InvalidArgumentError: `until` is not in the future, or an invalid priority. Nothing has changed.
        Cost: O(blocks of the request).
        """
        check_type("session_id", session_id, str)
        get_request_id("request", request)
        check_number("until", until)
        priority = as_int("priority", priority)
        self.block_pool.holds.check_whole()
        now = self._clock()
        self.expire()
        if not now < until < NEVER:
            raise InvalidArgumentError(f"a session cannot be kept until {until}: it is {now} now")
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidArgumentError(f"the priority is {priority}; it must be 0 to {MAX_PRIORITY}")
        found: list[KVCacheBlock] = []
        for group_id, block_size in enumerate(self._block_sizes):
            found += find_cached(self.block_pool, request, GroupId(group_id), block_size, 0, None)
        blocks = list(dict.fromkeys(found))  # a block may be found under several keys
        claim = Claim(priority, NEVER, until)
        if len(self._sessions) >= self._num_to_sweep_at:
            self._forget_ended_sessions()
        self.block_pool.is_changing = True
        self._placed.change([(blocks, claim.alone)], lambda claim: claim.until > now, False)
        if session_id in self._sessions:
            self._end_session(session_id)
        elif blocks and len(self._sessions) >= self.max_sessions:
            self._end_session(min(self._sessions, key=lambda one: self._sessions[one][0].until))
        if blocks:
            self._sessions[session_id] = claim, blocks
        self.block_pool.is_changing = False
        return len(blocks)

    def end_session(self, session_id: str) -> bool:
        """End a session. Its free blocks without other claims are reused as if they became free now.

        Returns:
            False if there is no such session, such as after its deadline. Nothing has changed then.
        """
        check_type("session_id", session_id, str)
        self.block_pool.holds.check_whole()
        self.expire()
        if session_id not in self._sessions:
            return False
        is_kept = self._sessions[session_id][0].until > self._clock()
        self.block_pool.is_changing = True
        self._end_session(session_id)
        self.block_pool.is_changing = False
        return is_kept

    def list_sessions(self) -> list[tuple[str, float]]:
        """Return the sessions with their deadlines; the next to end comes first."""
        self._forget_ended_sessions()
        deadlines = [(session_id, claim.until) for session_id, (claim, _) in self._sessions.items()]
        return sorted(deadlines, key=lambda one: one[1])

    # ---- for the manager ---------------------------------------------------------------------------

    def attach(self, block_sizes: Sequence[int], tables: dict[RequestId, list[BlockTable]]) -> None:
        """Set the block size of each group of the manager, in tokens; 0 for a group that is not cached.

        Called once, before there are directives.

        Args:
            tables: the tables of the manager's requests, by request id and group; live.
        """
        self._block_sizes = tuple(block_sizes)
        self._tables = tables

    def note_started(self, request: SchedulableRequest) -> None:
        """End the session of a request that has just got its hits."""
        if self._sessions:
            session_id: str | None = getattr(request, "session_id", None)
            if session_id is not None and session_id in self._sessions:
                self._end_session(session_id)

    def expire(self) -> None:
        """Handle expired timers; nothing during a call that changes the pool. O(1) if none has expired."""
        pool = self.block_pool
        if not self._deadlines.entries or pool.is_changing:
            return
        now = self._clock()
        ending = self._deadlines.find_due(now)
        pool.is_changing = True
        while ending is not None:
            assert isinstance(ending, Record)
            self._placed.end_claims(ending)
            ending = self._deadlines.find_due(now)
        pool.is_changing = False

    def note_leaving(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> None:
        """Put the claims of a request's directives on blocks that it is about to free.

        Args:
            first: the table index of the first block.
            blocks: head first.
        """
        ranges = self._ranges.get(request_id)
        if ranges is None:
            return
        for low, high, claims in cut_into_segments(ranges, first, len(blocks), self._block_sizes[group_id]):
            labelled = blocks if low == 0 and high == len(blocks) else blocks[low:high]
            if is_pin(claims):
                labelled = self._take_promised(request_id, group_id, first + low, labelled)
            self._placed.add(labelled, claims)

    def note_released(
        self,
        request_id: RequestId,
        table: Iterable[KVCacheBlock],
        blocks: list[KVCacheBlock],
        priority: int | None,
    ) -> None:
        """Put claims on blocks that a sequence of a `GPUKVPool` is about to release, in a larger change.

        Args:
            request_id: the id under which the sequence has directives; they end with its last block.
            table: all blocks of the sequence, in the order of its tokens.
            priority: that the cached ones get, unless they have a higher one; None for none.
        """
        if priority is not None:
            self._placed.add(blocks, make_claim(RetentionDirective(priority=priority)).alone)
        if request_id not in self._ranges:
            return
        positions = {block: position for position, block in enumerate(table)}
        if blocks == list(positions):
            self.note_leaving(request_id, GroupId(0), 0, blocks)
        else:
            for block in blocks:
                self.note_leaving(request_id, GroupId(0), positions[block], [block])
        if len(blocks) == len(positions):
            self.forget_request(request_id)

    def will_pin(self, request_id: RequestId, group_id: GroupId, index: int, block: KVCacheBlock) -> bool:
        """Return True if the block would be pinned, not free, if its last holder, this request, freed it now.

        Args:
            index: the block's index in the request's table.
        """
        if block.key is None:
            return False
        return is_pin(self._placed.get_claims(block)) or (
            request_id in self._promised and (group_id, index) in self._promised[request_id]
        )

    def list_lasting_pins(self, request_id: RequestId | None) -> set[KVCacheBlock]:
        """Return the blocks that pins without a deadline keep from this request, as long as they exist.

        Blocks that are pinned, and those that other running requests pin when they release them.
        Cost: O(pins).
        """
        self.expire()
        lasting = {block for block in self._placed.pinned if _is_lasting_pin(self._placed.get_claims(block))}
        for other_id, promised in self._promised.items():
            tables = self._tables.get(other_id)
            if tables is None or other_id == request_id:
                continue
            for group_id, index in promised:
                blocks = tables[group_id].blocks
                if index < len(blocks) and blocks[index].key is not None:
                    block_size = self._block_sizes[group_id]
                    for _, _, claims in cut_into_segments(self._ranges[other_id], index, 1, block_size):
                        if _is_lasting_pin(claims):
                            lasting.add(blocks[index])
        return lasting

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """See `forget_request`."""
        if len(self._ranges) > 0:
            self.forget_request(request_id)

    def forget_request(self, request_id: RequestId) -> None:
        """Remove the directives of a request that has freed its blocks; claims on its blocks stay."""
        self._promised.pop(request_id, None)  # first: a request with promises has ranges
        self._ranges.pop(request_id, None)

    def forget_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove the claims on blocks that were evicted from the prefix cache; free ones are reused first."""
        self._placed.forget(list(blocks))

    def release_all(self) -> None:
        """Remove all claims, pins and sessions; directives of running requests stay.

        Free blocks stay cached, in their order. O(blocks of the pool).
        """
        self.block_pool.holds.check_whole()
        self.expire()
        self.block_pool.is_changing = True
        self._sessions.clear()
        self._placed.drop_all()
        self.block_pool.is_changing = False

    # ---- claims ------------------------------------------------------------------------------------

    def _take_promised(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Return those of these blocks that the request pins as it releases them, and end their promises.

        The other promises stay: the request may pin these blocks when it returns after a swap.

        Args:
            first: the table index of the first block.
        """
        promised = self._promised.get(request_id, set())
        taken: list[KVCacheBlock] = []
        for index, block in enumerate(blocks, first):
            if block.key is not None and (group_id, index) in promised:
                promised.discard((group_id, index))
                taken.append(block)
        return taken

    def _end_session(self, session_id: str) -> None:
        """Implement `end_session`, as part of a larger call."""
        ended, blocks = self._sessions.pop(session_id)
        self._placed.change([(blocks, NO_CLAIMS)], lambda claim: claim is not ended, False)

    def _forget_ended_sessions(self) -> None:
        """Forget the sessions whose deadlines have passed; their claims end by themselves. O(sessions)."""
        now = self._clock()
        self._sessions = {name: kept for name, kept in self._sessions.items() if kept[0].until > now}
        self._num_to_sweep_at = min(self.max_sessions, max(64, 2 * len(self._sessions)))

    def _count_pins(self) -> int:
        """Return the number of pinned and promised blocks. O(requests with promised pins)."""
        return len(self._placed.pinned) + sum([len(places) for places in self._promised.values()])

    def _check_pins(self, num_new: int, num_replaced: int) -> None:
        """Raise PinLimitError if `num_new` pins in place of `num_replaced` would exceed the limit."""
        if self._count_pins() - num_replaced + num_new > self.max_pinned_blocks:
            self._placed.drop_evicted()
        num_others = self._count_pins() - num_replaced
        if num_others + num_new > self.max_pinned_blocks:
            raise PinLimitError(
                f"{num_new} blocks would be pinned, and {num_others} others are or may become pinned; the "
                f"limit is {self.max_pinned_blocks}. Pin less, remove pins with change_directives(), or "
                "raise max_pinned_blocks."
            )


def _is_lasting_pin(claims: tuple[Claim, ...]) -> bool:
    """Return True if one of the claims is a pin without a deadline."""
    return any(claim.strength == PINNED and claim.find_end(0.0) == NEVER for claim in claims)


# ---- which blocks a directive covers ---------------------------------------------------------------

# Equal directives get the same claim, so that blocks with it share a record.
_find_claim: Final = lru_cache(1024)(Claim)


def make_claim(directive: RetentionDirective) -> Claim:
    """Return the claim of a directive; usually the same object for equal directives, whatever their range."""
    duration_s = NEVER if directive.duration_s is None else directive.duration_s
    return _find_claim(PINNED if directive.pin else directive.priority, duration_s)


def cut_into_segments(
    ranges: list[Range], first: int, num_blocks: int, block_size: int
) -> list[tuple[int, int, tuple[Claim, ...]]]:
    """Return which claims of a request's directives are on which of its blocks `[first, first + num_blocks)`.

    Args:
        block_size: 0 for a group that is not cached, whose blocks get no claims.
    Returns:
        (low, high, claims), in order, counted from `first`, without the blocks that have no claims.
    """
    if block_size == 0:
        return []
    # The claims that begin (1) and end (-1) before a block.
    changes: dict[int, list[tuple[Claim, int]]] = {}
    for start, end, claim in ranges:
        low = max(0, start // block_size - first)
        high = num_blocks if end is None else min(num_blocks, -(-end // block_size) - first)
        if low < high:
            if len(ranges) == 1:  # the usual case, which needs no sorting
                return [(low, high, claim.alone)]
            changes.setdefault(low, []).append((claim, 1))
            changes.setdefault(high, []).append((claim, -1))
    counts: Counter[Claim] = Counter()
    segments: list[tuple[int, int, tuple[Claim, ...]]] = []
    for low, high in pairwise(sorted(changes)):
        for claim, change in changes[low]:
            counts[claim] += change
        claims = join_claims(sorted(+counts, key=rank_claim))
        if segments and segments[-1][1:] == (low, claims):
            segments[-1] = segments[-1][0], high, claims
        elif claims:
            segments.append((low, high, claims))
    return segments


def join_stretches(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same blocks as stretches `[low, high)` that are in order and do not overlap."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(stretches):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        elif low < high:
            joined.append((low, high))
    return joined


def find_cached(
    pool: BlockPoolCore,
    request: SchedulableRequest,
    group_id: GroupId,
    block_size: int,
    start: int,
    end: int | None,
) -> list[KVCacheBlock]:
    """Return the cached blocks of a prefix that hold any of the tokens `[start, end)`, head first."""
    hashes = request.block_hashes
    stride = block_size // pool.hash_block_size
    found: list[KVCacheBlock] = []
    if stride < 1:
        return found
    num_blocks = len(hashes) // stride
    if end is not None:
        num_blocks = min(num_blocks, -(-end // block_size))
    ours = hashes[start // block_size * stride + stride - 1 : num_blocks * stride : stride]
    found = pool.find_cached_prefix(ours, len(ours), group_id)
    group_ids = [group_id]
    for index in range(len(found) + 1, len(ours)):  # more may follow a hole that a window left
        blocks = pool.get_cached_block(ours[index], group_ids)
        if blocks is not None:
            found.append(blocks[0])
    return found
