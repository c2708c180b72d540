"""`KVPoolProtocol`: the interface between a KV manager and a pool, and its records."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kv_pool.errors import KVPoolError
from kv_pool.ids import BlockId, SequenceId

Contiguity = Literal["require", "prefer", "no"]
"""The demand for consecutive block ids: required, preferred, or ignored."""

NORMAL, HIGH, URGENT = 0, 1, 2
"""Priorities of an allocation request."""

NO_SEQUENCE = SequenceId(-1)
"""The `BlockInfo.sequence_id` of a block that no sequence uses."""


@dataclass(slots=True)
class BlockAllocationRequest:
    """A request for blocks of a new or an existing sequence.

    Attributes:
        num_blocks: number of blocks to allocate, in addition to those that the sequence has.
        priority: 0 normal, 1 high, 2 urgent.
        pinned: pin the blocks from the start: they are neither evicted nor moved until `unpin`.
        device_id: device that the blocks must be on; None for the pool's device.
        contiguous: see `Contiguity`.
        max_moves: the most blocks that may be moved to make a run; None: `num_blocks`, which always suffice.
    """

    num_blocks: int
    sequence_id: SequenceId
    priority: int = NORMAL
    pinned: bool = False
    device_id: int | None = None
    contiguous: Contiguity = "prefer"
    max_moves: int | None = None


@dataclass(slots=True)
class BlockInfo:
    """The state of one block.

    Attributes:
        ref_count: number of references to the block; 0 if it is free.
        sequence_id: the sequence that has used it longest; `NO_SEQUENCE` for none.
        last_access_time: the last access to any sequence that uses it, in seconds of the pool's clock, by
            default `time.monotonic`; 0.0 for none.
        sequence_ids: all sequences that use it, the one that has used it longest first.
    """

    block_id: BlockId
    ref_count: int
    sequence_id: SequenceId
    device_id: int
    is_pinned: bool
    last_access_time: float
    sequence_ids: tuple[SequenceId, ...] = ()


@dataclass(frozen=True, slots=True)
class Eviction:
    """A record of an evicted sequence.

    Attributes:
        block_ids: the blocks that it had, in its order; other sequences may use them now.
        for_sequence_id: the sequence that needed the blocks; `NO_SEQUENCE` for a call of `GPUKVPool.evict`.
    """

    sequence_id: SequenceId
    block_ids: tuple[BlockId, ...]
    for_sequence_id: SequenceId = NO_SEQUENCE


@dataclass(slots=True)
class AllocationResult:
    """The result of an allocation request, from `GPUKVPool.try_allocate`. `allocate` returns the ids alone.

    Attributes:
        block_ids: the new blocks, in the order of the sequence; [] on failure.
        allocated_memory: bytes; 0 if the pool does not know the size of its blocks.
        allocation_time: milliseconds.
        fragmentation_rate: of the pool afterwards, see `KVPoolProtocol.get_fragmentation_rate`.
        is_contiguous: whether the new blocks have consecutive ids, lowest first.
        error: the reason of the failure; None on success.
    """

    success: bool
    block_ids: list[BlockId]
    allocated_memory: int
    allocation_time: float
    fragmentation_rate: float
    is_contiguous: bool = False
    error: KVPoolError | None = None


@dataclass(slots=True)
class MigrationResult:
    """The result of a migration, from `GPUKVPool.try_migrate_blocks`.

    Attributes:
        migrated_blocks: the new ids, on the target device; [] on failure.
        migration_time: milliseconds.
        transferred_bytes: bytes copied from the source to the target.
        error: the reason of the failure; None on success.
    """

    success: bool
    migrated_blocks: list[BlockId] = field(default_factory=list)
    migration_time: float = 0.0
    transferred_bytes: int = 0
    error: KVPoolError | None = None


class KVPoolProtocol(ABC):
    """A pool of KV blocks on one device, addressed by block ids and sequence ids.

    If blocks run out, a pool first compacts (if ids may change), then evicts sequences that are not pinned,
    and then migrates sequences or refuses the request. An eviction is never silent: a callback reports it, or
    the next call with the sequence's id raises an error.
    """

    @abstractmethod
    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Allocate blocks for a sequence, after those that it already has.

        Before it refuses, the pool compacts, evicts other sequences, or migrates them.

        Returns:
            Ids of the new blocks, in the order of the sequence. No other sequence uses them. Their KV slots
            still hold the last owner's bytes.
        Raises:
            MemoryError: too few blocks can be freed now, or the sequence was evicted. Nothing has changed.
        """

    @abstractmethod
    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference to each block. A block without references becomes free."""

    @abstractmethod
    def get_block_info(self, block_id: BlockId) -> BlockInfo:
        """Return the state of a block, free or in use."""

    @abstractmethod
    def defragment(self) -> int:
        """Compact the pool: move blocks in use together, so that free ids are consecutive.

        Returns:
            The number of blocks whose id has changed. No block is freed or allocated.
        """

    @abstractmethod
    def migrate_blocks(self, block_ids: Sequence[BlockId], target_device_id: int) -> list[BlockId]:
        """Move blocks with their bytes to another device.

        Returns:
            Their ids there, in the same order. The old blocks are freed here.
        """

    @abstractmethod
    def get_free_blocks(self) -> int:
        """Return the number of free blocks, cached free ones included."""

    @abstractmethod
    def get_fragmentation_rate(self) -> float:
        """Return the share of the possible runs of free blocks that is lost to scattering, 0 to 1.

        0 if all free blocks are consecutive, however many there are.
        """
