"""Cache policies order runs of consecutive cached blocks: `CachedRun`, `RunQueue` and `Ghosts`."""

from collections import OrderedDict
from typing import Any, Final

from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError

ATTENTION_TOKENS: Final = 32_768
"""Position at which a token's attention costs as much as the rest of its computation, in `CachedRun.cost`.

An estimate for models of about 8 billion parameters: 16e9 operations per token, and 4 * 32 layers * 4,096 for
each token of context.
"""


class CachedRun:
    """Consecutive cached blocks of one sequence that have been cached, hit and freed together so far.

    A run is split where a request diverges inside it or uses only its beginning, so the runs of a group form
    a radix tree. The first part of a split has the policy's fields of the whole run. In flat mode, each block
    is a run without a parent.

    Attributes:
        blocks: the blocks, head first. Do not change the list.
        parent: the run that continues in this one; None for the start of a sequence, in groups whose hits do
            not need all earlier blocks, and in flat mode.
        num_children: number of cached runs whose parent is this one. A run with children is not evicted.
        is_free: whether the blocks are free. The blocks of a run are all free or all in use.
        queue: the policy's queue that has the run; None before the run is freed for the first time.
        group_id: the KV cache group.
        block_size: tokens per block.
        request_id, session_id, hints: of the last request known to use the run: one that has cached a block
            after it. `hints` is the request's attribute `kv_hints` if that is a dict, else None; without an
            attribute `session_id` of the request, the session is that of the hints. Both are set only for a
            policy that needs them (`CachePolicy.needs`).
        num_hits: how often a request has hit the run.
        count, stamp, value, tag: fields for the policy: 0, 0, 0.0 and None at first.
    """

    __slots__ = (
        "after",
        "before",
        "block_size",
        "blocks",
        "count",
        "group_id",
        "hints",
        "is_chained",
        "is_free",
        "is_open",
        "is_parked",
        "num_children",
        "num_hits",
        "number",
        "parent",
        "queue",
        "request_id",
        "session_id",
        "stamp",
        "tag",
        "value",
    )

    def __init__(self, number: i32, blocks: list[KVCacheBlock], group_id: i32, block_size: i32) -> None:
        # The host's fields: 0 as a number if the run has been evicted; whether hits need the blocks before
        # theirs; whether the run may still be extended; whether it is out of its queue's list until it is
        # free and has no children; the neighbours there.
        self.number: i32 = number
        self.group_id: i32 = group_id
        self.block_size: i32 = block_size
        self.is_chained: bool = True
        self.is_open: bool = True
        self.is_parked: bool = False
        self.is_free: bool = False
        self.blocks: list[KVCacheBlock] = blocks
        self.parent: CachedRun | None = None
        self.num_children: i64 = 0
        self.queue: RunQueue | None = None
        self.before: CachedRun | None = None
        self.after: CachedRun | None = None
        self.request_id: Any = None
        self.session_id: Any = None
        self.hints: Any = None
        self.num_hits: int = 0
        self.count: int = 0
        self.stamp: int = 0
        self.value: float = 0.0
        self.tag: Any = None

    def __repr__(self) -> str:
        return (
            f"<CachedRun of {len(self.blocks)} blocks from token {self.position}: "
            f"{'free' if self.is_free else 'in use'}, {self.num_children} children>"
        )

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * self.block_size

    @property
    def position(self) -> int:
        """Number of tokens of the sequence before the run; 0 if unknown."""
        num_tokens = self.blocks[0].num_key_tokens if self.blocks else 0
        return max(0, num_tokens - self.block_size)

    @property
    def key(self) -> Any:
        """The prefix map's key of the first block; identifies the run's beginning after its eviction.

        None if that block lost its content while the run was in use.
        """
        return self.blocks[0].key

    def get_tail_key(self, num_blocks: int) -> Any:
        """Return the key of the first of the last `num_blocks` blocks."""
        return self.blocks[-num_blocks].key

    @property
    def cost(self) -> float:
        """The cost to recompute the run, relative to one token without attention; see `ATTENTION_TOKENS`."""
        num_tokens = self.num_tokens
        return num_tokens * (1.0 + (self.position + num_tokens / 2) / ATTENTION_TOKENS)


