"""`KVPoolProtocol`: what a KV manager asks of a pool, and the records that go back and forth."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kv_pool.errors import KVPoolError

Contiguity = Literal["require", "prefer", "no"]
"""Consecutive ids or none at all; where they can be had; do not look for them."""

NORMAL, HIGH, URGENT = 0, 1, 2
"""Priorities of a request."""

NO_SEQUENCE = -1
"""The `BlockInfo.sequence_id` of a block that no sequence holds."""


@dataclass(slots=True)
class BlockAllocationRequest:
    """So many blocks for a sequence, or so many more.

    Attributes:
        priority: 0 normal, 1 high, 2 urgent.
        pinned: the blocks are pinned from the start: neither evicted nor moved until `unpin`.
        device_id: where the blocks must be; None for wherever the pool is.
        contiguous: see `Contiguity`.
        max_moves: blocks that may be moved to make a run; None for `num_blocks` where one is preferred,
            and as many as it takes where it is required.
    """

    num_blocks: int
    sequence_id: int
    priority: int = NORMAL
    pinned: bool = False
    device_id: int | None = None
    contiguous: Contiguity = "prefer"
    max_moves: int | None = None


@dataclass(slots=True)
class BlockInfo:
    """What is known of one block.

    Attributes:
        ref_count: how many hold the block; 0 for a free one.
        sequence_id: the sequence that has held it longest; `NO_SEQUENCE` for none.
        last_access_time: when any sequence that holds it was last used, in seconds of the pool's clock; 0.0
            for none.
        sequence_ids: all sequences that hold it, the one that has held it longest first.
    """

    block_id: int
    ref_count: int
    sequence_id: int
    device_id: int
    is_pinned: bool
    last_access_time: float
    sequence_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Eviction:
    """A sequence that lost its blocks.

    Attributes:
        block_ids: those that it held, in its order; they may belong to others now.
        for_sequence_id: the sequence that needed room; `NO_SEQUENCE` for a call of `GPUKVPool.evict`.
    """

    sequence_id: int
    block_ids: tuple[int, ...]
    for_sequence_id: int = NO_SEQUENCE


@dataclass(slots=True)
class AllocationResult:
    """What came of a request.

    Attributes:
        block_ids: the new blocks, in the order of the sequence; [] without success.
        allocated_memory: bytes; 0 where the pool does not know its blocks' size.
        allocation_time: milliseconds.
        fragmentation_rate: of the pool afterwards, see `KVPoolProtocol.get_fragmentation_rate`.
        is_contiguous: the new blocks have consecutive ids, lowest first.
        error: why it was refused; None with success.
    """

    success: bool
    block_ids: list[int]
    allocated_memory: int
    allocation_time: float
    fragmentation_rate: float
    is_contiguous: bool = False
    error: KVPoolError | None = None


@dataclass(slots=True)
class MigrationResult:
    """What came of a migration.

    Attributes:
        migrated_blocks: the new ids, on the target device; [] without success.
        migration_time: milliseconds.
        transferred_bytes: read there, as many as were written here.
        error: why nothing was migrated; None with success.
    """

    success: bool
    migrated_blocks: list[int] = field(default_factory=list)
    migration_time: float = 0.0
    transferred_bytes: int = 0
    error: KVPoolError | None = None


class KVPoolProtocol(ABC):
    """A pool of KV blocks on one device, by block ids and sequence ids.

    Under pressure a pool tries three things in this order: it moves blocks together (where ids may change),
    it evicts sequences that are not pinned, it refuses the request or has sequences migrate. A sequence is
    not evicted silently: its owner is called, or the next call that names the sequence raises an error.
    """

    @abstractmethod
    def allocate(self, request: BlockAllocationRequest) -> list[int]:
        """Take blocks for a sequence, after those that it has.

        Under pressure the pool moves blocks, evicts other sequences, or has them migrate before it refuses.

        Returns:
            Ids of blocks that nobody else holds, in the order of the sequence. Their KV slots still hold the
            last owner's bytes.
        Raises:
            MemoryError: the pool cannot serve this now, or the sequence was evicted. Nothing has changed.
        """

    @abstractmethod
    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back; one that others hold as well loses one reference."""

    @abstractmethod
    def get_block_info(self, block_id: int) -> BlockInfo:
        """What is known of a block, free or in use."""

    @abstractmethod
    def defragment(self) -> int:
        """Bring blocks in use together, so that free ids are consecutive.

        Returns:
            How many blocks changed their id. No block is lost, and none is taken.
        """

    @abstractmethod
    def migrate_blocks(self, block_ids: Sequence[int], target_device_id: int) -> list[int]:
        """Move blocks with their bytes to another device.

        Returns:
            Their ids there, in the same order; the old ones are given back here.
        """

    @abstractmethod
    def get_free_blocks(self) -> int:
        """How many blocks are free; cached ones that nobody holds count."""

    @abstractmethod
    def get_fragmentation_rate(self) -> float:
        """Share of the possible runs of free blocks that is lost to scattering, 0 to 1.

        0 where all free blocks are consecutive, at any fill.
        """
