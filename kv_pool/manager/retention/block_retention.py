"""`BlockRetention`: which cached blocks are kept longer than others, until when, and which go first."""

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, SupportsIndex

from mypy_extensions import i32

from kv_pool.contiguous.run_pool_core import RunPoolCore
from kv_pool.core.arguments import as_int, as_list_of, check_number, check_type, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.identity import refuse_copy
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, KVPoolError
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.requests.request_checks import get_request_id
from kv_pool.manager.retention.claim import NEVER, NO_CLAIMS, PINNED, Claim, add_claim, is_pin, list_live
from kv_pool.manager.retention.covers import Cover, Covers
from kv_pool.manager.retention.deadlines import Deadlines
from kv_pool.manager.retention.directive import DEFAULT_PRIORITY, MAX_PRIORITY, RetentionDirective
from kv_pool.manager.retention.kept_blocks import Batch, KeptBlocks
from kv_pool.manager.retention.pins import Pins
from kv_pool.manager.retention.retention_ids import RetentionIds, is_any_known
from kv_pool.manager.retention.segments import cut_into_segments
from kv_pool.manager.retention.sessions import Session, Sessions
from kv_pool.manager.retention.unfinished import Place, Unfinished


class BlockRetention:
    """Keeps free cached blocks that directives, pins or sessions cover, in the order of what they are worth.

        >>> from kv_pool import BlockPool
        >>> from kv_pool.manager.retention.block_retention import BlockRetention
        >>> from kv_pool.manager.retention.directive import RetentionDirective
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
        block_pool: the manager's pool; it can have one retention.
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
        check_type("block_pool", block_pool, BlockPoolCore)
        if not callable(clock):
            refuse_type("clock", clock, "a function")
        if not isinstance(max_pinned_blocks, int):
            max_pinned_blocks = as_int("max_pinned_blocks", max_pinned_blocks)
        if not isinstance(max_sessions, int):
            max_sessions = as_int("max_sessions", max_sessions)
        if max_pinned_blocks < 0 or max_sessions < 1:
            raise InvalidArgumentError(
                f"max_pinned_blocks is {max_pinned_blocks} and max_sessions {max_sessions}; they count "
                "blocks, 0 or more, and sessions, 1 or more"
            )
        self.block_pool: BlockPoolCore = block_pool
        self._clock: Callable[[], float] = clock
        self._block_sizes: tuple[int, ...] = (block_pool.hash_block_size,)
        # Per request that holds blocks or waits: (start, end, claim).
        self._directives: dict[str, list[tuple[int, int | None, Claim]]] = {}
        self._ids: RetentionIds = RetentionIds()
        self._deadlines: Deadlines = Deadlines()
        self._covers: Covers = Covers(self._ids)
        self._kept: KeptBlocks = KeptBlocks(self._ids, self._deadlines)
        self._pins: Pins = Pins(max_pinned_blocks)
        self._sessions: Sessions = Sessions(max_sessions)
        self._unfinished: Unfinished = Unfinished()
        self._last_number: int = 0
        self._claims: dict[tuple[int, float], Claim] = {}

    def __repr__(self) -> str:
        return (
            f"<BlockRetention: {self._kept.num_blocks} blocks kept, {self._pins.count()} of "
            f"{self._pins.max_pinned_blocks} pins, {len(self._sessions.by_id)} sessions>"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    # ---- what a scheduler says and asks ------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Is there anything to do? While not, the manager calls the pool directly."""
        return (
            self._kept.num_blocks > 0
            or self._covers.num_blocks > 0
            or len(self._directives) > 0
            or len(self._sessions.by_id) > 0
            or self._unfinished.is_marked
        )

    @property
    def num_kept(self) -> int:
        """Kept blocks that can be had for the asking: free, as everyone but the pool sees it. O(1)."""
        kept = self._kept
        if kept.num_pinned or self._unfinished.is_marked:
            self._apply_clock()  # time passing changes the number only where pins end
        return kept.num_blocks - kept.num_pinned

    @property
    def num_pinned(self) -> int:
        """Pinned blocks that nobody uses: neither in use nor to be had. O(1)."""
        self._apply_clock()
        return self._kept.num_pinned

    @property
    def num_held(self) -> int:
        """All blocks whose only reference is the retention's: `num_kept + num_pinned`. O(1)."""
        return self._kept.num_blocks

    @property
    def max_pinned_blocks(self) -> int:
        """How many pins there may be."""
        return self._pins.max_pinned_blocks

    @property
    def num_pins(self) -> int:
        """What counts against `max_pinned_blocks`: pinned blocks, free or in use, and promised ones."""
        self._apply_clock()
        return self._pins.count()

    @property
    def max_sessions(self) -> int:
        """How many sessions are kept at most."""
        return self._sessions.max_sessions

    @property
    def num_sessions(self) -> int:
        """Sessions that are kept."""
        self._apply_clock()
        return len(self._sessions.by_id)

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
        if not isinstance(request_id, str):
            refuse_type("request_id", request_id, "str")
        listed: list[RetentionDirective] = as_list_of("directives", directives, RetentionDirective)
        self._apply_clock()
        ranges: list[tuple[int, int | None, Claim]] = []
        pins: set[tuple[int, int]] = set()
        for directive in listed:
            if directive.is_none:
                continue
            ranges.append((directive.start, directive.end, self._make_claim(directive)))
            if directive.pin and directive.end is not None:
                for group_id, block_size in enumerate(self._block_sizes):
                    if block_size == 0:
                        continue
                    end = -(-directive.end // block_size)
                    pins.update((group_id, index) for index in range(directive.start // block_size, end))
        if pins:
            self._check_pins(len(pins), self._pins.count_promised(request_id))
        self.forget_request(request_id)
        try:
            if pins:
                self._pins.promise(request_id, pins)
            if ranges:
                self._directives[request_id] = ranges
        except BaseException:
            self._recover_at_once()
            raise

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
        get_request_id("request", request)
        listed: list[RetentionDirective] = as_list_of("directives", directives, RetentionDirective)
        self._apply_clock()
        ranges = [(one.start, one.end, self._make_claim(one), one.is_none) for one in listed]
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
        self._set_claims(list(changes), list(changes.values()), True)
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
        if not isinstance(session_id, str):
            refuse_type("session_id", session_id, "str")
        get_request_id("request", request)
        check_number("until", until)
        if not isinstance(priority, int):
            priority = as_int("priority", priority)
        now = self._clock()
        self._apply_clock()
        if not now < until < NEVER:
            raise InvalidArgumentError(f"a session can not be kept until {until}: it is {now} now")
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidArgumentError(f"the priority is {priority}; it goes from 0 to {MAX_PRIORITY}")
        blocks: list[KVCacheBlock] = []
        for group_id, block_size in enumerate(self._block_sizes):
            blocks += self._find_cached(request, group_id, block_size, 0, None)
        if self.block_pool.cached_block_hashes_by_block:  # one may be found under several keys
            blocks = list(dict.fromkeys(blocks))
        session = Session(session_id, until, priority, blocks)
        if blocks:
            claim = session.claim
            new_claims: list[tuple[Claim, ...]] = []
            before: tuple[Claim, ...] = NO_CLAIMS
            after = claim.alone
            last_id: i32 = 0
            for block in blocks:
                if block._retention_id != last_id:
                    last_id = block._retention_id
                    claims = self._get_claims(block)
                    if claims is not before:
                        before = claims
                        left = [old for old in claims if old.until > now]
                        after = (*left, claim) if left else claim.alone
                new_claims.append(after)
            self._set_claims(blocks, new_claims, False)
        try:
            if blocks or session_id in self._sessions.by_id:
                one_too_many = self._sessions.find_one_to_end(session_id)
                if one_too_many is not None:
                    self.end_session(one_too_many)
            if blocks:
                self._sessions.by_id[session_id] = session
                self._last_number += 1
                self._deadlines.push(session, self._last_number)
        except BaseException:
            self._recover_at_once()
            raise
        return len(blocks)

    def end_session(self, session_id: str) -> bool:
        """Keep the session's blocks no longer; what nothing else keeps is free as if given back now.

        Returns:
            False: there is no such session (its time was up, say). Nothing has changed.
        """
        if not isinstance(session_id, str):
            refuse_type("session_id", session_id, "str")
        self._apply_clock()
        session = self._sessions.by_id.get(session_id)
        if session is None:
            return False
        try:
            self._sessions.pop(session_id)
            blocks: list[KVCacheBlock] = []
            new_claims: list[tuple[Claim, ...]] = []
            before: tuple[Claim, ...] = NO_CLAIMS
            after: tuple[Claim, ...] = NO_CLAIMS
            for block in session.blocks:
                claims = self._get_claims(block)
                if claims is not before:
                    before = claims
                    after = tuple([claim for claim in claims if claim is not session.claim])
                if len(after) < len(claims):
                    blocks.append(block)
                    new_claims.append(after)
            self._set_claims(blocks, new_claims, False)
        except BaseException:
            self._recover_at_once()
            raise
        return True

    def list_sessions(self) -> list[tuple[str, float]]:
        """The sessions that are kept, and until when; the next to end first."""
        self._apply_clock()
        return self._sessions.list_deadlines()

    # ---- for the manager ---------------------------------------------------------------------------

    def attach(self, block_sizes: Sequence[int]) -> None:
        """The manager's groups have blocks of so many tokens; 0 where nothing is cached.

        Called once, before there are directives.
        """
        self._block_sizes = tuple(block_sizes)

    def holds(self, block: KVCacheBlock) -> bool:
        """Is it counted in `num_kept`? Pinned blocks are not."""
        batch = self._kept.find_batch(block)
        return batch is not None and batch.strength != PINNED

    def note_taken(self, blocks: Sequence[KVCacheBlock]) -> None:
        """`pool.touch(blocks)` has just run: kept ones are handed over, their directives remembered."""
        kept = self._kept
        listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
        if kept.num_blocks == 0 or not is_any_known(listed):
            return
        self._apply_clock()
        cover: Cover | None = None
        last_id: i32 = 0
        new_id: i32 = 0
        last_batch: Batch | None = None
        num_taken = 0
        try:
            for block in listed:
                if block._retention_id <= 0:
                    continue
                if block._retention_id != last_id:
                    self._hand_over(last_batch, cover, num_taken)
                    last_id = block._retention_id
                    last_batch = kept.find_batch(block)
                    num_taken = 0
                    cover = None
                    new_id = 0
                    if last_batch is not None and last_batch.claims:
                        cover = self._covers.find(last_batch.claims)
                        new_id = cover.retention_id
                if last_batch is None:
                    continue
                block.ref_cnt -= 1  # the retention's reference; the caller has its own
                block._retention_id = new_id
                num_taken += 1
            self._hand_over(last_batch, cover, num_taken)
        except BaseException:
            self._recover_at_once()
            raise

    def _hand_over(self, batch: Batch | None, cover: Cover | None, num_taken: int) -> None:
        """Count blocks that went from a batch to a cover, or to none."""
        if batch is None:
            return
        if cover is not None:
            self._covers.count_more(cover, num_taken)
        if num_taken:
            self._kept.drop_count(batch, num_taken)

    def note_admitted(self, request: SchedulableRequest) -> None:
        """A request has got its first blocks, hits included: its session needs no keeping any more."""
        session_id: str | None = getattr(request, "session_id", None)
        if session_id is not None and session_id in self._sessions.by_id:
            self.end_session(session_id)

    def free_table(self, request_id: str, group_id: int, first: int, listed: list[KVCacheBlock]) -> None:
        """Free blocks of a request, its directives applied: those from place `first` on in its table.

        Listed head first, freed tail first; the list is empty when the references have been taken over, in
        the same step. Blocks that claims cover are kept when this was the last reference.
        Raises:
            InvalidBlockError: as the pool does. No reference was taken over.
        """
        if self._unfinished.is_marked:
            self.recover()
        pool = self.block_pool
        ranges = self._directives.get(request_id)
        block_size = self._block_sizes[group_id]
        if ranges is None or block_size == 0:
            listed.reverse()
            if is_any_known(listed):
                self._free_known(listed)
            else:
                pool.free_out_of(listed)
            return
        to_pool: list[KVCacheBlock] = []
        void: list[KVCacheBlock] = []
        shared: list[tuple[KVCacheBlock, tuple[Claim, ...]]] = []
        stretches: list[tuple[list[KVCacheBlock], tuple[Claim, ...]]] = []
        segments = cut_into_segments(ranges, first, len(listed), block_size)
        num_left = len(segments)
        if segments and not segments[-1][2]:
            # Mostly a prompt's head is covered and nothing is known of the rest: not one more copy of that.
            rest = listed[segments[-1][0] :]
            if not is_any_known(rest):
                rest.reverse()
                to_pool = rest
                num_left -= 1
        for low, high, claims in segments[:num_left][::-1]:
            tail = listed[low:high]
            tail.reverse()
            if not claims and not is_any_known(tail):
                to_pool += tail
                continue
            stretch: list[KVCacheBlock] = []
            stretch_claims = claims
            last_id: i32 = 0
            known_claims = claims  # of blocks with that number, ours included
            adds_some = False
            for block in tail:
                retention_id = block._retention_id
                if block._block_hash is None:  # null blocks have none, too
                    to_pool.append(block)
                    if retention_id != 0:
                        void.append(block)
                    continue
                if retention_id <= 0:
                    block_claims = claims
                    if retention_id < 0 and not claims:
                        void.append(block)
                elif retention_id == last_id:
                    block_claims = known_claims
                else:
                    old_claims = self._get_claims(block)
                    block_claims = old_claims
                    for claim in claims:
                        block_claims = add_claim(block_claims, claim)
                    known_claims = block_claims
                    adds_some = block_claims is not old_claims
                    last_id = retention_id
                if not block_claims:
                    to_pool.append(block)
                elif block.ref_cnt == 1:
                    if block_claims is not stretch_claims:
                        stretches.append((stretch, stretch_claims))
                        stretch = []
                        stretch_claims = block_claims
                    stretch.append(block)
                else:
                    to_pool.append(block)
                    if retention_id <= 0 or adds_some:
                        shared.append((block, block_claims))
            stretches.append((stretch, stretch_claims))
        self._take_over(listed, to_pool, stretches, shared)
        try:
            for block in void:
                self._drop_cover(block)
            self._pins.fulfil(request_id, group_id, first, segments)
            cover: Cover | None = None
            for block, claims in shared:
                cover = self._cover(block, claims, cover)
            if shared:
                self._unfinished.covers = []
            self._keep_stretches()
        except BaseException:
            self._recover_at_once()
            raise

    def will_pin(self, request_id: str, group_id: int, index: int, block: KVCacheBlock) -> bool:
        """Would the block be pinned, not free, if this request, its last holder, gave it back now?

        Args:
            index: its place in the request's table.
        """
        if block._block_hash is None:
            return False
        if block._retention_id > 0 and is_pin(self._get_claims(block)):
            return True
        block_size = self._block_sizes[group_id]
        for start, end, claim in self._directives.get(request_id, []):
            is_in = start // block_size <= index and (end is None or index * block_size < end)
            if is_in and claim.strength == PINNED:
                return True
        return False

    def forget_request(self, request_id: str) -> None:
        """The request has given all its blocks back. Its directives live on in the blocks they cover."""
        if self._unfinished.is_marked:
            self.recover()
        try:
            self._directives.pop(request_id, None)
            self._pins.forget_request(request_id)
        except BaseException:
            self._recover_at_once()
            raise

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As `BlockPool.free_blocks`, but blocks that claims cover are kept when this was the last reference.

        Raises:
            InvalidBlockError: as the pool does; also for blocks that are kept. Nothing has changed.
        """
        listed: list[KVCacheBlock] = (
            ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
        )
        if not is_any_known(listed):
            self.block_pool.free_blocks(listed)
            return
        self.free_out_of(listed.copy())

    def free_out_of(self, ordered_blocks: list[KVCacheBlock]) -> None:
        """As `free_blocks`; `ordered_blocks` is empty when its references are taken over, in the same step.

        Blocks that were touched without `note_taken` may be among them, as an interrupted call leaves them.
        """
        if self._unfinished.is_marked:
            self.recover()
        if not is_any_known(ordered_blocks):
            self.block_pool.free_out_of(ordered_blocks)
            return
        touched: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if self._kept.find_batch(block) is not None:
                if block.ref_cnt == 1:
                    raise InvalidBlockError(
                        "free_blocks() got a block that the retention keeps, so it is free; it takes blocks "
                        "that are in use. Was it freed twice?"
                    )
                touched.append(block)
        if touched:
            self.note_taken(touched)
        self._free_known(ordered_blocks)

    def _free_known(self, listed: list[KVCacheBlock]) -> None:
        """Some of these blocks have claims, and none is kept. See `free_out_of`."""
        to_pool: list[KVCacheBlock] = []
        to_keep: list[KVCacheBlock] = []
        in_doubt: list[KVCacheBlock] = []
        for block in listed:
            if block._retention_id == 0:
                to_pool.append(block)
            elif block._retention_id > 0 and block.ref_cnt == 1 and block._block_hash is not None:
                to_keep.append(block)
            else:
                to_pool.append(block)
                in_doubt.append(block)
        if len(set(to_keep)) != len(to_keep):
            raise InvalidBlockError(
                "free_blocks() got a block more often than it is referenced. Was it freed twice?"
            )
        stretches: list[tuple[list[KVCacheBlock], tuple[Claim, ...]]] = []
        stretch: list[KVCacheBlock] = []
        last_id: i32 = 0
        for block in to_keep:
            if block._retention_id != last_id:
                last_id = block._retention_id
                stretch = []
                stretches.append((stretch, self._get_claims(block)))
            stretch.append(block)
        self._take_over(listed, to_pool, stretches, [])
        try:
            for block in in_doubt:
                if block._retention_id == 0 or block.ref_cnt != 0:
                    continue
                if block._retention_id > 0 and block._block_hash is not None:
                    again: list[KVCacheBlock] = []
                    stretches.append((again, self._get_claims(block)))
                    self.block_pool.touch_onto([block], again)  # each of its references was in this list
                else:
                    self._drop_cover(block)
            self._keep_stretches()
        except BaseException:
            self._recover_at_once()
            raise

    def _take_over(
        self,
        listed: list[KVCacheBlock],
        to_pool: list[KVCacheBlock],
        stretches: list[tuple[list[KVCacheBlock], tuple[Claim, ...]]],
        shared: list[tuple[KVCacheBlock, tuple[Claim, ...]]],
    ) -> None:
        """Take over the references of `listed` in one step, and give those of `to_pool` to the pool.

        Raises:
            InvalidBlockError: as the pool does. Nothing has changed.
        """
        unfinished = self._unfinished
        before = listed.copy()
        try:
            unfinished.leaving = to_pool
            unfinished.covers = shared
            unfinished.stretches = stretches
            listed.clear()  # no call between these
            self.block_pool.free_out_of(to_pool)
        except KVPoolError:
            unfinished.leaving = []
            unfinished.covers = []
            unfinished.stretches = []
            listed += before
            raise
        except BaseException:
            self._recover_at_once()
            raise

    def _keep_stretches(self) -> None:
        """Keep what was taken over, in order."""
        for stretch, claims in self._unfinished.stretches:
            if stretch:
                self._keep(stretch, claims)
        self._unfinished.stretches = []

    def make_room(self, num_blocks: int) -> None:
        """`pool.get_new_blocks(num_blocks)` is next: let it get those that are worth least.

        Kept blocks that are among them are free afterwards, at the front of the queue. Hits that shall not be
        among them have been touched before. When `num_blocks` are not to be had, nothing changes.
        Cost: O(num_blocks).
        """
        if self._kept.num_blocks == 0 and not self._unfinished.is_marked:
            return
        self._apply_clock()
        queue = self.block_pool.free_block_queue
        num_free = queue.num_free_blocks
        if num_blocks > num_free + self._kept.num_blocks - self._kept.num_pinned:
            return
        num_wanted = 0
        has_low = False
        for strength in self._kept.buckets:
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
        victims = self._unfinished.victims
        first: KVCacheBlock | None = None
        last: KVCacheBlock | None = None
        try:
            self._kept.take_victims(num_wanted, DEFAULT_PRIORITY, victims)
            if num_blocks > num_free + len(victims):
                self._kept.take_victims(num_blocks - num_free - len(victims), PINNED, victims)
            if not victims:
                return
            if isinstance(self.block_pool, RunPoolCore):  # it does not take from the front if it need not
                self._release()
                return
            for block in victims:
                block.ref_cnt = 0
                if last is None:
                    first = block
                else:
                    last.next_free_block = block
                    block.prev_free_block = last
                last = block
            queue.splice(first, last, len(victims), None, None, 0)
            self._unfinished.victims = []  # no call since the blocks were linked
        except BaseException:
            self._recover_at_once()
            raise

    def reclaim(self, num_blocks: int) -> int:
        """Give so many kept blocks back to the pool, evicted, at the front of its queue.

        Those whose time is up first, then by priority, then the least recently freed; never pinned ones.
        Returns:
            How many: fewer only when no more are kept.
        """
        self._apply_clock()
        victims = self._unfinished.victims
        try:
            self._kept.take_victims(num_blocks, PINNED, victims)
            num_victims = len(victims)
            self._release()
        except BaseException:
            self._recover_at_once()
            raise
        return num_victims

    def forget_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These blocks were evicted from the prefix cache: nothing keeps them any more."""
        if self._unfinished.is_marked:
            self.recover()
        loose = self._unfinished.loose
        try:
            for block in blocks:
                batch = self._kept.find_batch(block)
                if batch is not None:
                    block._retention_id = 0
                    loose.append(block)  # no call in between
                    self._kept.drop_count(batch, 1)
                self._drop_cover(block)
            self.block_pool.free_out_of(loose)
        except BaseException:
            self._recover_at_once()
            raise

    def release_all(self) -> None:
        """Keep nothing, pins and sessions included; what requests have been told for later stays.

        The blocks are free, cached as they were, the most valuable last in the queue. O(blocks of the pool).
        """
        self._apply_clock()
        victims = self._unfinished.victims
        try:
            self._kept.take_victims(self._kept.num_blocks, PINNED + 1, victims)
            self._sessions.clear()
            self._deadlines.clear()
            self._covers.drop_all(self.block_pool.blocks)
            self._pins.blocks.clear()
            self.block_pool.free_out_of(victims)
        except BaseException:
            self._recover_at_once()
            raise

    # ---- interrupts --------------------------------------------------------------------------------

    def _recover_at_once(self) -> None:
        self._unfinished.is_marked = True
        if not self._unfinished.is_recovering:
            self.recover()

    def recover(self) -> None:
        """Complete a call that an exception interrupted; may itself be interrupted and called again.

        Every counter and every deadline is derived from the blocks first. O(blocks of the pool).
        """
        unfinished = self._unfinished
        unfinished.is_marked = True
        unfinished.is_recovering = True
        try:
            self._complete()
            unfinished.is_marked = False
        finally:
            unfinished.is_recovering = False

    def _complete(self) -> None:
        unfinished = self._unfinished
        pool = self.block_pool
        kept = self._kept
        pool.touch([])  # completes what was interrupted there
        for block in pool.blocks:
            if block._block_hash is None and kept.find_batch(block) is not None:
                block._retention_id = 0
                unfinished.loose.append(block)  # no call in between
        for block in unfinished.victims:
            block.ref_cnt = 1
            block.prev_free_block = None
            block.next_free_block = None
        pool.free_out_of(unfinished.victims)
        pool.free_out_of(unfinished.leaving)
        unfinished.loose = [block for block in unfinished.loose if kept.find_batch(block) is None]
        pool.free_out_of(unfinished.loose)
        self._rebuild()
        for block, claims in unfinished.covers:
            if block.ref_cnt > 0 and kept.find_batch(block) is None:
                self._covers.put(block, claims, None)
        unfinished.covers = []
        unfinished.stretches = [
            ([block for block in stretch if kept.find_batch(block) is None], claims)
            for stretch, claims in unfinished.stretches
        ]
        self._keep_stretches()
        places = [place for place in unfinished.places if kept.find_batch(place[2]) is None]
        places.sort(key=get_place)
        self._file_all(places)
        unfinished.places = []
        change = unfinished.change
        if change is not None:
            self._set_claims(change[0], change[1], change[2])
        self._end_lost_sessions()
        self._rebuild()

    def _rebuild(self) -> None:
        """Derive everything that is counted from what is said of the blocks."""
        blocks = self.block_pool.blocks
        self._deadlines.clear()
        for session in self._sessions.by_id.values():
            session.changes_at = session.claim.until
            self._last_number += 1
            self._deadlines.push(session, self._last_number)
        self._kept.rebuild(blocks)
        self._covers.rebuild(blocks)
        self._ids.rebuild(blocks)
        pinned: set[KVCacheBlock] = set()
        for block in blocks:
            thing = self._ids.find(block)
            if thing is not None and is_pin(thing.claims):
                pinned.add(block)
        self._pins.rebuild(pinned)

    def _end_lost_sessions(self) -> None:
        """Remove the claims of sessions that are not in the list of sessions."""
        known: set[Claim] = set()
        for session in self._sessions.by_id.values():
            known.add(session.claim)
        now = self._clock()
        blocks: list[KVCacheBlock] = []
        new_claims: list[tuple[Claim, ...]] = []
        for block in self.block_pool.blocks:
            claims = self._get_claims(block)
            left = tuple(
                [claim for claim in claims if not claim.is_session or claim in known or claim.until <= now]
            )
            if len(left) < len(claims):
                blocks.append(block)
                new_claims.append(left)
        if blocks:
            self._set_claims(blocks, new_claims, False)

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
        pins = self._pins
        if pins.exceeds(num_new, num_replaced):
            # Blocks may have been evicted behind our back; only now it is worth a look.
            for block in list(pins.blocks):
                if not is_pin(self._get_claims(block)):
                    self._drop_cover(block)
        if pins.exceeds(num_new, num_replaced):
            raise pins.refuse(num_new, num_replaced)

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
        if block._retention_id <= 0 or block._block_hash is None:
            return NO_CLAIMS
        thing = self._ids.things[block._retention_id]
        if isinstance(thing, Cover):
            return thing.claims
        assert isinstance(thing, Batch)
        return thing.claims

    def _cover(self, block: KVCacheBlock, claims: tuple[Claim, ...], likely: Cover | None) -> Cover:
        """Remember claims, at least one, on a block that is in use; see `Covers.put`."""
        self._pins.note(block, claims)
        return self._covers.put(block, claims, likely)

    def _drop_cover(self, block: KVCacheBlock) -> None:
        """Nothing is known any more of a block that is not kept."""
        self._pins.drop(block)
        if block._retention_id != 0:
            self._covers.drop(block)

    def _set_claims(
        self, blocks: list[KVCacheBlock], new_claims: list[tuple[Claim, ...]], counts_anew: bool
    ) -> None:
        """Give these cached blocks, distinct and listed head first, other claims.

        Args:
            counts_anew: durations of free blocks count from now; else those of kept blocks go on.
        A kept block keeps its place in the order of becoming free, one that was only free gets the last.
        """
        unfinished = self._unfinished
        try:
            unfinished.change = (blocks, new_claims, counts_anew)
            self._change_claims(blocks, new_claims, counts_anew)
            unfinished.change = None
        except BaseException:
            self._recover_at_once()
            raise

    def _change_claims(
        self, blocks: list[KVCacheBlock], new_claims: list[tuple[Claim, ...]], counts_anew: bool
    ) -> None:
        unfinished = self._unfinished
        now = self._clock()
        kept = self._kept
        changed: dict[KVCacheBlock, tuple[Claim, ...]] = {}
        broken_up: dict[Batch, None] = {}
        fresh: list[Place] = []
        plain: list[KVCacheBlock] = []
        cover: Cover | None = None
        last_claims: tuple[Claim, ...] = NO_CLAIMS
        number = self._last_number
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            claims = new_claims[index]
            batch = kept.find_batch(block) if block._retention_id > 0 else None
            if batch is not None:
                broken_up[batch] = None
                changed[block] = claims
                if not claims:
                    plain.append(block)
            elif claims and block.ref_cnt > 0:
                if claims is not last_claims or self._pins.blocks:
                    self._pins.note(block, claims)
                    last_claims = claims
                cover = self._covers.put(block, claims, cover)
            else:
                self._drop_cover(block)
                if claims:
                    number += 1
                    fresh.append((number, now, block, claims))
        self._last_number = number
        # What is left of a batch is filed anew, in stretches. Those whose time is up stay as they are:
        # nothing that ends later comes between them.
        again: list[Place] = unfinished.places
        for batch in broken_up:
            is_over = not batch.claims
            retention_id = batch.retention_id
            num_dropped = 0
            for place, block in enumerate(batch.blocks):
                if block._retention_id != retention_id:
                    continue
                is_changed = block in changed
                if is_over and not is_changed:
                    continue
                claims = changed[block] if is_changed else batch.claims
                # The reference goes from the batch to a list without a call in between.
                if claims:
                    freed_at = now if is_changed and counts_anew else batch.freed_at
                    new_place = (batch.number + place, freed_at, block, claims)
                    block._retention_id = 0
                    again.append(new_place)
                else:
                    block._retention_id = 0
                    unfinished.loose.append(block)
                    self._pins.drop(block)
                num_dropped += 1
            if num_dropped:
                kept.drop_count(batch, num_dropped)
        if again:
            self._file_all(sorted(again, key=get_place))
            unfinished.places = []
        if fresh:
            self.block_pool.touch_onto([block for _, _, block, _ in fresh], unfinished.loose)
            self._file_all(fresh)
        unfinished.leaving = plain
        unfinished.loose = []
        self.block_pool.free_out_of(plain)

    def _file_all(self, places: list[Place]) -> None:
        """Put blocks whose reference is ours into batches: (number, freed at, block, claims in force)."""
        blocks: list[KVCacheBlock] = []
        first = 0
        last_freed_at = 0.0
        last_claims: tuple[Claim, ...] = ()
        for number, freed_at, block, claims in places:
            self._pins.note(block, claims)
            if blocks and (
                number != first + len(blocks) or freed_at != last_freed_at or claims is not last_claims
            ):
                self._kept.add(Batch(blocks, last_claims, last_freed_at, first))
                blocks = []
            if not blocks:
                first = number
                last_freed_at = freed_at
                last_claims = claims
            blocks.append(block)
        if blocks:
            self._kept.add(Batch(blocks, last_claims, last_freed_at, first))

    def _keep(self, blocks: list[KVCacheBlock], claims: tuple[Claim, ...]) -> None:
        """These blocks, in this order, became free now; their last reference is ours."""
        self._apply_clock()
        now = self._clock()
        live = list_live(claims, now, now)
        self._covers.drop_stretch(blocks)
        if is_pin(live):
            self._pins.blocks.update(blocks)
        elif self._pins.blocks:
            self._pins.blocks.difference_update(blocks)
        if not live:  # their sessions ended while they were in use
            self.block_pool.free_out_of(blocks)
            return
        batch = Batch(blocks, live, now, self._last_number + 1)
        self._last_number += len(blocks)
        self._kept.add(batch)

    def _release(self) -> None:
        """Evict the victims, so that any kind of pool puts them to the front of its queue.

        Colder tiers get what is in them: they will be taken next.
        """
        victims = self._unfinished.victims
        tiers = self.block_pool.colder_tiers
        if tiers is not None:
            tiers.on_blocks_reused([block for block in victims if block.block_hash is not None])
        self.block_pool.evict_blocks([block.block_id for block in victims])
        self.block_pool.free_out_of(victims)

    def _apply_clock(self) -> None:
        """Let everything that is over by now be over, one after the other. O(1) if nothing is."""
        if self._unfinished.is_marked and not self._unfinished.is_recovering:
            self.recover()
        entries = self._deadlines.entries
        if not entries or entries[0][0] > self._clock():
            return
        try:
            self._end_due(self._clock())
        except BaseException:
            self._recover_at_once()
            raise

    def _end_due(self, now: float) -> None:
        ending = self._deadlines.pop_due(now)
        while ending is not None:
            if isinstance(ending, Session):
                self._sessions.pop(ending.session_id)
            else:
                assert isinstance(ending, Batch)
                was_pinned = ending.strength == PINNED
                self._kept.end_claims(ending)
                if was_pinned and not is_pin(ending.claims):
                    for block in ending.blocks:
                        if block._retention_id == ending.retention_id:
                            self._pins.drop(block)
            ending = self._deadlines.pop_due(now)


def get_place(place: Place) -> int:
    """A block's number in the order of becoming free."""
    return place[0]
