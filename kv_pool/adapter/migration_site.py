"""`GPUKVPoolSite`: a `GPUKVPool` with its bytes, as migration sees it: sequences, blocks, prefixes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kv_pool.adapter.holdings import Holder, as_new_id
from kv_pool.adapter.sequence_owner import SequenceOwner
from kv_pool.adapter.site_pool import SitePool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.holds import Hold
from kv_pool.errors import (
    FrozenSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    PinnedBlockError,
    PoolExhaustedError,
    StaleTransferError,
)
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHash, BlockHashWithGroupId
from kv_pool.manager.leases import BlockLeases
from kv_pool.migration.arriving_keys import insert_keys, list_keys
from kv_pool.migration.notice import Notice
from kv_pool.migration.site import MigrationSite, OfferedBlock, Room, Selection
from kv_pool.migration.subjects import BlocksSubject, PrefixSubject, SequenceSubject, Subject
from kv_pool.protocol import NO_SEQUENCE, NORMAL, URGENT
from kv_pool.storage.block_layout import BlockLayout

_Drops = list[tuple[Holder, KVCacheBlock]]


class _State(msgspec.Struct, frozen=True, array_like=True):
    """What goes along with the blocks.

    Attributes:
        sequence_ids: whose each block is, where a subject is blocks; `NO_SEQUENCE` for nobody's.
        priorities: of these sequences.
        owner: what the sequence's owner says.
    """

    sequence_ids: list[int] = []
    priorities: dict[int, int] = {}
    owner: bytes = b""


@dataclass
class _Departure:
    """Blocks that are being moved away, or are about to stay.

    Attributes:
        drops: who loses which block.
        old_ids: of these blocks, once they are given up.
        have_left: another node has them now.
        notice: tells the sequence's owner.
    """

    subject: Subject
    drops: _Drops
    old_ids: list[int]
    have_left: bool = False
    notice: Notice = field(default_factory=Notice)


@dataclass
class _Arrival:
    """References, holds and bars of a room that is being made."""

    found: list[KVCacheBlock]
    taken: list[KVCacheBlock]
    holds: list[Hold]
    barred_ids: tuple[int, ...]


@dataclass
class _Settling:
    """A room that ends, and who gets its references.

    Attributes:
        joining: sequences, each with its blocks.
        unheld: blocks of no sequence.
        notice: tells the sequence's owner.
    """

    room: Room
    joining: list[tuple[Holder, list[KVCacheBlock]]]
    unheld: list[KVCacheBlock]
    notice: Notice = field(default_factory=Notice)


@dataclass(frozen=True)
class _PoolRoom(Room):
    """A room, and the sequences that are barred until it is adopted, left or dropped."""

    barred_ids: tuple[int, ...] = ()


class GPUKVPoolSite(MigrationSite):
    """A pool's sequences, blocks and prefixes, to be copied or moved.

    | subject | at the source | at the target |
    |---|---|---|
    | a sequence | all its blocks; shared ones stay with the others | a new sequence with this id |
    | blocks | of the sequence that has held each longest, or cached | at the end of the same sequences |
    | a prefix | cached blocks, copied | cached and free: `claim_prefix` hits them |

    A sequence that is on its way is neither added to, freed, shared nor pinned, at both ends, and neither
    evicted nor compacted: see `FrozenSequenceError`.

    Args:
        hasher: by which blocks are named; nodes with another one are refused. None for other kinds of hashes.
        owner: the engine, see `SequenceOwner`; None where blocks are all there is to a sequence.
        clock: seconds, never falling, that of the migrator.
        model, weights: their names; nodes with others are refused. "" where they are not named.
    Raises:
        InvalidArgumentError: the pool has no storage.

    Nothing is evicted from sequences to make room for what comes; the reserve is kept for those of priority 1
    and 2, here as everywhere.
    """

    def __init__(
        self,
        pool: SitePool,
        *,
        hasher: BlockHasher | None = None,
        owner: SequenceOwner | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        weights: str = "",
    ) -> None:
        if pool.storage is None:
            raise InvalidArgumentError("blocks migrate between pools that have a storage; this one has none")
        self.pool = pool
        self.storage = pool.storage
        self.layout = BlockLayout.describe(
            pool.storage, pool.block_size, hasher, model=model, weights=weights
        )
        self.lock = pool.lock
        self.leases = BlockLeases(pool.block_pool, clock)
        self._holdings = pool.holdings
        self._owner = owner
        self._frozen: dict[Subject, _Departure] = {}
        # What an interrupted call leaves for `_recover`: blocks to stay or to be given up, a room that is no
        # room yet, and one that ends, with who gets its references.
        self._departing: _Departure | None = None
        self._arriving: _Arrival | None = None
        self._settling: _Settling | None = None
        self._records: dict[int, list[int]] = {}

    # ---- the source ------------------------------------------------------------------------------

    def select(self, subject: Subject, for_move: bool) -> Selection:
        match subject:
            case SequenceSubject():
                return self._select_sequence(subject, for_move)
            case BlocksSubject():
                return self._select_blocks(subject, for_move)
            case _:
                if for_move:
                    raise InvalidArgumentError("a prefix is copied, not moved: it stays cached here")
                return self._select_prefix(subject)

    def freeze(self, subject: Subject) -> None:
        self._recover()
        drops = self._find_drops(subject)
        for holder, _ in drops:
            self._holdings.check_usable(holder.sequence_id)
        if subject in self._frozen:  # no blocks at all, twice
            raise FrozenSequenceError("nothing is being moved already, and can not be moved twice at a time")
        departure = _Departure(subject, drops, [])
        self._departing = departure
        try:
            for sequence_id in {holder.sequence_id for holder, _ in drops}:
                self._holdings.bar(sequence_id, "is being moved to another node")
            if self._owner is not None and isinstance(subject, SequenceSubject):
                departure.notice = Notice(partial(self._owner.resume, _get_id(subject)))
                self._owner.suspend(_get_id(subject))
            self._frozen[subject] = departure  # no call from here on
            self._departing = None
        except BaseException:
            self._recover()
            raise

    def thaw(self, subject: Subject) -> None:
        self._recover()
        self._unfreeze(subject, [], False, self._frozen[subject].notice)

    def release(self, subject: Subject, selection: Selection, target: str, new_ids: Sequence[int]) -> None:
        self._recover()
        old_ids = [block.block_id for _, block in self._frozen[subject].drops]
        notice = Notice()
        if self._owner is not None and isinstance(subject, SequenceSubject):
            notice = Notice(partial(self._owner.give_up, _get_id(subject), target))
        self._unfreeze(subject, old_ids, True, notice)

    def _unfreeze(self, subject: Subject, old_ids: list[int], have_left: bool, notice: Notice) -> None:
        departure = self._frozen[subject]
        try:
            departure.old_ids = old_ids  # no call from here on
            departure.have_left = have_left
            departure.notice = notice
            self._departing = departure
            del self._frozen[subject]
            self._recover()
        except BaseException:
            self._recover()
            raise

    def record_release(self, sequence_id: int) -> list[int]:
        """A list that gets the ids which the sequence's blocks had here, when it is given up for good.

        A second call makes a new list, and the first one stays empty.
        """
        with self.lock:
            self._records[sequence_id] = []
            return self._records[sequence_id]

    def forget_record(self, sequence_id: int, record: list[int]) -> None:
        """Nobody looks at this list any more."""
        with self.lock:
            if self._records.get(sequence_id) is record:
                del self._records[sequence_id]

    # ---- the target ------------------------------------------------------------------------------

    def take_room(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> Room:
        self._recover()
        decoded = _decode(subject, offered, state)
        barred_ids = self._check_arrival(subject, decoded)
        found: list[KVCacheBlock | None] = []
        seen: set[KVCacheBlock] = set()
        for position, block in enumerate(offered):
            # What a sequence holds already, or another block of the offer gets, can not be held once more.
            is_anybodys = _get_owner(decoded, position) == NO_SEQUENCE
            hit = self._find_content(block) if is_anybodys else None
            found.append(None if hit in seen else hit)
            if hit is not None:
                seen.add(hit)
        touched = [block for block in found if block is not None]
        missing = [position for position, block in enumerate(found) if block is None]
        priority = min(decoded.priorities.values(), default=NORMAL if len(offered) else URGENT)
        num_available = self.pool.count_available(priority) - sum(not block.ref_cnt for block in touched)
        if len(missing) > num_available:
            raise PoolExhaustedError(
                f"{len(missing)} blocks cannot migrate to device {self.pool.device_id}: "
                f"{max(0, num_available)} of {self.pool.total_blocks} are free there. Free a sequence, or "
                "choose another target"
            )
        if self._owner is not None and isinstance(subject, SequenceSubject):
            self._owner.expect(_get_id(subject), len(offered), decoded.owner)
        placement = self.pool.placement
        block_pool = self.pool.block_pool
        taken: list[KVCacheBlock] = []
        arrival = _Arrival([], taken, [], barred_ids)
        self._arriving = arrival
        try:
            block_pool.touch_onto(touched, arrival.found)
            if missing and not placement.take_run(len(missing), None, "prefer", taken):
                placement.take_any(len(missing), None, taken)
            for sequence_id in barred_ids:
                self._holdings.bar(sequence_id, "is coming from another node")
            left = iter(taken)
            blocks = [next(left) if block is None else block for block in found]
            hold = block_pool.holds.open_onto(blocks, "arriving from another node", arrival.holds)
            room = _PoolRoom(blocks, missing, hold, barred_ids)
            self._arriving = None
        except BaseException:
            self._recover()
            raise
        return room

    def insert(self, subject: Subject, offered: Sequence[OfferedBlock], room: Room, state: bytes) -> None:
        block_pool = self.pool.block_pool
        if block_pool.enable_caching:
            for position in room.missing:
                insert_keys(block_pool, room.blocks[position], offered[position], self._get_block_size)

    def adopt(self, subject: Subject, offered: Sequence[OfferedBlock], room: Room, state: bytes) -> None:
        decoded = _decode(subject, offered, state)
        joining: dict[int, tuple[Holder, list[KVCacheBlock]]] = {}
        unheld: list[KVCacheBlock] = []
        only_id = _get_id(subject) if isinstance(subject, SequenceSubject) else None
        for position, block in enumerate(room.blocks):
            sequence_id = _get_owner(decoded, position) if only_id is None else only_id
            if sequence_id == NO_SEQUENCE:
                unheld.append(block)
                continue
            if sequence_id not in joining:
                joining[sequence_id] = self._find_or_make(sequence_id, decoded), []
            joining[sequence_id][1].append(block)
        unheld.reverse()
        notice = Notice()
        if only_id is not None and self._owner is not None:
            notice = Notice(partial(self._owner.take_over, only_id, decoded.owner))
        self._settle(_Settling(room, list(joining.values()), unheld, notice))

    def _settle(self, settling: _Settling) -> None:
        """Pass the references of a room on, whatever interrupts it: the source may have given up its own."""
        self._recover()
        if settling.room.hold.is_released:  # an interrupted call that ended it was completed
            return
        try:
            self._settling = settling
            self._recover()
        except BaseException:
            self._recover()
            raise

    def leave(self, room: Room) -> None:
        self._settle(_Settling(room, [], room.blocks[::-1]))

    def drop(self, room: Room) -> None:
        self.leave(room)

    def count_free_blocks(self) -> int:
        return max(0, self.pool.count_available(NORMAL))

    # ---- interrupts ------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Complete or undo what an exception interrupted; may itself be interrupted and called again."""
        block_pool = self.pool.block_pool
        if block_pool.run_index.is_stale:
            block_pool.rebuild_index()
        if self._departing is not None:
            self._end_departure(self._departing)
            self._departing = None
        arrival = self._arriving
        if arrival is not None:
            for sequence_id in arrival.barred_ids:
                self._holdings.unbar(sequence_id)
            for hold in arrival.holds:
                if not hold.is_released:
                    hold.release()
            block_pool.free_out_of(arrival.taken)
            block_pool.free_out_of(arrival.found)
            self._arriving = None
        settling = self._settling
        if settling is not None:
            self._end(settling.room)
            for holder, blocks in settling.joining:
                self._holdings.hold_arrived(holder, blocks)
            block_pool.free_out_of(settling.unheld)
            settling.notice.send()
            self._settling = None

    def _end_departure(self, departure: _Departure) -> None:
        """Let blocks stay, or give them up; again, if it was interrupted."""
        subject = departure.subject
        for sequence_id in {holder.sequence_id for holder, _ in departure.drops}:
            self._holdings.unbar(sequence_id)
        if departure.have_left:
            if self._holdings.is_unfinished:
                self._holdings.recover()
            left = [(holder, block) for holder, block in departure.drops if block in holder.blocks]
            if left:
                self._holdings.drop(left)
            sequence_id = _get_id(subject) if isinstance(subject, SequenceSubject) else NO_SEQUENCE
            record = self._records.get(sequence_id)
            if record is not None:
                record += departure.old_ids  # no call in between
                del self._records[sequence_id]
        departure.notice.send()

    # ---- selecting -------------------------------------------------------------------------------

    def _select_sequence(self, subject: SequenceSubject, for_move: bool) -> Selection:
        sequence_id = _get_id(subject)
        holder = self._holdings.find(sequence_id)
        blocks = list(holder.blocks)
        if for_move:
            self._holdings.check_usable(sequence_id)
            self._check_not_pinned(blocks)
        owner = b"" if self._owner is None else self._owner.describe(sequence_id)
        state = _State(priorities={sequence_id: holder.priority}, owner=owner)
        offered = self._offer([(holder, block) for block in blocks])
        return Selection(blocks, offered, msgspec.msgpack.encode(state))

    def _select_blocks(self, subject: BlocksSubject, for_move: bool) -> Selection:
        if for_move:
            held = self._holdings.find_drops(subject.block_ids, None)
        self._check_blocks(subject)
        blocks = [self.pool.block_pool.blocks[block_id] for block_id in subject.block_ids]
        if for_move:
            self._check_not_pinned(blocks)
        else:
            held = [
                (self._holdings.first_holders[block], block)
                for block in blocks
                if block in self._holdings.first_holders
            ]
        by_block = {block: holder for holder, block in held}
        offered = dict(zip(by_block, self._offer(held), strict=True))
        state = _State(
            [by_block[block].sequence_id if block in by_block else NO_SEQUENCE for block in blocks],
            {holder.sequence_id: holder.priority for holder, _ in held},
        )
        return Selection(
            blocks,
            [offered[block] if block in offered else self._describe(block, None, ()) for block in blocks],
            msgspec.msgpack.encode(state),
        )

    def _select_prefix(self, subject: PrefixSubject) -> Selection:
        hashes = [BlockHash(block_hash) for block_hash in subject.block_hashes]
        blocks = self.pool.block_pool.find_cached_prefix(hashes, len(hashes))
        parents = [None, *hashes]
        return Selection(blocks, [self._describe(block, parents[at], ()) for at, block in enumerate(blocks)])

    def _check_blocks(self, subject: BlocksSubject) -> None:
        if len(set(subject.block_ids)) != len(subject.block_ids):
            raise InvalidBlockError(f"of these blocks one is listed twice: {list(subject.block_ids)[:20]}")
        if subject.generations and len(subject.generations) != len(subject.block_ids):
            raise InvalidArgumentError(
                f"{len(subject.generations)} generations of {len(subject.block_ids)} blocks"
            )
        for position, block_id in enumerate(subject.block_ids):
            block = self._holdings.find_block(block_id)
            if subject.generations and block.generation != subject.generations[position]:
                raise StaleTransferError(
                    f"block {block_id} was taken anew since it was named: its generation was "
                    f"{subject.generations[position]} and is {block.generation}"
                )
            if block not in self._holdings.first_holders and block.block_hash is None:
                raise InvalidBlockError(f"block {block_id} is neither held by a sequence nor cached")

    def _check_not_pinned(self, blocks: Sequence[KVCacheBlock]) -> None:
        pins = self._holdings.pins
        if pins.is_any_pinned(blocks):
            pinned = next(block for block in blocks if block in pins)
            raise PinnedBlockError(f"block {pinned.block_id} is pinned and does not migrate; unpin it first")

    def _offer(self, held: Sequence[tuple[Holder, KVCacheBlock]]) -> list[OfferedBlock]:
        """What the target is told of blocks of sequences, each with the one before it and its tokens."""
        parents: dict[KVCacheBlock, BlockHash | None] = {}
        tokens: dict[KVCacheBlock, tuple[int, ...]] = {}
        for holder in dict.fromkeys(holder for holder, _ in held):
            known = () if self._owner is None else self._owner.list_token_ids(holder.sequence_id)
            parent = None
            for position, block in enumerate(holder.blocks):
                parents[block] = parent
                parent = None if block.block_hash is None else get_block_hash(block.block_hash)
                start = position * self.pool.block_size
                if block.block_hash is not None and start + self.pool.block_size <= len(known):
                    tokens[block] = tuple(known[start : start + self.pool.block_size])
        return [self._describe(block, parents[block], tokens.get(block, ())) for _, block in held]

    def _describe(
        self, block: KVCacheBlock, parent: BlockHash | None, token_ids: tuple[int, ...]
    ) -> OfferedBlock:
        num_tokens = block.block_hash_num_tokens
        is_first = (num_tokens or 0) <= self.pool.block_size
        keys = list_keys(self.pool.block_pool, block)
        return OfferedBlock(
            block.block_id, block.generation, keys, num_tokens, None if is_first else parent, token_ids
        )

    def _find_drops(self, subject: Subject) -> _Drops:
        if isinstance(subject, SequenceSubject):
            holder = self._holdings.find(_get_id(subject))
            return [(holder, block) for block in holder.blocks]
        if isinstance(subject, BlocksSubject):
            return self._holdings.find_drops(subject.block_ids, None)
        raise InvalidArgumentError("a prefix is copied, not moved: it stays cached here")

    # ---- taking in -------------------------------------------------------------------------------

    def _check_arrival(self, subject: Subject, state: _State) -> tuple[int, ...]:
        """The sequences that nobody may touch until the blocks are theirs."""
        if isinstance(subject, SequenceSubject):
            sequence_id = _get_id(subject)
            if sequence_id in self._holdings.holders:
                raise InvalidArgumentError(
                    f"sequence {sequence_id} holds blocks on device {self.pool.device_id} already"
                )
            sequence_ids = [sequence_id]
        else:
            sequence_ids = list(dict.fromkeys(set(state.sequence_ids) - {NO_SEQUENCE}))
        for sequence_id in sequence_ids:
            as_new_id("sequence_id", sequence_id)
            self._holdings.check_usable(sequence_id)
        return tuple(sequence_ids)

    def _find_content(self, offered: OfferedBlock) -> KVCacheBlock | None:
        """The block here that is hit by what the offered one is hit by."""
        if not offered.keys or not self.pool.block_pool.enable_caching:
            return None
        key = BlockHashWithGroupId(offered.keys[0])
        return self.pool.block_pool.cached_block_hash_to_block.get_one_block(key)

    def _find_or_make(self, sequence_id: int, state: _State) -> Holder:
        holder = self._holdings.holders.get(sequence_id)
        if holder is not None:
            return holder
        return Holder(sequence_id, state.priorities.get(sequence_id, NORMAL), self.pool.get_time())

    def _end(self, room: Room) -> None:
        assert isinstance(room, _PoolRoom)
        if not room.hold.is_released:
            room.hold.release()
        for sequence_id in room.barred_ids:
            self._holdings.unbar(sequence_id)

    def _get_block_size(self, group_id: int) -> int:
        return self.pool.block_size


