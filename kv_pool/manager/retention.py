"""`BlockRetention`: which cached blocks are kept longer than others, until when, and which go first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, Final

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, PinLimitError
from kv_pool.manager.request import SchedulableRequest

DEFAULT_PRIORITY: Final = 35
"""What a block without a directive is worth."""

MAX_PRIORITY: Final = 100

PINNED: Final = 101
EXPIRED: Final = -1
NEVER: Final = float("inf")


@dataclass(frozen=True)
class RetentionDirective:
    """How much the cached blocks of some of a request's tokens are worth once nobody uses them.

        >>> from kv_pool.manager.retention import RetentionDirective
        >>> system_prompt = RetentionDirective(0, 1000, priority=90)
        >>> for_a_minute = RetentionDirective(0, duration_s=60.0)

    A block counts as covered when any of its tokens is in `[start, end)`. Where several directives cover a
    block, of one request or of several that shared it, the strongest of those that are still in force counts.

    Args:
        start, end: tokens of the request; None: to its end, however long it becomes.
        priority: 0 to 100. 35 is what a block without a directive is worth; lower goes before such blocks,
            higher after them. The scale and its default are TensorRT-LLM's.
        duration_s: how long the directive is in force, in seconds of the retention's clock, each time counted
            from the moment the block becomes free (nobody uses it). When time is up the block goes before all
            others with content. None: for as long as the block is cached.
        pin: never give the block up while the directive is in force; the priority says nothing then.

    A directive of 35 without duration and pin means: none. One of 35 with a duration outranks, while in
    force, blocks without any.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise InvalidArgumentError(
                f"a directive for tokens {self.start} to {self.end} covers none; start is 0 or more, end "
                "above it"
            )
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidArgumentError(f"the priority is {self.priority}; it goes from 0 to {MAX_PRIORITY}")
        if self.duration_s is not None and not 0 < self.duration_s < NEVER:
            raise InvalidArgumentError(
                f"duration_s is {self.duration_s}; it counts seconds, more than 0 (for blocks that need not "
                "be kept at all there is priority=0)"
            )
        if self.pin and self.end is None:
            raise InvalidArgumentError("a pin needs an end, or nobody knows how many blocks it will pin")

    @property
    def is_none(self) -> bool:
        """Does it say what is so without it?"""
        return self.priority == DEFAULT_PRIORITY and self.duration_s is None and not self.pin


class Claim:
    """Why a block is kept: a directive without its range, or a session.

    Attributes:
        strength: the priority, or PINNED.
        duration_s: after the block became free; inf for a session.
        until: a session's deadline; inf for a directive.
    """

    __slots__ = ("alone", "duration_s", "is_session", "strength", "until")

    def __init__(self, strength: int, duration_s: float, until: float, is_session: bool) -> None:
        self.strength: int = strength
        self.duration_s: float = duration_s
        self.until: float = until
        self.is_session: bool = is_session
        # What the block has that nobody else claims; one tuple, so that such blocks are recognised by it.
        self.alone: tuple[Claim, ...] = (self,)

    def find_end(self, freed_at: float) -> float:
        """When it is over for a block that became free then. In force before, not at that moment."""
        return self.until if self.is_session else freed_at + self.duration_s


class Cover:
    """The claims on a block that is in use, for when it becomes free.

    Attributes:
        key: its hash when the claims were made; with another, or the same given anew, they are void.
        claims: never empty.
    """

    __slots__ = ("claims", "key")

    def __init__(self, key: Any, claims: tuple[Claim, ...]) -> None:
        self.key: Any = key
        self.claims: tuple[Claim, ...] = claims


class Batch:
    """Kept blocks that became free one after the other with the same claims: they rise and fall together.

    Attributes:
        blocks: least recently freed first; those that are not kept in this batch any more stay listed. Block
            `i` has number `number + i` in the order of becoming free; no other batch has one in between.
        first: before this one, none is kept any more.
        claims: those in force; empty when time is up.
        number: of its first block.
        num_kept: how many are still kept.
        changes_at: when the next of its claims is over.
    """

    __slots__ = ("blocks", "changes_at", "claims", "first", "freed_at", "num_kept", "number", "strength")

    def __init__(
        self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...], freed_at: float, number: int
    ) -> None:
        self.blocks: list[KVCacheBlock] = blocks
        self.first: int = 0
        self.claims: tuple[Claim, ...] = claims
        self.freed_at: float = freed_at
        self.number: int = number
        self.num_kept: int = 0
        self.strength: int = EXPIRED
        self.changes_at: float = NEVER


class Session:
    """A conversation between two turns."""

    __slots__ = ("blocks", "claim", "session_id")

    def __init__(self, session_id: str, claim: Claim, blocks: list[KVCacheBlock]) -> None:
        self.session_id: str = session_id
        self.claim: Claim = claim
        self.blocks: list[KVCacheBlock] = blocks


