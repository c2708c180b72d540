"""`Holdings`: which sequences hold which blocks, in which order, and which sequences are frozen."""

from collections.abc import Callable, Sequence

from kv_pool.adapter.access_order import AccessOrder
from kv_pool.adapter.evictions import Evictions
from kv_pool.adapter.holder import Holder
from kv_pool.adapter.pins import Pins
from kv_pool.adapter.ranked_order import RankedOrder
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.arguments import as_int, as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.freeing import free_listed
from kv_pool.errors import (
    FrozenSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    PinnedBlockError,
    UnknownSequenceError,
)
from kv_pool.ids import BlockId, GroupId, RequestId, SequenceId
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.protocol import HIGH, NORMAL, URGENT

_RETENTION = {HIGH: 65, URGENT: 95}
"""Retention priorities of the blocks of HIGH and URGENT sequences; see `RetentionDirective`."""


class Holdings:
    """The sequences of one pool and their blocks. Use it only with the pool's lock held.

    Attributes:
        holders: sequences by id, least recently accessed first. Each holds at least one block.
        order: the same by priority, for evictions.
        first_holders: per block, the sequence that has held it longest.
        later_holders: per block, its other holders, oldest first; only for blocks that have some.
        evictions: evicted sequences; none of them is in `holders`.
        retention: which cached blocks are kept longer than others; None until it is first needed.
        frozen: frozen sequence -> reason: it cannot be changed, freed, shared or pinned until its migration
            ends. Only a `PoolSite` changes this.
    """

    def __init__(
        self,
        block_pool: RunBlockPool,
        pins: Pins,
        clock: Callable[[], float],
        device_id: int,
    ) -> None:
        self.block_pool = block_pool
        self.retention: BlockRetention | None = None
        self._clock = clock
        self._device_id = device_id
        self.pins = pins
        # Keyed by block objects, which keep their identity when ids are exchanged.
        self.holders: dict[SequenceId, Holder] = {}
        self.order: AccessOrder | RankedOrder = AccessOrder(pins, self.list_holders)
        self.first_holders: dict[KVCacheBlock, Holder] = {}
        self.later_holders: dict[KVCacheBlock, list[Holder]] = {}
        self.frozen: dict[SequenceId, str] = {}
        self.evictions = Evictions()

    def hold(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Enter the sequence as a holder of blocks with references, as part of a larger call."""
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
        """Enter the sequence as a holder of migrated blocks, as part of a larger call."""
        self.evictions.forget(holder.sequence_id)
        self.hold(holder, blocks)

    def note_access(self, holder: Holder) -> None:
        """Mark the sequence as the most recently used: move it to the end of `holders`."""
        now = self._clock()
        holders = self.holders
        if holder.sequence_id in holders:  # no call until it is in again, so no interrupt in between
            del holders[holder.sequence_id]
        holders[holder.sequence_id] = holder
        holder.last_access_time = now
        self.order.note_access(holder)

    def drop(self, blocks: list[KVCacheBlock], by_holder: dict[Holder, list[KVCacheBlock]]) -> None:
        """Release blocks of the sequences that hold them.

        Args:
            blocks: distinct blocks, in the order of the tokens.
            by_holder: the same blocks by the sequence that loses them.
        Raises:
            PinnedBlockError: a pinned block would become free. Nothing has changed.
        """
        first_holders = self.first_holders
        later_holders = self.later_holders
        if self.pins:
            for block in blocks:
                if block in self.pins and block not in later_holders:
                    raise PinnedBlockError(
                        f"block {block.block_id} is pinned and no other sequence holds it; unpin it first"
                    )
        pool = self.block_pool
        was_changing = pool.is_changing
        for holder, own in by_holder.items():
            if holder.priority != NORMAL or self.retention is not None:
                self._claim(holder, own)
        pool.is_changing = True
        # Tail first, so that the head of a prefix stays cached longest.
        free_listed(pool, blocks[::-1])
        for holder, own in by_holder.items():
            if later_holders:
                for block in own:
                    self.part(holder, block)
                continue
            held = holder.blocks
            for block in own:
                del held[block], first_holders[block]
            if not held:
                del self.holders[holder.sequence_id]
                self.order.remove(holder)
            else:
                self.order.note_change(holder)
        pool.is_changing = was_changing

    def pin(self, blocks: Sequence[KVCacheBlock], holder: Holder | None) -> None:
        """Add one pin to each block, in the name of a sequence that holds them, if one is given.

        A block's pins in the name of a sequence end when the sequence releases the block.
        Raises PinLimitError with nothing changed.
        """
        own: dict[KVCacheBlock, int] = {}
        if holder is not None:
            own |= holder.pins or {}
            for block in blocks:
                own[block] = own.get(block, 0) + 1
        self.pins.pin(blocks)
        if holder is not None:
            holder.pins = own

    def unpin(self, blocks: Sequence[KVCacheBlock], holder: Holder | None) -> None:
        """Remove one pin from each block: one in the sequence's name, else one in no name, else another's.

        Raises InvalidBlockError with nothing changed.
        """
        self.pins.unpin(blocks)
        self.block_pool.is_changing = True
        for block in blocks:
            owners = [one for one in self.list_holders(block) if one.pins is not None and block in one.pins]
            num_named = sum(one.pins[block] for one in owners if one.pins is not None)
            if holder in owners or num_named > self.pins.counts.get(block, 0):
                own = holder.pins if holder is not None and holder in owners else owners[0].pins
                assert own is not None
                own[block] -= 1
                if not own[block]:
                    del own[block]
        self.block_pool.is_changing = False

    def _claim(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Apply the sequence's priority and retention directives to blocks that it is about to release."""
        cached: list[KVCacheBlock] = []
        if holder.priority != NORMAL and self.block_pool.policy_host is None:
            cached = [block for block in blocks if block.block_hash is not None]
        retention = self.open_retention() if cached else self.retention
        self.block_pool.is_changing = True
        if retention is not None and cached:
            retention.set_priority(cached, _RETENTION[holder.priority])
        if retention is None or not retention.is_active:
            return
        request_id = RequestId(str(holder.sequence_id))
        table = list(holder.blocks)
        if blocks == table:
            retention.label_table(request_id, GroupId(0), 0, blocks)
        else:
            positions = {block: position for position, block in enumerate(table)}
            for block in blocks:
                retention.label_table(request_id, GroupId(0), positions[block], [block])
        if len(blocks) == len(table):
            retention.forget_request(request_id)

    def open_retention(self) -> BlockRetention:
        """Return the retention of the pool; the first call creates it."""
        if self.retention is None:
            self.retention = BlockRetention(self.block_pool, self._clock, self.pins.max_pinned_blocks)
        return self.retention

    def will_pin(self, holder: Holder, position: int, block: KVCacheBlock) -> bool:
        """Return whether retention would pin the block if this sequence, its last holder, released it."""
        return self.retention is not None and self.retention.will_pin(
            RequestId(str(holder.sequence_id)), GroupId(0), position, block
        )

    def part(self, holder: Holder, block: KVCacheBlock) -> None:
        """Remove a sequence from a block's holders, as part of a larger call."""
        holder.blocks.pop(block, None)
        if holder.pins:
            num_pins = holder.pins.pop(block, 0)
            if num_pins:
                self.pins.unpin([block] * num_pins)
        if not holder.blocks:
            self.holders.pop(holder.sequence_id, None)
            self.order.remove(holder)
        else:
            self.order.note_change(holder)
        later = self.later_holders.get(block)
        if self.first_holders.get(block) is holder:
            if later:
                self.first_holders[block] = later.pop(0)
            else:
                del self.first_holders[block]
        elif later and holder in later:
            later.remove(holder)
        if later is not None and not later:
            del self.later_holders[block]

    def repair(self) -> list[KVCacheBlock]:
        """Make all records agree with the blocks of each sequence, before the pool counts references again.

        Returns:
            The blocks of all sequences, each once for each sequence.
        """
        holders_of: dict[KVCacheBlock, list[Holder]] = {}
        for holder in list(self.holders.values()):
            if not holder.blocks:
                del self.holders[holder.sequence_id]
            for block in holder.blocks:
                holders_of.setdefault(block, []).append(holder)
        for block, holders in holders_of.items():
            known = [holder for holder in self.list_holders(block) if holder in holders]
            holders[:] = dict.fromkeys(known + holders)  # the longest holder stays first
        first_holders = {block: holders[0] for block, holders in holders_of.items()}
        later_holders = {block: holders[1:] for block, holders in holders_of.items() if len(holders) > 1}
        self.first_holders, self.later_holders = first_holders, later_holders
        self.pins.repair(first_holders)
        num_left = dict(self.pins.counts)
        for holder in self.holders.values():
            own: dict[KVCacheBlock, int] = {}
            for block, count in (holder.pins or {}).items():
                num_own = min(count, num_left.get(block, 0)) if block in holder.blocks else 0
                if num_own:
                    own[block] = num_own
                    num_left[block] -= num_own
            holder.pins = own
        self.evictions.repair(self.holders)
        self.order.rebuild(self.holders.values())
        return [block for holder in self.holders.values() for block in holder.blocks]

    def check_usable(self, sequence_id: SequenceId) -> None:
        """Raise FrozenSequenceError if a migration has frozen the sequence."""
        why = self.frozen.get(sequence_id)
        if why is not None:
            raise FrozenSequenceError(
                f"sequence {sequence_id} cannot be used: {why}; wait until that ends, or cancel it"
            )

    def find(self, sequence_id: SequenceId) -> Holder:
        """Return the sequence.

        Raises:
            EvictedSequenceError: the sequence was evicted.
            UnknownSequenceError: the sequence holds no blocks for another reason.
        """
        if type(sequence_id) is not int:
            sequence_id = as_sequence_id("sequence_id", sequence_id)
        holder = self.holders.get(sequence_id)
        if holder is None:
            if sequence_id in self.evictions:
                raise self.evictions.make_error(sequence_id)
            raise UnknownSequenceError(
                f"sequence {sequence_id!r} holds no blocks on device {self._device_id}. Was it freed twice, "
                f"or migrated to another device?"
            )
        return holder

    def find_usable(self, sequence_id: SequenceId) -> Holder:
        """Like `find`, but also raise FrozenSequenceError if a migration has frozen the sequence."""
        if self.frozen:
            self.check_usable(sequence_id)
        return self.find(sequence_id)

    def find_block(self, block_id: BlockId) -> KVCacheBlock:
        """Return the block, free or in use. Raises InvalidTypeError, InvalidBlockError for a bad id."""
        block_id = BlockId(as_int("block_id", block_id))
        total_blocks = len(self.block_pool.blocks) - 1
        if not 0 < block_id <= total_blocks:
            raise InvalidBlockError(f"block {block_id} is not one of 1 to {total_blocks}")
        return self.block_pool.blocks[block_id]

    def list_holders(self, block: KVCacheBlock) -> list[Holder]:
        """Return the sequences that hold a block, the one that has held it longest first."""
        first = self.first_holders.get(block)
        return [] if first is None else [first, *self.later_holders.get(block, ())]

    def find_held(self, block_ids: Sequence[BlockId]) -> list[KVCacheBlock]:
        """Return the blocks. Raises InvalidBlockError for a block that no sequence holds."""
        blocks = self.block_pool.blocks
        first_holders = self.first_holders
        num_blocks = len(blocks)
        found = []
        listed: list[BlockId] = as_list("block_ids", block_ids)
        for block_id in listed:
            if type(block_id) is not int:
                block_id = BlockId(as_int("block_ids", block_id))
            if not 0 < block_id < num_blocks:
                self.find_block(block_id)
            block = blocks[block_id]
            if block not in first_holders:
                why = self.evictions.explain_id(block_id) or "Was it freed twice?"
                raise InvalidBlockError(f"block {block_id} is held by no sequence. {why}")
            found.append(block)
        return found

    def find_named(
        self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None
    ) -> tuple[list[KVCacheBlock], Holder | None]:
        """Return the blocks that the caller names by id, and the sequence that it names, if any.

        Raises:
            InvalidBlockError: a block is held by no sequence, or not by the named one.
            UnknownSequenceError: the named sequence holds no blocks.
            EvictedSequenceError: the named sequence was evicted. Without a name: a block was held by an
                evicted sequence whose owner is not notified yet.
        """
        listed = as_list("block_ids", block_ids)
        if sequence_id is None:
            if self.evictions:
                self.evictions.check_ids(listed)
            return self.find_held(listed), None
        holder = self.find(sequence_id)
        blocks = self.find_held(listed)
        for block in blocks:
            if block not in holder.blocks:
                raise InvalidBlockError(f"block {block.block_id} is not held by sequence {sequence_id}")
        return blocks, holder

    def find_drops(
        self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None
    ) -> tuple[list[KVCacheBlock], dict[Holder, list[KVCacheBlock]]]:
        """Return the arguments of `drop`: each block with its longest holder, or with the named sequence.

        Raises:
            InvalidBlockError: a block is listed twice, is free, or is not held by the named sequence.
            EvictedSequenceError: as `find_named`.
            FrozenSequenceError: a migration has frozen one of the sequences.
        """
        listed = as_list("block_ids", block_ids)
        blocks, named = self.find_named(listed, sequence_id)
        if len(set(listed)) != len(listed):
            twice = next(block_id for at, block_id in enumerate(listed) if block_id in listed[:at])
            raise InvalidBlockError(f"block {twice} is listed twice")
        if named is None:
            drops: dict[Holder, list[KVCacheBlock]] = {}
            for block in blocks:
                drops.setdefault(self.first_holders[block], []).append(block)
        else:
            drops = {named: blocks} if blocks else {}
        if self.frozen:
            for holder in drops:
                self.check_usable(holder.sequence_id)
        return blocks, drops

    def check_not_frozen(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raise FrozenSequenceError if a migration has frozen a sequence that holds one of these blocks."""
        if self.frozen:
            for block in blocks:
                for holder in self.list_holders(block):
                    self.check_usable(holder.sequence_id)


def as_sequence_id(name: str, sequence_id: SequenceId) -> SequenceId:
    """Return a sequence id as an int. Raise InvalidTypeError if it is not an integer."""
    return sequence_id if type(sequence_id) is int else SequenceId(as_int(name, sequence_id))


def as_new_id(name: str, sequence_id: SequenceId) -> SequenceId:
    """Like `as_sequence_id`, but also raise InvalidArgumentError for a negative id (`NO_SEQUENCE` is -1)."""
    sequence_id = as_sequence_id(name, sequence_id)
    if sequence_id < 0:
        raise InvalidArgumentError(f"{name} is {sequence_id}; ids are 0 or more, -1 stands for none")
    return sequence_id
