"""`KVCacheAllocator`: K and V of sequences by sequence id and position, in blocks that sequences share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.core.arguments import as_count, as_int
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError, PoolExhaustedError, UnknownSequenceError
from kv_pool.ids import BlockHash, BlockId, BlockMove, RequestId, SequenceId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.slot_mapping import find_block_and_offset, list_slots
from kv_pool.reports.statistics import PoolStatistics, read_statistics
from kv_pool.storage.kv_storage import KVStorage


class SequencePageTable:
    """The block table of one sequence; the allocator updates it, and passes it to its manager as a request.

    Attributes:
        sequence_id, block_size: as given to the allocator.
        length: number of tokens that have slots.
        blocks: block ids in the order of the tokens.
    """

    # Without caching, only the token counts of a request matter.
    block_hashes: Sequence[BlockHash] = ()
    all_token_ids: Sequence[int] = ()
    lora_request: Any = None
    mm_features: Sequence[Any] | None = None
    cache_salt: str | None = None

    def __init__(self, sequence_id: SequenceId, block_size: int) -> None:
        self.sequence_id = sequence_id
        self.block_size = block_size
        self.blocks: list[BlockId] = []
        self.request_id = RequestId(str(sequence_id))
        self.num_computed_tokens = self.num_tokens = 0

    @property
    def length(self) -> int:
        return self.num_computed_tokens

    @property
    def block_offsets(self) -> list[int]:
        """The position of the first token of each block."""
        return [index * self.block_size for index in range(len(self.blocks))]

    def __repr__(self) -> str:
        return f"<SequencePageTable {self.sequence_id}: {self.length} tokens in blocks {self.blocks}>"

    def get_physical_location(self, virtual_position: int) -> tuple[BlockId, int]:
        """Return the block of a token and the token's offset in it.

        Raises:
            InvalidArgumentError: the sequence has no such position; also a `ValueError`.
        """
        if not 0 <= virtual_position < self.length:
            raise InvalidArgumentError(
                f"position {virtual_position} of sequence {self.sequence_id} is not one of its "
                f"{self.length} tokens"
            )
        return find_block_and_offset(self.blocks, virtual_position, self.block_size)

    def get_all_blocks(self) -> list[BlockId]:
        """Return the ids of the sequence's blocks in the order of its tokens."""
        return list(self.blocks)


