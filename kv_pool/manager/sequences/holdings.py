"""`Holdings`: which sequences hold which blocks, in which order, and which sequences are frozen."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.freeing import free_listed
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import (
    FrozenSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    PinLimitError,
    PinnedBlockError,
    UnknownSequenceError,
)
from kv_pool.ids import BlockId, GroupId, RequestId, SequenceId
from kv_pool.manager.sequences.evictions import Evictions
from kv_pool.protocol import HIGH, NORMAL, URGENT

if TYPE_CHECKING:
    from kv_pool.manager.retention.block_retention import BlockRetention

_RETENTION = {HIGH: 65, URGENT: 95}
"""Retention priorities of the blocks of HIGH and URGENT sequences; see `RetentionDirective`."""


@dataclass(eq=False, slots=True)
class Holder:
    """A sequence and the distinct blocks that it holds, in the order of its tokens.

    Attributes:
        queue, ticket: its place in the order of evictions.
    """

    sequence_id: SequenceId
    priority: int
    last_access_time: float
    blocks: dict[KVCacheBlock, None] = field(default_factory=dict)
    queue: OrderedDict[SequenceId, Holder] | None = None
    ticket: int = 0


Holders = tuple[Holder] | OrderedDict[Holder, None]
"""The sequences that hold a block, the one that has held it longest first.

