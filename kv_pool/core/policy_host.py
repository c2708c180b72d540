"""`PolicyHost`: runs a cache policy in a pool: follows its calls, and evicts what the policy chooses."""

from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cache_policy import LRU, STAY, CachePolicy
from kv_pool.core.cached_runs import CachedRun, RunQueue, unlink
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND, EvictionOrder
from kv_pool.core.pool_part import PoolPart
from kv_pool.core.run_table import RunTable
from kv_pool.errors import CachePolicyError, InvalidArgumentError
from kv_pool.ids import GroupId

MAX_QUEUES: Final = 10_000
_FAILED: Final = -2

# Compiled code would make and drop an AttributeError for each attribute that a request lacks.
_read_attribute: Final[Any] = getattr


@mypyc_attr(allow_interpreted_subclasses=False)
class PolicyHost(PoolPart):
    """The host of a pool's cache policy: it calls the hooks, and keeps the promises that a policy relies on.

    It hears of blocks through the calls of the pool only, so that a policy evicts the same blocks in every
    program that makes the same calls. Before blocks are taken, the blocks that the policy chooses move to the
    front of the free queue, behind those without content; otherwise the free queue stays in vLLM's order.

    The policy orders the default band. To it, blocks of other bands are in use: a band policy decides when
    they are evicted, or that they come back.

    After an error of the policy (a hook raises, names a queue that it does not have, or loses a run) the host
    does nothing any more, so that the pool evicts in the order of the free queue. The error is logged, and
    kept as `failure`.

    Attributes:
        make_policy: returns a new policy.
        policy: the policy in use.
        name: the policy's name, for errors; "lru" after a failure.
        is_flat: each block is a run of its own, without a parent.
        failure: the error of the policy, or None.
        reads_hints: the policy needs the sessions and hints of requests.
        table: the runs.
        num_ordered: number of free blocks that are in free runs: those of the default band.
        elsewhere: the free blocks of other bands with content, and whether their band is above the default.
        num_above: number of those of which it is.
        unchained: groups whose hits do not need all earlier blocks: their runs have no parents.
    """

    def __init__(
        self,
        owner: Callable[[], Any],
        order: EvictionOrder,
        make_policy: Callable[[], CachePolicy],
        name: str,
        capacity: int,
        clock: Callable[[], float],
        is_flat: bool = False,
    ) -> None:
        self._owner: Callable[[], Any] = owner
        self._order: EvictionOrder = order
        self._clock: Callable[[], float] = clock
        self.make_policy: Callable[[], Any] = make_policy
        self.name: str = name
        self.capacity: int = capacity
        self.is_flat: bool = is_flat
        self.failure: CachePolicyError | None = None
        self.unchained: dict[int, None] = {}
        self._before: CachedRun | None = None  # the run that the current call has handled last
        self.policy: CachePolicy = LRU()
        self._start()
        self._check_started()
        order.open()
        for band, blocks in order.list_bands():
            if band == DEFAULT_BAND:
                for block in blocks:
                    self._adopt(block)
            else:
                self.note_moved_to(blocks, band)

    def __repr__(self) -> str:
        num_runs = len(self.table.list_runs())
        return f"<PolicyHost of {self.name}: {num_runs} runs, {self.num_ordered} free blocks>"

    # ---- calls of the pool -------------------------------------------------------------------------

    def note_missed(self, key: Any) -> None:
        if self.failure is not None:
            return
        try:
            self.policy.missed(key)
        except Exception as error:
            self._fail("missed()", error)

    def note_cached(
        self,
        request: Any,
        table: Any,
        blocks: list[KVCacheBlock],
        num_before: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        if self.failure is not None:
            return
        is_chained = not self.is_flat and (len(self.unchained) == 0 or group_id not in self.unchained)
        if is_chained and num_before > 0:
            first: KVCacheBlock = table[0]
            if first.is_null:
                self.unchain(group_id)
                is_chained = False
        start: i64 = 0
        num_blocks: i64 = len(blocks)
        while start < num_blocks:
            if blocks[start].is_null:
                start += 1
                continue
            end = start + 1
            if not self.is_flat:
                while end < num_blocks and not blocks[end].is_null:
                    end += 1
            parent: CachedRun | None = None
            position: i64 = num_before + start
            if is_chained and position > 0:
                parent = self.table.find_ending(table[position - 1])
            self._add_cached(request, blocks[start:end], parent, group_id, block_size)
            start = end

    def note_touched(self, blocks: list[KVCacheBlock], num_free: i64, is_access: bool) -> None:
        if self.failure is not None:
            return
        self._note_back(blocks)
        self._before = None
        start: i64 = 0
        num_blocks: i64 = len(blocks)
        while start < num_blocks:
            block = blocks[start]
            start += 1
            number: i32 = block.run_id
            if number <= 0:
                continue
            run = self.table.runs[number]
            assert run is not None
            listed = run.blocks
            first: i64 = 0 if listed and listed[0] is block else self.table.find_position(run, block)
            if first < 0:
                continue
            last = first + 1
            while start < num_blocks and last < len(listed) and listed[last] is blocks[start]:
                last += 1
                start += 1
            part = run
            if last < len(listed):
                part = self.table.split(run, last)
                if self.elsewhere and run.blocks[0] in self.elsewhere:
                    self._set_parent(run, None)
            if first > 0:
                self.table.split(part, first)
            self._note_use(part, is_access)

    def note_freed(self, blocks: list[KVCacheBlock], keeps_all: bool) -> None:
        """Place these blocks. After an unpin, those without a key are at the back, too."""
        if self.failure is not None:
            return
        self.place(blocks)
        if keeps_all and self.failure is None:
            for block in blocks:
                if block.key is None and block.ref_cnt == 0 and block.run_id == 0:
                    self._adopt(block)

    def note_moved_to(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Let free blocks that come to the default band join their runs again, and others leave them."""
        if self.failure is not None:
            return
        if band == EMPTY_BAND:
            self._leave_runs(blocks)
        elif band == DEFAULT_BAND:
            self._leave_runs([block for block in blocks if block.key is None])
        self._note_back(blocks)
        if band == DEFAULT_BAND:
            self.note_freed(blocks, True)
        elif band != EMPTY_BAND:
            self.note_touched(blocks[::-1], 0, False)  # bands get their blocks tail first
            for block in blocks:
                if block not in self.elsewhere:
                    self.num_above += band > DEFAULT_BAND
                self.elsewhere[block] = band > DEFAULT_BAND
                run = self.table.find(block)
                if run is not None:  # its parent may be evicted before it, until a request hits both again
                    self._set_parent(run, None)

    def place(self, freed: list[KVCacheBlock]) -> None:
        """Put the runs of the free blocks of the default band in this list into queues; split runs for it."""
        index: i64 = 0
        num_blocks: i64 = len(freed)
        runs = self.table.runs
        owner = self._owner
        elsewhere = self.elsewhere
        has_elsewhere = len(elsewhere) > 0
        while index < num_blocks:
            block = freed[index]
            index += 1
            if block.ref_cnt != 0 or block.is_null or block.owner is not owner:
                continue
            if has_elsewhere and block in elsewhere:
                continue
            number = block.run_id
            if block.key is None:
                block.run_id = 0  # it was evicted while in use; it is in the empty band
                continue
            if number <= 0:
                self._adopt(block)
                continue
            run = runs[number]
            assert run is not None
            if run.is_free:
                continue  # listed twice
            listed = run.blocks
            first: i64 = len(listed) - 1
            if listed[first] is not block:
                if self._is_whole(freed, index - 1, run):
                    index += first
                    self._free(run)
                    continue
                self.table.trim(run)
                first = len(listed) - 1
                if listed[first] is not block:
                    own = self.table.isolate(run, block)
                    if own is not None:
                        self._free(own)
                    continue
            while first > 0 and index < num_blocks:
                block = freed[index]
                if block.ref_cnt != 0 or (has_elsewhere and block in elsewhere):
                    break
                if listed[first - 1] is block:
                    if block.key is None or block.run_id != number:
                        break
                    first -= 1
                elif block.key is not None or block.is_null or block.owner is not owner:
                    break
                else:
                    block.run_id = 0  # it was evicted while in use
                index += 1
            if first > 0:
                self.table.split(run, first)
            self._free(run)

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        if self.failure is None:
            self._leave_runs(blocks)
            self._note_back(blocks)

    def order_victims(self, num_blocks: int) -> None:
        """Move the blocks that the policy evicts for an allocation to the front of the free queue.

        They stay cached until they are taken. O(blocks moved).
        """
        if self.failure is not None:
            return
        missing: i64 = num_blocks - self._order._queue.num_free_blocks + self.num_ordered + self.num_above
        if missing <= 0:
            return
        missing = min(missing, self.num_ordered)
        band = self._order.find_band_below()
        while missing > 0:
            run = self._choose()
            if run is None:
                return
            num_cut: i64 = min(missing, len(run.blocks))
            try:
                self.policy.evicted(run, num_cut)
            except Exception as error:
                self._fail("evicted()", error)
                return
            self._move_to_front(run, num_cut, band)
            self._cut(run, num_cut)
            missing -= num_cut

    def note_reset(self) -> None:
        """Start the policy again, without runs: no block has content."""
        if self.failure is not None:
            return
        for block in self._owner().blocks:
            block.run_id = 0
        self._start()

    def rebuild_from(self, pool: Any) -> None:
        """Follow blocks that a merge of the bands has brought to the default one."""
        if self.failure is None and self.elsewhere:
            default = dict(self._order.list_bands())[DEFAULT_BAND]
            self.note_moved_to([block for block in default if block in self.elsewhere], DEFAULT_BAND)

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        self.note_taken(blocks)

    def note_resized(self, num_blocks: int) -> None:
        self.capacity = num_blocks - 1
        self.policy.capacity = self.capacity

    def unchain(self, group_id: GroupId) -> None:
        """Note that hits of a group do not need all earlier blocks. O(runs)."""
        self.unchained[group_id] = None
        for run in self.table.list_runs():
            if run.group_id == group_id:
                run.is_chained = False
                run.parent = None
                run.num_children = 0
                self._unpark(run)

    # ---- steps of these calls ----------------------------------------------------------------------

    def _note_back(self, blocks: list[KVCacheBlock]) -> None:
        """Note that none of these blocks is in another band any more."""
        if not self.elsewhere:
            return
        for block in blocks:
            if block in self.elsewhere:
                self.num_above -= self.elsewhere.pop(block)

    def _set_parent(self, run: CachedRun, parent: CachedRun | None) -> None:
        """Replace the parent of a run. The old one returns to its queue if this was its last child."""
        old = run.parent
        run.parent = parent
        if parent is not None:
            parent.num_children += 1
        if old is not None:
            old.num_children -= 1
            self._unpark(old)

    def _leave_runs(self, blocks: list[KVCacheBlock]) -> None:
        """Remove blocks without content from the runs of free blocks."""
        for block in blocks:
            number = block.run_id
            if number > 0:
                run = self.table.runs[number]
                if run is not None and (run.is_free or block in self.elsewhere):
                    if run.blocks[-1] is not block:
                        run = self.table.isolate(run, block)
                    if run is not None:
                        self._cut(run, 1)
            block.run_id = 0

    def _note_use(self, run: CachedRun, is_access: bool) -> None:
        """Mark a run as in use, and tell the policy of a hit.

        A request may continue one chain's blocks with the equal copy of another chain's: then the run that it
        hits before this one becomes the parent, since lookups find the latter behind it.
        """
        before = self._before
        if is_access and before is not None and run.parent is not before and self._follows(run, before):
            self._set_parent(run, before)
        self._before = run
        if run.is_free:
            run.is_free = False
            self.num_ordered -= len(run.blocks)
        run.is_open = False
        if is_access:
            run.num_hits += 1
            try:
                self.policy.hit(run)
            except Exception as error:
                self._fail("hit()", error)

    def _follows(self, run: CachedRun, before: CachedRun) -> bool:
        """Return True if a run's positions are directly after those of another, in a group with parents."""
        if self.is_flat or run.group_id != before.group_id or not run.is_chained:
            return False
        return before.blocks[-1].num_key_tokens + run.block_size == run.blocks[0].num_key_tokens

    def _is_whole(self, freed: list[KVCacheBlock], start: i64, run: CachedRun) -> bool:
        """Return True if all blocks of a run are free, and are the next ones in this list, in any order."""
        end: i64 = start + len(run.blocks)
        if end > len(freed):
            return False
        number = run.number
        for block in freed[start:end]:
            if block.run_id != number or block.owner is not self._owner:
                return False
        for block in run.blocks:
            if block.run_id != number or block.ref_cnt != 0 or block.key is None:
                return False
            if self.elsewhere and block in self.elsewhere:
                return False
        return True

    def _add_cached(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        parent: CachedRun | None,
        group_id: i32,
        block_size: i32,
    ) -> None:
        request_id = _read_attribute(request, "request_id", None)
        if (
            parent is not None
            and parent.is_open
            and parent.num_children == 0
            and parent.request_id is request_id
        ):
            self.table.extend(parent, blocks)
            return
        run = self.table.add(blocks, group_id, block_size)
        session_id: Any = None
        hints: Any = None
        if self.reads_hints:
            session_id = _read_attribute(request, "session_id", None)
            hints = _read_attribute(request, "kv_hints", None)
            if not isinstance(hints, dict):
                hints = None
            elif session_id is None:
                session_id = hints.get("session_id")
        run.is_chained = len(self.unchained) == 0 or group_id not in self.unchained
        run.request_id = request_id
        run.session_id = session_id
        run.hints = hints
        if parent is not None:
            self._set_parent(run, parent)
            parent.is_open = False
            while parent is not None and parent.request_id is not request_id:
                parent.request_id = request_id
                parent.session_id = session_id
                parent.hints = hints
                parent = parent.parent
        self._call_cached(run)

    def _free(self, run: CachedRun) -> None:
        """Put a run whose blocks have become free into the queue that the policy names."""
        run.is_free = True
        run.is_open = False
        self.num_ordered += len(run.blocks)
        index = self._ask(run)
        if index == STAY:
            if run.queue is None:
                self._fail("freed() returned STAY for a run that is in no queue", None)
            self._unpark(run)
        elif index != _FAILED:
            self._queues[index].append(run)

    def _adopt(self, block: KVCacheBlock) -> None:
        """Make a run of a free block that is in none: it was cached by a call without a sequence."""
        num_tokens: i32 = self._owner().hash_block_size
        run = self.table.add([block], 0, num_tokens)
        self._call_cached(run)
        self._free(run)

    def _call_cached(self, run: CachedRun) -> None:
        try:
            self.policy.cached(run)
        except Exception as error:
            self._fail("cached()", error)

    def _unpark(self, run: CachedRun) -> None:
        """Return a run to the front of its queue if it can be evicted now."""
        if run.is_parked and run.is_free and run.num_children == 0 and run.queue is not None:
            run.queue.prepend(run)

    def _cut(self, run: CachedRun, num_blocks: i64) -> None:
        """Remove the last blocks of a run without references, whose blocks are no longer ordered."""
        queue = run.queue
        if queue is not None:
            queue.num_blocks -= num_blocks
        if run.is_free:
            self.num_ordered -= num_blocks
        blocks = run.blocks
        while num_blocks > 0:  # faster than a slice
            blocks.pop()
            num_blocks -= 1
        if blocks:
            return
        self._set_parent(run, None)
        self.table.end(run)

    def _move_to_front(self, run: CachedRun, num_blocks: i64, band: int) -> None:
        """Move the last blocks of a run in front of the default band, last one first.

        Args:
            band: the band directly below it.
        """
        blocks = run.blocks
        position: i64 = len(blocks) - 1
        end = position - num_blocks
        first = blocks[position]
        last = first
        last.run_id = 0
        position -= 1
        while position > end:
            block = blocks[position]
            block.run_id = 0
            if last.next_free_block is not block:
                self._order.move_chain(first, last, band)
                first = block
            last = block
            position -= 1
        self._order.move_chain(first, last, band)

    # ---- the policy --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make a new policy with empty queues, and forget all runs."""
        self.table: RunTable = RunTable()
        self.num_ordered: int = 0
        self.elsewhere: dict[KVCacheBlock, bool] = {}
        self.num_above: int = 0
        self.reads_hints: bool = False
        self._queues: list[RunQueue] = []
        self._last_choice: int = 0
        try:
            unchecked: Any = self.make_policy()
        except Exception as error:
            self._fail("its constructor", error)
            return
        made: Any = unchecked  # compiled code would read the class attributes of CachePolicy itself
        if not isinstance(made, CachePolicy):
            raise InvalidArgumentError(
                f"the cache policy {self.name} is a {type(made).__name__}; derive it from CachePolicy"
            )
        policy: CachePolicy = made
        num_queues = unchecked.num_queues
        if not isinstance(num_queues, int) or not 1 <= num_queues <= MAX_QUEUES:
            raise InvalidArgumentError(
                f"num_queues of the cache policy {self.name} is {num_queues!r}; it is 1 to {MAX_QUEUES}"
            )
        self.reads_hints = unchecked.needs != ""
        self._queues = [RunQueue(index) for index in range(num_queues)]
        policy.queues = self._queues.copy()
        policy.capacity = self.capacity
        policy.clock = self._clock
        self.policy = policy
        try:
            policy.start()
        except Exception as error:
            self._fail("start()", error)

    def _check_started(self) -> None:
        """Raise the error of a policy that failed to start."""
        if self.failure is not None:
            raise self.failure

    def _choose(self) -> CachedRun | None:
        """Return the run that the policy evicts from; None if the policy fails. A free run exists."""
        queues = self._queues
        while True:
            queue = queues[self._last_choice]
            if queue.end.after is queue.end and not self._has_front():
                return self._find_parked()
            index = self._ask(None)
            if index == _FAILED:
                return None
            self._last_choice = index
            run = queues[index].first
            if run is None:
                self._fail(f"choose() returned queue {index}, which is empty", None)
                return None
            if run.is_free and (run.num_children == 0 or self._hand_over(run)):
                return run
            unlink(run)  # it stays counted in its queue
            run.is_parked = True

    def _ask(self, freed: CachedRun | None) -> i64:
        """Return the queue that the policy names for a freed run, or chooses; _FAILED if it fails."""
        hook = "choose()" if freed is None else "freed()"
        try:
            index = self.policy.choose() if freed is None else self.policy.freed(freed)
            if not isinstance(index, int):
                raise TypeError(f"it returned {index!r}")
        except Exception as error:
            self._fail(hook, error)
            return _FAILED
        num_queues = len(self._queues)
        if 0 <= index < num_queues or (index == STAY and freed is not None):
            return index
        self._fail(
            f"{hook} returned queue {index}; the policy has {num_queues} "
            f"queue{'' if num_queues == 1 else 's'}, 0 to {num_queues - 1}",
            None,
        )
        return _FAILED

    def _has_front(self) -> bool:
        """Return whether a queue's list has a run. O(queues)."""
        for queue in self._queues:  # noqa: SIM110 (a loop compiles to C, a generator does not)
            if queue.end.after is not queue.end:
                return True
        return False

    def _hand_over(self, run: CachedRun) -> bool:
        """Make a copy of a run's last block the parent of its children. Return False if none is cached.

        Lookups find the children behind either copy, so the run may be evicted before them. O(runs) if there
        is a copy, else O(1).
        """
        last = run.blocks[-1]
        found: Any = self._owner().cached_block_hash_to_block._cache.get(last.key)
        if not isinstance(found, dict):
            return False
        copies: list[KVCacheBlock] = list(found.values())
        for block in copies:
            if block is last:
                continue
            other = self.table.find_ending(block)
            if other is None or not other.is_chained:
                continue
            for child in self.table.list_runs():
                if child.parent is run:
                    self._set_parent(child, other)
            return True
        return False

    def _find_parked(self) -> CachedRun | None:
        """Return a free run although it has children: all others are in use. O(runs)."""
        for run in self.table.list_runs():
            if run.is_free and run.queue is not None:
                return run
        self._fail("a free run is in no queue, so it is lost", None)
        return None

    def _fail(self, what: str, error: Exception | None) -> None:
        """Stop using a broken policy, log its error, and keep it. A MemoryError is raised as it is."""
        if isinstance(error, MemoryError):
            raise error
        if error is not None:
            from kv_pool.core.policy_names import describe_raised  # as in `open_policy`

            what = f"{what} {describe_raised(error)}"
        failure = CachePolicyError(f"the cache policy {self.name} is broken: {what}")
        failure.__cause__ = error
        from kv_pool.loggers import get_logger

        get_logger(__name__).error(
            "%s. The pool is intact, and goes on with LRU if it is in use.", failure, exc_info=failure
        )
        self.failure = failure
        self.name = "lru"
        self.policy = LRU()  # for the rest of this call


def open_policy(pool: Any, policy: Any) -> None:
    """Implement `BlockPool.open_policy`."""
    from kv_pool.core.policy_names import find_policy  # most pools have no policy

    choice = find_policy(policy)
    if not pool.enable_caching:
        raise InvalidArgumentError(f"the cache policy {choice.name} needs a pool with enable_caching")
    other = find_host(pool.parts)
    if other is not None:
        raise InvalidArgumentError(
            f"the pool already has {other!r}; for the cache policy {choice.name} make another pool"
        )
    host = PolicyHost(
        pool.block_owner,
        pool.eviction_order,
        choice.make,
        choice.name,
        pool.num_gpu_blocks - 1,
        pool.holds.clock,
        choice.is_flat,
    )
    pool.parts.append(host)
    pool.free_index = None  # the policy chooses each block


def find_host(parts: list[PoolPart]) -> PolicyHost | None:
    """Return the part of a pool that is the host of a cache policy; None if there is none."""
    for part in parts:
        if isinstance(part, PolicyHost):
            return part
    return None