class RunQueue:
    """An intrusive list of runs. The host evicts from the front run of the queue that the policy names.

    Attributes:
        num_blocks: number of blocks of the runs in this queue, including runs in use.
    """

    __slots__ = ("end", "index", "num_blocks")

    def __init__(self, index: i64) -> None:
        self.index: i64 = index
        self.num_blocks: int = 0
        end = CachedRun(0, [], 0, 0)
        end.before = end
        end.after = end
        self.end: CachedRun = end

    @property
    def first(self) -> CachedRun | None:
        """The run at the front; None if the queue has none that might be evicted. It may be in use."""
        found = self.end.after
        return None if found is self.end else found

    @property
    def last(self) -> CachedRun | None:
        """The run at the back; None as for `first`."""
        found = self.end.before
        return None if found is self.end else found

    def append(self, run: CachedRun) -> None:
        """Move a run to the back of this queue, from any queue. O(1).

        Raises:
            InvalidArgumentError: the run has been evicted. Nothing has changed.
        """
        self._insert(run, self.end)

    def prepend(self, run: CachedRun) -> None:
        """Move a run to the front of this queue, from any queue. O(1). Raises as `append`."""
        first = self.end.after
        assert first is not None
        self._insert(run, first)

    def _insert(self, run: CachedRun, after: CachedRun) -> None:
        """Link a run in front of an element of the list, and count it in this queue and in no other."""
        if run.number == 0:
            raise InvalidArgumentError("the run has been evicted; it cannot be in a queue")
        before = after.before
        assert before is not None
        if before is not run and after is not run:
            unlink(run)
            link_between(run, before, after)
        run.is_parked = False
        other = run.queue
        if other is not self:
            num_blocks = len(run.blocks)
            run.queue = self
            self.num_blocks += num_blocks
            if other is not None:
                other.num_blocks -= num_blocks

    def list_runs(self) -> list[CachedRun]:
        """Return the runs in the list, front first, without parked ones. O(runs)."""
        found: list[CachedRun] = []
        run = self.end.after
        while run is not None and run is not self.end:
            found.append(run)
            run = run.after
        return found


def link_between(run: CachedRun, before: CachedRun, after: CachedRun) -> None:
    """Link an unlinked run between two neighbours."""
    run.before = before
    run.after = after
    before.after = run
    after.before = run


def unlink(run: CachedRun) -> None:
    """Remove a run from its list, if it is in one."""
    before = run.before
    after = run.after
    if before is not None and after is not None:
        before.after = after
        after.before = before
        run.before = None
        run.after = None


@mypyc_attr(allow_interpreted_subclasses=True)
class Ghosts:
    """The keys of runs that were evicted last, each with its number of blocks.

    A key stays where it is if it is added again. The oldest keys are dropped beyond `max_blocks`.

    Attributes:
        num_blocks: number of blocks of the keys.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks: int = max_blocks
        self.num_blocks: int = 0
        # A dict would search for its oldest key among those that were removed.
        self._sizes: OrderedDict[Any, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._sizes)

    def add(self, key: Any, num_blocks: int) -> list[Any]:
        """Add a key, with at most `max_blocks` blocks. Return the keys that were dropped. O(1), amortised."""
        num_blocks = min(num_blocks, self.max_blocks)
        self.num_blocks += num_blocks - self._sizes.get(key, 0)
        self._sizes[key] = num_blocks
        dropped: list[Any] = []
        while self.num_blocks > self.max_blocks:
            dropped.append(self.drop_oldest())
        return dropped

    def pop(self, key: Any) -> int:
        """Remove a key. Return its number of blocks; 0 if it is not there."""
        num_blocks = self._sizes.pop(key, 0)
        self.num_blocks -= num_blocks
        return num_blocks

    def shrink(self, num_blocks: int) -> None:
        """Drop the oldest keys until at most `num_blocks` blocks are left."""
        while self.num_blocks > num_blocks and self._sizes:
            self.drop_oldest()

    def drop_oldest(self) -> Any:
        """Remove and return the oldest key; None if there is none."""
        if not self._sizes:
            return None
        key, num_blocks = self._sizes.popitem(last=False)
        self.num_blocks -= num_blocks
        return key
