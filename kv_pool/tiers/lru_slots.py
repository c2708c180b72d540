"""`LruSlots`: which key is in which slot of a tier, and which was used longest ago."""

from collections import OrderedDict
from collections.abc import Iterable

from kv_pool.ids import BlockHashWithGroupId


class LruSlots:
    """Keys in the order of their last use, each in a slot of its own.

    No call is made between changes that belong together, so a signal handler's exception separates none.

    Attributes:
        slot_of: the slots by key, the key that was used longest ago first.
        num_slots: slots 0 to num_slots - 1 have been used so far.
    """

    def __init__(self) -> None:
        # Not a plain dict: taking its first key is O(keys taken before), again and again.
        self.slot_of: OrderedDict[BlockHashWithGroupId, int] = OrderedDict()
        self.num_slots = 0
        self._free: list[int] = []

    def add(self, key: BlockHashWithGroupId) -> int:
        """Give a key that is not here a slot, as the one used last. O(1)."""
        if self._free:
            slot = self._free[-1]
            self.slot_of[key] = slot
            del self._free[-1]
        else:
            slot = self.num_slots
            self.slot_of[key] = slot
            self.num_slots = slot + 1
        return slot

    def list_next(self, num_slots: int) -> list[int]:
        """Return the slots that the next calls of `add` would give, in order. O(num_slots)."""
        free = self._free[: -num_slots - 1 : -1] if num_slots else []
        return [*free, *range(self.num_slots, self.num_slots + num_slots - len(free))]

    def remove(self, key: BlockHashWithGroupId) -> int:
        """The slot of a key that is here, free from now on. O(1)."""
        slot_of = self.slot_of
        slot = slot_of[key]
        del slot_of[key]
        self._free += [slot]
        return slot

    def clear(self) -> None:
        """No key has a slot."""
        self.slot_of.clear()
        self._free.clear()
        self.num_slots = 0

    def restore(self, slots: Iterable[tuple[BlockHashWithGroupId, int]]) -> None:
        """Let these keys, the one used longest ago first, be in these slots, and no others."""
        self.clear()
        self.slot_of.update(slots)
        self.num_slots = max(self.slot_of.values(), default=-1) + 1
        taken = set(self.slot_of.values())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in taken]

    def list_free(self) -> list[int]:
        """Slots that were used and hold nothing now."""
        return list(self._free)
