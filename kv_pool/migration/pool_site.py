"""`PoolSite`: a pool and its storage, as source or target of migrations; `LocalMove`: without messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_keys import get_group_id
from kv_pool.core.freeing import free_listed
from kv_pool.core.holds import Hold, HoldState
from kv_pool.core.taking import touch_listed
from kv_pool.errors import FrozenSequenceError, InvalidArgumentError, PoolExhaustedError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHashWithGroupId, BlockId, BlockMove, NodeName, RequestId, SequenceId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.leases import BlockLeases
from kv_pool.migration.messages import BlocksSubject, OfferedBlock, SequenceSubject, Subject
from kv_pool.migration.sequences import NoOwner, SequenceOwner, Sequences
from kv_pool.migration.site import (
    Reservation,
    Rows,
    Selection,
    Selector,
    SubjectState,
    check_usable,
    insert_keys,
)
from kv_pool.storage.block_layout import BlockLayout

_LEAVING = "it is being moved to another node"
_ARRIVING = "it is being received from another node"
RESERVED = "arriving from another node"
"""The reason of the hold of each reservation."""
_decoder = msgspec.msgpack.Decoder(SubjectState)


@dataclass
class _Departure:
    """A subject that is being moved away.

    Attributes:
        rows: the departing blocks, by sequence and group.
        blocks: all blocks of each sequence.
        tables: the block tables of each sequence, detached while it is frozen; [] if this pool detaches none.
        holds: one for each sequence while it is frozen; it owns the references of detached tables.
        is_changing: its sequences are being frozen, or it is ending: as long as the pool is being changed.
        is_over: it has ended, but for its owner, who is being notified.
    """

    rows: dict[Any, Rows]
    blocks: dict[Any, list[KVCacheBlock]]
    tables: dict[Any, list[BlockTable]]
    holds: list[Hold] = field(default_factory=list)
    is_changing: bool = True
    is_over: bool = False


class PoolSite:
    """One pool, its storage and its lock. Every method is called with `lock` held, and none blocks.

        source     select -> (lease) -> freeze, for a move -> release  the target has acknowledged
                                                           -> thaw     the move has failed
        target     reserve -> (read, verify) -> insert -> adopt      the source has released a moved
                                                 |                     subject; always for a copy
                                                 +------> release_reservation   the migration has failed

    | subject | at the source | at the target |
    |---|---|---|
    | a sequence or request | all its blocks; other holders keep shared ones | a new sequence with this id |
    | blocks | in use (by the sequence that has held it longest) or cached | appended to it, or cached |
    | a prefix | the longest cached one, copied | cached and free, available for hits |

    A sequence in migration is frozen at both ends: using it raises `FrozenSequenceError`, and it is neither
    evicted nor compacted. The target evicts no sequence for arriving blocks.

    Args:
        sequences: `ManagerSequences` or `kv_pool.migration.pool_sequences.PoolSequences`.
        hasher: the pool's block hasher; nodes with another one are refused. None for other hashes.
        owner: the engine, see `SequenceOwner`; None if a sequence has no state besides its blocks.
        clock: monotonic time in seconds, the clock of the migrator.
        model, weights: names; nodes with other names are refused. "" if not named.

    Attributes:
        storage, layout: the bytes of the blocks, and their format.
        leases: of this pool's blocks.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        hasher: BlockHasher | None = None,
        owner: SequenceOwner[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        weights: str = "",
    ) -> None:
        self.sequences = sequences
        self.pool = sequences.pool
        self.storage = sequences.storage
        self.layout = BlockLayout.describe(
            sequences.storage,
            sequences.block_sizes[0],
            hasher,
            sequences.describe_groups(),
            model=model,
            weights=weights,
        )
        self.leases = BlockLeases(sequences.pool, clock)
        self._owner: SequenceOwner[Any] = NoOwner() if owner is None else owner
        self._selector = Selector(sequences, self._owner)
        self._frozen: dict[Subject, _Departure] = {}
        # The reservation that a call changes now, or has changed when it was interrupted.
        self._changing: Reservation | None = None
        self.pool.holds.add_party(ref(self))

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The reentrant lock that every user of the pool holds, such as an engine during its step."""
        return self.sequences.lock

    # ---- the source ------------------------------------------------------------------------------

    def select(self, subject: Subject, for_move: bool) -> Selection:
        """Return the blocks of a subject. Changes nothing.

        Raises:
            UnknownSequenceError, FrozenSequenceError, InvalidBlockError, PinnedBlockError,
                InvalidArgumentError: the subject does not exist here or cannot be migrated.
            StaleTransferError: a block was reused since it was named.
        """
        self._check_whole()
        return self._selector.select(subject, for_move)

    def freeze(self, subject: Subject, rows: dict[Any, Rows]) -> None:
        """Freeze a subject for a move: it cannot be extended, freed or moved until `thaw` or `release`.

        Args:
            rows: of its selection for the move; the lock was held since.
        Raises:
            FrozenSequenceError: the subject is already frozen. Nothing has changed.
            Errors of the owner. Nothing has changed.
        """
        self._check_whole()
        check_usable(self.sequences, rows)
        before = self._frozen.get(subject)
        if before is not None and not before.is_over:  # a subject without blocks, twice
            raise FrozenSequenceError("this subject, which has no blocks, is already being moved")
        departure = _Departure(
            rows,
            {one: _list_blocks(self.sequences.list_rows(one)) for one in rows},
            {one: self.sequences.list_tables(one) for one in rows},
        )
        with self._change():
            self._frozen[subject] = departure
            for sequence_id, tables in departure.tables.items():
                if not tables:  # detached ones pass their references to the hold
                    self.pool.add_references(departure.blocks[sequence_id], False)
            self._hold_departure(departure)
        if isinstance(subject, SequenceSubject):
            try:
                self._owner.suspend(self.sequences.as_id(subject.sequence_id))
            except Exception:
                self.thaw(subject)
                raise

    def thaw(self, subject: Subject) -> None:
        """Unfreeze a subject whose move has failed; it can be used as before.

        No-op if it is not frozen: its `freeze` was interrupted at its start.
        """
        self._end(subject, None)

    def release(self, subject: Subject, target: NodeName) -> None:
        """Drop the references to a subject that node `target` now has. Cached blocks stay cached.

        No-op if it is not frozen: it has been released.
        """
        self._end(subject, target)

    def list_frozen(self) -> list[Any]:
        """Return the sequences that are being moved away, oldest first. Do not schedule them.

        The pool refuses to free or extend them. If the scheduler restarts a frozen request from its first
        token, its old blocks are freed when the move has ended.
        """
        self._check_whole()
        return [
            sequence_id
            for departure in self._frozen.values()
            if not departure.is_over
            for sequence_id in departure.rows
        ]

    # ---- the target ------------------------------------------------------------------------------

    def reserve(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> Reservation:
        """Reserve one block for each offered block; a block that already has the content is touched instead.

        The old content of the missing blocks is flushed to the lower tiers.

        Raises:
            OutOfBlocksError: too few blocks are free. Nothing has changed.
            InvalidArgumentError: this pool cannot receive the subject, for example because its id is in use.
        """
        self._check_whole()
        decoded = self._decode(subject, offered, state)
        sequence_ids = self._list_arriving(subject, decoded)
        is_whole = isinstance(subject, SequenceSubject)
        self.sequences.check_arriving(decoded.details, sequence_ids, len(offered), is_whole)
        found = self._find_all_present(offered, decoded)
        present = [block for block in found if block is not None]
        missing = [position for position, block in enumerate(found) if block is None]
        num_available = self.sequences.count_available(decoded.details) - sum(
            not block.ref_cnt for block in present
        )
        if offered and len(missing) > num_available:
            raise PoolExhaustedError(
                f"cannot reserve {len(missing)} blocks for a migration: {max(0, num_available)} of "
                f"{self.pool.num_gpu_blocks - 1} are free. Free a sequence or choose another target"
            )
        if is_whole:
            self._owner.expect(sequence_ids[0], len(offered), decoded.owner)
        reservation = Reservation(subject, offered, [], missing, None, sequence_ids, decoded)
        with self._change(reservation):
            for sequence_id in sequence_ids:
                self.sequences.frozen[sequence_id] = _ARRIVING
            touch_listed(self.pool, present)
            taken = iter(self.sequences.take(len(missing)))
            self.pool.flush_evicted()
            reservation.blocks = [next(taken) if block is None else block for block in found]
            reservation.hold = self.pool.holds.adopt(reservation.blocks, RESERVED)
        return reservation

    def insert(self, reservation: Reservation) -> None:
        """Cache the received blocks, whose bytes were verified, and publish their events.

        The reservation keeps its references.
        """
        self._check_whole()
        if self.pool.enable_caching:
            with self._change():
                for position in reservation.missing:
                    insert_keys(
                        self.pool,
                        reservation.blocks[position],
                        reservation.offered[position],
                        self.sequences.block_sizes.__getitem__,
                    )

    def adopt(self, reservation: Reservation) -> None:
        """Take over the subject: pass the reservation's references to its sequences, free the other blocks.

        Raises:
            InvalidArgumentError: the sequence was started here during the migration. Nothing has changed.
            Errors of the owner: the sequence has lost the blocks; inserted blocks stay cached.
        """
        self._check_whole()
        if not reservation.is_ended:
            self._join(reservation)
        if reservation.joined and isinstance(reservation.subject, SequenceSubject):
            [(sequence_id, rows)] = reservation.joined
            try:
                self._owner.on_arrived(sequence_id, reservation.state.owner)
            except Exception:
                if self.pool.is_changing:  # the owner's call of the pool was interrupted
                    self._changing = reservation
                    raise
                with self._change(reservation):
                    self.sequences.free(sequence_id, rows)
                    reservation.joined = []
                raise
        reservation.joined = []

    def release_reservation(self, reservation: Reservation) -> None:
        """Drop the references of a reservation; the source keeps the subject. Inserted blocks stay cached.

        In a pool whose last call was interrupted, `repair` drops them.
        """
        if self._changing is reservation:
            self.begin_repair()
        if not reservation.is_ended:
            self._unfreeze(reservation.sequence_ids)
            reservation.get_hold().release()

    def count_free_blocks(self) -> int:
        """Return the number of blocks that migrations could reserve now."""
        return max(0, self.sequences.count_available(None))

    # ---- inside ----------------------------------------------------------------------------------

    def _end(self, subject: Subject, target: NodeName | None) -> None:
        """End a departure and notify its owner. If this is interrupted, it can be called again."""
        self._check_whole()
        departure = self._frozen.get(subject)
        if departure is None:
            return
        if not departure.is_over:
            self._end_departure(departure, is_leaving=target is not None)
        if isinstance(subject, SequenceSubject):
            sequence_id = self.sequences.as_id(subject.sequence_id)
            try:
                if target is None:
                    self._owner.resume(sequence_id)
                else:
                    self._owner.on_departed(sequence_id, target)
            except Exception:
                del self._frozen[subject]
                raise
        del self._frozen[subject]

    def _hold_departure(self, departure: _Departure) -> None:
        """Freeze the sequences of a departure under holds, which get one reference to each block."""
        for sequence_id, tables in departure.tables.items():
            self.sequences.frozen[sequence_id] = _LEAVING
            self.sequences.detach(sequence_id, tables)
            reason = f"in sequence {sequence_id!r}, which is being moved to another node"
            departure.holds.append(self.pool.holds.adopt(departure.blocks[sequence_id], reason))
        departure.is_changing = False

    def _end_departure(self, departure: _Departure, is_leaving: bool) -> None:
        """Free the blocks of a departure, or make its sequences usable again."""
        sequences, holds = self.sequences, self.pool.holds
        with self._change():
            departure.is_changing = True
            for hold, tables in zip(departure.holds, departure.tables.values(), strict=True):
                if tables:
                    holds.hand_over(hold)
                else:
                    holds.end(hold, HoldState.RELEASED)
            for sequence_id, tables in departure.tables.items():
                # A request that the scheduler has restarted has other tables by now.
                if is_leaving or not sequences.attach(sequence_id, tables):
                    sequences.free(sequence_id, departure.rows[sequence_id])
            self._unfreeze(departure.rows)
            departure.is_changing, departure.is_over = False, True

    def _join(self, reservation: Reservation) -> None:
        """Pass the references of a reservation to its sequences; free the blocks that join none."""
        joining: dict[Any, list[KVCacheBlock]] = {}
        unheld: list[KVCacheBlock] = []
        if isinstance(reservation.subject, SequenceSubject):
            joining[reservation.sequence_ids[0]] = reservation.blocks
        else:
            for block, holder in zip(
                reservation.blocks, _list_holders(reservation.state, reservation.blocks), strict=True
            ):
                if holder is None:
                    unheld.append(block)
                else:
                    joining.setdefault(self.sequences.as_id(holder), []).append(block)
        joins: list[Callable[[], object]] = []
        joined: list[tuple[Any, Rows]] = []
        for sequence_id, blocks in joining.items():
            join, rows = self.sequences.make_join(sequence_id, blocks, reservation.state.details)
            joins.append(join)
            joined.append((sequence_id, rows))
        reservation.joined = joined
        with self._change(reservation):
            self._unfreeze(reservation.sequence_ids)
            self.pool.holds.hand_over(reservation.get_hold())
            free_listed(self.pool, unheld[::-1])
            for join in joins:
                join()

    @contextmanager
    def _change(self, reservation: Reservation | None = None) -> Iterator[None]:
        """Change the pool and perhaps a reservation. What raises is undone by `begin_repair`."""
        self._changing = reservation
        self.pool.is_changing = True
        yield
        self._changing = None
        self.pool.is_changing = False

    def _unfreeze(self, sequence_ids: Iterable[Any]) -> None:
        for sequence_id in sequence_ids:
            self.sequences.frozen.pop(sequence_id, None)

    # ---- interrupted calls -----------------------------------------------------------------------

    def _check_whole(self) -> None:
        self.pool.holds.check_whole()

    def begin_repair(self) -> None:
        """Undo an interrupted change, before the pool counts its references again.

        A subject that was being frozen, thawed or released is frozen: `thaw` or `release` is still to come.
        """
        for departure in self._frozen.values():
            if departure.is_changing:
                self._forget_holds(departure.holds)
                departure.holds = []
                self._hold_departure(departure)
        reservation = self._changing
        if reservation is not None:
            for sequence_id, rows in reservation.joined:
                self.sequences.forget(sequence_id, rows)
            if reservation.hold is None:
                self._unfreeze(reservation.sequence_ids)
            else:
                for sequence_id in reservation.sequence_ids:
                    self.sequences.frozen[sequence_id] = _ARRIVING
                self._forget_holds([reservation.hold])
                reservation.hold = self.pool.holds.adopt(reservation.blocks, RESERVED)
            self._changing = None

    def _forget_holds(self, holds: list[Hold]) -> None:
        for hold in holds:
            hold.forget()
            if not hold.is_released:
                self.pool.holds.end(hold, HoldState.RELEASED)

    # ---- checks and look-ups of an offer ---------------------------------------------------------

    def _decode(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> SubjectState:
        """Return the decoded state. Raises InvalidArgumentError if it does not fit the offer."""
        decoded = SubjectState([], None, b"")
        try:
            if state:
                decoded = _decoder.decode(state)
            if decoded.details is not None:
                decoded.details = msgspec.convert(decoded.details, self.sequences.details_type)
        except UNDECODABLE as error:
            if any(one is not None for one in decoded.sequence_ids):
                self.sequences.check_receives_blocks()  # first: single blocks have another pool's state
            raise InvalidArgumentError(f"cannot decode the source's subject state: {error}") from error
        expected = len(offered) if isinstance(subject, BlocksSubject) and state else 0
        if len(decoded.sequence_ids) != expected:
            raise InvalidArgumentError(
                f"the source offers {len(offered)} blocks and names sequences for "
                f"{len(decoded.sequence_ids)} of them; expected {expected}"
            )
        num_groups = len(self.sequences.block_sizes)
        for block in offered:
            for key in block.keys:
                if len(key) < 5 or get_group_id(BlockHashWithGroupId(key)) >= num_groups:
                    raise InvalidArgumentError(
                        f"block {block.block_id} of the source has the key {key.hex()}, which belongs to "
                        f"none of the {num_groups} groups of this pool"
                    )
        return decoded

    def _list_arriving(self, subject: Subject, state: SubjectState) -> tuple[Any, ...]:
        """Return the ids of the sequences that receive blocks. Raises FrozenSequenceError."""
        listed = [subject.sequence_id] if isinstance(subject, SequenceSubject) else state.sequence_ids
        sequence_ids = dict.fromkeys(self.sequences.as_id(one) for one in listed if one is not None)
        check_usable(self.sequences, sequence_ids)
        return tuple(sequence_ids)

    def _find_all_present(
        self, offered: Sequence[OfferedBlock], state: SubjectState
    ) -> list[KVCacheBlock | None]:
        """Return for each offered block a distinct local block with its content, or None."""
        found: list[KVCacheBlock | None] = []
        seen: set[KVCacheBlock] = set()
        for one, holder in zip(offered, _list_holders(state, offered), strict=True):
            # A block that is appended to an existing sequence may already be part of it.
            block = self._find_present(one) if holder is None else None
            if block is None or block in seen:
                found.append(None)
            else:
                found.append(block)
                seen.add(block)
        return found

    def _find_present(self, offered: OfferedBlock) -> KVCacheBlock | None:
        """Return the cached block with this content. Full blocks only: sequences write to partial ones."""
        if not offered.keys or not self.pool.enable_caching:
            return None
        key = BlockHashWithGroupId(offered.keys[0])
        if offered.num_tokens is None or offered.num_tokens % self.sequences.block_sizes[get_group_id(key)]:
            return None
        return self.pool.cached_block_hash_to_block.get_one_block(key)


def _list_holders(state: SubjectState, blocks: Sequence[object]) -> Sequence[SequenceId | RequestId | None]:
    """Return the sequence of each block of a `BlocksSubject`; None for each block of other subjects."""
    return state.sequence_ids or [None] * len(blocks)


def _list_blocks(rows: Rows) -> list[KVCacheBlock]:
    return [block for row in rows for block in row if not block.is_null]


class LocalMove:
    """A move of blocks between two pools of this process. The caller holds both locks."""

    def __init__(self, source: PoolSite, target: PoolSite, subject: Subject, target_name: NodeName) -> None:
        self.source = source
        self.target = target
        self.subject = subject
        self.target_name = target_name
        self._reservation: Reservation | None = None

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
        source.freeze(self.subject, selection.rows)
        target.insert(reservation)
        target.adopt(reservation)
        return old_ids, new_ids

    def end(self) -> None:
        """Release the subject at the source if the target has adopted it, else undo the move. Repeatable."""
        reservation = self._reservation
        if reservation is None:
            return
        if reservation.is_ended:
            self.source.release(self.subject, self.target_name)
        else:
            self.source.thaw(self.subject)
            self.target.release_reservation(reservation)  # last: an ended one stands for an adopted subject
