"""`TierStack`: which keys are in which tier, the plan of what moves down, and its execution."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kv_pool.errors import CopyFailedError, TierError
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.tier import Tier, TierRead

_logger = logging.getLogger(__name__)


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

    def list_indexes(self) -> list[Mapping[BlockHashWithGroupId, object]]:
        """Return mappings whose keys are in a tier, for many look-ups. Valid until a change."""
        return [tier.index for tier in self.tiers]

    # ---- using -----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Mark these keys as used now in every tier, in this order."""
        for tier in self.tiers:
            tier.touch(keys)

    def hold(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Exempt these keys from eviction until `release`, and mark them as used now. Holds are counted."""
        self.touch(keys)
        self.tiers[0].hold(keys)

    def release(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Undo one `hold` of each of these keys."""
        self.tiers[0].release(keys)

    def hold_only(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Replace all holds by one hold of each of these keys, for a repair."""
        self._held.clear()
        self.tiers[0].hold(keys)

    # ---- moving down -----------------------------------------------------------------------------

    def plan(self, level: int, keys: Sequence[BlockHashWithGroupId]) -> Iterator[TierStep]:
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
        self, step: TierStep, storage: BlockStorage | None = None, block_ids: Sequence[BlockId] = ()
    ) -> list[BlockHashWithGroupId]:
        """Execute a step that this stack has planned.

        Args:
            storage, block_ids: the source of the bytes for the first tier, one block for each stored key.
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
                read = TierRead(some, storage, block_ids[start : start + size])
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
        self, step: TierStep, storage: BlockStorage | None = None, block_ids: Sequence[BlockId] = ()
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
        id_of = dict(zip(step.stored, block_ids, strict=True)) if block_ids else {}
        lost: list[BlockHashWithGroupId] = []
        if step.level:
            source = self.tiers[step.level - 1]
            lost = [key for key in new if key not in source]
            new = [key for key in new if key in source]
        evicted = tier.list_next_evicted(len(tier) + len(new) - tier.capacity)
        sources = [id_of[key] for key in new] if id_of else ()
        return [*lost, *evicted, *self.apply(TierStep(step.level, new, evicted), storage, sources)]

    # ---- moving up -------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[BlockHashWithGroupId], storage: BlockStorage | None, block_ids: Sequence[BlockId]
    ) -> list[BlockHashWithGroupId]:
        """Copy blocks into blocks of a storage, each from the fastest tier that has it.

        Args:
            keys: distinct keys, one for each block id.
        Returns:
            The keys that no tier has or could read. The content of their target blocks is undefined.
        Raises:
            CopyFailedError: copying into the storage failed. The content of all target blocks is undefined.
        """
        target_of = dict(zip(keys, block_ids, strict=True))
        left = list(keys)
        for tier in self.tiers:
            index = tier.index
            here = [key for key in left if key in index]
            if here:
                try:
                    failed = tier.load(here, storage, [target_of[key] for key in here])
                except CopyFailedError:
                    self.announce_removed(tier, [key for key in here if key not in tier])
                    raise
                self.announce_removed(tier, failed)
                loaded = set(here).difference(failed)
                left = [key for key in left if key not in loaded]
        return left

    # ---- removing --------------------------------------------------------------------------------

    def remove(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove keys from every tier."""
        for tier in self.tiers:
            self._remove(tier, keys)

    def forget(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove wrong content from every tier for good. Raises TierError after trying all tiers."""
        failures: list[TierError] = []
        for tier in self.tiers:
            removed = [key for key in dict.fromkeys(keys) if key in tier]
            try:
                tier.forget(keys)
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
