"""`PolicyHost`: runs a cache policy in a pool: follows its calls, and evicts what the policy chooses."""

from typing import Any, cast

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_runs import CachedRun
from kv_pool.core.eviction_order import EMPTY_BAND
from kv_pool.core.policy_runner import PolicyRunner


class PolicyHost(PolicyRunner):
    """The host of a pool's cache policy: it calls the hooks, and keeps the promises that a policy relies on.

    It hears of blocks through the calls of the pool only, so that a policy evicts the same blocks in every
    program that makes the same calls. Before blocks are taken, the blocks that the policy chooses move to the
    front of the free queue, behind those without content; otherwise the free queue stays in vLLM's order.
    """

    # ---- calls of the pool -------------------------------------------------------------------------

    def note_missed(self, key: Any) -> None:
        """Handle a lookup whose first missing block has this key."""
        if self.is_stale:
            self.rebuild()
        self.is_stale = True
        try:
            self.policy.missed(key)
        except Exception as error:
            self._replace("missed()", error)
        self.is_stale = False

    def note_cached(
        self,
        request: Any,
        table: Any,
        blocks: list[KVCacheBlock],
        num_before: int,
        group_id: i32,
        block_size: i32,
    ) -> None:
        """Handle blocks that a request has cached.

        Args:
            table: the request's blocks from the start.
            blocks: the blocks of the table from `num_before` on that were cached; null for others.
        """
        if self.is_stale:
            self.rebuild()
        self.is_stale = True
        if num_before > 0 and group_id not in self.unchained and table[0].is_null:
            self.unchain(group_id)
            self.is_stale = True
        is_chained = not self.is_flat and group_id not in self.unchained
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
                parent = self._find_parent(table[position - 1])
            listed = blocks if end - start == num_blocks else blocks[start:end]
            self._add_cached(request, listed, parent, group_id, block_size)
            start = end
        self.is_stale = False

    def note_touched(self, blocks: list[KVCacheBlock], is_access: bool) -> None:
        """Handle blocks that have got a reference. `is_access`: a request has hit them."""
        if self.is_stale:
            self.rebuild()
            return
        self.is_stale = True
        runs = self.table.runs
        index: i64 = 0
        num_blocks: i64 = len(blocks)
        while index < num_blocks:
            block = blocks[index]
            number = block.retention_id
            index += 1
            if number <= 0:
                continue
            run = runs[number]
            assert run is not None
            listed = run.blocks
            start: i64 = 0
            if listed[0] is not block:
                start = self.table.find_position(run, block)
                if start < 0:
                    continue
            end = start + 1
            num_listed: i64 = len(listed)
            while end < num_listed and index < num_blocks:
                block = blocks[index]
                if listed[end] is not block or block.retention_id != number:
                    break
                end += 1
                index += 1
            if end < num_listed:
                run = self.table.split(run, end)
            if start > 0:
                self.table.split(run, start)
            if run.is_free:
                run.is_free = False
                self.num_ordered -= len(run.blocks)
            run.is_open = False
            if is_access:
                run.num_hits += 1
                try:
                    self.policy.hit(run)
                except Exception as error:
                    self._replace("hit()", error)
        self.is_stale = False

    def place(self, freed: list[KVCacheBlock]) -> None:
        if self.is_stale:
            self.rebuild()
            return
        self.is_stale = True
        index: i64 = 0
        num_blocks: i64 = len(freed)
        runs = self.table.runs
        while index < num_blocks:
            block = freed[index]
            index += 1
            if block.ref_cnt != 0 or block.is_null or block.owner is not self._owner:
                continue
            number = block.retention_id
            if block.key is None:
                block.retention_id = 0  # it was evicted while in use; it is in the empty band
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
                self.table.trim(run)
                first = len(listed) - 1
                if listed[first] is not block:
                    own = self.table.isolate(run, block)
                    if own is not None:
                        self._free(own)
                    continue
            while first > 0 and index < num_blocks:
                block = freed[index]
                if listed[first - 1] is not block or block.ref_cnt != 0:
                    break
                if block.key is None or block.retention_id != number:
                    break
                first -= 1
                index += 1
            if first > 0:
                self.table.split(run, first)
            self._free(run)
        self.is_stale = False

    def place_unpinned(self, freed: list[KVCacheBlock]) -> None:
        """Handle blocks that `unpin_blocks` has freed. Those without a key are at the back, too."""
        if self.is_stale:
            self.rebuild()
            return
        self.place(freed)
        self.is_stale = True
        for block in freed:
            if block.key is None and block.ref_cnt == 0 and block.retention_id == 0:
                self._adopt(block)
        self.is_stale = False

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        """Handle free blocks that were taken by a caller's choice, not the policy's."""
        if self.is_stale:
            self.rebuild()
            return
        self.is_stale = True
        for block in blocks:
            number = block.retention_id
            if number > 0:
                run = self.table.runs[number]
                if run is not None and run.is_free:
                    if run.blocks[-1] is not block:
                        run = self.table.isolate(run, block)
                    if run is not None:
                        self._cut(run, 1)
            block.retention_id = 0
        self.is_stale = False

    def order_victims(self, num_blocks: int) -> None:
        """Move the blocks that the policy evicts for an allocation to the front of the free queue.

        They stay cached until they are taken. O(blocks moved).
        """
        if self.is_stale:
            self.rebuild()
        missing: i64 = num_blocks - self._count_free() + self.num_ordered
        if missing <= 0:
            return
        self.is_stale = True
        while missing > 0:
            run = self._choose()
            num_cut: i64 = min(missing, len(run.blocks))
            try:
                self.policy.evicted(run, num_cut)
            except Exception as error:
                self._replace("evicted()", error)
            self._move_to_front(run, num_cut)
            self._cut(run, num_cut)
            missing -= num_cut
        self.is_stale = False

    def note_reset(self) -> None:
        self.is_stale = True  # rebuilt by the next call, since this one may still be completed

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        self.note_resized()

    def note_resized(self) -> None:
        """Handle another number of blocks."""
        self.capacity = self._owner().num_gpu_blocks - 1
        self.policy.capacity = self.capacity

    def recover(self) -> None:
        self.is_stale = True
        self.rebuild()

    def unchain(self, group_id: int) -> None:
        """Note that hits of a group do not need all earlier blocks. O(runs)."""
        if self.is_stale:
            self.rebuild()
        self.is_stale = True
        self.unchained[group_id] = None
        for run in self.table.list_runs():
            if run.group_id == group_id:
                run.parent = None
                run.num_children = 0
                self._unpark(run)
        self.is_stale = False

    # ---- steps of these calls ----------------------------------------------------------------------

    def _find_parent(self, before: KVCacheBlock) -> CachedRun | None:
        """Return the run that ends with this block of a table, after a split if necessary."""
        run = self.table.find(before)
        if run is None or run.blocks[-1] is before:
            return run
        position = self.table.find_position(run, before)
        return None if position < 0 else self.table.split(run, position + 1)

    def _add_cached(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        parent: CachedRun | None,
        group_id: i32,
        block_size: i32,
    ) -> None:
        request_id = getattr(request, "request_id", None)
        if (
            parent is not None
            and parent.is_open
            and parent.num_children == 0
            and parent.request_id == request_id
        ):
            self.table.extend(parent, blocks)
            return
        run = self.table.add(list(blocks), group_id, block_size)
        session_id: Any = None
        hints: Any = None
        if self.reads_hints:
            session_id = getattr(request, "session_id", None)
            hints = getattr(request, "kv_hints", None)
            if not isinstance(hints, dict):
                hints = None
        run.request_id = request_id
        run.session_id = session_id
        run.hints = hints
        if parent is not None:
            run.parent = parent
            parent.num_children += 1
            parent.is_open = False
            while parent is not None and parent.request_id != request_id:
                parent.request_id = request_id
                parent.session_id = session_id
                parent.hints = hints
                parent = parent.parent
        self._call_cached(run)

    def _move_to_front(self, run: CachedRun, num_blocks: i64) -> None:
        """Move the last blocks of a run behind the free blocks without content, last one first."""
        blocks = run.blocks
        position: i64 = len(blocks) - 1
        end = position - num_blocks
        first = blocks[position]
        last = first
        last.retention_id = 0
        position -= 1
        while position > end:
            block = blocks[position]
            block.retention_id = 0
            if last.next_free_block is not block:
                self._order.move_chain(first, last, EMPTY_BAND)
                first = block
            last = block
            position -= 1
        self._order.move_chain(first, last, EMPTY_BAND)

    def _count_free(self) -> i64:
        queue = self._order._queue
        return cast(i64, queue.num_free_blocks)