class KVCacheAllocator:
    """An allocator of K and V blocks for sequences that grow, fork and end; ids from 0 to total_blocks - 1.

        >>> from kv_pool.integrations.sequence_allocator import KVCacheAllocator
        >>> allocator = KVCacheAllocator(total_blocks=8, block_size=4, num_heads=2, head_dim=16)
        >>> table = allocator.allocate_sequence(7, initial_length=6)
        >>> table.blocks, table.get_physical_location(5)
        ([0, 1], (1, 1))
        >>> allocator.extend_sequence(7, additional_tokens=3)
        >>> table.blocks, len(allocator.free_blocks), len(allocator.used_blocks)
        ([0, 1, 2], 5, 3)

    Combines a `KVCacheManager` and a `KVStorage`. For prefix caching, scheduling and preemption use
    `KVCacheManager`; with transformers use `PagedSequences`.

    Args:
        block_size: tokens per block.
        num_heads, head_dim, num_layers, dtype, device: of K and V, see `KVStorage.allocate`.
        library: "torch" for tensors also on the CPU, where the default is NumPy arrays.

    Attributes:
        total_blocks, block_size, num_heads, head_dim: as given.
        manager: the block tables, whose block ids are one higher: its pool has a null block.
        storage: the bytes; same block ids.
    Raises:
        InvalidArgumentError: one of the sizes is below 1.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        dtype: str = "float16",
        device: str = "cpu",
        library: str | None = None,
    ) -> None:
        self.total_blocks = as_count("total_blocks", total_blocks, 1)
        self.block_size = as_count("block_size", block_size, 1)
        self.num_heads = as_count("num_heads", num_heads, 1)
        self.head_dim = as_count("head_dim", head_dim, 1)
        self.manager = KVCacheManager(BlockPool(self.total_blocks + 1, False, self.block_size))
        self.storage = KVStorage.allocate(
            self.total_blocks,
            self.block_size,
            as_count("num_layers", num_layers, 1),
            self.num_heads,
            self.head_dim,
            dtype=dtype,
            device=device,
            library=library,  # type: ignore[arg-type]
        )
        self._tables: dict[SequenceId, SequencePageTable] = {}

    @staticmethod
    def count_blocks(
        memory_bytes: float,
        block_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype_bytes: int = 2,
    ) -> int:
        """Return how many blocks of K and V, for all layers together, fit into `memory_bytes`.

            >>> from kv_pool.integrations.sequence_allocator import KVCacheAllocator
            >>> KVCacheAllocator.count_blocks(24 * 2**30 * 0.7, 16, num_layers=32, num_heads=32, head_dim=128)
            2150

        Raises:
            InvalidArgumentError: not even one block fits.
        """
        block_bytes = 2 * num_layers * num_heads * head_dim * dtype_bytes * block_size  # of K and V
        if block_bytes < 1:
            raise InvalidArgumentError(
                f"a block of {block_size} tokens with {num_heads} heads of {head_dim} elements in "
                f"{num_layers} layers, {dtype_bytes} bytes each, has no K and V"
            )
        num_blocks = int(memory_bytes // block_bytes)  # no null block: ids run from 0
        if num_blocks < 1:
            raise InvalidArgumentError(
                f"{memory_bytes:,.0f} bytes are too few for a block of {block_size} tokens, which takes "
                f"{block_bytes:,}"
            )
        return num_blocks

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def sequence_tables(self) -> Mapping[SequenceId, SequencePageTable]:
        """The block tables by sequence id, read-only."""
        return MappingProxyType(self._tables)

    @property
    def used_blocks(self) -> set[BlockId]:
        """Ids of blocks that sequences hold. O(held blocks)."""
        return {block_id for table in self._tables.values() for block_id in table.blocks}

    @property
    def free_blocks(self) -> set[BlockId]:
        """Ids of all other blocks. O(blocks)."""
        return set(map(BlockId, range(self.total_blocks))) - self.used_blocks

    def get_statistics(self) -> PoolStatistics:
        """Return a snapshot of counts and shares, such as for an `AllocationMonitor`. O(blocks)."""
        return read_statistics(
            self.manager.block_pool,
            block_size=self.block_size,
            run_length=DEFAULT_RUN_LENGTH,
            num_sequences=len(self._tables),
        )

    def get_utilization(self) -> float:
        """Return the share of the slots in used blocks that hold a token, 0 to 1; 1.0 if none is used."""
        # A shared block counts as full as its fullest sequence makes it.
        filled: dict[BlockId, int] = {}
        for table in self._tables.values():
            for index, block_id in enumerate(table.blocks):
                num_tokens = min(self.block_size, table.length - index * self.block_size)
                filled[block_id] = max(filled.get(block_id, 0), num_tokens)
        return sum(filled.values()) / (len(filled) * self.block_size) if filled else 1.0

    # ---- sequences -------------------------------------------------------------------------------

    def allocate_sequence(self, sequence_id: SequenceId, initial_length: int = 0) -> SequencePageTable:
        """Create a sequence with slots for `initial_length` tokens.

        Raises:
            PoolExhaustedError: too few blocks are free; also a `MemoryError`.
            InvalidArgumentError: the sequence exists, or the length is negative. In both cases nothing has
                changed.
        """
        sequence_id = SequenceId(as_int("sequence_id", sequence_id))
        if sequence_id in self._tables:
            raise InvalidArgumentError(f"sequence {sequence_id} already exists; free_sequence() it first")
        table = SequencePageTable(sequence_id, self.block_size)
        self._extend(table, as_count("initial_length", initial_length))
        self._tables[sequence_id] = table
        return table

    def extend_sequence(self, sequence_id: SequenceId, additional_tokens: int) -> None:
        """Append slots for more tokens to a sequence.

        If new tokens go into a shared block, the block is copied first.

        Raises:
            UnknownSequenceError: there is no such sequence.
            PoolExhaustedError: too few blocks are free.
            InvalidArgumentError: the number is negative. In all cases nothing has changed.
        """
        self._extend(self.find(sequence_id), as_count("additional_tokens", additional_tokens))

    def fork_sequence(self, parent_id: SequenceId, child_id: SequenceId) -> SequencePageTable:
        """Create a sequence that shares all tokens and blocks of another one.

        Raises:
            UnknownSequenceError: there is no such parent.
            InvalidArgumentError: the child exists. In both cases nothing has changed.
        """
        parent = self.find(parent_id)
        child = SequencePageTable(SequenceId(as_int("child_id", child_id)), self.block_size)
        if child.sequence_id in self._tables:
            raise InvalidArgumentError(f"sequence {child_id} already exists; free_sequence() it first")
        child.num_computed_tokens = child.num_tokens = parent.length
        if parent.length:
            self.manager.fork(parent, child)
            child.blocks = parent.get_all_blocks()
        self._tables[child.sequence_id] = child
        return child

    def free_sequence(self, sequence_id: SequenceId) -> None:
        """End a sequence and free the blocks that no other sequence shares.

        Raises:
            UnknownSequenceError: there is no such sequence. Was it freed twice?
        """
        table = self.find(sequence_id)
        if table.length:
            self.manager.free(table)
        del self._tables[table.sequence_id]

    def find(self, sequence_id: SequenceId) -> SequencePageTable:
        """Return the sequence's table. Raises UnknownSequenceError."""
        table = self._tables.get(SequenceId(as_int("sequence_id", sequence_id)))
        if table is None:
            raise UnknownSequenceError(f"there is no sequence {sequence_id}; allocate_sequence() it first")
        return table

    # ---- K and V ---------------------------------------------------------------------------------

    def write(self, layer: int, sequence_id: SequenceId, position: int, key: Any, value: Any) -> None:
        """Store K and V of the tokens from `position` on, each (num_tokens, num_heads, head_dim).

        Write each token only once, after it was added: earlier tokens may be shared with other sequences.

        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: the sequence has no slots for these tokens.
        """
        table = self.find(sequence_id)
        slots = self._list_slots(table, position, position + len(key))
        self.storage.write(layer, slots, key, value)

    def read(self, layer: int, sequence_id: SequenceId, num_tokens: int) -> tuple[Any, Any]:
        """Return copies of K and V of the first `num_tokens`, each (num_tokens, num_heads, head_dim)."""
        return self.storage.read(layer, self._list_slots(self.find(sequence_id), 0, num_tokens))

    # ---- internals -------------------------------------------------------------------------------

    def _list_slots(self, table: SequencePageTable, start: int, stop: int) -> Any:
        if not 0 <= start <= stop <= table.length:
            raise InvalidArgumentError(
                f"sequence {table.sequence_id} has {table.length} tokens; [{start}, {stop}) is out of range"
            )
        return list_slots(table.blocks, start, stop, self.block_size)

    def _extend(self, table: SequencePageTable, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        table.num_tokens = table.length + num_tokens
        if self.manager.allocate_slots(table, num_tokens) is None:
            table.num_tokens = table.length
            raise PoolExhaustedError(
                f"{num_tokens} tokens of sequence {table.sequence_id} do not fit: "
                f"{self.manager.get_num_free_blocks()} blocks are free of {self.total_blocks}; "
                "free_sequence() another sequence first"
            )
        table.num_computed_tokens += num_tokens
        self.storage.apply_moves(
            [BlockMove(*map(_to_own_id, move)) for move in self.manager.take_block_copies()]
        )
        table.blocks = [_to_own_id(block_id) for block_id in self.manager.get_block_ids(table.request_id)]


def _to_own_id(block_id: BlockId) -> BlockId:
    """Return the id of one of the manager's blocks, without its null block."""
    return BlockId(block_id - 1)
