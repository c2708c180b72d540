"""`PoolSite`: a pool with its storage, as the source or target of migrations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_keys import get_group_id
from kv_pool.core.holds import Hold
from kv_pool.errors import FrozenSequenceError, InvalidArgumentError, PoolExhaustedError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHashWithGroupId, NodeName, RequestId, SequenceId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.leases import BlockLeases
from kv_pool.migration.arriving_keys import insert_keys
from kv_pool.migration.selector import Selector, check_usable
from kv_pool.migration.sequence_owner import NoOwner, SequenceOwner
from kv_pool.migration.sequences import Sequences
from kv_pool.migration.site import OfferedBlock, Reservation, Selection, SubjectState
from kv_pool.migration.subjects import BlocksSubject, SequenceSubject, Subject
from kv_pool.storage.block_layout import BlockLayout

_LEAVING = "it is being moved to another node"
_ARRIVING = "it is being received from another node"
_decoder = msgspec.msgpack.Decoder(SubjectState)

_Rows = list[list[KVCacheBlock]]


@dataclass(frozen=True)
class _Departure:
    """A subject that is being moved away.

    Attributes:
        rows: the departing blocks, by sequence and group.
        tables: the detached block tables of each sequence; [] if its tables stay in the pool.
    """

    rows: dict[Any, _Rows]
    tables: dict[Any, list[BlockTable]]
    holds: list[Hold] = field(default_factory=list)


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
        sequences: `ManagerSequences` or `kv_pool.adapter.pool_sequences.PoolSequences`.
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
            sequences.block_size,
            hasher,
            sequences.describe_groups(),
            model=model,
            weights=weights,
        )
        self.leases = BlockLeases(sequences.pool, clock)
        self._block_sizes = sequences.list_block_sizes()
        self._owner: SequenceOwner[Any] = NoOwner() if owner is None else owner
        self._selector = Selector(sequences, self._owner)
        self._frozen: dict[Subject, _Departure] = {}
        # The remaining steps to complete or undo a call; `_recover` executes them after an interruption.
        self._unfinished: list[Callable[[], object]] = []

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
        self._recover()
        return self._selector.select(subject, for_move)

    def freeze(self, subject: Subject) -> None:
        """Freeze a subject for a move: it cannot be extended, freed or moved until `thaw` or `release`.

        Raises:
            FrozenSequenceError: the subject is already frozen. Nothing has changed.
        """
        self._recover()
        rows = self._selector.find_rows(subject)
        check_usable(self.sequences, rows)
        if subject in self._frozen:  # a subject without blocks, twice
            raise FrozenSequenceError("this subject, which has no blocks, is already being moved")
        departure = _Departure(rows, {sequence_id: [] for sequence_id in rows})
        undo = self._list_steps_to_stay(departure)
        self._unfinished = undo
        try:
            for sequence_id in rows:
                self.sequences.frozen[sequence_id] = _LEAVING
                self._hold_departing(departure, sequence_id)
            if isinstance(subject, SequenceSubject):
                undo += self._list_notices(subject, self._owner.resume)
                self._owner.suspend(self.sequences.as_id(subject.sequence_id))
            self._frozen[subject] = departure  # no calls from here on, so no interruption
            self._unfinished = []
        except BaseException:
            self._recover()
            raise

    def thaw(self, subject: Subject) -> None:
        """Unfreeze a subject whose move has failed; it can be used as before."""
        self._recover()
        steps = self._list_steps_to_stay(self._frozen[subject])
        self._complete([self._forget(subject), *steps, *self._list_notices(subject, self._owner.resume)])

    def release(self, subject: Subject, target: NodeName) -> None:
        """Drop the references to a subject that node `target` now has. Cached blocks stay cached."""
        self._recover()
        departure = self._frozen[subject]
        steps: list[Callable[[], object]] = [partial(self._end_holds, departure)]
        for sequence_id, rows in departure.rows.items():
            steps.append(partial(self.sequences.free, sequence_id, rows))
        steps.append(partial(self._unfreeze, departure.rows))
        notices = self._list_notices(subject, self._owner.on_departed, target)
        self._complete([self._forget(subject), *steps, *notices])

    def list_frozen(self) -> list[Any]:
        """Return the sequences that are being moved away, oldest first. Do not schedule them.

        The pool refuses to free or extend them. If the scheduler restarts a frozen request from its first
        token, its old blocks are freed when the move has ended.
        """
        self._recover()
        return [sequence_id for departure in self._frozen.values() for sequence_id in departure.rows]

    # ---- the target ------------------------------------------------------------------------------

    def reserve(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> Reservation:
        """Reserve one block for each offered block; a block that already has the content is touched instead.

        On return the missing blocks may be written: their old content is flushed to the lower tiers.

        Raises:
            OutOfBlocksError: too few blocks are free. Nothing has changed.
            InvalidArgumentError: this pool cannot receive the subject, for example because its id is in use.
        """
        self._recover()
        decoded = self._decode(subject, offered, state)
        sequence_ids = self._list_arriving(subject, decoded)
        is_whole = isinstance(subject, SequenceSubject)
        arriving = self.sequences.read_details(decoded.details, sequence_ids, len(offered), is_whole)
        found = self._find_all_present(offered, decoded)
        present = [block for block in found if block is not None]
        missing = [position for position, block in enumerate(found) if block is None]
        num_available = self.sequences.count_available(arriving) - sum(not block.ref_cnt for block in present)
        if offered and len(missing) > num_available:
            raise PoolExhaustedError(
                f"cannot reserve {len(missing)} blocks for a migration: {max(0, num_available)} of "
                f"{self.pool.num_gpu_blocks - 1} are free. Free a sequence or choose another target"
            )
        if is_whole:
            self._owner.expect(sequence_ids[0], len(offered), decoded.owner)
        holds: list[Hold] = []
        references: list[KVCacheBlock] = []
        self._unfinished = [
            partial(self._unfreeze, sequence_ids),
            partial(self._drop_held_blocks, references, holds),
        ]
        try:
            blocks = self._hold_blocks(found, references, holds)
            self.pool.flush_evicted()  # the missing blocks will be overwritten
            for sequence_id in sequence_ids:
                self.sequences.frozen[sequence_id] = _ARRIVING
            reservation = Reservation(
                subject, offered, blocks, missing, holds[0], sequence_ids, decoded, arriving
            )
            self._unfinished = []  # no calls from here on, so no interruption
        except BaseException:
            self._recover()
            raise
        return reservation

    def insert(self, reservation: Reservation) -> None:
        """Cache the received blocks, whose bytes were verified, and publish their events.

        The reservation keeps its references.
        """
        if self.pool.enable_caching:
            for position in reservation.missing:
                insert_keys(
                    self.pool,
                    reservation.blocks[position],
                    reservation.offered[position],
                    self._block_sizes.__getitem__,
                )

    def adopt(self, reservation: Reservation) -> None:
        """Take over the subject: pass the reservation's references to its sequences, free the other blocks.

        Raises:
            InvalidArgumentError: the sequence was started here during the migration. Nothing has changed.
            Errors of the owner: the sequence has lost the blocks; inserted blocks stay cached.
        """
        self._recover()
        if reservation.hold.is_released:  # `_recover` has completed an interrupted call
            return
        joining: dict[Any, list[KVCacheBlock]] = {}
        unheld: list[KVCacheBlock] = []
        is_whole = isinstance(reservation.subject, SequenceSubject)
        if is_whole:
            joining[reservation.sequence_ids[0]] = reservation.blocks
        else:
            for block, holder in zip(
                reservation.blocks, _list_holders(reservation.state, reservation.blocks), strict=True
            ):
                if holder is None:
                    unheld.append(block)
                else:
                    joining.setdefault(self.sequences.as_id(holder), []).append(block)
        steps: list[Callable[[], object]] = []
        for sequence_id, blocks in joining.items():
            join, rows = self.sequences.make_join(sequence_id, blocks, reservation.arriving)
            steps.append(join)
            if is_whole:
                steps.append(partial(self._notify_arrived, sequence_id, rows, reservation.state.owner))
        self._complete(
            [
                partial(self._unfreeze, reservation.sequence_ids),
                partial(self._hand_over, reservation.hold),
                partial(self.pool.free_out_of, unheld[::-1]),
                *steps,
            ]
        )

    def release_reservation(self, reservation: Reservation) -> None:
        """Drop the references of a reservation; the source keeps the subject. Inserted blocks stay cached."""
        self._recover()
        if not reservation.hold.is_released:
            self._complete(
                [partial(self._unfreeze, reservation.sequence_ids), partial(_release_all, [reservation.hold])]
            )

    def count_free_blocks(self) -> int:
        """Return the number of blocks that migrations could reserve now."""
        return max(0, self.sequences.count_available(None))

    # ---- references and holds, together ----------------------------------------------------------

    def _hold_departing(self, departure: _Departure, sequence_id: Any) -> None:
        """Hold all blocks of a sequence. The hold takes over the references of detached tables."""
        rows = self.sequences.list_rows(sequence_id)
        blocks = [block for row in rows for block in row if not block.is_null]
        reason = f"in sequence {sequence_id!r}, which is being moved to another node"
        tables = departure.tables[sequence_id]
        self.sequences.detach(sequence_id, tables)
        if tables:
            self.pool.holds.adopt(blocks, reason, departure.holds)
        else:
            self.pool.holds.open(blocks, reason, onto=departure.holds)

    def _end_holds(self, departure: _Departure) -> None:
        """Release the holds of a departure; detached tables get their references back."""
        if any(departure.tables.values()):
            for hold in departure.holds:
                self._hand_over(hold)
        else:
            _release_all(departure.holds)

    def _hold_blocks(
        self, found: list[KVCacheBlock | None], references: list[KVCacheBlock], holds: list[Hold]
    ) -> list[KVCacheBlock]:
        """Hold each found block, and a new block for each position without one."""
        self.sequences.touch_onto([block for block in found if block is not None], references)
        num_found = len(references)
        self.sequences.take_onto(references, found.count(None))
        left = iter(references[num_found:])
        blocks = [next(left) if block is None else block for block in found]
        self.pool.holds.adopt(blocks.copy(), "arriving from another node", holds)
        return blocks

    def _drop_held_blocks(self, references: list[KVCacheBlock], holds: list[Hold]) -> None:
        if holds:
            _release_all(holds)
        else:
            self.pool.free_out_of(references)

    def _hand_over(self, hold: Hold) -> None:
        """End a hold and pass its references to tables or sequences."""
        if not hold.is_released:
            self.pool.holds.hand_over(hold, [])

    def _list_steps_to_stay(self, departure: _Departure) -> list[Callable[[], object]]:
        """Return the steps that release a departure's holds and make its sequences usable again."""
        steps: list[Callable[[], object]] = [partial(self._end_holds, departure)]
        for sequence_id, rows in departure.rows.items():
            tables = departure.tables[sequence_id]
            steps.append(partial(self.sequences.attach, sequence_id, tables, rows))
        return [*steps, partial(self._unfreeze, departure.rows)]

    # ---- steps, each of which may be repeated ----------------------------------------------------

    def _complete(self, steps: list[Callable[[], object]]) -> None:
        """Execute all steps, even after an interruption: the other node may have completed its part."""
        try:
            self._unfinished = steps
            self._recover()
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Complete or undo an interrupted call. If interrupted itself, it can be called again."""
        self.pool.holds.settle()
        self.sequences.recover()
        while self._unfinished:
            try:
                self._unfinished[0]()
            except Exception:
                del self._unfinished[0]  # an error of the owner is raised once
                raise
            del self._unfinished[0]  # no call in between: the owner is notified once

    def _forget(self, subject: Subject) -> Callable[[], object]:
        return partial(self._frozen.pop, subject, None)

    def _unfreeze(self, sequence_ids: Iterable[Any]) -> None:
        for sequence_id in sequence_ids:
            self.sequences.frozen.pop(sequence_id, None)

    def _list_notices(
        self, subject: Subject, notify: Callable[..., object], *details: str
    ) -> list[Callable[[], object]]:
        if not isinstance(subject, SequenceSubject):
            return []
        return [partial(notify, self.sequences.as_id(subject.sequence_id), *details)]

    def _notify_arrived(self, sequence_id: Any, rows: _Rows, state: bytes) -> None:
        try:
            self._owner.on_arrived(sequence_id, state)
        except Exception:
            self._unfinished.append(partial(self.sequences.free, sequence_id, rows))
            raise

    # ---- checks and look-ups of an offer ---------------------------------------------------------

    def _decode(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> SubjectState:
        """Return the decoded state. Raises InvalidArgumentError if it does not fit the offer."""
        try:
            decoded = _decoder.decode(state) if state else SubjectState()
        except UNDECODABLE as error:
            raise InvalidArgumentError(f"cannot decode the source's subject state: {error}") from error
        expected = len(offered) if isinstance(subject, BlocksSubject) and state else 0
        if len(decoded.sequence_ids) != expected:
            raise InvalidArgumentError(
                f"the source offers {len(offered)} blocks and names sequences for "
                f"{len(decoded.sequence_ids)} of them; expected {expected}"
            )
        num_groups = len(self._block_sizes)
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
        if offered.num_tokens is None or offered.num_tokens % self._block_sizes[get_group_id(key)]:
            return None
        return self.pool.cached_block_hash_to_block.get_one_block(key)


def _list_holders(state: SubjectState, blocks: Sequence[object]) -> Sequence[SequenceId | RequestId | None]:
    """Return the sequence of each block of a `BlocksSubject`; None for each block of other subjects."""
    return state.sequence_ids or [None] * len(blocks)


def _release_all(holds: list[Hold]) -> None:
    for hold in holds:
        if not hold.is_released:
            hold.release()
