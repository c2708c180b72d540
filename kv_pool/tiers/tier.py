"""`Tier`: the interface of tiers; an LRU set of block keys with a fixed capacity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from kv_pool.core.kv_events import MEDIUM_CPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, BlockId, SlotId
from kv_pool.storage.block_storage import BlockStorage


class TierStatistics(msgspec.Struct):
    """The statistics of a tier. Counts are in blocks.

    Attributes:
        medium: CPU or STORAGE.
        capacity, num_blocks: maximum and current number of blocks.
        block_bytes: size of a stored block; 0 for a tier without bytes.
        num_stored: blocks written into the tier.
        num_read: blocks read from the tier.
        num_removed: blocks that left the tier, for any reason.
        num_write_errors: blocks not stored because writing failed.
        num_read_errors: blocks lost because reading failed or they were damaged.
    """

    medium: str
    capacity: int
    num_blocks: int = 0
    block_bytes: int = 0
    num_stored: int = 0
    num_read: int = 0
    num_removed: int = 0
    num_write_errors: int = 0
    num_read_errors: int = 0


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


class LruSlots:
    """A map from keys to slots, ordered by last use.

    Attributes:
        slot_of: slot by key, the least recently used key first.
        num_slots: slots 0 to num_slots - 1 have been used at least once.
    """

    def __init__(self) -> None:
        # Not a plain dict: finding its first key costs O(keys removed before it), each time.
        self.slot_of: OrderedDict[BlockHashWithGroupId, SlotId] = OrderedDict()
        self.num_slots = 0
        self._free: list[SlotId] = []

    def add(self, key: BlockHashWithGroupId) -> SlotId:
        """Assign a slot to a new key and mark it as most recently used. Return the slot. O(1)."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = SlotId(self.num_slots)
            self.num_slots += 1
        self.slot_of[key] = slot
        return slot

    def list_next(self, num_slots: int) -> list[SlotId]:
        """Return the slots that the next calls of `add` would assign, in order. O(num_slots)."""
        free = self._free[: -num_slots - 1 : -1] if num_slots else []
        new = range(self.num_slots, self.num_slots + num_slots - len(free))
        return [*free, *cast("Iterable[SlotId]", new)]

    def remove(self, key: BlockHashWithGroupId) -> SlotId:
        """Remove a key and free its slot. Return the slot. The key must be present. O(1)."""
        slot = self.slot_of.pop(key)
        self._free.append(slot)
        return slot

    def restore(self, slots: Iterable[tuple[BlockHashWithGroupId, SlotId]]) -> None:
        """Replace the content by these (key, slot) pairs, the least recently used key first."""
        self.slot_of = OrderedDict(slots)
        self.num_slots = max(self.slot_of.values(), default=-1) + 1
        taken = set(self.slot_of.values())
        self._free = [SlotId(slot) for slot in range(self.num_slots - 1, -1, -1) if slot not in taken]

    def list_free(self) -> list[SlotId]:
        """Return the slots below `num_slots` that are free."""
        return list(self._free)


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

    Attributes:
        has_bytes: True if the tier stores bytes.
        batch_blocks: maximum number of blocks per `put` or `read`; 0 for no limit.
        held: how often each key is held; shared by the tiers of a `TierStack`.
        parents: what `LowerTiers.list_parents` returns of keys; shared with a `TieredCache`. A tier that
            survives its process stores it with new blocks.

    A key is a block hash with its KV cache group. Not thread-safe.
    """

    has_bytes = False
    batch_blocks = 0

    def __init__(self, capacity: int, medium: str = MEDIUM_CPU) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise InvalidArgumentError(f"capacity is {capacity!r}; a tier holds at least 1 block")
        self.capacity = capacity
        self.medium = medium
        self._slots = LruSlots()
        self.held: dict[BlockHashWithGroupId, int] = {}
        self.parents: dict[BlockHashWithGroupId, tuple[bytes | None, int]] = {}
        self._counts = TierStatistics(medium, capacity)

    # ---- looking ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots.slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slots.slot_of

    @property
    def index(self) -> Mapping[BlockHashWithGroupId, object]:
        """A live mapping whose keys are the tier's keys, for many look-ups."""
        return self._slots.slot_of

    def list_keys(self) -> list[BlockHashWithGroupId]:
        """Return all keys, the least recently used first. O(blocks)."""
        return list(self._slots.slot_of)

    def list_next_evicted(self, num_blocks: int) -> list[BlockHashWithGroupId]:
        """Return the next keys to evict; fewer than `num_blocks` if the others are held.

        Cost: O(num_blocks + number of held keys).
        """
        found: list[BlockHashWithGroupId] = []
        if num_blocks > 0:
            held = self.held
            for key in self._slots.slot_of:
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
        slot_of = self._slots.slot_of
        move_to_end = slot_of.move_to_end
        missing: list[BlockHashWithGroupId] = []
        for key in keys:
            if key in slot_of:
                move_to_end(key)
            else:
                missing.append(key)
        return missing if len(missing) < 2 else list(dict.fromkeys(missing))

    def hold(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Exempt these keys from eviction until `release`. Holds are counted per key."""
        for key in keys:
            self.held[key] = self.held.get(key, 0) + 1

    def release(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Undo one `hold` of each of these keys."""
        for key in keys:
            if self.held[key] > 1:
                self.held[key] -= 1
            else:
                del self.held[key]

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
        add = self._slots.add
        for key in keys:
            add(key)
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
        slots = self._slots
        removed: list[BlockHashWithGroupId] = []
        for key in keys:
            if key in slots.slot_of:
                slots.remove(key)
                removed.append(key)
        self._counts.num_removed += len(removed)
        return removed

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Remove blocks with wrong content for good: they do not come back after a restart or crash."""
        return self.remove(keys)

    def clear(self) -> None:
        """Remove all blocks for good."""
        self._counts.num_removed += len(self)
        self._slots = LruSlots()

    def close(self) -> None:
        """Release files and memory. Only `close` may be called afterwards."""