One is a tuple, which the blocks of an allocation share. Several are a dict: thousands may share a prefix, and
the cost of adding and removing one does not depend on their number.
"""


class Pins:
    """The pinned blocks, by whom each is pinned; one hold keeps them all in place.

    Attributes:
        owners: per pinned block, its number of pins in the name of each sequence, and of None.
        hold: holds each pinned block.
        unpinned: blocks that lost their last pin; the order of evictions takes them out.

    Args:
        limit: how many blocks may be pinned at once, None for all; a block pinned twice counts once.
    """

    def __init__(self, block_pool: BlockPoolCore, limit: int | None) -> None:
        self.limit = limit
        self._pool = block_pool
        self.owners: dict[KVCacheBlock, dict[Holder | None, int]] = {}
        self.hold = block_pool.holds.open([], "pinned")
        self.unpinned: dict[KVCacheBlock, None] = {}

    def __len__(self) -> int:
        return len(self.owners)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self.owners

    @property
    def max_pinned_blocks(self) -> int:
        """How many blocks may be pinned at once."""
        return len(self._pool.blocks) - 1 if self.limit is None else self.limit

    def check_room(self, num_blocks: int) -> None:
        """Raise PinLimitError unless `num_blocks` more may be pinned."""
        if len(self) + num_blocks > self.max_pinned_blocks:
            raise PinLimitError(
                f"{len(self)} blocks are pinned; {num_blocks} more would exceed the limit of "
                f"{self.max_pinned_blocks}. Unpin others, or raise max_pinned_blocks."
            )

    def pin(self, blocks: Sequence[KVCacheBlock], holder: Holder | None = None) -> None:
        """Add one pin to each block, in the name of a sequence that holds them, if one is given.

        A block's pins in the name of a sequence end when the sequence releases the block.
        Raises PinLimitError with nothing changed.
        """
        added = [block for block in dict.fromkeys(blocks) if block not in self.owners]
        self.check_room(len(added))
        pool = self._pool
        was_changing = pool.is_changing
        pool.is_changing = True
        pool.holds.take_references(self.hold, added)
        for block in blocks:
            counts = self.owners.setdefault(block, {})
            counts[holder] = counts.get(holder, 0) + 1
        pool.is_changing = was_changing

    def unpin(
        self,
        blocks: Sequence[KVCacheBlock],
        holder: Holder | None,
        holders_of: Mapping[KVCacheBlock, Collection[Holder]],
    ) -> None:
        """Remove one pin from each block.

        It is one in the sequence's name, else one in no name, else one in the name of the sequence that has
        held the block longest, of those that have pinned it.

        Args:
            holders_of: `Holdings.holders_of`.
        Raises:
            InvalidBlockError: a block has fewer pins than that. Nothing has changed.
        """
        for block, count in Counter(blocks).items():
            if count > sum(self.owners.get(block, {}).values()):
                raise InvalidBlockError(f"block {block.block_id} is not pinned. Was it unpinned twice?")
        was_changing = self._pool.is_changing
        self._pool.is_changing = True
        for block in blocks:
            counts = self.owners[block]
            owner = next(one for one in (holder, None, *holders_of[block]) if one in counts)
            counts[owner] -= 1
            self._end(block, owner, counts[owner])
        self._pool.is_changing = was_changing

    def end(self, blocks: Iterable[KVCacheBlock], holder: Holder) -> None:
        """Remove the pins in the name of a sequence that releases these blocks, as part of a larger call."""
        for block in blocks:
            if holder in self.owners.get(block, ()):
                self._end(block, holder, 0)

    def _end(self, block: KVCacheBlock, owner: Holder | None, num_left: int) -> None:
        """Forget the owner if no pins are left in its name, and unpin the block if none are left at all."""
        if not num_left:
            del self.owners[block][owner]
        if not self.owners[block]:
            del self.owners[block]
            self.unpinned[block] = None
            self._pool.holds.drop_references(self.hold, [block])

    def repair(self, holders_of: Mapping[KVCacheBlock, Collection[Holder]]) -> None:
        """Keep the pins of held blocks, before the pool counts its references again."""
        for block, counts in list(self.owners.items()):
            names = (None, *holders_of[block]) if block in holders_of else ()
            left = {owner: count for owner, count in counts.items() if count and owner in names}
            if left:
                self.owners[block] = left
            else:
                del self.owners[block]
        self.hold.forget(self.owners)

    def is_any_pinned(self, blocks: Iterable[KVCacheBlock]) -> bool:
        return bool(self.owners) and not self.owners.keys().isdisjoint(blocks)


class Holdings:
    """The sequences of one pool and their blocks. Use it only with the pool's lock held.

    Attributes:
        holders: sequences by id, least recently accessed first. Each holds at least one block.
        holders_of: per block, the sequences that hold it.
        order: the same sequences in the order of eviction, which chooses those to evict; a `RankedOrder` for
            a policy other than LRU.
        evictions: evicted sequences; none of them is in `holders`.
        retention: which cached blocks are kept longer than others; None until it is first needed.
        frozen: frozen sequence -> reason: it cannot be changed, freed, shared or pinned until its migration
            ends. Only a `PoolSite` changes this.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        max_pinned_blocks: int | None,
        clock: Callable[[], float],
        device_id: int,
    ) -> None:
        self.block_pool = block_pool
        self.retention: BlockRetention | None = None
        self.clock = clock
        self.device_id = device_id
        self.pins = Pins(block_pool, max_pinned_blocks)
        # Keyed by block objects, which keep their identity when ids are exchanged.
        self.holders: dict[SequenceId, Holder] = {}
        self.holders_of: dict[KVCacheBlock, Holders] = {}
        self.frozen: dict[SequenceId, str] = {}
        self.evictions = Evictions()
        self.order = AccessOrder()

    def hold(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Enter the sequence as a holder of blocks with references, as part of a larger call."""
        holders_of = self.holders_of
        alone = (holder,)
        for block in blocks:
            others = holders_of.get(block) if block.ref_cnt > 1 else None
            if others is None:
                holders_of[block] = alone
            elif isinstance(others, tuple):
                holders_of[block] = OrderedDict.fromkeys((*others, holder))
            else:
                others[holder] = None
        if holder.blocks:
            holder.blocks |= dict.fromkeys(blocks)
        else:
            holder.blocks = dict.fromkeys(blocks)
        self.note_access(holder)

    def note_access(self, holder: Holder) -> None:
        """Mark the sequence as the most recently used: move it to the end of `holders`."""
        now = self.clock()
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
        if self.pins.owners:
            for block in blocks:
                if block in self.pins and len(self.holders_of[block]) == 1:
                    raise PinnedBlockError(
                        f"block {block.block_id} is pinned and no other sequence holds it; unpin it first"
                    )
        for holder, own in by_holder.items():
            if holder.priority != NORMAL and any(block.key is not None for block in own):
                self.open_retention()
        pool = self.block_pool
        was_changing = pool.is_changing
        pool.is_changing = True
        if self.retention is not None:
            for holder, own in by_holder.items():
                request_id = RequestId(str(holder.sequence_id))
                self.retention.note_released(request_id, holder.blocks, own, _RETENTION.get(holder.priority))
        # Tail first, so that the head of a prefix stays cached longest.
        free_listed(pool, blocks[::-1])
        for holder, own in by_holder.items():
            self.part(holder, own)
        pool.is_changing = was_changing

    def part(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Remove a sequence from the holders of these blocks, as part of a larger call."""
        held = holder.blocks
        holders_of = self.holders_of
        if len(blocks) == len(held):
            held.clear()
        else:
            for block in blocks:
                del held[block]
        for block in blocks:
            holders = holders_of.pop(block)
            if len(holders) > 1:
                assert isinstance(holders, OrderedDict)
                del holders[holder]
                holders_of[block] = holders
        if self.pins.owners:
            self.pins.end(blocks, holder)
        if held:
            self.order.note_change(holder)
        else:
            self.holders.pop(holder.sequence_id, None)
            self.order.remove(holder)

    def open_retention(self) -> BlockRetention:
        """Return the retention of the pool; the first call creates it."""
        if self.retention is None:
            from kv_pool.manager.retention.block_retention import BlockRetention

            self.retention = BlockRetention(self.block_pool, self.clock, self.pins.max_pinned_blocks)
        return self.retention

    def repair(self) -> list[KVCacheBlock]:
        """Make all records agree with the blocks of each sequence, before the pool counts references again.

        Returns:
            The blocks of all sequences, each once for each sequence.
        """
        holders_of: dict[KVCacheBlock, OrderedDict[Holder, None]] = {}
        for holder in list(self.holders.values()):
            if not holder.blocks:
                del self.holders[holder.sequence_id]
            for block in holder.blocks:
                holders_of.setdefault(block, OrderedDict())[holder] = None
        for block, holders in holders_of.items():
            for holder in reversed(list(self.holders_of.get(block, ()))):  # the longest holder stays first
                if holder in holders:
                    holders.move_to_end(holder, last=False)
        self.holders_of = {**holders_of}
        self.pins.repair(self.holders_of)
        self.evictions.repair(self.holders)
        self.order.rebuild(self.holders.values())
        return [block for holder in self.holders.values() for block in holder.blocks]

    # ---- choosing sequences to evict -----------------------------------------------------------------

    def choose_victims(
        self,
        priority: int,
        spared: Collection[SequenceId],
        num_blocks: int,
        make_run_check: Callable[[], Callable[[list[BlockId]], bool]] | None = None,
        is_ranked_again: bool = False,
    ) -> list[Holder] | None:
        """Return the first sequences in the order of eviction that free `num_blocks`; None if all do not.

        Args:
            priority: sequences of higher priority are not evicted.
            spared: sequences that are not evicted.
            make_run_check: returns a function that is called with the ids that would become free since its
                last call; evict more sequences while it returns False.
            is_ranked_again: the policy has just ranked the sequences that it had left out.
        """
        victims: list[Holder] = []
        if num_blocks <= 0 and make_run_check is None:
            return victims
        has_run = None if make_run_check is None else make_run_check()
        num_freed = 0
        freed_ids: list[BlockId] = []
        left: dict[KVCacheBlock, int] = {}
        # Closed here: an error in a generator that Python drops would be lost.
        with closing(self.iter_candidates(priority, spared)) as candidates:
            for holder in candidates:
                victims.append(holder)
                for position, block in enumerate(holder.blocks):
                    left[block] = left.get(block, block.ref_cnt) - 1
                    if left[block] == 0 and not self._will_pin(holder, position, block):
                        num_freed += 1
                        freed_ids.append(block.block_id)
                if num_freed >= num_blocks:
                    if has_run is None or has_run(freed_ids):
                        return victims
                    freed_ids.clear()
        if is_ranked_again or not self.order.has_excluded:
            return None
        self.order.rebuild(self.holders.values())  # once, so that the policy may rank those it left out
        return self.choose_victims(priority, spared, num_blocks, make_run_check, True)

    def iter_candidates(self, priority: int, spared: Collection[SequenceId]) -> Generator[Holder, None, None]:
        """Yield the sequences that may be evicted, in the order of eviction. Change none meanwhile.

        Excludes sequences of higher priority, with a pinned block, spared, or frozen by a migration.
        """
        order, pins = self.order, self.pins
        if pins.unpinned:
            was_changing = self.block_pool.is_changing
            self.block_pool.is_changing = True
            returned: list[Holder] = []
            for block in pins.unpinned:
                holders = self.holders_of.get(block, ())
                returned += [holder for holder in holders if holder.queue is order.aside]
            order.bring_back(returned)
            pins.unpinned.clear()
            self.block_pool.is_changing = was_changing
        pinned: list[Holder] = []
        try:
            for holder in order.rank(priority):
                if pins.is_any_pinned(holder.blocks):
                    pinned.append(holder)
                elif holder.sequence_id not in spared and holder.sequence_id not in self.frozen:
                    yield holder
        finally:
            order.set_aside(pinned)

    def _will_pin(self, holder: Holder, position: int, block: KVCacheBlock) -> bool:
        """Return whether retention would pin the block if this sequence, its last holder, released it."""
        return self.retention is not None and self.retention.will_pin(
            RequestId(str(holder.sequence_id)), GroupId(0), position, block
        )

    # ---- checks and look-ups -------------------------------------------------------------------------

    def check_usable(self, sequence_id: Any) -> None:
        """Raise FrozenSequenceError if a migration has frozen the sequence."""
        why = self.frozen.get(sequence_id)
        if why is not None:
            raise FrozenSequenceError(
                f"sequence {sequence_id} cannot be used: {why}; wait until that ends, or cancel it"
            )

    def find(self, sequence_id: Any) -> Holder:
        """Return the sequence. Its id may be of any integer type.

        Raises:
            EvictedSequenceError: the sequence was evicted.
            UnknownSequenceError: the sequence holds no blocks for another reason.
        """
        sequence_id = as_sequence_id("sequence_id", sequence_id)
        holder = self.holders.get(sequence_id)
        if holder is None:
            if sequence_id in self.evictions:
                raise self.evictions.make_error(sequence_id)
            raise UnknownSequenceError(
                f"sequence {sequence_id!r} holds no blocks on device {self.device_id}. Was it freed twice, "
                f"or migrated to another device?"
            )
        return holder

    def find_usable(self, sequence_id: Any) -> Holder:
        """Like `find`, but also raise FrozenSequenceError if a migration has frozen the sequence."""
        if self.frozen:
            self.check_usable(sequence_id)
        return self.find(sequence_id)

    def find_block(self, block_id: Any) -> KVCacheBlock:
        """Return the block, free or in use. Raises InvalidTypeError, InvalidBlockError for a bad id."""
        number = as_int("block_id", block_id)
        total_blocks = len(self.block_pool.blocks) - 1
        if not 0 < number <= total_blocks:
            raise InvalidBlockError(f"block {number} is not one of 1 to {total_blocks}")
        return self.block_pool.blocks[number]

    def find_named(self, block_ids: Any, sequence_id: Any) -> tuple[list[KVCacheBlock], Holder | None]:
        """Return the blocks that the caller names by id, and the sequence that it names, if any.

        The ids may be of any integer type; `sequence_id` may be None.

        Raises:
            InvalidBlockError: a block is held by no sequence, or not by the named one.
            UnknownSequenceError: the named sequence holds no blocks.
            EvictedSequenceError: the named sequence was evicted. Without a name: a block was held by an
                evicted sequence whose owner is not notified yet.
        """
        listed = as_list("block_ids", block_ids)
        holder = None if sequence_id is None else self.find(sequence_id)
        if holder is None and self.evictions:
            self.evictions.check_ids(listed)
        blocks = self.block_pool.blocks
        num_blocks = len(blocks)
        holders_of = self.holders_of
        found = []
        for listed_id in listed:
            block_id = BlockId(as_int("block_ids", listed_id))
            if not 0 < block_id < num_blocks:
                self.find_block(block_id)
            block = blocks[block_id]
            if block not in holders_of:
                why = self.evictions.explain_id(block_id) or "Was it freed twice?"
                raise InvalidBlockError(f"block {block_id} is held by no sequence. {why}")
            if holder is not None and block not in holder.blocks:
                raise InvalidBlockError(f"block {block_id} is not held by sequence {sequence_id}")
            found.append(block)
        return found, holder

    def find_drops(
        self, block_ids: Any, sequence_id: Any
    ) -> tuple[list[KVCacheBlock], dict[Holder, list[KVCacheBlock]]]:
        """Return the arguments of `drop`: each block with its longest holder, or with the named sequence.

        Raises:
            InvalidBlockError: a block is listed twice, is free, or is not held by the named sequence.
            EvictedSequenceError: as `find_named`.
            FrozenSequenceError: a migration has frozen one of the sequences.
        """
        blocks, named = self.find_named(block_ids, sequence_id)
        if len(set(blocks)) != len(blocks):
            twice = next(block for at, block in enumerate(blocks) if block in blocks[:at])
            raise InvalidBlockError(f"block {twice.block_id} is listed twice")
        if named is None:
            drops: dict[Holder, list[KVCacheBlock]] = {}
            holders_of = self.holders_of
            for block in blocks:
                drops.setdefault(next(iter(holders_of[block])), []).append(block)
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
                for holder in self.holders_of.get(block, ()):
                    self.check_usable(holder.sequence_id)


@mypyc_attr(allow_interpreted_subclasses=True)
class AccessOrder:
    """The sequences in the order of eviction for an LRU policy. `RankedOrder` keeps that of another policy.

        queues    one for each priority, least recently accessed first: all sequences, except those
        aside     that had a pinned block when they were next, until one of their blocks is unpinned

    So a search finds the next sequence at once, however many there are, and passes each pinned one once. An
    unpinned one that returns costs the next search O(n log n) for the n sequences accessed before it.

    Attributes:
        has_excluded: the policy has left out a sequence, which it may rank after `rebuild`.
    """

    def __init__(self) -> None:
        self._queues: list[OrderedDict[SequenceId, Holder]] = [OrderedDict() for _ in (NORMAL, HIGH, URGENT)]
        self.aside: OrderedDict[SequenceId, Holder] = OrderedDict()
        self.has_excluded = False

    def note_access(self, holder: Holder) -> None:
        """Record that a sequence was accessed, or is new. O(1)."""
        queue = self._queues[holder.priority]
        if holder.queue is queue:
            queue.move_to_end(holder.sequence_id)
        else:
            self._move(holder, queue)

    def note_change(self, holder: Holder) -> None:
        """Record that a sequence has other blocks. O(1)."""

    def remove(self, holder: Holder) -> None:
        """Remove a sequence that holds no blocks any more. No-op if it is not there. O(1)."""
        holder.ticket = 0
        if holder.queue is not None:
            holder.queue.pop(holder.sequence_id, None)
            holder.queue = None

    def rebuild(self, holders: Iterable[Holder]) -> None:
        """Start again with these sequences, least recently accessed first."""
        for queue in (self.aside, *self._queues):
            queue.clear()
        for holder in list(holders):
            holder.queue = None
            self.note_access(holder)

    def rank(self, priority: int) -> Iterator[Holder]:
        """Yield the sequences of at most this priority, without those aside, in the order of eviction."""
        return chain.from_iterable(queue.values() for queue in self._queues[: priority + 1])

    def set_aside(self, holders: Sequence[Holder]) -> None:
        """Leave out these sequences until `bring_back`, or until they are accessed."""
        for holder in holders:
            self._move(holder, self.aside)

    def bring_back(self, returned: Sequence[Holder]) -> None:
        """Put sequences that were aside back into their places in front of those accessed later."""
        for number in {holder.priority for holder in returned}:
            queue = self._queues[number]
            before = [holder for holder in returned if holder.priority == number]
            newest = max([holder.last_access_time for holder in before])
            for holder in queue.values():
                if holder.last_access_time >= newest:
                    break
                before.append(holder)
            before.sort(key=attrgetter("last_access_time"))  # ties keep their order
            for holder in reversed(before):
                self._move(holder, queue)
                queue.move_to_end(holder.sequence_id, last=False)

    def _move(self, holder: Holder, queue: OrderedDict[SequenceId, Holder]) -> None:
        """Move a sequence to the end of a queue."""
        holder.ticket = 0
        if holder.queue is not None:  # no call until it is in again, so no interrupt in between
            del holder.queue[holder.sequence_id]
        queue[holder.sequence_id] = holder
        holder.queue = queue


def import_retention() -> None:
    """Import what `Holdings.open_retention` needs. Call it first without the pool's lock: it takes long."""
    import kv_pool.manager.retention.block_retention  # noqa: F401


def as_sequence_id(name: str, sequence_id: Any) -> SequenceId:
    """Return a sequence id as an int. Raise InvalidTypeError if it is not an integer."""
    return SequenceId(as_int(name, sequence_id))


def as_new_id(name: str, sequence_id: Any) -> SequenceId:
    """Like `as_sequence_id`, but also raise InvalidArgumentError for a negative id (`NO_SEQUENCE` is -1)."""
    new_id = as_sequence_id(name, sequence_id)
    if new_id < 0:
        raise InvalidArgumentError(f"{name} is {new_id}; ids are 0 or more, -1 stands for none")
    return new_id
