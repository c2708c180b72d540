"""`PoolSite`: a pool with its bytes, as migration sees it: what a source gives and a target takes."""

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
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.leases import BlockLeases
from kv_pool.migration.arriving_keys import insert_keys
from kv_pool.migration.selector import Selector, check_usable
from kv_pool.migration.sequence_owner import NoOwner, SequenceOwner
from kv_pool.migration.sequences import Sequences
from kv_pool.migration.site import OfferedBlock, Room, Selection, SubjectState
from kv_pool.migration.subjects import BlocksSubject, SequenceSubject, Subject
from kv_pool.storage.block_layout import BlockLayout

_LEAVING = "it is being moved to another node"
_ARRIVING = "it is coming from another node"
_decoder = msgspec.msgpack.Decoder(SubjectState)

_Rows = list[list[KVCacheBlock]]


@dataclass(frozen=True)
class _Departure:
    """A subject that is being moved away.

    Attributes:
        rows: the blocks that leave, by sequence and group.
        tables: of each sequence, where it has none in the pool meanwhile.
    """

    rows: dict[Any, _Rows]
    tables: dict[Any, list[BlockTable]]
    holds: list[Hold] = field(default_factory=list)


class PoolSite:
    """One pool, its storage and its lock. Every method is called with `lock` held, and none waits.

        source     select -> (lend) -> freeze, for a move -> release  when the target has acknowledged
                                                          -> thaw     when it has not
        target     take_room -> (read, verify) -> insert -> adopt     when the source has given up its own,
                                                 |                    or was only copied
                                                 +------> leave       anything failed before

    | subject | at the source | at the target |
    |---|---|---|
    | a sequence, or request | all its blocks; shared ones stay with the others | a new one with this id |
    | blocks | of the sequences that have held each longest, or cached | at the end of the same, or cached |
    | a prefix | the longest cached one, copied | cached and free, so that it is hit |

    A sequence that is on its way cannot be used at either end: see `FrozenSequenceError`. It is neither
    evicted nor compacted. No sequence is evicted to make room for what comes.

    Args:
        sequences: `ManagerSequences` or `kv_pool.adapter.pool_sequences.PoolSequences`.
        hasher: by which blocks are named; nodes with another one are refused. None for other kinds of hashes.
        owner: the engine, see `SequenceOwner`; None where blocks are all there is to a sequence.
        clock: seconds, never falling, that of the migrator.
        model, weights: their names; nodes with others are refused. "" where they are not named.

    Attributes:
        storage, layout: the bytes of the blocks, and what they mean.
        leases: of this pool.
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
        # What is left to do to complete or undo a call: `_recover` does it, whatever interrupts that.
        self._unfinished: list[Callable[[], object]] = []

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by every user of the pool, such as an engine during its step; reentrant."""
        return self.sequences.lock

    # ---- the source ------------------------------------------------------------------------------

    def select(self, subject: Subject, for_move: bool) -> Selection:
        """The blocks of a subject. Only looks.

        Raises:
            UnknownSequenceError, FrozenSequenceError, InvalidBlockError, PinnedBlockError,
                InvalidArgumentError: there is no such thing here, or it cannot be given away.
            StaleTransferError: a block was taken anew since it was named.
        """
        self._recover()
        return self._selector.select(subject, for_move)

    def freeze(self, subject: Subject) -> None:
        """Begin a move: no other caller adds to, frees, or moves the subject until `thaw` or `release`.

        Raises:
            FrozenSequenceError: it is frozen already. Nothing has changed.
        """
        self._recover()
        rows = self._selector.find_rows(subject)
        check_usable(self.sequences, rows)
        if subject in self._frozen:  # no blocks at all, twice
            raise FrozenSequenceError("nothing is being moved already, and cannot be moved twice at a time")
        departure = _Departure(rows, {sequence_id: [] for sequence_id in rows})
        undo = self._list_steps_to_stay(departure)
        self._unfinished = undo
        try:
            for sequence_id in rows:
                self.sequences.barred[sequence_id] = _LEAVING
                self._hold_departing(departure, sequence_id)
            if isinstance(subject, SequenceSubject):
                undo += self._list_notices(subject, self._owner.resume)
                self._owner.suspend(self.sequences.as_id(subject.sequence_id))
            self._frozen[subject] = departure  # no call from here on
            self._unfinished = []
        except BaseException:
            self._recover()
            raise

    def thaw(self, subject: Subject) -> None:
        """The move has failed: the subject is used here as before."""
        self._recover()
        steps = self._list_steps_to_stay(self._frozen[subject])
        self._complete([self._forget(subject), *steps, *self._list_notices(subject, self._owner.resume)])

    def release(self, subject: Subject, target: str) -> None:
        """The node `target` has the subject now: drop our references. Cached blocks stay cached."""
        self._recover()
        departure = self._frozen[subject]
        steps: list[Callable[[], object]] = [partial(self._end_holds, departure)]
        for sequence_id, rows in departure.rows.items():
            steps.append(partial(self.sequences.free, sequence_id, rows))
        steps.append(partial(self._unbar, departure.rows))
        notices = self._list_notices(subject, self._owner.give_up, target)
        self._complete([self._forget(subject), *steps, *notices])

    def list_frozen(self) -> list[Any]:
        """Sequences that are being moved away: do not schedule them. Oldest first.

        The pool refuses to free them, or to go on with them, and says why. A request that a scheduler begins
        again, from its first token, has its old blocks freed when the move has ended.
        """
        self._recover()
        return [sequence_id for departure in self._frozen.values() for sequence_id in departure.rows]

    # ---- the target ------------------------------------------------------------------------------

    def take_room(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> Room:
        """Take a block for each that is offered; one whose content is here already is touched instead.

        On return the missing blocks may be written: colder tiers have what was in them.

        Raises:
            OutOfBlocksError: too few blocks are free. Nothing has changed.
            InvalidArgumentError: the subject cannot come here, such as a sequence whose id is in use.
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
                f"no room for {len(missing)} blocks of another node: {max(0, num_available)} are free here "
                f"of {self.pool.num_gpu_blocks - 1}. Free a sequence, or choose another target"
            )
        if is_whole:
            self._owner.expect(sequence_ids[0], len(offered), decoded.owner)
        holds: list[Hold] = []
        references: list[KVCacheBlock] = []
        self._unfinished = [
            partial(self._unbar, sequence_ids),
            partial(self._give_claim_up, references, holds),
        ]
        try:
            blocks = self._claim_blocks(found, references, holds)
            self.pool.store_pending()  # the missing ones will be written
            for sequence_id in sequence_ids:
                self.sequences.barred[sequence_id] = _ARRIVING
            room = Room(subject, offered, blocks, missing, holds[0], sequence_ids, decoded, arriving)
            self._unfinished = []  # no call from here on
        except BaseException:
            self._recover()
            raise
        return room

    def insert(self, room: Room) -> None:
        """The bytes have arrived and are as they were sent: the blocks can be hit from now on.

        Events tell of them. The room keeps its references.
        """
        if self.pool.enable_caching:
            for position in room.missing:
                insert_keys(
                    self.pool, room.blocks[position], room.offered[position], self._block_sizes.__getitem__
                )

    def adopt(self, room: Room) -> None:
        """The subject is ours: its sequences get the references of the room; other blocks are free, cached.

        Raises:
            InvalidArgumentError: the sequence was begun here meanwhile. Nothing has changed.
            What the owner raises. The sequence has lost the blocks; what was inserted stays cached.
        """
        self._recover()
        if room.hold.is_released:  # an interrupted call that ended the room was completed
            return
        joining: dict[Any, list[KVCacheBlock]] = {}
        unheld: list[KVCacheBlock] = []
        is_whole = isinstance(room.subject, SequenceSubject)
        if is_whole:
            joining[room.sequence_ids[0]] = room.blocks
        else:
            for block, holder in zip(room.blocks, _list_holders(room.state, room.blocks), strict=True):
                if holder is None:
                    unheld.append(block)
                else:
                    joining.setdefault(self.sequences.as_id(holder), []).append(block)
        steps: list[Callable[[], object]] = []
        for sequence_id, blocks in joining.items():
            join, rows = self.sequences.make_join(sequence_id, blocks, room.arriving)
            steps.append(join)
            if is_whole:
                steps.append(partial(self._have_taken_over, sequence_id, rows, room.state.owner))
        self._complete(
            [
                partial(self._unbar, room.sequence_ids),
                partial(self._hand_over, room.hold),
                partial(self.pool.free_out_of, unheld[::-1]),
                *steps,
            ]
        )

    def leave(self, room: Room) -> None:
        """The source keeps the subject: drop our references. What was inserted stays cached."""
        self._recover()
        if not room.hold.is_released:
            self._complete([partial(self._unbar, room.sequence_ids), partial(_release_all, [room.hold])])

    def count_free_blocks(self) -> int:
        """How many blocks a target could give to migrations now."""
        return max(0, self.sequences.count_available(None))

    # ---- references and holds, together ----------------------------------------------------------

    def _hold_departing(self, departure: _Departure, sequence_id: Any) -> None:
        """Hold all blocks of a sequence; the hold gets the references of tables that are detached."""
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
        """Release the holds on blocks; detached tables get their references back."""
        if any(departure.tables.values()):
            for hold in departure.holds:
                self._hand_over(hold)
        else:
            _release_all(departure.holds)

    def _claim_blocks(
        self, found: list[KVCacheBlock | None], references: list[KVCacheBlock], holds: list[Hold]
    ) -> list[KVCacheBlock]:
        """Hold each found block, and a new one for each that is not found."""
        self.sequences.touch_onto([block for block in found if block is not None], references)
        num_found = len(references)
        self.sequences.take_onto(references, found.count(None))
        left = iter(references[num_found:])
        blocks = [next(left) if block is None else block for block in found]
        self.pool.holds.adopt(blocks.copy(), "arriving from another node", holds)
        return blocks

    def _give_claim_up(self, references: list[KVCacheBlock], holds: list[Hold]) -> None:
        if holds:
            _release_all(holds)
        else:
            self.pool.free_out_of(references)

    def _hand_over(self, hold: Hold) -> None:
        """End a hold whose references tables or sequences get."""
        if not hold.is_released:
            self.pool.holds.hand_over(hold, [])

    def _list_steps_to_stay(self, departure: _Departure) -> list[Callable[[], object]]:
        """Release the holds on blocks that were to leave, and let their sequences be used."""
        steps: list[Callable[[], object]] = [partial(self._end_holds, departure)]
        for sequence_id, rows in departure.rows.items():
            tables = departure.tables[sequence_id]
            steps.append(partial(self.sequences.attach, sequence_id, tables, rows))
        return [*steps, partial(self._unbar, departure.rows)]

    # ---- steps, each of which may be repeated ----------------------------------------------------

    def _complete(self, steps: list[Callable[[], object]]) -> None:
        """Do all of them, whatever interrupts it: the other node may have done its part."""
        try:
            self._unfinished = steps
            self._recover()
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Complete or undo what an exception interrupted; may itself be interrupted and called again."""
        self.pool.holds.settle()
        self.sequences.recover()
        while self._unfinished:
            try:
                self._unfinished[0]()
            except Exception:
                del self._unfinished[0]  # what the owner raises is raised once
                raise
            del self._unfinished[0]  # no call in between: the owner is told once

    def _forget(self, subject: Subject) -> Callable[[], object]:
        return partial(self._frozen.pop, subject, None)

    def _unbar(self, sequence_ids: Iterable[Any]) -> None:
        for sequence_id in sequence_ids:
            self.sequences.barred.pop(sequence_id, None)

    def _list_notices(
        self, subject: Subject, tell: Callable[..., object], *words: str
    ) -> list[Callable[[], object]]:
        if not isinstance(subject, SequenceSubject):
            return []
        return [partial(tell, self.sequences.as_id(subject.sequence_id), *words)]

    def _have_taken_over(self, sequence_id: Any, rows: _Rows, state: bytes) -> None:
        try:
            self._owner.take_over(sequence_id, state)
        except Exception:
            self._unfinished.append(partial(self.sequences.free, sequence_id, rows))
            raise

    # ---- taking in -------------------------------------------------------------------------------

    def _decode(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> SubjectState:
        """The state, if it fits what is offered. Raises InvalidArgumentError."""
        try:
            decoded = _decoder.decode(state) if state else SubjectState()
        except UNDECODABLE as error:
            raise InvalidArgumentError(f"the source's state of its blocks cannot be read: {error}") from error
        expected = len(offered) if isinstance(subject, BlocksSubject) and state else 0
        if len(decoded.sequence_ids) != expected:
            raise InvalidArgumentError(
                f"the source offers {len(offered)} blocks of {len(decoded.sequence_ids)} sequences"
            )
        num_groups = len(self._block_sizes)
        for block in offered:
            for key in block.keys:
                if len(key) < 5 or get_group_id(BlockHashWithGroupId(key)) >= num_groups:
                    raise InvalidArgumentError(
                        f"block {block.block_id} of the source has the key {key.hex()}, which is of none of "
                        f"the {num_groups} groups here"
                    )
        return decoded

    def _list_arriving(self, subject: Subject, state: SubjectState) -> tuple[Any, ...]:
        """The sequences that get blocks, in the pool's own ids; no migration has them now."""
        listed = [subject.sequence_id] if isinstance(subject, SequenceSubject) else state.sequence_ids
        sequence_ids = dict.fromkeys(self.sequences.as_id(one) for one in listed if one is not None)
        check_usable(self.sequences, sequence_ids)
        return tuple(sequence_ids)

    def _find_all_present(
        self, offered: Sequence[OfferedBlock], state: SubjectState
    ) -> list[KVCacheBlock | None]:
        """For each offered block the one here that has its content, each once; None where there is none."""
        found: list[KVCacheBlock | None] = []
        seen: set[KVCacheBlock] = set()
        for one, holder in zip(offered, _list_holders(state, offered), strict=True):
            # A block that joins a sequence that is here may be in it already.
            block = self._find_present(one) if holder is None else None
            if block is None or block in seen:
                found.append(None)
            else:
                found.append(block)
                seen.add(block)
        return found

    def _find_present(self, offered: OfferedBlock) -> KVCacheBlock | None:
        """The block that holds this content here; full ones only, since sequences write into others."""
        if not offered.keys or not self.pool.enable_caching:
            return None
        key = BlockHashWithGroupId(offered.keys[0])
        if offered.num_tokens is None or offered.num_tokens % self._block_sizes[get_group_id(key)]:
            return None
        return self.pool.cached_block_hash_to_block.get_one_block(key)


def _list_holders(state: SubjectState, blocks: Sequence[object]) -> Sequence[int | str | None]:
    """The sequence of each block of a `BlocksSubject`; None for each of others."""
    return state.sequence_ids or [None] * len(blocks)


def _release_all(holds: list[Hold]) -> None:
    for hold in holds:
        if not hold.is_released:
            hold.release()
