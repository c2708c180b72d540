"""`KVCacheAllocator`: K and V of sequences by number and position, in blocks that sequences can share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kv_pool.core.arguments import as_int
from kv_pool.errors import InvalidArgumentError, OutOfBlocksError, PoolExhaustedError, UnknownSequenceError
from kv_pool.ids import BlockMove
from kv_pool.integrations.block_space_manager import BlockSpaceManager
from kv_pool.manager.positions import find_place, list_slots
from kv_pool.replay.capacity import ModelKV, count_blocks
from kv_pool.storage.kv_storage import KVStorage


class SequencePageTable:
    """Where the tokens of one sequence are. A live view; the allocator changes it.

    Attributes:
        sequence_id, block_size: as given to the allocator.
        length: tokens that have slots.
        blocks: ids in the order of the tokens.
    """

    def __init__(self, sequence_id: int, block_size: int) -> None:
        self.sequence_id = sequence_id
        self.seq_id = sequence_id  # the name that a BlockSpaceManager reads
        self.block_size = block_size
        self.length = 0
        self.blocks: list[int] = []

    def __repr__(self) -> str:
        return f"<SequencePageTable {self.sequence_id}: {self.length} tokens in blocks {self.blocks}>"

    def get_token_ids(self) -> range:
        """One number for each token: only how many there are matters."""
        return range(self.length)

    def get_seqs(self) -> list[SequencePageTable]:
        """The sequence as a group of one."""
        return [self]

    def get_physical_location(self, virtual_position: int) -> tuple[int, int]:
        """Return the block of a token and the token's offset in it.

        Raises:
            InvalidArgumentError: a `ValueError`: no token of the sequence is there.
        """
        if not 0 <= virtual_position < self.length:
            raise InvalidArgumentError(
                f"position {virtual_position} of sequence {self.sequence_id} is not one of its "
                f"{self.length} tokens"
            )
        return find_place(self.blocks, virtual_position, self.block_size)

    def get_all_blocks(self) -> list[int]:
        """Return the ids of the sequence's blocks in the order of its tokens."""
        return list(self.blocks)


