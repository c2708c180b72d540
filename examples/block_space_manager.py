"""Allocation and swapping under vLLM 0.6's names, for a scheduler of sequence groups.

`KVCacheManager` and `BlockSwapper` do the work; copy this class to run a scheduler that calls vLLM 0.6's
`BlockSpaceManager`.

Run it: python examples/block_space_manager.py
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from kv_pool import (
    AllocStatus,
    BlockHash,
    BlockId,
    BlockPool,
    InvalidArgumentError,
    KVCacheManager,
    OutOfBlocksError,
    RequestId,
)
from kv_pool.core.arguments import as_count, as_int
from kv_pool.tiers.swapper import BlockSwapper, SwapPlan


class GroupedSequence(Protocol):
    """The attributes and methods of a sequence that `BlockSpaceManager` uses."""

    @property
    def seq_id(self) -> int:
        """The engine's number of the sequence."""

    def get_token_ids(self) -> Sequence[int]:
        """Return the tokens of the prompt and of the output so far."""


class SequenceGroup(Protocol):
    """The samples, or beams, of one prompt; the methods that `BlockSpaceManager` calls."""

    def get_seqs(self) -> Sequence[GroupedSequence]:
        """Return the sequences of the group that have not ended."""


@dataclass(eq=False, slots=True)
class _Record:
    """A sequence as a request of the `KVCacheManager`. Without caching, only its token counts matter."""

    request_id: RequestId
    num_tokens: int
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    all_token_ids: Sequence[int] = ()
    lora_request: Any = None
    mm_features: Sequence[Any] | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class BlockSpaceManager:
    """A `KVCacheManager` and a `BlockSwapper` under vLLM 0.6's names, like its naive block allocator.

    A group is admitted and swapped as a whole: all of its sequences or none. For prefix caching, several
    kinds of attention, or copies that take longer than a step, use `KVCacheManager` and `BlockSwapper`
    directly.

    Call the methods between steps; a sequence's tokens count as computed as soon as they have slots. Make the
    returned copies in the order of the calls, before the step writes. Block ids run from 0, on the device and
    on the host; the ids of `manager` and `swapper` are one higher.

    Differences from vLLM:

    - The state of a sequence follows from its blocks: none (waiting), on the device (running) or on the host
      (swapped). `get_seqs()` is called without a status.
    - The watermark applies only while other sequences hold blocks: a group that fits only into an empty pool
      is admitted, where vLLM answers NEVER.
    - An append of no tokens touches no block, where vLLM counts one.
    - Caller errors, and calls that do not fit, raise and change nothing.

    As in vLLM, a block that several sequences of a group share is copied once for each of them by a swap.

    Args:
        block_size: tokens per block.
        num_gpu_blocks, num_cpu_blocks: blocks on the device and on the host.
        watermark: share of the device's blocks that admission and swapping in leave free.

    Attributes:
        watermark_blocks: the watermark in blocks, rounded down.
    """

    def __init__(
        self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, watermark: float = 0.01
    ) -> None:
        self.block_size = as_int("block_size", block_size)
        self.num_total_gpu_blocks = as_count("num_gpu_blocks", num_gpu_blocks)
        self.num_total_cpu_blocks = as_count("num_cpu_blocks", num_cpu_blocks)
        if self.block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; a block has at least 1 token")
        if not 0 <= watermark < 1:
            raise InvalidArgumentError(f"watermark is {watermark}; it is a share of the pool, 0 to below 1")
        self.watermark = watermark
        self.watermark_blocks = int(watermark * self.num_total_gpu_blocks)
        self.manager = KVCacheManager(BlockPool(self.num_total_gpu_blocks + 1, False, self.block_size))
        self.swapper = BlockSwapper(
            self.manager, BlockPool(self.num_total_cpu_blocks + 1, False, self.block_size, medium="CPU")
        )
        self._records: dict[int, _Record] = {}

    # ---- queries ---------------------------------------------------------------------------------

    def get_num_free_gpu_blocks(self) -> int:
        """Return how many blocks of the device are free."""
        return self.manager.get_num_free_blocks()

    def get_num_free_cpu_blocks(self) -> int:
        """Return how many blocks of the host are free."""
        return self.swapper.host_pool.get_num_free_blocks()

    def get_block_table(self, seq: GroupedSequence) -> list[BlockId]:
        """Return the ids of the sequence's blocks, on the device or, if it is swapped, on the host.

        Raises:
            InvalidArgumentError: the sequence has no blocks.
        """
        record = self._find(seq)
        ids = (
            self.swapper.get_host_block_ids(record.request_id)
            if self.swapper.is_swapped_out(record.request_id)
            else self.manager.get_block_ids(record.request_id)
        )
        return [BlockId(block_id - 1) for block_id in ids]

    # ---- waiting -> running ----------------------------------------------------------------------

    def can_allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return whether `allocate` with the same arguments would succeed; changes nothing.

        Raises:
            InvalidArgumentError: a sequence of the group already has blocks, or their lengths differ.
        """
        _, num_tokens = self._check_waiting(seq_group)
        need = count_required_blocks(num_tokens, num_lookahead_slots, self.block_size)
        return self._judge_gpu(need)

    def allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> None:
        """Allocate slots for all tokens of the group's prompt; its sequences share them.

        Raises:
            OutOfBlocksError: `can_allocate` does not return OK.
            InvalidArgumentError: as `can_allocate`. In both cases nothing has changed.
        Cost: O(blocks and sequences).
        """
        seqs, num_tokens = self._check_waiting(seq_group)
        status = self.can_allocate(seq_group, num_lookahead_slots)
        if status is not AllocStatus.OK:
            need = count_required_blocks(num_tokens, num_lookahead_slots, self.block_size)
            raise OutOfBlocksError(
                f"the group needs {need} blocks, {self.get_num_free_gpu_blocks()} are free of "
                f"{self.num_total_gpu_blocks}, {self.watermark_blocks} of which stay free; "
                f"can_allocate() returns {status.name}"
            )
        first = _Record(RequestId(str(seqs[0].seq_id)), num_tokens)
        self.manager.allocate_slots(first, num_tokens, num_lookahead_tokens=num_lookahead_slots)
        first.num_computed_tokens = num_tokens
        self._records[seqs[0].seq_id] = first
        for seq in seqs[1:]:
            self.fork(seqs[0], seq)

    # ---- running ---------------------------------------------------------------------------------

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Return whether `append_slots` would succeed for all running sequences of the group; changes
        nothing.

        Each block that an append touches counts as one, whether it is new or a copy of a shared block.
        """
        num_touched = sum(
            count_blocks_touched_by_append(
                record.num_tokens, self._count_unseen(seq, record), num_lookahead_slots, self.block_size
            )
            for seq, record in self._list(seq_group)
        )
        return num_touched <= self.get_num_free_gpu_blocks()

    def append_slots(
        self, seq: GroupedSequence, num_lookahead_slots: int = 0
    ) -> list[tuple[BlockId, BlockId]]:
        """Allocate slots for the tokens appended since the last call.

        Returns:
            Block copies to make, (source, target): shared blocks that the sequence is about to write to.
        Raises:
            OutOfBlocksError: too few blocks are free; call `can_append_slots` first.
            InvalidArgumentError: the sequence is not running, or has fewer tokens than before. In both cases
                nothing has changed.
        """
        record = self._find(seq)
        if not self.manager.holds_blocks(record.request_id):
            raise InvalidArgumentError(f"sequence {seq.seq_id} is swapped out; swap_in() its group first")
        num_new = self._count_unseen(seq, record)
        num_before = record.num_tokens
        record.num_tokens += num_new
        try:
            added = self.manager.allocate_slots(record, num_new, num_lookahead_tokens=num_lookahead_slots)
            if added is None:
                raise OutOfBlocksError(
                    f"sequence {seq.seq_id} has {num_new} new tokens, {self.get_num_free_gpu_blocks()} "
                    "blocks are free; call can_append_slots() first, and preempt or swap out other groups"
                )
        finally:
            record.num_tokens = num_before
        record.num_tokens = record.num_computed_tokens = num_before + num_new
        return [
            (BlockId(move.source - 1), BlockId(move.target - 1)) for move in self.manager.take_block_copies()
        ]

    def fork(self, parent_seq: GroupedSequence, child_seq: GroupedSequence) -> None:
        """Let a sequence without blocks share the blocks of another one, with copy-on-write.

        Raises:
            InvalidArgumentError: the parent is not running, the child already has blocks, or it has fewer
                tokens than the parent has slots. Nothing has changed.
        """
        parent = self._find(parent_seq)
        if child_seq.seq_id in self._records:
            raise InvalidArgumentError(f"sequence {child_seq.seq_id} already has blocks")
        if len(child_seq.get_token_ids()) < parent.num_tokens:
            raise InvalidArgumentError(
                f"sequence {child_seq.seq_id} has {len(child_seq.get_token_ids())} tokens, its parent "
                f"{parent_seq.seq_id} has slots for {parent.num_tokens}"
            )
        child = _Record(RequestId(str(child_seq.seq_id)), parent.num_tokens, parent.num_computed_tokens)
        self.manager.fork(parent, child)
        self._records[child_seq.seq_id] = child

    def free(self, seq: GroupedSequence) -> None:
        """Free the sequence's blocks, on the device or on the host; no-op if it has none."""
        record = self._records.get(seq.seq_id)
        if record is None:
            return
        if self.swapper.is_swapped_out(record.request_id):
            self.swapper.drop(record)
        else:
            self.manager.free(record)
        del self._records[seq.seq_id]

    # ---- running <-> swapped ---------------------------------------------------------------------

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Return whether the blocks of the group's running sequences fit on the host; changes nothing."""
        need = sum(len(self.get_block_table(seq)) for seq, _ in self._list(seq_group))
        return need <= self.get_num_free_cpu_blocks()

    def swap_out(self, seq_group: SequenceGroup) -> list[tuple[BlockId, BlockId]]:
        """Swap the group's running sequences out to the host.

        Returns:
            Copies to make, (device block, host block), before any of these device blocks is written.
        Raises:
            OutOfBlocksError: `can_swap_out` returns False. Nothing has changed.
        """
        if not self.can_swap_out(seq_group):
            raise OutOfBlocksError(
                f"the host has {self.get_num_free_cpu_blocks()} free blocks of {self.num_total_cpu_blocks}, "
                "too few for the group; free its sequences instead"
            )
        running = self._list(seq_group)
        return self._commit_all(self.swapper.swap_out(record) for _, record in running)

    def can_swap_in(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return whether `swap_in` would succeed and leave blocks for the next tokens; changes nothing.

        Returns:
            OK; LATER while other sequences hold too many blocks; NEVER for more blocks than the device has.
        """
        need = 0
        for seq, record in self._list(seq_group, is_swapped=True):
            num_held = len(self.get_block_table(seq))
            num_tokens = record.num_tokens + self._count_unseen(seq, record)
            num_needed = count_required_blocks(num_tokens, num_lookahead_slots, self.block_size)
            need += max(num_held, num_needed)
        return self._judge_gpu(need)

    def swap_in(self, seq_group: SequenceGroup) -> list[tuple[BlockId, BlockId]]:
        """Swap the group's swapped sequences in to the device.

        Returns:
            Copies to make, (host block, device block), before the step reads or writes these blocks.
        Raises:
            OutOfBlocksError: `can_swap_in` does not return OK. Nothing has changed.
        """
        status = self.can_swap_in(seq_group)
        if status is not AllocStatus.OK:
            raise OutOfBlocksError(
                f"{self.get_num_free_gpu_blocks()} blocks are free of {self.num_total_gpu_blocks}, "
                f"{self.watermark_blocks} of which stay free; can_swap_in() returns {status.name}"
            )
        swapped = self._list(seq_group, is_swapped=True)
        return self._commit_all(self.swapper.swap_in(record, num_new_tokens=0) for _, record in swapped)

    # ---- internals -------------------------------------------------------------------------------

    def _commit_all(self, plans: Iterable[SwapPlan | None]) -> list[tuple[BlockId, BlockId]]:
        moves = []
        for plan in plans:
            assert plan is not None, "the group was found to fit"
            moves += [(BlockId(move.source - 1), BlockId(move.target - 1)) for move in plan.moves]
            plan.commit()
        return moves

    def _find(self, seq: GroupedSequence) -> _Record:
        record = self._records.get(seq.seq_id)
        if record is None:
            raise InvalidArgumentError(f"sequence {seq.seq_id} has no blocks; allocate() its group first")
        return record

    def _list(
        self, seq_group: SequenceGroup, is_swapped: bool = False
    ) -> list[tuple[GroupedSequence, _Record]]:
        """Return the sequences of the group that are on the device, or on the host if `is_swapped`."""
        known = [
            (seq, self._records[seq.seq_id]) for seq in seq_group.get_seqs() if seq.seq_id in self._records
        ]
        return [
            (seq, record)
            for seq, record in known
            if self.swapper.is_swapped_out(record.request_id) == is_swapped
        ]

    def _check_waiting(self, seq_group: SequenceGroup) -> tuple[list[GroupedSequence], int]:
        """Return the sequences of a group to admit, and the number of tokens of each."""
        seqs = list(seq_group.get_seqs())
        lengths = {len(seq.get_token_ids()) for seq in seqs}
        if len(lengths) != 1:
            raise InvalidArgumentError(
                f"the group's sequences have {sorted(lengths)} tokens; they must share one prompt"
            )
        for seq in seqs:
            if seq.seq_id in self._records:
                raise InvalidArgumentError(f"sequence {seq.seq_id} already has blocks; free() it first")
        return seqs, lengths.pop()

    def _count_unseen(self, seq: GroupedSequence, record: _Record) -> int:
        """Return the number of tokens that have no slots yet."""
        num_unseen = len(seq.get_token_ids()) - record.num_tokens
        if num_unseen < 0:
            raise InvalidArgumentError(
                f"sequence {seq.seq_id} has {-num_unseen} tokens fewer than slots; only append tokens"
            )
        return num_unseen

    def _judge_gpu(self, need: int) -> AllocStatus:
        if need > self.num_total_gpu_blocks:
            return AllocStatus.NEVER
        to_leave = self.watermark_blocks if self.manager.list_request_ids() else 0
        return AllocStatus.OK if need <= self.get_num_free_gpu_blocks() - to_leave else AllocStatus.LATER


def count_required_blocks(num_tokens: int, num_lookahead_slots: int, block_size: int) -> int:
    """Return the blocks of a sequence of `num_tokens` tokens followed by `num_lookahead_slots` slots.

    Raises:
        InvalidArgumentError: a negative count, or a block size below 1.
    Contract: `get_num_required_blocks` of vLLM v0.
    """
    num_slots = as_count("num_tokens", num_tokens) + as_count("num_lookahead_slots", num_lookahead_slots)
    return -(-num_slots // as_count("block_size", block_size, 1))


def count_blocks_touched_by_append(
    num_tokens_held: int, num_new_tokens: int, num_lookahead_slots: int, block_size: int
) -> int:
    """Count the blocks that the appended tokens and the lookahead slots after them fall into, new or not.

        |  0  1  2  3 |  4  5  .  . |  .  .  .  . |      6 tokens held, block size 4:
                               ^  ^    ^                 3 more touch 2 blocks

    Raises:
        InvalidArgumentError: a negative count, or a block size below 1.
    Contract: `get_num_blocks_touched_by_append_slots` of vLLM v0, with the same result except for an append
    of nothing after a partly filled block: it touches no block, where vLLM v0 returns 1.
    """
    num_appended = as_count("num_new_tokens", num_new_tokens)
    num_appended += as_count("num_lookahead_slots", num_lookahead_slots)
    end = as_count("num_tokens_held", num_tokens_held) + num_appended
    num_before = num_tokens_held // as_count("block_size", block_size, 1)
    return -(-end // block_size) - num_before if num_appended else 0


def main() -> None:
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=6, num_cpu_blocks=6)
    token_ids = list(range(10))
    seq = SimpleNamespace(seq_id=1, get_token_ids=lambda: token_ids)
    group = SimpleNamespace(get_seqs=lambda: [seq])
    print("admission:", manager.can_allocate(group).name)
    manager.allocate(group)
    token_ids += [10, 11, 12]
    print("copies before a step:", manager.append_slots(seq))
    print("blocks:", manager.get_block_table(seq))
    print("copies to the host:", manager.swap_out(group))
    print("swapping in:", manager.can_swap_in(group).name)


if __name__ == "__main__":
    main()

# prints:
# admission: OK
# copies before a step: []
# blocks: [0, 1, 2, 3]
# copies to the host: [(0, 0), (1, 1), (2, 2), (3, 3)]
# swapping in: OK
