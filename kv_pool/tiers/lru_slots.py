"""`LruSlots`: maps the keys of a tier to slots, in least-recently-used order."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

from kv_pool.ids import BlockHashWithGroupId, SlotId


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

    def clear(self) -> None:
        """Remove all keys and forget all slots."""
        self.slot_of.clear()
        self._free.clear()
        self.num_slots = 0

    def restore(self, slots: Iterable[tuple[BlockHashWithGroupId, SlotId]]) -> None:
        """Replace the content by these (key, slot) pairs, the least recently used key first."""
        self.clear()
        self.slot_of.update(slots)
        self.num_slots = max(self.slot_of.values(), default=-1) + 1
        taken = set(self.slot_of.values())
        self._free = [SlotId(slot) for slot in range(self.num_slots - 1, -1, -1) if slot not in taken]

    def list_free(self) -> list[SlotId]:
        """Return the slots below `num_slots` that are free."""
        return list(self._free)
