"""`Tier`: an LRU set of block keys, and the interface of tiers; `TierStack`: what moves between tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from kv_pool.core.kv_events import MEDIUM_CPU
from kv_pool.errors import CopyFailedError, InvalidArgumentError, TierError
from kv_pool.ids import BlockHashWithGroupId, BlockId, SlotId
from kv_pool.loggers import get_logger
from kv_pool.reports.tiers import TierStatistics
from kv_pool.storage.block_storage import BlockStorage

_logger = get_logger(__name__)


class TierRead(NamedTuple):
    """The result of `Tier.read`; valid until the next call of the tier.

    Attributes:
        keys: the keys that were read, in the requested order.
        storage: the storage with the bytes; None from a tier without bytes.
        block_ids: block ids in that storage, one for each key.
        failed: the keys that could not be read; the tier no longer has them.
    """

    keys: Sequence[BlockHashWithGroupId]
    storage: BlockStorage | None
    block_ids: Sequence[BlockId]
    failed: Sequence[BlockHashWithGroupId] = ()


class Tier:
    """An LRU set of block keys without bytes, for simulations; the base class of tiers with bytes.

        >>> from kv_pool.tiers.tier import Tier
        >>> tier = Tier(2)
        >>> tier.put([b"first", b"second"])
        [b'first', b'second']
        >>> tier.touch([b"first", b"third"])
        [b'third']
        >>> tier.list_next_evicted(1)
        [b'second']

    `HostTier` and `DiskTier` also store bytes. A tier moves no blocks by itself; `TieredCache` moves them
    between tiers.

    Args:
        capacity: maximum number of blocks, at least 1.
        medium: the medium of its blocks in events and statistics: CPU or STORAGE.
        block_bytes: size of a block in the statistics.

    Attributes:
        has_bytes: True if the tier stores bytes.
        batch_blocks: maximum number of blocks per `put` or `read`; 0 for no limit.
        held: how often each key is held, and so exempt from eviction; shared by the tiers of a `TierStack`.
        parents: what `LowerTiers.list_parents` returns of keys; shared with a `TieredCache`. A tier that
            survives its process stores it with new blocks.

    A key is a block hash with its KV cache group. Not thread-safe.
    """

    has_bytes = False
    batch_blocks = 0

    def __init__(self, capacity: int, medium: str = MEDIUM_CPU, block_bytes: int = 0) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise InvalidArgumentError(f"capacity is {capacity!r}; a tier holds at least 1 block")
        self.capacity = capacity
        self.medium = medium
        # Not a plain dict: finding its first key costs O(keys removed before it), each time.
        self._slot_of: OrderedDict[BlockHashWithGroupId, SlotId] = OrderedDict()
        self._num_slots = 0  # the slots that have been used at least once
        self._free_slots: list[SlotId] = []
        self.held: dict[BlockHashWithGroupId, int] = {}
        self.parents: dict[BlockHashWithGroupId, tuple[bytes | None, int]] = {}
        self._counts = TierStatistics(medium, capacity, block_bytes=block_bytes)

    # ---- looking ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    @property
    def index(self) -> Mapping[BlockHashWithGroupId, object]:
        """A live mapping whose keys are the tier's keys, for many look-ups."""
        return self._slot_of

    def list_keys(self) -> list[BlockHashWithGroupId]:
        """Return all keys, the least recently used first. O(blocks)."""
        return list(self._slot_of)

    def list_next_evicted(self, num_blocks: int) -> list[BlockHashWithGroupId]:
        """Return the next keys to evict; fewer than `num_blocks` if the others are held.

        Cost: O(num_blocks + number of held keys).
        """
        found: list[BlockHashWithGroupId] = []
        if num_blocks > 0:
            held = self.held
            for key in self._slot_of:
                if not held or key not in held:
                    found.append(key)
                    if len(found) == num_blocks:
                        break
        return found

    def get_statistics(self) -> TierStatistics:
        """Return a copy of the current statistics."""
        return msgspec.structs.replace(self._counts, num_blocks=len(self))

    # ---- changing --------------------------------------------------------------------------------

    def touch(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Mark these keys as used now, in this order.

        Returns:
            The keys that the tier does not have, each once.
        """
        slot_of = self._slot_of
        move_to_end = slot_of.move_to_end
        missing: list[BlockHashWithGroupId] = []
        for key in keys:
            if key in slot_of:
                move_to_end(key)
            else:
                missing.append(key)
        return missing if len(missing) < 2 else list(dict.fromkeys(missing))

    def put(
        self,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None = None,
        block_ids: Sequence[BlockId] = (),
    ) -> list[BlockHashWithGroupId]:
        """Store new blocks and mark them as most recently used.

        Args:
            keys: distinct keys that the tier does not have; at most the free capacity and `batch_blocks`.
            storage, block_ids: the source of the bytes, one block for each key; omitted for a tier without
                bytes.
        Returns:
            The keys that were stored: all except blocks that could not be written, which are counted.
        """
        slots = self._list_next_slots(len(keys))
        num_reused = min(len(keys), len(self._free_slots))
        # First: an interruption may lose a slot, but must not give it to two keys.
        del self._free_slots[len(self._free_slots) - num_reused :]
        self._num_slots += len(keys) - num_reused
        self._slot_of.update(zip(keys, slots, strict=True))
        self._counts.num_stored += len(keys)
        return list(keys)

    def read(self, keys: Sequence[BlockHashWithGroupId]) -> TierRead:
        """Return the bytes of blocks that the tier has. Does not mark them as used; `touch` does.

        A block that cannot be read, or is damaged, is removed and counted.
        """
        self._counts.num_read += len(keys)
        return TierRead(keys, None, ())

    def load(
        self, keys: Sequence[BlockHashWithGroupId], storage: BlockStorage | None, block_ids: Sequence[BlockId]
    ) -> list[BlockHashWithGroupId]:
        """Copy any number of the tier's blocks into blocks of a storage; otherwise like `read`.

        Returns:
            The keys that could not be read. The content of their target blocks is undefined.
        Raises:
            CopyFailedError: copying into the storage failed.
        """
        target_of = dict(zip(keys, block_ids, strict=storage is not None))
        failed: list[BlockHashWithGroupId] = []
        step = self.batch_blocks or len(keys) or 1
        for start in range(0, len(keys), step):
            read = self.read(keys[start : start + step])
            failed.extend(read.failed)
            if storage is not None and read.storage is not None and read.keys:
                targets = [target_of[key] for key in read.keys]
                read.storage.copy_to(storage, list(zip(read.block_ids, targets, strict=True)))
        return failed

    def remove(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Remove these keys. Return the ones that the tier had, each once."""
        removed: list[BlockHashWithGroupId] = []
        for key in keys:
            if key in self._slot_of:
                self._empty_slot(self._slot_of.pop(key), key)
                removed.append(key)
        self._counts.num_removed += len(removed)
        return removed

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Remove blocks with wrong content for good: they do not come back after a restart or crash."""
        return self.remove(keys)

    def clear(self) -> None:
        """Remove all blocks for good."""
        self._counts.num_removed += len(self)
        self._slot_of.clear()
        self._num_slots = 0
        self._free_slots.clear()

    def close(self) -> None:
        """Release files and memory. Only `close` may be called afterwards."""

    # ---- slots -----------------------------------------------------------------------------------

    def _list_next_slots(self, num_slots: int) -> list[SlotId]:
        """Return the slots that the next `put` of this many keys assigns, in order. O(num_slots)."""
        free = self._free_slots[: -num_slots - 1 : -1] if num_slots else []
        new = range(self._num_slots, self._num_slots + num_slots - len(free))
        return [*free, *cast("Iterable[SlotId]", new)]

    def _empty_slot(self, slot: SlotId, key: BlockHashWithGroupId) -> None:
        """Free the slot of a key that was removed."""
        self._free_slots.append(slot)


class TierStep(NamedTuple):
    """An order to one tier: make room, then store.

    Attributes:
        level: the tier's index; 0 is the fastest.
        stored: the keys to store: from the next faster tier, or from the pool for the fastest.
        evicted: the keys to remove before.
    """

    level: int
    stored: list[BlockHashWithGroupId]
    evicted: Sequence[BlockHashWithGroupId] = ()


LeveledKeys = tuple[int, Mapping[BlockHashWithGroupId, object]]
"""The index of a tier, and a mapping whose keys it has."""

NO_IDS: Mapping[BlockHashWithGroupId, BlockId] = {}


class TierListener(Protocol):
    """Learns which keys enter and leave tiers, in order."""

    def announce_stored(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """A tier of this medium has gained these keys."""

    def announce_removed(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """A tier of this medium has lost these keys."""


class TierStack:
    """The tiers below a pool, fastest first. What a tier evicts moves to the next one.

        pool   -- stored -->   tiers[0]   -- evicted -->   tiers[1]   -- evicted -->   dropped

    `plan` yields steps, and `apply` executes a step. A stack whose tiers have bytes plans for itself. A stack
    of tiers without bytes plans for others, of equal capacities, that execute its steps by
    `apply_elsewhere`.

    Args:
        tiers: fastest first; the stack makes their holds common to all of them.
        listener: learns which keys enter and leave a tier.

    Attributes:
        tiers: the tiers.
        num_dropped: number of blocks that were not stored, because all blocks of the tier were held or the
            copy failed.

    A key may be in several tiers. Not thread-safe.
    """

    def __init__(self, tiers: Sequence[Tier], listener: TierListener | None = None) -> None:
        self.tiers = tuple(tiers)
        self.listener = listener
        self.num_dropped = 0
        self._held: dict[BlockHashWithGroupId, int] = {}
        for tier in self.tiers:
            tier.held = self._held

    # ---- looking ---------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return self.find_tier(key) is not None

    def find_tier(self, key: object) -> int | None:
        """Return the index of the fastest tier that has the key, or None. Changes nothing."""
        for level, tier in enumerate(self.tiers):
            if key in tier:
                return level
        return None

    def list_indexes(self) -> list[LeveledKeys]:
        """Return the index of each tier with a mapping whose keys it has, for many look-ups.

        Fastest first, and valid until a change.
        """
        return [(level, tier.index) for level, tier in enumerate(self.tiers)]

    # ---- using -----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Mark these keys as used now in every tier, in this order."""
        for tier in self.tiers:
            tier.touch(keys)

    def hold(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Exempt these keys from eviction until `release`, and mark them as used now. Holds are counted."""
        self.touch(keys)
        for key in keys:
            self._held[key] = self._held.get(key, 0) + 1

    def release(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Undo one `hold` of each of these keys."""
        for key in keys:
            if self._held[key] > 1:
                self._held[key] -= 1
            else:
                del self._held[key]

    def hold_only(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Replace all holds by one hold of each of these keys, and mark them as used now, for a repair."""
        self._held.clear()
        self.hold(keys)

    # ---- moving down -----------------------------------------------------------------------------

    def plan(self, level: int, keys: Iterable[BlockHashWithGroupId]) -> Iterator[TierStep]:
        """Yield the steps that store keys in a tier as most recently used, those of lower tiers first.

        Apply each step before the next one is planned. Keys that the tier has are only marked as used.
        """
        tier = self.tiers[level]
        new = tier.touch(keys)
        for start in range(0, len(new), tier.capacity):
            some = new[start : start + tier.capacity]
            num_missing = len(tier) + len(some) - tier.capacity
            evicted = tier.list_next_evicted(num_missing)
            if evicted and level + 1 < len(self.tiers):
                yield from self.plan(level + 1, evicted)
            num_held = num_missing - len(evicted)
            if num_held > 0:
                self.num_dropped += num_held
                del some[len(some) - num_held :]
            yield TierStep(level, some, evicted)

    def plan_room(self, level: int, num_blocks: int) -> Iterator[TierStep]:
        """Yield the steps that evict up to `num_blocks` blocks of a tier, which move to the next one."""
        evicted = self.tiers[level].list_next_evicted(num_blocks)
        if evicted and level + 1 < len(self.tiers):
            yield from self.plan(level + 1, evicted)
        if evicted:
            yield TierStep(level, [], evicted)

    def apply(
        self,
        step: TierStep,
        storage: BlockStorage | None = None,
        id_of: Mapping[BlockHashWithGroupId, BlockId] = NO_IDS,
    ) -> list[BlockHashWithGroupId]:
        """Execute a step that this stack has planned.

        Args:
            storage, id_of: the source of the bytes for the first tier, and the block of each stored key.
        Returns:
            The keys that could not be stored.
        """
        tier, keys = self.tiers[step.level], step.stored
        if step.evicted:
            self._remove(tier, step.evicted)
        if not tier.has_bytes:
            self.announce_stored(tier, tier.put(keys))
            return []
        source = self.tiers[step.level - 1] if step.level else None
        sizes = [one.batch_blocks for one in (tier, source) if one is not None and one.batch_blocks]
        size = min(sizes, default=len(keys) or 1)
        there: set[BlockHashWithGroupId] = set()
        for start in range(0, len(keys), size):
            some = keys[start : start + size]
            if source is None:
                read = TierRead(some, storage, [id_of[key] for key in some])
            else:
                read = source.read(some)
                self.announce_removed(source, read.failed)
            try:
                stored = tier.put(read.keys, read.storage, read.block_ids)
            except CopyFailedError as error:
                _logger.warning("%d blocks were not offloaded: %s", len(read.keys), error)
                self.num_dropped += len(read.keys)
                continue
            self.announce_stored(tier, stored)
            there.update(stored)
        return [key for key in keys if key not in there]

    def apply_elsewhere(
        self,
        step: TierStep,
        storage: BlockStorage | None = None,
        id_of: Mapping[BlockHashWithGroupId, BlockId] = NO_IDS,
    ) -> list[BlockHashWithGroupId]:
        """Execute a step that another stack has planned, otherwise like `apply`.

        The tiers here may lack keys that were lost, and have others. One that is fuller than the other stack
        knew evicts by itself.

        Returns:
            The keys of the step that the tier does not have, and those that it has evicted for them.
        """
        if step.level >= len(self.tiers):
            return []
        tier = self.tiers[step.level]
        self._remove(tier, step.evicted)
        new = tier.touch(step.stored)
        lost: list[BlockHashWithGroupId] = []
        if step.level:
            source = self.tiers[step.level - 1]
            lost = [key for key in new if key not in source]
            new = [key for key in new if key in source]
        evicted = tier.list_next_evicted(len(tier) + len(new) - tier.capacity)
        return [*lost, *evicted, *self.apply(TierStep(step.level, new, evicted), storage, id_of)]

    # ---- moving up -------------------------------------------------------------------------------

    def load_into(
        self, storage: BlockStorage | None, target_of: Mapping[BlockHashWithGroupId, BlockId]
    ) -> list[BlockHashWithGroupId]:
        """Copy blocks into blocks of a storage, each from the fastest tier that has it.

        Returns:
            The keys that no tier has or could read. The content of their target blocks is undefined.
        Raises:
            CopyFailedError: copying into the storage failed. The content of all target blocks is undefined.
        """
        left = list(target_of)
        for tier in self.tiers:
            index = tier.index
            here = [key for key in left if key in index]
            if here:
                try:
                    failed = tier.load(here, storage, [target_of[key] for key in here])
                finally:
                    self.announce_removed(tier, [key for key in here if key not in index])
                loaded = set(here).difference(failed)
                left = [key for key in left if key not in loaded]
        return left

    # ---- removing --------------------------------------------------------------------------------

    def remove(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove keys from every tier."""
        for tier in self.tiers:
            self._remove(tier, keys)

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Remove wrong content from every tier for good. Raises TierError after trying all tiers."""
        listed = list(dict.fromkeys(keys))
        failures: list[TierError] = []
        for tier in self.tiers:
            removed = [key for key in listed if key in tier]
            try:
                tier.forget(listed)
            except TierError as error:
                failures.append(error)
            self.announce_removed(tier, removed)
        if failures:
            raise failures[0]

    def clear(self) -> None:
        """Remove everything for good, without notice. Raises TierError after trying all tiers."""
        failures: list[TierError] = []
        for tier in self.tiers:
            try:
                tier.clear()
            except TierError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def drop_last_tier(self) -> Tier:
        """Continue without the slowest tier. Return it."""
        *tiers, last = self.tiers
        self.tiers = tuple(tiers)
        self.announce_removed(last, last.list_keys())
        return last

    def close(self) -> None:
        """Close the tiers. Blocks on disk can be found again."""
        for tier in self.tiers:
            tier.close()

    # ---- notices ---------------------------------------------------------------------------------

    def announce_stored(self, tier: Tier, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Notify the listener of keys that a tier has gained."""
        if self.listener is not None and keys:
            self.listener.announce_stored(tier.medium, keys)

    def announce_removed(self, tier: Tier, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Notify the listener of keys that a tier has lost."""
        if self.listener is not None and keys:
            self.listener.announce_removed(tier.medium, keys)

    def _remove(self, tier: Tier, keys: Iterable[BlockHashWithGroupId]) -> None:
        self.announce_removed(tier, tier.remove(keys))
