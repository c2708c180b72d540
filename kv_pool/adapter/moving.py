"""`PoolMoving`: the calls of a `GPUKVPool` that move blocks, within the pool or to another one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from kv_pool.adapter.allocating import PoolAllocating
from kv_pool.adapter.holdings import as_sequence_id
from kv_pool.contiguous import compaction
from kv_pool.core.arguments import as_int, as_ints
from kv_pool.errors import InvalidArgumentError, InvalidTypeError, KVPoolError, PoolInterruptedError
from kv_pool.ids import BlockId, NodeName, SequenceId
from kv_pool.protocol import MigrationResult

if TYPE_CHECKING:
    from kv_pool.migration.migrator import Migrator


class PoolMoving(PoolAllocating):
    """The part of `GPUKVPool` that compacts, grows and shrinks the pool, and migrates blocks."""

    # ---- compaction and size ---------------------------------------------------------------------

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Move blocks in use together so that free blocks become contiguous. Block ids of sequences change.

        Learn the new ids from `on_moved` or `blocks_of`. Without a goal, all blocks in use move to the lowest
        ids. With a goal, the pool moves only as many blocks as needed, from the emptiest stretches of
        `run_length` ids, and most sequences keep their runs. Pinned, held and watched blocks stay in place.
        Sequences, references, hashes and the eviction order do not change. By default nothing is evicted: in
        a full cache, blocks in use and cached blocks exchange places. To compact by threshold, or a little in
        each engine step, see `Defragmenter`.

        Args:
            max_evictions: cached blocks that may be evicted where empty blocks are missing; each takes one
                copy instead of the three of an exchange.
            max_moves: stop after this many; the next call continues. An exchange counts as two moves, so 1
                moves nothing in a full cache.
            goal: the fragmentation rate to reach, 0 to 1.
        Returns:
            How many blocks changed their id.
        Raises:
            CopyFailedError: a batch of moves failed, see `compaction.apply_moves`. Sequences keep their
                bytes; cached blocks that were being exchanged may be evicted.
        """
        with self.lock:
            self.block_pool.holds.check_whole()
            return compaction.compact(
                self.block_pool,
                self._copy_moves,
                run_length=self.run_length,
                goal=goal,
                max_moves=max_moves,
                max_evictions=max_evictions,
                on_moved=self._note_moved,
                scratch_ids=compaction.NULL_BLOCK_SLOT if self.storage is None else self.storage.scratch_ids,
            )

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free, empty blocks with the highest ids. O(blocks of the pool).

        Raises:
            InvalidArgumentError: `num_blocks` is negative, or the storage is too small. Nothing has changed.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock:
            if self.storage is not None and self.storage.num_blocks <= self.total_blocks + num_blocks:
                raise InvalidArgumentError(
                    f"the storage has blocks 0 to {self.storage.num_blocks - 1}; with {num_blocks} more the "
                    f"pool would have 1 to {self.total_blocks + num_blocks}"
                )
            self.block_pool.grow(num_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Remove the `num_blocks` highest ids; blocks in use there move to lower ids. O(blocks of the pool).

        A full cache evicts as many cached blocks, next in eviction order; other cached blocks of the removed
        range also move to lower ids. Block ids of sequences change: see `on_moved`.

        Raises:
            InvalidArgumentError: `num_blocks` is negative, or fewer than 1 or than the reserve would be left.
            OutOfBlocksError: more blocks are in use in the removed range than are free below it.
            InvalidBlockError: a block to remove is pinned, held or watched. In all cases nothing has changed.
            CopyFailedError: nothing has moved; blocks that were next in eviction order may be evicted.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock:
            num_left = self.total_blocks - num_blocks
            if num_blocks < 0 or num_left < max(1, self.reserved_blocks):
                raise InvalidArgumentError(
                    f"{num_blocks} of {self.total_blocks} blocks cannot be removed; at least "
                    f"{max(1, self.reserved_blocks)} must be left"
                )
            self.block_pool.holds.check_whole()
            compaction.shrink(self.block_pool, num_blocks, self._copy_moves, on_moved=self._note_moved)

    # ---- migration -------------------------------------------------------------------------------

    def attach(self, migrator: "Migrator", devices: dict[int, NodeName]) -> None:
        """Allow blocks to migrate to other nodes; each node becomes a device of this pool.

        Args:
            migrator: the migrator of this pool, over a `PoolSite` of it; it resolves node names.
            devices: maps device id to node name.
        Raises:
            InvalidArgumentError: this pool or a connected one has such a device id. Nothing has changed.
        """
        self._routes.attach(migrator, devices)

    def get_attached_node(self, device_id: int) -> NodeName:
        """Return the name of the node attached as this device. Raises UnknownDeviceError if there is none."""
        return self._routes.get_node(as_int("device_id", device_id))

    def migrate_blocks(self, block_ids: Sequence[BlockId], target_device_id: int) -> list[BlockId]:
        """Move blocks with their bytes to a connected pool or an attached node.

        Each block migrates with the sequence that has held it longest, and is appended to that sequence's
        blocks on the target. Other sequences that share the block keep it here. A cached block is also cached
        on the target, if that pool caches; the old block keeps its hashes until it is reused.

        Returns:
            The ids on the target, in the same order.
        Raises:
            UnknownDeviceError: the device is not connected.
            InvalidBlockError: a block is free, unknown or listed twice.
            EvictedSequenceError: a block was held by an evicted sequence, see `take_evictions`.
            PinnedBlockError: a block is pinned.
            PoolExhaustedError: the target has too few free blocks; it evicts nothing for a migration.
            InvalidArgumentError: one of the pools has no storage, or the block formats differ.
            FrozenSequenceError: another migration has frozen one of the sequences.
            CopyFailedError: copying failed.
            MigrationError: the node could not take the blocks. In all cases nothing has changed on either
                side.

        Migrating to a node waits for the transfer: do not hold the pool's lock.
        """
        target_device_id = as_int("target_device_id", target_device_id)
        return self._routes.migrate(cast("list[BlockId]", as_ints("block_ids", block_ids)), target_device_id)

    def migrate_sequence(
        self, sequence_id: SequenceId, target_device_id: int
    ) -> tuple[list[BlockId], list[BlockId]]:
        """Move a sequence with all its blocks to a connected pool or an attached node, under the same id.

        Returns:
            The old block ids and the new ones on the target, in the order of the tokens.
        Raises:
            As `migrate_blocks`, and UnknownSequenceError: the sequence holds no blocks; InvalidArgumentError:
            the target already has a sequence with this id. Nothing has changed.

        Other sequences keep the blocks that they share with it.
        """
        target_device_id = as_int("target_device_id", target_device_id)
        return self._routes.migrate_sequence(as_sequence_id("sequence_id", sequence_id), target_device_id)

    def count_free_elsewhere(self) -> dict[int, int]:
        """Return the number of free blocks of each connected pool, less its reserve, by device id."""
        return self._routes.count_free()

    def try_migrate_blocks(self, block_ids: Sequence[BlockId], target_device_id: int) -> MigrationResult:
        """Like `migrate_blocks`, but return a `KVPoolError` as a result.

        Raises:
            InvalidTypeError, PoolInterruptedError: as `migrate_blocks`.
        """
        started = self._clock()
        try:
            migrated = self.migrate_blocks(block_ids, target_device_id)
        except (InvalidTypeError, PoolInterruptedError):
            raise
        except KVPoolError as error:
            return MigrationResult(False, migration_time=(self._clock() - started) * 1000, error=error)
        elapsed = (self._clock() - started) * 1000
        return MigrationResult(True, migrated, elapsed, len(migrated) * self.block_bytes)
