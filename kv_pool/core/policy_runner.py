"""`PolicyRunner`: the queues of a cache policy, its replacement if it is broken, and their reconstruction."""

from collections.abc import Callable
from typing import Any, Final, NoReturn

from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cache_policy import LRU, STAY, CachePolicy
from kv_pool.core.cached_runs import CachedRun, RunQueue
from kv_pool.core.eviction_order import BandPolicy, EvictionOrder
from kv_pool.core.run_table import RunTable
from kv_pool.errors import CachePolicyError, InvalidArgumentError

MAX_QUEUES: Final = 10_000


@mypyc_attr(allow_interpreted_subclasses=False)
class PolicyRunner(BandPolicy):
    """A cache policy with its runs and queues; `PolicyHost` connects it to the calls of a pool.

    Runs and queues can be rebuilt from the pool. A policy that raises, names a queue that it does not have,
    or loses a run, is replaced by `LRU`: the error is logged, and kept as `failure`.

    Attributes:
        make_policy: returns a new policy.
        policy: the policy in use.
        name: the policy's name, for errors.
        is_flat: each block is a run of its own, without a parent.
        failure: the error of a policy that was replaced, or None.
        is_stale: the policy has not started, or its blocks have lost their content: `rebuild` comes first.
        reads_hints: the policy needs the sessions and hints of requests.
        num_ordered: number of free blocks that are in runs.
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
        self.is_stale: bool = False
        self.num_ordered: int = 0
        self.unchained: dict[int, None] = {}
        self.table: RunTable = RunTable()
        self.reads_hints: bool = False
        self._before: CachedRun | None = None  # the run that the current call has handled last
        self._queues: list[RunQueue] = []
        self._last_choice: int = 0
        self.policy: CachePolicy = LRU()
        self._start_policy()

    def __repr__(self) -> str:
        num_runs = len(self.table.list_runs())
        return f"<PolicyHost of {self.name}: {num_runs} runs, {self.num_ordered} free blocks>"

    # ---- runs --------------------------------------------------------------------------------------

    def _free(self, run: CachedRun) -> None:
        """Put a run whose blocks have become free into the queue that the policy names."""
        run.is_free = True
        run.is_open = False
        self.num_ordered += len(run.blocks)
        try:
            index = self.policy.freed(run)
            if not isinstance(index, int):
                raise TypeError(f"it returned {index!r}")
        except Exception as error:
            self._replace("freed()", error)
        if index == STAY:
            if run.queue is None:
                self._replace("freed() returned STAY for a run that is in no queue", None)
            self._unpark(run)
        elif 0 <= index < len(self._queues):
            self._queues[index].append(run)
        else:
            self._replace(f"freed() returned queue {index}; {self._describe_queues()}", None)

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
            self._replace("cached()", error)

    def _unpark(self, run: CachedRun) -> None:
        """Return a run to the front of its queue if it can be evicted now."""
        if run.is_parked and run.is_free and run.num_children == 0 and run.queue is not None:
            run.queue.prepend(run)

    def _cut(self, run: CachedRun, num_blocks: i64) -> None:
        """Remove the last blocks of a free run, whose blocks are no longer ordered."""
        queue = run.queue
        if queue is not None:
            queue.num_blocks -= num_blocks
        self.num_ordered -= num_blocks
        blocks = run.blocks
        num_left = len(blocks) - num_blocks
        if num_left > 0:
            if num_blocks > 16:
                del blocks[num_left:]
                return
            while num_blocks > 0:  # faster than a slice
                blocks.pop()
                num_blocks -= 1
            return
        blocks.clear()
        parent = run.parent
        self.table.end(run)
        if parent is not None:
            self._unpark(parent)

    # ---- the policy --------------------------------------------------------------------------------

    def _start_policy(self) -> None:
        """Make a new policy with empty queues."""
        unchecked: Any = None  # compiled code would read the class attributes of CachePolicy itself
        try:
            unchecked = self.make_policy()
        except Exception as error:
            self._replace("its constructor", error)
        made: Any = unchecked
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
        self._last_choice = 0
        policy.queues = self._queues.copy()
        policy.capacity = self.capacity
        policy.clock = self._clock
        try:
            policy.start()
        except Exception as error:
            self._replace("start()", error)
        self.policy = policy

    def _choose(self) -> CachedRun:
        """Return the run that the policy evicts from. Some free block is in a run."""
        queues = self._queues
        while True:
            queue = queues[self._last_choice]
            if queue.end.after is queue.end and not self._has_front():
                return self._find_parked()
            try:
                index = self.policy.choose()
                if not isinstance(index, int):
                    raise TypeError(f"it returned {index!r}")
            except Exception as error:
                self._replace("choose()", error)
            if index < 0 or index >= len(queues):
                self._replace(f"choose() returned queue {index}; {self._describe_queues()}", None)
            queue = queues[index]
            self._last_choice = index
            end = queue.end
            run = end.after
            assert run is not None
            if run is end:
                self._replace(f"choose() returned queue {index}, which is empty", None)
            if run.is_free and (run.num_children == 0 or self._hand_over(run)):
                return run
            before = run.before
            after = run.after
            assert before is not None
            assert after is not None
            # Parked: out of the list, counted in its queue.
            before.after = after
            after.before = before
            run.before = None
            run.after = None
            run.is_parked = True

    def _has_front(self) -> bool:
        """Return whether a queue's list has a run. O(queues)."""
        return any(queue.end.after is not queue.end for queue in self._queues)

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
                    child.parent = other
            other.num_children += run.num_children
            run.num_children = 0
            return True
        return False

    def _find_parked(self) -> CachedRun:
        """Return a free run although it has children: all others are in use. O(runs)."""
        for run in self.table.list_runs():
            if run.is_free and run.queue is not None:
                return run
        self._replace("a free run is in no queue, so it is lost", None)

    def _describe_queues(self) -> str:
        num_queues = len(self._queues)
        return f"the policy has {num_queues} queue{'' if num_queues == 1 else 's'}, 0 to {num_queues - 1}"

    def _replace(self, what: str, error: Exception | None) -> NoReturn:
        """Replace a broken policy by LRU, and raise CachePolicyError for the caller, which calls `rebuild`.

        A MemoryError is raised as it is.
        """
        if isinstance(error, (MemoryError, CachePolicyError)):
            raise error
        raise self.fail(what, error)

    def fail(self, what: str, error: Exception | None) -> CachePolicyError:
        """Let LRU replace a broken policy at the next `rebuild`; log the error and return it."""
        if error is not None:
            what = f"{what} raised {type(error).__name__}: {error}"
        failure = CachePolicyError(
            f"the cache policy {self.name} is broken: {what}. The pool is intact and goes on with LRU."
        )
        failure.__cause__ = error
        import logging

        logging.getLogger(__name__).error("%s", failure, exc_info=failure)
        self.failure = failure
        self.name = "lru"
        self.make_policy = LRU
        self.is_stale = True
        return failure

    # ---- from the pool -----------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Make the runs consistent with the pool, and start the policy again. O(blocks of the pool).

        Free runs enter the policy's queues in the order of the free queue.
        """
        try:
            self._rebuild()
        except CachePolicyError:
            self._rebuild()  # with LRU
        self.is_stale = False

    def _rebuild(self) -> None:
        pool = self._owner()
        table = self.table
        self.capacity = pool.num_gpu_blocks - 1
        order: list[KVCacheBlock] = []
        ordered: dict[KVCacheBlock, None] = {}
        for _, blocks in self._order.list_bands():
            order += blocks
        for block in order:
            ordered[block] = None
        for block in pool.blocks:
            if block.ref_cnt == 0 and block not in ordered:
                block.retention_id = 0
        listed: dict[KVCacheBlock, None] = {}
        for run in table.list_runs():
            self._mend(run, ordered, listed)
        for block in pool.blocks:
            if block.retention_id > 0 and block not in listed:
                block.retention_id = 0
        for block in order:
            if block.retention_id <= 0 and block.ref_cnt == 0:
                table.add([block], 0, pool.hash_block_size).is_free = True
        self._start_policy()
        self.num_ordered = len(order)
        runs = table.list_runs()
        for run in runs:
            run.num_children = 0
        for run in runs:
            run.queue = None
            run.before = None
            run.after = None
            run.is_parked = False
            run.is_open = False
            parent = run.parent
            if parent is not None and parent.number == 0:
                run.parent = None
            elif parent is not None:
                parent.num_children += 1
            self._call_cached(run)
        self.num_ordered = 0
        for block in order:
            number = block.retention_id
            owner = table.runs[number]
            if owner is not None and owner.blocks[-1] is block:
                self._free(owner)

    def _mend(
        self, run: CachedRun, ordered: dict[KVCacheBlock, None], listed: dict[KVCacheBlock, None]
    ) -> None:
        """Drop the blocks that have left the run, and split it where free blocks meet blocks in use."""
        number = run.number
        kept: list[KVCacheBlock] = []
        for block in run.blocks:
            is_there = block.key is not None or block in ordered
            if block.retention_id == number and is_there and block not in listed:
                kept.append(block)
                listed[block] = None
        run.blocks = kept
        if not kept:
            self.table.forget(run)
            return
        states = [block.ref_cnt == 0 for block in kept]
        run.is_free = states[-1]
        for position in range(len(states) - 1, 0, -1):
            if states[position - 1] != states[position]:
                run = self.table.split(run, position)
                run.is_free = states[position - 1]
