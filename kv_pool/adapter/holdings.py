"""`Holdings`: which sequences hold which blocks, in which order, and which of them may not be touched now."""

from collections.abc import Callable, Sequence

from kv_pool.adapter.evictions import Evictions
from kv_pool.adapter.pins import Pins
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.arguments import as_int, as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import (
    FrozenSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    KVPoolError,
    PinnedBlockError,
    UnknownSequenceError,
)
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.protocol import HIGH, NORMAL, URGENT

_RETENTION = {HIGH: 65, URGENT: 95}
"""Retention priorities of the blocks of HIGH and URGENT sequences; see `RetentionDirective`."""


class Holder:
    """A sequence that holds blocks: in the order of its tokens, each once."""

    __slots__ = ("blocks", "last_access_time", "priority", "sequence_id")

    def __init__(self, sequence_id: int, priority: int, now: float) -> None:
        self.sequence_id = sequence_id
        self.priority = priority
        self.last_access_time = now
        self.blocks: dict[KVCacheBlock, None] = {}


class Holdings:
    """The sequences of one pool and their blocks. Belongs to whoever holds the pool's lock.

    Attributes:
        holders: by sequence id, in the order of last access, longest ago first. None is without blocks.
        first_holders: by block the sequence that has held it longest.
        later_holders: by block the others, in the order in which they came; no block has none.
        evictions: sequences that were evicted; none of them is in `holders`.
        retention: which cached blocks are kept longer than others; None before the first of them.
        barred: sequences that may not be changed, freed, shared or pinned until a migration is over, and why.
            Only a `PoolSite` changes it.
    """

    def __init__(
        self,
        block_pool: RunBlockPool,
        pins: Pins,
        clock: Callable[[], float],
        device_id: int,
    ) -> None:
        self._block_pool = block_pool
        self.retention: BlockRetention | None = None
        self._clock = clock
        self._device_id = device_id
        self.pins = pins
        # Keyed by block objects, which keep their identity when ids are exchanged.
        self.holders: dict[int, Holder] = {}
        self.first_holders: dict[KVCacheBlock, Holder] = {}
        self.later_holders: dict[KVCacheBlock, list[Holder]] = {}
        self.barred: dict[int, str] = {}
        self.evictions = Evictions()
        # What an interrupted call leaves for `recover`: references that are counted and in no sequence for
        # good, the sequence that they are for; references to give back, and who held them.
        self.arriving: list[KVCacheBlock] = []
        self._joining: Holder | None = None
        self._leaving: list[KVCacheBlock] = []
        self._drops: dict[Holder, list[KVCacheBlock]] = {}

    def hold(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Enter the sequence as a holder of blocks, whose references are counted already.

        For `arriving` blocks; `settle` ends it. Whatever interrupts the caller before, `recover` undoes it.
        """
        self._joining = holder
        first_holders = self.first_holders
        added = dict.fromkeys(blocks, holder)
        later_holders = self.later_holders
        if later_holders or not first_holders.keys().isdisjoint(added):
            for block in blocks:
                if block in first_holders:
                    if block in later_holders:
                        later_holders[block].append(holder)
                    else:
                        later_holders[block] = [holder]
                    del added[block]
        first_holders |= added
        if holder.blocks:
            holder.blocks |= dict.fromkeys(blocks)
        else:
            holder.blocks = dict.fromkeys(blocks)
        self.note_access(holder)

    def hold_arrived(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Enter the sequence as a holder of blocks that it does not hold otherwise.

        May be repeated, where an exception interrupted it.
        """
        for block in blocks:
            self._part(holder, block)
        self.evictions.forget(holder.sequence_id)
        self.hold(holder, blocks)
        self.settle()

    def note_access(self, holder: Holder) -> None:
        """The sequence was used: it is the last in `holders`."""
        now = self._clock()
        holders = self.holders
        if holder.sequence_id in holders:  # no call from here on: out and in are one step
            del holders[holder.sequence_id]
        holders[holder.sequence_id] = holder
        holder.last_access_time = now

    def settle(self) -> None:
        """The blocks that were arriving belong to their sequence now."""
        self.arriving = []
        self._joining = None

    def drop(self, blocks: list[KVCacheBlock], by_holder: dict[Holder, list[KVCacheBlock]]) -> None:
        """Take blocks from sequences that hold them. Raises PinnedBlockError; nothing has changed then.

        Args:
            blocks: distinct ones, head first.
            by_holder: the same blocks by the sequence that loses them.
        """
        first_holders = self.first_holders
        later_holders = self.later_holders
        if self.pins:
            for block in blocks:
                if block in self.pins and block not in later_holders:
                    raise PinnedBlockError(
                        f"block {block.block_id} is pinned and nobody else holds it; unpin it first"
                    )
        for holder, own in by_holder.items():
            if holder.priority != NORMAL or self.retention is not None:
                self._claim(holder, own)
        # Tail first, so that the head of a prefix can be hit longest; blocks without hash have no such order.
        leaving = blocks[::-1]
        self._drops = by_holder
        self._leaving = leaving
        try:
            self._block_pool.free_out_of(leaving)
        except KVPoolError:
            self._drops = {}
            self._leaving = []
            raise
        for holder, own in by_holder.items():
            if later_holders:
                for block in own:
                    self._part(holder, block)
                continue
            held = holder.blocks
            for block in own:
                del held[block], first_holders[block]
            if not held:
                del self.holders[holder.sequence_id]
        self._drops = {}

    def _claim(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Apply the sequence's priority and directives to blocks that it is about to drop."""
        if holder.priority != NORMAL:
            cached = [block for block in blocks if block.block_hash is not None]
            if cached:
                self.open_retention().claim_blocks(cached, _RETENTION[holder.priority])
        retention = self.retention
        if retention is None or not retention.is_active:
            return
        request_id = str(holder.sequence_id)
        table = list(holder.blocks)
        if blocks == table:
            retention.label_table(request_id, 0, 0, blocks)
        else:
            positions = {block: position for position, block in enumerate(table)}
            for block in blocks:
                retention.label_table(request_id, 0, positions[block], [block])
        if len(blocks) == len(table):
            retention.forget_request(request_id)

    def open_retention(self) -> BlockRetention:
        """The retention of the pool, made by the first call."""
        if self.retention is None:
            self.retention = BlockRetention(self._block_pool, self._clock, self.pins.max_pinned_blocks)
        return self.retention

    def will_pin(self, holder: Holder, position: int, block: KVCacheBlock) -> bool:
        """Would the block be pinned, not free, if this sequence, its last holder, dropped it now?"""
        return self.retention is not None and self.retention.will_pin(
            str(holder.sequence_id), 0, position, block
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether a call was interrupted and `recover` has something to do."""
        return bool(self.arriving or self._drops or self._leaving) or self._joining is not None

    def recover(self) -> None:
        """Complete a `drop` that was interrupted, and undo the entering of blocks that have not settled.

        May itself be interrupted and called again.
        """
        joining = self._joining
        if joining is not None:
            for block in self.arriving:
                self._part(joining, block)
            if joining.blocks and self.holders.get(joining.sequence_id) is not joining:
                self.holders[joining.sequence_id] = joining
        self.pins.recover([block for block in self.arriving if block not in self.first_holders])
        self._joining = None
        self._block_pool.free_out_of(self.arriving)
        self._block_pool.free_out_of(self._leaving)
        for holder, blocks in self._drops.items():
            for block in blocks:
                self._part(holder, block)
        self._drops = {}
        for sequence_id in self.evictions.list_sequences():
            if sequence_id in self.holders:
                self.evictions.forget(sequence_id)

    def _part(self, holder: Holder, block: KVCacheBlock) -> None:
        """Let a sequence hold a block no longer, however much of that is done already."""
        holder.blocks.pop(block, None)
        if not holder.blocks and self.holders.get(holder.sequence_id) is holder:
            del self.holders[holder.sequence_id]
        later = self.later_holders.get(block)
        if self.first_holders.get(block) is holder:
            if later:
                self.first_holders[block] = later[0]
                del later[0]
            else:
                del self.first_holders[block]
        elif later and holder in later:
            later.remove(holder)
        if later is not None and not later:
            self.later_holders.pop(block, None)

    def check_usable(self, sequence_id: int) -> None:
        """Raise FrozenSequenceError where a migration has the sequence."""
        why = self.barred.get(sequence_id)
        if why is not None:
            raise FrozenSequenceError(
                f"sequence {sequence_id} cannot be used: {why}; wait until that is over, or cancel it"
            )

    def find(self, sequence_id: int) -> Holder:
        """The sequence. Raises UnknownSequenceError where it holds nothing; EvictedSequenceError says why."""
        if type(sequence_id) is not int:
            sequence_id = as_int("sequence_id", sequence_id)
        holder = self.holders.get(sequence_id)
        if holder is None:
            if sequence_id in self.evictions:
                raise self.evictions.make_error(sequence_id)
            raise UnknownSequenceError(
                f"sequence {sequence_id!r} holds no blocks on device {self._device_id}. Freed twice? Moved "
                f"to another device?"
            )
        return holder

    def find_usable(self, sequence_id: int) -> Holder:
        """As `find`; raises FrozenSequenceError, too."""
        if self.barred:
            self.check_usable(sequence_id)
        return self.find(sequence_id)

    def find_block(self, block_id: int) -> KVCacheBlock:
        """The block, free or in use. Raises InvalidTypeError, InvalidBlockError for what is none."""
        block_id = as_int("block_id", block_id)
        total_blocks = len(self._block_pool.blocks) - 1
        if not 0 < block_id <= total_blocks:
            raise InvalidBlockError(f"block {block_id} is not one of 1 to {total_blocks}")
        return self._block_pool.blocks[block_id]

    def list_holders(self, block: KVCacheBlock) -> list[Holder]:
        """The sequences that hold a block, the one that has held it longest first."""
        first = self.first_holders.get(block)
        return [] if first is None else [first, *self.later_holders.get(block, ())]

    def find_held(self, block_ids: Sequence[int]) -> list[KVCacheBlock]:
        """The blocks, each of which some sequence holds."""
        blocks = self._block_pool.blocks
        first_holders = self.first_holders
        num_blocks = len(blocks)
        found = []
        for block_id in as_list("block_ids", block_ids):
            if type(block_id) is not int:
                block_id = as_int("block_ids", block_id)
            if not 0 < block_id < num_blocks:
                self.find_block(block_id)
            block = blocks[block_id]
            if block not in first_holders:
                raise InvalidBlockError(f"block {block_id} is held by no sequence. Was it freed twice?")
            found.append(block)
        return found

    def find_drops(
        self, block_ids: Sequence[int], sequence_id: int | None
    ) -> tuple[list[KVCacheBlock], dict[Holder, list[KVCacheBlock]]]:
        """Return the arguments of `drop`: each block of its longest holder, or of the named sequence.

        Raises:
            InvalidBlockError: a block is listed twice, or not held by that sequence, or by none.
            EvictedSequenceError: the named sequence was evicted; without a name, one of the blocks was held
                by a sequence that was evicted without its owner's knowledge.
            FrozenSequenceError: a migration has one of the sequences.
        """
        listed = as_list("block_ids", block_ids)
        if self.evictions:
            if sequence_id is None:
                self.evictions.check_ids(listed)
            else:
                self.find(sequence_id)
        blocks = self.find_held(listed)
        if len(set(listed)) != len(listed):
            twice = next(block_id for at, block_id in enumerate(listed) if block_id in listed[:at])
            raise InvalidBlockError(f"block {twice} is listed twice")
        if sequence_id is None:
            drops: dict[Holder, list[KVCacheBlock]] = {}
            for block in blocks:
                drops.setdefault(self.first_holders[block], []).append(block)
        else:
            holder = self.find(sequence_id)
            for block in blocks:
                if block not in holder.blocks:
                    raise InvalidBlockError(f"block {block.block_id} is not held by sequence {sequence_id}")
            drops = {holder: blocks} if blocks else {}
        if self.barred:
            for holder in drops:
                self.check_usable(holder.sequence_id)
        return blocks, drops

    def check_not_frozen(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raise FrozenSequenceError where a migration has a sequence that holds one of these blocks."""
        if self.barred:
            for block in blocks:
                for holder in self.list_holders(block):
                    self.check_usable(holder.sequence_id)


def as_sequence_id(name: str, sequence_id: int) -> int:
    """Return a sequence's id as an int. Raise InvalidTypeError for what is not an integer."""
    return sequence_id if type(sequence_id) is int else as_int(name, sequence_id)


def as_new_id(name: str, sequence_id: int) -> int:
    """As `as_sequence_id`; raise InvalidArgumentError for what could be taken for `NO_SEQUENCE`."""
    sequence_id = as_sequence_id(name, sequence_id)
    if sequence_id < 0:
        raise InvalidArgumentError(f"{name} is {sequence_id}; ids are 0 or more, -1 stands for none")
    return sequence_id
