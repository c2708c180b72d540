"""`ControlledManager`: a `KVCacheManager` with its engine's lock, for operators and defragmenters."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kv_pool.contiguous import compaction
from kv_pool.contiguous.compaction import CopyBlocks, Relocation
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import as_count, as_int, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.ids import BlockId, GroupId, RequestId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.reports.controlled_pool import ControlledPool, count_use
from kv_pool.reports.sequences import SequenceReport
from kv_pool.storage.block_storage import BlockStorage


class ControlledManager(ControlledPool[BlockPoolCore]):
    """A manager as the pool of `ControlServer`, `Defragmenter` and `LiveNode`.

        pool = ControlledManager(manager, storage=storage, lock=lock, on_moved=remap_tables)
        with ControlServer(pool):
            while requests:
                with lock:
                    engine.step()

    Args:
        storage: the bytes of the blocks, which compaction and migration move. None disables migration.
        copy: copies the bytes of blocks in a compaction; it may overwrite the slot of the null block.
            Default: `storage.apply_moves`, which has its own scratch blocks.
        lock: a reentrant lock. The engine holds it from `allocate_slots` until the step's bytes are in the
            blocks, and whenever it calls the manager. None for a new lock.
        on_moved: called with a `Relocation` after ids have changed, with the lock held. It remaps tables of
            block ids, such as a `BatchBlockTable`. None disables compaction.
        requests: the scheduler's requests by id, for their token counts; read with the lock held.
        run_length: length in blocks of the runs that `get_fragmentation_rate` counts.

    Attributes:
        manager, storage, block_pool, lock, run_length, device_id: as given.

    Every method takes the lock.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        storage: BlockStorage | None = None,
        copy: CopyBlocks | None = None,
        lock: AbstractContextManager[object] | None = None,
        on_moved: Callable[[Relocation], object] | None = None,
        requests: Mapping[RequestId, SchedulableRequest] | None = None,
        run_length: int = DEFAULT_RUN_LENGTH,
        device_id: int = 0,
    ) -> None:
        check_type("manager", manager, KVCacheManager)
        self.manager = manager
        self.block_pool = manager.block_pool
        self.block_size = manager.block_size
        self.lock = threading.RLock() if lock is None else lock
        self.run_length = as_count("run_length", run_length, 1)
        self.device_id = as_int("device_id", device_id)
        self.storage = storage
        self._copy = copy
        self._on_moved = on_moved
        self._requests: Mapping[RequestId, SchedulableRequest] = {} if requests is None else requests

    def get_sequences(self) -> ManagerSequences:
        """Return the requests as the sequences of a `PoolSite`.

        Raises:
            ControlError: the manager was given without a storage.
        """
        if self.storage is None:
            raise ControlError("migration moves the bytes of requests; pass a storage to ControlledManager")
        return ManagerSequences(self.manager, self.storage, self.lock)

    # ---- reports ---------------------------------------------------------------------------------

    def _list_ids(self) -> list[RequestId]:
        """Return the requests in the order of admission; those without tables come last."""
        return list(dict.fromkeys([*self.manager.list_request_ids(), *self.manager.detached_requests]))

    def _get_rows(self, sequence_id: RequestId) -> list[list[KVCacheBlock]] | None:
        return get_rows(self.manager, sequence_id)

    def report_sequence(self, sequence_id: RequestId, num_blocks: int, num_immovable: int) -> SequenceReport:
        request = self._requests.get(sequence_id)
        return SequenceReport(
            sequence_id,
            num_blocks,
            None,
            None,
            sequence_id in self.manager.detached_requests,
            None if request is None else request.num_computed_tokens,
            num_immovable,
        )

    def count_use(self) -> dict[str, Any]:
        return super().count_use() | count_use(self.manager)

    def get_free_blocks(self) -> int:
        """Return the number of free blocks, cached ones included."""
        with self.lock:
            return self.manager.get_num_free_blocks()

    def list_victims(self, num_blocks: int) -> list[RequestId]:
        """Return the requests to evict for `num_blocks` more free blocks, the last admitted first.

        All that may be evicted if they do not suffice. Requests in a migration or a swap are not returned.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        victims: list[RequestId] = []
        for report in reversed(self.describe_sequences().sequences):
            if num_blocks <= 0:
                break
            if report.num_blocks and not report.is_in_transit:
                victims.append(RequestId(str(report.sequence_id)))
                num_blocks -= report.num_blocks
        return victims

    # ---- compaction ------------------------------------------------------------------------------

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Move blocks in use together between two steps of the engine, as `GPUKVPool.defragment` does.

        Blocks under a hold stay in place. By default nothing is evicted, even if the cache is full.

        Returns:
            The number of blocks whose id changed; `on_moved` was called for each round of moves.
        Raises:
            ControlError: the pool has no runs, or the manager was given without `on_moved` or a way to copy.
                Nothing has changed.
            CopyFailedError: a round of moves failed, see `compaction.apply_moves`. Requests still have
                their bytes; cached blocks that were being exchanged may be evicted.
        """
        pool, copy, on_moved = self._get_run_pool(), self._copy, self._on_moved
        scratch_ids: Sequence[BlockId] = compaction.NULL_BLOCK_SLOT
        if copy is None and self.storage is not None:
            copy, scratch_ids = self.storage.apply_moves, self.storage.scratch_ids
        if copy is None or on_moved is None:
            raise ControlError(
                "moving blocks requires their bytes and a way to remap tables; pass storage and on_moved to "
                "ControlledManager"
            )

        def note_moved(relocation: Relocation) -> None:
            self.num_moved_blocks += len(relocation.moves)
            on_moved(relocation)

        with self.lock:
            return compaction.compact(
                pool,
                copy,
                run_length=self.run_length,
                goal=goal,
                max_moves=max_moves,
                max_evictions=max_evictions,
                on_moved=note_moved,
                scratch_ids=scratch_ids,
            )

    def _get_run_pool(self) -> RunBlockPool:
        pool = self.block_pool
        if not isinstance(pool, RunBlockPool):
            raise ControlError(
                f"only the blocks of a RunBlockPool can be moved, and this manager has a "
                f"{type(pool).__name__}: create it with KVCacheManager(RunBlockPool(...))"
            )
        return pool


def get_rows(manager: KVCacheManager, request_id: RequestId) -> list[list[KVCacheBlock]] | None:
    """Return the blocks of a request, one row per group; [] while it is detached, None if it has ended."""
    group_ids = [GroupId(group_id) for group_id in range(len(manager.groups))]
    try:
        return [manager.get_table(request_id, group_id).blocks for group_id in group_ids]
    except InvalidArgumentError:
        return [] if request_id in manager.detached_requests else None
