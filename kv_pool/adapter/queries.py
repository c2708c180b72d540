"""`PoolQueries`: the calls of a `GPUKVPool` that describe its sequences, blocks and use."""

import msgspec

from kv_pool.adapter.block_infos import BlockInfos
from kv_pool.adapter.holdings import as_sequence_id
from kv_pool.adapter.pool_state import GPUPoolState
from kv_pool.ids import BlockId, SequenceId
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.protocol import NO_SEQUENCE, BlockInfo
from kv_pool.reports.layout import PoolLayout, read_layout
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics, read_statistics


class PoolQueries(GPUPoolState):
    """The part of `GPUKVPool` that answers questions."""

    def blocks_of(self, sequence_id: SequenceId) -> list[BlockId]:
        """Return the block ids of a sequence in the order of its tokens; [] if it holds none.

        Raises:
            EvictedSequenceError: the sequence was evicted, see `take_evictions`.
        """
        with self.lock:
            sequence_id = as_sequence_id("sequence_id", sequence_id)
            sequence = self._holders.get(sequence_id)
            if sequence is None:
                self._evictions.check(sequence_id)
                return []
            return [block.block_id for block in sequence.blocks]

    def list_sequences(self) -> list[SequenceId]:
        """Return the ids of the sequences that hold blocks, the least recently accessed first."""
        with self.lock:
            return list(self._holders)

    def note_access(self, sequence_id: SequenceId) -> None:
        """Mark a sequence as the most recently used: an LRU policy evicts it last.

        Raises:
            UnknownSequenceError: the sequence holds no blocks.
        """
        with self.lock:
            self.block_pool.holds.check_whole()
            self.holdings.note_access(self.holdings.find(sequence_id))

    def get_block_info(self, block_id: BlockId) -> BlockInfo:
        """Return a description of a block, free or in use.

        Raises:
            InvalidBlockError: no such block. The null block, 0, is not accepted either.
        """
        with self.lock:
            block = self.holdings.find_block(block_id)
            block_id = block.block_id
            holders = self.holdings.list_holders(block)
            return BlockInfo(
                block_id=block_id,
                ref_count=block.ref_cnt - (block in self._pins),
                sequence_id=holders[0].sequence_id if holders else NO_SEQUENCE,
                device_id=self.device_id,
                is_pinned=block in self._pins,
                last_access_time=max((holder.last_access_time for holder in holders), default=0.0),
                sequence_ids=tuple(holder.sequence_id for holder in holders),
            )

    @property
    def block_info(self) -> BlockInfos:
        """A live mapping from block id to `BlockInfo`, of the blocks that sequences hold."""
        return BlockInfos(self)

    def get_fragmentation_rate(self) -> float:
        """Return the share of possible free runs that is lost to fragmentation, 0 to 1. O(number of blocks).

        The free blocks could form a certain number of runs of `run_length` if they were contiguous; the rate
        is the share of these that they do not form. With fewer free blocks than `run_length`, the largest
        power of two that fits takes its place. An unfragmented pool has rate 0, however full it is. For
        another run length k, U(k), see `block_pool.get_unusable_share(k)`.
        """
        with self.lock:
            return self.block_pool.get_fragmentation_rate(self.run_length)

    def get_statistics(self) -> PoolStatistics:
        """Return counts, shares and times: use of the pool, fragmentation, latency of its calls.

        The pool is locked meanwhile. O(number of blocks), a few nanoseconds each.
        """
        with self.lock:
            self._expire_claims()
            known = read_statistics(self.block_pool, block_size=self.block_size, run_length=self.run_length)
            return msgspec.structs.replace(
                known,
                pinned_blocks=len(self._pins),
                reserved_blocks=self.reserved_blocks,
                moved_blocks=self._num_moved_blocks,
                num_sequences=len(self._holders),
                evicted_sequences=self._victims.num_evicted,
                looked_up_blocks=self._num_looked_up_blocks,
                hit_blocks=self._num_hit_blocks,
                allocation=self._allocation_latency.summarize(),
                freeing=self._freeing_latency.summarize(),
            )

    def get_layout(self) -> PoolLayout:
        """Return a snapshot of each block's state and each sequence's runs. O(number of blocks)."""
        with self.lock:
            return read_layout(
                self.block_pool,
                [sequence.blocks for sequence in self._holders.values()],
                block_size=self.block_size,
                run_length=self.run_length,
                device_id=self.device_id,
            )

    def describe_sequences(self) -> SequenceList:
        """Return a report on each sequence that holds blocks, the least recent first. O(held blocks)."""
        with self.lock:
            now = self._clock()
            immovable_ids = set(self.block_pool.holds.list_immovable_ids())
            return SequenceList(
                [
                    SequenceReport(
                        holder.sequence_id,
                        len(holder.blocks),
                        holder.priority,
                        now - holder.last_access_time,
                        holder.sequence_id in self.holdings.frozen,
                        num_immovable_blocks=sum(block.block_id in immovable_ids for block in holder.blocks),
                    )
                    for holder in self._holders.values()
                ]
            )

    @property
    def retention(self) -> BlockRetention:
        """The retention of cached blocks: directives and sessions that make some be reused later or earlier.

        Its request ids are `str(sequence_id)`; its token positions follow `blocks_of`. Each allocation
        handles expired timers. Calls on it are not locked: hold `lock`. Created on first access.
        """
        with self.lock:
            return self.holdings.open_retention()

    @property
    def num_pinned_blocks(self) -> int:
        return len(self._pins)
