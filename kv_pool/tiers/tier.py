"""`Tier`: so many blocks by key, those used longest ago the first to go; what every tier promises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kv_pool.core.kv_events import MEDIUM_CPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.lru_slots import LruSlots


class TierStatistics(msgspec.Struct):
    """What a tier holds, and what happened in it. Counts are of blocks.

    Attributes:
        medium: CPU or STORAGE.
        capacity, num_blocks: how many it may hold, and holds.
        block_bytes: that each takes there; 0 for a tier without bytes.
        num_stored: written into it.
        num_read: read from it.
        num_removed: that it holds no more, for whatever reason.
        num_write_errors: not stored, since they could not be written.
        num_read_errors: lost, since they could not be read, or were not what had been written.
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
    """Where the bytes of blocks can be copied from, until the tier is called again.

    Attributes:
        keys: those that were read, in the order in which they were asked for.
        storage: None from a tier without bytes.
        block_ids: in that storage, one for each key.
        failed: keys that could not be read; the tier does not have them any more.
    """

    keys: Sequence[BlockHashWithGroupId]
    storage: BlockStorage | None
    block_ids: Sequence[int]
    failed: Sequence[BlockHashWithGroupId] = ()


class Tier:
    """Remembers which blocks it has, and has no bytes of them: for a pool whose blocks have none.

        >>> from kv_pool.tiers.tier import Tier
        >>> tier = Tier(2)
        >>> tier.put([b"first", b"second"])
        [b'first', b'second']
        >>> tier.touch([b"first", b"third"])
        [b'third']
        >>> tier.list_next_out(1)
        [b'second']

    `HostTier` and `DiskTier` keep bytes as well. `TieredCache` moves blocks between tiers; a tier moves
    nothing by itself.

    Args:
        capacity: blocks it may hold, at least 1.
        medium: of its blocks in events and statistics: CPU or STORAGE.

    Attributes:
        has_bytes: it keeps the bytes of blocks.
        batch_blocks: so many blocks at most are put or read by one call; 0 for no limit.

    A key is a block hash with its KV cache group. Not safe for several threads.
    """

    has_bytes = False
    batch_blocks = 0

    def __init__(self, capacity: int, medium: str = MEDIUM_CPU) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise InvalidArgumentError(f"capacity is {capacity!r}; a tier holds at least 1 block")
        self.capacity = capacity
        self.medium = medium
        self._slots = LruSlots()
        self._held: dict[BlockHashWithGroupId, int] = {}
        self._counts = TierStatistics(medium, capacity)

    # ---- looking ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots.slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slots.slot_of

    @property
    def index(self) -> Mapping[BlockHashWithGroupId, object]:
        """What it has, by key: to be looked up many keys in. Changes as the tier does."""
        return self._slots.slot_of

    def list_keys(self) -> list[BlockHashWithGroupId]:
        """The keys it has, the one used longest ago first. O(blocks)."""
        return list(self._slots.slot_of)

    def list_next_out(self, num_blocks: int) -> list[BlockHashWithGroupId]:
        """The keys to go next; fewer where the others are held. O(num_blocks + held ones)."""
        found: list[BlockHashWithGroupId] = []
        if num_blocks > 0:
            held = self._held
            for key in self._slots.slot_of:
                if not held or key not in held:
                    found.append(key)
                    if len(found) == num_blocks:
                        break
        return found

    def get_statistics(self) -> TierStatistics:
        """What it holds and what happened, as of now."""
        return msgspec.structs.replace(self._counts, num_blocks=len(self))

    # ---- changing --------------------------------------------------------------------------------

    def touch(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Count these keys as used now, in this order.

        Returns:
            Those that it has not, each once.
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
        """Let these keys not be among the next to go, until `release`. A key can be held several times."""
        hold_onto(self._held, keys, [])

    def release(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Undo one `hold` of each of these keys."""
        release_out_of(self._held, list(keys))

    def share_holds(self, held: dict[BlockHashWithGroupId, int]) -> None:
        """Let this say from now on what is held, and how often: for tiers that hold the same keys."""
        self._held = held

    def put(
        self,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None = None,
        block_ids: Sequence[int] = (),
    ) -> list[BlockHashWithGroupId]:
        """Store blocks that it has not, as the ones used last.

        Args:
            keys: distinct; there is room for all, and no more than `batch_blocks`.
            storage, block_ids: where their bytes are, one block for each key; nothing for a tier without.
        Returns:
            Those that it has now: all, but for blocks that could not be written, which are counted.
        """
        add = self._slots.add
        num_before = len(self)
        try:
            for key in keys:
                add(key)
        finally:
            self._counts.num_stored += len(self) - num_before
        return list(keys)

    def read(self, keys: Sequence[BlockHashWithGroupId]) -> TierRead:
        """The bytes of blocks that it has. How often they are used is not counted: that is `touch`.

        A block that can not be read, or is not what was written, is removed and counted.
        """
        self._counts.num_read += len(keys)
        return TierRead(keys, None, ())

    def load(
        self, keys: Sequence[BlockHashWithGroupId], storage: BlockStorage | None, block_ids: Sequence[int]
    ) -> list[BlockHashWithGroupId]:
        """Copy blocks that it has, however many, over blocks of a storage; otherwise as `read`.

        Returns:
            Keys that could not be read. Their targets may hold anything.
        Raises:
            CopyFailedError: the storage did not take them.
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
        """Forget these keys; those that it had, each once."""
        slots = self._slots
        removed: list[BlockHashWithGroupId] = []
        num_before = len(self)
        try:
            for key in keys:
                if key in slots.slot_of:
                    slots.remove(key)
                    removed.append(key)
        finally:
            self._counts.num_removed += num_before - len(self)
        return removed

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """`remove` for content that is wrong: it does not come back, whatever happens after this call."""
        return self.remove(keys)

    def clear(self) -> None:
        """`forget` everything."""
        emptied = LruSlots()
        num_removed = len(self)
        self._slots = emptied  # no call in between
        self._counts.num_removed += num_removed

    def close(self) -> None:
        """Let go of files and memory. Nothing else is called afterwards but this."""


def hold_onto(
    held: dict[BlockHashWithGroupId, int],
    keys: Iterable[BlockHashWithGroupId],
    onto: list[BlockHashWithGroupId],
) -> None:
    """Count a hold more for each of these keys; each is appended to `onto` in the same step."""
    for key in keys:
        num_holds = held.get(key, 0)
        held[key] = num_holds + 1  # no call in between
        onto += [key]


def release_out_of(held: dict[BlockHashWithGroupId, int], keys: list[BlockHashWithGroupId]) -> None:
    """Count a hold less for each of these keys; each is off the list in the same step."""
    while keys:
        key = keys[-1]
        if held[key] > 1:
            held[key] -= 1
        else:
            del held[key]
        del keys[-1]
