"""`PolicyHost`: runs a cache policy in a pool: follows its calls, and evicts what the policy chooses."""

from typing import Any, cast

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.cached_runs import CachedRun
from kv_pool.core.policy_runner import PolicyRunner
from kv_pool.errors import CachePolicyError
from kv_pool.ids import GroupId

# Compiled code would make and drop an AttributeError for each attribute that a request lacks.
_read_attribute: Any = getattr


class PolicyHost(PolicyRunner):
    """The host of a pool's cache policy: it calls the hooks, and keeps the promises that a policy relies on.

    It hears of blocks through the calls of the pool only, so that a policy evicts the same blocks in every
    program that makes the same calls. Before blocks are taken, the blocks that the policy chooses move to the
    front of the free queue, behind those without content; otherwise the free queue stays in vLLM's order.
    """

    # ---- calls of the pool -------------------------------------------------------------------------

    def note_missed(self, key: Any) -> None:
        """Handle a lookup whose first missing block has this key."""
        pool = self._owner()
        was_changing = pool.is_changing
        pool.is_changing = True
        if self.is_stale:
            self.rebuild()
        try:
            self.policy.missed(key)
        except Exception as error:
            self.fail("missed()", error)
            self.rebuild()
        pool.is_changing = was_changing

    def note_cached(
        self,
        request: Any,
        table: Any,
        blocks: list[KVCacheBlock],
        num_before: int,
        group_id: i32,
        block_size: i32,
        has_gaps: bool,
    ) -> None:
        """Handle blocks that a request has cached.

        Args:
            table: the request's blocks from the start.
            blocks: the blocks of the table from `num_before` on that were cached; null for others.
            has_gaps: whether `blocks` has null blocks.
        """
        if self.is_stale:
            self.rebuild()
        try:
            self._note_cached(request, table, blocks, num_before, group_id, block_size, has_gaps)
        except CachePolicyError:
            self.rebuild()

    def note_touched(self, blocks: list[KVCacheBlock], is_access: bool) -> None:
        """Handle blocks that have got a reference. `is_access`: a request has hit them."""
        if self.is_stale:
            self.rebuild()
            return
        try:
            self._note_touched(blocks, is_access)
        except CachePolicyError:
            self.rebuild()

    def place(self, freed: list[KVCacheBlock]) -> None:
        if self.is_stale:
            self.rebuild()
            return
        try:
            self._place_listed(freed)
        except CachePolicyError:
            self.rebuild()

    def place_unpinned(self, freed: list[KVCacheBlock]) -> None:
        """Handle blocks that `unpin_blocks` has freed. Those without a key are at the back, too."""
        if self.is_stale:
            self.rebuild()
            return
        try:
            self._place_listed(freed)
            for block in freed:
                if block.key is None and block.ref_cnt == 0 and block.retention_id == 0:
                    self._adopt(block)
        except CachePolicyError:
            self.rebuild()

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        """Handle free blocks that were taken by a caller's choice, not the policy's."""
        if self.is_stale:
            self.rebuild()
            return
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

    def order_victims(self, num_blocks: int) -> None:
        """Move the blocks that the policy evicts for an allocation to the front of the free queue.

        They stay cached until they are taken. O(blocks moved).
        """
        if self.is_stale:
            self.rebuild()
        try:
            self._order_victims(num_blocks)
        except CachePolicyError:
            self.rebuild()
            self._order_victims(num_blocks)  # by LRU

    def note_reset(self) -> None:
        self.is_stale = True

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        self.note_resized()

    def note_resized(self) -> None:
        """Handle another number of blocks."""
        self.capacity = self._owner().num_gpu_blocks - 1
        self.policy.capacity = self.capacity

    def unchain(self, group_id: GroupId) -> None:
        """Note that hits of a group do not need all earlier blocks. O(runs)."""
        if self.is_stale:
            self.rebuild()
        self.unchained[group_id] = None
        for run in self.table.list_runs():
            if run.group_id == group_id:
                run.is_chained = False
                run.parent = None
                run.num_children = 0
                self._unpark(run)

    # ---- steps of these calls ----------------------------------------------------------------------

    def _note_cached(
        self,
        request: Any,
        table: Any,
        blocks: list[KVCacheBlock],
        num_before: int,
        group_id: i32,
        block_size: i32,
        has_gaps: bool,
    ) -> None:
        is_chained = not self.is_flat and (len(self.unchained) == 0 or group_id not in self.unchained)
        if is_chained and num_before > 0:
            first: KVCacheBlock = table[0]
            if first.is_null:
                self.unchain(cast(GroupId, group_id))
                is_chained = False
        if not has_gaps and not self.is_flat:
            last = self.table.find_ending(table[num_before - 1]) if is_chained and num_before > 0 else None
            self._add_cached(request, blocks, last, group_id, block_size)
            return
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

    def _note_touched(self, blocks: list[KVCacheBlock], is_access: bool) -> None:
        self._before = None
        # Blocks of one number with increasing token counts are different blocks of one run.
        number: i32 = 0
        num_tokens: i32 = 0
        start: i64 = 0
        index: i64 = 0
        for block in blocks:
            if block.retention_id != number or block.num_key_tokens <= num_tokens:
                if number > 0:
                    self._note_stretch(blocks, start, index, is_access)
                number = block.retention_id
                start = index
            num_tokens = block.num_key_tokens
            index += 1
        if number > 0:
            self._note_stretch(blocks, start, index, is_access)

    def _order_victims(self, num_blocks: int) -> None:
        missing: i64 = num_blocks - self._count_free() + self.num_ordered
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

    def _note_stretch(self, blocks: list[KVCacheBlock], start: i64, end: i64, is_access: bool) -> None:
        """Handle the blocks of one run, from list index `start` to `end`, that have got a reference."""
        run = self.table.runs[blocks[start].retention_id]
        assert run is not None
        listed = run.blocks
        if len(listed) == end - start:
            self._note_use(run, is_access)
            return
        while start < end:
            run = self.table.runs[blocks[start].retention_id]
            assert run is not None
            listed = run.blocks
            first = self.table.find_position(run, blocks[start])
            start += 1
            if first < 0:
                continue
            last = first + 1
            while start < end and last < len(listed) and listed[last] is blocks[start]:
                last += 1
                start += 1
            part = self.table.split(run, last) if last < len(listed) else run
            if first > 0:
                self.table.split(part, first)
            self._note_use(part, is_access)

    def _note_use(self, run: CachedRun, is_access: bool) -> None:
        """Mark a run as in use, and tell the policy of a hit.

        A request may continue one chain's blocks with the equal copy of another chain's: then the run that it
        hits before this one becomes the parent, since lookups find the latter behind it.
        """
        before = self._before
        if is_access and before is not None and run.parent is not before and self._follows(run, before):
            parent = run.parent
            run.parent = before
            before.num_children += 1
            if parent is not None:
                parent.num_children -= 1
                self._unpark(parent)
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
                self._replace("hit()", error)

    def _follows(self, run: CachedRun, before: CachedRun) -> bool:
        """Return True if a run's positions are directly after those of another, in a group with parents."""
        if self.is_flat or run.group_id != before.group_id or not run.is_chained:
            return False
        return before.blocks[-1].num_key_tokens + run.block_size == run.blocks[0].num_key_tokens

    def _place_listed(self, freed: list[KVCacheBlock]) -> None:
        """Put the runs of the blocks in this list that are free into queues; split runs where necessary."""
        index: i64 = 0
        num_blocks: i64 = len(freed)
        runs = self.table.runs
        owner = self._owner
        while index < num_blocks:
            block = freed[index]
            index += 1
            if block.ref_cnt != 0 or block.is_null or block.owner is not owner:
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
                if block.ref_cnt != 0:
                    break
                if listed[first - 1] is block:
                    if block.key is None or block.retention_id != number:
                        break
                    first -= 1
                elif block.key is not None or block.is_null or block.owner is not owner:
                    break
                else:
                    block.retention_id = 0  # it was evicted while in use
                index += 1
            if first > 0:
                self.table.split(run, first)
            self._free(run)

    def _is_whole(self, freed: list[KVCacheBlock], start: i64, run: CachedRun) -> bool:
        """Return True if all blocks of a run are free, and are the next ones in this list, in any order."""
        end: i64 = start + len(run.blocks)
        if end > len(freed):
            return False
        number = run.number
        for block in freed[start:end]:
            if block.retention_id != number or block.owner is not self._owner:
                return False
        for block in run.blocks:
            if block.retention_id != number or block.ref_cnt != 0 or block.key is None:
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
            run.parent = parent
            parent.num_children += 1
            parent.is_open = False
            while parent is not None and parent.request_id is not request_id:
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
                self._order.move_chain_to_empty(first, last)
                first = block
            last = block
            position -= 1
        self._order.move_chain_to_empty(first, last)

    def _count_free(self) -> i64:
        queue = self._order._queue
        return cast(i64, queue.num_free_blocks)
