"""`PoolFreeing`: the calls of a `GPUKVPool` that free, evict and pin blocks."""

from collections.abc import Sequence
from time import perf_counter_ns

from kv_pool.adapter.allocation import check_priority
from kv_pool.adapter.holdings import as_sequence_id
from kv_pool.adapter.queries import PoolQueries
from kv_pool.core.arguments import as_count, as_list
from kv_pool.errors import EvictedSequenceError
from kv_pool.ids import BlockId, SequenceId
from kv_pool.metrics.latency import TIMED_EVERY
from kv_pool.protocol import URGENT, Eviction


class PoolFreeing(PoolQueries):
    """The part of `GPUKVPool` that frees blocks, evicts sequences and pins blocks."""

    # ---- freeing and evicting --------------------------------------------------------------------

    def free(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        """Release blocks of sequence `sequence_id`; None: each from the sequence that has held it longest.

        A block that no sequence holds any more is free. A cached one can be hit until it is reused.

        Raises:
            InvalidBlockError: a block does not exist, is free, is listed twice, or is not held by that
                sequence.
            EvictedSequenceError: that sequence was evicted. Without `sequence_id`: a block was held by an
                evicted sequence, see `take_evictions`, so the caller may mean that sequence's block.
            PinnedBlockError: a pinned block would become free. In all cases nothing has changed.
        Cost: O(len(block_ids)).
        """
        started_ns = 0 if self._number_freeing() % TIMED_EVERY else perf_counter_ns()
        try:
            with self.lock:
                drops = self.holdings.find_drops(block_ids, sequence_id)
                self.block_pool.holds.check_whole()
                self._drop(*drops)
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def free_many(self, batches: Sequence[Sequence[BlockId]]) -> None:
        """Like `free` for the blocks of all batches together, all or none; no block may be listed twice."""
        listed = as_list("batches", batches)
        self.free([block_id for batch in listed for block_id in as_list("batches", batch)])

    def free_sequence(self, sequence_id: SequenceId) -> int:
        """Release all blocks of a sequence.

        Returns:
            How many blocks became free; other sequences still hold the rest.
        Raises:
            UnknownSequenceError: the sequence holds no blocks, such as after an earlier call.
            EvictedSequenceError: the sequence was evicted; results computed from its blocks may be wrong.
                This notifies its owner: the id may be used again.
            PinnedBlockError: a pinned block would become free. In all cases no block has changed.
        """
        started_ns = 0 if self._number_freeing() % TIMED_EVERY else perf_counter_ns()
        try:
            with self.lock:
                self.block_pool.holds.check_whole()
                try:
                    sequence = self.holdings.find_usable(sequence_id)
                except EvictedSequenceError:
                    self._evictions.forget(sequence_id)
                    raise
                num_free = self.block_pool.get_num_free_blocks()
                blocks = list(sequence.blocks)
                self._drop(blocks, {sequence: blocks})
                return self.block_pool.get_num_free_blocks() - num_free
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def evict(self, num_blocks: int) -> list[SequenceId]:
        """Evict as few sequences as free `num_blocks` more, in the eviction policy's order.

        Uses the LRU policy if the pool has none. Returns the ids of the evicted sequences; the caller
        notifies their owners. Returns [] with nothing changed if evicting all candidates would not suffice.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        with self.lock:
            self.block_pool.holds.check_whole()
            return self._victims.evict(self._victims.choose(URGENT, None, num_blocks) or [])

    def take_evictions(self) -> list[Eviction]:
        """Return the sequences evicted since the last call, oldest first, and forget them.

        `on_evicted`, or else this call, notifies the owner of a sequence that `allocate` evicted. Until then,
        or until `free_sequence` has raised for it, calls that name the sequence raise EvictedSequenceError.
        Without `sequence_id`, `free`, `pin`, `unpin` and `migrate_blocks` also raise it for the sequence's
        block ids, and for the ids these blocks were moved to. Sequences that have started again are not
        returned. The pool keeps at most 65,536 evictions.

        Afterwards a stale block id is refused only while the block is free. Once the block is allocated
        again, its id means the new holder's block: pass `sequence_id` where ids may be stale.
        """
        with self.lock:
            return self._evictions.take_all()

    def list_victims(
        self, num_blocks: int, priority: int = URGENT, sequence_id: SequenceId | None = None
    ) -> list[SequenceId]:
        """Return the sequences to evict for `num_blocks` more free blocks, in eviction order.

        Uses the LRU policy if the pool has none. Returns all candidates if evicting them would not suffice.

        Args:
            priority: of the request; sequences of higher priority are excluded.
            sequence_id: the request's own sequence, also excluded.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        check_priority(priority)
        if sequence_id is not None:
            sequence_id = as_sequence_id("sequence_id", sequence_id)
        with self.lock:
            chosen = self._victims.choose(priority, sequence_id, num_blocks)
            victims = self._victims.rank(priority, sequence_id) if chosen is None else chosen
            return [victim.sequence_id for victim in victims]

    # ---- pinning ---------------------------------------------------------------------------------

    def pin(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        """Pin blocks: they are not evicted, moved or migrated until each is unpinned as often.

        Args:
            sequence_id: the sequence that must hold the blocks and in whose name they are pinned: when it
                releases a block that others still hold, these pins end. None: until unpinned.
        Raises:
            InvalidBlockError: a block does not exist, is free, or is not held by that sequence.
            EvictedSequenceError: as `free`.
            PinLimitError: the pin limit would be exceeded. In all cases nothing has changed.
        """
        with self.lock:
            blocks, holder = self.holdings.find_named(block_ids, sequence_id)
            self.holdings.check_not_frozen(blocks)
            self.block_pool.holds.check_whole()
            self.holdings.pin(blocks, holder)

    def unpin(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        """Remove one pin from each block.

        Args:
            sequence_id: the sequence that must hold the blocks; its pins are removed first. None for any.
        Raises:
            InvalidBlockError: a block does not exist, has fewer pins, or is not held by that sequence.
            EvictedSequenceError: as `free`. In all cases nothing has changed.
        """
        with self.lock:
            named = self.holdings.find_named(block_ids, sequence_id)
            self.block_pool.holds.check_whole()
            self.holdings.unpin(*named)