class KVCacheAllocator:
    """Blocks of K and V for sequences that grow, fork and end; ids from 0 to total_blocks - 1.

        >>> from kv_pool.integrations.sequence_allocator import KVCacheAllocator
        >>> allocator = KVCacheAllocator(total_blocks=8, block_size=4, num_heads=2, head_dim=16)
        >>> table = allocator.allocate_sequence(7, initial_length=6)
        >>> table.blocks, table.get_physical_location(5)
        ([0, 1], (1, 1))
        >>> allocator.extend_sequence(7, additional_tokens=3)
        >>> table.blocks, len(allocator.free_blocks), len(allocator.used_blocks)
        ([0, 1, 2], 5, 3)

    One `BlockSpaceManager` and one `KVStorage` underneath. To share prefixes by content, to schedule and to
    preempt use `KVCacheManager`; under transformers `PagedSequences`.

    Args:
        block_size: tokens per block.
        num_heads, head_dim, num_layers, dtype, device: of K and V, see `KVStorage.allocate`.
        library: "torch" for tensors on the CPU as well; by default NumPy arrays there.

    Attributes:
        manager, storage: block tables and bytes. A block's id in both is the one here.
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
        self.manager = BlockSpaceManager(block_size, total_blocks, 0, watermark=0.0)
        self.total_blocks = self.manager.num_total_gpu_blocks
        self.block_size = self.manager.block_size
        self.storage = KVStorage.allocate(
            self.total_blocks,
            self.block_size,
            num_layers,
            num_heads,
            head_dim,
            dtype=dtype,
            device=device,
            library=library,  # type: ignore[arg-type]
        )
        self._tables: dict[int, SequencePageTable] = {}

    @staticmethod
    def count_blocks(
        memory_bytes: float,
        block_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype_bytes: int = 2,
    ) -> int:
        """Return how many blocks of K and V, of all layers, fit into so much memory.

            >>> from kv_pool.integrations.sequence_allocator import KVCacheAllocator
            >>> KVCacheAllocator.count_blocks(24 * 2**30 * 0.7, 16, num_layers=32, num_heads=32, head_dim=128)
            2150

        Raises:
            InvalidArgumentError: not even one does.
        """
        model = ModelKV(num_layers, num_heads, head_dim, dtype_bytes=dtype_bytes)
        # Without a null block, which ids from 0 on do without.
        return count_blocks(int(memory_bytes) + model.count_block_bytes(block_size), block_size, model)

    # ---- looking ---------------------------------------------------------------------------------

    @property
    def sequence_tables(self) -> Mapping[int, SequencePageTable]:
        """The sequences by number, read-only."""
        return MappingProxyType(self._tables)

    @property
    def used_blocks(self) -> set[int]:
        """Ids of blocks that sequences hold. O(held blocks)."""
        return {block_id for table in self._tables.values() for block_id in table.blocks}

    @property
    def free_blocks(self) -> set[int]:
        """Ids of all other blocks. O(blocks)."""
        return set(range(self.total_blocks)) - self.used_blocks

    def get_utilization(self) -> float:
        """Return the share of the slots in used blocks that hold a token, 0 to 1; 1.0 where none is used."""
        # Of a shared block the fullest use counts.
        filled: dict[int, int] = {}
        for table in self._tables.values():
            for index, block_id in enumerate(table.blocks):
                num_tokens = min(self.block_size, table.length - index * self.block_size)
                filled[block_id] = max(filled.get(block_id, 0), num_tokens)
        return sum(filled.values()) / (len(filled) * self.block_size) if filled else 1.0

    # ---- sequences -------------------------------------------------------------------------------

    def allocate_sequence(self, sequence_id: int, initial_length: int = 0) -> SequencePageTable:
        """Begin a sequence with slots for so many tokens.

        Raises:
            PoolExhaustedError: a `MemoryError`: too few blocks are free.
            InvalidArgumentError: the sequence exists, or a negative length. Nothing has changed.
        """
        sequence_id = as_int("sequence_id", sequence_id)
        if sequence_id in self._tables:
            raise InvalidArgumentError(f"sequence {sequence_id} exists already; free_sequence() it first")
        table = SequencePageTable(sequence_id, self.block_size)
        self._extend(table, as_int("initial_length", initial_length))
        self._tables[sequence_id] = table
        return table

    def extend_sequence(self, sequence_id: int, additional_tokens: int) -> None:
        """Give slots to more tokens behind those of the sequence.

        A block that another sequence shares is copied before new tokens are written to it.
        Raises:
            UnknownSequenceError, PoolExhaustedError, InvalidArgumentError: no such sequence, too few blocks
                are free, a negative number. Nothing has changed.
        """
        self._extend(self.find(sequence_id), as_int("additional_tokens", additional_tokens))

    def fork_sequence(self, parent_id: int, child_id: int) -> SequencePageTable:
        """Begin a sequence with the tokens of another one, in the same blocks.

        Raises:
            UnknownSequenceError, InvalidArgumentError: no such parent; the child exists. Nothing has changed.
        """
        parent = self.find(parent_id)
        child = SequencePageTable(as_int("child_id", child_id), self.block_size)
        if child.sequence_id in self._tables:
            raise InvalidArgumentError(f"sequence {child_id} exists already; free_sequence() it first")
        child.length = parent.length
        if parent.length:
            self.manager.fork(parent, child)
            child.blocks = self.manager.get_block_table(child)
        self._tables[child.sequence_id] = child
        return child

    def free_sequence(self, sequence_id: int) -> None:
        """End a sequence; what no other one shares is free.

        Raises:
            UnknownSequenceError: there is no such sequence: freed twice?
        """
        table = self.find(sequence_id)
        self.manager.free(table)
        del self._tables[table.sequence_id]

    def find(self, sequence_id: int) -> SequencePageTable:
        """Return the sequence's table. Raises UnknownSequenceError."""
        table = self._tables.get(as_int("sequence_id", sequence_id))
        if table is None:
            raise UnknownSequenceError(f"there is no sequence {sequence_id}; allocate_sequence() it first")
        return table

    # ---- K and V ---------------------------------------------------------------------------------

    def write(self, layer: int, sequence_id: int, position: int, key: Any, value: Any) -> None:
        """Store K and V of the tokens from `position` on, each (num_tokens, num_heads, head_dim).

        Write tokens once, those that were last added: earlier ones may be shared with other sequences.
        Raises:
            UnknownSequenceError, InvalidArgumentError: no such sequence, or no slots for these tokens.
        """
        table = self.find(sequence_id)
        slots = self._list_slots(table, position, position + len(key))
        self.storage.write(layer, slots, key, value)

    def read(self, layer: int, sequence_id: int, num_tokens: int) -> tuple[Any, Any]:
        """Return K and V of the first `num_tokens` tokens, each (num_tokens, num_heads, head_dim), copied."""
        return self.storage.read(layer, self._list_slots(self.find(sequence_id), 0, num_tokens))

    # ---- inside ----------------------------------------------------------------------------------

    def _list_slots(self, table: SequencePageTable, start: int, stop: int) -> Any:
        if not 0 <= start <= stop <= table.length:
            raise InvalidArgumentError(
                f"sequence {table.sequence_id} has {table.length} tokens, not those from {start} to {stop}"
            )
        return list_slots(table.blocks, start, stop, self.block_size)

    def _extend(self, table: SequencePageTable, num_tokens: int) -> None:
        if num_tokens < 0:
            raise InvalidArgumentError(f"{num_tokens} tokens; a number of tokens is 0 or more")
        copies: Sequence[tuple[int, int]] = ()
        if num_tokens == 0:
            return
        is_new = table.length == 0
        table.length += num_tokens
        try:
            if is_new:
                self.manager.allocate(table)
            else:
                copies = self.manager.append_slots(table)
        except OutOfBlocksError as error:
            table.length -= num_tokens
            num_free = self.manager.get_num_free_gpu_blocks()
            raise PoolExhaustedError(
                f"{num_tokens} tokens of sequence {table.sequence_id} do not fit: {num_free} blocks are free "
                f"of {self.total_blocks}; free_sequence() another one first"
            ) from error
        self.storage.apply_moves([BlockMove(*pair) for pair in copies])
        table.blocks = self.manager.get_block_table(table)
