"""`PoolSequences`: the sequences of a `GPUKVPool`, for migration by a `PoolSite`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.taking import take, take_listed
from kv_pool.errors import InvalidArgumentError, PinnedBlockError
from kv_pool.ids import BlockHash, BlockId, RequestId, SequenceId
from kv_pool.manager.invalid_blocks import evict_invalid_blocks
from kv_pool.manager.sequences.holdings import Holder, Holdings, as_new_id
from kv_pool.migration.sequences import Sequences
from kv_pool.protocol import NORMAL, URGENT

if TYPE_CHECKING:  # at run time only a pool with a storage or a migrator imports them
    from kv_pool.storage.block_storage import BlockStorage


class SitePool(Protocol):
    """The sequences of a `GPUKVPool`, as migration reads and changes them."""

    block_pool: RunBlockPool
    block_size: int
    device_id: int
    holdings: Holdings
    storage: BlockStorage | None

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held during each call; reentrant."""

    def count_available(self, priority: int) -> int:
        """Return how many blocks a request of this priority can take."""

    def get_time(self) -> float:
        """Return the time of the pool's clock in seconds."""


class PoolSequences(Sequences):
    """The sequences of a pool. See `Sequences`.

    Blocks that migrate by id are appended to the same sequences. Priority 0 cannot use the reserve.

    Raises:
        InvalidArgumentError: the pool has no storage.
    """

    kind = "sequences of a GPUKVPool"
    details_type = dict[SequenceId, int]  # their priorities

    def __init__(self, pool: SitePool) -> None:
        if pool.storage is None:
            raise InvalidArgumentError(
                f"the pool of device {pool.device_id} has no storage, so its blocks cannot migrate; create "
                f"it with storage=, such as kv_pool.storage.KVStorage.allocate(total_blocks + 1, ...)"
            )
        self.gpu_pool = pool
        self.pool = pool.block_pool
        self.lock = pool.lock
        self.storage = pool.storage
        self.block_sizes = [pool.block_size]
        self.frozen = pool.holdings.frozen
        self._holdings = pool.holdings

    # ---- queries ---------------------------------------------------------------------------------

    def as_id(self, sequence_id: SequenceId | RequestId) -> SequenceId:
        if isinstance(sequence_id, str):
            raise InvalidArgumentError(
                f"{sequence_id!r} is not a sequence id of a GPUKVPool; give a number, or newest"
            )
        return as_new_id("sequence_id", sequence_id)

    def list_rows(self, sequence_id: SequenceId) -> list[list[KVCacheBlock]]:
        return [list(self._holdings.find(sequence_id).blocks)]

    def find_holder(self, block: KVCacheBlock) -> SequenceId | None:
        holders = self._holdings.holders_of.get(block)
        return None if holders is None else next(iter(holders)).sequence_id

    def find_prefix(self, block_hashes: list[BlockHash]) -> list[list[KVCacheBlock]]:
        return [self.pool.find_cached_prefix(block_hashes, len(block_hashes))]

    def evict_invalid(self, block_ids: list[BlockId]) -> None:
        evict_invalid_blocks(self.pool, block_ids)

    def check_movable(self, blocks: Sequence[KVCacheBlock]) -> None:
        pins = self._holdings.pins
        if pins.is_any_pinned(blocks):
            pinned = next(block for block in blocks if block in pins)
            raise PinnedBlockError(f"block {pinned.block_id} is pinned and cannot migrate; unpin it first")

    def describe(self, sequence_ids: list[SequenceId]) -> dict[SequenceId, int]:
        return {one: self._holdings.holders[one].priority for one in sequence_ids}

    # ---- arriving --------------------------------------------------------------------------------

    def check_arriving(
        self,
        details: dict[SequenceId, int] | None,
        sequence_ids: Sequence[SequenceId],
        num_blocks: int,
        is_whole: bool,
    ) -> None:
        priorities = (details or {}).values()
        if set(details or {}) != set(sequence_ids):
            raise InvalidArgumentError(
                f"the source states the priorities of sequences {list(details or {})[:10]}; expected "
                f"those of {list(sequence_ids)[:10]}"
            )
        if not all(NORMAL <= priority <= URGENT for priority in priorities):
            raise InvalidArgumentError(f"the priorities {sorted(priorities)[:10]} are not 0 to 2")
        if is_whole and sequence_ids[0] in self._holdings.holders:
            raise InvalidArgumentError(
                f"sequence {sequence_ids[0]} already holds blocks on device {self.gpu_pool.device_id}"
            )

    def count_available(self, details: dict[SequenceId, int] | None) -> int:
        return self.gpu_pool.count_available(min((details or {}).values(), default=NORMAL))

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        pool = self.gpu_pool.block_pool
        run = pool.run_index.find(pool, num_blocks, avoids_retained=True)
        if run is None:
            return take(pool, num_blocks)
        take_listed(pool, run)
        return run

    def make_join(
        self, sequence_id: SequenceId, blocks: list[KVCacheBlock], details: dict[SequenceId, int] | None
    ) -> tuple[Callable[[], object], list[list[KVCacheBlock]]]:
        joining = self._holdings.holders.get(sequence_id) or Holder(
            sequence_id, (details or {}).get(sequence_id, NORMAL), self.gpu_pool.get_time()
        )

        def join() -> None:
            self._holdings.evictions.forget(sequence_id)
            self._holdings.hold(joining, blocks)

        return join, [blocks]

    # ---- leaving ---------------------------------------------------------------------------------

    def free(self, sequence_id: SequenceId, rows: list[list[KVCacheBlock]]) -> None:
        for holder, blocks in self._list_held(sequence_id, rows):
            self._holdings.drop(blocks, {holder: blocks})

    def forget(self, sequence_id: SequenceId, rows: list[list[KVCacheBlock]]) -> None:
        for holder, blocks in self._list_held(sequence_id, rows):
            self._holdings.part(holder, blocks)

    def _list_held(
        self, sequence_id: SequenceId, rows: list[list[KVCacheBlock]]
    ) -> list[tuple[Holder, list[KVCacheBlock]]]:
        """Return the sequence with those of the blocks that it still holds; [] if there are none."""
        holder = self._holdings.holders.get(sequence_id)
        if holder is None:
            return []
        held = [block for row in rows for block in row if block in holder.blocks]
        return [(holder, held)] if held else []
