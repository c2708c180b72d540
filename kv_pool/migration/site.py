"""`MigrationSite`: a pool with its bytes, as migration sees it; what a source gives and a target takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold
from kv_pool.manager.leases import BlockLeases
from kv_pool.migration.subjects import Subject
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of an offer.

    Attributes:
        block_id, generation: at the source.
        keys: hashes with their groups, by which it is found there; () for a block that is not cached.
        num_tokens: from the start of the sequence that the first key covers; None if that is not known.
        parent: the hash of the block before it, for events; None for the first, or if that is not known.
        token_ids: of this block, where the source knows them; () otherwise.
    """

    block_id: int
    generation: int
    keys: tuple[bytes, ...] = ()
    num_tokens: int | None = None
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Selection:
    """What a subject comes down to, at the source, at this moment.

    Attributes:
        blocks: distinct blocks with content, in the order of the sequence.
        offered: the same, as the target is told of them.
        state: what else the target needs to go on: the source's own words, which only a site of its kind
            reads. At most 16 MiB.
    """

    blocks: list[KVCacheBlock]
    offered: list[OfferedBlock]
    state: bytes = b""


@dataclass(frozen=True)
class Room:
    """Blocks at the target for those of an offer, one each, in order; the caller holds a reference on each.

    Attributes:
        missing: positions whose bytes have to be read. The others' content was here already.
        hold: keeps the blocks at their ids until `adopt`, `leave` or `drop`.
    """

    blocks: list[KVCacheBlock]
    missing: list[int]
    hold: Hold


class MigrationSite(ABC):
    """One pool, its storage and its lock. All methods are called with `lock` held, and none waits.

        source     select -> (lend) -> freeze, for a move -> release  when the target has acknowledged
                                                          -> thaw     when it has not
        target     take_room -> (read, verify) -> insert -> adopt     when the source has given up its own,
                                                 |                    or was only copied
                                                 |       -> leave     it has not: a cached copy stays
                                                 -> drop              anything failed before

    Attributes:
        storage, layout: the bytes of the blocks, and what they mean.
        leases: of this pool.
        lock: held by whoever uses the pool, such as an engine during its step; reentrant.
    """

    storage: BlockStorage
    layout: BlockLayout
    leases: BlockLeases
    lock: AbstractContextManager[object]

    @abstractmethod
    def select(self, subject: Subject, for_move: bool) -> Selection:
        """The blocks of a subject. Only looks.

        Raises:
            UnknownSequenceError, InvalidBlockError, PinnedBlockError, InvalidArgumentError: there is no such
                thing here, or it can not be given away.
            StaleTransferError: a block was taken anew since it was named.
        """

    @abstractmethod
    def freeze(self, subject: Subject) -> None:
        """A move has begun: nobody adds to, frees, or moves the subject until `thaw` or `release`.

        Raises:
            InvalidArgumentError: it is frozen already. Nothing has changed.
        """

    @abstractmethod
    def thaw(self, subject: Subject) -> None:
        """The move has failed: the subject is used here as before."""

    @abstractmethod
    def release(self, subject: Subject, selection: Selection, target: str, new_ids: Sequence[int]) -> None:
        """The target has the subject now: give up our hold on it. Cached blocks stay cached until reused.

        Args:
            target: the node's name.
            new_ids: the blocks' ids there, in the selection's order.
        """

    @abstractmethod
    def take_room(self, subject: Subject, offered: Sequence[OfferedBlock], state: bytes) -> Room:
        """Take a block for each that is offered; one whose content is here already is touched instead.

        All of them are held in place, see `Room`.

        Raises:
            OutOfBlocksError: too few blocks are free. Nothing has changed.
            InvalidArgumentError: the subject can not be taken in, such as a sequence whose id is in use.
        """

    @abstractmethod
    def insert(self, subject: Subject, offered: Sequence[OfferedBlock], room: Room, state: bytes) -> None:
        """The bytes have arrived and are as they were sent: the blocks can be hit from now on.

        Events tell of them. Our references stay.
        """

    @abstractmethod
    def adopt(self, subject: Subject, offered: Sequence[OfferedBlock], room: Room, state: bytes) -> None:
        """The subject is ours: our references go over to its holder; a prefix's become free, and cached."""

    @abstractmethod
    def leave(self, room: Room) -> None:
        """The source keeps the subject: drop our references. What was inserted stays cached."""

    @abstractmethod
    def drop(self, room: Room) -> None:
        """Nothing came of it: drop our references. Blocks that were to be written are empty."""

    @abstractmethod
    def count_free_blocks(self) -> int:
        """How many blocks a target could give to migrations now."""