class BlockRetention:
    """Keeps free cached blocks that directives, pins or sessions cover, in the order of what they are worth.

        >>> from kv_pool import BlockPool
        >>> from kv_pool.manager.retention import BlockRetention, RetentionDirective
        >>> pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=4)
        >>> retention = BlockRetention(pool, clock=lambda: 0.0, max_pinned_blocks=2)
        >>> retention.set_directives("chat", [RetentionDirective(0, 8, priority=90)])
        >>> retention.is_active, retention.num_kept
        (True, 0)

    Give it to the manager (`KVCacheManager(pool, retention=retention)`), which calls what is listed under
    "for the manager"; the scheduler calls the rest. A covered block that nobody uses any more does not go to
    the pool's free queue; the retention holds the last reference and counts it in `num_kept`, and gives it up
    when blocks are needed. Of all free blocks these go first:

        1  free blocks without content, at the front of the free queue
        2  those whose time is up, in the order in which it ran out
        3  those with a priority below 35, lowest first
        4  those without a directive, in the order of the free queue
        5  those with a priority of 35 and above, lowest first; pinned ones never

    Within 2, 3 and 5, of equal ones the least recently freed.

    Args:
        block_pool: the manager's pool.
        clock: the time in seconds, never falling. Whoever replays a trace passes a virtual one.
        max_pinned_blocks: how many blocks may be pinned, free or in use, those included that requests still
            running may yet pin.
        max_sessions: how many sessions are kept at most; one more ends the one that would have ended first.

    What it remembers is bounded by the number of blocks, sessions and of requests with directives that hold
    blocks or wait. As the pool, it belongs to one thread.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        clock: Callable[[], float],
        max_pinned_blocks: int = 0,
        max_sessions: int = 10_000,
    ) -> None:
        if max_pinned_blocks < 0 or max_sessions < 1:
            raise InvalidArgumentError(
                f"max_pinned_blocks is {max_pinned_blocks} and max_sessions {max_sessions}; they count "
                "blocks, 0 or more, and sessions, 1 or more"
            )
        self.block_pool: BlockPoolCore = block_pool
        self.max_pinned_blocks: int = max_pinned_blocks
        self.max_sessions: int = max_sessions
        self._clock: Callable[[], float] = clock
        self._block_sizes: tuple[int, ...] = (block_pool.hash_block_size,)
        # Per request that holds blocks or waits: (start, end, claim), and (group, index) of blocks to pin.
        self._directives: dict[str, list[tuple[int, int | None, Claim]]] = {}
        self._promised_pins: dict[str, set[tuple[int, int]]] = {}
        self._num_promised_pins: int = 0
        self._covers: dict[KVCacheBlock, Cover] = {}
        self._kept: dict[KVCacheBlock, Batch] = {}
        self._pinned: set[KVCacheBlock] = set()
        self._num_kept_pinned: int = 0
        # Strength to batches, least recently freed first but for those in _unsorted; EXPIRED: by expiry.
        self._buckets: dict[int, OrderedDict[Batch, None]] = {}
        self._unsorted: set[int] = set()
        # (time, number, a count, Batch or Session); entries that have become wrong are passed over.
        self._deadlines: list[tuple[float, int, int, Any]] = []
        self._num_deadlines: int = 0
        self._sessions: dict[str, Session] = {}
        self._last_number: int = 0
        self._claims: dict[tuple[int, float], Claim] = {}

    # ---- what a scheduler says and asks ------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Is there anything to do? While not, the manager calls the pool directly."""
        return bool(self._kept) or bool(self._covers) or bool(self._directives) or bool(self._sessions)

    @property
    def num_kept(self) -> int:
        """Kept blocks that can be had for the asking: free, as everyone but the pool sees it. O(1)."""
        if self._num_kept_pinned:  # time passing changes the number only where pins end
            self._apply_clock()
        return len(self._kept) - self._num_kept_pinned

    @property
    def num_pinned(self) -> int:
        """Pinned blocks that nobody uses: neither in use nor to be had. O(1)."""
        self._apply_clock()
        return self._num_kept_pinned

    @property
    def num_held(self) -> int:
        """All blocks whose only reference is the retention's: `num_kept + num_pinned`. O(1)."""
        return len(self._kept)

    @property
    def num_pins(self) -> int:
        """What counts against `max_pinned_blocks`: pinned blocks, free or in use, and promised ones."""
        self._apply_clock()
        return len(self._pinned) + self._num_promised_pins

    @property
    def num_sessions(self) -> int:
        """Sessions that are kept."""
        self._apply_clock()
        return len(self._sessions)

    def set_directives(self, request_id: str, directives: Sequence[RetentionDirective]) -> None:
        """From now on these, and no others, say what the blocks of this request will be worth.

        Any time before the request is freed, also before it is scheduled. They are applied to its cached
        blocks when it gives them back, and forgotten then; a request that was preempted needs them again.
        Empty: none (also for a request that was given up before it had blocks). For blocks of requests that
        are gone there is `change_directives`.

        Raises:
            PinLimitError: with these, more than `max_pinned_blocks` blocks might be pinned. Nothing has
                changed.
        """
        self._apply_clock()
        ranges: list[tuple[int, int | None, Claim]] = []
        pins: set[tuple[int, int]] = set()
        for directive in directives:
            if directive.is_none:
                continue
            ranges.append((directive.start, directive.end, self._make_claim(directive)))
            if directive.pin and directive.end is not None:
                for group_id, block_size in enumerate(self._block_sizes):
                    if block_size == 0:
                        continue
                    end = -(-directive.end // block_size)
                    pins.update((group_id, index) for index in range(directive.start // block_size, end))
        old = self._promised_pins.get(request_id)
        if pins:
            self._check_pins(len(pins), 0 if old is None else len(old))
        self.forget_request(request_id)
        if ranges:
            self._directives[request_id] = ranges
        if pins:
            self._promised_pins[request_id] = pins
            self._num_promised_pins += len(pins)

    def change_directives(self, request: SchedulableRequest, directives: Sequence[RetentionDirective]) -> int:
        """Change what the cached blocks of this prefix are worth, whoever left them there.

        For blocks that are free and kept, or free and not kept yet, as for those in use. On each cached block
        in the ranges, the directives in force are replaced by these; sessions stay. To take directives off,
        pass one that says nothing: `RetentionDirective(0, 1000)`. Durations of free blocks count from this
        call.

        Args:
            request: its hashes find the blocks; it need not hold any.
        Returns:
            How many blocks were found.
        Raises:
            PinLimitError: more than `max_pinned_blocks` blocks would be pinned. Nothing has changed.
        Cost: O(blocks in the ranges).
        """
        self._apply_clock()
        ranges = [(one.start, one.end, self._make_claim(one), one.is_none) for one in directives]
        changes: dict[KVCacheBlock, tuple[Claim, ...]] = {}
        for group_id, block_size in enumerate(self._block_sizes):
            for start, end, claim, is_none in ranges:
                for block in self._find_cached(request, group_id, block_size, start, end):
                    claims = changes.get(block)
                    if claims is None:
                        claims = tuple(old for old in self._get_claims(block) if old.is_session)
                    changes[block] = claims if is_none else add_claim(claims, claim)
        is_pinned = [is_pin(self._get_claims(block)) for block in changes]
        will_be = [is_pin(claims) for claims in changes.values()]
        if any(will_be):
            self._check_pins(sum(will_be), sum(is_pinned))
        self._set_claims(list(changes.items()), True)
        return len(changes)

    def keep_session(
        self, session_id: str, request: SchedulableRequest, until: float, priority: int = MAX_PRIORITY
    ) -> int:
        """Keep the cached blocks of this request for the next turn of its conversation.

        Just before or after the request is freed; again for the same session: the old hold ends. The hold
        ends by itself when a request whose `session_id` is this one took its hits, see `note_admitted`.

        Args:
            until: a time of the clock. From then on the blocks that nothing else keeps go first.
        Returns:
            How many blocks were found.
        Raises:
            InvalidArgumentError: `until` is not in the future, or no such priority. Nothing has changed.
        Cost: O(blocks of the request).
        """
        now = self._clock()
        self._apply_clock()
        if not now < until < NEVER:
            raise InvalidArgumentError(f"a session can not be kept until {until}: it is {now} now")
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidArgumentError(f"the priority is {priority}; it goes from 0 to {MAX_PRIORITY}")
        blocks: dict[KVCacheBlock, None] = {}
        for group_id, block_size in enumerate(self._block_sizes):
            blocks.update(dict.fromkeys(self._find_cached(request, group_id, block_size, 0, None)))
        claim = Claim(priority, NEVER, until, True)
        old = self._sessions.get(session_id)
        listed = list(blocks)
        if listed:
            changes: list[tuple[KVCacheBlock, tuple[Claim, ...]]] = []
            before: tuple[Claim, ...] = ()
            after = claim.alone
            for block in listed:
                claims = self._get_claims(block)
                if claims is not before:  # neighbours all but always have the same, and shall have so again
                    before = claims
                    left = [old for old in claims if old.until > now]
                    after = (*left, claim) if left else claim.alone
                changes.append((block, after))
            self._set_claims(changes, False)
        if old is not None:
            self.end_session(session_id)
        elif listed and len(self._sessions) >= self.max_sessions:
            self.end_session(min(self._sessions, key=self._find_end_of_session))
        if listed:
            session = Session(session_id, claim, listed)
            self._sessions[session_id] = session
            self._last_number += 1
            self._push_deadline(until, self._last_number, session)
        return len(listed)

    def end_session(self, session_id: str) -> bool:
        """Keep the session's blocks no longer; what nothing else keeps is free as if given back now.

        Returns:
            False: there is no such session (its time was up, say). Nothing has changed.
        """
        self._apply_clock()
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        changes: list[tuple[KVCacheBlock, tuple[Claim, ...]]] = []
        before: tuple[Claim, ...] = ()
        after: tuple[Claim, ...] = ()
        for block in session.blocks:
            claims = self._get_claims(block)
            if session.claim not in claims:
                continue
            if claims is not before:
                before = claims
                after = tuple(claim for claim in claims if claim is not session.claim)
            changes.append((block, after))
        self._set_claims(changes, False)
        return True

    def list_sessions(self) -> list[tuple[str, float]]:
        """The sessions that are kept, and until when; the next to end first."""
        self._apply_clock()
        sessions = [(session_id, session.claim.until) for session_id, session in self._sessions.items()]
        return sorted(sessions, key=get_second)

    # ---- for the manager ---------------------------------------------------------------------------

    def attach(self, block_sizes: Sequence[int]) -> None:
        """The manager's groups have blocks of so many tokens; 0 where nothing is cached.

        Called once, before there are directives.
        """
        self._block_sizes = tuple(block_sizes)

    def holds(self, block: KVCacheBlock) -> bool:
        """Is it counted in `num_kept`? Pinned blocks are not."""
        batch = self._kept.get(block)
        return batch is not None and batch.strength != PINNED

    def note_taken(self, blocks: Sequence[KVCacheBlock]) -> None:
        """`pool.touch(blocks)` has just run: kept ones are handed over, their directives remembered."""
        kept = self._kept
        if not kept or kept.keys().isdisjoint(blocks):
            return
        self._apply_clock()
        handed_over: list[KVCacheBlock] = []
        for block in blocks:
            batch = kept.get(block)
            if batch is not None:
                self._drop_from_batch(block, batch)
                if batch.claims:
                    self._covers[block] = Cover(block._block_hash, batch.claims)
                handed_over.append(block)
        self.block_pool.free_blocks(handed_over)  # our reference: whoever touched them has one, too

    def note_admitted(self, request: SchedulableRequest) -> None:
        """A request has got its first blocks, hits included: its session needs no keeping any more."""
        session_id = request.session_id
        if session_id is not None and session_id in self._sessions:
            self.end_session(session_id)

    def free_table(self, request_id: str, group_id: int, first: int, blocks: list[KVCacheBlock]) -> None:
        """Free blocks of a request, its directives applied: those from place `first` on in its table.

        Listed head first, freed tail first. Blocks that claims cover are kept when this was the last
        reference.
        Raises:
            InvalidBlockError: as the pool does. Nothing has changed.
        """
        pool = self.block_pool
        covers = self._covers
        ranges = self._directives.get(request_id)
        block_size = self._block_sizes[group_id]
        is_plain = not covers or not self._has_claims(blocks)
        if ranges is None or block_size == 0:
            if is_plain:
                pool.free_blocks(blocks[::-1])
            else:
                self._free_listed(blocks[::-1])
            return
        to_pool: list[KVCacheBlock] = []
        covered: list[KVCacheBlock] = []
        shared: list[tuple[KVCacheBlock, tuple[Claim, ...]]] = []
        stretches: list[tuple[list[KVCacheBlock], tuple[Claim, ...]]] = []
        segments = cut_into_segments(ranges, first, len(blocks), block_size)
        for low, high, claims in reversed(segments):
            tail = blocks[low:high]
            is_plain_here = is_plain or not self._has_claims(tail)
            if is_plain_here and not claims:
                tail.reverse()
                to_pool.extend(tail)
                continue
            stretch: list[KVCacheBlock] = []
            last_claims = claims
            for index in range(high - 1, low - 1, -1):
                block = blocks[index]
                key = block._block_hash
                if not is_plain_here:
                    cover = covers.get(block)
                    their_claims = claims
                    if cover is not None:
                        covered.append(block)
                        if cover.key is key:
                            their_claims = cover.claims
                            for claim in claims:
                                their_claims = add_claim(their_claims, claim)
                    if their_claims is not last_claims:
                        stretches.append((stretch, last_claims))
                        stretch = []
                        last_claims = their_claims
                if key is None or not last_claims:  # null blocks have no hash, too
                    to_pool.append(block)
                elif block.ref_cnt == 1:
                    stretch.append(block)
                else:
                    to_pool.append(block)
                    shared.append((block, last_claims))
            stretches.append((stretch, last_claims))
        pool.free_blocks(to_pool)
        for block in covered:
            self._drop_cover(block)
        promised = self._promised_pins.get(request_id)
        if promised is not None:
            for low, high, claims in segments:
                if is_pin(claims):
                    for index in range(low, high):
                        promised.discard((group_id, first + index))
            self._num_promised_pins = sum([len(places) for places in self._promised_pins.values()])
        for block, claims in shared:
            self._cover(block, claims)
        for stretch, claims in stretches:
            if stretch:
                self._keep(stretch, claims)

    def will_pin(self, request_id: str, group_id: int, index: int, block: KVCacheBlock) -> bool:
        """Would the block be pinned, not free, if this request, its last holder, gave it back now?

        Args:
            index: its place in the request's table.
        """
        if block._block_hash is None:
            return False
        cover = self._covers.get(block)
        if cover is not None and cover.key is block._block_hash and is_pin(cover.claims):
            return True
        block_size = self._block_sizes[group_id]
        for start, end, claim in self._directives.get(request_id, []):
            is_in = start // block_size <= index and (end is None or index * block_size < end)
            if is_in and claim.strength == PINNED:
                return True
        return False

    def forget_request(self, request_id: str) -> None:
        """The request has given all its blocks back. Its directives live on in the blocks they cover."""
        self._directives.pop(request_id, None)
        promised = self._promised_pins.pop(request_id, None)
        if promised is not None:
            self._num_promised_pins -= len(promised)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As `BlockPool.free_blocks`, but blocks that claims cover are kept when this was the last reference.

        Raises:
            InvalidBlockError: as the pool does; also for blocks that are kept. Nothing has changed.
        """
        listed: list[KVCacheBlock] = (
            ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
        )
        if self._kept and not self._kept.keys().isdisjoint(listed):
            raise InvalidBlockError(
                "free_blocks() got a block that the retention keeps, so it is free; it takes blocks that are "
                "in use. Was it freed twice?"
            )
        if not self._covers or not self._has_claims(listed):
            self.block_pool.free_blocks(listed)
        else:
            self._free_listed(listed)

    def _free_listed(self, listed: list[KVCacheBlock]) -> None:
        """Some of these blocks have claims, and none is kept."""
        covers = self._covers
        to_pool: list[KVCacheBlock] = []
        to_keep: list[KVCacheBlock] = []
        in_doubt: list[KVCacheBlock] = []
        for block in listed:
            cover = covers.get(block)
            if cover is None:
                to_pool.append(block)
            elif block.ref_cnt == 1 and cover.key is block._block_hash:
                to_keep.append(block)
            else:
                to_pool.append(block)
                in_doubt.append(block)
        if len(set(to_keep)) != len(to_keep):
            raise InvalidBlockError(
                "free_blocks() got a block more often than it is referenced. Was it freed twice?"
            )
        self.block_pool.free_blocks(to_pool)
        for block in in_doubt:
            cover = covers.get(block)
            if cover is None or block.ref_cnt != 0:
                continue
            if cover.key is block._block_hash:  # each of its references was in this list
                self.block_pool.touch([block])
                to_keep.append(block)
            else:
                self._drop_cover(block)
        stretch: list[KVCacheBlock] = []
        claims: tuple[Claim, ...] = ()
        for block in to_keep:
            cover = covers.pop(block)
            if cover.claims is not claims and stretch:
                self._keep(stretch, claims)
                stretch = []
            claims = cover.claims
            stretch.append(block)
        if stretch:
            self._keep(stretch, claims)

    def make_room(self, num_blocks: int) -> None:
        """`pool.get_new_blocks(num_blocks)` is next: let it get those that are worth least.

        Kept blocks that are among them are evicted here, and free at the front of the queue. Hits that shall
        not be among them have been touched before. When `num_blocks` are not to be had, nothing changes.
        Cost: O(num_blocks).
        """
        if not self._kept:
            return
        self._apply_clock()
        queue = self.block_pool.free_block_queue
        num_free = queue.num_free_blocks
        if num_blocks > num_free + len(self._kept) - self._num_kept_pinned:
            return
        num_wanted = 0
        has_low = False
        for strength in self._buckets:
            if strength < DEFAULT_PRIORITY:
                has_low = True
        if has_low:
            num_empty = 0
            block = queue.fake_free_list_head.next_free_block
            while block is not None and num_empty < num_blocks and block is not queue.fake_free_list_tail:
                if block._block_hash is not None:
                    break
                num_empty += 1
                block = block.next_free_block
            num_wanted = num_blocks - num_empty
        victims = self._take_victims(num_wanted, DEFAULT_PRIORITY)
        if num_blocks > num_free + len(victims):
            victims += self._take_victims(num_blocks - num_free - len(victims), PINNED)
        self._release(victims)

    def reclaim(self, num_blocks: int) -> int:
        """Give so many kept blocks back to the pool, evicted, at the front of its queue.

        Those whose time is up first, then by priority, then the least recently freed; never pinned ones.
        Returns:
            How many: fewer only when no more are kept.
        """
        self._apply_clock()
        victims = self._take_victims(num_blocks, PINNED)
        self._release(victims)
        return len(victims)

    def forget_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These blocks were evicted from the prefix cache: nothing keeps them any more."""
        released: list[KVCacheBlock] = []
        for block in blocks:
            batch = self._kept.get(block)
            if batch is not None:
                self._drop_from_batch(block, batch)
                released.append(block)
            self._drop_cover(block)
        self.block_pool.free_blocks(released)

    def release_all(self) -> None:
        """Keep nothing, pins and sessions included; what requests have been told for later stays.

        The blocks are free, cached as they were, the most valuable last in the queue.
        """
        self._apply_clock()
        victims = self._take_victims(len(self._kept), PINNED + 1)
        self._sessions.clear()
        self._deadlines.clear()
        self._covers.clear()
        self._pinned.clear()
        self.block_pool.free_blocks(victims)

    # ---- claims ------------------------------------------------------------------------------------

    def _make_claim(self, directive: RetentionDirective) -> Claim:
        """The same object for the same words, so that blocks under it are recognised as equal."""
        strength = PINNED if directive.pin else directive.priority
        duration_s = NEVER if directive.duration_s is None else directive.duration_s
        claim = self._claims.get((strength, duration_s))
        if claim is None:
            if len(self._claims) >= 1024:
                self._claims.clear()  # equal ones that are not the same cost a comparison, nothing else
            claim = Claim(strength, duration_s, NEVER, False)
            self._claims[strength, duration_s] = claim
        return claim

    def _check_pins(self, num_new: int, num_replaced: int) -> None:
        if len(self._pinned) + self._num_promised_pins - num_replaced + num_new > self.max_pinned_blocks:
            # Blocks may have been evicted behind our back; only now it is worth a look.
            for block in list(self._pinned):
                if not is_pin(self._get_claims(block)):
                    self._drop_cover(block)
        num_others = len(self._pinned) + self._num_promised_pins - num_replaced
        if num_others + num_new > self.max_pinned_blocks:
            raise PinLimitError(
                f"{num_new} blocks would be pinned, and {num_others} others are or may become so; at most "
                f"{self.max_pinned_blocks} may. Pin less, take pins off with change_directives(), or raise "
                "max_pinned_blocks."
            )

    def _find_end_of_session(self, session_id: str) -> float:
        return self._sessions[session_id].claim.until

    def _find_cached(
        self, request: SchedulableRequest, group_id: int, block_size: int, start: int, end: int | None
    ) -> list[KVCacheBlock]:
        """The cached blocks of this prefix that hold any of the tokens `[start, end)`, head first."""
        pool = self.block_pool
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
        for index in range(len(found) + 1, len(ours)):  # behind a window's hole there may be more
            blocks = pool.get_cached_block(ours[index], group_ids)
            if blocks is not None:
                found.append(blocks[0])
        return found

    def _get_claims(self, block: KVCacheBlock) -> tuple[Claim, ...]:
        """The claims on the block that are not void and, if it is kept, not over."""
        batch = self._kept.get(block)
        if batch is not None:
            return batch.claims
        cover = self._covers.get(block)
        if cover is None or cover.key is not block._block_hash:
            return ()
        return cover.claims

    def _has_claims(self, blocks: list[KVCacheBlock]) -> bool:
        """Are there remembered claims on any of these blocks?"""
        covers = self._covers
        for block in blocks:  # noqa: SIM110 (a loop compiles to C, a generator does not)
            if block in covers:
                return True
        return False

    def _cover(self, block: KVCacheBlock, claims: tuple[Claim, ...]) -> None:
        """Remember claims, at least one, on a block that is in use."""
        self._covers[block] = Cover(block._block_hash, claims)
        self._mark(block, claims)

    def _drop_cover(self, block: KVCacheBlock) -> None:
        self._covers.pop(block, None)
        self._pinned.discard(block)

    def _mark(self, block: KVCacheBlock, claims: tuple[Claim, ...]) -> None:
        """Is it pinned or not?"""
        if is_pin(claims):
            self._pinned.add(block)
        else:
            self._pinned.discard(block)

    def _set_claims(self, changes: list[tuple[KVCacheBlock, tuple[Claim, ...]]], counts_anew: bool) -> None:
        """Give these cached blocks, listed head first, other claims.

        Args:
            counts_anew: durations of free blocks count from now; else those of kept blocks go on.
        A kept block keeps its place in the order of becoming free, one that was only free gets the last.
        """
        now = self._clock()
        kept = self._kept
        broken_up: dict[Batch, None] = {}
        fresh: list[tuple[int, float, KVCacheBlock, tuple[Claim, ...]]] = []
        plain: list[KVCacheBlock] = []
        number = self._last_number
        for block, claims in reversed(changes):
            batch = kept.get(block)
            if batch is not None:
                broken_up[batch] = None
                if not claims:
                    plain.append(block)
            elif not claims:
                self._drop_cover(block)
            elif block.ref_cnt == 0:
                self._drop_cover(block)
                number += 1
                fresh.append((number, now, block, claims))
            else:
                self._cover(block, claims)
        self._last_number = number
        # What is left of a batch is filed anew, in stretches. Those whose time is up stay as they are:
        # nothing that ends later comes between them.
        new_claims = dict(changes)
        again: list[tuple[int, float, KVCacheBlock, tuple[Claim, ...]]] = []
        for batch in broken_up:
            is_over = batch.strength == EXPIRED
            for index, block in enumerate(list(batch.blocks)):
                if kept.get(block) is not batch:
                    continue
                is_changed = block in new_claims
                if is_over and not is_changed:
                    continue
                self._drop_from_batch(block, batch)
                claims = new_claims[block] if is_changed else batch.claims
                if claims:
                    freed_at = now if is_changed and counts_anew else batch.freed_at
                    again.append((batch.number + index, freed_at, block, claims))
                else:
                    self._pinned.discard(block)
        again.sort(key=get_place)
        self._file_all(again)
        if fresh:
            self.block_pool.touch([block for _, _, block, _ in fresh])
            self._file_all(fresh)
        self.block_pool.free_blocks(plain)

    def _file_all(self, places: list[tuple[int, float, KVCacheBlock, tuple[Claim, ...]]]) -> None:
        """Put blocks whose reference is ours into batches: (number, freed at, block, claims in force)."""
        blocks: list[KVCacheBlock] = []
        first = 0
        last_freed_at = 0.0
        last_claims: tuple[Claim, ...] = ()
        for number, freed_at, block, claims in places:
            self._mark(block, claims)
            if blocks and (
                number != first + len(blocks) or freed_at != last_freed_at or claims is not last_claims
            ):
                self._file(Batch(blocks, last_claims, last_freed_at, first))
                blocks = []
            if not blocks:
                first = number
                last_freed_at = freed_at
                last_claims = claims
            blocks.append(block)
        if blocks:
            self._file(Batch(blocks, last_claims, last_freed_at, first))

    # ---- kept blocks -------------------------------------------------------------------------------

    def _keep(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...]) -> None:
        """These blocks, in this order, became free now; their last reference is ours."""
        self._apply_clock()
        now = self._clock()
        live = list_live(claims, now, now)
        if not live:  # their sessions ended while they were in use
            for block in blocks:
                self._pinned.discard(block)
            self.block_pool.free_blocks(blocks)
            return
        batch = Batch(blocks, live, now, self._last_number + 1)
        self._last_number += len(blocks)
        if is_pin(live):
            self._pinned.update(blocks)
        self._file(batch)

    def _file(self, batch: Batch) -> None:
        """Keep the blocks of a new batch."""
        kept = self._kept
        for block in batch.blocks:
            kept[block] = batch
        batch.num_kept = len(batch.blocks)
        self._put_into_bucket(batch)

    def _put_into_bucket(self, batch: Batch) -> None:
        """By the claims it has, which are all in force, or none."""
        strength = EXPIRED
        changes_at = NEVER
        for claim in batch.claims:
            strength = max(strength, claim.strength)
            changes_at = min(changes_at, claim.find_end(batch.freed_at))
        batch.strength = strength
        batch.changes_at = changes_at
        if strength == PINNED:
            self._num_kept_pinned += batch.num_kept
        bucket = self._buckets.get(strength)
        if bucket is None:
            bucket = OrderedDict()
            self._buckets[strength] = bucket
        elif strength != EXPIRED and next(reversed(bucket)).number > batch.number:
            self._unsorted.add(strength)
        bucket[batch] = None
        if changes_at < NEVER:
            self._push_deadline(changes_at, batch.number, batch)

    def _take_from_bucket(self, batch: Batch) -> None:
        bucket = self._buckets[batch.strength]
        del bucket[batch]
        if not bucket:
            del self._buckets[batch.strength]
            self._unsorted.discard(batch.strength)

    def _drop_from_batch(self, block: KVCacheBlock, batch: Batch) -> None:
        """The block is kept no longer. Its reference and its cover are left as they are."""
        del self._kept[block]
        batch.num_kept -= 1
        if batch.strength == PINNED:
            self._num_kept_pinned -= 1
        if batch.num_kept == 0:
            self._take_from_bucket(batch)
            batch.blocks = []

    def _take_victims(self, num_blocks: int, end: int) -> list[KVCacheBlock]:
        """Up to so many kept blocks of a strength below `end`, first to go first; kept no longer."""
        victims: list[KVCacheBlock] = []
        if num_blocks <= 0:
            return victims
        kept = self._kept
        for strength in sorted(self._buckets):
            if strength >= end:
                break
            if strength in self._unsorted:
                self._unsorted.discard(strength)
                in_order = sorted(self._buckets[strength], key=get_number)
                self._buckets[strength] = OrderedDict((batch, None) for batch in in_order)
            bucket = self._buckets[strength]
            while bucket:
                batch = next(iter(bucket))
                blocks = batch.blocks
                while batch.num_kept:
                    if len(victims) == num_blocks:
                        return victims  # the batch has some left
                    block = blocks[batch.first]
                    batch.first += 1
                    if kept.get(block) is batch:
                        victims.append(block)
                        del kept[block]
                        batch.num_kept -= 1
                        if strength == PINNED:
                            self._num_kept_pinned -= 1
                self._take_from_bucket(batch)
                batch.blocks = []
        return victims

    def _release(self, victims: list[KVCacheBlock]) -> None:
        """Evict them, so that the pool puts them to the front of its queue, whatever kind of pool it is."""
        if victims:
            self.block_pool.evict_blocks([block.block_id for block in victims])
            self.block_pool.free_blocks(victims)

    def _push_deadline(self, time: float, number: int, thing: Any) -> None:
        deadlines = self._deadlines
        if len(deadlines) > 64 and len(deadlines) > 2 * (
            len(self._sessions) + sum(len(bucket) for bucket in self._buckets.values())
        ):
            deadlines[:] = [entry for entry in deadlines if self._is_due(entry[0], entry[3])]
            heapify(deadlines)
        self._num_deadlines += 1
        heappush(deadlines, (time, number, self._num_deadlines, thing))

    def _is_due(self, time: float, thing: Any) -> bool:
        """Does a deadline still mean something?"""
        if isinstance(thing, Session):
            return self._sessions.get(thing.session_id) is thing
        assert isinstance(thing, Batch)
        return thing.num_kept > 0 and thing.changes_at == time

    def _apply_clock(self) -> None:
        """Let everything that is over by now be over, one after the other. O(1) if nothing is."""
        deadlines = self._deadlines
        if not deadlines or deadlines[0][0] > self._clock():
            return
        now = self._clock()
        while deadlines and deadlines[0][0] <= now:
            time, _, _, thing = heappop(deadlines)
            if not self._is_due(time, thing):
                continue
            if isinstance(thing, Session):
                del self._sessions[thing.session_id]
                continue
            assert isinstance(thing, Batch)
            self._take_from_bucket(thing)
            thing.claims = list_live(thing.claims, thing.freed_at, time)
            if thing.strength == PINNED:
                self._num_kept_pinned -= thing.num_kept
                if not is_pin(thing.claims):
                    for block in thing.blocks:
                        if self._kept.get(block) is thing:
                            self._pinned.discard(block)
            self._put_into_bucket(thing)


def add_claim(claims: tuple[Claim, ...], claim: Claim) -> tuple[Claim, ...]:
    """These claims and one more, without those of directives that another outlives and outranks.

    So a block that thousands of requests shared has at most one claim for each strength. The same object if
    nothing is added.
    """
    left: list[Claim] = []
    for old in claims:
        if old.is_session:
            left.append(old)
            continue
        if old.strength >= claim.strength and old.duration_s >= claim.duration_s:
            return claims
        if old.strength > claim.strength or old.duration_s > claim.duration_s:
            left.append(old)
    if not left:
        return claim.alone
    left.append(claim)
    return tuple(left)


def cut_into_segments(
    ranges: list[tuple[int, int | None, Claim]], first: int, num_blocks: int, block_size: int
) -> list[tuple[int, int, tuple[Claim, ...]]]:
    """Which claims of a request's directives are on which of its blocks `[first, first + num_blocks)`.

    Returns:
        (low, high, claims), in order and without gaps, counted from `first`.
    """
    stretches: list[tuple[int, int, Claim]] = []
    cuts = {0, num_blocks}
    for start, end, claim in ranges:
        low = max(0, start // block_size - first)
        high = num_blocks if end is None else min(num_blocks, -(-end // block_size) - first)
        if low < high:
            stretches.append((low, high, claim))
            cuts.add(low)
            cuts.add(high)
    in_order = sorted(cuts)
    segments: list[tuple[int, int, tuple[Claim, ...]]] = []
    for low, high in pairwise(in_order):
        claims: tuple[Claim, ...] = ()
        for start_block, end_block, claim in stretches:
            if start_block <= low < end_block:
                claims = add_claim(claims, claim)
        segments.append((low, high, claims))
    return segments


def is_pin(claims: tuple[Claim, ...]) -> bool:
    """Is one of the claims a pin?"""
    for claim in claims:  # noqa: SIM110 (a loop compiles to C, a generator does not)
        if claim.strength == PINNED:
            return True
    return False


def list_live(claims: tuple[Claim, ...], freed_at: float, now: float) -> tuple[Claim, ...]:
    """Those in force now on a block that became free then; the same object if all are."""
    for claim in claims:
        if claim.find_end(freed_at) <= now:
            return tuple(claim for claim in claims if claim.find_end(freed_at) > now)
    return claims


def get_number(batch: Batch) -> int:
    """The place of its first block in the order of becoming free."""
    return batch.number


def get_place(place: tuple[int, float, KVCacheBlock, tuple[Claim, ...]]) -> int:
    """A block's number in the order of becoming free."""
    return place[0]


def get_second(pair: tuple[str, float]) -> float:
    """The deadline of a listed session."""
    return pair[1]
