"""`ManagerSite`: the requests, prefixes and cached blocks of a `KVCacheManager`, as migration sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.holds import Hold
from kv_pool.errors import (
    InvalidArgumentError,
    InvalidBlockError,
    OutOfBlocksError,
    StaleTransferError,
    UnknownSequenceError,
)
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHash, BlockHashWithGroupId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.leases import BlockLeases
from kv_pool.manager.swap.sides import DeviceSide
from kv_pool.migration.arriving_keys import insert_keys, list_keys
from kv_pool.migration.notice import Notice
from kv_pool.migration.site import MigrationSite, OfferedBlock, Room, Selection
from kv_pool.migration.subjects import BlocksSubject, PrefixSubject, SequenceSubject, Subject
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage

_ARRIVING = "arriving from another node"


class _TableState(msgspec.Struct, array_like=True):
    """A block table in positions of the offer, -1 for the null block."""

    places: list[int]
    num_cached_blocks: int
    num_null_blocks: int
    is_forked: bool


class _RequestState(msgspec.Struct):
    tables: list[_TableState]
    request: bytes


@dataclass
class _Hashes:
    """As much of a request as a look-up by hashes needs."""

    request_id: str
    num_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)


@dataclass
class _Departure:
    """A request that is being moved away, or is about to stay.

    Attributes:
        tables: what the manager had; empty where it has them.
        holds: on their blocks.
        blocks: of each table, until they are given back.
        has_left: another node has the request now.
        notice: tells the scheduler.
    """

    request_id: str
    tables: list[BlockTable]
    holds: list[Hold]
    blocks: list[list[KVCacheBlock]]
    has_left: bool = False
    notice: Notice = field(default_factory=Notice)


class ManagerSite(MigrationSite):
    """A manager and the storage of its blocks. All KV cache groups go along.

    | subject | here | at the target |
    |---|---|---|
    | a sequence | a request's block tables; while it is moved, the manager does not know it | tables again |
    | a prefix | the longest one that all groups can go on from | cached and free, so that it is hit |
    | blocks | cached ones, by id; copied only | the same |

    Args:
        manager: of the blocks.
        storage: of their bytes, those of all groups.
        hasher: by which the requests' blocks are named; None for hashes of another kind.
        lock: held by the engine from `allocate_slots` until the step's bytes are in the blocks, and whenever
            it calls the manager; reentrant. None for a new one.
        clock: the time in seconds, never falling; the same as the migrator's.
        describe_request: what the other scheduler needs to go on with a request, such as its tokens and the
            number of them that are computed; 16 MiB at most. None for nothing.
        adopt_request: called with a request's id and what was said of it, when its tables are in the manager;
            what it raises ends the migration as failed.
        release_request: called with the id of a request that has moved away, and the name of its node, when
            its blocks are given back.
        model, weights: their names; nodes with others are refused. "" where they are not named.

    The three callbacks are called with the lock held, by threads of the migrator.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        storage: BlockStorage,
        *,
        hasher: BlockHasher | None,
        lock: AbstractContextManager[object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        describe_request: Callable[[str], bytes] | None = None,
        adopt_request: Callable[[str, bytes], object] | None = None,
        release_request: Callable[[str, str], object] | None = None,
        model: str = "",
        weights: str = "",
    ) -> None:
        self.manager = manager
        self.storage = storage
        self.lock = threading.RLock() if lock is None else lock
        self.leases = BlockLeases(manager.block_pool, clock)
        groups = _describe_groups(manager)
        self.layout = BlockLayout.describe(
            storage, manager.block_size, hasher, groups, model=model, weights=weights
        )
        self._side = DeviceSide(manager)
        self._describe_request = describe_request
        self._adopt_request = adopt_request
        self._release_request = release_request
        self._frozen: dict[str, _Departure] = {}
        # Room for what is arriving, each with the request that it is for, None for a prefix or blocks.
        self._rooms: list[tuple[Room, str | None]] = []
        # What an interrupted call leaves for `_recover`: a request to be put back or given up, references and
        # holds of no room, and of a room that ends.
        self._departing: _Departure | None = None
        self._arriving: tuple[list[KVCacheBlock], list[Hold]] | None = None
        self._leaving: tuple[Room, list[KVCacheBlock]] | None = None

    # ---- the source ------------------------------------------------------------------------------

    def select(self, subject: Subject, for_move: bool) -> Selection:
        if isinstance(subject, SequenceSubject):
            return self._select_request(str(subject.sequence_id))
        if for_move:
            raise InvalidArgumentError(
                "a prefix, and blocks by their ids, are copied: they stay cached here while there is room. "
                "A request is moved, with its blocks"
            )
        if isinstance(subject, PrefixSubject):
            return self._select_prefix(subject)
        return self._select_blocks(subject)

    def freeze(self, subject: Subject) -> None:
        request_id = _get_request_id(subject)
        self._check_not_frozen(request_id)
        manager = self.manager
        blocks = [manager.get_table(request_id, group_id).blocks for group_id in range(len(manager.groups))]
        departure = _Departure(request_id, [], [], blocks)
        reason = f"in request {request_id!r}, which is being moved to another node"
        self._departing = departure
        try:
            manager.block_pool.holds.open_onto(list(chain.from_iterable(blocks)), reason, departure.holds)
            manager.pop_tables_onto(request_id, departure.tables)
            self._frozen[request_id] = departure  # no call from here on
            manager.taken_out[request_id] = "it is being moved to another node"
            self._departing = None
        except BaseException:
            self._recover()
            raise

    def thaw(self, subject: Subject) -> None:
        self._unfreeze(subject, False, Notice())

    def release(self, subject: Subject, selection: Selection, target: str, new_ids: Sequence[int]) -> None:
        notice = Notice()
        if self._release_request is not None:
            notice = Notice(partial(self._release_request, _get_request_id(subject), target))
        self._unfreeze(subject, True, notice)

    def list_frozen(self) -> list[str]:
        """Requests that are being moved away: do not schedule them. Oldest first.

        The manager refuses to free them, or to go on with them, and says why. One that the scheduler begins
        anew, from its first token, has its old blocks freed when the move has ended.
        """
        self._recover()
        return list(self._frozen)

    # ---- the target ------------------------------------------------------------------------------

    def take_room(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> Room:
        self._recover()
        self._check_groups(offered)
        request_id = None
        num_to_leave = 0
        if isinstance(subject, SequenceSubject):
            request_id = str(subject.sequence_id)
            self._check_absent(request_id)
            self._check_tables(state, len(offered))
            if self.manager.list_request_ids():
                num_to_leave = self.manager.watermark_blocks
        found: list[KVCacheBlock | None] = []
        present: list[KVCacheBlock] = []
        for one in offered:
            block = self._find_present(one)
            if block is not None and block not in present:
                present.append(block)
                found.append(block)
            else:
                found.append(None)
        missing = [position for position, block in enumerate(found) if block is None]
        num_available = self.count_free_blocks() - sum(map(self._side.is_free, present)) - num_to_leave
        if len(missing) > num_available:
            raise OutOfBlocksError(
                f"no room for {len(missing)} blocks of another node: {max(0, num_available)} are free here "
                f"of {self.manager.block_pool.num_gpu_blocks - 1}. Free a request, or choose another target"
            )
        pool = self.manager.block_pool
        referenced: list[KVCacheBlock] = []
        holds: list[Hold] = []
        self._arriving = referenced, holds
        try:
            pool.touch_onto(present, referenced)
            if self.manager.retention is not None:
                self.manager.retention.note_taken(present)
            self.manager.take_onto(referenced, len(missing))
            taken = iter(referenced[len(present) :])
            blocks = [next(taken) if block is None else block for block in found]
            room = Room(blocks, missing, pool.holds.open_onto(blocks, _ARRIVING, holds))
            self._rooms += [(room, request_id)]  # no call from here on
            self._arriving = None
        except BaseException:
            self._recover()
            raise
        return room

    def insert(self, subject: Subject, offered: Sequence[OfferedBlock], room: Room, state: bytes) -> None:
        pool = self.manager.block_pool
        if pool.enable_caching:
            for position in room.missing:
                insert_keys(pool, room.blocks[position], offered[position], self._find_block_size)

    def adopt(self, subject: Subject, offered: Sequence[OfferedBlock], room: Room, state: bytes) -> None:
        if not isinstance(subject, SequenceSubject):
            self.leave(room)
            return
        request_id = str(subject.sequence_id)
        decoded = self._check_tables(state, len(offered))
        null_block = self.manager.block_pool.null_block
        tables = []
        for state_of_one in decoded.tables:
            table = BlockTable()
            table.blocks = [null_block if place < 0 else room.blocks[place] for place in state_of_one.places]
            table.num_cached_blocks = state_of_one.num_cached_blocks
            table.num_null_blocks = state_of_one.num_null_blocks
            table.is_forked = state_of_one.is_forked
            tables.append(table)
        try:
            self.manager.put_tables(request_id, tables)
            if self._adopt_request is not None:
                self._adopt_request(request_id, decoded.request)
            self._forget_room(room)
        except BaseException:
            if room.hold.is_released:
                self._forget_room(room)
            elif self.manager.holds_blocks(request_id) and self.manager.get_table(request_id) is tables[0]:
                self.manager.pop_tables(request_id)
            raise

    def leave(self, room: Room) -> None:
        self._recover()
        if room.hold.is_released:  # an interrupted call that ended it was completed
            return
        left = room.blocks[::-1]
        try:
            self._leaving = room, left
            self._recover()
        except BaseException:
            self._recover()
            raise

    def drop(self, room: Room) -> None:
        self.leave(room)

    def count_free_blocks(self) -> int:
        return self.manager.get_num_free_blocks()

    def list_held_blocks(self) -> list[KVCacheBlock]:
        """Blocks on which this site has a reference, once for each: of frozen requests and of rooms.

        Leases have theirs beside these.
        """
        self._recover()
        held = [block for room, _ in self._rooms for block in room.blocks]
        for departure in self._frozen.values():
            held += [block for row in departure.blocks for block in row if not block.is_null]
        return held

    # ---- interrupts ------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Complete or undo what an exception interrupted; may itself be interrupted and called again."""
        if self._departing is not None:
            self._end_departure(self._departing)
            self._departing = None
        if self._arriving is not None:
            referenced, holds = self._arriving
            for hold in holds:
                if not hold.is_released:
                    hold.release()
            self.manager.free_out_of(referenced)
            self._arriving = None
        if self._leaving is not None:
            room, left = self._leaving
            self._forget_room(room)
            self.manager.free_out_of(left)
            self._leaving = None

    def _end_departure(self, departure: _Departure) -> None:
        """Put a request back, or give its blocks back; again, if it was interrupted."""
        manager = self.manager
        request_id = departure.request_id
        for hold in departure.holds:
            if not hold.is_released:
                hold.release()
        if departure.tables and not departure.has_left and not manager.holds_blocks(request_id):
            manager.put_tables_out_of(request_id, departure.tables)
        if departure.tables:  # it has left, or the scheduler did not wait for it and began anew
            self._side.free_request(request_id, departure.blocks)
        if departure.has_left and manager.retention is not None and manager.retention.is_active:
            manager.retention.forget_request(request_id)
        departure.notice.send()

    # ---- selecting -------------------------------------------------------------------------------

    def _select_request(self, request_id: str) -> Selection:
        self._check_not_frozen(request_id)
        manager = self.manager
        if not manager.holds_blocks(request_id):
            raise UnknownSequenceError(f"request {request_id!r} has no blocks here")
        blocks: list[KVCacheBlock] = []
        offered: list[OfferedBlock] = []
        states: list[_TableState] = []
        for group_id in range(len(manager.groups)):
            table = manager.get_table(request_id, group_id)
            manager.copies.check_made(request_id, table.blocks)
            places = []
            parent: bytes | None = None
            for block in table.blocks:
                if block.is_null:
                    places.append(-1)
                    parent = None
                    continue
                places.append(len(offered))
                blocks.append(block)
                offered.append(self._offer(block, parent))
                parent = None if block.block_hash is None else get_block_hash(block.block_hash)
            states.append(
                _TableState(places, table.num_cached_blocks, table.num_null_blocks, table.is_forked)
            )
        request = b"" if self._describe_request is None else self._describe_request(request_id)
        return Selection(blocks, offered, msgspec.msgpack.encode(_RequestState(states, request)))

    def _select_prefix(self, subject: PrefixSubject) -> Selection:
        hashes = [BlockHash(block_hash) for block_hash in subject.block_hashes]
        hash_block_size = self.manager.block_pool.hash_block_size
        wanted: Any = _Hashes("", len(hashes) * hash_block_size, block_hashes=hashes)
        found = self.manager.get_computed_blocks(wanted, wanted.num_tokens)
        blocks: list[KVCacheBlock] = []
        offered: list[OfferedBlock] = []
        for spec, hits in zip(self.manager.groups, found.blocks, strict=True):
            stride = max(1, spec.block_size // hash_block_size)
            for position, block in enumerate(hits):
                if not block.is_null:
                    blocks.append(block)
                    offered.append(self._offer(block, hashes[position * stride - 1] if position else None))
        return Selection(blocks, offered)

    def _select_blocks(self, subject: BlocksSubject) -> Selection:
        pool = self.manager.block_pool
        if len(set(subject.block_ids)) != len(subject.block_ids):
            raise InvalidArgumentError("a block is named twice")
        if subject.generations and len(subject.generations) != len(subject.block_ids):
            raise InvalidArgumentError(
                f"{len(subject.generations)} generations of {len(subject.block_ids)} blocks"
            )
        blocks: list[KVCacheBlock] = []
        for position, block_id in enumerate(subject.block_ids):
            if not 0 < block_id < len(pool.blocks):
                raise InvalidBlockError(f"block {block_id} is not one of 1 to {len(pool.blocks) - 1}")
            block = pool.blocks[block_id]
            if subject.generations and subject.generations[position] != block.generation:
                raise StaleTransferError(
                    f"block {block_id} was taken anew since it was named: its generation was "
                    f"{subject.generations[position]} and is {block.generation}"
                )
            if block.block_hash is None:
                raise InvalidBlockError(
                    f"block {block_id} is not cached, so nobody would find it elsewhere; migrate its request"
                )
            blocks.append(block)
        return Selection(blocks, [self._offer(block, None) for block in blocks])

    def _offer(self, block: KVCacheBlock, parent: bytes | None) -> OfferedBlock:
        keys = list_keys(self.manager.block_pool, block)
        return OfferedBlock(block.block_id, block.generation, keys, block.block_hash_num_tokens, parent)

    # ---- taking in -------------------------------------------------------------------------------

    def _find_present(self, offered: OfferedBlock) -> KVCacheBlock | None:
        """The block that holds this content here; full ones only, since a request writes into others."""
        if not offered.keys or not self.manager.block_pool.enable_caching:
            return None
        key = BlockHashWithGroupId(offered.keys[0])
        if offered.num_tokens is None or offered.num_tokens % self._find_block_size(get_group_id(key)):
            return None
        return self.manager.block_pool.cached_block_hash_to_block.get_one_block(key)

    def _find_block_size(self, group_id: int) -> int:
        return self.manager.groups[group_id].block_size

    def _check_groups(self, offered: Sequence[OfferedBlock]) -> None:
        num_groups = len(self.manager.groups)
        for one in offered:
            for key in one.keys:
                if len(key) < 5 or get_group_id(BlockHashWithGroupId(key)) >= num_groups:
                    raise InvalidArgumentError(
                        f"block {one.block_id} of the source has the key {key.hex()}, which is of none of "
                        f"the {num_groups} groups here"
                    )

    def _check_absent(self, request_id: str) -> None:
        self._check_not_frozen(request_id)
        is_arriving = any(arriving == request_id for _, arriving in self._rooms)
        if is_arriving or self.manager.holds_blocks(request_id):
            raise InvalidArgumentError(
                f"request {request_id!r} {'is arriving here already' if is_arriving else 'has blocks here'}"
            )

    def _unfreeze(self, subject: Subject, has_left: bool, notice: Notice) -> None:
        self._recover()
        request_id = _get_request_id(subject)
        departure = self._frozen[request_id]
        try:
            departure.has_left = has_left  # no call from here on
            departure.notice = notice
            self._departing = departure
            del self._frozen[request_id]
            if request_id in self.manager.taken_out:
                del self.manager.taken_out[request_id]
            self._recover()
        except BaseException:
            self._recover()
            raise

    def _check_not_frozen(self, request_id: str) -> None:
        self._recover()
        if request_id in self._frozen:
            raise InvalidArgumentError(f"request {request_id!r} is being moved to another node")

    def _check_tables(self, state: bytes, num_offered: int) -> _RequestState:
        """The state, if it has one table for each group, and each block of the offer is in one of them."""
        try:
            decoded = msgspec.msgpack.decode(state, type=_RequestState)
        except UNDECODABLE as error:
            raise InvalidArgumentError(f"the source's state of a request can not be read: {error}") from error
        places = sorted(place for table in decoded.tables for place in table.places if place >= 0)
        if len(decoded.tables) != len(self.manager.groups) or places != list(range(num_offered)):
            raise InvalidArgumentError(
                f"the source's request has {len(decoded.tables)} tables over {len(places)} blocks, here "
                f"there are {len(self.manager.groups)} groups, and {num_offered} blocks were offered"
            )
        return decoded

    def _forget_room(self, room: Room) -> None:
        if not room.hold.is_released:
            room.hold.release()
        for index, (known, _) in enumerate(self._rooms):
            if known is room:
                del self._rooms[index]
                return


def _get_request_id(subject: Subject) -> str:
    if not isinstance(subject, SequenceSubject):
        raise InvalidArgumentError("only a request is moved")
    return str(subject.sequence_id)


def _describe_groups(manager: KVCacheManager) -> tuple[str, ...]:
    """The groups in words; () for what `BlockLayout` says by itself."""
    pool = manager.block_pool
    first = manager.groups[0]
    is_plain = len(manager.groups) == 1 and isinstance(first, FullAttentionSpec)
    if is_plain and first.block_size == pool.hash_block_size and not pool.num_hash_lookahead_tokens:
        return ()
    hashed = f"hashes of {pool.hash_block_size} tokens and {pool.num_hash_lookahead_tokens} ahead"
    return (*map(repr, manager.groups), hashed)