def _get_id(subject: SequenceSubject) -> int:
    if not isinstance(subject.sequence_id, int):
        raise InvalidArgumentError(
            f"sequence {subject.sequence_id!r} is none of a GPUKVPool: its sequences have numbers"
        )
    return subject.sequence_id


def _get_owner(state: _State, position: int) -> int:
    return state.sequence_ids[position] if state.sequence_ids else NO_SEQUENCE


def _decode(subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> _State:
    """The state, if it fits what is offered. Raises InvalidArgumentError."""
    try:
        decoded = msgspec.msgpack.decode(state, type=_State) if state else _State()
    except UNDECODABLE as error:
        raise InvalidArgumentError(
            f"what the source says of its blocks is not of a GPUKVPool: {error}"
        ) from error
    expected = len(offered) if isinstance(subject, BlocksSubject) and state else 0
    if len(decoded.sequence_ids) != expected or not set(decoded.priorities.values()) <= {0, 1, 2}:
        raise InvalidArgumentError(
            f"the source offers {len(offered)} blocks of {len(decoded.sequence_ids)} sequences, with the "
            f"priorities {sorted(decoded.priorities.values())[:10]}"
        )
    for block in offered:
        for key in block.keys:
            if len(key) < 5 or get_group_id(BlockHashWithGroupId(key)) != 0:
                raise InvalidArgumentError(
                    f"block {block.block_id} of the source has the key {key.hex()}, which is not of group 0"
                )
    return decoded
