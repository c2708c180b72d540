"""`RunTable`: the cached runs of a pool by number, and how they grow, split and end."""

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_runs import CachedRun, link_between, unlink


class RunTable:
    """The cached runs of a pool. A block has the number of its run as its `run_id`, 0 for none.

    A block that is cached again, or by a call that runs do not follow, has a negative number until then: such
    a block no longer belongs to the run that lists it.

    Attributes:
        runs: the runs by number; entry 0 and those of ended runs are None.
    """

    def __init__(self) -> None:
        self.runs: list[CachedRun | None] = [None]
        self._unused: list[int] = []

    def add(self, blocks: list[KVCacheBlock], group_id: i32, block_size: i32) -> CachedRun:
        """Make a run of these blocks, in use and without a parent. O(len(blocks))."""
        run = self._number(CachedRun(0, blocks, group_id, block_size))
        number = run.number
        for block in blocks:
            block.run_id = number
        return run

    def _number(self, run: CachedRun) -> CachedRun:
        """Give a new run an unused number, and return it."""
        if self._unused:
            number: i32 = self._unused.pop()
            run.number = number
            self.runs[number] = run
        else:
            number = len(self.runs)
            run.number = number
            self.runs.append(run)
        return run

    def find(self, block: KVCacheBlock) -> CachedRun | None:
        """Return the run of a block; None if it has none, or has lost its key since."""
        number = block.run_id
        if number <= 0 or block.key is None:
            return None
        return self.runs[number]

    def find_ending(self, block: KVCacheBlock) -> CachedRun | None:
        """Return the run that ends with this block, after a split if necessary; None as for `find`."""
        run = self.find(block)
        if run is None or run.blocks[-1] is block:
            return run
        position = self.find_position(run, block)
        return None if position < 0 else self.split(run, position + 1)

    def extend(self, run: CachedRun, blocks: list[KVCacheBlock]) -> None:
        """Append blocks to an open run. O(len(blocks))."""
        run.blocks += blocks
        if run.queue is not None:
            run.queue.num_blocks += len(blocks)
        number = run.number
        for block in blocks:
            block.run_id = number

    def split(self, run: CachedRun, position: i64) -> CachedRun:
        """Split a run before `position`, above 0. Return the new run of the first part. O(position).

        The run keeps the other blocks, its children and its place in its queue; the first part becomes its
        parent, if hits need all earlier blocks, and is behind it in the same queue.
        """
        head = self._number(CachedRun(0, run.blocks[:position], run.group_id, run.block_size))
        old = run.number
        new = head.number
        for block in head.blocks:
            if block.run_id == old:  # else the block has left the run, and may be in another one
                block.run_id = new
        del run.blocks[:position]
        head.is_free = run.is_free
        head.is_open = False
        head.request_id = run.request_id
        head.session_id = run.session_id
        head.hints = run.hints
        head.num_hits = run.num_hits
        head.count = run.count
        head.stamp = run.stamp
        head.value = run.value
        head.tag = run.tag
        head.is_chained = run.is_chained
        if run.is_chained:
            head.num_children = 1
            head.parent = run.parent
            run.parent = head
        run.is_open = False
        head.queue = run.queue
        after = run.after
        if after is not None:
            link_between(head, run, after)
        else:
            head.is_parked = run.is_parked
        return head

    def find_position(self, run: CachedRun, block: KVCacheBlock) -> i64:
        """Return the position of a block in its run. O(blocks of the run)."""
        blocks = run.blocks
        num_blocks: i64 = len(blocks)
        position: i64 = 0
        while position < num_blocks:
            if blocks[position] is block:
                return position
            position += 1
        return -1

    def isolate(self, run: CachedRun, block: KVCacheBlock) -> CachedRun | None:
        """Split off what is before and after a block of the run. Return its own run, or None if it has none.

        O(blocks of the run).
        """
        position = self.find_position(run, block)
        if position < 0:
            block.run_id = 0
            return None
        if position + 1 < len(run.blocks):
            run = self.split(run, position + 1)
        if position > 0:
            self.split(run, position)
        return run

    def trim(self, run: CachedRun) -> None:
        """Drop blocks at the end of a run in use that no longer belong to it."""
        blocks = run.blocks
        number = run.number
        while blocks:
            last = blocks[-1]
            if last.run_id == number:
                if last.key is not None:
                    return
                last.run_id = 0
            if run.queue is not None:
                run.queue.num_blocks -= 1
            blocks.pop()

    def end(self, run: CachedRun) -> None:
        """Remove a run without blocks and without a parent from its queue and from the table."""
        unlink(run)
        run.queue = None
        run.is_parked = False
        number: int = run.number
        run.number = 0
        self.runs[number] = None
        self._unused.append(number)

    def list_runs(self) -> list[CachedRun]:
        """Return all runs. O(runs)."""
        return [run for run in self.runs if run is not None]
