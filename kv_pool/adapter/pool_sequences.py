"""The sequences of a `GPUKVPool` in migrations (`PoolSequences`), and the ways out (`MigrationRoutes`)."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

import msgspec

from kv_pool.adapter.holdings import Holder, Holdings, as_new_id
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.taking import take, touch_listed
from kv_pool.errors import InvalidArgumentError, PinnedBlockError, UnknownDeviceError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHash, BlockId, BlockMove, NodeName, RequestId, SequenceId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.invalid_blocks import evict_invalid_blocks
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.site import Reservation
from kv_pool.migration.subjects import BlocksSubject, SequenceSubject, Subject
from kv_pool.protocol import NORMAL, URGENT

if TYPE_CHECKING:  # at run time only a pool with a storage or a migrator imports them
    from kv_pool.migration.migrator import Migrator
    from kv_pool.storage.block_storage import BlockStorage

_decoder = msgspec.msgpack.Decoder(dict[SequenceId, int])


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


class PoolSequences:
    """The sequences of a pool. See `Sequences`.

    Blocks that migrate by id are appended to the same sequences. Priority 0 cannot use the reserve.

    Raises:
        InvalidArgumentError: the pool has no storage.
    """

    kind = "sequences of a GPUKVPool"

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
        self.block_size = pool.block_size
        self.frozen = pool.holdings.frozen
        self._holdings = pool.holdings

    # ---- queries ---------------------------------------------------------------------------------

    def describe_groups(self) -> tuple[str, ...]:
        return ()

    def list_block_sizes(self) -> list[int]:
        return [self.block_size]

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

    def describe(self, sequence_ids: list[SequenceId]) -> bytes:
        holders = self._holdings.holders
        return msgspec.msgpack.encode({one: holders[one].priority for one in sequence_ids})

    # ---- arriving --------------------------------------------------------------------------------

    def read_details(
        self, details: bytes, sequence_ids: Sequence[SequenceId], num_blocks: int, is_whole: bool
    ) -> dict[SequenceId, int]:
        try:
            priorities = _decoder.decode(details) if details else {}
        except UNDECODABLE as error:
            raise InvalidArgumentError(
                f"the source's sequence details are not valid priorities: {error}"
            ) from error
        if not all(NORMAL <= priority <= URGENT for priority in priorities.values()):
            raise InvalidArgumentError(f"the priorities {sorted(priorities.values())[:10]} are not 0 to 2")
        if is_whole and sequence_ids[0] in self._holdings.holders:
            raise InvalidArgumentError(
                f"sequence {sequence_ids[0]} already holds blocks on device {self.gpu_pool.device_id}"
            )
        return priorities

    def count_available(self, arriving: dict[SequenceId, int] | None) -> int:
        return self.gpu_pool.count_available(min((arriving or {}).values(), default=NORMAL))

    def add_references(self, blocks: list[KVCacheBlock]) -> None:
        touch_listed(self.pool, blocks)

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        return self.pool.run_index.take_run(self.pool, num_blocks, True) or take(self.pool, num_blocks)

    def make_join(
        self, sequence_id: SequenceId, blocks: list[KVCacheBlock], arriving: dict[SequenceId, int]
    ) -> tuple[Callable[[], object], list[list[KVCacheBlock]]]:
        joining = self._holdings.holders.get(sequence_id) or Holder(
            sequence_id, arriving.get(sequence_id, NORMAL), self.gpu_pool.get_time()
        )

        def join() -> None:
            self._holdings.evictions.forget(sequence_id)
            self._holdings.hold(joining, blocks)

        return join, [blocks]

    # ---- leaving ---------------------------------------------------------------------------------

    def list_tables(self, sequence_id: SequenceId) -> list[BlockTable]:
        return []

    def detach(self, sequence_id: SequenceId, tables: list[BlockTable]) -> None:
        pass

    def attach(self, sequence_id: SequenceId, tables: list[BlockTable]) -> bool:
        return True

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


class MigrationRoutes:
    """The connected pools of this process, and the nodes attached as devices."""

    def __init__(self, pool: SitePool) -> None:
        self._pool = pool
        self._site: PoolSite | None = None
        self._peers: dict[int, MigrationRoutes] = {}
        self._nodes: dict[int, tuple[Migrator, NodeName]] = {}
        self._moves: list[_Move] = []  # those that have not ended: a pool of theirs was interrupted

    def connect(self, peer: MigrationRoutes) -> None:
        """Connect to the pool of these routes. See `GPUKVPool.connect`."""
        for here, other in ((self, peer), (peer, self)):
            device_id = other._pool.device_id
            known = here._peers.get(device_id, other)
            if device_id == here._pool.device_id or known is not other or device_id in here._nodes:
                raise InvalidArgumentError(f"device {device_id} is already connected")
        here_size, there_size = self._pool.block_size, peer._pool.block_size
        if there_size != here_size:
            raise InvalidArgumentError(f"the block size is {here_size} here and {there_size} at the peer")
        self._peers[peer._pool.device_id] = peer
        peer._peers[self._pool.device_id] = self

    def attach(self, migrator: Migrator, devices: dict[int, NodeName]) -> None:
        """See `GPUKVPool.attach`."""
        for device_id in devices:
            if device_id == self._pool.device_id or device_id in self._peers:
                raise InvalidArgumentError(f"device {device_id} is already connected")
        self._nodes.update({device_id: (migrator, name) for device_id, name in devices.items()})

    def get_node(self, device_id: int) -> NodeName:
        """Return the name of the node attached as this device. Raises UnknownDeviceError."""
        self._check_connected(device_id, self._nodes)
        return self._nodes[device_id][1]

    def count_free(self) -> dict[int, int]:
        """See `GPUKVPool.count_free_elsewhere`."""
        return {device_id: peer._pool.count_available(NORMAL) for device_id, peer in self._peers.items()}

    def migrate(self, block_ids: Sequence[BlockId], device_id: int) -> list[BlockId]:
        """See `GPUKVPool.migrate_blocks`."""
        with self._pool.lock:
            blocks, _ = self._pool.holdings.find_named(block_ids, None)
            subject = BlocksSubject(tuple(block_ids), tuple(block.generation for block in blocks))
        if not block_ids and device_id in self._nodes:
            return []
        return self._move(subject, device_id)[1]

    def migrate_sequence(
        self, sequence_id: SequenceId, device_id: int
    ) -> tuple[list[BlockId], list[BlockId]]:
        """See `GPUKVPool.migrate_sequence`."""
        return self._move(SequenceSubject(sequence_id), device_id)

    def _move(self, subject: Subject, device_id: int) -> tuple[list[BlockId], list[BlockId]]:
        """Move blocks to a pool or a node; return their old and new ids."""
        self._check_connected(device_id, {*self._peers, *self._nodes})
        if device_id in self._nodes:
            migrator, name = self._nodes[device_id]
            migration = migrator.migrate(subject, name)
            new_ids = migration.wait()
            return migration.old_ids, new_ids
        peer = self._peers[device_id]
        with self._lock_both(peer):
            move = _Move(self.open_site(), peer.open_site(), subject, NodeName(f"device {device_id}"))
            self._moves.append(move)
            try:
                return move.run()
            finally:
                try:
                    self._end_moves()
                except BaseException:
                    move.mark_interrupted()
                    raise

    def repair(self) -> None:
        """End the moves from and to this pool that were interrupted, as far as both pools are whole."""
        for peer in self._peers.values():
            with self._lock_both(peer):
                self._end_moves()
                peer._end_moves()

    def _end_moves(self) -> None:
        for move in self._moves.copy():
            if move.is_whole():
                move.end()
                self._moves.remove(move)

    def _lock_both(self, peer: MigrationRoutes) -> ExitStack:
        """Lock both pools, always in the same order, so that two migrations cannot deadlock."""
        with ExitStack() as locks:
            for pool in sorted((self._pool, peer._pool), key=lambda pool: pool.device_id):
                locks.enter_context(pool.lock)
            return locks.pop_all()

    def open_site(self) -> PoolSite:
        """Return the site that migrates blocks within this process; the first call creates it."""
        if self._site is None:
            self._site = PoolSite(PoolSequences(self._pool))
        return self._site

    def _check_connected(self, device_id: int, devices: Container[int]) -> None:
        if device_id not in devices:
            raise UnknownDeviceError(
                f"device {device_id!r} is not connected to device {self._pool.device_id}; the connected "
                f"devices are {sorted({*self._peers, *self._nodes})}. See connect() and attach()."
            )


class _Move:
    """A move of blocks between two pools of this process. The caller holds both locks."""

    def __init__(self, source: PoolSite, target: PoolSite, subject: Subject, target_name: NodeName) -> None:
        self.source = source
        self.target = target
        self.subject = subject
        self.target_name = target_name
        self._reservation: Reservation | None = None
        self._is_undone = False

    def is_whole(self) -> bool:
        """Return False if a call of one of the pools was interrupted."""
        return not (self.source.pool.is_changing or self.target.pool.is_changing)

    def mark_interrupted(self) -> None:
        """Let both pools refuse calls until `repair`, since the move is neither done nor undone."""
        self.source.pool.is_changing = True
        self.target.pool.is_changing = True

    def run(self) -> tuple[list[BlockId], list[BlockId]]:
        """Copy the blocks and pass them to the target. `end` does the rest, whether this raises or not.

        Returns:
            The block ids at the source and at the target.
        Raises:
            As `GPUKVPool.migrate_blocks`.
        """
        source, target = self.source, self.target
        selection = source.select(self.subject, for_move=True)
        old_ids = [block.block_id for block in selection.blocks]
        reservation = target.reserve(self.subject, selection.offered, selection.state)
        self._reservation = reservation
        new_ids = [block.block_id for block in reservation.blocks]
        moves = [BlockMove(old_ids[position], new_ids[position]) for position in reservation.missing]
        source.storage.copy_to(target.storage, moves)
        # The old blocks may be reused as soon as this returns, by work on other streams.
        target.storage.synchronize()
        source.freeze(self.subject)
        target.insert(reservation)
        target.adopt(reservation)
        return old_ids, new_ids

    def end(self) -> None:
        """Release the subject at the source if the target has adopted it, else undo the move. Repeatable."""
        reservation = self._reservation
        if reservation is None:
            return
        if reservation.is_ended and not self._is_undone:
            self.source.release(self.subject, self.target_name)
        else:
            self._is_undone = True
            self.target.release_reservation(reservation)
            self.source.thaw(self.subject)
